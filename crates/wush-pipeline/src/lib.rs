//! The order of the stages: calibrate → solve → fold → verify, each also a command of its own, with resume.
//!
//! Enters: a typed request and an [`request::Environment`]. Leaves: files that are whole or absent, and a report. This is
//! the only crate that knows the order of the stages; start reading in `convert.rs`. It computes nothing itself but the
//! comparison of two models' logits (`verify.rs`), and prints nothing.
//!
//! ```
//! use wush_pipeline::request::{DeviceChoice, SolveSettings, Preset};
//! use wush_pipeline::plan::SolvePlan;
//!
//! // Raw options become a validated plan, once.
//! let settings = SolveSettings::of_preset("wush", Preset::Default);
//! assert!(SolvePlan::new(&settings)?.kind.needs_statistics);
//! assert!(SolvePlan::new(&SolveSettings { damping: Some(-1.0), ..settings }).is_err());
//! # assert!("cuda:0".parse::<DeviceChoice>().is_ok());
//! # Ok::<(), wush_pipeline::PipelineError>(())
//! ```

pub mod card;
pub mod memory;
pub mod plan;
pub mod report;
pub mod request;
pub mod schema;
pub mod verify;

mod bench;
mod bundle;
mod cached;
mod calibrate;
mod candidates;
mod convert;
mod demo;
mod device;
mod doctor;
mod error;
mod eval;
mod evaluation;
mod export;
mod generate;
mod human;
mod inspect;
mod merge;
mod model;
mod notes;
mod page;
mod paths;
mod recon;
mod sensitivity;
mod serve;
mod solve;
mod unfold;
mod work;

pub use bench::{
    BenchCalibrateReport, BenchCalibrateRequest, BenchKernelsReport, BenchKernelsRequest, CeilingsReport, KernelRow,
    SequenceRow, StageRow, bench_calibrate, bench_kernels, shape_names,
};
pub use calibrate::calibrate;
pub use convert::{convert, fold};
pub use demo::demo;
pub use device::Device;
pub use doctor::{DeviceReport, DoctorReport, LibraryReport, doctor};
pub use error::{Kept, PipelineError, Result};
pub use eval::eval_ppl;
pub use export::{DEFAULT_EXPORT_FORMAT, export, export_formats};
pub use generate::{DEFAULT_CHUNK, DEFAULT_MAX_NEW_TOKENS, TextSink, generate};
pub use human::{counted, human_bits, human_time, ratio, shell_word};
pub use inspect::inspect;
pub use merge::merge;
pub use model::{HeadShape, Model};
pub use notes::{describe_allotment, describe_bits, describe_gain, describe_solve, describe_solves};
pub use page::{AsPage, write_page};
pub use recon::eval_recon;
pub use serve::{DEFAULT_HOST, DEFAULT_PORT, serve};
pub use solve::solve;
pub use unfold::unfold;
pub use wush_format::manifest;
pub use wush_format::monitor::Monitor;
pub use wush_format::text::{human_bytes, printable};
pub use wush_inspect as audit;

/// The tool and its version, as files state it.
pub const TOOL: &str = concat!("wush ", env!("CARGO_PKG_VERSION"));

/// Most threads that may be asked for: more than any machine that this was made for has cores.
const MAX_THREADS: usize = 1024;

/// Sets the number of CPU threads of the process; one a core when none is given. Results do not depend on it.
///
/// # Errors
/// `Option` for 0; when the pool cannot be made.
pub fn use_threads(n_threads: Option<usize>) -> Result<()> {
    let Some(n_threads) = n_threads else { return Ok(()) };
    let wrong = |found: String| PipelineError::Option {
        option: "--threads",
        expected: format!("a number of threads that the system can start, from 1 to {MAX_THREADS}"),
        found,
    };
    if !(1..=MAX_THREADS).contains(&n_threads) {
        return Err(wrong(n_threads.to_string()));
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads).build_global();
    pool.map_err(|e| wrong(format!("{n_threads} ({e})")))
}
