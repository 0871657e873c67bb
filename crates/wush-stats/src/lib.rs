//! Second-order statistics of keys, queries and values (Eq. 4, Algorithm 1 lines 1 to 6): what the solver needs to know of
//! a model and a text, and no more.
//!
//! Enters: post-norm, post-RoPE queries, keys and values from a forward pass, and output projections from a checkpoint.
//! Leaves: f64 sums per layer and KV head, in memory or in a file. Sums only: no activation is kept, nothing is divided,
//! and nothing is solved here. Layers are keyed by their global id and may differ in heads and head dimension.
//!
//! ```
//! use wush_format::hash::Sha;
//! use wush_stats::{LayerStats, STATS_VERSION, Statistics, StatsInfo};
//!
//! let info = StatsInfo {
//!     format_version: STATS_VERSION,
//!     tool: "example".into(),
//!     model_id: "tiny".into(),
//!     model_hash: Sha::of(b"weights"),
//!     family: "llama".into(),
//!     n_heads: 2,
//!     n_kv_heads: 1,
//!     head_dim: 4,
//!     positions: 0,
//!     max_seq_len: 0,
//!     source: "text.txt".into(),
//!     rope_scaling: None,
//!     shift_invariant: true,
//!     attention_hessians: false,
//!     second_pass: false,
//!     device: "cpu".into(),
//!     compute: "f32".into(),
//!     sequence_hashes: vec![],
//! };
//! let statistics = Statistics::from_layers([(0, LayerStats::zeros(1, 4))], info);
//! let path = std::env::temp_dir().join(format!("wush-stats-example-{}.safetensors", std::process::id()));
//! statistics.save(&path)?;
//! assert_eq!(Statistics::load(&path)?, statistics);
//! # std::fs::remove_file(path).ok();
//! # Ok::<(), wush_stats::StatsError>(())
//! ```

mod accumulator;
mod attention;
mod error;
mod file;
mod merge;
mod output_gram;
mod statistics;
mod weighted;

pub use accumulator::Accumulator;
pub use attention::{AttentionHessians, Couplings, attention_hessians, attention_memory};
pub use error::{Result, StatsError};
pub use file::{FORMAT, STATS_VERSION};
pub use output_gram::{couplings, output_gram, output_gram_difference};
pub use statistics::{LayerStats, LayerSums, Statistics, StatsInfo};
pub use weighted::SecondPass;
