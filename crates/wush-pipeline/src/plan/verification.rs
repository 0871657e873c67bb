//! The equivalence check of a run: which sequences, how strictly, or why not.

use wush_data::Packed;
use wush_fold::FoldDtype;
use wush_format::equivalence::tolerance;

use crate::model::Model;
use crate::request::VerifySettings;
use crate::{PipelineError, Result, verify};

/// Tokens of a sequence that the equivalence check runs: a fold is wrong or right at any length, and two forward passes over
/// the paper's 32,768 would take a CPU hours.
pub(crate) const VERIFY_TOKENS: usize = 1024;

/// Both checkpoints on the start of a few sequences.
#[derive(Debug, Clone)]
pub struct VerifyPlan {
    /// Token ids; never empty.
    pub sequences: Vec<Vec<u32>>,
    /// What the text calls itself.
    pub source: String,
    /// How many sequences were asked for.
    pub asked: usize,
    /// On the relative change of the mean NLL.
    pub tolerance: f64,
}

impl VerifyPlan {
    /// Takes the first sequences that can be scored, or says why the check cannot run.
    ///
    /// # Errors
    /// `Option` for a tolerance that is no positive number, or of a check that does not run.
    pub(crate) fn new(
        model: &Model,
        packed: Option<&Packed>,
        settings: VerifySettings,
        dtype: FoldDtype,
    ) -> Result<Result<Self, Unchecked>> {
        let (sequences, source) = packed.map_or((&[][..], ""), |packed| (&packed.sequences, &packed.source));
        let is_given = !sequences.is_empty();
        let sequences = starts(sequences, settings.sequences);
        let tolerance = match settings.tolerance {
            Some(value) if value > 0.0 && value.is_finite() => value,
            Some(value) => {
                let (expected, found) = ("a positive number".to_owned(), value.to_string());
                return Err(PipelineError::Option { option: "--tolerance", expected, found });
            }
            None => {
                let n_scored = sequences.iter().map(|ids| ids.len() as u64 - 1).sum();
                tolerance(verify::folded_dtype(&model.checkpoint, &model.spec, dtype), n_scored)
            }
        };
        let found = match (settings.sequences, is_given, sequences.is_empty()) {
            (0, ..) => Err(Unchecked::Asked),
            (_, false, _) => Err(Unchecked::NoText),
            (_, _, true) => Err(Unchecked::SingleTokens),
            (asked, ..) => Ok(Self { sequences, source: source.to_owned(), asked, tolerance }),
        };
        match (&found, settings.tolerance) {
            (Err(reason), Some(tolerance)) => Err(PipelineError::Option {
                option: "--tolerance",
                expected: format!("none where nothing is checked ({})", reason.reason()),
                found: tolerance.to_string(),
            }),
            _ => Ok(found),
        }
    }
}

/// The starts of the first `n` sequences that predict anything: a single token does not.
pub(crate) fn starts(sequences: &[Vec<u32>], n: usize) -> Vec<Vec<u32>> {
    let scored = sequences.iter().filter(|ids| ids.len() > 1);
    scored.take(n).map(|ids| ids[..ids.len().min(VERIFY_TOKENS)].to_vec()).collect()
}

/// Why the equivalence check does not run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unchecked {
    /// `--verify-sequences 0`.
    Asked,
    /// There are no sequences.
    NoText,
    /// There are no sequences of two tokens.
    SingleTokens,
}

impl Unchecked {
    /// In words.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Asked => "--verify-sequences 0 was given",
            Self::NoText => "no text was given to run",
            Self::SingleTokens => "every sequence is a single token, which predicts nothing",
        }
    }
}
