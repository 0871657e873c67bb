//! The one error type of this crate. What is wrong with the thing inspected is a failed check, not an error; an error is
//! what keeps the inspection itself from being done.

use std::path::PathBuf;

use wush_checkpoint::CheckpointError;
use wush_fold::FoldError;
use wush_format::FormatError;
use wush_model::ModelError;

/// Result of this crate.
pub type Result<T, E = InspectError> = std::result::Result<T, E>;

/// Why an inspection could not be done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InspectError {
    /// A file could not be read.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The base is not a checkpoint.
    #[error("base: {0}")]
    Base(#[source] CheckpointError),
    /// The base is not understood.
    #[error("base: {0}")]
    BaseModel(#[source] ModelError),
    /// A head could not be compared.
    #[error(transparent)]
    Fold(#[from] FoldError),
    /// Nothing that wush makes or reads.
    #[error("{path}: not a bundle, a checkpoint, a transforms file, a statistics file or a sidecar: {detail}")]
    Unknown {
        /// What was to be inspected.
        path: PathBuf,
        /// What was found.
        detail: String,
    },
    /// The user asked to stop.
    #[error("interrupted")]
    Interrupted,
}

impl InspectError {
    /// The remedy, if one is known: a line of its own, never part of the message.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Format(error) => error.hint(),
            Self::Base(error) => error.hint(),
            Self::BaseModel(error) => error.hint(),
            Self::Fold(error) => error.hint(),
            Self::Unknown { .. } => Some(
                "pass the directory that `wush convert` wrote, or a .safetensors file that `wush` wrote".to_owned(),
            ),
            Self::Interrupted => None,
        }
    }
}
