//! The observer that turns a forward pass into sums.
//!
//! Order of summation: within a layer, sequences in the order they are observed; within a sequence, positions in order.
//! A run that is cut between sequences, saved, loaded and continued therefore performs the very same additions as one
//! that was not, and ends in the same bytes.

use std::collections::BTreeMap;

use wush_format::hash::sequence_hash;
use wush_format::transforms::HeadMatrices;
use wush_model::backend::Backend;
use wush_model::observer::{Moments, Observer};
use wush_model::{ModelError, Result as ModelResult};

use crate::statistics::{LayerStats, Statistics};
use crate::{Result, StatsError};

/// Adds what a forward pass over `sequences` shows to statistics. Between [`Accumulator::new`] and
/// [`Accumulator::finish`] the statistics are ahead of their description and refuse to be saved; if the pass fails they
/// are to be dropped, and the last saved ones are the place to go on from.
#[derive(Debug)]
pub struct Accumulator<'a> {
    statistics: &'a mut Statistics,
    sequences: &'a [Vec<u32>],
    /// Sequences observed so far, by layer.
    observed: BTreeMap<usize, usize>,
    /// Whether an earlier pass had left the sums half done.
    tainted: bool,
}

impl<'a> Accumulator<'a> {
    /// For a forward pass over exactly these sequences (token ids), in this order.
    pub fn new(statistics: &'a mut Statistics, sequences: &'a [Vec<u32>]) -> Self {
        let tainted = statistics.unfinished;
        Self { statistics, sequences, observed: BTreeMap::new(), tainted }
    }

    /// Ends the pass: the description now counts these sequences.
    ///
    /// # Errors
    /// `Incomplete` when a layer did not see all of them, `TooManyPositions`, `Unfinished` when the statistics were left
    /// half done by an earlier pass.
    pub fn finish(self) -> Result<()> {
        if self.tainted {
            return Err(StatsError::Unfinished);
        }
        let expected = self.sequences.len();
        for &layer in self.statistics.layers.keys() {
            let found = self.observed.get(&layer).copied().unwrap_or(0);
            if found != expected {
                return Err(StatsError::Incomplete { layer, expected, found });
            }
        }
        let info = &mut self.statistics.info;
        for ids in self.sequences {
            let n_tokens = ids.len() as u64;
            info.positions = info.positions.checked_add(n_tokens).ok_or(StatsError::TooManyPositions)?;
            info.max_seq_len = info.max_seq_len.max(n_tokens);
            info.sequence_hashes.push(sequence_hash(ids));
        }
        self.statistics.unfinished = false;
        Ok(())
    }

    fn sums(&self, layer: usize) -> ModelResult<&LayerStats> {
        let detail = || format!("layer {layer} is not in the statistics");
        self.statistics.layers.get(&layer).ok_or_else(|| ModelError::Sequence { sequence: 0, detail: detail() })
    }

    /// The index of this call's sequence within the pass.
    fn next_sequence(&mut self, layer: usize) -> usize {
        let observed = self.observed.entry(layer).or_default();
        *observed += 1;
        *observed - 1
    }
}

impl<B: Backend> Observer<B> for Accumulator<'_> {
    type Seen = Moments;

    fn see(&self, backend: &B, layer: usize, q: &B::Tensor, k: &B::Tensor, v: &B::Tensor) -> ModelResult<Moments> {
        let sums = self.sums(layer)?;
        Ok(Moments::of(backend, sums.n_kv_heads(), sums.head_dim(), [q, k, v]))
    }

    fn add(&mut self, layer: usize, seen: Moments) -> ModelResult<()> {
        let index = self.next_sequence(layer);
        // Counted over the whole run, earlier passes included.
        let sequence = self.statistics.info.sequence_hashes.len() + index;
        if index >= self.sequences.len() {
            let detail = format!("layer {layer} was shown more sequences than the {} announced", self.sequences.len());
            return Err(ModelError::Sequence { sequence, detail });
        }
        self.sums(layer)?;
        self.statistics.unfinished = true;
        let sums = self.statistics.layers.get_mut(&layer).expect("looked up above");
        let pairs = [
            (&mut sums.query_gram.data, seen.query_gram),
            (&mut sums.key_gram.data, seen.key_gram),
            (&mut sums.value_gram.data, seen.value_gram),
            (&mut sums.key_sum, seen.key_sum),
        ];
        for (sum, part) in pairs {
            sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
        }
        match first_non_finite(sums) {
            None => Ok(()),
            Some(what) => Err(ModelError::NonFinite { layer, what, sequence }),
        }
    }
}

/// Which tensor brought a NaN or an infinity. Every entry of an f32 activation enters a diagonal as its square, which is
/// finite in f64 for every finite f32, so the diagonals tell.
fn first_non_finite(sums: &LayerStats) -> Option<&'static str> {
    let stacks = [("queries", &sums.query_gram), ("keys", &sums.key_gram), ("values", &sums.value_gram)];
    stacks.into_iter().find(|(_, gram)| !has_finite_diagonals(gram)).map(|(what, _)| what)
}

fn has_finite_diagonals(gram: &HeadMatrices) -> bool {
    (0..gram.n_heads).all(|h| gram.head(h).iter().step_by(gram.dim + 1).all(|x| x.is_finite()))
}
