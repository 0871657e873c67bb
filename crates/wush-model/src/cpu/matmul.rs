//! f32 products over faer's matmul, cut into blocks of a fixed size.

use faer::{MatMut, MatRef, prelude::ReborrowMut as _};
use rayon::prelude::*;

use super::product::multiply;
use super::{ROWS_PER_TASK, Rows};

/// Rows of the result that one task computes.
const ROW_BLOCK: usize = 1024;
/// Columns of the result that one task computes: with its rows of the weight they stay in a core's cache.
const COL_BLOCK: usize = 192;

/// `out = x Wᵀ`: `x` is `[rows, depth]`, `out` `[rows, cols]`, and `weight` holds Wᵀ, `[depth, cols]`: so laid out faer
/// multiplies without rearranging it first.
pub(super) fn product(out: &mut [f32], x: &[f32], weight: &Rows) {
    let (depth, n_cols) = (weight.n_rows, weight.width);
    let n_rows = x.len() / depth;
    let out = MatMut::from_row_major_slice_mut(out, n_rows, n_cols);
    let x = MatRef::from_row_major_slice(x, n_rows, depth);
    blocked(out, x, MatRef::from_row_major_slice(&weight.data, depth, n_cols));
}

/// Halves the result along block borders until a block is left; the cut depends on the shape alone.
fn blocked(out: MatMut<'_, f32>, x: MatRef<'_, f32>, weight: MatRef<'_, f32>) {
    if out.nrows() > ROW_BLOCK {
        let cut = out.nrows().div_ceil(ROW_BLOCK).div_ceil(2) * ROW_BLOCK;
        let (x_top, x_bottom) = x.split_at_row(cut);
        let (top, bottom) = out.split_at_row_mut(cut);
        rayon::join(|| blocked(top, x_top, weight), || blocked(bottom, x_bottom, weight));
    } else if out.ncols() > COL_BLOCK {
        let cut = out.ncols().div_ceil(COL_BLOCK).div_ceil(2) * COL_BLOCK;
        let (w_left, w_right) = weight.split_at_col(cut);
        let (left, right) = out.split_at_col_mut(cut);
        rayon::join(|| blocked(left, x, w_left), || blocked(right, x, w_right));
    } else {
        multiply(out, x, weight, 1.0);
    }
}

/// Head n of every row becomes `matrices[n / group] · x`; `matrices` is `[n_matrices * d, d]`.
pub fn transform_heads(x: &Rows, matrices: &Rows, head_dim: usize) -> Rows {
    let n_heads = x.width / head_dim;
    let group = n_heads / (matrices.n_rows / head_dim);
    let mut out = Rows::zeros(x.n_rows, x.width);
    let task = ROWS_PER_TASK * x.width;
    out.data.par_chunks_mut(task).zip(x.data.par_chunks(task)).for_each(|(out, x)| {
        let n_rows = x.len() / (n_heads * head_dim);
        let mut out = MatMut::from_row_major_slice_mut(out, n_rows, n_heads * head_dim);
        let x = MatRef::from_row_major_slice(x, n_rows, n_heads * head_dim);
        for head in 0..n_heads {
            let matrix = matrices.slice(head / group * head_dim..(head / group + 1) * head_dim);
            let matrix = MatRef::from_row_major_slice(matrix, head_dim, head_dim);
            let from = x.subcols(head * head_dim, head_dim);
            let into = out.rb_mut().subcols_mut(head * head_dim, head_dim);
            multiply(into, from, matrix.transpose(), 1.0);
        }
    });
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::random;

    #[test]
    fn blocks_agree_with_the_plain_sum_at_every_border() {
        for (n_rows, n_cols, depth) in [(1, 1, 1), (3, 5, 7), (1024, 192, 8), (1025, 193, 8), (2100, 500, 4)] {
            let (x, weight) = (random(n_rows, depth, 1).data, random(depth, n_cols, 2));
            let mut out = vec![f32::NAN; n_rows * n_cols];
            product(&mut out, &x, &weight);
            let w = weight.data;
            for i in 0..n_rows {
                for j in 0..n_cols {
                    let exact: f32 = (0..depth).map(|k| x[i * depth + k] * w[k * n_cols + j]).sum();
                    let diff = (out[i * n_cols + j] - exact).abs();
                    assert!(diff <= depth as f32 * f32::EPSILON, "{n_rows}x{n_cols}x{depth} at {i},{j}: {diff}");
                }
            }
        }
    }

    #[test]
    fn every_query_head_meets_its_groups_matrix() {
        let head_dim = 4;
        for group in 1..=8 {
            let (n_kv, n_rows) = (2, 70);
            let n_heads = n_kv * group;
            let x = random(n_rows, n_heads * head_dim, 3);
            let matrices = random(n_kv * head_dim, head_dim, 4);
            let out = transform_heads(&x, &matrices, head_dim);
            for (at, &found) in out.data.iter().enumerate() {
                let (t, n, i) = (at / x.width, at % x.width / head_dim, at % head_dim);
                let row = matrices.slice(n / group * head_dim + i..n / group * head_dim + i + 1);
                let exact: f32 = (0..head_dim).map(|j| row[j] * x.data[t * x.width + n * head_dim + j]).sum();
                assert!((found - exact).abs() <= 1e-6, "group {group}, row {t}, head {n}");
            }
        }
    }
}
