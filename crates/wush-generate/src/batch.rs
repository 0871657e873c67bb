//! Many sequences through one decoder and one cache: Algorithm 2, layer by layer, for a chunk of one sequence or a token of each
//! of many.
//!
//! What a sequence gets does not depend on the others, bit for bit: a chunk is computed alone, and the tokens of many sequences
//! meet the weights row by row ([`Stored::ROW_BY_ROW`]), as each would alone.

use std::collections::BTreeMap;
use std::ops::Range;

use wush_model::cpu::{Rows, Stored};
use wush_model::resident::Resident;
use wush_model::rope::Span;
use wush_model::spec::ModelSpec;
use wush_runtime::{Chunk, KeyTransforms, KvCache, Memory, Part, RuntimeError, SequenceId};

use crate::{GenerateError, Result};

/// A decoder, a cache, and the sequences in it.
///
/// When a step fails, its sequences are of no more use but to be removed: some layers may have their tokens.
pub struct Batch<'a> {
    decoder: &'a Resident<'a, Stored>,
    cache: KvCache,
    transforms: Option<KeyTransforms>,
    places: BTreeMap<SequenceId, Place>,
}

/// How far a sequence is.
#[derive(Debug, Clone, Copy)]
struct Place {
    n_tokens: usize,
    /// Tokens of the prompt, whose RoPE all later ones follow.
    n_prompt: usize,
    /// Most tokens that there can be.
    longest: usize,
}

impl<'a> Batch<'a> {
    /// No sequences yet. `transforms` are applied to keys and queries after RoPE; without any they are cached as they are.
    ///
    /// # Errors
    /// `Cache` when the transforms are of other heads, or not of all layers.
    pub fn new(
        decoder: &'a Resident<'a, Stored>,
        mut cache: KvCache,
        transforms: Option<KeyTransforms>,
    ) -> Result<Self> {
        if let Some(transforms) = &transforms {
            cache.set_transforms(transforms)?;
        }
        Ok(Self { decoder, cache, transforms, places: BTreeMap::new() })
    }

    /// The model's shapes.
    pub fn spec(&self) -> &'a ModelSpec {
        self.decoder.spec()
    }

    /// An empty sequence that will begin with `n_prompt` tokens.
    ///
    /// # Errors
    /// `TooLong`.
    pub fn add(&mut self, n_prompt: usize) -> Result<SequenceId> {
        let place = Place { n_tokens: 0, n_prompt, longest: fitting(self.spec(), n_prompt)? };
        let sequence = self.cache.add();
        self.places.insert(sequence, place);
        Ok(sequence)
    }

    /// A sequence that begins as `sequence` does so far, will have a prompt of `n_prompt` tokens, and shares its pages. None where
    /// keys of such a prompt turn otherwise (RoPE that depends on the length).
    ///
    /// # Errors
    /// `Cache` with `NoSequence`; `TooLong`.
    pub fn fork(&mut self, sequence: SequenceId, n_prompt: usize) -> Result<Option<SequenceId>> {
        let of = self.place(sequence)?;
        let longest = fitting(self.spec(), n_prompt)?;
        if !same_rope(self.spec(), of.n_prompt, n_prompt) {
            return Ok(None);
        }
        let fork = self.cache.fork(sequence)?;
        self.places.insert(fork, Place { n_tokens: of.n_tokens, n_prompt, longest });
        Ok(Some(fork))
    }

    /// Forgets a sequence.
    ///
    /// # Errors
    /// `Cache` with `NoSequence`.
    pub fn remove(&mut self, sequence: SequenceId) -> Result<()> {
        self.places.remove(&sequence);
        Ok(self.cache.remove(sequence)?)
    }

    /// Tokens of a sequence so far.
    ///
    /// # Errors
    /// `Cache` with `NoSequence`.
    pub fn n_tokens(&self, sequence: SequenceId) -> Result<usize> {
        Ok(self.place(sequence)?.n_tokens)
    }

    /// Sequences held.
    pub fn n_sequences(&self) -> usize {
        self.places.len()
    }

    /// Final hidden states `[tokens, hidden]` of `ids`, which follow what `sequence` has: one chunk (Algorithm 2's S').
    ///
    /// # Errors
    /// `TooLong`; `Model` with `Sequence` for no ids or ids that the model does not have, or `NonFinite`; `Cache`.
    pub fn feed(&mut self, sequence: SequenceId, ids: &[u32]) -> Result<Rows> {
        self.step(&Stored::BY_SHAPE, ids, &[Part { sequence, n_tokens: ids.len() }])
    }

    /// Final hidden states `[sequences, hidden]` of one token more of each of several sequences.
    ///
    /// # Errors
    /// As [`Batch::feed`]; `Cache` with `Twice`.
    pub fn feed_each(&mut self, tokens: &[(SequenceId, u32)]) -> Result<Rows> {
        let ids: Vec<u32> = tokens.iter().map(|&(_, id)| id).collect();
        let parts: Vec<Part> = tokens.iter().map(|&(sequence, _)| Part { sequence, n_tokens: 1 }).collect();
        self.step(&Stored::ROW_BY_ROW, &ids, &parts)
    }

    /// Logits `[rows, vocab]` of rows of one sequence's chunk.
    ///
    /// # Errors
    /// `Model` with `NonFinite`.
    pub fn logits(&self, hidden: &Rows, rows: Range<usize>) -> Result<Vec<f32>> {
        Ok(self.decoder.logits(hidden, rows)?)
    }

    /// Logits `[rows, vocab]` of rows of several sequences, each as if it were the only one.
    ///
    /// # Errors
    /// `Model` with `NonFinite`.
    pub fn logits_each(&self, hidden: &Rows) -> Result<Vec<f32>> {
        Ok(self.decoder.logits_of(&Stored::ROW_BY_ROW, hidden, 0..hidden.n_rows)?)
    }

    /// Whether keys and queries are transformed.
    pub fn is_transformed(&self) -> bool {
        self.transforms.is_some()
    }

    /// What the cache holds, in bytes.
    pub fn memory(&self) -> Memory {
        self.cache.memory()
    }

    fn place(&self, sequence: SequenceId) -> Result<Place> {
        Ok(*self.places.get(&sequence).ok_or(RuntimeError::NoSequence { sequence })?)
    }

    /// Where a part lies in its sequence.
    fn span(&self, part: &Part) -> Result<Span> {
        let Place { n_tokens, n_prompt, longest } = self.place(part.sequence)?;
        let found = n_tokens + part.n_tokens;
        if found > longest {
            return Err(GenerateError::TooLong { found, longest });
        }
        Ok(Span { first: n_tokens, n_tokens: part.n_tokens, seq_len: n_prompt })
    }

    fn step(&mut self, backend: &Stored, ids: &[u32], parts: &[Part]) -> Result<Rows> {
        let spans = parts.iter().map(|part| self.span(part)).collect::<Result<Vec<_>>>()?;
        let (cache, transforms) = (&mut self.cache, &self.transforms);
        let attend = |layer: usize, [q, k, v]: [&Rows; 3]| -> Result<Rows> {
            let mut out = Rows::zeros(q.n_rows, q.width);
            match transforms.as_ref() {
                None => {
                    let chunk = Chunk { queries: &q.data, keys: &k.data, values: &v.data };
                    cache.step(layer, parts, chunk, &mut out.data)?;
                }
                Some(transforms) => {
                    let (mut queries, mut keys) = (q.data.clone(), k.data.clone());
                    transforms.transform_queries(layer, cache.config().layers[layer].n_heads, &mut queries)?;
                    transforms.transform_keys(layer, &mut keys)?;
                    let chunk = Chunk { queries: &queries, keys: &keys, values: &v.data };
                    cache.step(layer, parts, chunk, &mut out.data)?;
                }
            }
            Ok(out)
        };
        let hidden = self.decoder.step(backend, ids, &spans, attend)?;
        for part in parts {
            let place = self.places.get_mut(&part.sequence).expect("every part has a span");
            place.n_tokens += part.n_tokens;
        }
        Ok(hidden)
    }
}

/// Longest sequence that begins with a prompt of `n_prompt` tokens: the model's positions, or as far as its RoPE turns cached
/// keys as it did.
pub fn longest(spec: &ModelSpec, n_prompt: usize) -> usize {
    let positions = spec.max_position_embeddings;
    spec.same_rope_up_to(n_prompt).map_or(positions, |longest| longest.min(positions))
}

/// The same, of a prompt that fits.
fn fitting(spec: &ModelSpec, n_prompt: usize) -> Result<usize> {
    let longest = longest(spec, n_prompt);
    if n_prompt > longest {
        return Err(GenerateError::TooLong { found: n_prompt, longest });
    }
    Ok(longest)
}

/// Whether keys of prompts of `a` and of `b` tokens turn alike.
fn same_rope(spec: &ModelSpec, a: usize, b: usize) -> bool {
    let within = |n: usize, of: usize| spec.same_rope_up_to(of).is_none_or(|longest| n <= longest);
    within(a, b) && within(b, a)
}
