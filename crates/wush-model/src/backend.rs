//! The seam between the decoder and a device: a dozen coarse operations over one sequence's activations.
//!
//! The decoder in `decoder.rs` is written once over [`Backend`]; `cpu` implements it here, CUDA elsewhere. Shapes are
//! checked by the decoder against the [`ModelSpec`](crate::spec::ModelSpec) before any operation runs.

use rayon::prelude::*;
use wush_format::tensor_file::TensorView;

use crate::error::Result;
use crate::rope::RopeTable;
use crate::spec::Activation;

/// A device that runs the forward pass. Activations are `[tokens, width]`, row-major. Operations fail where the device does: on
/// the CPU none does.
pub trait Backend: Sync {
    /// Whether several sequences are worked on at once, each by a thread of its own: where operations are a thread's own work and
    /// not that of one device behind them.
    const SIDE_BY_SIDE: bool;

    /// Activations on the device.
    type Tensor: Send + Sync;
    /// A matrix `[out, in]` on the device.
    type Matrix: Send + Sync;
    /// A vector on the device.
    type Vector: Send + Sync;
    /// A rotary table on the device.
    type Rope: Send + Sync;

    /// Rows `rows` of a stored matrix, widened for this device.
    fn matrix(&self, view: TensorView<'_>, rows: std::ops::Range<usize>) -> Result<Self::Matrix>;
    /// Elements `rows` of a stored vector, plus `add` (1 for norms that multiply by 1 + w).
    fn vector(&self, view: TensorView<'_>, rows: std::ops::Range<usize>, add: f32) -> Result<Self::Vector>;
    /// cos and sin of some positions.
    fn rope(&self, table: RopeTable) -> Result<Self::Rope>;
    /// Per-head square matrices `[n_heads, d, d]` for [`Backend::transform_heads`].
    fn head_matrices(&self, n_heads: usize, dim: usize, data: &[f32]) -> Result<Self::Matrix>;

    /// `scale * table[ids]`; `table` is `[vocab, hidden]` as stored and is never widened whole.
    fn embed(&self, table: TensorView<'_>, ids: &[u32], scale: f32) -> Result<Self::Tensor>;
    /// RMS norm of every row.
    fn norm(&self, x: &Self::Tensor, norm: RmsNorm<'_, Self>) -> Result<Self::Tensor>
    where
        Self: Sized;
    /// `norm(x) Wᵀ + b` for each projection.
    fn project<const N: usize>(
        &self,
        x: &Self::Tensor,
        norm: Option<RmsNorm<'_, Self>>,
        projections: [Affine<'_, Self>; N],
    ) -> Result<[Self::Tensor; N]>
    where
        Self: Sized;
    /// `x += norm(y Wᵀ + b)`.
    fn add_projected(
        &self,
        x: &mut Self::Tensor,
        y: &Self::Tensor,
        projection: Affine<'_, Self>,
        norm: Option<RmsNorm<'_, Self>>,
    ) -> Result<()>
    where
        Self: Sized;
    /// `x += after(down(act(gate(z)) * up(z)))` with `z = before(x)`.
    fn add_mlp(&self, x: &mut Self::Tensor, mlp: &Mlp<'_, Self>) -> Result<()>
    where
        Self: Sized;
    /// In place: RMS norm of each head's d coordinates (if any), then RoPE (if any).
    fn head_norm_rope(
        &self,
        x: &mut Self::Tensor,
        head_dim: usize,
        norm: Option<(&Self::Vector, f32)>,
        rope: Option<&Self::Rope>,
    ) -> Result<()>;
    /// Causal attention over one whole sequence: `[tokens, n_heads * d]`.
    fn attention(
        &self,
        q: &Self::Tensor,
        k: &Self::Tensor,
        v: &Self::Tensor,
        shape: &AttentionShape,
    ) -> Result<Self::Tensor>;
    /// Head n's coordinates become `matrices[n / group] · x` (group = heads of x over matrices).
    fn transform_heads(&self, x: &Self::Tensor, matrices: &Self::Matrix, head_dim: usize) -> Result<Self::Tensor>;

    /// `into[h] += Σ_t Σ_g x_{t,(h,g)} x_{t,(h,g)}ᵀ`, f64 `[n_groups, d, d]` full symmetric; products and sums in f64,
    /// positions in order.
    fn gram(&self, x: &Self::Tensor, n_groups: usize, head_dim: usize, into: &mut [f64]) -> Result<()>;
    /// `into[j] += Σ_t x_{t,j}`, f64.
    fn column_sum(&self, x: &Self::Tensor, into: &mut [f64]) -> Result<()>;
    /// Logits of rows `rows`: `[rows, vocab]`, f32 on the host. `table` is `[vocab, hidden]` as stored.
    fn logits(&self, x: &Self::Tensor, rows: std::ops::Range<usize>, table: TensorView<'_>) -> Result<Vec<f32>>;
    /// -log p(target) of rows `rows`, nats: `targets[i]` is what row `rows.start + i` is to predict. Not finite where a logit is NaN or
    /// infinite.
    fn nll(&self, x: &Self::Tensor, rows: std::ops::Range<usize>, targets: &[u32], head: Head<'_>) -> Result<Vec<f64>> {
        let mut logits = self.logits(x, rows, head.table)?;
        let of_row = |(row, &target): (&mut [f32], &u32)| {
            head.cap(row);
            log_sum_exp(row) - f64::from(row[target as usize])
        };
        Ok(logits.par_chunks_exact_mut(head.table.shape[0]).zip(targets).map(of_row).collect())
    }
    /// Copies to the host, `[tokens * width]`.
    fn to_host(&self, x: &Self::Tensor) -> Result<Vec<f32>>;
}

/// An output head: what makes logits of hidden states.
#[derive(Debug, Clone, Copy)]
pub struct Head<'a> {
    /// `[vocab, hidden]` as stored.
    pub table: TensorView<'a>,
    /// Logits become `cap * tanh(logits / cap)`.
    pub softcap: Option<f32>,
}

impl Head<'_> {
    /// Caps logits in place.
    pub fn cap(&self, logits: &mut [f32]) {
        if let Some(cap) = self.softcap {
            logits.iter_mut().for_each(|x| *x = cap * (*x / cap).tanh());
        }
    }
}

/// An RMS norm's multiplier `[width]` (1 already added where the family has 1 + w) and its epsilon.
pub struct RmsNorm<'a, B: Backend> {
    /// Multiplies the normed row.
    pub weight: &'a B::Vector,
    /// Added to the mean square.
    pub eps: f32,
}

/// A projection's weight and bias.
pub struct Affine<'a, B: Backend> {
    /// `[out, in]`.
    pub weight: &'a B::Matrix,
    /// `[out]`.
    pub bias: Option<&'a B::Vector>,
}

/// The gated MLP with the norms around it.
pub struct Mlp<'a, B: Backend> {
    /// Before it.
    pub before: Option<RmsNorm<'a, B>>,
    /// `[intermediate, hidden]`.
    pub gate: Affine<'a, B>,
    /// `[intermediate, hidden]`.
    pub up: Affine<'a, B>,
    /// `[hidden, intermediate]`.
    pub down: Affine<'a, B>,
    /// Of the gate.
    pub activation: Activation,
    /// Between it and the residual.
    pub after: Option<RmsNorm<'a, B>>,
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

/// log Σ exp(x), f64.
pub fn log_sum_exp(row: &[f32]) -> f64 {
    let max = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    max + row.iter().map(|&x| (f64::from(x) - max).exp()).sum::<f64>().ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_sum_exp_survives_large_logits() {
        assert!((log_sum_exp(&[1e4, 1e4]) - (1e4 + 2f64.ln())).abs() <= 1e-9);
    }
}
