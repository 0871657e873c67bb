//! The one error type of this crate.

use wush_format::FormatError;
use wush_format::hash::Sha;
use wush_model::ModelError;

/// Result of this crate.
pub type Result<T, E = StatsError> = std::result::Result<T, E>;

/// Why statistics could not be made, read or added.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StatsError {
    /// A file could not be read or written, or is no statistics file.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The checkpoint's weights could not be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// There was nothing to merge.
    #[error("nothing to merge: expected at least one statistics file")]
    NothingToMerge,
    /// Statistics of two models, or made in two ways.
    #[error("cannot add statistics number {number} to the first: {what} is {found}, expected {expected}")]
    Mismatch {
        /// Position among the merged, from 1.
        number: usize,
        /// What differs.
        what: String,
        /// The first one's.
        expected: String,
        /// This one's.
        found: String,
    },
    /// A sequence counted twice.
    #[error("cannot add statistics number {number}: sequence {hash} is counted already")]
    SameSequence {
        /// Position among the merged, from 1.
        number: usize,
        /// SHA-256 of the sequence's token ids.
        hash: Sha,
    },
    /// Sums that were weighted by one run's own statistics.
    #[error("cannot add statistics number {number}: a second pass weighted its values by its own sums")]
    SecondPass {
        /// Position among the merged, from 1.
        number: usize,
    },
    /// More positions than a u64 counts.
    #[error("the number of positions overflows")]
    TooManyPositions,
    /// A forward pass did not show every sequence in every layer.
    #[error("layer {layer}: expected {expected} sequences, observed {found}")]
    Incomplete {
        /// Global layer id.
        layer: usize,
        /// Sequences that began.
        expected: usize,
        /// Sequences observed in this layer.
        found: usize,
    },
    /// Sums that a failed pass left half done.
    #[error("the statistics hold part of an unfinished forward pass")]
    Unfinished,
    /// What an unfinished run saved, where finished statistics are needed.
    #[error("{path}: holds the sums of an unfinished run: {done} of {planned} sequences are done")]
    UnfinishedSums {
        /// The file.
        path: std::path::PathBuf,
        /// Sequences summed.
        done: usize,
        /// Sequences that were to be summed.
        planned: String,
    },
    /// Statistics for another number of heads or another head dimension than the model's.
    #[error("layer {layer}: expected {expected} (KV heads, head dimension), found {found}")]
    Shape {
        /// Global layer id.
        layer: usize,
        /// The model's.
        expected: String,
        /// The statistics'.
        found: String,
    },
    /// A weight is NaN or infinite.
    #[error("layer {layer}: the output projection {name} is not finite")]
    NonFiniteWeight {
        /// Global layer id.
        layer: usize,
        /// The tensor's name.
        name: String,
    },
    /// The user asked to stop.
    #[error("interrupted")]
    Interrupted,
}

impl StatsError {
    /// The remedy, as a line of its own.
    pub fn hint(&self) -> Option<String> {
        let text = match self {
            Self::Format(error) => return error.hint(),
            Self::Model(error) => return error.hint(),
            Self::Mismatch { .. } => "merge only files of the same checkpoint, made with the same options",
            Self::SameSequence { .. } => "merge only shards of disjoint calibration text (calibrate --shard K/N)",
            Self::SecondPass { .. } => "calibrate on all of the text in one run, or without --second-pass",
            Self::UnfinishedSums { .. } => {
                "finish the run that it is of: the same command again with --resume; where all sequences are done, a second pass is not"
            }
            Self::Unfinished => "the forward pass stopped; go on from the last saved file (--resume)",
            Self::NonFiniteWeight { .. } => "the checkpoint is damaged: check it against its source",
            Self::NothingToMerge => "name the files that `wush calibrate --shard` wrote",
            Self::TooManyPositions => "merge fewer files: the sums stand for more text than can be counted",
            Self::Incomplete { .. } | Self::Shape { .. } => "calibrate again: the pass did not see what its plan says",
            Self::Interrupted => return None,
        };
        Some(text.into())
    }
}
