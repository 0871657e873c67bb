//! Perplexity of token sequences (Section 5.2).

use wush_format::monitor::Monitor;
use wush_model::attention::AttentionProduct;
use wush_model::backend::Backend;
use wush_model::decoder::{Decoder, GROUP_TOKENS, groups};

use crate::{EvalError, Result};

/// What a model says of a text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Score {
    /// Mean negative log likelihood of the scored tokens, nats.
    pub nll: f64,
    /// Tokens scored: all but the first of every sequence.
    pub tokens: u64,
}

impl Score {
    /// e^nll.
    pub fn perplexity(&self) -> f64 {
        self.nll.exp()
    }
}

/// Scores every sequence through `attention`, each from an empty cache. Counts tokens into `monitor`'s current stage, one
/// for each token of `sequences`.
///
/// # Errors
/// `Model`; `NothingToScore`.
pub fn perplexity<B: Backend>(
    decoder: &Decoder<'_, B>,
    sequences: &[Vec<u32>],
    attention: &dyn AttentionProduct<B>,
    monitor: &dyn Monitor,
) -> Result<Score> {
    let (mut sum, mut tokens) = (0.0, 0);
    for group in groups(sequences, GROUP_TOKENS) {
        let sequences = &sequences[group];
        let hidden = decoder.hidden_of(sequences, attention, monitor)?;
        for (hidden, ids) in hidden.iter().zip(sequences) {
            let nll = decoder.nll_of(hidden, ids)?;
            sum += nll.iter().sum::<f64>();
            tokens += nll.len() as u64;
        }
    }
    if tokens == 0 {
        return Err(EvalError::NothingToScore);
    }
    Ok(Score { nll: sum / tokens as f64, tokens })
}
