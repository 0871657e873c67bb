//! Transforms in the files of servers that have a format of their own.
//!
//! Enters: a bundle's key sidecar, or a transforms file. Leaves: rotation checkpoints of OSCAR's 2-bit KV cache, as its server and
//! those that follow it read them (`oscar.rs`, docs/formats.md). Such a file holds one orthogonal matrix for keys and queries and
//! one for values; transforms that it cannot hold exactly are refused. Knows nothing of how they were made, and reads no pickle.
//!
//! ```
//! use std::collections::BTreeMap;
//! use wush_export::{Format, Rotations};
//! use wush_format::bundle::{KeyLayer, KeySidecar};
//! use wush_format::hash::Sha;
//!
//! let (swap, model_hash) = (vec![0.0, 1.0, 1.0, 0.0], Sha::of(b"model"));
//! let key = KeyLayer::new(1, 2, swap.clone(), swap.clone());
//! let keys = KeySidecar { layers: BTreeMap::from([(0, key)]), model_hash };
//!
//! // A bundle's values lie in its weights: whatever their transform, the server has nothing to rotate.
//! let rotations = Rotations::of_bundle(&keys, "hadamard")?;
//! let dir = tempfile::tempdir()?;
//! assert_eq!(Format::find("oscar").expect("registered").write(&rotations, dir.path())?, 1);
//! assert!(dir.path().join(wush_export::KEY_FILE).is_file());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod error;
mod oscar;
mod pickle;
mod rotation;
mod torch;

pub use error::{ExportError, Result};
pub use oscar::{FORMATS, Format, KEY_FILE, VALUE_FILE};
pub use rotation::{HeadRotations, LayerRotations, ORTHOGONALITY_TOL, Role, Rotations};
pub use torch::{Tensor, Value, write_torch_file};
