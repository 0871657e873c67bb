//! The next token from logits: the most likely, or one drawn from a part of the distribution.
//!
//! Probabilities are computed in f64; a seed gives the same tokens from the same logits on every platform.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::{GenerateError, Result};

/// How a token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Logits are divided by it; 0 takes the most likely token.
    pub temperature: f64,
    /// Only so many of the most likely tokens; all when none.
    pub top_k: Option<usize>,
    /// Only the fewest most likely tokens that have this probability together; 1 for all.
    pub top_p: f64,
    /// Of the random numbers.
    pub seed: u64,
}

impl Sampling {
    /// The most likely token, always.
    pub const GREEDY: Self = Self { temperature: 0.0, top_k: None, top_p: 1.0, seed: 0 };

    /// Whether nothing is drawn.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    fn check(&self) -> Result<()> {
        let invalid = |setting, expected, found: String| Err(GenerateError::Setting { setting, expected, found });
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return invalid("temperature", "a finite number, 0 or above", self.temperature.to_string());
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return invalid("top-p", "a number above 0 and at most 1", self.top_p.to_string());
        }
        match self.top_k {
            Some(0) => invalid("top-k", "at least 1", "0".to_owned()),
            _ => Ok(()),
        }
    }
}

/// Chooses tokens one after another.
#[derive(Debug, Clone)]
pub struct Sampler {
    sampling: Sampling,
    rng: ChaCha8Rng,
}

/// A token that may be drawn, and its weight: its probability over the most likely token's.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    id: u32,
    weight: f64,
}

impl Sampler {
    /// With the seed's random numbers.
    ///
    /// # Errors
    /// `Setting` for a number out of range.
    pub fn new(sampling: Sampling) -> Result<Self> {
        sampling.check()?;
        Ok(Self { sampling, rng: ChaCha8Rng::seed_from_u64(sampling.seed) })
    }

    /// The `n`-th of samplers with the same settings that draw by seeds of their own, the first being this one's.
    #[must_use]
    pub fn another(&self, n: u64) -> Self {
        let sampling = Sampling { seed: self.sampling.seed.wrapping_add(n), ..self.sampling };
        Self { sampling, rng: ChaCha8Rng::seed_from_u64(sampling.seed) }
    }

    /// A token of the vocabulary, from its logits `[vocab]`, finite. Of equals the first is the more likely.
    pub fn pick(&mut self, logits: &[f32]) -> u32 {
        let first = argmax(logits);
        if self.sampling.is_greedy() {
            return first;
        }
        let max = f64::from(logits[first as usize]);
        let weight = |logit: f32| ((f64::from(logit) - max) / self.sampling.temperature).exp();
        let ids = 0..u32::MAX;
        let mut candidates: Vec<Candidate> =
            ids.zip(logits).map(|(id, &logit)| Candidate { id, weight: weight(logit) }).collect();
        self.keep_likely(&mut candidates);
        let mut left = self.uniform() * candidates.iter().map(|c| c.weight).sum::<f64>();
        let drawn = candidates.iter().find(|candidate| {
            left -= candidate.weight;
            left < 0.0
        });
        // Rounding may leave a rest behind the last.
        drawn.map_or(first, |candidate| candidate.id)
    }

    /// Leaves what top-k and top-p leave, most likely first; everything, in the order of ids, without them.
    fn keep_likely(&self, candidates: &mut Vec<Candidate>) {
        let Sampling { top_k, top_p, .. } = self.sampling;
        if top_k.is_none() && top_p == 1.0 {
            return;
        }
        candidates.sort_unstable_by(|a, b| b.weight.total_cmp(&a.weight).then(a.id.cmp(&b.id)));
        candidates.truncate(top_k.unwrap_or(usize::MAX));
        let enough = top_p * candidates.iter().map(|c| c.weight).sum::<f64>();
        let mut sum = 0.0;
        let before = candidates.iter().position(|candidate| {
            sum += candidate.weight;
            sum >= enough
        });
        candidates.truncate(before.map_or(usize::MAX, |last| last + 1));
    }

    /// In [0, 1), a multiple of 2⁻⁵³.
    fn uniform(&mut self) -> f64 {
        (self.rng.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }
}

/// The first of the largest.
fn argmax(logits: &[f32]) -> u32 {
    let mut largest = (0, f32::NEG_INFINITY);
    for (id, &logit) in (0..u32::MAX).zip(logits) {
        if logit > largest.1 {
            largest = (id, logit);
        }
    }
    largest.0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Probabilities 0.5, 0.3, 0.15, 0.05 at temperature 1, in another order of ids.
    const PROBABILITIES: [f64; 4] = [0.15, 0.5, 0.05, 0.3];

    fn frequencies(sampling: Sampling, n: usize) -> [f64; 4] {
        let logits = PROBABILITIES.map(|p| p.ln() as f32 + 3.0);
        let mut sampler = Sampler::new(Sampling { seed: 1, ..sampling }).expect("in range");
        let mut counts = [0.0; 4];
        (0..n).for_each(|_| counts[sampler.pick(&logits) as usize] += 1.0 / n as f64);
        counts
    }

    /// Four standard deviations of a frequency of probability at most 1/2 over 20000 draws.
    const TOL: f64 = 4.0 * 0.5 / 141.4;

    fn assert_near(found: [f64; 4], expected: [f64; 4]) {
        let diff = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(diff <= TOL, "{found:?} {expected:?}");
    }

    #[test]
    fn tokens_are_drawn_by_their_probability() {
        let sampled = Sampling { temperature: 1.0, ..Sampling::GREEDY };
        assert_near(frequencies(sampled, 20_000), PROBABILITIES);
        let squares = PROBABILITIES.map(|p| p * p / 0.365);
        assert_near(frequencies(Sampling { temperature: 0.5, ..sampled }, 20_000), squares);
    }

    #[test]
    fn only_likely_tokens_are_drawn_when_asked_for() {
        let sampled = Sampling { temperature: 1.0, ..Sampling::GREEDY };
        let two = [0.0, 0.5 / 0.8, 0.0, 0.3 / 0.8];
        assert_near(frequencies(Sampling { top_k: Some(2), ..sampled }, 20_000), two);
        // 0.5 is not enough, 0.5 + 0.3 is.
        assert_near(frequencies(Sampling { top_p: 0.7, ..sampled }, 20_000), two);
        assert_near(frequencies(Sampling { top_p: 1e-9, ..sampled }, 100), [0.0, 1.0, 0.0, 0.0]);
        assert_eq!(frequencies(Sampling { top_k: Some(99), top_p: 0.4, ..sampled }, 50)[3], 0.0);
    }

    #[test]
    fn the_most_likely_token_is_the_first_of_equals() {
        let mut sampler = Sampler::new(Sampling::GREEDY).expect("in range");
        assert_eq!(sampler.pick(&[-1.0, 2.0, 2.0, 0.0]), 1);
    }

    #[test]
    fn settings_out_of_range_are_named() {
        for (sampling, name) in [
            (Sampling { temperature: -1.0, ..Sampling::GREEDY }, "temperature"),
            (Sampling { temperature: f64::NAN, ..Sampling::GREEDY }, "temperature"),
            (Sampling { top_p: 0.0, ..Sampling::GREEDY }, "top-p"),
            (Sampling { top_p: 1.5, ..Sampling::GREEDY }, "top-p"),
            (Sampling { top_k: Some(0), ..Sampling::GREEDY }, "top-k"),
        ] {
            let error = Sampler::new(sampling).expect_err("out of range");
            assert!(error.to_string().starts_with(name), "{error}");
        }
    }
}
