//! The decoder's forward pass, written once over a dozen coarse operations, and the model families.
//!
//! Enters: a checkpoint and token ids. Leaves: post-norm, post-RoPE queries, keys and values to an observer, and
//! logits. Knows nothing of statistics, transforms or files of wush.

pub mod arch;
pub mod attention;
pub mod backend;
pub mod cpu;
pub mod decoder;
pub mod observer;
pub mod resident;
pub mod rope;
pub mod spec;
pub mod streamed;
pub mod weights;

mod error;
mod layer;

pub use error::{DeviceFailure, ModelError, Result};
