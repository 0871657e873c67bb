//! The sums themselves, and what they were summed over.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use wush_format::hash::Sha;
use wush_format::transforms::HeadMatrices;
use wush_model::spec::ModelSpec;

/// Eq. 4's factor: the stored sums are halves of the Hessians.
const HESSIAN_FACTOR: f64 = 2.0;

/// Sums of one attention layer over all calibration positions, one matrix `[d, d]` a KV head.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerStats {
    /// Σ k kᵀ, after head norm and RoPE.
    pub key_gram: HeadMatrices,
    /// Σ_g Σ q qᵀ over the query heads of the group, after head norm and RoPE.
    pub query_gram: HeadMatrices,
    /// Σ v vᵀ, with the value bias.
    pub value_gram: HeadMatrices,
    /// Σ_g W_O W_Oᵀ over the query heads of the group: of the weights, with no sum over positions.
    pub output_gram: HeadMatrices,
    /// Σ k, `[n_kv, d]`.
    pub key_sum: Vec<f64>,
}

impl LayerStats {
    /// All zeros.
    pub fn zeros(n_kv_heads: usize, head_dim: usize) -> Self {
        let zeros = || HeadMatrices::zeros(n_kv_heads, head_dim);
        Self {
            key_gram: zeros(),
            query_gram: zeros(),
            value_gram: zeros(),
            output_gram: zeros(),
            key_sum: vec![0.0; n_kv_heads * head_dim],
        }
    }

    /// Number of KV heads.
    pub fn n_kv_heads(&self) -> usize {
        self.key_gram.n_heads
    }

    /// Head dimension d.
    pub fn head_dim(&self) -> usize {
        self.key_gram.dim
    }

    /// Eq. 4: the surrogate Hessian of head h's keys, H_K(h) = 2 Σ_g Q_(h,g) Q_(h,g)ᵀ, `[d, d]` row-major.
    ///
    /// Q_(h,g) `[d, S]` are the queries of the g-th query head that reads KV head h; the sum runs over all calibration
    /// positions. All zero where no query reads the head.
    pub fn key_hessian(&self, head: usize) -> Vec<f64> {
        doubled(self.query_gram.head(head))
    }

    /// Eq. 4: the surrogate Hessian of head h's values, H_V(h) = 2 Σ_g W_O(h,g) W_O(h,g)ᵀ, `[d, d]` row-major.
    ///
    /// W_O(h,g) `[d, d_model]` is the row block of the output projection that reads query head (h, g).
    pub fn value_hessian(&self, head: usize) -> Vec<f64> {
        doubled(self.output_gram.head(head))
    }

    /// The four stacks of matrices by their names in the file.
    pub(crate) fn matrices(&self) -> [(&'static str, &HeadMatrices); 4] {
        [
            ("key_gram", &self.key_gram),
            ("query_gram", &self.query_gram),
            ("value_gram", &self.value_gram),
            ("output_gram", &self.output_gram),
        ]
    }
}

fn doubled(half: &[f64]) -> Vec<f64> {
    half.iter().map(|x| HESSIAN_FACTOR * x).collect()
}

/// What statistics were summed over, and how.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StatsInfo {
    /// Layout version of the file, [`crate::STATS_VERSION`].
    pub format_version: u32,
    /// The tool and its version.
    pub tool: String,
    /// Hub id, or the directory's own name for a local checkpoint.
    pub model_id: String,
    /// Hash over the checkpoint's weights.
    pub model_hash: Sha,
    /// Model family in wush's registry.
    pub family: String,
    /// Query heads of the first layer; each layer's tensors state its own KV heads and dimension.
    pub n_heads: usize,
    /// KV heads of the first layer.
    pub n_kv_heads: usize,
    /// Head dimension d of the first layer.
    pub head_dim: usize,
    /// Token positions summed over.
    pub positions: u64,
    /// Longest sequence, in tokens.
    pub max_seq_len: u64,
    /// Calibration source: file name or hub id, without directories of a machine.
    pub source: String,
    /// RoPE scaling asked for, "yarn:4"; none for the checkpoint's own.
    pub rope_scaling: Option<String>,
    /// Device of the forward pass, "cpu".
    pub device: String,
    /// Arithmetic of the forward pass, "f32".
    pub compute: String,
    /// SHA-256 of each sequence's token ids ([`wush_format::hash::sequence_hash`]), in the order summed.
    pub sequence_hashes: Vec<Sha>,
}

/// Statistics of a model over calibration sequences.
#[derive(Debug, Clone, PartialEq)]
pub struct Statistics {
    /// Layer sums by global layer id.
    pub layers: BTreeMap<usize, LayerStats>,
    /// What they were summed over.
    pub info: StatsInfo,
    /// Set while a forward pass is under way: the sums are then ahead of `info`.
    pub(crate) unfinished: bool,
}

impl Statistics {
    /// All-zero sums in the shapes of a model's layers. Call [`crate::output_gram`] once to add the part that comes from
    /// the weights.
    pub fn new(spec: &ModelSpec, info: StatsInfo) -> Self {
        let zeros = |(id, layer): (usize, &wush_model::spec::LayerSpec)| {
            (id, LayerStats::zeros(layer.attn.n_kv_heads, layer.attn.head_dim))
        };
        Self::from_layers(spec.layers.iter().enumerate().map(zeros), info)
    }

    /// From finished layer sums by global layer id.
    pub fn from_layers(layers: impl IntoIterator<Item = (usize, LayerStats)>, info: StatsInfo) -> Self {
        Self { layers: layers.into_iter().collect(), info, unfinished: false }
    }
}
