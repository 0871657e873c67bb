//! What wush reads and writes on disk, and how: safetensors files treated as hostile input, atomic output,
//! SHA-256, the transforms file, the bundle's sidecars and its manifest.
//!
//! Enters: paths and bytes. Leaves: typed values, and files that are either whole or absent. Knows nothing of models,
//! statistics or solvers, and keeps a small dependency tree, since the runtime stands on it.

pub mod atomic;
pub mod bundle;
pub mod hash;
pub mod json;
mod layers;
pub mod manifest;
pub mod monitor;
pub mod tensor_file;
pub mod transforms;

mod error;
pub use error::{FormatError, Result};
