//! Hugging Face checkpoints, read as hostile input: configuration, shards, index, hub, tokenizer.
//!
//! Enters: a directory or a hub id. Leaves: a [`Checkpoint`] whose every tensor is known to lie inside its shard, and
//! the tokenizer's ids. Interprets no configuration key beyond what it must refuse: what a model *is* belongs to
//! `wush-model`. Writes nothing but the hub's download cache.
//!
//! ```
//! use std::collections::BTreeMap;
//! use wush_checkpoint::Checkpoint;
//! use wush_format::tensor_file::{NewTensor, write_tensor_file};
//!
//! let dir = tempfile::tempdir()?;
//! std::fs::write(dir.path().join("config.json"), r#"{"model_type": "llama"}"#)?;
//! let weights = BTreeMap::from([("lm_head.weight".to_owned(), NewTensor::f32(&[2, 1], &[1.0, 2.0]))]);
//! write_tensor_file(&dir.path().join("model.safetensors"), &weights, &BTreeMap::new())?;
//!
//! let checkpoint = Checkpoint::open(dir.path())?;
//! assert_eq!(checkpoint.tensor_names().collect::<Vec<_>>(), ["lm_head.weight"]);
//! assert_eq!(checkpoint.tensor("lm_head.weight")?.shape, [2, 1]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod chat;
pub mod checkpoint;
pub mod hub;
pub mod stream;
pub mod tokenizer;

mod error;
mod files;
mod refusals;

pub use checkpoint::{Checkpoint, Shard};
pub use error::{CheckpointError, Result};
pub use wush_format::manifest::weights_hash;
