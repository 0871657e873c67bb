//! Causal grouped-query attention (Eq. 2) over one sequence, a strip of queries at a time.
//!
//! A strip holds the logits of [`QUERY_BLOCK`] queries of one head against the keys they may read: never S × S.

use faer::{MatMut, MatRef, prelude::ReborrowMut as _};
use rayon::prelude::*;

use super::product::multiply;
use super::{Rows, elementwise};
use crate::backend::AttentionShape;

/// Queries of one head that are handled together.
const QUERY_BLOCK: usize = 64;

/// `[tokens, n_heads * d]` from queries `[tokens, n_heads * d]` and keys and values `[tokens, n_kv_heads * d]`.
pub(super) fn causal(q: &Rows, k: &Rows, v: &Rows, shape: &AttentionShape) -> Rows {
    let mut out = Rows::zeros(q.n_rows, q.width);
    let keys = MatRef::from_row_major_slice(&k.data, k.n_rows, k.width);
    let values = MatRef::from_row_major_slice(&v.data, v.n_rows, v.width);
    let blocks = out.data.par_chunks_mut(QUERY_BLOCK * q.width).enumerate();
    blocks.for_each_init(Vec::new, |logits, (block, out)| {
        let n_rows = out.len() / q.width;
        let first = block * QUERY_BLOCK;
        let queries = MatRef::from_row_major_slice(q.slice(first..first + n_rows), n_rows, q.width);
        let strip = Strip { first, queries, keys, values, shape };
        strip.attend(MatMut::from_row_major_slice_mut(out, n_rows, q.width), logits);
    });
    out
}

/// The queries of one block, and all keys and values.
struct Strip<'a> {
    /// Position of the first query.
    first: usize,
    queries: MatRef<'a, f32>,
    keys: MatRef<'a, f32>,
    values: MatRef<'a, f32>,
    shape: &'a AttentionShape,
}

impl Strip<'_> {
    /// Fills `out`; `logits` is scratch that calls on one thread share.
    fn attend(&self, mut out: MatMut<'_, f32>, logits: &mut Vec<f32>) {
        let AttentionShape { n_heads, n_kv_heads, head_dim, .. } = *self.shape;
        let n_rows = self.queries.nrows();
        let start = self.first_key(0);
        let n_keys = self.first + n_rows - start;
        logits.resize(n_rows * n_keys, 0.0);
        let mut sums = vec![0.0; n_rows];
        for head in 0..n_heads {
            let kv_head = head / (n_heads / n_kv_heads);
            let first = kv_head * head_dim;
            let keys = self.keys.subrows(start, n_keys).subcols(first, head_dim);
            let values = self.values.subrows(start, n_keys).subcols(first, head_dim);
            let queries = self.queries.subcols(head * head_dim, head_dim);
            let scores = MatMut::from_row_major_slice_mut(logits, n_rows, n_keys);
            multiply(scores, queries, keys.transpose(), self.shape.scale);
            self.exponentiate(logits, &mut sums, start, n_keys);
            let weights = MatRef::from_row_major_slice(logits, n_rows, n_keys);
            let mut into = out.rb_mut().subcols_mut(head * head_dim, head_dim);
            multiply(into.rb_mut(), weights, values, 1.0);
            for (i, sum) in sums.iter().enumerate() {
                let row = into.rb_mut().row_mut(i).try_as_row_major_mut().expect("rows are contiguous");
                elementwise::scale(row.as_slice_mut(), 1.0 / sum);
            }
        }
    }

    /// Every row becomes exp(logit - max) over the keys it may read and zero elsewhere; `sums` gets the rows' sums.
    fn exponentiate(&self, logits: &mut [f32], sums: &mut [f32], start: usize, n_keys: usize) {
        for (i, (row, sum)) in logits.chunks_exact_mut(n_keys).zip(sums).enumerate() {
            let read = self.first_key(i) - start..self.first + i + 1 - start;
            row[..read.start].fill(0.0);
            row[read.end..].fill(0.0);
            *sum = elementwise::exp_and_sum(&mut row[read], self.shape.softcap);
        }
    }

    /// First key that query `i` of the block reads.
    fn first_key(&self, i: usize) -> usize {
        self.shape.window.map_or(0, |window| (self.first + i + 1).saturating_sub(window))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(n_rows: usize, width: usize, seed: u32) -> Rows {
        let mut state = seed;
        let next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        Rows { n_rows, width, data: std::iter::repeat_with(next).take(n_rows * width).collect() }
    }

    /// Eq. 2 in f64, one query at a time.
    fn oracle(q: &Rows, k: &Rows, v: &Rows, shape: &AttentionShape, t: usize, head: usize) -> Vec<f64> {
        let d = shape.head_dim;
        let kv = head / (shape.n_heads / shape.n_kv_heads);
        let first = shape.window.map_or(0, |w| (t + 1).saturating_sub(w));
        let at = |x: &Rows, t: usize, head: usize, i: usize| f64::from(x.data[t * x.width + head * d + i]);
        let logits: Vec<f64> = (first..=t)
            .map(|s| (0..d).map(|i| at(q, t, head, i) * at(k, s, kv, i)).sum::<f64>() * f64::from(shape.scale))
            .map(|x| shape.softcap.map_or(x, |cap| f64::from(cap) * (x / f64::from(cap)).tanh()))
            .collect();
        let max = logits.iter().copied().fold(f64::MIN, f64::max);
        let weights: Vec<f64> = logits.iter().map(|x| (x - max).exp()).collect();
        let total: f64 = weights.iter().sum();
        (0..d).map(|i| (first..=t).zip(&weights).map(|(s, w)| w * at(v, s, kv, i)).sum::<f64>() / total).collect()
    }

    #[test]
    fn every_group_window_and_tail_agrees_with_the_definition() {
        for (group, n_rows, window, softcap) in [
            (1, 1, None, None),
            (2, 63, None, None),
            (3, 64, Some(1), None),
            (4, 65, Some(7), Some(5.0)),
            (5, 130, Some(64), None),
            (6, 70, Some(65), None),
            (7, 5, Some(100), None),
            (8, 129, None, Some(2.0)),
        ] {
            let (n_kv_heads, head_dim) = (2, 6);
            let shape =
                AttentionShape { n_heads: n_kv_heads * group, n_kv_heads, head_dim, window, scale: 0.7, softcap };
            let q = values(n_rows, shape.n_heads * head_dim, 1);
            let (k, v) = (values(n_rows, n_kv_heads * head_dim, 2), values(n_rows, n_kv_heads * head_dim, 3));
            let out = causal(&q, &k, &v, &shape);
            for t in 0..n_rows {
                for head in 0..shape.n_heads {
                    let exact = oracle(&q, &k, &v, &shape, t, head);
                    for (i, exact) in exact.into_iter().enumerate() {
                        let found = f64::from(out.data[t * q.width + head * head_dim + i]);
                        assert!((found - exact).abs() <= 2e-6, "group {group}, t {t}, head {head}: {found} {exact}");
                    }
                }
            }
        }
    }
}
