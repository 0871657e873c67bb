//! The second pass over the text that OSCAR's value rotation asks for: Σ_t w_h[t] v_t v_tᵀ with w_h[t] = k_tᵀ A_h k_t, where A_h
//! is the mean query Gram of all of the text, known only after the first pass.
//!
//! Enters: finished first-pass sums, and keys and values again. Leaves: one more Gram matrix a head. A fourth-order sum would
//! do in one pass, at d⁴/4 numbers a head: 34 MB at d = 64, half a gigabyte at 128.

use faer::linalg::matmul::triangular::{BlockStructure, matmul as triangular};
use faer::{Accum, Mat, MatMut, MatRef, Par};
use rayon::prelude::*;
use wush_format::transforms::HeadMatrices;
use wush_model::backend::Backend;
use wush_model::observer::Observer;
use wush_model::{ModelError, Result as ModelResult};

use crate::statistics::Statistics;
use crate::{Result, StatsError};

/// Positions that are widened to f64 at a time.
const BLOCK: usize = 256;

/// Adds the weighted Gram matrices of values to finished statistics, over the same sequences.
#[derive(Debug)]
pub struct SecondPass<'a> {
    statistics: &'a mut Statistics,
    /// By layer: A_h `[n_kv, d, d]`, and the sums so far.
    layers: std::collections::BTreeMap<usize, (HeadMatrices, HeadMatrices)>,
}

impl<'a> SecondPass<'a> {
    /// Begins; `statistics` are those of all sequences that will be shown.
    ///
    /// # Errors
    /// `Unfinished`.
    pub fn new(statistics: &'a mut Statistics) -> Result<Self> {
        if statistics.unfinished {
            return Err(StatsError::Unfinished);
        }
        statistics.drop_second_pass();
        // A mean over positions and the group; the scale cancels, but keeps numbers near those of keys and queries.
        let positions = statistics.info.positions.max(1) as f64;
        let layers = statistics.layers.iter().map(|(&layer, sums)| {
            let mut mean = sums.query_gram.clone();
            mean.data.iter_mut().for_each(|x| *x /= positions);
            (layer, (mean, HeadMatrices::zeros(sums.n_kv_heads(), sums.head_dim())))
        });
        let layers = layers.collect();
        Ok(Self { statistics, layers })
    }

    /// A_h of every layer `[n_kv, d, d]`, in order: for who sums elsewhere.
    pub fn means(&self) -> impl Iterator<Item = &HeadMatrices> {
        self.layers.values().map(|(mean, _)| mean)
    }

    /// Ends with sums that were made elsewhere, of every layer in order.
    ///
    /// # Panics
    /// When there is another number of layers or of elements in one: the caller's invariant.
    pub fn finish_with(mut self, sums: Vec<Vec<f64>>) {
        assert_eq!(sums.len(), self.layers.len(), "sums of every layer");
        for ((_, into), sums) in self.layers.values_mut().zip(sums) {
            assert_eq!(sums.len(), into.data.len(), "a matrix a head");
            into.data = sums;
        }
        self.finish();
    }

    /// Ends: the statistics have the sums now.
    pub fn finish(self) {
        for (layer, (_, sums)) in self.layers {
            if let Some(into) = self.statistics.layers.get_mut(&layer) {
                into.weighted_value_gram = Some(sums);
            }
        }
        self.statistics.info.second_pass = true;
    }
}

impl<B: Backend> Observer<B> for SecondPass<'_> {
    type Seen = Vec<f64>;

    fn see(&self, backend: &B, layer: usize, _: &B::Tensor, k: &B::Tensor, v: &B::Tensor) -> ModelResult<Vec<f64>> {
        let detail = || format!("layer {layer} is not in the statistics");
        let (mean, _) =
            self.layers.get(&layer).ok_or_else(|| ModelError::Sequence { sequence: 0, detail: detail() })?;
        Ok(weighted_gram(&backend.to_host(k)?, &backend.to_host(v)?, mean))
    }

    fn add(&mut self, layer: usize, seen: Vec<f64>) -> ModelResult<()> {
        if let Some((_, sums)) = self.layers.get_mut(&layer) {
            sums.data.iter_mut().zip(seen).for_each(|(sum, part)| *sum += part);
        }
        Ok(())
    }
}

/// Σ_t (k_tᵀ A_h k_t) v_t v_tᵀ `[n_kv, d, d]` of keys and values `[S, n_kv d]` f32, in f64; `mean` holds A_h.
fn weighted_gram(keys: &[f32], values: &[f32], mean: &HeadMatrices) -> Vec<f64> {
    let (dim, width) = (mean.dim, mean.n_heads * mean.dim);
    let mut out = vec![0.0; mean.n_heads * dim * dim];
    out.par_chunks_exact_mut(dim * dim).enumerate().for_each(|(head, into)| {
        let a = MatRef::from_row_major_slice(mean.head(head), dim, dim);
        for (keys, values) in keys.chunks(BLOCK * width).zip(values.chunks(BLOCK * width)) {
            let (keys, mut values) = (head_rows(keys, width, head, dim), head_rows(values, width, head, dim));
            let mut image = Mat::zeros(keys.nrows(), dim);
            faer::linalg::matmul::matmul(image.as_mut(), Accum::Replace, keys.as_ref(), a, 1.0, Par::Seq);
            for t in 0..keys.nrows() {
                let weight: f64 = image.row(t).iter().zip(keys.row(t).iter()).map(|(x, y)| x * y).sum();
                // A is positive semidefinite: what is below zero is rounding.
                let root = weight.max(0.0).sqrt();
                (0..dim).for_each(|i| values[(t, i)] *= root);
            }
            let (lower, whole) = (BlockStructure::TriangularLower, BlockStructure::Rectangular);
            let (sum, values) = (MatMut::from_row_major_slice_mut(into, dim, dim), values.as_ref());
            triangular(sum, lower, Accum::Add, values.transpose(), whole, values, whole, 1.0, Par::Seq);
        }
        for i in 0..dim {
            (0..i).for_each(|j| into[j * dim + i] = into[i * dim + j]);
        }
    });
    out
}

/// One head of rows `[n, width]`, widened.
fn head_rows(rows: &[f32], width: usize, head: usize, dim: usize) -> Mat<f64> {
    Mat::from_fn(rows.len() / width, dim, |t, i| f64::from(rows[t * width + head * dim + i]))
}
