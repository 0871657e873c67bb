//! One sequence through a decoder and the cache: Algorithm 2, layer by layer, chunk by chunk.

use wush_format::monitor::Monitor;
use wush_model::ModelError;
use wush_model::cpu::{Rows, Stored};
use wush_model::resident::Resident;
use wush_model::rope::Span;
use wush_model::spec::ModelSpec;
use wush_runtime::{Chunk, KeyTransforms, KvCache, Memory, Part, SequenceId};

use crate::{GenerateError, Result};

/// A decoder, a cache and the one sequence in it.
pub struct Session<'a> {
    decoder: &'a Resident<'a, Stored>,
    cache: KvCache,
    sequence: SequenceId,
    transforms: Option<KeyTransforms>,
    /// Tokens so far.
    n_tokens: usize,
    /// Tokens of the prompt, whose RoPE all later ones follow.
    n_prompt: usize,
    /// Most tokens that there can be.
    longest: usize,
}

impl<'a> Session<'a> {
    /// An empty sequence that will begin with `n_prompt` tokens. `transforms` are applied to keys and queries of the layers that
    /// they have, after RoPE; without any they are cached as they are.
    ///
    /// # Errors
    /// `Cache` when the transforms are of other heads; `TooLong`.
    pub fn new(
        decoder: &'a Resident<'a, Stored>,
        mut cache: KvCache,
        transforms: Option<KeyTransforms>,
        n_prompt: usize,
    ) -> Result<Self> {
        if let Some(transforms) = &transforms {
            transforms.check(cache.config())?;
        }
        let longest = longest(decoder.spec(), n_prompt);
        if n_prompt > longest {
            return Err(GenerateError::TooLong { found: n_prompt, longest });
        }
        let sequence = cache.add();
        Ok(Self { decoder, cache, sequence, transforms, n_tokens: 0, n_prompt, longest })
    }

    /// Logits `[vocab]` of the token after `ids`, which follow what came before; at most `chunk` enter together (Algorithm 2's
    /// S'). Counts tokens into `monitor`'s current stage.
    ///
    /// # Errors
    /// `TooLong`; `Model` with `Sequence` for no ids or ids that the model does not have, `NonFinite` or `Interrupted`; `Cache`.
    pub fn feed(&mut self, ids: &[u32], chunk: usize, monitor: &dyn Monitor) -> Result<Vec<f32>> {
        let found = self.n_tokens + ids.len();
        if found > self.longest {
            return Err(GenerateError::TooLong { found, longest: self.longest });
        }
        let mut last = None;
        for ids in ids.chunks(chunk.max(1)) {
            if monitor.interrupted() {
                return Err(ModelError::Interrupted.into());
            }
            last = Some(self.step(ids)?);
            monitor.advance(ids.len() as u64);
        }
        let hidden = last.ok_or_else(|| ModelError::Sequence { sequence: 0, detail: "it is empty".to_owned() })?;
        Ok(self.decoder.logits(&hidden, hidden.n_rows - 1..hidden.n_rows)?)
    }

    /// Final hidden states of a chunk.
    fn step(&mut self, ids: &[u32]) -> Result<Rows> {
        let span = Span { first: self.n_tokens, n_tokens: ids.len(), seq_len: self.n_prompt };
        let parts = [Part { sequence: self.sequence, n_tokens: ids.len() }];
        let (cache, transforms) = (&mut self.cache, &self.transforms);
        let attend = |layer: usize, [q, k, v]: [&Rows; 3]| -> Result<Rows> {
            let mut out = Rows::zeros(q.n_rows, q.width);
            match transforms.as_ref().filter(|transforms| transforms.has(layer)) {
                None => {
                    let chunk = Chunk { queries: &q.data, keys: &k.data, values: &v.data };
                    cache.step(layer, &parts, chunk, &mut out.data)?;
                }
                Some(transforms) => {
                    let (mut queries, mut keys) = (q.data.clone(), k.data.clone());
                    transforms.transform_queries(layer, cache.config().layers[layer].n_heads, &mut queries)?;
                    transforms.transform_keys(layer, &mut keys)?;
                    let chunk = Chunk { queries: &queries, keys: &keys, values: &v.data };
                    cache.step(layer, &parts, chunk, &mut out.data)?;
                }
            }
            Ok(out)
        };
        let hidden = self.decoder.step(ids, span, attend)?;
        self.n_tokens += ids.len();
        Ok(hidden)
    }

    /// Tokens so far.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Whether keys and queries are transformed.
    pub fn is_transformed(&self) -> bool {
        self.transforms.is_some()
    }

    /// What the cache holds, in bytes.
    pub fn memory(&self) -> Memory {
        self.cache.memory()
    }
}

/// Longest sequence that begins with a prompt of `n_prompt` tokens: the model's positions, or as far as its RoPE turns cached
/// keys as it did.
pub fn longest(spec: &ModelSpec, n_prompt: usize) -> usize {
    let positions = spec.max_position_embeddings;
    spec.same_rope_up_to(n_prompt).map_or(positions, |longest| longest.min(positions))
}
