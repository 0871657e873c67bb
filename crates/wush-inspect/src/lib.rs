//! Audits of what wush makes: bundles, transforms, statistics, sidecars; and of plain checkpoints.
//!
//! Enters: a path, and perhaps the checkpoint that a bundle was made from. Leaves: a [`Report`] of checks and numbers, as
//! data, text or one HTML page. What is wrong with the thing inspected is a failed check; an error means that the
//! inspection could not be done. Changes nothing, and trusts nothing that a manifest says about the weights.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let report = wush_inspect::inspect("qwen3-8b-wush".as_ref(), None, &wush_format::monitor::Quiet)?;
//! print!("{}", wush_inspect::to_text(&report));
//! # Ok(())
//! # }
//! ```

mod base;
mod bundle;
mod coordinates;
mod error;
mod extras;
mod files;
mod hessian;
mod html;
mod index;
mod inspect;
mod keys;
mod manifest;
mod metric;
mod number;
pub mod page;
mod report;
mod sidecars;
mod solver;
mod statistics;
mod svg;
mod text;
mod transforms;

pub use error::{InspectError, Result};
pub use html::to_html;
pub use inspect::inspect;
pub use report::{Check, Fact, FoldAudit, HeadAudit, Kind, LayerAudit, Report, Verdict};
pub use solver::head_report;
pub use text::to_text;
