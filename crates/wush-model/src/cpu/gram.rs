//! Gram matrices (Algorithm 1, line 4) of f32 activations, in f64.
//!
//! Products of two f32 values are exact in f64. A task sums [`POSITIONS`] positions of one head group; the partial sums
//! are added in order of position.

use faer::{MatMut, MatRef};
use rayon::prelude::*;

use super::Rows;
use super::product::add_gram;

/// Positions that one task sums.
const POSITIONS: usize = 1024;
/// Vectors that are widened to f64 at a time.
const BLOCK: usize = 256;

/// `into[h] += Σ x xᵀ` over all positions and the heads of group h; `into` is `[n_groups, d, d]`, full symmetric.
pub(super) fn accumulate(x: &Rows, n_groups: usize, head_dim: usize, into: &mut [f64]) {
    let square = head_dim * head_dim;
    assert_eq!(into.len(), n_groups * square, "one [d, d] matrix a group");
    assert_eq!(x.width % (n_groups * head_dim), 0, "whole heads a group");
    let n_parts = x.n_rows.div_ceil(POSITIONS);
    let parts: Vec<Vec<f64>> = (0..n_groups * n_parts)
        .into_par_iter()
        .map(|task| partial(x, task / n_parts, task % n_parts, n_groups, head_dim))
        .collect();
    for (task, part) in parts.iter().enumerate() {
        let gram = &mut into[task / n_parts * square..][..square];
        for i in 0..head_dim {
            for j in 0..=i {
                gram[i * head_dim + j] += part[i * head_dim + j];
                gram[j * head_dim + i] = gram[i * head_dim + j];
            }
        }
    }
}

/// Lower triangle of one group's sum over one part of the positions.
fn partial(x: &Rows, group: usize, part: usize, n_groups: usize, head_dim: usize) -> Vec<f64> {
    let width = x.width / n_groups;
    let rows = part * POSITIONS..((part + 1) * POSITIONS).min(x.n_rows);
    let mut gram = vec![0.0; head_dim * head_dim];
    let rows_at_once = (BLOCK * head_dim / width).max(1);
    let mut block = Vec::with_capacity(rows_at_once * width);
    for chunk in x.slice(rows).chunks(rows_at_once * x.width) {
        block.clear();
        for row in chunk.chunks_exact(x.width) {
            block.extend(row[group * width..][..width].iter().map(|&x| f64::from(x)));
        }
        let vectors = MatRef::from_row_major_slice(&block, block.len() / head_dim, head_dim);
        add_gram(MatMut::from_row_major_slice_mut(&mut gram, head_dim, head_dim), vectors);
    }
    gram
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_parts_and_tails_are_all_counted_once() {
        for (n_rows, group, n_groups, d) in [(1, 1, 1, 3), (1025, 2, 3, 4), (2500, 5, 2, 3), (300, 1, 2, 8)] {
            let width = n_groups * group * d;
            // Small integers: every sum is exact, so the comparison is too.
            let data: Vec<f32> = (0..n_rows * width).map(|i| ((i * 7 + i / 13) % 11) as f32 - 5.0).collect();
            let x = Rows { n_rows, width, data };
            let mut found = vec![1.0; n_groups * d * d];
            accumulate(&x, n_groups, d, &mut found);
            let mut exact = vec![1.0; n_groups * d * d];
            for (at, exact) in exact.iter_mut().enumerate() {
                let (h, i, j) = (at / (d * d), at / d % d, at % d);
                for row in x.data.chunks_exact(width) {
                    for head in row[h * group * d..][..group * d].chunks_exact(d) {
                        *exact += f64::from(head[i]) * f64::from(head[j]);
                    }
                }
            }
            assert_eq!(found, exact, "{n_rows} rows, group {group}");
        }
    }
}
