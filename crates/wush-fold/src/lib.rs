//! Folding of the value transform into a checkpoint (Section 4.2), and its undoing.
//!
//! Enters: an open checkpoint, its spec and the transforms. Leaves: the same files with the value and output projections
//! (and the value bias) in transformed coordinates, the digest of every file read and written, and the measured error
//! of the fold. Decides nothing about where the output goes or whether it is good enough.
//!
//! ```no_run
//! use wush_fold::{FoldDtype, fold};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let checkpoint = wush_checkpoint::Checkpoint::open("Qwen3-8B".as_ref())?;
//! let spec = wush_model::arch::resolve(&checkpoint, None)?;
//! let transforms = wush_format::transforms::Transforms::load("transforms.safetensors".as_ref())?;
//! let staged = wush_format::atomic::StagedDir::create("qwen3-8b-wush".as_ref())?;
//! let outcome =
//!     fold(&checkpoint, &spec, &transforms, staged.path(), FoldDtype::Keep, &wush_format::monitor::Quiet)?;
//! println!("largest relative error of a head: {:.2e}", outcome.report.max_rel_error);
//! staged.commit()?;
//! # Ok(())
//! # }
//! ```

mod block;
mod check;
mod dense;
mod error;
mod first_rounding;
mod fold;
mod header;
mod invert;
mod number;
mod plan;
mod read;
mod repeats;
mod report;
mod source;
mod write;

pub use check::{HeadCheck, Roundings, TransformCheck, check_head, check_transform};
pub use error::{FoldError, Result};
pub use fold::{FoldDtype, FoldOutcome, UnfoldDtype, fold, unfold};
pub use invert::{Inverse, condition_limit, invert};
pub use read::HeadWeights;
pub use report::{FoldReport, HeadError};
pub use source::check_source;
