//! Whether a model fits a GPU: its shapes the kernels, and what a calibration will hold the card. The latter is stated before it
//! starts, and kept to.

use wush_checkpoint::Checkpoint;
use wush_format::tensor_file::Dtype;
use wush_model::spec::{LayerSpec, ModelSpec, TensorSlice};
use wush_model::weights;

use crate::backend::{Compute, MLP_ROWS};
use crate::carrier::ON_CARD;
use crate::error::{GpuError, Result};
use crate::gram::GramParts;
use crate::hessian;
use crate::matmul::WORKSPACE_BYTES;
use crate::pool;
use crate::sums;

/// Layers on the card while a model streams through it.
const N_LAYERS: u64 = 2;

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

/// Where a model's layers are while it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// All on the card; sequences follow each other.
    Resident,
    /// Two on the card, the one that works and the next, which comes meanwhile; all sequences of a group go through a layer, and
    /// their hidden states wait in host memory.
    Streamed,
}

/// Device memory of a calibration, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuMemory {
    /// Where the layers are.
    pub placement: Placement,
    /// Layers and the embedding.
    pub weights: u64,
    /// Hidden states of a sequence and what a layer makes of them.
    pub activations: u64,
    /// Running sums.
    pub statistics: u64,
    /// Parts of sums, scratch of the products, rotary tables.
    pub scratch: u64,
}

/// What a calibration does on a card.
#[derive(Debug, Clone, Copy)]
pub struct Work<'a> {
    /// Where the weights come from; none where they are drawn.
    pub checkpoint: Option<&'a Checkpoint>,
    /// The model.
    pub spec: &'a ModelSpec,
    /// Tokens of the longest sequence.
    pub n_tokens: usize,
    /// Whether Appendix C's exact Hessians are summed.
    pub hessians: bool,
}

impl GpuMemory {
    /// With the layers where they fit `limit` bytes: all on the card, if they can be.
    ///
    /// # Errors
    /// `DoesNotFit` when not even two layers do.
    pub fn within<T: Compute>(work: &Work<'_>, limit: u64) -> Result<Self> {
        let plans = [Placement::Resident, Placement::Streamed].map(|placement| Self::of::<T>(work, placement));
        let fits = plans.into_iter().find(|plan| plan.total() <= limit);
        fits.ok_or(GpuError::DoesNotFit { needed: plans[1].total(), limit })
    }

    /// With the layers there.
    pub fn of<T: Compute>(work: &Work<'_>, placement: Placement) -> Self {
        let Work { spec, n_tokens, hessians, .. } = *work;
        let largest = |bytes: &dyn Fn(&LayerSpec) -> u64| spec.layers.iter().map(bytes).max().unwrap_or(0);
        let of_layer = |layer: &LayerSpec| layer.slices().map(room::<T>).sum::<u64>();
        let (layers, parked) = match placement {
            Placement::Resident => (spec.layers.iter().map(of_layer).sum(), 0),
            Placement::Streamed => {
                let states = block((n_tokens * spec.hidden_size) as u64, size_of::<T>() as u64);
                (N_LAYERS * largest(&of_layer), ON_CARD as u64 * states)
            }
        };
        let staging = work.checkpoint.map_or(0, |checkpoint| staging::<T>(checkpoint, spec));
        Self {
            placement,
            weights: layers + room::<T>(&spec.embedding),
            activations: largest(&|layer| activations::<T>(spec.hidden_size, layer, n_tokens)) + parked,
            statistics: spec.layers.iter().map(|layer| statistics(layer, hessians)).sum(),
            scratch: largest(&|layer| scratch::<T>(layer, n_tokens, hessians)) + WORKSPACE_BYTES as u64 + staging,
        }
    }

    /// What the loader of a streamed model may take of `limit` bytes, and what everything else may: what is planned for each, and half
    /// of the rest.
    pub fn budgets<T: Compute>(&self, work: &Work<'_>, limit: u64) -> [u64; 2] {
        let staging = work.checkpoint.map_or(0, |checkpoint| staging::<T>(checkpoint, work.spec));
        let loader = self.weights - room::<T>(&work.spec.embedding) + staging;
        let spare = limit.saturating_sub(self.total()) / 2;
        [loader + spare, limit.saturating_sub(loader + spare)]
    }

    /// All of it.
    pub fn total(&self) -> u64 {
        self.weights + self.activations + self.statistics + self.scratch
    }
}

fn n_elements(slice: &TensorSlice) -> u64 {
    slice.rows.len() as u64 * slice.cols as u64
}

/// Bytes of a tensor on the device, as the pool rounds them. Vectors are there in f32, too.
fn room<T: Compute>(slice: &TensorSlice) -> u64 {
    let of = |element: u64| block(n_elements(slice), element);
    let wide = if slice.cols == 1 { of(WIDE[0]) } else { 0 };
    of(size_of::<T>() as u64).saturating_add(wide)
}

/// Bytes of so many elements, as the pool rounds them.
fn block(n_elements: u64, element: u64) -> u64 {
    n_elements.checked_mul(element).and_then(pool::rounded).unwrap_or(u64::MAX)
}

/// Bytes of the residual stream; its norm, whose memory the attention's output takes where it is about as large; queries, keys and
/// values; and the MLP's part of the tokens. The pool keeps what one stage gave back for the same stage of the next layer, so they
/// add up.
fn activations<T: Compute>(hidden: usize, layer: &LayerSpec, n_tokens: usize) -> u64 {
    let (attn, mlp) = (&layer.attn, &layer.mlp);
    let of = |width: usize, n_rows: usize| block(width as u64 * n_rows as u64, size_of::<T>() as u64);
    let (whole, part) = (|width| of(width, n_tokens), |width| of(width, n_tokens.min(MLP_ROWS)));
    let queries = attn.n_heads * attn.head_dim;
    let (normed, attended) = (whole(hidden), whole(queries));
    let both = if pool::serves(normed, attended) { normed } else { normed + attended };
    let has_post_norm = layer.attn_post_norm.is_some() || layer.mlp_post_norm.is_some();
    let update = if has_post_norm { whole(hidden) } else { 0 };
    let inner = mlp.gate.weight.rows.len();
    let of_mlp = part(hidden) + part(2 * inner) + part(inner);
    whole(hidden) + both + whole(queries + 2 * attn.n_kv_heads * attn.head_dim) + update + of_mlp
}

/// Bytes of a layer's sums, and of what its exact Hessians are made with.
fn statistics(layer: &LayerSpec, hessians: bool) -> u64 {
    let attn = &layer.attn;
    let (n_kv, d) = (attn.n_kv_heads as u64, attn.head_dim as u64);
    let [exact, couplings] = hessian::elements([attn.n_heads, attn.n_kv_heads], attn.head_dim);
    let exact = if hessians { 2 * block(exact / 2, WIDE[1]) + block(couplings, WIDE[0]) } else { 0 };
    3 * block(n_kv * d * d, WIDE[1]) + block(n_kv * d, WIDE[1]) + exact
}

/// Bytes of parts of sums, exact Hessians, rotary tables and token ids.
fn scratch<T: Compute>(layer: &LayerSpec, n_tokens: usize, hessians: bool) -> u64 {
    let attn = &layer.attn;
    let parts = GramParts::n_bytes::<T>(n_tokens, attn.n_heads + 2 * attn.n_kv_heads, attn.head_dim);
    // How a block is cut does not matter to its scratch; heads that no kernel takes are refused when they are met.
    let heads = [attn.n_heads, attn.n_kv_heads];
    let exact = || hessian::scratch_bytes(n_tokens, heads, attn.head_dim, u32::MAX).unwrap_or(0);
    let rotary = attn.rope.as_ref().map_or(0, |rope| rope.rotary_dim as u64);
    let keys = sums::partial_len(n_tokens, attn.n_kv_heads * attn.head_dim) as u64;
    let n_tokens = n_tokens as u64;
    // Two kinds of layers may turn by two tables, each cos and sin.
    let tables = 4 * block(n_tokens * (rotary / 2), WIDE[0]);
    let exact = if hessians { exact() } else { 0 };
    block(parts, 1) + block(keys, WIDE[1]) + exact + tables + block(n_tokens, WIDE[0])
}

/// Bytes of the largest tensor as it is stored, where it is converted on the device.
fn staging<T: Compute>(checkpoint: &Checkpoint, spec: &ModelSpec) -> u64 {
    let bytes = |slice: &TensorSlice| {
        // What cannot be read is found when it is.
        let dtype = weights::view(checkpoint, slice).map_or(T::STORED, |view| view.dtype);
        let element = match dtype {
            dtype if dtype == T::STORED => 0,
            Dtype::BF16 | Dtype::F16 => 2,
            _ => WIDE[0],
        };
        block(n_elements(slice), element)
    };
    spec.layers.iter().flat_map(LayerSpec::slices).map(bytes).max().unwrap_or(0)
}
