//! The one error type of this crate: every variant names the file, key or tensor, and [`CheckpointError::hint`] the remedy.

use std::path::PathBuf;

use wush_format::FormatError;

use crate::hub::{HubKind, HubProblem};

/// Result of this crate.
pub type Result<T, E = CheckpointError> = std::result::Result<T, E>;

/// Why a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// A file could not be read, or is not what its kind must be.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The directory is not a checkpoint.
    #[error("{dir}: not a checkpoint directory: {detail}")]
    NotACheckpoint {
        /// The directory.
        dir: PathBuf,
        /// What was expected and what was found.
        detail: String,
        /// What to do instead.
        hint: &'static str,
    },
    /// The checkpoint holds something that wush cannot convert without changing what the model computes.
    #[error("{path}: {what} is not supported: {detail}")]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The configuration key, tensor or file kind.
        what: String,
        /// What was found, and why it matters.
        detail: String,
        /// What to do instead.
        hint: &'static str,
    },
    /// The index and the shards disagree.
    #[error("{path}: {detail}")]
    Index {
        /// The index file.
        path: PathBuf,
        /// The entry, what was expected and what was found.
        detail: String,
    },
    /// A path that leads out of the checkpoint.
    #[error("{path}: {entry} leads out of the checkpoint directory")]
    Escapes {
        /// The directory or the file that names the entry.
        path: PathBuf,
        /// The offending path, as written.
        entry: String,
    },
    /// A tensor that must be there is absent.
    #[error("{dir}: tensor {name} is missing from the checkpoint")]
    MissingTensor {
        /// The checkpoint's directory.
        dir: PathBuf,
        /// The tensor's name.
        name: String,
    },
    /// The same tensor stands in two shards.
    #[error("{dir}: tensor {name} is in two shards: {first} and {second}")]
    DuplicateTensor {
        /// The checkpoint's directory.
        dir: PathBuf,
        /// The tensor's name.
        name: String,
        /// One shard.
        first: String,
        /// The other.
        second: String,
    },
    /// The tokenizer could not be loaded or used.
    #[error("{path}: tokenizer: {detail}")]
    Tokenizer {
        /// The tokenizer's file or directory.
        path: PathBuf,
        /// What failed.
        detail: String,
    },
    /// The chat template is not valid, or refuses the messages.
    #[error("{path}: chat template: {detail}")]
    ChatTemplate {
        /// The file that it is in.
        path: PathBuf,
        /// What failed.
        detail: String,
    },
    /// There is no fast tokenizer.
    #[error("{dir}: no tokenizer.json{}", .slow.map(|name| format!(" (found {name}, a slow tokenizer's file)")).unwrap_or_default())]
    NoTokenizer {
        /// The checkpoint's directory.
        dir: PathBuf,
        /// The file of a slow tokenizer that is there instead.
        slow: Option<&'static str>,
    },
    /// The hub refused, could not be reached, or does not have what was asked for.
    #[error("{kind} {id}: {problem}")]
    Hub {
        /// Model or data set.
        kind: HubKind,
        /// The hub id, or the argument that is none.
        id: String,
        /// What went wrong.
        problem: HubProblem,
    },
    /// The user asked to stop.
    #[error("interrupted")]
    Interrupted,
}

impl CheckpointError {
    /// The remedy, if one is known.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Format(error) => error.hint(),
            Self::NotACheckpoint { hint, .. } | Self::Unsupported { hint, .. } => Some((*hint).to_owned()),
            Self::Index { .. } | Self::MissingTensor { .. } | Self::DuplicateTensor { .. } => {
                Some("download the checkpoint again: its files do not belong together".to_owned())
            }
            Self::Escapes { .. } => {
                Some("a checkpoint's files must lie in its own directory; copy the file there".to_owned())
            }
            Self::Hub { kind, id, problem } => Some(problem.hint(*kind, id)),
            Self::Tokenizer { .. } => Some(
                "download tokenizer.json again, or write it anew with Python: AutoTokenizer.from_pretrained(DIR, \
                 use_fast=True).save_pretrained(DIR); only to calibrate or to score, a .json file of token ids in place of \
                 text goes without a tokenizer"
                    .to_owned(),
            ),
            Self::ChatTemplate { .. } => {
                Some("pass --chat never to `wush generate` to continue the prompt as it is, or mend the template".to_owned())
            }
            Self::NoTokenizer { .. } => Some(
                "write one with Python: AutoTokenizer.from_pretrained(DIR, use_fast=True).save_pretrained(DIR); or, only to \
                 calibrate, pass --calib FILE.json with token ids"
                    .to_owned(),
            ),
            Self::Interrupted => None,
        }
    }
}
