//! One sequence through a decoder and the cache, chunk by chunk.

use wush_format::monitor::Monitor;
use wush_model::ModelError;
use wush_model::cpu::Stored;
use wush_model::resident::Resident;
use wush_runtime::{KeyTransforms, KvCache, Memory, SequenceId};

use crate::batch::{Batch, longest};
use crate::{GenerateError, Result};

/// A decoder, a cache and the one sequence in it.
pub struct Session<'a> {
    batch: Batch<'a>,
    sequence: SequenceId,
    /// Tokens so far.
    n_tokens: usize,
    /// Most tokens that there can be.
    longest: usize,
}

impl<'a> Session<'a> {
    /// An empty sequence that will begin with `n_prompt` tokens. `transforms` are applied to keys and queries after RoPE; without
    /// any they are cached as they are.
    ///
    /// # Errors
    /// `Cache` when the transforms are of other heads; `TooLong`.
    pub fn new(
        decoder: &'a Resident<'a, Stored>,
        cache: KvCache,
        transforms: Option<KeyTransforms>,
        n_prompt: usize,
    ) -> Result<Self> {
        let mut batch = Batch::new(decoder, cache, transforms)?;
        let sequence = batch.add(n_prompt)?;
        Ok(Self { batch, sequence, n_tokens: 0, longest: longest(decoder.spec(), n_prompt) })
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
            last = Some(self.batch.feed(self.sequence, ids)?);
            self.n_tokens += ids.len();
            monitor.advance(ids.len() as u64);
        }
        let hidden = last.ok_or_else(|| ModelError::Sequence { sequence: 0, detail: "it is empty".to_owned() })?;
        self.batch.logits(&hidden, hidden.n_rows - 1..hidden.n_rows)
    }

    /// Tokens so far.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Whether keys and queries are transformed.
    pub fn is_transformed(&self) -> bool {
        self.batch.is_transformed()
    }

    /// What the cache holds, in bytes.
    pub fn memory(&self) -> Memory {
        self.batch.memory()
    }
}
