//! Hugging Face checkpoints, read as hostile input: configuration, shards, index, hub, tokenizer.
//!
//! Enters: a directory or a hub id. Leaves: a [`Checkpoint`] whose every tensor is known to lie inside its shard, and
//! the tokenizer's ids. Interprets no configuration key beyond what it must refuse: what a model *is* belongs to
//! `wush-model`. Writes nothing but the hub's download cache.
//!
//! ```no_run
//! let checkpoint = wush_checkpoint::Checkpoint::open(std::path::Path::new("Qwen3-8B"))?;
//! for name in checkpoint.tensor_names() {
//!     println!("{name}: {:?}", checkpoint.tensor(name)?.shape);
//! }
//! # Ok::<(), wush_checkpoint::CheckpointError>(())
//! ```

pub mod checkpoint;
pub mod hub;
pub mod index;
pub mod tokenizer;

mod error;
mod files;
mod refusals;

pub use checkpoint::{Checkpoint, Shard, weights_hash};
pub use error::{CheckpointError, Result};
