//! The CPU backend: f32 activations in plain rows, faer's matmul, fused loops around it.
//!
//! Enters: stored weights and token ids. Leaves: f32 activations and f64 sums. Work is cut into blocks whose sizes
//! depend on shapes alone and every block is computed by one thread, so the bytes do not depend on the thread count.

mod attention;
mod elementwise;
mod fused;
mod gram;
mod matmul;
mod product;
mod stored;
mod widen;

use std::ops::Range;

use rayon::prelude::*;
use wush_format::tensor_file::TensorView;

use crate::attention::{Chunk, KeysValues, Windowed};
use crate::backend::{Affine, AttentionShape, Backend, Mlp, RmsNorm};
use crate::error::Result;
use crate::rope::RopeTable;

pub use attention::{QueriesKeys, probability_errors};
pub use matmul::transform_heads;
pub use stored::{Stored, StoredMatrix};

/// The CPU, through rayon's current thread pool.
#[derive(Debug, Default, Clone, Copy)]
pub struct Cpu;

/// A row-major f32 matrix: activations `[tokens, width]` or weights `[in, out]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Rows {
    /// Number of rows.
    pub n_rows: usize,
    /// Length of a row.
    pub width: usize,
    /// `n_rows * width` values.
    pub data: Vec<f32>,
}

impl Rows {
    /// All zeros.
    pub fn zeros(n_rows: usize, width: usize) -> Self {
        Self { n_rows, width, data: vec![0.0; n_rows * width] }
    }

    /// Rows `range`.
    pub fn slice(&self, range: Range<usize>) -> &[f32] {
        &self.data[range.start * self.width..range.end * self.width]
    }
}

/// Rows of activations that one task of an elementwise operation takes.
const ROWS_PER_TASK: usize = 64;
/// Rows of the output head that one task widens and multiplies.
const VOCAB_ROWS: usize = 2048;

impl Backend for Cpu {
    const SIDE_BY_SIDE: bool = true;

    type Tensor = Rows;
    type Matrix = Rows;
    type Vector = Vec<f32>;
    type Rope = RopeTable;

    fn matrix(&self, view: TensorView<'_>, rows: Range<usize>) -> Result<Rows> {
        let depth = view.shape[1];
        Ok(Rows { n_rows: depth, width: rows.len(), data: widen::transposed(view, depth, rows) })
    }

    fn vector(&self, view: TensorView<'_>, rows: Range<usize>, add: f32) -> Result<Vec<f32>> {
        let mut data = widen::rows(view, 1, rows);
        data.iter_mut().for_each(|x| *x += add);
        Ok(data)
    }

    fn rope(&self, table: RopeTable) -> Result<RopeTable> {
        Ok(table)
    }

    fn head_matrices(&self, n_heads: usize, dim: usize, data: &[f32]) -> Result<Rows> {
        assert_eq!(data.len(), n_heads * dim * dim, "head matrices are [n_heads, d, d]");
        Ok(Rows { n_rows: n_heads * dim, width: dim, data: data.to_vec() })
    }

    fn embed(&self, table: TensorView<'_>, ids: &[u32], scale: f32) -> Result<Rows> {
        let mut out = Rows::zeros(ids.len(), table.shape[1]);
        for (row, &id) in out.data.chunks_exact_mut(out.width).zip(ids) {
            let id = id as usize;
            widen::into(table, id * table.shape[1], row);
            if scale != 1.0 {
                row.iter_mut().for_each(|x| *x *= scale);
            }
        }
        Ok(out)
    }

    fn norm(&self, x: &Rows, norm: RmsNorm<'_, Self>) -> Result<Rows> {
        let mut out = x.clone();
        let tasks = out.data.par_chunks_mut(ROWS_PER_TASK * x.width);
        tasks.for_each(|rows| elementwise::rms_norm(rows, norm.weight, norm.eps));
        Ok(out)
    }

    fn project<const N: usize>(
        &self,
        x: &Rows,
        norm: Option<RmsNorm<'_, Self>>,
        projections: [Affine<'_, Self>; N],
    ) -> Result<[Rows; N]> {
        Ok(fused::project(x, norm, projections))
    }

    fn add_projected(
        &self,
        x: &mut Rows,
        y: &Rows,
        projection: Affine<'_, Self>,
        norm: Option<RmsNorm<'_, Self>>,
    ) -> Result<()> {
        fused::add_projected(x, y, projection, norm);
        Ok(())
    }

    fn add_mlp(&self, x: &mut Rows, mlp: &Mlp<'_, Self>) -> Result<()> {
        fused::add_mlp(x, mlp);
        Ok(())
    }

    fn head_norm_rope(
        &self,
        x: &mut Rows,
        head_dim: usize,
        norm: Option<(&Vec<f32>, f32)>,
        rope: Option<&RopeTable>,
    ) -> Result<()> {
        let width = x.width;
        x.data.par_chunks_mut(ROWS_PER_TASK * width).enumerate().for_each(|(task, rows)| {
            if let Some((weight, eps)) = norm {
                elementwise::rms_norm(rows, weight, eps);
            }
            if let Some(table) = rope {
                for (i, row) in rows.chunks_exact_mut(width).enumerate() {
                    elementwise::rope(row, head_dim, table, task * ROWS_PER_TASK + i);
                }
            }
        });
        Ok(())
    }

    fn attention(&self, q: &Rows, k: &Rows, v: &Rows, shape: &AttentionShape) -> Result<Rows> {
        Ok(attention::causal(q, k, v, shape))
    }

    fn transform_heads(&self, x: &Rows, matrices: &Rows, head_dim: usize) -> Result<Rows> {
        Ok(transform_heads(x, matrices, head_dim))
    }

    fn gram(&self, x: &Rows, n_groups: usize, head_dim: usize, into: &mut [f64]) -> Result<()> {
        gram::accumulate(x, n_groups, head_dim, into);
        Ok(())
    }

    fn column_sum(&self, x: &Rows, into: &mut [f64]) -> Result<()> {
        assert_eq!(into.len(), x.width, "one sum a column");
        for row in x.data.chunks_exact(x.width) {
            for (sum, &value) in into.iter_mut().zip(row) {
                *sum += f64::from(value);
            }
        }
        Ok(())
    }

    fn logits(&self, x: &Rows, rows: Range<usize>, table: TensorView<'_>) -> Result<Vec<f32>> {
        let (vocab, hidden) = (table.shape[0], table.shape[1]);
        let n_rows = rows.len();
        let x = x.slice(rows);
        let blocks: Vec<(usize, Vec<f32>)> = (0..vocab)
            .into_par_iter()
            .step_by(VOCAB_ROWS)
            .map(|first| {
                let ids = first..(first + VOCAB_ROWS).min(vocab);
                let mut block = vec![0.0; n_rows * ids.len()];
                let data = widen::transposed(table, hidden, ids.clone());
                matmul::product(&mut block, x, &Rows { n_rows: hidden, width: ids.len(), data });
                (first, block)
            })
            .collect();
        let mut out = vec![0.0; n_rows * vocab];
        for (first, block) in blocks {
            let width = block.len() / n_rows;
            for (out, row) in out.chunks_exact_mut(vocab).zip(block.chunks_exact(width)) {
                out[first..first + width].copy_from_slice(row);
            }
        }
        Ok(out)
    }

    fn to_host(&self, x: &Rows) -> Result<Vec<f32>> {
        Ok(x.data.clone())
    }
}

impl Windowed for Cpu {
    fn n_rows(&self, x: &Rows) -> usize {
        x.n_rows
    }

    fn to_device(&self, n_rows: usize, data: Vec<f32>) -> Result<Rows> {
        assert!(data.len().is_multiple_of(n_rows.max(1)), "whole rows");
        Ok(Rows { n_rows, width: data.len() / n_rows.max(1), data })
    }

    fn windowed(
        &self,
        q: &Rows,
        exact: KeysValues<'_, Rows>,
        quantized: KeysValues<'_, Rows>,
        shape: &AttentionShape,
        chunks: &[Chunk],
    ) -> Result<Rows> {
        Ok(attention::windowed(q, exact, quantized, shape, chunks))
    }
}

/// Pseudo-random values in [-0.5, 0.5), for tests.
#[cfg(test)]
fn random(n_rows: usize, width: usize, seed: u32) -> Rows {
    let mut state = seed;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    Rows { n_rows, width, data: std::iter::repeat_with(next).take(n_rows * width).collect() }
}
