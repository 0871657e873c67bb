//! The equivalence check: the source and the bundle, with its key transforms applied as a key-transforming server would,
//! run over the same sequences.
//!
//! Enters: two checkpoints and token ids. Leaves: mean NLL of both, the mean KL divergence, and the worst logit and NLL
//! difference. Logits are compared a block of positions at a time, never a whole sequence by the whole vocabulary.

use std::ops::Range;

use rayon::prelude::*;
use wush_checkpoint::Checkpoint;
use wush_fold::FoldDtype;
use wush_format::bundle::KeySidecar;
use wush_format::equivalence::unit_roundoff;
use wush_format::manifest::Equivalence;
use wush_format::monitor::{Monitor, Silent};
use wush_format::tensor_file::Dtype;
use wush_model::ModelError;
use wush_model::attention::{AttentionProduct, Exact, TransformedKeys, Windowed};
use wush_model::backend::log_sum_exp;
use wush_model::decoder::Decoder;
use wush_model::spec::ModelSpec;

use crate::Result;

/// Bytes of logits of one model that are held at once; more positions share the cost of widening the output head.
pub(crate) const LOGIT_BYTES: usize = 64 << 20;

/// The element type that folded tensors of `spec` are stored in: the coarsest of them decides.
pub fn folded_dtype(checkpoint: &Checkpoint, spec: &ModelSpec, dtype: FoldDtype) -> Dtype {
    let stored = |name: &str| checkpoint.locate(name).map(|(_, info)| info.dtype);
    match dtype {
        FoldDtype::F32 => Dtype::F32,
        FoldDtype::Keep => spec
            .layers
            .iter()
            .flat_map(|layer| [&layer.attn.v.weight.name, &layer.attn.o.weight.name])
            .filter_map(|name| stored(name))
            .max_by(|&a, &b| unit_roundoff(a).total_cmp(&unit_roundoff(b)))
            .unwrap_or(Dtype::F32),
    }
}

/// One side of the comparison.
#[derive(Clone, Copy)]
pub struct Side<'a> {
    /// The weights.
    pub checkpoint: &'a Checkpoint,
    /// Their specification.
    pub spec: &'a ModelSpec,
}

/// Runs both checkpoints over `sequences` and compares them.
///
/// # Errors
/// Whatever the forward pass refuses; `Interrupted`.
pub fn verify<B: Windowed>(
    backend: &B,
    source: Side<'_>,
    bundle: Side<'_>,
    sidecar: &KeySidecar,
    check: &Check<'_>,
    monitor: &dyn Monitor,
) -> Result<Equivalence> {
    let source_decoder = Decoder::new(source.checkpoint, source.spec, backend);
    let bundle_decoder = Decoder::new(bundle.checkpoint, bundle.spec, backend);
    let keys = TransformedKeys::new(sidecar, bundle.spec, backend)?;
    let n_tokens: usize = check.sequences.iter().map(Vec::len).sum();
    // Every token counts once for each model: half of that for the layers, half for the logits.
    monitor.begin("verify", "tokens", 2 * n_tokens as u64);
    let mut sums = Sums::default();
    for ids in check.sequences {
        let half = ids.len() as u64 / 2;
        let ours = hidden(&source_decoder, ids, &Exact, monitor)?;
        monitor.advance(half);
        let hidden = [ours, hidden(&bundle_decoder, ids, &keys, monitor)?];
        monitor.advance(half);
        let n_scored = ids.len().saturating_sub(1);
        for rows in blocks(n_scored, source.spec.vocab_size) {
            if monitor.interrupted() {
                return Err(ModelError::Interrupted.into());
            }
            let ours = source_decoder.logits(&hidden[0], rows.clone())?;
            let theirs = bundle_decoder.logits(&hidden[1], rows.clone())?;
            monitor.advance(rows.len() as u64);
            sums.add_block(&ours, &theirs, &ids[rows.start + 1..=rows.end], source.spec.vocab_size);
        }
        monitor.advance((2 * (ids.len() - half as usize) - n_scored) as u64);
    }
    monitor.end();
    Ok(sums.judge(check.tolerance))
}

/// Final hidden states of one sequence; a stop is heard between layers.
fn hidden<B: Windowed>(
    decoder: &Decoder<'_, B>,
    ids: &[u32],
    attention: &dyn AttentionProduct<B>,
    monitor: &dyn Monitor,
) -> Result<B::Tensor> {
    let hidden = decoder.hidden_of(&[ids], attention, &Silent(monitor))?;
    Ok(hidden.into_iter().next().expect("one sequence in, one out"))
}

/// What is compared, and how strictly.
#[derive(Debug, Clone, Copy)]
pub struct Check<'a> {
    /// Token ids.
    pub sequences: &'a [Vec<u32>],
    /// On the relative change of the mean NLL; see [`wush_format::equivalence::tolerance`].
    pub tolerance: f64,
}

/// Cuts `n` positions into blocks whose logits fit into [`LOGIT_BYTES`].
fn blocks(n: usize, vocab_size: usize) -> impl Iterator<Item = Range<usize>> {
    let size = (LOGIT_BYTES / (size_of::<f32>() * vocab_size.max(1))).max(1);
    (0..n).step_by(size).map(move |first| first..(first + size).min(n))
}

/// Sums over positions, f64, in order.
#[derive(Debug, Default)]
struct Sums {
    tokens: u64,
    nll_source: f64,
    nll_bundle: f64,
    kl: f64,
    max_logit_diff: f64,
    max_nll_diff: f64,
}

impl Sums {
    /// Adds positions: `ours` and `theirs` are logits `[targets, vocab]`, `targets` the tokens that follow. Rows are compared
    /// in parallel and added in order.
    fn add_block(&mut self, ours: &[f32], theirs: &[f32], targets: &[u32], vocab_size: usize) {
        let rows = ours.par_chunks_exact(vocab_size).zip(theirs.par_chunks_exact(vocab_size)).zip(targets);
        let rows: Vec<Row> =
            rows.map(|((ours, theirs), &target)| Row::compare(ours, theirs, target as usize)).collect();
        for row in rows {
            self.tokens += 1;
            self.nll_source += row.nll_source;
            self.nll_bundle += row.nll_bundle;
            self.kl += row.kl;
            self.max_logit_diff = max_or_nan(self.max_logit_diff, row.max_logit_diff);
            self.max_nll_diff = max_or_nan(self.max_nll_diff, (row.nll_source - row.nll_bundle).abs());
        }
    }

    /// The means, and whether they pass. Written so that a NaN fails; what is not finite is stated as the largest f64,
    /// since JSON has neither NaN nor infinity.
    fn judge(&self, tolerance: f64) -> Equivalence {
        let n = self.tokens.max(1) as f64;
        let (nll_source, nll_bundle, mean_kl) = (self.nll_source / n, self.nll_bundle / n, self.kl / n);
        let limit = tolerance * nll_source;
        let passed = (nll_bundle - nll_source).abs() <= limit && mean_kl <= limit;
        Equivalence {
            tokens: self.tokens,
            nll_source: stated(nll_source),
            nll_bundle: stated(nll_bundle),
            mean_kl: stated(mean_kl),
            max_logit_diff: stated(self.max_logit_diff),
            max_nll_diff: stated(self.max_nll_diff),
            tolerance,
            passed,
        }
    }
}

/// One position.
struct Row {
    nll_source: f64,
    nll_bundle: f64,
    kl: f64,
    max_logit_diff: f64,
}

impl Row {
    fn compare(ours: &[f32], theirs: &[f32], target: usize) -> Self {
        let (log_z, log_z_bundle) = (log_sum_exp(ours), log_sum_exp(theirs));
        let (mut kl, mut max_logit_diff) = (0.0, 0.0);
        for (&p, &q) in ours.iter().zip(theirs) {
            let (log_p, log_q) = (f64::from(p) - log_z, f64::from(q) - log_z_bundle);
            kl += log_p.exp() * (log_p - log_q);
            max_logit_diff = max_or_nan(max_logit_diff, f64::from(p - q).abs());
        }
        let nll_source = log_z - f64::from(ours[target]);
        let nll_bundle = log_z_bundle - f64::from(theirs[target]);
        Self { nll_source, nll_bundle, kl, max_logit_diff }
    }
}

fn stated(x: f64) -> f64 {
    if x.is_finite() { x } else { f64::MAX }
}

/// A NaN must not disappear in a maximum.
fn max_or_nan(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sums(rows: &[([f32; 3], [f32; 3], u32)]) -> Sums {
        let mut sums = Sums::default();
        for (ours, theirs, target) in rows {
            sums.add_block(ours, theirs, &[*target], 3);
        }
        sums
    }

    #[test]
    fn equal_logits_agree_exactly() {
        let logits = [0.5, -1.0, 2.0];
        let found = sums(&[(logits, logits, 0), (logits, logits, 2)]).judge(0.0);
        assert!(found.passed);
        assert_eq!((found.tokens, found.mean_kl, found.max_logit_diff, found.max_nll_diff), (2, 0.0, 0.0, 0.0));
        let expected = (0.5f64.exp() + (-1f64).exp() + 2f64.exp()).ln() - 1.25;
        assert!((found.nll_source - expected).abs() <= 1e-14);
    }

    #[test]
    fn a_constant_shift_of_all_logits_changes_no_probability() {
        let found = sums(&[([0.0, 1.0, 2.0], [4.0, 5.0, 6.0], 1)]).judge(1e-12);
        assert!(found.passed, "{found:?}");
        assert_eq!(found.max_logit_diff, 4.0);
    }

    #[test]
    fn other_distributions_fail_even_when_their_mean_nll_agrees() {
        // The two tokens' NLLs swap: the means agree, the distributions do not.
        let (a, b) = ([2.0, 0.0, 0.0], [0.0, 2.0, 0.0]);
        let found = sums(&[(a, b, 0), (b, a, 0)]).judge(0.01);
        assert_eq!(found.nll_source, found.nll_bundle);
        assert!(found.mean_kl > 0.1);
        assert!(!found.passed);
    }

    #[test]
    fn nan_fails() {
        let found = sums(&[([0.0, 1.0, 2.0], [f32::NAN, 1.0, 2.0], 1)]).judge(1.0);
        assert!(!found.passed);
        assert_eq!((found.max_logit_diff, found.nll_bundle), (f64::MAX, f64::MAX));
    }

    #[test]
    fn blocks_tile_the_positions() {
        let vocab = LOGIT_BYTES / 4 / 64;
        assert_eq!(blocks(130, vocab).collect::<Vec<_>>(), [0..64, 64..128, 128..130]);
        assert_eq!(blocks(3, usize::MAX / 8).collect::<Vec<_>>(), [0..1, 1..2, 2..3]);
        assert_eq!(blocks(0, vocab).count(), 0);
    }
}
