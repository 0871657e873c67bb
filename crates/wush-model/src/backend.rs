//! The seam between the decoder and a device: a dozen coarse operations over one sequence's activations.
//!
//! The decoder in `decoder.rs` is written once over [`Backend`]; `cpu` implements it here, CUDA elsewhere. Shapes are
//! checked by the decoder against the [`ModelSpec`](crate::spec::ModelSpec) before any operation runs.

use wush_format::tensor_file::TensorView;

use crate::rope::RopeTable;
use crate::spec::Activation;

/// A device that runs the forward pass. Activations are `[tokens, width]`, row-major.
pub trait Backend: Sync {
    /// Activations on the device.
    type Tensor: Send + Sync;
    /// A matrix `[out, in]` on the device.
    type Matrix: Send + Sync;
    /// A vector on the device.
    type Vector: Send + Sync;

    /// Rows `rows` of a stored matrix, widened for this device.
    fn matrix(&self, view: TensorView<'_>, rows: std::ops::Range<usize>) -> Self::Matrix;
    /// Elements `rows` of a stored vector, plus `add` (1 for norms that multiply by 1 + w).
    fn vector(&self, view: TensorView<'_>, rows: std::ops::Range<usize>, add: f32) -> Self::Vector;
    /// Per-head square matrices `[n_heads, d, d]` for [`Backend::transform_heads`].
    fn head_matrices(&self, n_heads: usize, dim: usize, data: &[f32]) -> Self::Matrix;

    /// `scale * table[ids]`; `table` is `[vocab, hidden]` as stored and is never widened whole.
    fn embed(&self, table: TensorView<'_>, ids: &[u32], scale: f32) -> Self::Tensor;
    /// RMS norm of every row.
    fn norm(&self, x: &Self::Tensor, weight: &Self::Vector, eps: f32) -> Self::Tensor;
    /// `x Wᵀ + b`.
    fn linear(&self, x: &Self::Tensor, weight: &Self::Matrix, bias: Option<&Self::Vector>) -> Self::Tensor;
    /// In place: RMS norm of each head's d coordinates (if any), then RoPE (if any).
    fn head_norm_rope(
        &self,
        x: &mut Self::Tensor,
        head_dim: usize,
        norm: Option<(&Self::Vector, f32)>,
        rope: Option<&RopeTable>,
    );
    /// Causal attention over one whole sequence: `[tokens, n_heads * d]`.
    fn attention(&self, q: &Self::Tensor, k: &Self::Tensor, v: &Self::Tensor, shape: &AttentionShape) -> Self::Tensor;
    /// `act(x Gᵀ + b_g) * (x Uᵀ + b_u)`, then `Dᵀ` and its bias.
    fn gated_mlp(&self, x: &Self::Tensor, mlp: &Mlp<'_, Self>, activation: Activation) -> Self::Tensor
    where
        Self: Sized;
    /// `x += y`.
    fn add(&self, x: &mut Self::Tensor, y: &Self::Tensor);
    /// Head n's coordinates become `matrices[n / group] · x` (group = heads of x over matrices).
    fn transform_heads(&self, x: &Self::Tensor, matrices: &Self::Matrix, head_dim: usize) -> Self::Tensor;

    /// `into[h] += Σ_t Σ_g x_{t,(h,g)} x_{t,(h,g)}ᵀ`, f64 `[n_groups, d, d]` full symmetric; products and sums in f64,
    /// positions in order.
    fn gram(&self, x: &Self::Tensor, n_groups: usize, head_dim: usize, into: &mut [f64]);
    /// `into[j] += Σ_t x_{t,j}`, f64.
    fn column_sum(&self, x: &Self::Tensor, into: &mut [f64]);
    /// Logits of rows `rows`: `[rows, vocab]`, f32 on the host. `table` is `[vocab, hidden]` as stored.
    fn logits(&self, x: &Self::Tensor, rows: std::ops::Range<usize>, table: TensorView<'_>) -> Vec<f32>;
    /// Copies to the host, `[tokens * width]`.
    fn to_host(&self, x: &Self::Tensor) -> Vec<f32>;
}

/// The gated MLP's weights.
pub struct Mlp<'a, B: Backend> {
    /// `[intermediate, hidden]`.
    pub gate: &'a B::Matrix,
    /// `[intermediate, hidden]`.
    pub up: &'a B::Matrix,
    /// `[hidden, intermediate]`.
    pub down: &'a B::Matrix,
    /// Biases of the three.
    pub biases: [Option<&'a B::Vector>; 3],
}

/// Shape and constants of one attention call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Query heads.
    pub n_heads: usize,
    /// KV heads.
    pub n_kv_heads: usize,
    /// Head dimension.
    pub head_dim: usize,
    /// Sliding window, in keys.
    pub window: Option<usize>,
    /// Multiplies q·k.
    pub scale: f32,
    /// Softcap of the logits.
    pub softcap: Option<f32>,
}
