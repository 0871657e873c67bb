//! The forward pass: one generic decoder over a [`Backend`].
//!
//! Enters: a checkpoint, its [`ModelSpec`], token ids. Leaves: queries, keys and values as the attention product gets
//! them (after bias, norm and RoPE) to an [`Observer`], or final hidden states and logits. Weights are widened one layer
//! at a time and dropped after it, unless they are to stay, so memory is the map, one layer, and the activations of a few
//! sequences.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rayon::prelude::*;
use wush_checkpoint::Checkpoint;
use wush_format::monitor::{Monitor, Quiet};

use crate::attention::{AttentionProduct, Exact, Place};
use crate::backend::{Backend, Head};
use crate::error::{ModelError, Result};
use crate::layer::{Layer, Norm, Qkv};
use crate::observer::Observer;
use crate::rope::RopeTables;
use crate::spec::{LayerSpec, MlpSpec, ModelSpec};
use crate::weights;

/// Tokens whose hidden states are kept while one layer's weights are resident. Larger amortizes widening better; at this
/// size it costs under 3 % of the products of the smallest models.
pub const GROUP_TOKENS: usize = 8192;

/// Positions whose logits are computed together.
const LOGIT_ROWS: usize = 128;

/// A decoder bound to a checkpoint and a device.
pub struct Decoder<'a, B: Backend> {
    pub(crate) checkpoint: &'a Checkpoint,
    pub(crate) spec: &'a ModelSpec,
    pub(crate) backend: &'a B,
    /// Layers on the device, where they stay there from pass to pass.
    kept: Option<Mutex<BTreeMap<usize, Arc<Layer<B>>>>>,
    /// Of the last pass: the next one is likely over sequences of the same lengths.
    tables: Mutex<RopeTables<B>>,
}

/// How far a pass goes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Depth {
    /// Up to the last layer's q, k and v. Whether they are finite is the observer's to see.
    Observe,
    /// Through every layer, checking that its hidden states are finite.
    Full,
}

/// One layer of one sequence.
pub(crate) struct Step<'s, B: Backend> {
    pub layer: &'s Layer<B>,
    pub place: Place,
    pub table: Option<&'s B::Rope>,
    /// Whether the layer goes on after its queries, keys and values.
    pub is_whole: bool,
}

/// Looks at nothing.
struct Unobserved;

impl<B: Backend> Observer<B> for Unobserved {
    type Seen = ();

    fn see(&self, _: &B, _: usize, _: &B::Tensor, _: &B::Tensor, _: &B::Tensor) -> Result<()> {
        Ok(())
    }

    fn add(&mut self, _: usize, (): ()) -> Result<()> {
        Ok(())
    }
}

impl<'a, B: Backend> Decoder<'a, B> {
    /// Binds a checkpoint to a device. `spec` must come from [`crate::arch::resolve`] for this checkpoint: it has
    /// checked every shape.
    pub fn new(checkpoint: &'a Checkpoint, spec: &'a ModelSpec, backend: &'a B) -> Self {
        Self { checkpoint, spec, backend, kept: None, tables: Mutex::new(RopeTables::new()) }
    }

    /// Keeps every layer's weights on the device once a pass has brought them there.
    pub fn keeping_weights(self) -> Self {
        Self { kept: Some(Mutex::default()), ..self }
    }

    /// Algorithm 1's forward: every layer's queries, keys and values of every sequence, to `observer`. The last layer
    /// stops after them; no logits. Counts tokens into `monitor`'s current stage.
    ///
    /// # Errors
    /// `Sequence` for ids or lengths that the model cannot take; `Interrupted`; the observer's own.
    pub fn observe<O: Observer<B>>(
        &self,
        sequences: &[Vec<u32>],
        observer: &mut O,
        monitor: &dyn Monitor,
    ) -> Result<()> {
        self.check(sequences)?;
        for group in groups(sequences, GROUP_TOKENS) {
            self.pass(&sequences[group], observer, Depth::Observe, &Exact, monitor)?;
        }
        Ok(())
    }

    /// Final hidden states of one sequence, after the last norm: `[tokens, hidden]`.
    ///
    /// # Errors
    /// `Sequence`; a tensor that cannot be read; `NonFinite` with the layer after which NaN or infinity appeared; the
    /// attention product's own.
    pub fn hidden(&self, ids: &[u32], attention: &dyn AttentionProduct<B>) -> Result<B::Tensor> {
        let hidden = self.hidden_of(&[ids], attention, &Quiet)?;
        Ok(hidden.into_iter().next().expect("one sequence in, one out"))
    }

    /// The same of several sequences, layer by layer together: a layer's weights are widened once for all of them. Memory
    /// grows with all their tokens. Counts tokens into `monitor`'s current stage.
    ///
    /// # Errors
    /// As [`Decoder::hidden`]; `Interrupted`.
    pub fn hidden_of<S: AsRef<[u32]> + Sync>(
        &self,
        sequences: &[S],
        attention: &dyn AttentionProduct<B>,
        monitor: &dyn Monitor,
    ) -> Result<Vec<B::Tensor>> {
        self.check(sequences)?;
        let hidden = self.pass(sequences, &mut Unobserved, Depth::Full, attention, monitor)?;
        let norm = Norm::load(self.checkpoint, &self.spec.final_norm, self.backend)?;
        let finish = |(sequence, x): (usize, &B::Tensor)| {
            let hidden = self.backend.norm(x, norm.as_ref())?;
            self.check_finite(&hidden, "states after the final norm", self.spec.layers.len() - 1, sequence)?;
            Ok(hidden)
        };
        hidden.iter().enumerate().map(finish).collect()
    }

    /// Hidden states after the last layer, or before its attention where that is all the observer needs.
    fn pass<S: AsRef<[u32]> + Sync, O: Observer<B>>(
        &self,
        sequences: &[S],
        observer: &mut O,
        depth: Depth,
        attention: &dyn AttentionProduct<B>,
        monitor: &dyn Monitor,
    ) -> Result<Vec<B::Tensor>> {
        let mut hidden = self.embed(sequences)?;
        let lengths: Vec<usize> = sequences.iter().map(|ids| ids.as_ref().len()).collect();
        // One pass at a time makes tables; another one beside it would make its own.
        let mut tables = std::mem::replace(&mut *self.tables(), RopeTables::new());
        tables.keep(&lengths);
        let n_layers = self.spec.layers.len();
        let mut ticks = Ticks::new(n_layers);
        for (id, spec) in self.spec.layers.iter().enumerate() {
            let layer = self.layer(id)?;
            let rope = spec.attn.rope.as_ref();
            tables.prepare(rope, &lengths, self.backend)?;
            observer.begin(id)?;
            let watched: &O = observer;
            let step = |(sequence, x): (usize, &mut B::Tensor)| {
                let place = Place { layer: id, sequence };
                let is_whole = depth == Depth::Full || id + 1 < n_layers;
                let step = Step { layer: &layer, place, table: tables.of(rope, lengths[sequence]), is_whole };
                let seen = self.step(&step, x, watched, attention, monitor)?;
                if depth == Depth::Full {
                    self.check_finite(x, "hidden states", id, sequence)?;
                }
                Ok(seen)
            };
            let seen: Vec<Result<O::Seen>> = if B::SIDE_BY_SIDE {
                // A sequence stays on one thread as long as there is one for every thread: no waiting inside a layer.
                hidden.par_iter_mut().enumerate().map(step).collect()
            } else {
                hidden.iter_mut().enumerate().map(step).collect()
            };
            seen.into_iter().try_for_each(|seen| observer.add(id, seen?))?;
            monitor.advance(ticks.add(lengths.iter().sum::<usize>() as u64));
        }
        *self.tables() = tables;
        Ok(hidden)
    }

    /// Shows a sequence's queries, keys and values in one layer, and takes its hidden states through the rest of it.
    pub(crate) fn step<O: Observer<B>>(
        &self,
        step: &Step<'_, B>,
        x: &mut B::Tensor,
        watched: &O,
        attention: &dyn AttentionProduct<B>,
        monitor: &dyn Monitor,
    ) -> Result<O::Seen> {
        if monitor.interrupted() {
            return Err(ModelError::Interrupted);
        }
        let Step { layer, place, table, is_whole } = *step;
        let spec = &self.spec.layers[place.layer];
        let Qkv { q, k, v } = layer.qkv(self.backend, &spec.attn, x, table)?;
        let seen = watched.see(self.backend, place.layer, &q, &k, &v)?;
        if is_whole {
            let attended = attention.attend(self.backend, place, [&q, &k, &v], &spec.attn.shape())?;
            drop((q, k, v));
            layer.finish(self.backend, spec, x, &attended)?;
        }
        Ok(seen)
    }

    pub(crate) fn tables(&self) -> MutexGuard<'_, RopeTables<B>> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A layer's weights on the device, as kept by an earlier pass, or brought there.
    fn layer(&self, id: usize) -> Result<Arc<Layer<B>>> {
        let load = || Layer::load(self.checkpoint, &self.spec.layers[id], self.backend).map(Arc::new);
        let Some(kept) = &self.kept else { return load() };
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(layer) = kept.get(&id) {
            return Ok(layer.clone());
        }
        let layer = load()?;
        kept.insert(id, layer.clone());
        Ok(layer)
    }

    pub(crate) fn check_finite(&self, x: &B::Tensor, what: &'static str, layer: usize, sequence: usize) -> Result<()> {
        let mut sums = vec![0.0; self.spec.hidden_size];
        self.backend.column_sum(x, &mut sums)?;
        match sums.iter().all(|sum| sum.is_finite()) {
            true => Ok(()),
            false => Err(ModelError::NonFinite { layer, what, sequence }),
        }
    }

    /// Logits of positions `rows` of [`Decoder::hidden`]'s result: `[rows, vocab]`.
    ///
    /// # Errors
    /// A tensor that cannot be read; `NonFinite`.
    pub fn logits(&self, hidden: &B::Tensor, rows: Range<usize>) -> Result<Vec<f32>> {
        self.logits_on(self.backend, hidden, rows)
    }

    /// The same on a backend with the same tensors.
    pub(crate) fn logits_on(&self, backend: &B, hidden: &B::Tensor, rows: Range<usize>) -> Result<Vec<f32>> {
        let head = self.head()?;
        let mut logits = backend.logits(hidden, rows, head.table)?;
        head.cap(&mut logits);
        if !logits.iter().sum::<f32>().is_finite() && logits.iter().any(|x| !x.is_finite()) {
            return Err(self.logits_not_finite());
        }
        Ok(logits)
    }

    fn head(&self) -> Result<Head<'_>> {
        let table = weights::view(self.checkpoint, &self.spec.lm_head)?;
        Ok(Head { table, softcap: self.spec.final_logit_softcap })
    }

    fn logits_not_finite(&self) -> ModelError {
        ModelError::NonFinite { layer: self.spec.layers.len() - 1, what: "logits", sequence: 0 }
    }

    /// Negative log likelihood of every token but the first, nats: `nll[t] = -log p(ids[t+1] | ids[..=t])`.
    ///
    /// # Errors
    /// As [`Decoder::hidden`].
    pub fn nll(&self, ids: &[u32], attention: &dyn AttentionProduct<B>) -> Result<Vec<f64>> {
        self.nll_of(&self.hidden(ids, attention)?, ids)
    }

    /// The same from the sequence's hidden states.
    ///
    /// # Errors
    /// As [`Decoder::logits`].
    pub fn nll_of(&self, hidden: &B::Tensor, ids: &[u32]) -> Result<Vec<f64>> {
        let head = self.head()?;
        let mut nll = Vec::with_capacity(ids.len().saturating_sub(1));
        for first in (0..ids.len().saturating_sub(1)).step_by(LOGIT_ROWS) {
            let rows = first..(first + LOGIT_ROWS).min(ids.len() - 1);
            let targets = &ids[rows.start + 1..=rows.end];
            nll.extend(self.backend.nll(hidden, rows, targets, head)?);
        }
        match nll.iter().all(|nll| nll.is_finite()) {
            true => Ok(nll),
            false => Err(self.logits_not_finite()),
        }
    }

    /// What is decoded.
    pub fn spec(&self) -> &ModelSpec {
        self.spec
    }

    /// W_O of a layer on the device, without its bias.
    ///
    /// # Errors
    /// A tensor that is absent or has another shape.
    pub fn output_projection(&self, layer: usize) -> Result<B::Matrix> {
        let slice = &self.spec.layers[layer].attn.o.weight;
        self.backend.matrix(weights::view(self.checkpoint, slice)?, slice.rows.clone())
    }

    /// Bytes that a run over sequences of at most `max_len` tokens holds on the device at once.
    pub fn memory(&self, max_len: usize) -> Memory {
        let layer = self.spec.layers.iter().map(layer_elements).max().unwrap_or(0);
        let attn =
            self.spec.layers.iter().map(|l| l.attn.head_dim * (2 * l.attn.n_heads + 2 * l.attn.n_kv_heads)).max();
        let group = max_len.max(GROUP_TOKENS);
        let resident = group * self.spec.hidden_size;
        // Every thread may have a sequence of its own in work.
        let in_work = max_len.saturating_mul(rayon::current_num_threads()).min(group);
        let working = in_work * (attn.unwrap_or(0) + 3 * self.spec.hidden_size);
        let bytes = |elements: usize| elements as u64 * size_of::<f32>() as u64;
        Memory { layer: bytes(layer), activations: bytes(resident + working) }
    }

    pub(crate) fn check<S: AsRef<[u32]>>(&self, sequences: &[S]) -> Result<()> {
        for (sequence, ids) in sequences.iter().map(AsRef::as_ref).enumerate() {
            let wrong = |detail: String| ModelError::Sequence { sequence, detail };
            if ids.is_empty() {
                return Err(wrong("it is empty".into()));
            }
            if let Some(id) = ids.iter().find(|&&id| id as usize >= self.spec.vocab_size) {
                return Err(wrong(format!("token id {id} is not below the vocabulary size {}", self.spec.vocab_size)));
            }
        }
        Ok(())
    }

    pub(crate) fn embed<S: AsRef<[u32]>>(&self, sequences: &[S]) -> Result<Vec<B::Tensor>> {
        sequences.iter().map(|ids| self.embed_one(ids.as_ref())).collect()
    }

    pub(crate) fn embed_one(&self, ids: &[u32]) -> Result<B::Tensor> {
        let table = weights::view(self.checkpoint, &self.spec.embedding)?;
        self.backend.embed(table, ids, self.spec.embedding_scale)
    }
}

/// What a run holds on the device, bytes, beside the map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// One layer's widened weights.
    pub layer: u64,
    /// Hidden states of the resident sequences and the largest working set of one.
    pub activations: u64,
}

/// Consecutive ranges of sequences, each of at most `max_tokens` tokens or a single sequence.
pub fn groups(sequences: &[Vec<u32>], max_tokens: usize) -> impl Iterator<Item = Range<usize>> + '_ {
    let mut start = 0;
    std::iter::from_fn(move || {
        let first = start;
        let mut n_tokens = sequences.get(first)?.len();
        start += 1;
        while let Some(next) = sequences.get(start)
            && n_tokens + next.len() <= max_tokens
        {
            n_tokens += next.len();
            start += 1;
        }
        Some(first..start)
    })
}

/// Turns token-layers into whole tokens for the progress report.
pub(crate) struct Ticks {
    n_layers: u64,
    done: u64,
    told: u64,
}

impl Ticks {
    pub fn new(n_layers: usize) -> Self {
        Self { n_layers: n_layers as u64, done: 0, told: 0 }
    }

    pub fn add(&mut self, n_tokens: u64) -> u64 {
        self.done += n_tokens;
        let whole = self.done / self.n_layers;
        std::mem::replace(&mut self.told, whole).abs_diff(whole)
    }
}

fn layer_elements(layer: &LayerSpec) -> usize {
    let (attn, MlpSpec { gate, up, down, .. }) = (&layer.attn, &layer.mlp);
    [&attn.q, &attn.k, &attn.v, &attn.o, gate, up, down].iter().map(|p| p.weight.rows.len() * p.weight.cols).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_cover_every_sequence_once_and_respect_the_limit() {
        let sequences: Vec<Vec<u32>> = [3, 4, 10, 1, 1, 1, 9].iter().map(|&n| vec![0; n]).collect();
        assert_eq!(groups(&sequences, 7).collect::<Vec<_>>(), [0..2, 2..3, 3..6, 6..7]);
        assert_eq!(groups(&[], 7).count(), 0);
    }

    #[test]
    fn ticks_add_up_to_the_tokens() {
        let mut ticks = Ticks { n_layers: 7, done: 0, told: 0 };
        assert_eq!((0..7 * 3).map(|_| ticks.add(5)).sum::<u64>(), 15);
    }
}
