//! What stays on this side of the two products: queries, and sums of values, in the order of the packed codes. Enters and
//! leaves: plain rows `[queries, d]`. The reordering is done once a query, not once a token.

use crate::codec::check_length;
use crate::layout::{LANES, Rows};
use crate::{Bits, Layout, Level, QuantError, Result};

/// One row of lanes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[repr(align(64))]
pub(crate) struct Row(pub(crate) [f32; LANES]);

/// Queries of one KV head, reordered for [`Codec::dot`](crate::Codec::dot), each with its `Σ qᵢ`.
#[derive(Debug, Clone, PartialEq)]
pub struct Queries {
    layout: Layout,
    /// `[rows, queries]`; zero in lanes that hold no coordinate.
    pub(crate) rows: Vec<Row>,
    /// Sums of two products by the codes of both, [`score_tables`]; empty where the kernels use none.
    pub(crate) tables: Vec<Row>,
    /// `Σ qᵢ` in f64, rounded once.
    pub(crate) sums: Vec<f32>,
}

impl Queries {
    /// From `queries`, `[n, d]`: the query heads of one KV head, of one or more positions.
    ///
    /// # Errors
    /// `Length` unless d divides it.
    pub fn new(layout: &Layout, queries: &[f32]) -> Result<Self> {
        let head_dim = layout.head_dim();
        let n_queries = queries.len() / head_dim;
        check_length("queries", n_queries * head_dim, queries.len())?;
        let order = Rows::new(layout);
        let mut rows = vec![Row::default(); order.n_rows() * n_queries];
        order.for_each(|row, lane, coordinate| {
            for (query, lanes) in rows[row * n_queries..][..n_queries].iter_mut().enumerate() {
                lanes.0[lane] = queries[query * head_dim + coordinate];
            }
        });
        let looked_up = layout.bits() == Bits::Two && Level::Avx512.is_available();
        let tables = if looked_up { score_tables(layout, queries) } else { Vec::new() };
        let sum = |query: &[f32]| query.iter().map(|&q| f64::from(q)).sum::<f64>() as f32;
        let sums = queries.chunks_exact(head_dim).map(sum).collect();
        Ok(Self { layout: *layout, rows, tables, sums })
    }

    /// Queries held.
    pub fn n_queries(&self) -> usize {
        self.sums.len()
    }

    pub(crate) fn check(&self, layout: &Layout) -> Result<()> {
        if self.layout == *layout { Ok(()) } else { Err(QuantError::OtherLayout { what: "queries" }) }
    }
}

/// Tables of one word of codes at 2 bits, one for two of its 16 codes.
pub(crate) const TABLES: usize = 8;

/// By four bits, the code in the lower two and the one in the upper two.
pub(crate) const TWO_CODES: [Row; 2] = [
    Row([0., 1., 2., 3., 0., 1., 2., 3., 0., 1., 2., 3., 0., 1., 2., 3.]),
    Row([0., 0., 0., 0., 1., 1., 1., 1., 2., 2., 2., 2., 3., 3., 3., 3.]),
];

/// Tables of `queries`, `[n, d]`, at 2 bits: `[words, 8, queries]`, the k-th of word w for positions 2k and 2k + 1.
fn score_tables(layout: &Layout, queries: &[f32]) -> Vec<Row> {
    let (head_dim, n_words) = (layout.head_dim(), layout.n_words());
    let mut tables = Vec::with_capacity(n_words * TABLES * (queries.len() / head_dim));
    for word in 0..n_words {
        for k in 0..TABLES {
            for query in queries.chunks_exact(head_dim) {
                let value = |position: usize| query.get(position * n_words + word).copied().unwrap_or(0.0);
                let (lower, upper) = (value(2 * k), value(2 * k + 1));
                let mut table = Row::default();
                for ((sum, a), b) in table.0.iter_mut().zip(&TWO_CODES[0].0).zip(&TWO_CODES[1].0) {
                    *sum = a * lower + b * upper;
                }
                tables.push(table);
            }
        }
    }
    tables
}

/// Weighted sums of packed values, one a query, in the order of the codes; built up by [`Codec::axpy`](crate::Codec::axpy)
/// over any number of blocks.
#[derive(Debug, Clone, PartialEq)]
pub struct Accumulators {
    layout: Layout,
    /// `Σ_t w_t scale_t code_t`, `[rows, queries]`.
    pub(crate) rows: Vec<Row>,
    /// `Σ_t w_t scale_t zero_t`, one a query.
    pub(crate) offsets: Vec<f32>,
}

impl Accumulators {
    /// Zeros for `n_queries` queries.
    pub fn new(layout: &Layout, n_queries: usize) -> Self {
        let rows = vec![Row::default(); Rows::new(layout).n_rows() * n_queries];
        Self { layout: *layout, rows, offsets: vec![0.0; n_queries] }
    }

    /// Queries held.
    pub fn n_queries(&self) -> usize {
        self.offsets.len()
    }

    /// Back to zeros.
    pub fn clear(&mut self) {
        self.rows.fill(Row::default());
        self.offsets.fill(0.0);
    }

    /// Multiplies one query's sum: what an online softmax does when its maximum rises. No effect beyond the last query.
    pub fn rescale(&mut self, query: usize, factor: f32) {
        let n_queries = self.n_queries();
        if let Some(offset) = self.offsets.get_mut(query) {
            *offset *= factor;
            let rows = self.rows[query..].iter_mut().step_by(n_queries);
            rows.for_each(|row| row.0.iter_mut().for_each(|x| *x *= factor));
        }
    }

    /// Adds the sums to `out`, `[queries, d]`.
    ///
    /// # Errors
    /// `Length`.
    pub fn add_to(&self, out: &mut [f32]) -> Result<()> {
        let (head_dim, n_queries) = (self.layout.head_dim(), self.n_queries());
        check_length("sums", n_queries * head_dim, out.len())?;
        Rows::new(&self.layout).for_each(|row, lane, coordinate| {
            for (query, (sums, offset)) in self.rows[row * n_queries..].iter().zip(&self.offsets).enumerate() {
                out[query * head_dim + coordinate] += sums.0[lane] - offset;
            }
        });
        Ok(())
    }

    pub(crate) fn check(&self, layout: &Layout) -> Result<()> {
        if self.layout == *layout { Ok(()) } else { Err(QuantError::OtherLayout { what: "accumulators" }) }
    }
}
