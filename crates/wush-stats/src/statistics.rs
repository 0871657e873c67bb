//! The sums themselves, and what they were summed over.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use wush_format::hash::{Sha, sequence_hash};
use wush_format::transforms::HeadMatrices;
use wush_model::observer::Moments;
use wush_model::spec::ModelSpec;

use crate::attention::AttentionHessians;
use crate::file::ROUNDING_REL_TOL;
use crate::{Result, StatsError};

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
    /// Eq. 61's sums of the attention-aware Hessians; none unless they were asked for.
    pub attention: Option<AttentionHessians>,
    /// Σ_t w_t v vᵀ with w_t = n⁻¹ kᵀ (Σ q qᵀ) k; none before a second pass.
    pub weighted_value_gram: Option<HeadMatrices>,
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
            attention: None,
            weighted_value_gram: None,
        }
    }

    /// OSCAR's covariance of keys for head h, up to its scale: the mean of q qᵀ over positions and the group, `[d, d]`.
    pub fn oscar_key(&self, head: usize) -> Vec<f64> {
        self.query_gram.head(head).to_vec()
    }

    /// OSCAR's covariance of values for head h: n⁻¹ Σ_t w_t v_t v_tᵀ with the weights w_t = kᵀ A k, A the mean of q qᵀ, scaled
    /// so that they sum to n; `[d, d]`. None before a second pass; zeros where no query meets a key.
    pub fn oscar_value(&self, head: usize, positions: u64) -> Option<Vec<f64>> {
        let sums = self.weighted_value_gram.as_ref()?.head(head);
        let positions = positions.max(1) as f64;
        // Σ_t kᵀ A k = tr(A Σ k kᵀ).
        let (queries, keys) = (self.query_gram.head(head), self.key_gram.head(head));
        let total = queries.iter().zip(keys).map(|(q, k)| q * k).sum::<f64>() / positions;
        Some(sums.iter().map(|x| if total > 0.0 { x / total } else { 0.0 }).collect())
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

    /// Mean key of head h over n = `positions`, μ = n⁻¹ Σ k, `[d]`; zeros where there are no positions.
    pub fn key_mean(&self, head: usize, positions: u64) -> Vec<f64> {
        let n = positions.max(1) as f64;
        self.head_key_sum(head).iter().map(|sum| sum / n).collect()
    }

    /// What Σ k kᵀ of head h becomes when the mean is taken from every key: Σ (k − μ)(k − μ)ᵀ = Σ k kᵀ − n μ μᵀ, `[d, d]`
    /// row-major.
    ///
    /// All zero where what is left of the trace is no more than the rounding of the sums (2⁻³⁰ of it): every key was
    /// the same then.
    pub fn key_covariance(&self, head: usize, positions: u64) -> Vec<f64> {
        let dim = self.head_dim();
        let (gram, sum, n) = (self.key_gram.head(head), self.head_key_sum(head), positions.max(1) as f64);
        let centered: Vec<f64> = (0..dim * dim).map(|at| gram[at] - sum[at / dim] / n * sum[at % dim]).collect();
        let trace = |matrix: &[f64]| matrix.iter().step_by(dim + 1).sum::<f64>();
        if trace(&centered) > ROUNDING_REL_TOL * trace(gram) { centered } else { vec![0.0; dim * dim] }
    }

    /// ‖Σk‖² / (n Σ‖k‖²) of head h: 1 when all keys are the same, about 1/n when they have no common direction; none without
    /// energy.
    pub fn mean_key_energy(&self, head: usize, positions: u64) -> Option<f64> {
        let energy: f64 = self.key_gram.head(head).iter().step_by(self.head_dim() + 1).sum();
        let square: f64 = self.head_key_sum(head).iter().map(|x| x * x).sum();
        let share = square / (positions as f64 * energy);
        share.is_finite().then_some(share)
    }

    fn head_key_sum(&self, head: usize) -> &[f64] {
        &self.key_sum[head * self.head_dim()..][..self.head_dim()]
    }

    /// The stacks of matrices by their names in the file.
    pub(crate) fn matrices(&self) -> impl Iterator<Item = (&'static str, &HeadMatrices)> {
        let optional = [
            ("key_hessian", self.attention.as_ref().map(|hessians| &hessians.key)),
            ("value_hessian", self.attention.as_ref().map(|hessians| &hessians.value)),
            ("weighted_value_gram", self.weighted_value_gram.as_ref()),
        ];
        let optional = optional.into_iter().filter_map(|(role, matrices)| Some((role, matrices?)));
        [
            ("key_gram", &self.key_gram),
            ("query_gram", &self.query_gram),
            ("value_gram", &self.value_gram),
            ("output_gram", &self.output_gram),
        ]
        .into_iter()
        .chain(optional)
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
    /// Whether every softmax stays the same when one number is added to all of a query's logits: no softcap, no learned
    /// sink. What key centring relies on.
    pub shift_invariant: bool,
    /// Whether the attention-aware Hessians are there (`--hessian attention`).
    pub attention_hessians: bool,
    /// Whether a second pass weighted the values' Gram matrices (`--second-pass oscar`).
    pub second_pass: bool,
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

/// Sums of one layer, as an observer of its own keeps them.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSums {
    /// Of queries, keys and values.
    pub moments: Moments,
    /// Σ_s H_K and Σ_s H_V (Eq. 56, 60), where they are gathered: each `[n_kv, d, d]`.
    pub hessians: Option<[Vec<f64>; 2]>,
}

impl LayerSums {
    /// Adds another's sums over other sequences.
    ///
    /// # Panics
    /// When one has Hessians and the other none: the caller's invariant.
    pub fn add(&mut self, other: &Self) {
        assert_eq!(self.hessians.is_some(), other.hessians.is_some(), "sums of one plan");
        let Moments { query_gram, key_gram, value_gram, key_sum } = &mut self.moments;
        let theirs = &other.moments;
        let moments = [
            (query_gram, &theirs.query_gram),
            (key_gram, &theirs.key_gram),
            (value_gram, &theirs.value_gram),
            (key_sum, &theirs.key_sum),
        ];
        let hessians = self.hessians.iter_mut().flatten().zip(other.hessians.iter().flatten());
        for (sums, parts) in moments.into_iter().chain(hessians) {
            sums.iter_mut().zip(parts).for_each(|(sum, part)| *sum += part);
        }
    }
}

impl Statistics {
    /// All-zero sums in the shapes of a model's layers. Call [`crate::output_gram`] once to add the part that comes from
    /// the weights.
    pub fn new(spec: &ModelSpec, info: StatsInfo) -> Self {
        let zeros = |(id, layer): (usize, &wush_model::spec::LayerSpec)| {
            let (heads, dim) = (layer.attn.n_kv_heads, layer.attn.head_dim);
            let attention = info.attention_hessians.then(|| AttentionHessians::zeros(heads, dim));
            (id, LayerStats { attention, ..LayerStats::zeros(heads, dim) })
        };
        let layers: Vec<_> = spec.layers.iter().enumerate().map(zeros).collect();
        Self::from_layers(layers, info)
    }

    /// Takes over sums that an observer of its own kept in the place of these, `sums` of every layer in order: they are ahead
    /// of these by `sequences`.
    ///
    /// # Errors
    /// `Incomplete` when they are not of every layer, `TooManyPositions`.
    ///
    /// # Panics
    /// When they have other shapes: the caller's invariant.
    pub fn take_over(&mut self, sums: Vec<LayerSums>, sequences: &[Vec<u32>]) -> Result<()> {
        if sums.len() != self.layers.len() {
            return Err(StatsError::Incomplete { layer: sums.len(), expected: sequences.len(), found: 0 });
        }
        for (into, LayerSums { moments, hessians }) in self.layers.values_mut().zip(sums) {
            let Moments { query_gram, key_gram, value_gram, key_sum } = moments;
            into.query_gram.data.copy_from_slice(&query_gram);
            into.key_gram.data.copy_from_slice(&key_gram);
            into.value_gram.data.copy_from_slice(&value_gram);
            into.key_sum.copy_from_slice(&key_sum);
            if let (Some(into), Some([key, value])) = (&mut into.attention, hessians) {
                into.key.data.copy_from_slice(&key);
                into.value.data.copy_from_slice(&value);
            }
        }
        self.count(sequences)
    }

    /// The description now counts these sequences.
    pub(crate) fn count(&mut self, sequences: &[Vec<u32>]) -> Result<()> {
        for ids in sequences {
            let n_tokens = ids.len() as u64;
            self.info.positions = self.info.positions.checked_add(n_tokens).ok_or(StatsError::TooManyPositions)?;
            self.info.max_seq_len = self.info.max_seq_len.max(n_tokens);
            self.info.sequence_hashes.push(sequence_hash(ids));
        }
        Ok(())
    }

    /// Forgets a second pass: its weights are those of the sums that it saw, so whoever adds to these must do it again.
    pub fn drop_second_pass(&mut self) {
        self.info.second_pass = false;
        self.layers.values_mut().for_each(|layer| layer.weighted_value_gram = None);
    }

    /// From finished layer sums by global layer id.
    pub fn from_layers(layers: impl IntoIterator<Item = (usize, LayerStats)>, info: StatsInfo) -> Self {
        Self { layers: layers.into_iter().collect(), info, unfinished: false }
    }
}
