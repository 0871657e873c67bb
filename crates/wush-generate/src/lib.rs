//! Tokens from a decoder over the packed, windowed KV cache (Algorithm 2): greedy or sampled.
//!
//! Enters: a decoder whose weights stay in memory, a cache, key transforms, token ids. Leaves: logits, and the token that
//! follows; for one sequence ([`Session`]) or many ([`Batch`]). Knows nothing of text, templates or files.
//!
//! ```
//! use wush_generate::{Sampler, Sampling};
//!
//! let logits = [0.5, 3.0, 1.0];
//! assert_eq!(Sampler::new(Sampling::GREEDY)?.pick(&logits), 1);
//! // Of the two most likely tokens, one by its probability; the same seed gives the same tokens.
//! let sampling = Sampling { temperature: 1.0, top_k: Some(2), ..Sampling::GREEDY };
//! assert_ne!(Sampler::new(sampling)?.pick(&logits), 0);
//! # Ok::<(), wush_generate::GenerateError>(())
//! ```

mod batch;
mod cache;
mod error;
mod sample;
mod session;

pub use batch::{Batch, longest};
pub use cache::{CacheSettings, activation_bytes, bf16_bytes, most_bytes};
pub use error::{GenerateError, Result};
pub use sample::{Sampler, Sampling};
pub use session::Session;
