//! Sums of disjoint sequences to their sum.

use std::collections::BTreeSet;
use std::fmt::Debug;

use wush_format::hash::Sha;
use wush_format::transforms::HeadMatrices;

use crate::output_gram::first_difference;
use crate::statistics::{LayerStats, Statistics, StatsInfo};
use crate::{Result, StatsError};

/// Between names of sources or devices that were merged.
const SEPARATOR: &str = " + ";

impl Statistics {
    /// Adds statistics of disjoint sequences of one model, made in one way, in the order given.
    ///
    /// Sequences are listed in the same order; commutative and associative up to the rounding of f64 sums. Devices and
    /// sources may differ and are then both named. `output_gram`, which is of the weights, is not added but compared.
    ///
    /// # Errors
    /// `NothingToMerge`, `Mismatch` (weights, family, RoPE scaling, arithmetic, shapes), `SameSequence`,
    /// `TooManyPositions`, `Unfinished`, `SecondPass`.
    pub fn merge(parts: Vec<Self>) -> Result<Self> {
        let mut parts = parts.into_iter();
        let mut total = parts.next().ok_or(StatsError::NothingToMerge)?;
        if total.unfinished {
            return Err(StatsError::Unfinished);
        }
        let mut seen: BTreeSet<Sha> = total.info.sequence_hashes.iter().copied().collect();
        for (index, part) in parts.enumerate() {
            total.absorb(part, index + 2, &mut seen)?;
        }
        Ok(total)
    }

    /// Adds `part`, the `number`-th of the merged; `seen` are the sequences counted so far.
    fn absorb(&mut self, part: Self, number: usize, seen: &mut BTreeSet<Sha>) -> Result<()> {
        if part.unfinished {
            return Err(StatsError::Unfinished);
        }
        let check = Comparison { number };
        if self.info.second_pass || part.info.second_pass {
            return Err(StatsError::SecondPass { number: if part.info.second_pass { number } else { 1 } });
        }
        check.settings(&self.info, &part.info)?;
        check.same("the list of layers", &self.layers.keys().collect(), &part.layers.keys().collect::<Vec<_>>())?;
        // Duplicates within one file are that file's business; across files they are a mistake.
        if let Some(&hash) = part.info.sequence_hashes.iter().find(|hash| seen.contains(hash)) {
            return Err(StatsError::SameSequence { number, hash });
        }
        for (layer, stats) in &part.layers {
            let into = self.layers.get_mut(layer).expect("the layers are the same");
            check.shape(*layer, into, stats)?;
            check.output_gram(*layer, &into.output_gram, &stats.output_gram)?;
            add_layer(into, stats);
        }
        seen.extend(&part.info.sequence_hashes);
        add_info(&mut self.info, part.info)
    }
}

/// Checks one part against the first, and says which part it was.
struct Comparison {
    number: usize,
}

impl Comparison {
    fn same<T: PartialEq + Debug>(&self, what: &str, expected: &T, found: &T) -> Result<()> {
        if expected == found {
            return Ok(());
        }
        let text = |x: &T| format!("{x:?}");
        let (number, what) = (self.number, what.to_owned());
        Err(StatsError::Mismatch { number, what, expected: text(expected), found: text(found) })
    }

    fn settings(&self, first: &StatsInfo, part: &StatsInfo) -> Result<()> {
        self.same("the hash of the model's weights", &first.model_hash, &part.model_hash)?;
        self.same("the model family", &first.family, &part.family)?;
        let scaling = |info: &StatsInfo| info.rope_scaling.clone().unwrap_or_else(|| "the model's own".into());
        self.same("the RoPE scaling", &scaling(first), &scaling(part))?;
        self.same("whether the softmax is shift-invariant", &first.shift_invariant, &part.shift_invariant)?;
        self.same("whether there are attention-aware Hessians", &first.attention_hessians, &part.attention_hessians)?;
        self.same("the arithmetic of the forward pass", &first.compute, &part.compute)?;
        self.same("the number of query heads", &first.n_heads, &part.n_heads)
    }

    fn shape(&self, layer: usize, first: &LayerStats, part: &LayerStats) -> Result<()> {
        let shape = |stats: &LayerStats| (stats.n_kv_heads(), stats.head_dim());
        self.same(&format!("layer {layer}'s (KV heads, head dimension)"), &shape(first), &shape(part))
    }

    fn output_gram(&self, layer: usize, first: &HeadMatrices, part: &HeadMatrices) -> Result<()> {
        let Some((head, at)) = first_difference(first, part) else { return Ok(()) };
        let what = format!("layer {layer}, head {head}, output_gram[{}, {}]", at / first.dim, at % first.dim);
        self.same(&what, &first.head(head)[at], &part.head(head)[at])
    }
}

fn add_layer(into: &mut LayerStats, part: &LayerStats) {
    add(&mut into.key_gram.data, &part.key_gram.data);
    add(&mut into.query_gram.data, &part.query_gram.data);
    add(&mut into.value_gram.data, &part.value_gram.data);
    add(&mut into.key_sum, &part.key_sum);
    if let (Some(into), Some(part)) = (&mut into.attention, &part.attention) {
        into.add(part);
    }
}

fn add(into: &mut [f64], part: &[f64]) {
    into.iter_mut().zip(part).for_each(|(x, y)| *x += y);
}

fn add_info(into: &mut StatsInfo, part: StatsInfo) -> Result<()> {
    into.positions = into.positions.checked_add(part.positions).ok_or(StatsError::TooManyPositions)?;
    into.max_seq_len = into.max_seq_len.max(part.max_seq_len);
    into.sequence_hashes.extend(part.sequence_hashes);
    join_names(&mut into.source, &part.source);
    join_names(&mut into.device, &part.device);
    Ok(())
}

/// The sorted union of two lists of names, so that the result does not depend on how a merge was grouped.
fn join_names(into: &mut String, part: &str) {
    let names: BTreeSet<&str> = into.split(SEPARATOR).chain(part.split(SEPARATOR)).collect();
    *into = names.into_iter().collect::<Vec<_>>().join(SEPARATOR);
}
