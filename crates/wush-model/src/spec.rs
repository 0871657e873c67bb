//! What a family file makes of a `config.json`: the shapes, the constants and the tensor roles of one decoder.
//!
//! Everything downstream (forward, statistics, fold, inspect) reads a [`ModelSpec`] and never a config key or a tensor
//! name of its own.

use std::ops::Range;

use crate::backend::AttentionShape;
use crate::rope::RopeSpec;

/// A decoder: embedding, layers, final norm, output head.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSpec {
    /// Registry name of the family ("llama", "qwen3", …).
    pub family: &'static str,
    /// Width of the residual stream, d_model.
    pub hidden_size: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Longest position that the configuration claims.
    pub max_position_embeddings: usize,
    /// `[vocab, hidden]`.
    pub embedding: TensorSlice,
    /// Multiplies the embedding's rows (Gemma: sqrt(hidden), which the reference rounds to its compute type, here f32); 1 elsewhere.
    pub embedding_scale: f32,
    /// Norm before the output head.
    pub final_norm: NormSpec,
    /// `[vocab, hidden]`; the embedding itself when tied.
    pub lm_head: TensorSlice,
    /// Logits become `cap * tanh(logits / cap)`.
    pub final_logit_softcap: Option<f32>,
    /// In order; the index is the global layer id.
    pub layers: Vec<LayerSpec>,
}

/// One decoder layer. With `x` the residual stream:
/// `x += post(attn(pre(x)))`, then `x += post(mlp(pre(x)))`; an absent norm is the identity.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSpec {
    /// Norm before attention (absent in OLMo 2).
    pub attn_pre_norm: Option<NormSpec>,
    /// Attention.
    pub attn: AttentionSpec,
    /// Norm of the attention output, before it is added (Gemma 3, OLMo 2).
    pub attn_post_norm: Option<NormSpec>,
    /// Norm before the MLP.
    pub mlp_pre_norm: Option<NormSpec>,
    /// Gated MLP.
    pub mlp: MlpSpec,
    /// Norm of the MLP output, before it is added.
    pub mlp_post_norm: Option<NormSpec>,
}

/// Grouped-query attention. Query head n reads KV head `n / (n_heads / n_kv_heads)`.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionSpec {
    /// Number of query heads.
    pub n_heads: usize,
    /// Number of KV heads; divides `n_heads`.
    pub n_kv_heads: usize,
    /// Head dimension d of queries, keys and values.
    pub head_dim: usize,
    /// `[n_heads * d, hidden]`.
    pub q: Projection,
    /// `[n_kv_heads * d, hidden]`.
    pub k: Projection,
    /// `[n_kv_heads * d, hidden]`.
    pub v: Projection,
    /// `[hidden, n_heads * d]`.
    pub o: Projection,
    /// Norm of the queries, before RoPE.
    pub q_norm: QkNorm,
    /// Norm of the keys, before RoPE.
    pub k_norm: QkNorm,
    /// Rotary embedding; none in a layer without positions.
    pub rope: Option<RopeSpec>,
    /// A query at t reads keys `t - window + 1 ..= t`; all of `..= t` when none.
    pub window: Option<usize>,
    /// Multiplies q·k, usually d^-1/2.
    pub scale: f32,
    /// Attention logits become `cap * tanh(logits / cap)`.
    pub logit_softcap: Option<f32>,
}

impl AttentionSpec {
    /// What the attention product needs to know.
    pub fn shape(&self) -> AttentionShape {
        AttentionShape {
            n_heads: self.n_heads,
            n_kv_heads: self.n_kv_heads,
            head_dim: self.head_dim,
            window: self.window,
            scale: self.scale,
            softcap: self.logit_softcap,
        }
    }
}

/// `y = W x + b`.
#[derive(Debug, Clone, PartialEq)]
pub struct Projection {
    /// `[out, in]`.
    pub weight: TensorSlice,
    /// `[out]`.
    pub bias: Option<TensorSlice>,
}

/// Normalization of queries or keys.
#[derive(Debug, Clone, PartialEq)]
pub enum QkNorm {
    /// None.
    None,
    /// Over each head's d coordinates (Qwen3, Gemma 3).
    PerHead(NormSpec),
    /// Over the whole projection before the head split (OLMo 2).
    FullWidth(NormSpec),
}

/// RMS norm (Eq. 10): `x / sqrt(mean(x²) + eps) * multiplier`.
#[derive(Debug, Clone, PartialEq)]
pub struct NormSpec {
    /// `[width]`.
    pub weight: TensorSlice,
    /// Added under the root.
    pub eps: f32,
    /// Whether the multiplier is `1 + w` (Gemma) instead of `w`.
    pub plus_one: bool,
}

/// `down(act(gate x) * up x)`.
#[derive(Debug, Clone, PartialEq)]
pub struct MlpSpec {
    /// `[intermediate, hidden]`.
    pub gate: Projection,
    /// `[intermediate, hidden]`.
    pub up: Projection,
    /// `[hidden, intermediate]`.
    pub down: Projection,
    /// Gate activation.
    pub activation: Activation,
}

/// Activation of the gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// x · sigmoid(x).
    Silu,
    /// The tanh approximation of GELU.
    GeluTanh,
    /// Exact GELU.
    Gelu,
}

/// A tensor, or the rows of a fused one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSlice {
    /// Name in the checkpoint.
    pub name: String,
    /// Rows of the first axis that belong to this role.
    pub rows: Range<usize>,
    /// Columns (1 for a vector).
    pub cols: usize,
    /// Rows of the whole tensor as stored.
    pub total_rows: usize,
}

impl TensorSlice {
    /// A whole matrix `[rows, cols]`.
    pub fn matrix(name: impl Into<String>, rows: usize, cols: usize) -> Self {
        Self { name: name.into(), rows: 0..rows, cols, total_rows: rows }
    }

    /// A whole vector `[len]`.
    pub fn vector(name: impl Into<String>, len: usize) -> Self {
        Self::matrix(name, len, 1)
    }

    /// The same tensor, rows `rows` only.
    pub fn rows(mut self, rows: Range<usize>) -> Self {
        self.rows = rows;
        self
    }
}

impl ModelSpec {
    /// Whether every softmax stays the same when one number is added to all of a query's `scale · q·k`: what key centring
    /// relies on. A softcap comes in between; learned sinks, which would also break it, are refused with their families.
    pub fn is_shift_invariant(&self) -> bool {
        self.layers.iter().all(|layer| layer.attn.logit_softcap.is_none())
    }

    /// Longest sequence whose first `n_tokens` are computed as they are alone, in every layer; no bound when none.
    pub fn same_rope_up_to(&self, n_tokens: usize) -> Option<usize> {
        self.layers.iter().filter_map(|layer| layer.attn.rope.as_ref()?.same_up_to(n_tokens)).min()
    }

    /// Every tensor slice that the forward reads, for a check against the checkpoint before work begins.
    pub fn slices(&self) -> Vec<&TensorSlice> {
        let mut all = vec![&self.embedding, &self.lm_head, &self.final_norm.weight];
        all.extend(self.layers.iter().flat_map(LayerSpec::slices));
        all
    }
}

impl LayerSpec {
    /// Every tensor slice of the layer.
    pub fn slices(&self) -> impl Iterator<Item = &TensorSlice> {
        let (attn, mlp) = (&self.attn, &self.mlp);
        let norms = [&self.attn_pre_norm, &self.attn_post_norm, &self.mlp_pre_norm, &self.mlp_post_norm];
        let head_norms = [&attn.q_norm, &attn.k_norm].into_iter().filter_map(|norm| match norm {
            QkNorm::PerHead(norm) | QkNorm::FullWidth(norm) => Some(norm),
            QkNorm::None => None,
        });
        let projections = [&attn.q, &attn.k, &attn.v, &attn.o, &mlp.gate, &mlp.up, &mlp.down];
        let of_projections = projections.into_iter().flat_map(|p| std::iter::once(&p.weight).chain(&p.bias));
        norms.into_iter().flatten().chain(head_norms).map(|norm| &norm.weight).chain(of_projections)
    }
}
