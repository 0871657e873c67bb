//! Whether a model fits a GPU: its shapes the kernels, and what a calibration will hold the card. The latter is stated before it
//! starts, and kept to.

use wush_model::spec::{LayerSpec, ModelSpec, TensorSlice};

use crate::backend::{Compute, MLP_ROWS};
use crate::error::{GpuError, Result};
use crate::gram::GramParts;
use crate::matmul::WORKSPACE_BYTES;

/// Bytes of an f32, and of an f64 sum.
const WIDE: [u64; 2] = [4, 8];

/// What head dimensions are multiples of: a step of the attention product.
const HEAD_DIM_STEP: usize = 16;
/// The largest head dimension that attention and Gram matrices are computed for.
const MAX_HEAD_DIM: usize = 256;
/// What widths are multiples of: elements that a thread reads at once.
const WIDTH_STEP: usize = 8;

/// Refuses a model whose shapes the kernels do not take.
///
/// # Errors
/// `Layout`, naming the first of them.
pub fn check(spec: &ModelSpec) -> Result<()> {
    let wrong = |what, expected: String, found| Err(GpuError::Layout { what, expected, found });
    for layer in &spec.layers {
        let head_dim = layer.attn.head_dim;
        if !head_dim.is_multiple_of(HEAD_DIM_STEP) || head_dim > MAX_HEAD_DIM {
            let expected = format!("a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM} on a GPU");
            return wrong("the model's head dimension", expected, head_dim);
        }
        for (what, width) in
            [("the model's width", spec.hidden_size), ("the MLP's width", layer.mlp.gate.weight.rows.len())]
        {
            if !width.is_multiple_of(WIDTH_STEP) {
                return wrong(what, format!("a multiple of {WIDTH_STEP} on a GPU"), width);
            }
        }
    }
    Ok(())
}

/// Device memory of a calibration with resident weights, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuMemory {
    /// Layers and the embedding.
    pub weights: u64,
    /// Hidden states of a sequence and what a layer makes of them.
    pub activations: u64,
    /// Running sums.
    pub statistics: u64,
    /// Parts of sums, scratch of the products, rotary tables.
    pub scratch: u64,
}

impl GpuMemory {
    /// Of sequences of at most `n_tokens`.
    pub fn of<T: Compute>(spec: &ModelSpec, n_tokens: usize) -> Self {
        let element = size_of::<T>() as u64;
        let largest = |bytes: &dyn Fn(&LayerSpec) -> u64| spec.layers.iter().map(bytes).max().unwrap_or(0);
        let weights = spec.layers.iter().flat_map(LayerSpec::slices).map(n_elements).sum::<u64>() * element;
        Self {
            weights: weights + n_elements(&spec.embedding) * element,
            activations: largest(&|layer| activations(spec.hidden_size, layer, n_tokens)) * element,
            statistics: spec.layers.iter().map(sums).sum::<u64>() * WIDE[1],
            scratch: largest(&|layer| scratch::<T>(layer, n_tokens)) + WORKSPACE_BYTES as u64,
        }
    }

    /// All of it.
    pub fn total(&self) -> u64 {
        self.weights + self.activations + self.statistics + self.scratch
    }
}

fn n_elements(slice: &TensorSlice) -> u64 {
    slice.rows.len() as u64 * slice.cols as u64
}

/// Elements: the residual stream; its norm, whose memory the attention's output takes; queries, keys and values; and the MLP's part
/// of the tokens. The pool keeps what one stage gave back for the same stage of the next layer, so they add up.
fn activations(hidden: usize, layer: &LayerSpec, n_tokens: usize) -> u64 {
    let (attn, mlp) = (&layer.attn, &layer.mlp);
    let attended = attn.n_heads * attn.head_dim;
    let qkv = attended + 2 * attn.n_kv_heads * attn.head_dim;
    let of_mlp = hidden + 3 * mlp.gate.weight.rows.len();
    let post_norm = [&layer.attn_post_norm, &layer.mlp_post_norm].into_iter().flatten().next().map_or(0, |_| hidden);
    let whole = (hidden + hidden.max(attended) + qkv + post_norm) as u64 * n_tokens as u64;
    whole + of_mlp as u64 * n_tokens.min(MLP_ROWS) as u64
}

/// Elements of a layer's sums.
fn sums(layer: &LayerSpec) -> u64 {
    let (n_kv, d) = (layer.attn.n_kv_heads as u64, layer.attn.head_dim as u64);
    n_kv * (3 * d * d + d)
}

/// Bytes of parts of sums, rotary tables and token ids.
fn scratch<T: Compute>(layer: &LayerSpec, n_tokens: usize) -> u64 {
    let attn = &layer.attn;
    let parts = GramParts::n_bytes::<T>(n_tokens, attn.n_heads + 2 * attn.n_kv_heads, attn.head_dim);
    let rotary = attn.rope.as_ref().map_or(0, |rope| rope.rotary_dim as u64);
    // Two kinds of layers may turn by two tables, each cos and sin; ids are as long.
    parts + n_tokens as u64 * WIDE[0] * (2 * rotary + 1)
}
