//! What a quantized KV cache costs: errors inside each attention module (Section 5.1) and perplexity (Section 5.2).
//!
//! Enters: a decoder, token sequences, and a cache: transforms and quantizers of every layer. Leaves: numbers. Whole
//! sequences pass through a layer at once ([`cache`]): their keys and values are packed and unpacked with the runtime's
//! codec, and every chunk of queries reads packed and exact tokens as Algorithm 2 has them at that moment.

pub mod allot;
pub mod cache;
pub mod perplexity;
pub mod plot;
pub mod recon;

mod error;
mod windows;

pub use error::{EvalError, Result};
pub use windows::Protocol;
