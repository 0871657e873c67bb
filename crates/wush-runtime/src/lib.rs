//! What a server links: key transforms after RoPE, and a paged, packed, windowed KV cache with attention computed on the packed
//! codes (Algorithm 2 of the WUSH-KV paper).
//!
//! Enters: a bundle's key sidecar; queries, keys and values of any chunk of any batch, in f32. Leaves: attention outputs, and
//! a cache that can be forked, taken back, saved and loaded. Knows nothing of models, tokens, statistics or solvers.
//!
//! ```
//! use wush_quant::{Method, Role, ScaleDtype};
//! use wush_runtime::{CacheConfig, Chunk, KvCache, LayerConfig, Part, Precision, Windows};
//!
//! // One layer, 4 query heads over 2 KV heads of 64 coordinates, keys and values at 2 bits outside the windows.
//! let method: Method = "oscar".parse()?;
//! let stored = |role| Precision::new(2, &method, role, ScaleDtype::Bf16);
//! let layer = LayerConfig::new(4, 2, 64).stored(stored(Role::Key)?, stored(Role::Value)?);
//! let windows = Windows { sink: 4, keep: 32, flush: 8 };
//! let mut cache = KvCache::new(CacheConfig { windows, ..CacheConfig::new(vec![layer]) })?;
//!
//! // A prompt of 100 tokens in one chunk, then one token more.
//! let sequence = cache.add();
//! let numbers = |n: usize| (0..n).map(|i| (i as f32 * 0.7).sin()).collect::<Vec<_>>();
//! for n_tokens in [100, 1] {
//!     let (queries, kv) = (numbers(n_tokens * 4 * 64), numbers(n_tokens * 2 * 64));
//!     let mut out = vec![0.0; n_tokens * 4 * 64];
//!     let chunk = Chunk { queries: &queries, keys: &kv, values: &kv };
//!     cache.step(0, &[Part { sequence, n_tokens }], chunk, &mut out)?;
//! }
//! assert_eq!(cache.len(sequence, 0)?, 101);
//! assert_eq!(cache.quantized(sequence, 0)?, 4..68);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # With a bundle
//!
//! [`KvCache::of_bundle`] makes a cache with all that a bundle has for it, and gives the key transforms: `T_K (k − μ)` before
//! [`KvCache::step`], `T_K^{-T} q` beside it. It refuses sidecars that do not fit the bundle's manifest or the model; a cache that was
//! saved under other transforms, mean keys, feedback or positions ([`CacheConfig::rope`]) is refused, too. A bundle of the default preset is
//! made for an encoder with error feedback: [`Method::for_encoder`](wush_quant::Method::for_encoder) names the quantizer that suits it.
//! Without feedback such a bundle loses more than one of `--preset paper`. `examples/decoder.rs` does all of it.
//!
//! # Features
//!
//! `parallel` spreads batches over rayon's threads (without it one thread does everything); `candle` has the cache for models that are
//! written with candle. Both are off by default.
//!
//! # Where things are
//!
//! `windows` says which tokens are quantized when, `layer` moves them, `attention` reads them, `cache` does it for batches.
//! The transforms come before: `T_K k` and `T_K^{-T} q` ([`KeyTransforms`]); the values' transform is folded into the model.
//!
//! # Another device
//!
//! The seam is [`KvCache`]'s three batch operations, [`append`](KvCache::append), [`attend`](KvCache::attend) and
//! [`flush`](KvCache::flush), each one launch over `(part, KV head)`. What a device implementation shares with this one is
//! everything that is not a loop over numbers: [`Windows::n_to_pack`] (which tokens when), pages of
//! [`CacheConfig::page_tokens`] records per layer and KV head, whose bytes are [`wush_quant::Layout`]'s on every device
//! (32-bit words that a warp reads coalesced), and the order of an attention: sink, pages, recent window, in blocks under one
//! online softmax. Its tests are this crate's.

mod attention;
mod cache;
#[cfg(feature = "candle")]
pub mod candle;
mod config;
mod error;
mod file;
mod kernels;
mod layer;
mod memory;
mod plan;
mod rows;
mod threads;
mod transforms;
mod windows;

pub use cache::{Chunk, KvCache, Part, SequenceId};
pub use config::{CacheConfig, FullDtype, LayerConfig, Precision};
pub use error::{Result, RuntimeError};
pub use file::CACHE_VERSION;
pub use memory::Memory;
pub use transforms::KeyTransforms;
pub use windows::Windows;
