//! The CPU with weights as they are stored: what a token at a time needs, where a product is as fast as its weights are read.
//!
//! One row, or a few, meet every stored row in a dot product that widens it in registers: memory is read once, in its stored
//! width. Many rows widen a block of the weight at a time and multiply as [`Cpu`] does. Everything else is [`Cpu`]'s.
//!
//! A row's dot products do not depend on the rows beside it, bit for bit; a block's may. [`Stored::ROW_BY_ROW`] has dot products
//! only: what one sequence gets is then the same in any batch.

use std::ops::Range;

use faer::{MatMut, MatRef};
use rayon::prelude::*;
use wush_format::tensor_file::{Dtype, TensorView};

use super::product::multiply;
use super::{Cpu, Rows, elementwise, matmul, widen};
use crate::backend::{Affine, AttentionShape, Backend, Mlp, RmsNorm};
use crate::error::Result;
use crate::rope::RopeTable;

/// Rows of activations up to which dot products beat widening the weight: a weight is widened in about the time of four
/// of them.
const FEW_ROWS: usize = 4;
/// Stored rows that one task of a few rows reads: some hundred kilobytes.
const ROWS_PER_TASK: usize = 128;
/// Stored rows that one task of many rows widens: they stay in a core's cache.
const BLOCK_ROWS: usize = 192;
/// Partial sums of a dot product: enough independent ones to wait for memory only.
const LANES: usize = 32;

/// The CPU, with [`StoredMatrix`] weights.
#[derive(Debug, Clone, Copy)]
pub struct Stored {
    /// Rows of activations up to which products are dot products.
    few_rows: usize,
}

impl Stored {
    /// Whatever is fastest for a number of rows: the tokens of one sequence.
    pub const BY_SHAPE: Self = Self { few_rows: FEW_ROWS };
    /// Dot products for any number of rows: tokens of many sequences, each of which gets what it would get alone.
    pub const ROW_BY_ROW: Self = Self { few_rows: usize::MAX };
}

/// A weight `[out, in]` in its stored element type.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredMatrix {
    dtype: Dtype,
    shape: [usize; 2],
    bytes: Vec<u8>,
}

impl StoredMatrix {
    fn view(&self) -> TensorView<'_> {
        TensorView { dtype: self.dtype, shape: &self.shape, bytes: &self.bytes }
    }

    /// Length of an output.
    fn n_out(&self) -> usize {
        self.shape[0]
    }
}

/// A weight and where its product goes: `out` is `[rows, n_out]`.
struct Product<'a> {
    weight: TensorView<'a>,
    out: &'a mut [f32],
}

/// `out = x Wᵀ` for every product; `x` is `[rows, in]`. Up to `few_rows` rows as dot products.
fn products(x: &[f32], products: Vec<Product<'_>>, few_rows: usize) {
    let Some(depth) = products.first().map(|product| product.weight.shape[1]) else { return };
    match x.len() / depth {
        1 => one(x, products),
        n_rows if n_rows <= few_rows => {
            products.into_iter().for_each(|Product { weight, out }| few(x, weight, out));
        }
        n_rows => products.into_iter().for_each(|Product { weight, out }| {
            let x = MatRef::from_row_major_slice(x, n_rows, depth);
            let rows = 0..weight.shape[0];
            blocked(MatMut::from_row_major_slice_mut(out, n_rows, rows.len()), x, weight, rows);
        }),
    }
}

/// One row of activations: all products in one round of tasks.
fn one(x: &[f32], products: Vec<Product<'_>>) {
    let tasks: Vec<_> = products
        .into_iter()
        .flat_map(|Product { weight, out }| {
            out.chunks_mut(ROWS_PER_TASK).enumerate().map(move |(task, out)| (weight, task * ROWS_PER_TASK, out))
        })
        .collect();
    tasks.into_par_iter().for_each_init(Vec::new, |scratch, (weight, first, out)| dots(x, weight, first, out, scratch));
}

/// A few rows of activations: a task takes some rows of the weight, which stay in a core's cache, to each of them as in [`one`].
fn few(x: &[f32], weight: TensorView<'_>, out: &mut [f32]) {
    let [n_out, depth] = [weight.shape[0], weight.shape[1]];
    let blocks: Vec<(usize, Vec<f32>)> = (0..n_out)
        .into_par_iter()
        .step_by(ROWS_PER_TASK)
        .map_init(Vec::new, |scratch, first| {
            let n_weights = ROWS_PER_TASK.min(n_out - first);
            let mut block = vec![0.0; x.len() / depth * n_weights];
            let rows = x.chunks_exact(depth).zip(block.chunks_exact_mut(n_weights));
            rows.for_each(|(x, out)| dots(x, weight, first, out, scratch));
            (first, block)
        })
        .collect();
    for (first, block) in blocks {
        let n_weights = ROWS_PER_TASK.min(n_out - first);
        for (out, block) in out.chunks_exact_mut(n_out).zip(block.chunks_exact(n_weights)) {
            out[first..first + n_weights].copy_from_slice(block);
        }
    }
}

/// `out[i] = W[first + i] · x`. Sums in [`LANES`] parts in f32, the same whatever the vector width.
fn dots(x: &[f32], weight: TensorView<'_>, first: usize, out: &mut [f32], scratch: &mut Vec<f32>) {
    if weight.dtype == Dtype::BF16 {
        return dots_bf16(x, &weight.bytes[first * 2 * x.len()..], out);
    }
    scratch.resize(x.len(), 0.0);
    for (i, out) in out.iter_mut().enumerate() {
        widen::into(weight, (first + i) * x.len(), scratch);
        *out = elementwise::vectorized(
            #[inline(always)]
            || dot(scratch, x, |&w| w),
        );
    }
}

/// The same of BF16 rows. A loop and no adapter: a closure that is not inlined would be compiled for the narrowest vectors.
fn dots_bf16(x: &[f32], rows: &[u8], out: &mut [f32]) {
    elementwise::vectorized(
        #[inline(always)]
        || {
            for (i, out) in out.iter_mut().enumerate() {
                *out = dot_bf16(rows[i * 2 * x.len()..(i + 1) * 2 * x.len()].as_chunks().0, x);
            }
        },
    );
}

#[inline(always)]
fn dot_bf16(row: &[[u8; 2]], x: &[f32]) -> f32 {
    dot(row, x, |&bytes| f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16))
}

#[inline(always)]
fn dot<T>(row: &[T], x: &[f32], widen: impl Fn(&T) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let ((rows, rest), (xs, x_rest)) = (row.as_chunks::<LANES>(), x.as_chunks::<LANES>());
    for (row, x) in rows.iter().zip(xs) {
        for ((lane, w), x) in lanes.iter_mut().zip(row).zip(x) {
            *lane += widen(w) * x;
        }
    }
    for ((lane, w), x) in lanes.iter_mut().zip(rest).zip(x_rest) {
        *lane += widen(w) * x;
    }
    lanes.iter().sum()
}

/// Halves the product along the weight's rows until a block is left; the cut depends on the shape alone.
fn blocked(out: MatMut<'_, f32>, x: MatRef<'_, f32>, weight: TensorView<'_>, rows: Range<usize>) {
    if rows.len() > BLOCK_ROWS {
        let n_left = rows.len().div_ceil(BLOCK_ROWS).div_ceil(2) * BLOCK_ROWS;
        let (left, right) = out.split_at_col_mut(n_left);
        let cut = rows.start + n_left;
        rayon::join(|| blocked(left, x, weight, rows.start..cut), || blocked(right, x, weight, cut..rows.end));
        return;
    }
    let depth = weight.shape[1];
    let widened = widen::transposed(weight, depth, rows.clone());
    multiply(out, x, MatRef::from_row_major_slice(&widened, depth, rows.len()), 1.0);
}

/// `x Wᵀ + b` for each projection.
fn project<const N: usize>(x: &Rows, projections: [Affine<'_, Stored>; N], few_rows: usize) -> [Rows; N] {
    let mut outs = projections.each_ref().map(|p| Rows::zeros(x.n_rows, p.weight.n_out()));
    let into = outs.iter_mut().zip(&projections);
    let into = into.map(|(out, p)| Product { weight: p.weight.view(), out: &mut out.data }).collect();
    products(&x.data, into, few_rows);
    for (out, projection) in outs.iter_mut().zip(&projections) {
        if let Some(bias) = projection.bias {
            out.data.par_chunks_exact_mut(bias.len()).for_each(|row| elementwise::add(row, bias));
        }
    }
    outs
}

/// The rows after the norm, or a copy of them where there is none.
fn normalized(x: &Rows, norm: Option<&RmsNorm<'_, Stored>>) -> Result<Rows> {
    norm.map_or_else(|| Ok(x.clone()), |norm| Cpu.norm(x, RmsNorm { weight: norm.weight, eps: norm.eps }))
}

/// `x += norm(update)`.
fn add_update(x: &mut Rows, update: &Rows, norm: Option<&RmsNorm<'_, Stored>>) -> Result<()> {
    match norm {
        Some(_) => elementwise::add(&mut x.data, &normalized(update, norm)?.data),
        None => elementwise::add(&mut x.data, &update.data),
    }
    Ok(())
}

impl Backend for Stored {
    const SIDE_BY_SIDE: bool = true;

    type Tensor = Rows;
    type Matrix = StoredMatrix;
    type Vector = Vec<f32>;
    type Rope = RopeTable;

    fn matrix(&self, view: TensorView<'_>, rows: Range<usize>) -> Result<StoredMatrix> {
        let row = view.shape[1] * view.dtype.bitsize() / 8;
        let bytes = view.bytes[rows.start * row..rows.end * row].to_vec();
        Ok(StoredMatrix { dtype: view.dtype, shape: [rows.len(), view.shape[1]], bytes })
    }

    fn vector(&self, view: TensorView<'_>, rows: Range<usize>, add: f32) -> Result<Vec<f32>> {
        Cpu.vector(view, rows, add)
    }

    fn rope(&self, table: RopeTable) -> Result<RopeTable> {
        Ok(table)
    }

    fn head_matrices(&self, n_heads: usize, dim: usize, data: &[f32]) -> Result<StoredMatrix> {
        assert_eq!(data.len(), n_heads * dim * dim, "head matrices are [n_heads, d, d]");
        let bytes = data.iter().flat_map(|x| x.to_le_bytes()).collect();
        Ok(StoredMatrix { dtype: Dtype::F32, shape: [n_heads * dim, dim], bytes })
    }

    fn embed(&self, table: TensorView<'_>, ids: &[u32], scale: f32) -> Result<Rows> {
        Cpu.embed(table, ids, scale)
    }

    fn norm(&self, x: &Rows, norm: RmsNorm<'_, Self>) -> Result<Rows> {
        normalized(x, Some(&norm))
    }

    fn project<const N: usize>(
        &self,
        x: &Rows,
        norm: Option<RmsNorm<'_, Self>>,
        projections: [Affine<'_, Self>; N],
    ) -> Result<[Rows; N]> {
        Ok(match norm {
            Some(_) => project(&normalized(x, norm.as_ref())?, projections, self.few_rows),
            None => project(x, projections, self.few_rows),
        })
    }

    fn add_projected(
        &self,
        x: &mut Rows,
        y: &Rows,
        projection: Affine<'_, Self>,
        norm: Option<RmsNorm<'_, Self>>,
    ) -> Result<()> {
        let [update] = project(y, [projection], self.few_rows);
        add_update(x, &update, norm.as_ref())
    }

    fn add_mlp(&self, x: &mut Rows, mlp: &Mlp<'_, Self>) -> Result<()> {
        fn affine<'a>(affine: &Affine<'a, Stored>) -> Affine<'a, Stored> {
            Affine { weight: affine.weight, bias: affine.bias }
        }
        let normed = mlp.before.as_ref().map(|norm| normalized(x, Some(norm))).transpose()?;
        let [mut gate, up] = project(normed.as_ref().unwrap_or(x), [&mlp.gate, &mlp.up].map(affine), self.few_rows);
        gate.data
            .par_chunks_mut(gate.width)
            .zip(up.data.par_chunks(up.width))
            .for_each(|(gate, up)| elementwise::gate(gate, up, mlp.activation));
        let [update] = project(&gate, [affine(&mlp.down)], self.few_rows);
        add_update(x, &update, mlp.after.as_ref())
    }

    fn head_norm_rope(
        &self,
        x: &mut Rows,
        head_dim: usize,
        norm: Option<(&Vec<f32>, f32)>,
        rope: Option<&RopeTable>,
    ) -> Result<()> {
        Cpu.head_norm_rope(x, head_dim, norm, rope)
    }

    fn attention(&self, q: &Rows, k: &Rows, v: &Rows, shape: &AttentionShape) -> Result<Rows> {
        Cpu.attention(q, k, v, shape)
    }

    fn transform_heads(&self, x: &Rows, matrices: &StoredMatrix, head_dim: usize) -> Result<Rows> {
        let n_rows = matrices.n_out();
        let data = widen::rows(matrices.view(), head_dim, 0..n_rows);
        Ok(matmul::transform_heads(x, &Rows { n_rows, width: head_dim, data }, head_dim))
    }

    fn gram(&self, x: &Rows, n_groups: usize, head_dim: usize, into: &mut [f64]) -> Result<()> {
        Cpu.gram(x, n_groups, head_dim, into)
    }

    fn column_sum(&self, x: &Rows, into: &mut [f64]) -> Result<()> {
        Cpu.column_sum(x, into)
    }

    fn logits(&self, x: &Rows, rows: Range<usize>, table: TensorView<'_>) -> Result<Vec<f32>> {
        if rows.len() > self.few_rows {
            return Cpu.logits(x, rows, table);
        }
        let mut out = vec![0.0; rows.len() * table.shape[0]];
        products(x.slice(rows), vec![Product { weight: table, out: &mut out }], self.few_rows);
        Ok(out)
    }

    fn to_host(&self, x: &Rows) -> Result<Vec<f32>> {
        Cpu.to_host(x)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::random;

    /// Stored bytes of values that BF16 and F16 hold exactly: multiples of 1/64 below 1.
    fn stored(dtype: Dtype, n_rows: usize, width: usize) -> (Vec<u8>, Vec<f32>) {
        let values: Vec<f32> =
            (0..n_rows * width).map(|i| ((i * 37 + i / 7) % 127) as f32 / 64.0 - 0.984_375).collect();
        let bytes = |x: &f32| match dtype {
            Dtype::BF16 => half::bf16::from_f32(*x).to_le_bytes().to_vec(),
            Dtype::F16 => half::f16::from_f32(*x).to_le_bytes().to_vec(),
            Dtype::F64 => f64::from(*x).to_le_bytes().to_vec(),
            _ => x.to_le_bytes().to_vec(),
        };
        (values.iter().flat_map(bytes).collect(), values)
    }

    #[test]
    fn products_agree_with_the_plain_sum_in_every_dtype_and_at_every_border() {
        for dtype in [Dtype::BF16, Dtype::F16, Dtype::F32, Dtype::F64] {
            for (n_rows, n_out, depth) in [
                (1, 1, 1),
                (1, ROWS_PER_TASK + 3, 70),
                (3, 5, LANES),
                (4, 130, 7),
                (5, BLOCK_ROWS + 1, 33),
                (9, 500, 65),
            ] {
                let (bytes, weight) = stored(dtype, n_out, depth);
                let x = random(n_rows, depth, 1);
                let mut out = vec![f32::NAN; n_rows * n_out];
                let view = TensorView { dtype, shape: &[n_out, depth], bytes: &bytes };
                products(&x.data, vec![Product { weight: view, out: &mut out }], FEW_ROWS);
                for (at, &found) in out.iter().enumerate() {
                    let (x, w) = (&x.data[at / n_out * depth..][..depth], &weight[at % n_out * depth..][..depth]);
                    let exact: f64 = x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                    let diff = (f64::from(found) - exact).abs();
                    // Terms below 1/2, each sum rounded.
                    let tol = depth as f64 * f64::from(f32::EPSILON);
                    assert!(diff <= tol, "{dtype:?}, {n_rows} x {n_out} x {depth} at {at}: {diff:e}");
                }
            }
        }
    }

    #[test]
    fn a_row_is_multiplied_alike_in_any_company() {
        for dtype in [Dtype::BF16, Dtype::F16, Dtype::F32, Dtype::F64] {
            for (n_rows, n_out, depth) in
                [(2, 1, 5), (3, 130, 33), (4, 7, LANES), (9, ROWS_PER_TASK + 1, 70), (66, 5, 96)]
            {
                let (bytes, _) = stored(dtype, n_out, depth);
                let view = TensorView { dtype, shape: &[n_out, depth], bytes: &bytes };
                let x = random(n_rows, depth, 2);
                let product = |x: &[f32]| {
                    let mut out = vec![f32::NAN; x.len() / depth * n_out];
                    products(x, vec![Product { weight: view, out: &mut out }], Stored::ROW_BY_ROW.few_rows);
                    out
                };
                let alone: Vec<f32> = x.data.chunks_exact(depth).flat_map(&product).collect();
                let bits = |x: Vec<f32>| x.into_iter().map(f32::to_bits).collect::<Vec<_>>();
                assert_eq!(bits(product(&x.data)), bits(alone), "{dtype:?}, {n_rows} x {n_out} x {depth}");
            }
        }
    }
}
