//! The forward pass: one generic decoder over a [`Backend`].
//!
//! Enters: a checkpoint, its [`ModelSpec`], token ids. Leaves: queries, keys and values as the attention product gets
//! them (after bias, norm and RoPE) to an [`Observer`], or final hidden states and logits. Weights are widened one layer
//! at a time and dropped after it, so memory is the map, one layer, and the activations of a few sequences.

use std::collections::BTreeMap;
use std::ops::Range;

use rayon::prelude::*;
use wush_checkpoint::Checkpoint;
use wush_format::bundle::KeySidecar;
use wush_format::monitor::Monitor;

use crate::backend::{AttentionShape, Backend, Mlp};
use crate::error::{ModelError, Result};
use crate::layer::{Layer, Linear, Norm};
use crate::observer::Observer;
use crate::rope::{RopeTable, RopeTables};
use crate::spec::{AttentionSpec, LayerSpec, MlpSpec, ModelSpec, QkNorm};
use crate::weights;

/// Tokens whose hidden states are kept while one layer's weights are resident. Larger amortizes widening better; at this
/// size it costs under 3 % of the products of the smallest models.
pub const GROUP_TOKENS: usize = 8192;

/// Positions whose logits are computed together.
const LOGIT_ROWS: usize = 128;

/// A decoder bound to a checkpoint and a device.
pub struct Decoder<'a, B: Backend> {
    checkpoint: &'a Checkpoint,
    spec: &'a ModelSpec,
    backend: &'a B,
    key_transforms: BTreeMap<usize, KeyTransform<B>>,
}

/// T_K and T_K^{-T} of one layer, on the device.
struct KeyTransform<B: Backend> {
    key: B::Matrix,
    query: B::Matrix,
}

/// Queries, keys and values of one sequence in one layer.
struct Qkv<T> {
    q: T,
    k: T,
    v: T,
}

/// What a layer's attention returns: nothing in the last layer of a calibration.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Depth {
    /// Stop after q, k and v.
    Observe,
    /// Run the whole layer.
    Full,
}

impl<'a, B: Backend> Decoder<'a, B> {
    /// Binds a checkpoint to a device. `spec` must come from [`crate::arch::resolve`] for this checkpoint: it has
    /// checked every shape.
    pub fn new(checkpoint: &'a Checkpoint, spec: &'a ModelSpec, backend: &'a B) -> Self {
        Self { checkpoint, spec, backend, key_transforms: BTreeMap::new() }
    }

    /// Applies a key sidecar as a key-transforming server does: T_K to keys and T_K^{-T} to queries, after RoPE.
    /// Observers still see the untransformed ones.
    ///
    /// # Errors
    /// `Tensor` when the sidecar's heads are not the model's.
    pub fn with_key_transforms(mut self, sidecar: &KeySidecar) -> Result<Self> {
        for (&id, layer) in &sidecar.layers {
            let found = (layer.n_kv_heads, layer.head_dim);
            let expected = self.spec.layers.get(id).map(|l| (l.attn.n_kv_heads, l.attn.head_dim));
            if expected != Some(found) {
                return Err(ModelError::Tensor {
                    name: format!("layers.{id}.key"),
                    expected: format!("(KV heads, head dim) {expected:?}"),
                    found: format!("{found:?}"),
                });
            }
            let on_device = |data| self.backend.head_matrices(layer.n_kv_heads, layer.head_dim, data);
            let transform = KeyTransform { key: on_device(&layer.key), query: on_device(&layer.query) };
            self.key_transforms.insert(id, transform);
        }
        Ok(self)
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
            self.observe_group(&sequences[group], observer, monitor)?;
        }
        Ok(())
    }

    fn observe_group<O: Observer<B>>(
        &self,
        sequences: &[Vec<u32>],
        observer: &mut O,
        monitor: &dyn Monitor,
    ) -> Result<()> {
        let mut hidden = self.embed(sequences)?;
        let mut tables = RopeTables::default();
        let n_layers = self.spec.layers.len();
        let n_tokens: usize = sequences.iter().map(Vec::len).sum();
        let mut ticks = Ticks { n_layers: n_layers as u64, done: 0, told: 0 };
        for id in 0..n_layers {
            let layer = Layer::load(self.checkpoint, &self.spec.layers[id], self.backend)?;
            let depth = if id + 1 == n_layers { Depth::Observe } else { Depth::Full };
            let rope = self.spec.layers[id].attn.rope.as_ref();
            tables.prepare(rope, sequences.iter().map(Vec::len));
            let watched: &O = observer;
            let step = |(x, ids): (&mut B::Tensor, &Vec<u32>)| {
                if monitor.interrupted() {
                    return Err(ModelError::Interrupted);
                }
                let qkv = self.qkv(id, &layer, x, tables.of(rope, ids.len()));
                let seen = watched.see(self.backend, id, &qkv.q, &qkv.k, &qkv.v)?;
                if depth == Depth::Full {
                    self.finish_layer(id, &layer, x, qkv);
                }
                Ok(seen)
            };
            // A sequence stays on one thread as long as there is one for every thread: no waiting inside a layer.
            let seen: Vec<Result<O::Seen>> = hidden.par_iter_mut().zip(sequences).map(step).collect();
            seen.into_iter().try_for_each(|seen| observer.add(id, seen?))?;
            monitor.advance(ticks.add(n_tokens as u64));
        }
        Ok(())
    }

    /// Final hidden states of one sequence, after the last norm: `[tokens, hidden]`.
    ///
    /// # Errors
    /// `Sequence`; a tensor that cannot be read; `NonFinite` with the layer after which NaN or infinity appeared.
    pub fn hidden(&self, ids: &[u32]) -> Result<B::Tensor> {
        let sequences = [ids.to_vec()];
        self.check(&sequences)?;
        let mut x = self.embed(&sequences)?.pop().expect("one sequence in, one out");
        let mut tables = RopeTables::default();
        for (id, spec) in self.spec.layers.iter().enumerate() {
            let layer = Layer::load(self.checkpoint, spec, self.backend)?;
            let rope = spec.attn.rope.as_ref();
            tables.prepare(rope, [ids.len()]);
            let qkv = self.qkv(id, &layer, &x, tables.of(rope, ids.len()));
            self.finish_layer(id, &layer, &mut x, qkv);
            self.check_finite(&x, "hidden states", id)?;
        }
        let norm = Norm::load(self.checkpoint, &self.spec.final_norm, self.backend)?;
        let hidden = self.backend.norm(&x, norm.as_ref());
        self.check_finite(&hidden, "states after the final norm", self.spec.layers.len() - 1)?;
        Ok(hidden)
    }

    fn check_finite(&self, x: &B::Tensor, what: &'static str, layer: usize) -> Result<()> {
        let mut sums = vec![0.0; self.spec.hidden_size];
        self.backend.column_sum(x, &mut sums);
        match sums.iter().all(|sum| sum.is_finite()) {
            true => Ok(()),
            false => Err(ModelError::NonFinite { layer, what, sequence: 0 }),
        }
    }

    /// Logits of positions `rows` of [`Decoder::hidden`]'s result: `[rows, vocab]`.
    ///
    /// # Errors
    /// A tensor that cannot be read; `NonFinite`.
    pub fn logits(&self, hidden: &B::Tensor, rows: Range<usize>) -> Result<Vec<f32>> {
        let table = weights::view(self.checkpoint, &self.spec.lm_head)?;
        let mut logits = self.backend.logits(hidden, rows, table);
        if let Some(cap) = self.spec.final_logit_softcap {
            logits.iter_mut().for_each(|x| *x = cap * (*x / cap).tanh());
        }
        if !logits.iter().sum::<f32>().is_finite() && logits.iter().any(|x| !x.is_finite()) {
            return Err(ModelError::NonFinite { layer: self.spec.layers.len() - 1, what: "logits", sequence: 0 });
        }
        Ok(logits)
    }

    /// Negative log likelihood of every token but the first, nats: `nll[t] = -log p(ids[t+1] | ids[..=t])`.
    ///
    /// # Errors
    /// As [`Decoder::hidden`].
    pub fn nll(&self, ids: &[u32]) -> Result<Vec<f64>> {
        let hidden = self.hidden(ids)?;
        let mut nll = Vec::with_capacity(ids.len().saturating_sub(1));
        for first in (0..ids.len().saturating_sub(1)).step_by(LOGIT_ROWS) {
            let rows = first..(first + LOGIT_ROWS).min(ids.len() - 1);
            let logits = self.logits(&hidden, rows.clone())?;
            let of_row = |(t, row): (usize, &[f32])| log_sum_exp(row) - f64::from(row[ids[t + 1] as usize]);
            nll.par_extend(rows.into_par_iter().zip(logits.par_chunks_exact(self.spec.vocab_size)).map(of_row));
        }
        Ok(nll)
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

    fn check(&self, sequences: &[Vec<u32>]) -> Result<()> {
        for (sequence, ids) in sequences.iter().enumerate() {
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

    fn embed(&self, sequences: &[Vec<u32>]) -> Result<Vec<B::Tensor>> {
        let table = weights::view(self.checkpoint, &self.spec.embedding)?;
        Ok(sequences.iter().map(|ids| self.backend.embed(table, ids, self.spec.embedding_scale)).collect())
    }

    /// Queries, keys and values as the attention product gets them.
    fn qkv(&self, id: usize, layer: &Layer<B>, x: &B::Tensor, table: Option<&RopeTable>) -> Qkv<B::Tensor> {
        let spec = &self.spec.layers[id].attn;
        let projections = [&layer.q, &layer.k, &layer.v].map(Linear::as_ref);
        let [mut q, mut k, v] = self.backend.project(x, layer.attn_pre_norm.as_ref().map(Norm::as_ref), projections);
        self.norm_and_rotate(&mut q, spec, &spec.q_norm, layer.q_norm.as_ref(), table);
        self.norm_and_rotate(&mut k, spec, &spec.k_norm, layer.k_norm.as_ref(), table);
        Qkv { q, k, v }
    }

    fn norm_and_rotate(
        &self,
        x: &mut B::Tensor,
        spec: &AttentionSpec,
        kind: &QkNorm,
        norm: Option<&Norm<B>>,
        table: Option<&RopeTable>,
    ) {
        let per_head = match kind {
            QkNorm::PerHead(_) => norm.map(|norm| (&norm.weight, norm.eps)),
            QkNorm::FullWidth(_) => {
                if let Some(norm) = norm {
                    *x = self.backend.norm(x, norm.as_ref());
                }
                None
            }
            QkNorm::None => None,
        };
        self.backend.head_norm_rope(x, spec.head_dim, per_head, table);
    }

    /// The rest of the layer after q, k and v: attention, output projection, MLP, residuals.
    fn finish_layer(&self, id: usize, layer: &Layer<B>, x: &mut B::Tensor, qkv: Qkv<B::Tensor>) {
        let spec = &self.spec.layers[id];
        let attended = self.attend(id, &spec.attn, qkv);
        self.backend.add_projected(x, &attended, layer.o.as_ref(), layer.attn_post_norm.as_ref().map(Norm::as_ref));
        let mlp = Mlp {
            before: layer.mlp_pre_norm.as_ref().map(Norm::as_ref),
            gate: layer.gate.as_ref(),
            up: layer.up.as_ref(),
            down: layer.down.as_ref(),
            activation: spec.mlp.activation,
            after: layer.mlp_post_norm.as_ref().map(Norm::as_ref),
        };
        self.backend.add_mlp(x, &mlp);
    }

    fn attend(&self, id: usize, spec: &AttentionSpec, mut qkv: Qkv<B::Tensor>) -> B::Tensor {
        if let Some(transform) = self.key_transforms.get(&id) {
            qkv.k = self.backend.transform_heads(&qkv.k, &transform.key, spec.head_dim);
            qkv.q = self.backend.transform_heads(&qkv.q, &transform.query, spec.head_dim);
        }
        let shape = AttentionShape {
            n_heads: spec.n_heads,
            n_kv_heads: spec.n_kv_heads,
            head_dim: spec.head_dim,
            window: spec.window,
            scale: spec.scale,
            softcap: spec.logit_softcap,
        };
        self.backend.attention(&qkv.q, &qkv.k, &qkv.v, &shape)
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

/// log Σ exp(x), f64.
pub fn log_sum_exp(row: &[f32]) -> f64 {
    let max = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    max + row.iter().map(|&x| (f64::from(x) - max).exp()).sum::<f64>().ln()
}

/// Turns token-layers into whole tokens for the progress report.
struct Ticks {
    n_layers: u64,
    done: u64,
    told: u64,
}

impl Ticks {
    fn add(&mut self, n_tokens: u64) -> u64 {
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

    #[test]
    fn log_sum_exp_survives_large_logits() {
        assert!((log_sum_exp(&[1e4, 1e4]) - (1e4 + 2f64.ln())).abs() <= 1e-9);
    }
}
