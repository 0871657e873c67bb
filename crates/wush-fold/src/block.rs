//! One tensor folded: f64 products block by block, one rounding, and the Gram matrices of the rounding errors.
//!
//! Enters: a tensor's stored bytes and its edits. Leaves: its new bytes, and what the report needs of every edit. The
//! work of one edit is single-threaded and in a fixed order; edits run in parallel, so the thread count changes nothing.

use rayon::prelude::*;

use crate::dense::{add_gram_lower, add_product, mirror_lower, product, view, view_mut};
use crate::number::Element;
use crate::plan::{Edit, HeadPlan, Role, TensorPlan};
use crate::source::check_finite;
use crate::{FoldError, Result};

/// Columns of X that are widened, multiplied and rounded at a time: 3 · 256 · d f64 stay in the second-level cache.
const CHUNK: usize = 256;

/// Gram matrices of one edit, row-major `[d, d]`, f64 sums over all n columns. With Y the exact product M·X and
/// D = stored − Y its rounding error: what [`crate::report`] needs to know the fold's error without a large product.
#[derive(Debug, Clone)]
pub(crate) struct Grams {
    /// Y·Yᵀ.
    pub(crate) yy: Vec<f64>,
    /// Y·Dᵀ.
    pub(crate) yd: Vec<f64>,
    /// D·Dᵀ.
    pub(crate) dd: Vec<f64>,
}

impl Grams {
    pub(crate) fn zeros(dim: usize) -> Self {
        let zeros = vec![0.0; dim * dim];
        Self { yy: zeros.clone(), yd: zeros.clone(), dd: zeros }
    }

    pub(crate) fn add(&mut self, other: &Self) {
        for (a, b) in [(&mut self.yy, &other.yy), (&mut self.yd, &other.yd), (&mut self.dd, &other.dd)] {
            a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
        }
    }
}

/// A tensor after folding.
#[derive(Debug)]
pub(crate) struct FoldedTensor {
    pub(crate) name: String,
    /// Little-endian elements of the target dtype.
    pub(crate) bytes: Vec<u8>,
    /// One entry an edit, in the plan's order.
    pub(crate) grams: Vec<(Edit, Grams)>,
}

/// Folds one tensor whose stored bytes are `source`.
pub(crate) fn fold_tensor(name: &str, plan: &TensorPlan, heads: &[HeadPlan], source: &[u8]) -> Result<FoldedTensor> {
    let overflow = |value| match check_finite(name, plan.source, source) {
        Err(error) => error,
        Ok(()) => FoldError::Overflow { tensor: name.to_owned(), value, dtype: plan.target.dtype() },
    };
    let mut bytes = convert(plan.source, plan.target, source).map_err(overflow)?;
    let blocks: Vec<(Vec<u8>, Grams)> = plan
        .edits
        .par_iter()
        .map(|edit| fold_block(plan, edit, &heads[edit.head], source))
        .collect::<Result<_, f64>>()
        .map_err(overflow)?;
    let mut grams = Vec::with_capacity(blocks.len());
    for (edit, (block, gram)) in plan.edits.iter().zip(blocks) {
        scatter(plan, edit, &block, &mut bytes);
        grams.push((edit.clone(), gram));
    }
    Ok(FoldedTensor { name: name.to_owned(), bytes, grams })
}

/// The tensor in its target dtype, before the edits: a copy, or widened exactly (only unfolding to the original's dtype
/// narrows, and then everything outside the edits came from that dtype).
fn convert(source: Element, target: Element, bytes: &[u8]) -> Result<Vec<u8>, f64> {
    if source == target {
        return Ok(bytes.to_vec());
    }
    let n = bytes.len() / source.n_bytes();
    let mut out = vec![0; n * target.n_bytes()];
    let mut values = vec![0.0; CHUNK.pow(2).min(n)];
    let chunks = bytes.chunks(CHUNK.pow(2) * source.n_bytes()).zip(out.chunks_mut(CHUNK.pow(2) * target.n_bytes()));
    for (from, to) in chunks {
        let values = &mut values[..from.len() / source.n_bytes()];
        source.widen(from, values);
        target.narrow(values, to)?;
    }
    Ok(out)
}

/// The new elements of one edit, in the tensor's own element order.
fn fold_block(plan: &TensorPlan, edit: &Edit, head: &HeadPlan, source: &[u8]) -> Result<(Vec<u8>, Grams), f64> {
    let (dim, n_bytes) = (head.dim, plan.target.n_bytes());
    let by_rows = edit.role != Role::Output;
    let n = if by_rows { edit.cols.len() } else { edit.rows.len() };
    let matrix = view(if by_rows { &head.value } else { &head.output }, dim, dim);
    let mut out = vec![0; dim * n * n_bytes];
    let mut grams = Grams::zeros(dim);
    let (mut x, mut y, mut exact) = (vec![0.0; dim * CHUNK], vec![0.0; dim * CHUNK], vec![0.0; dim * CHUNK]);
    let mut packed = vec![0; dim * CHUNK * n_bytes];
    for start in (0..n).step_by(CHUNK) {
        let width = CHUNK.min(n - start);
        let (x, y, exact) = (&mut x[..dim * width], &mut y[..dim * width], &mut exact[..dim * width]);
        gather(plan, edit, source, start, width, x);
        // As the matrix sees it, X is [d, width]: the rows of a value block, the columns of an output block.
        if by_rows {
            product(view_mut(y, dim, width), matrix, view(x, dim, width));
        } else {
            product(view_mut(y, width, dim).transpose_mut(), matrix, view(x, width, dim).transpose());
        }
        exact.copy_from_slice(y);
        let packed = &mut packed[..dim * width * n_bytes];
        plan.target.narrow(y, packed)?;
        if by_rows {
            add_grams(&mut grams, dim, view(exact, dim, width), view(y, dim, width));
            for (row, from) in packed.chunks_exact(width * n_bytes).enumerate() {
                out[(row * n + start) * n_bytes..][..from.len()].copy_from_slice(from);
            }
        } else {
            add_grams(&mut grams, dim, view(exact, width, dim).transpose(), view(y, width, dim).transpose());
            out[start * dim * n_bytes..][..packed.len()].copy_from_slice(packed);
        }
    }
    mirror_lower(&mut grams.yy, dim);
    mirror_lower(&mut grams.dd, dim);
    Ok((out, grams))
}

fn add_grams(grams: &mut Grams, dim: usize, exact: faer::MatRef<'_, f64>, error: faer::MatRef<'_, f64>) {
    add_gram_lower(view_mut(&mut grams.yy, dim, dim), exact);
    add_product(view_mut(&mut grams.yd, dim, dim), exact, error.transpose());
    add_gram_lower(view_mut(&mut grams.dd, dim, dim), error);
}

/// Widens columns `start..start + width` of the edit's X, in the tensor's element order.
fn gather(plan: &TensorPlan, edit: &Edit, source: &[u8], start: usize, width: usize, out: &mut [f64]) {
    let n_bytes = plan.source.n_bytes();
    let (rows, cols) = window(edit, start, width);
    for (row, out) in rows.zip(out.chunks_exact_mut(cols.len())) {
        plan.source.widen(&source[(row * plan.n_cols + cols.start) * n_bytes..][..cols.len() * n_bytes], out);
    }
}

/// Rows and columns of the tensor that hold columns `start..start + width` of X.
fn window(edit: &Edit, start: usize, width: usize) -> (std::ops::Range<usize>, std::ops::Range<usize>) {
    if edit.role == Role::Output {
        (edit.rows.start + start..edit.rows.start + start + width, edit.cols.clone())
    } else {
        (edit.rows.clone(), edit.cols.start + start..edit.cols.start + start + width)
    }
}

/// Puts an edit's elements into the tensor.
fn scatter(plan: &TensorPlan, edit: &Edit, block: &[u8], bytes: &mut [u8]) {
    let n_bytes = plan.target.n_bytes();
    for (row, from) in edit.rows.clone().zip(block.chunks_exact(edit.cols.len() * n_bytes)) {
        bytes[(row * plan.n_cols + edit.cols.start) * n_bytes..][..from.len()].copy_from_slice(from);
    }
}
