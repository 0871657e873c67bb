//! The observer that turns a forward pass into sums.
//!
//! Order of summation: within a layer, sequences in the order they are observed; within a sequence, positions in order.
//! A run that is cut between sequences, saved, loaded and continued therefore performs the very same additions as one
//! that was not, and ends in the same bytes.

use std::collections::BTreeMap;

use wush_checkpoint::Checkpoint;
use wush_format::transforms::HeadMatrices;
use wush_model::backend::Backend;
use wush_model::observer::{Moments, Observer};
use wush_model::spec::ModelSpec;
use wush_model::{ModelError, Result as ModelResult};

use crate::attention::{AttentionHessians, Couplings, attention_hessians};
use crate::output_gram::couplings;
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
    /// Where output projections come from, for attention-aware Hessians.
    weights: Option<(&'a Checkpoint, &'a ModelSpec)>,
    /// Of the layer that is shown now.
    couplings: Option<(usize, Couplings)>,
}

/// What one sequence shows in one layer.
#[derive(Debug)]
pub struct Seen {
    moments: Moments,
    hessians: Option<AttentionHessians>,
}

impl<'a> Accumulator<'a> {
    /// For a forward pass over exactly these sequences (token ids), in this order.
    pub fn new(statistics: &'a mut Statistics, sequences: &'a [Vec<u32>]) -> Self {
        let tainted = statistics.unfinished;
        Self { statistics, sequences, observed: BTreeMap::new(), tainted, weights: None, couplings: None }
    }

    /// Reads output projections from here, which statistics with attention-aware Hessians need.
    pub fn with_weights(self, checkpoint: &'a Checkpoint, spec: &'a ModelSpec) -> Self {
        Self { weights: Some((checkpoint, spec)), ..self }
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
        self.statistics.count(self.sequences)?;
        self.statistics.unfinished = false;
        Ok(())
    }

    fn sums(&self, layer: usize) -> ModelResult<&LayerStats> {
        let detail = || format!("layer {layer} is not in the statistics");
        self.statistics.layers.get(&layer).ok_or_else(|| ModelError::Sequence { sequence: 0, detail: detail() })
    }

    /// Eq. 61's sums over one sequence, where they are asked for.
    fn hessians<B: Backend>(
        &self,
        backend: &B,
        layer: usize,
        qkv: [&B::Tensor; 3],
    ) -> ModelResult<Option<AttentionHessians>> {
        if !self.statistics.info.attention_hessians {
            return Ok(None);
        }
        let (Some((_, spec)), Some((_, couplings))) =
            (self.weights, self.couplings.as_ref().filter(|(id, _)| *id == layer))
        else {
            let detail = format!("layer {layer}: its output projection was not read before its sequences were shown");
            return Err(ModelError::Sequence { sequence: 0, detail });
        };
        let widened = |x| Ok::<_, ModelError>(backend.to_host(x)?.into_iter().map(f64::from).collect::<Vec<f64>>());
        let [q, k, v] = qkv.map(widened);
        Ok(Some(attention_hessians([&q?, &k?, &v?], &spec.layers[layer].attn, couplings)))
    }

    /// The index of this call's sequence within the pass.
    fn next_sequence(&mut self, layer: usize) -> usize {
        let observed = self.observed.entry(layer).or_default();
        *observed += 1;
        *observed - 1
    }
}

impl<B: Backend> Observer<B> for Accumulator<'_> {
    type Seen = Seen;

    fn begin(&mut self, layer: usize) -> ModelResult<()> {
        if let (true, Some((checkpoint, spec))) = (self.statistics.info.attention_hessians, self.weights)
            && let Some(layer_spec) = spec.layers.get(layer)
        {
            let couplings = couplings(checkpoint, layer, &layer_spec.attn).map_err(|error| match error {
                StatsError::Model(error) => error,
                other => ModelError::Sequence { sequence: 0, detail: other.to_string() },
            })?;
            self.couplings = Some((layer, couplings));
        }
        Ok(())
    }

    fn see(&self, backend: &B, layer: usize, q: &B::Tensor, k: &B::Tensor, v: &B::Tensor) -> ModelResult<Seen> {
        let sums = self.sums(layer)?;
        let moments = Moments::of(backend, sums.n_kv_heads(), sums.head_dim(), [q, k, v])?;
        Ok(Seen { moments, hessians: self.hessians(backend, layer, [q, k, v])? })
    }

    fn add(&mut self, layer: usize, seen: Seen) -> ModelResult<()> {
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
        let Seen { moments, hessians } = seen;
        if let (Some(into), Some(hessians)) = (&mut sums.attention, hessians) {
            into.add(&hessians);
        }
        let pairs = [
            (&mut sums.query_gram.data, moments.query_gram),
            (&mut sums.key_gram.data, moments.key_gram),
            (&mut sums.value_gram.data, moments.value_gram),
            (&mut sums.key_sum, moments.key_sum),
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
