//! Causal grouped-query attention (Eq. 2) over one sequence, a strip of queries at a time.
//!
//! A strip holds the logits of [`QUERY_BLOCK`] queries of one head against the keys they may read: never S × S.

use std::ops::Range;

use faer::{Accum, MatMut, MatRef, prelude::ReborrowMut as _};
use rayon::prelude::*;

use super::product::{accumulate, multiply};
use super::{Rows, elementwise};
use crate::attention::{Chunk, KeysValues, assert_covers};
use crate::backend::AttentionShape;

/// Queries of one head that are handled together.
const QUERY_BLOCK: usize = 64;

/// `[tokens, n_heads * d]` from queries `[tokens, n_heads * d]` and keys and values `[tokens, n_kv_heads * d]`.
pub(super) fn causal(q: &Rows, k: &Rows, v: &Rows, shape: &AttentionShape) -> Rows {
    over_strips(q, strips(0..q.n_rows), shape, |queries| {
        let all = 0..queries.end;
        vec![Part { keys: all, k, v }]
    })
}

impl<'a> KeysValues<'a, Rows> {
    fn part(self, keys: Range<usize>) -> Part<'a> {
        Part { keys, k: self.keys, v: self.values }
    }
}

/// [`Windowed::windowed`](crate::attention::Windowed::windowed): strips within chunks.
pub(super) fn windowed(
    q: &Rows,
    exact: KeysValues<'_, Rows>,
    quantized: KeysValues<'_, Rows>,
    shape: &AttentionShape,
    chunks: &[Chunk],
) -> Rows {
    assert_covers(chunks, q.n_rows);
    let chunk_of = |position: usize| &chunks[chunks.partition_point(|chunk| chunk.queries.end <= position)];
    over_strips(q, chunks.iter().flat_map(|chunk| strips(chunk.queries.clone())), shape, |queries| {
        let middle = chunk_of(queries.start).quantized.clone();
        match middle.is_empty() {
            true => vec![exact.part(0..queries.end)],
            false => {
                vec![exact.part(0..middle.start), quantized.part(middle.clone()), exact.part(middle.end..queries.end)]
            }
        }
    })
}

/// Queries `[tokens, n_heads * d]` and keys `[tokens, n_kv_heads * d]`.
#[derive(Debug, Clone, Copy)]
pub struct QueriesKeys<'a> {
    /// The queries.
    pub queries: &'a Rows,
    /// The keys.
    pub keys: &'a Rows,
}

/// ‖P̂ − P‖² and ‖P‖² of the softmax probabilities of one whole sequence, all heads, causally masked and scaled as the model
/// does it: P from `exact`, P̂ from `other`. Sums in f64, strips in order.
pub fn probability_errors<'a>(exact: QueriesKeys<'a>, other: QueriesKeys<'a>, shape: &AttentionShape) -> (f64, f64) {
    let strips: Vec<_> = strips(0..exact.queries.n_rows).collect();
    let of_strip = |queries: Range<usize>| {
        let strip = |side: QueriesKeys<'a>| {
            let part = Part { keys: 0..queries.end, k: side.keys, v: side.keys };
            Strip { queries: queries.clone(), q: side.queries, parts: vec![part], shape }
        };
        strip(exact).probability_errors(&strip(other))
    };
    let sums: Vec<(f64, f64)> = strips.into_par_iter().map(of_strip).collect();
    sums.into_iter().fold((0.0, 0.0), |sum, strip| (sum.0 + strip.0, sum.1 + strip.1))
}

/// Cuts queries into strips.
fn strips(queries: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = queries.end;
    queries.step_by(QUERY_BLOCK).map(move |first| first..(first + QUERY_BLOCK).min(end))
}

/// Attends strip by strip, strips covering the queries in order, to the parts that `parts` gives for each.
fn over_strips<'a>(
    q: &'a Rows,
    strips: impl Iterator<Item = Range<usize>>,
    shape: &AttentionShape,
    parts: impl Fn(Range<usize>) -> Vec<Part<'a>> + Sync,
) -> Rows {
    let mut out = Rows::zeros(q.n_rows, q.width);
    let mut rest = &mut out.data[..];
    let mut tasks = Vec::new();
    for queries in strips {
        let (of_strip, after) = rest.split_at_mut(queries.len() * q.width);
        tasks.push((queries, of_strip));
        rest = after;
    }
    tasks.into_par_iter().for_each_init(Vec::new, |logits, (queries, out)| {
        let strip = Strip { queries: queries.clone(), q, parts: parts(queries), shape };
        strip.attend(out, logits);
    });
    out
}

/// A range of positions and where their keys and values are.
struct Part<'a> {
    keys: Range<usize>,
    k: &'a Rows,
    v: &'a Rows,
}

/// The queries of one strip and what they read: parts that follow each other up to the last query.
struct Strip<'a> {
    queries: Range<usize>,
    q: &'a Rows,
    parts: Vec<Part<'a>>,
    shape: &'a AttentionShape,
}

impl Strip<'_> {
    /// Fills `out`; `logits` is scratch that calls on one thread share.
    fn attend(&self, out: &mut [f32], logits: &mut Vec<f32>) {
        let AttentionShape { n_heads, n_kv_heads, head_dim, .. } = *self.shape;
        let n_rows = self.queries.len();
        let start = self.first_key(0);
        let n_keys = self.queries.end - start;
        logits.resize(n_rows * n_keys, 0.0);
        let mut sums = vec![0.0; n_rows];
        let mut out = MatMut::from_row_major_slice_mut(out, n_rows, self.q.width);
        for head in 0..n_heads {
            let first = head / (n_heads / n_kv_heads) * head_dim;
            self.weigh(head, start, logits, &mut sums);
            let weights = MatRef::from_row_major_slice(logits, n_rows, n_keys);
            let mut into = out.rb_mut().subcols_mut(head * head_dim, head_dim);
            let mut how = Accum::Replace;
            for (columns, part) in self.read_from(start) {
                let values = part.rows(part.v, &columns, start).subcols(first, head_dim);
                accumulate(into.rb_mut(), how, weights.subcols(columns.start, columns.len()), values, 1.0);
                how = Accum::Add;
            }
            for (i, sum) in sums.iter().enumerate() {
                let row = into.rb_mut().row_mut(i).try_as_row_major_mut().expect("rows are contiguous");
                elementwise::scale(row.as_slice_mut(), 1.0 / sum);
            }
        }
    }

    /// Fills `logits`, `[queries, keys from start]`, with exp(logit - max) of one head, and `sums` with the rows' sums.
    fn weigh(&self, head: usize, start: usize, logits: &mut [f32], sums: &mut [f32]) {
        let AttentionShape { n_heads, n_kv_heads, head_dim, .. } = *self.shape;
        let (n_rows, n_keys) = (self.queries.len(), self.queries.end - start);
        let first = head / (n_heads / n_kv_heads) * head_dim;
        let queries = MatRef::from_row_major_slice(self.q.slice(self.queries.clone()), n_rows, self.q.width);
        let queries = queries.subcols(head * head_dim, head_dim);
        let mut scores = MatMut::from_row_major_slice_mut(logits, n_rows, n_keys);
        for (columns, part) in self.read_from(start) {
            let keys = part.rows(part.k, &columns, start).subcols(first, head_dim);
            let into = scores.rb_mut().subcols_mut(columns.start, columns.len());
            multiply(into, queries, keys.transpose(), self.shape.scale);
        }
        self.exponentiate(logits, sums, start, n_keys);
    }

    /// ‖P̂ − P‖² and ‖P‖² over all heads, P̂ being `other`'s probabilities.
    fn probability_errors(&self, other: &Self) -> (f64, f64) {
        let start = self.first_key(0);
        let (n_rows, n_keys) = (self.queries.len(), self.queries.end - start);
        let [mut p, mut p_hat] = [vec![0.0; n_rows * n_keys], vec![0.0; n_rows * n_keys]];
        let [mut sums, mut sums_hat] = [vec![0.0; n_rows], vec![0.0; n_rows]];
        let (mut error, mut signal) = (0.0, 0.0);
        for head in 0..self.shape.n_heads {
            self.weigh(head, start, &mut p, &mut sums);
            other.weigh(head, start, &mut p_hat, &mut sums_hat);
            let rows = p.chunks_exact(n_keys).zip(p_hat.chunks_exact(n_keys)).zip(sums.iter().zip(&sums_hat));
            for ((p, p_hat), (&sum, &sum_hat)) in rows {
                let of = |x: f32, sum: f32| f64::from(x) / f64::from(sum);
                error += p.iter().zip(p_hat).map(|(&p, &q)| (of(q, sum_hat) - of(p, sum)).powi(2)).sum::<f64>();
                signal += p.iter().map(|&p| of(p, sum).powi(2)).sum::<f64>();
            }
        }
        (error, signal)
    }

    /// The parts that hold keys from `start` on, each with its columns of the logits.
    fn read_from(&self, start: usize) -> impl Iterator<Item = (Range<usize>, &Part<'_>)> {
        let columns = move |part: &Part<'_>| part.keys.start.max(start) - start..part.keys.end.max(start) - start;
        self.parts.iter().map(move |part| (columns(part), part)).filter(|(columns, _)| !columns.is_empty())
    }

    /// Every row becomes exp(logit - max) over the keys it may read and zero elsewhere; `sums` gets the rows' sums.
    fn exponentiate(&self, logits: &mut [f32], sums: &mut [f32], start: usize, n_keys: usize) {
        for (i, (row, sum)) in logits.chunks_exact_mut(n_keys).zip(sums).enumerate() {
            let read = self.first_key(i) - start..self.queries.start + i + 1 - start;
            row[..read.start].fill(0.0);
            row[read.end..].fill(0.0);
            *sum = elementwise::exp_and_sum(&mut row[read], self.shape.softcap);
        }
    }

    /// First key that query `i` of the strip reads.
    fn first_key(&self, i: usize) -> usize {
        self.shape.window.map_or(0, |window| (self.queries.start + i + 1).saturating_sub(window))
    }
}

impl Part<'_> {
    /// Rows of `x` at the positions of some columns of the logits.
    fn rows<'a>(&self, x: &'a Rows, columns: &Range<usize>, start: usize) -> MatRef<'a, f32> {
        let positions = start + columns.start..start + columns.end;
        MatRef::from_row_major_slice(x.slice(positions.clone()), positions.len(), x.width)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::random;

    /// In [-1, 1).
    fn values(n_rows: usize, width: usize, seed: u32) -> Rows {
        let mut rows = random(n_rows, width, seed);
        rows.data.iter_mut().for_each(|x| *x *= 2.0);
        rows
    }

    /// The softmax of one query in f64, of the keys from the first that it reads.
    fn probabilities(q: &Rows, k: &Rows, shape: &AttentionShape, t: usize, head: usize) -> (Range<usize>, Vec<f64>) {
        let d = shape.head_dim;
        let kv = head / (shape.n_heads / shape.n_kv_heads);
        let read = shape.window.map_or(0, |w| (t + 1).saturating_sub(w))..t + 1;
        let at = |x: &Rows, t: usize, head: usize, i: usize| f64::from(x.data[t * x.width + head * d + i]);
        let logits: Vec<f64> = read
            .clone()
            .map(|s| (0..d).map(|i| at(q, t, head, i) * at(k, s, kv, i)).sum::<f64>() * f64::from(shape.scale))
            .map(|x| shape.softcap.map_or(x, |cap| f64::from(cap) * (x / f64::from(cap)).tanh()))
            .collect();
        let max = logits.iter().copied().fold(f64::MIN, f64::max);
        let weights: Vec<f64> = logits.iter().map(|x| (x - max).exp()).collect();
        let total: f64 = weights.iter().sum();
        (read, weights.iter().map(|w| w / total).collect())
    }

    /// Eq. 2 in f64, one query at a time.
    fn oracle(q: &Rows, k: &Rows, v: &Rows, shape: &AttentionShape, t: usize, head: usize) -> Vec<f64> {
        let (read, weights) = probabilities(q, k, shape, t, head);
        let column = head / (shape.n_heads / shape.n_kv_heads) * shape.head_dim;
        let at = |s: usize, i: usize| f64::from(v.data[s * v.width + column + i]);
        (0..shape.head_dim).map(|i| read.clone().zip(&weights).map(|(s, w)| w * at(s, i)).sum()).collect()
    }

    #[test]
    fn errors_of_probabilities_are_those_of_the_definition() {
        for (n_rows, window, softcap) in
            [(1, None, None), (70, None, None), (130, Some(20), None), (65, None, Some(3.0))]
        {
            let shape = AttentionShape { n_heads: 6, n_kv_heads: 2, head_dim: 5, window, scale: 0.7, softcap };
            let [q, q_hat] = [1, 2].map(|seed| values(n_rows, 30, seed));
            let [k, k_hat] = [3, 4].map(|seed| values(n_rows, 10, seed));
            let side = |queries, keys| QueriesKeys { queries, keys };
            let found = probability_errors(side(&q, &k), side(&q_hat, &k_hat), &shape);
            let (mut error, mut signal) = (0.0, 0.0);
            for (t, head) in (0..n_rows).flat_map(|t| (0..6).map(move |head| (t, head))) {
                let (exact, other) =
                    (probabilities(&q, &k, &shape, t, head).1, probabilities(&q_hat, &k_hat, &shape, t, head).1);
                error += exact.iter().zip(&other).map(|(p, p_hat)| (p_hat - p).powi(2)).sum::<f64>();
                signal += exact.iter().map(|p| p * p).sum::<f64>();
            }
            // Each probability is within some f32 roundings.
            assert!((found.0 - error).abs() <= 1e-5 * error && (found.1 - signal).abs() <= 1e-5 * signal, "{found:?}");
        }
    }

    /// Eq. 2 over keys and values that are chosen by position, in f64.
    #[test]
    fn every_query_reads_what_its_chunk_holds_quantized() {
        let (n_kv_heads, d) = (2, 6);
        for (n_rows, chunk, window) in
            [(70, 16, None), (70, 16, Some(20)), (130, 1, None), (200, 200, Some(7)), (250, 100, None), (5, 16, None)]
        {
            let shape = AttentionShape { n_heads: 6, n_kv_heads, head_dim: d, window, scale: 0.7, softcap: None };
            let q = values(n_rows, shape.n_heads * d, 1);
            let [k, v, kq, vq] = [2, 3, 4, 5].map(|seed| values(n_rows, n_kv_heads * d, seed));
            let chunks: Vec<Chunk> = (0..n_rows)
                .step_by(chunk)
                .map(|first| Chunk {
                    queries: first..(first + chunk).min(n_rows),
                    quantized: 4..(first / 2).max(4).min(first.max(4)),
                })
                .map(|c| if c.quantized.is_empty() { Chunk { quantized: 0..0, ..c } } else { c })
                .collect();
            let (exact, quantized) = (KeysValues { keys: &k, values: &v }, KeysValues { keys: &kq, values: &vq });
            let out = windowed(&q, exact, quantized, &shape, &chunks);
            for t in 0..n_rows {
                let read = &chunks[t / chunk].quantized;
                let mix = |x: &Rows, xq: &Rows| {
                    let mut mixed = x.clone();
                    let range = read.start * x.width..read.end * x.width;
                    mixed.data[range.clone()].copy_from_slice(&xq.data[range]);
                    mixed
                };
                let (k, v) = (mix(&k, &kq), mix(&v, &vq));
                for head in 0..shape.n_heads {
                    for (i, exact) in oracle(&q, &k, &v, &shape, t, head).into_iter().enumerate() {
                        let found = f64::from(out.data[t * q.width + head * d + i]);
                        assert!((found - exact).abs() <= 2e-6, "chunk {chunk}, t {t}, head {head}: {found} {exact}");
                    }
                }
            }
        }
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
