//! Attention of one KV head over its sink, packed pages and recent window (Eq. 2, Algorithm 2 line 5): one pass over the
//! cache with an online softmax, every block read once for a tile of query rows.
//!
//! Packed blocks are never unpacked: scores and weighted sums come from the codes, with scale and zero point factored out
//! (`wush_quant::Codec::dot`, `axpy`).

use std::ops::Range;

use wush_quant::{Accumulators, Queries};

use crate::kernels;
use crate::layer::{Head, Layer};
use crate::plan::{LayerPlan, Pair};
use crate::rows::{Full, Rows, Store};
use crate::{Result, RuntimeError};

/// Tokens of a block: its scores and its rows in f32 stay in the second-level cache, and a call of the packed products
/// has next to no fixed cost.
const BLOCK_TOKENS: usize = 256;
/// Query rows that share a pass: their sums stay in the first-level cache.
const TILE_ROWS: usize = 64;

/// What one head's attention reads.
#[derive(Clone, Copy)]
pub(crate) struct HeadView<'a> {
    pub(crate) plan: &'a LayerPlan,
    pub(crate) layer: &'a Layer,
    pub(crate) head: &'a Head,
}

/// Consecutive tokens that are stored alike.
struct Block<'a> {
    /// Position of the first.
    first: usize,
    n_tokens: usize,
    rows: Pair<BlockRows<'a>>,
}

/// Keys or values of a block.
enum BlockRows<'a> {
    /// Elements of rows in full precision.
    Full(&'a Full, Range<usize>),
    Packed(&'a [u8]),
}

/// Query positions that share a pass over the cache.
pub(crate) fn tile_tokens(plan: &LayerPlan) -> usize {
    (TILE_ROWS / plan.config.group()).max(1)
}

impl HeadView<'_> {
    /// Outputs, `[tokens, group, d]`, of `queries` at the positions from `first_position` on, `[tokens, group, d]`: at most
    /// [`tile_tokens`] of them, at least one.
    pub(crate) fn attend(&self, queries: &[f32], first_position: usize) -> Result<Vec<f32>> {
        let mut tile = Tile::new(self.plan, queries, first_position)?;
        self.for_each_block(tile.visible(), |block| tile.add(&block))?;
        tile.finish()
    }

    /// Visits what is held of positions `visible`, in order, in blocks.
    fn for_each_block(
        &self,
        visible: Range<usize>,
        mut visit: impl FnMut(Block<'_>) -> wush_quant::Result<()>,
    ) -> Result<()> {
        let d = self.plan.head_dim();
        for part in self.parts() {
            let start = visible.start.saturating_sub(part.first);
            let end = visible.end.saturating_sub(part.first).min(part.n_tokens);
            for first in (start..end).step_by(BLOCK_TOKENS) {
                let tokens = first..(first + BLOCK_TOKENS).min(end);
                let [keys, values] = part.rows.each();
                let rows = Pair::new(
                    keys.block(&self.plan.stores.keys, d, tokens.clone()),
                    values.block(&self.plan.stores.values, d, tokens.clone()),
                );
                visit(Block { first: part.first + first, n_tokens: tokens.len(), rows })
                    .map_err(|source| RuntimeError::Quant { layer: self.plan.layer, source })?;
            }
        }
        Ok(())
    }

    /// All that is held, in order of position: the sink, the pages, the recent window.
    fn parts(&self) -> impl Iterator<Item = HeldPart<'_>> {
        let (plan, layer, head) = (self.plan, self.layer, self.head);
        let n_sink = layer.n_sink(plan);
        let pages = head.pages.iter().enumerate().map(move |(index, page)| {
            let held = layer.n_freed + index * plan.page_tokens;
            let [keys, values] = page.each().map(HeldRows::Page);
            let n_tokens = plan.page_tokens.min(layer.n_packed - held);
            HeldPart { first: n_sink + held, n_tokens, rows: Pair::new(keys, values) }
        });
        let first_recent = n_sink + layer.n_packed;
        let recent = window_part(first_recent, layer.len - first_recent, &head.recent);
        std::iter::once(window_part(0, n_sink, &head.sink)).chain(pages).chain([recent])
    }
}

/// Consecutive tokens of one buffer.
struct HeldPart<'a> {
    /// Position of the first.
    first: usize,
    n_tokens: usize,
    rows: Pair<HeldRows<'a>>,
}

fn window_part(first: usize, n_tokens: usize, rows: &Pair<Full>) -> HeldPart<'_> {
    let [keys, values] = rows.each().map(HeldRows::Window);
    HeldPart { first, n_tokens, rows: Pair::new(keys, values) }
}

/// Keys or values of a [`HeldPart`], and whatever lies behind them.
enum HeldRows<'a> {
    Window(&'a Full),
    Page(&'a Rows),
}

impl<'a> HeldRows<'a> {
    fn block(&self, store: &Store, head_dim: usize, tokens: Range<usize>) -> BlockRows<'a> {
        let elements = tokens.start * head_dim..tokens.end * head_dim;
        match *self {
            Self::Window(rows) | Self::Page(Rows::Full(rows)) => BlockRows::Full(rows, elements),
            Self::Page(Rows::Packed(bytes)) => {
                let n_bytes = store.row_len(head_dim);
                BlockRows::Packed(&bytes[tokens.start * n_bytes..tokens.end * n_bytes])
            }
        }
    }
}

/// The online softmax of a tile of query rows `[tokens, group]`.
struct Tile<'a> {
    plan: &'a LayerPlan,
    /// Position of the first row.
    first: usize,
    /// Rows times the softmax's scale, `[rows, d]`.
    queries: Vec<f32>,
    /// The same, as the packed product wants them.
    packed_queries: Option<Queries>,
    /// Largest score so far, one a row.
    max: Vec<f32>,
    /// Σ exp(score − max), one a row.
    sum: Vec<f32>,
    /// Σ exp(score − max) v over values in full precision, `[rows, d]`.
    full_sums: Vec<f32>,
    /// The same over packed values.
    packed_sums: Option<Accumulators>,
    scores: Vec<f32>,
    scratch: Vec<f32>,
}

impl<'a> Tile<'a> {
    fn new(plan: &'a LayerPlan, queries: &[f32], first: usize) -> Result<Self> {
        let n_rows = queries.len() / plan.head_dim();
        let queries: Vec<f32> = queries.iter().map(|q| q * plan.config.scale).collect();
        let packed_queries = match &plan.stores.keys {
            Store::Packed(codec) => Some(Queries::new(codec.layout(), &queries)),
            Store::Full(_) => None,
        };
        let packed_sums = match &plan.stores.values {
            Store::Packed(codec) => Some(Accumulators::new(codec.layout(), n_rows)),
            Store::Full(_) => None,
        };
        Ok(Self {
            plan,
            first,
            packed_queries: packed_queries
                .transpose()
                .map_err(|source| RuntimeError::Quant { layer: plan.layer, source })?,
            max: vec![f32::NEG_INFINITY; n_rows],
            sum: vec![0.0; n_rows],
            full_sums: vec![0.0; queries.len()],
            packed_sums,
            queries,
            scores: Vec::new(),
            scratch: Vec::new(),
        })
    }

    fn n_rows(&self) -> usize {
        self.max.len()
    }

    /// Position of a row.
    fn position(&self, row: usize) -> usize {
        self.first + row / self.plan.config.group()
    }

    /// Positions that any row reads.
    fn visible(&self) -> Range<usize> {
        self.plan.first_visible(self.first)..self.position(self.n_rows() - 1) + 1
    }

    /// Takes a block in.
    fn add(&mut self, block: &Block<'_>) -> wush_quant::Result<()> {
        self.score(block)?;
        for row in 0..self.n_rows() {
            self.weigh(row, block);
        }
        match (&block.rows.values, &mut self.packed_sums, &self.plan.stores.values) {
            (BlockRows::Packed(bytes), Some(sums), Store::Packed(codec)) => codec.axpy(&self.scores, bytes, sums)?,
            (BlockRows::Full(rows, range), ..) => {
                let values = rows.read(range.clone(), &mut self.scratch);
                kernels::axpy(&self.scores, values, self.plan.head_dim(), &mut self.full_sums);
            }
            _ => unreachable!("packed rows stand only where the plan packs"),
        }
        Ok(())
    }

    /// Scores of all rows against the block, `[rows, tokens]`.
    fn score(&mut self, block: &Block<'_>) -> wush_quant::Result<()> {
        self.scores.clear();
        self.scores.resize(self.n_rows() * block.n_tokens, 0.0);
        match (&block.rows.keys, &self.packed_queries, &self.plan.stores.keys) {
            (BlockRows::Packed(bytes), Some(queries), Store::Packed(codec)) => {
                codec.dot(queries, bytes, &mut self.scores)?;
            }
            (BlockRows::Full(rows, range), ..) => {
                let keys = rows.read(range.clone(), &mut self.scratch);
                kernels::dot(&self.queries, keys, self.plan.head_dim(), &mut self.scores);
            }
            _ => unreachable!("packed rows stand only where the plan packs"),
        }
        if let Some(cap) = self.plan.config.softcap {
            kernels::softcap(&mut self.scores, cap);
        }
        Ok(())
    }

    /// Turns one row's scores into weights exp(score − max), zero where the row does not look, and brings its sums to the new
    /// maximum.
    fn weigh(&mut self, row: usize, block: &Block<'_>) {
        let position = self.position(row);
        let end = (position + 1).saturating_sub(block.first).min(block.n_tokens);
        let start = self.plan.first_visible(position).saturating_sub(block.first).min(end);
        let scores = &mut self.scores[row * block.n_tokens..][..block.n_tokens];
        scores[..start].fill(0.0);
        scores[end..].fill(0.0);
        let scores = &mut scores[start..end];
        let largest = kernels::max(scores);
        if largest > self.max[row] {
            let d = self.plan.head_dim();
            let factor = kernels::exp_of(self.max[row] - largest);
            self.sum[row] *= factor;
            self.full_sums[row * d..][..d].iter_mut().for_each(|x| *x *= factor);
            if let Some(sums) = &mut self.packed_sums {
                sums.rescale(row, factor);
            }
            self.max[row] = largest;
        }
        self.sum[row] += kernels::exp_and_sum(scores, self.max[row]);
    }

    /// The outputs, `[rows, d]`.
    fn finish(mut self) -> Result<Vec<f32>> {
        if let Some(sums) = &self.packed_sums {
            let added = sums.add_to(&mut self.full_sums);
            added.map_err(|source| RuntimeError::Quant { layer: self.plan.layer, source })?;
        }
        for (row, sum) in self.full_sums.chunks_exact_mut(self.plan.head_dim()).zip(&self.sum) {
            row.iter_mut().for_each(|x| *x /= sum);
        }
        Ok(self.full_sums)
    }
}
