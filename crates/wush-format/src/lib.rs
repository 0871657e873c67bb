//! What wush reads and writes on disk, and how: safetensors files treated as hostile input, atomic output,
//! SHA-256, the transforms file, the bundle's sidecars and its manifest.
//!
//! Enters: paths and bytes. Leaves: typed values, and files that are either whole or absent. Knows nothing of models,
//! statistics or solvers, and keeps a small dependency tree, since the runtime stands on it.
//!
//! ```
//! use std::collections::BTreeMap;
//! use wush_format::hash::hash_file;
//! use wush_format::tensor_file::{NewTensor, TensorFile, write_tensor_file};
//!
//! let dir = tempfile::tempdir()?;
//! let path = dir.path().join("gram.safetensors");
//! let tensors = BTreeMap::from([("layers.0.gram".to_owned(), NewTensor::f64(&[2, 1], &[1.0, 0.5]))]);
//! let (sha, n_bytes) = write_tensor_file(&path, &tensors, &BTreeMap::new())?;
//!
//! assert_eq!(TensorFile::open(&path)?.f64("layers.0.gram", &[2, 1])?, [1.0, 0.5]);
//! assert_eq!(hash_file(&path)?, (sha, n_bytes));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod atomic;
pub mod bundle;
pub mod equivalence;
pub mod guard;
pub mod hash;
pub mod index;
pub mod json;
mod layers;
pub mod manifest;
pub mod monitor;
pub mod seal;
pub mod sidecars;
pub mod tensor_file;
pub mod text;
pub mod transforms;

mod error;
pub use error::{FormatError, Result};
