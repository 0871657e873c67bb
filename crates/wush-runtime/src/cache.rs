//! The cache: sequences, each with all its layers, and Algorithm 2 over batches of them.
//!
//! Enters: keys, values and queries in f32, in transformed coordinates (see [`KeyTransforms`](crate::KeyTransforms)). Leaves:
//! attention outputs. Does not know positions' embeddings, tokens or weights.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use wush_format::hash::Sha;
use wush_quant::{Feedback, MAX_MAGNITUDE};

use crate::attention::{HeadView, tile_tokens};
use crate::config::CacheConfig;
use crate::kernels::first_beyond;
use crate::layer::Layer;
use crate::plan::{LayerPlan, Pair};
use crate::{Result, RuntimeError, threads};

/// A sequence of a cache. Ids are not used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(u64);

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Some consecutive tokens of one sequence. A batch is a list of parts, and its tensors hold their tokens one part after
/// another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// The sequence; at most once in a batch.
    pub sequence: SequenceId,
    /// Tokens in this batch.
    pub n_tokens: usize,
}

/// One attention layer's input for a batch, row-major f32, in transformed coordinates.
#[derive(Debug, Clone, Copy)]
pub struct Chunk<'a> {
    /// `[tokens, n_heads, d]`.
    pub queries: &'a [f32],
    /// `[tokens, n_kv_heads, d]`.
    pub keys: &'a [f32],
    /// `[tokens, n_kv_heads, d]`.
    pub values: &'a [f32],
}

/// A paged, packed, windowed KV cache of any number of sequences.
#[derive(Debug, Clone)]
pub struct KvCache {
    pub(crate) config: CacheConfig,
    pub(crate) plans: Vec<LayerPlan>,
    pub(crate) sequences: BTreeMap<SequenceId, Vec<Layer>>,
    next: u64,
}

impl KvCache {
    /// An empty cache.
    ///
    /// # Errors
    /// `Config`, naming the field that is out of range.
    pub fn new(config: CacheConfig) -> Result<Self> {
        config.check()?;
        let plans = (0..config.layers.len()).map(|layer| LayerPlan::new(&config, layer)).collect::<Result<_>>()?;
        Ok(Self { config, plans, sequences: BTreeMap::new(), next: 0 })
    }

    /// Gives a layer's encoder the factors L of its metrics, `[n_kv_heads, d, d]` row-major, of a bundle's `key_feedback` and
    /// `value_feedback`: what is quantized from now on is coded with error feedback. Reading does not change. No effect on
    /// what is stored at 16 bits.
    ///
    /// # Errors
    /// `NoLayer`, `Length`; `Quant` for a matrix that is not unit lower triangular.
    pub fn set_feedback(&mut self, layer: usize, keys: Option<&[f32]>, values: Option<&[f32]>) -> Result<()> {
        let config = &self.plan(layer)?.config;
        let (n_heads, d) = (config.n_kv_heads, config.head_dim);
        let of_heads = |what, matrices: &[f32]| -> Result<Vec<Feedback>> {
            check_length(layer, what, n_heads * d * d, matrices.len())?;
            let made = matrices.chunks_exact(d * d).map(|lower| Feedback::new(d, lower));
            made.collect::<Result<_, _>>().map_err(|source| RuntimeError::Quant { layer, source })
        };
        let made_keys = keys.map(|lower| of_heads("key feedback [KV heads, d, d]", lower)).transpose()?;
        let made_values = values.map(|lower| of_heads("value feedback [KV heads, d, d]", lower)).transpose()?;
        self.plans[layer].feedback = Pair::new(made_keys, made_values);
        self.plans[layer].feedback_hashes = Pair::new(keys.map(hash_of), values.map(hash_of));
        Ok(())
    }

    /// What it was made for.
    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// A new, empty sequence.
    pub fn add(&mut self) -> SequenceId {
        let layers = self.plans.iter().map(Layer::new).collect();
        self.insert(layers)
    }

    /// A sequence that begins as a copy of another. Sinks and pages are shared until either changes them.
    ///
    /// # Errors
    /// `NoSequence`.
    pub fn fork(&mut self, sequence: SequenceId) -> Result<SequenceId> {
        let layers = self.layers(sequence)?.clone();
        Ok(self.insert(layers))
    }

    /// Forgets a sequence; pages that no fork shares are freed.
    ///
    /// # Errors
    /// `NoSequence`.
    pub fn remove(&mut self, sequence: SequenceId) -> Result<()> {
        self.sequences.remove(&sequence).map(drop).ok_or(RuntimeError::NoSequence { sequence })
    }

    /// The sequences held, oldest first.
    pub fn sequences(&self) -> impl Iterator<Item = SequenceId> {
        self.sequences.keys().copied()
    }

    /// Tokens of a sequence in one layer (S). During a forward pass layers differ.
    ///
    /// # Errors
    /// `NoSequence`, `NoLayer`.
    pub fn len(&self, sequence: SequenceId, layer: usize) -> Result<usize> {
        self.plan(layer)?;
        Ok(self.layers(sequence)?[layer].len)
    }

    /// Positions of a sequence that one layer holds quantized (or, at 16 bits, in pages): S_sink up to S_quant.
    ///
    /// # Errors
    /// `NoSequence`, `NoLayer`.
    pub fn quantized(&self, sequence: SequenceId, layer: usize) -> Result<Range<usize>> {
        let plan = self.plan(layer)?;
        let state = &self.layers(sequence)?[layer];
        let first = state.n_sink(plan);
        Ok(first..first + state.n_packed)
    }

    /// Takes back all tokens of a sequence from `len` on, in every layer that has so many (speculative decoding). What was
    /// quantized stays quantized: until new tokens refill the recent window it holds fewer than S_keep.
    ///
    /// # Errors
    /// `NoSequence`; `Freed`, before anything changes, when a sliding-window layer would need tokens that it let go of
    /// ([`CacheConfig::rewind`]).
    pub fn truncate(&mut self, sequence: SequenceId, len: usize) -> Result<()> {
        let layers = self.sequences.get_mut(&sequence).ok_or(RuntimeError::NoSequence { sequence })?;
        for (plan, layer) in self.plans.iter().zip(&*layers).filter(|(_, layer)| layer.len > len) {
            if let Some(needed) = layer.missing_after(plan, len) {
                return Err(RuntimeError::Freed { layer: plan.layer, sequence, needed, first: layer.first_held(plan) });
            }
        }
        self.plans.iter().zip(layers).for_each(|(plan, layer)| layer.truncate(plan, len));
        Ok(())
    }

    /// Algorithm 2, lines 4 to 12, for one layer: [`append`](Self::append), [`attend`](Self::attend) for all tokens of the
    /// batch, [`flush`](Self::flush). A part is a chunk of the algorithm.
    ///
    /// `out`: `[tokens, n_heads, d]`, overwritten; values' coordinates are those that were appended.
    ///
    /// # Errors
    /// As those three. Nothing has changed then.
    pub fn step(&mut self, layer: usize, parts: &[Part], chunk: Chunk<'_>, out: &mut [f32]) -> Result<()> {
        let n_tokens: usize = parts.iter().map(|part| part.n_tokens).sum();
        let width = self.plan(layer)?.config.query_width();
        check_length(layer, "queries [tokens, heads, head dimension]", n_tokens * width, chunk.queries.len())?;
        check_length(layer, "outputs [tokens, heads, head dimension]", n_tokens * width, out.len())?;
        self.append(layer, parts, chunk.keys, chunk.values)?;
        self.attend(layer, parts, chunk.queries, out)?;
        self.flush(layer, parts)
    }

    /// Line 4: appends keys and values, `[tokens, n_kv_heads, d]`, in full precision. What an earlier chunk left to quantize
    /// is quantized first, so queries always find the boundary as it was when their chunk began.
    ///
    /// # Errors
    /// `NoLayer`, `NoSequence`, `Twice`, `Length`; `OutOfRange` for a NaN, an infinity or a magnitude that no quantizer takes.
    /// Nothing has changed then.
    pub fn append(&mut self, layer: usize, parts: &[Part], keys: &[f32], values: &[f32]) -> Result<()> {
        let n_tokens = self.check_parts(layer, parts)?;
        let width = self.plans[layer].config.kv_width();
        check_length(layer, "keys [tokens, KV heads, head dimension]", n_tokens * width, keys.len())?;
        check_length(layer, "values [tokens, KV heads, head dimension]", n_tokens * width, values.len())?;
        for (what, x) in [("key", keys), ("value", values)] {
            self.check_numbers(layer, what, x)?;
        }
        self.flush(layer, parts)?;
        let mut first = 0;
        for (part, end) in parts.iter().zip(ends(parts)) {
            let range = first * width..end * width;
            let state = &mut self.sequences.get_mut(&part.sequence).expect("checked above")[layer];
            state.append(&self.plans[layer], &keys[range.clone()], &values[range]);
            first = end;
        }
        Ok(())
    }

    /// Line 5: attention (Eq. 2) of the newest `n_tokens` positions of each part. `queries` and `out`: `[tokens, n_heads, d]`;
    /// the output is in the coordinates of the values.
    ///
    /// Each query sees the positions up to its own (of a sliding window: the last of them), quantized or not as they are
    /// stored now; no logit is rounded below f32. A NaN in a query makes that head's output NaN, and no other.
    ///
    /// # Errors
    /// `NoLayer`, `NoSequence`, `Twice`, `Length`; `Positions` when a part is longer than its sequence; `Freed`.
    pub fn attend(&self, layer: usize, parts: &[Part], queries: &[f32], out: &mut [f32]) -> Result<()> {
        let n_tokens = self.check_parts(layer, parts)?;
        let plan = &self.plans[layer];
        let width = plan.config.query_width();
        check_length(layer, "queries [tokens, heads, head dimension]", n_tokens * width, queries.len())?;
        check_length(layer, "outputs [tokens, heads, head dimension]", n_tokens * width, out.len())?;
        parts.iter().try_for_each(|part| self.check_positions(layer, part))?;
        let tiles = self.tiles(layer, parts);
        let per_head = plan.config.group() * plan.head_dim();
        let of_head = |tile: &Tile| tile.head * per_head..(tile.head + 1) * per_head;
        let outputs = threads::map(tiles.len(), |index| {
            let tile = &tiles[index];
            let state = &self.sequences[&tile.sequence][layer];
            let view = HeadView { plan, layer: state, head: &state.heads[tile.head] };
            let tokens = queries[tile.rows.start * width..tile.rows.end * width].chunks_exact(width);
            let queries: Vec<f32> = tokens.flat_map(|token| &token[of_head(tile)]).copied().collect();
            view.attend(&queries, tile.position)
        });
        for (tile, output) in tiles.iter().zip(outputs) {
            let tokens = out[tile.rows.start * width..tile.rows.end * width].chunks_exact_mut(width);
            for (token, output) in tokens.zip(output?.chunks_exact(per_head)) {
                token[of_head(tile)].copy_from_slice(output);
            }
        }
        Ok(())
    }

    /// A batch's attention cut into independent pieces.
    fn tiles(&self, layer: usize, parts: &[Part]) -> Vec<Tile> {
        let plan = &self.plans[layer];
        let mut tiles = Vec::new();
        for (part, end) in parts.iter().zip(ends(parts)) {
            let first_position = self.sequences[&part.sequence][layer].len - part.n_tokens;
            for head in 0..plan.config.n_kv_heads {
                for first in (0..part.n_tokens).step_by(tile_tokens(plan)) {
                    let n_tokens = tile_tokens(plan).min(part.n_tokens - first);
                    let row = end - part.n_tokens + first;
                    let (rows, position) = (row..row + n_tokens, first_position + first);
                    tiles.push(Tile { sequence: part.sequence, head, rows, position });
                }
            }
        }
        tiles
    }

    /// Lines 7 to 12: quantizes what has left both windows of the parts' sequences.
    ///
    /// # Errors
    /// `NoLayer`, `NoSequence`, `Twice`.
    pub fn flush(&mut self, layer: usize, parts: &[Part]) -> Result<()> {
        self.check_parts(layer, parts)?;
        for part in parts {
            let state = &mut self.sequences.get_mut(&part.sequence).expect("checked above")[layer];
            state.flush(&self.plans[layer])?;
        }
        Ok(())
    }

    pub(crate) fn insert(&mut self, layers: Vec<Layer>) -> SequenceId {
        let id = SequenceId(self.next);
        self.next += 1;
        self.sequences.insert(id, layers);
        id
    }

    pub(crate) fn layers(&self, sequence: SequenceId) -> Result<&Vec<Layer>> {
        self.sequences.get(&sequence).ok_or(RuntimeError::NoSequence { sequence })
    }

    fn plan(&self, layer: usize) -> Result<&LayerPlan> {
        self.plans.get(layer).ok_or_else(|| RuntimeError::NoLayer { layer, last: self.plans.len() - 1 })
    }

    /// Tokens of a batch whose layer and sequences exist.
    fn check_parts(&self, layer: usize, parts: &[Part]) -> Result<usize> {
        self.plan(layer)?;
        let mut seen = std::collections::BTreeSet::new();
        for part in parts {
            self.layers(part.sequence)?;
            if !seen.insert(part.sequence) {
                return Err(RuntimeError::Twice { sequence: part.sequence });
            }
        }
        Ok(parts.iter().map(|part| part.n_tokens).sum())
    }

    fn check_positions(&self, layer: usize, part: &Part) -> Result<()> {
        let (plan, sequence) = (&self.plans[layer], part.sequence);
        let state = &self.layers(sequence)?[layer];
        let Some(first) = state.len.checked_sub(part.n_tokens) else {
            return Err(RuntimeError::Positions { layer, sequence, found: part.n_tokens, n_tokens: state.len });
        };
        match state.missing_after(plan, first) {
            Some(needed) if part.n_tokens > 0 => {
                Err(RuntimeError::Freed { layer, sequence, needed, first: state.first_held(plan) })
            }
            _ => Ok(()),
        }
    }

    fn check_numbers(&self, layer: usize, what: &'static str, x: &[f32]) -> Result<()> {
        let Some(at) = first_beyond(x, MAX_MAGNITUDE) else { return Ok(()) };
        let (d, width) = (self.plans[layer].head_dim(), self.plans[layer].config.kv_width());
        let (token, head, coordinate) = (at / width, at % width / d, at % d);
        Err(RuntimeError::OutOfRange { layer, what, token, head, coordinate, value: x[at] })
    }
}

/// Some of a part's query positions, for the query heads of one KV head.
struct Tile {
    sequence: SequenceId,
    head: usize,
    /// Rows of the batch.
    rows: Range<usize>,
    /// Position of the first.
    position: usize,
}

/// One past each part's last row in the batch.
fn ends(parts: &[Part]) -> impl Iterator<Item = usize> {
    parts.iter().scan(0, |end, part| {
        *end += part.n_tokens;
        Some(*end)
    })
}

fn hash_of(matrices: &[f32]) -> Sha {
    Sha::of(&matrices.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())
}

pub(crate) fn check_length(layer: usize, what: &'static str, expected: usize, found: usize) -> Result<()> {
    if expected == found { Ok(()) } else { Err(RuntimeError::Length { layer, what, expected, found }) }
}
