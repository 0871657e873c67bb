//! The part of the statistics that comes from the weights: Σ_g W_O W_Oᵀ (Eq. 4), in f64.

use faer::linalg::matmul::triangular::{BlockStructure, matmul};
use faer::{Accum, MatMut, MatRef, Par};
use rayon::prelude::*;
use wush_checkpoint::Checkpoint;
use wush_format::transforms::HeadMatrices;
use wush_model::spec::{AttentionSpec, ModelSpec};
use wush_model::weights::read_f64;

use crate::attention::Couplings;
use crate::file::within;
use crate::statistics::{LayerStats, Statistics};
use crate::{Result, StatsError};

/// Rows of the output projection that are widened to f64 at a time: 512 rows of 8192 columns are 32 MiB.
const BLOCK_ROWS: usize = 512;

/// Two machines may sum the weights' Gram matrix in another order: d_model·G ≤ 2^20 products, each rounded to 2^-53,
/// relative to sqrt(A_ii A_jj).
const REL_TOL: f64 = 1.0 / (1u64 << 33) as f64;

/// Fills every layer's `output_gram` from the checkpoint: for KV head h the sum over its query heads of W_O W_Oᵀ, where
/// W_O(h,g) `[d, d_model]` is the transpose of columns `n d .. (n + 1) d` of the stored weight `[d_model, n_heads d]`,
/// n = h G + g.
///
/// Products and sums are f64. Blocks of rows are taken in order and each head is summed by one thread, so the bytes do
/// not depend on the thread count. Holds one block of one layer at a time.
///
/// # Errors
/// `Model` when a weight cannot be read; `Shape` when the statistics are of another model; `NonFiniteWeight`.
pub fn output_gram(checkpoint: &Checkpoint, spec: &ModelSpec, statistics: &mut Statistics) -> Result<()> {
    for (&id, sums) in &mut statistics.layers {
        sums.output_gram = layer_output_gram(checkpoint, id, checked_attention(spec, id, sums)?)?;
    }
    Ok(())
}

/// The first layer and KV head whose `output_gram` is not that of the checkpoint's weights, beyond the order of summation;
/// none when all are.
///
/// # Errors
/// As [`output_gram`].
pub fn output_gram_difference(
    checkpoint: &Checkpoint,
    spec: &ModelSpec,
    statistics: &Statistics,
) -> Result<Option<(usize, usize)>> {
    for (&id, sums) in &statistics.layers {
        let expected = layer_output_gram(checkpoint, id, checked_attention(spec, id, sums)?)?;
        if let Some((head, _)) = first_difference(&expected, &sums.output_gram) {
            return Ok(Some((id, head)));
        }
    }
    Ok(None)
}

/// Γ_{h,g,g'} = W_O(h,g) W_O(h,g')ᵀ of every KV head of one layer, in f64: `[n_kv, G d, G d]`, whose blocks on the diagonal add
/// up to [`output_gram`]'s matrix.
///
/// # Errors
/// `Model` when the weight cannot be read; `NonFiniteWeight`.
pub fn couplings(checkpoint: &Checkpoint, id: usize, attn: &AttentionSpec) -> Result<Couplings> {
    let width = attn.n_heads / attn.n_kv_heads * attn.head_dim;
    // A KV head with the columns of its whole group is one "query head" of that width.
    let whole = AttentionSpec { n_heads: attn.n_kv_heads, head_dim: width, ..attn.clone() };
    layer_output_gram(checkpoint, id, &whole)
}

/// The layer's attention, when the sums have its shape.
fn checked_attention<'a>(spec: &'a ModelSpec, id: usize, sums: &LayerStats) -> Result<&'a AttentionSpec> {
    let found = format!("({}, {})", sums.n_kv_heads(), sums.head_dim());
    let Some(layer) = spec.layers.get(id) else {
        return Err(StatsError::Shape { layer: id, expected: "no such layer".into(), found });
    };
    let expected = format!("({}, {})", layer.attn.n_kv_heads, layer.attn.head_dim);
    if expected == found { Ok(&layer.attn) } else { Err(StatsError::Shape { layer: id, expected, found }) }
}

/// Head and place in it of the first element where two Gram matrices of the same weights, of one shape, differ by more than
/// the order of summation explains.
pub(crate) fn first_difference(a: &HeadMatrices, b: &HeadMatrices) -> Option<(usize, usize)> {
    let dim = a.dim;
    let differs = |&(head, at): &(usize, usize)| {
        let (a, b) = (a.head(head), b.head(head));
        let diagonal = |i: usize| a[i * dim + i].sqrt();
        !within(a[at] - b[at], REL_TOL * diagonal(at / dim) * diagonal(at % dim))
    };
    (0..a.n_heads).flat_map(|head| (0..dim * dim).map(move |at| (head, at))).find(differs)
}

fn layer_output_gram(checkpoint: &Checkpoint, id: usize, attn: &AttentionSpec) -> Result<HeadMatrices> {
    let (weight, dim) = (&attn.o.weight, attn.head_dim);
    let mut gram = HeadMatrices::zeros(attn.n_kv_heads, dim);
    for start in weight.rows.clone().step_by(BLOCK_ROWS) {
        let rows = start..weight.rows.end.min(start + BLOCK_ROWS);
        let block = read_f64(checkpoint, &weight.clone().rows(rows.clone()))?;
        let block = MatRef::from_row_major_slice(&block, rows.len(), weight.cols);
        gram.data
            .par_chunks_exact_mut(dim * dim)
            .enumerate()
            .for_each(|(head, into)| add_group(block, head, attn, into));
    }
    mirror(&mut gram);
    if gram.data.iter().all(|x| x.is_finite()) {
        return Ok(gram);
    }
    Err(StatsError::NonFiniteWeight { layer: id, name: weight.name.clone() })
}

/// Adds one block's share to the lower triangle of one KV head.
fn add_group(block: MatRef<'_, f64>, head: usize, attn: &AttentionSpec, into: &mut [f64]) {
    let (dim, group) = (attn.head_dim, attn.n_heads / attn.n_kv_heads);
    for query_head in head * group..(head + 1) * group {
        let columns = block.subcols(query_head * dim, dim);
        matmul(
            MatMut::from_row_major_slice_mut(into, dim, dim),
            BlockStructure::TriangularLower,
            Accum::Add,
            columns.transpose(),
            BlockStructure::Rectangular,
            columns,
            BlockStructure::Rectangular,
            1.0,
            Par::Seq,
        );
    }
}

/// Copies the lower triangles up.
fn mirror(gram: &mut HeadMatrices) {
    let dim = gram.dim;
    for head in 0..gram.n_heads {
        let gram = gram.head_mut(head);
        for i in 0..dim {
            for j in 0..i {
                gram[j * dim + i] = gram[i * dim + j];
            }
        }
    }
}
