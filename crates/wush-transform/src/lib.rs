//! The transforms of WUSH-KV and what they are worth, in f64.
//!
//! Enters: the second-order statistics of one head, as plain row-major matrices. Leaves: an invertible matrix T, its
//! inverse, and a report. Knows nothing of models, files or devices, and starts no thread: heads are independent, so
//! the caller runs as many at once as it likes and gets the same bytes.
//!
//! ```
//! use wush_transform::{HeadProblem, Role, Settings, find, solve};
//!
//! // A head of d = 2 whose first coordinate is loud (Gram) and whose second is read loudly (Hessian).
//! let problem = HeadProblem::new(&[9.0, 1.0, 1.0, 1.0], &[1.0, 0.0, 0.0, 4.0], 2);
//! let settings = Settings { damping: 0.0, ..Settings::published(0, 0, Role::Key) };
//! let solution = solve(find("wush")?, &problem, &settings)?;
//!
//! let measures = solution.info.measures.expect("there were statistics to measure on");
//! assert!((measures.trace_product_over_bound - 1.0).abs() < 1e-12); // Theorem 3
//! assert!(measures.predicted_gain > 1.0 && measures.imbalance < 1e-12);
//! # Ok::<(), wush_transform::TransformError>(())
//! ```

pub mod hadamard;
pub mod measures;
pub mod registry;
pub mod wush;

mod dense;
mod error;
mod factor;
mod feedback;
mod oscar;
mod pair;
mod random;

pub use error::{Result, TransformError};
pub use factor::{FACTORS, Factor};
pub use feedback::{ErrorFeedback, error_feedback};
pub use hadamard::{hadamard, hadamard_signs};
pub use measures::{HeadMeasures, condition_number, imbalance, measure, sensitivity, theorem3_bound, trace_product};
pub use pair::{NEGATIVE_REL_TOL, SYMMETRY_REL_TOL, rank_rel_tol};
pub use registry::{HeadProblem, Needs, Role, Settings, TRANSFORMS, TransformKind, find, solve};
pub use wush::{PUBLISHED_DAMPING, PUBLISHED_EXPONENT, Solution, SolveInfo, wush, wush_with};

/// Largest dimension accepted: four times the widest head in use, and small enough for a square matrix in memory.
pub const MAX_DIM: usize = 2048;
