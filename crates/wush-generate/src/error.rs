//! The one error type of this crate.

use wush_model::ModelError;
use wush_runtime::RuntimeError;

/// Result of this crate.
pub type Result<T, E = GenerateError> = std::result::Result<T, E>;

/// Why no token could be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GenerateError {
    /// The decoder.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The cache or the key transforms.
    #[error(transparent)]
    Cache(#[from] RuntimeError),
    /// A setting of the sampler is out of range.
    #[error("{setting}: expected {expected}, found {found}")]
    Setting {
        /// Which, "temperature".
        setting: &'static str,
        /// Its range.
        expected: &'static str,
        /// As given.
        found: String,
    },
    /// More tokens than the model's positions.
    #[error("{found} tokens, the model reaches {longest} positions")]
    TooLong {
        /// Tokens asked for.
        found: usize,
        /// The most there can be.
        longest: usize,
    },
}

impl GenerateError {
    /// The remedy, as a line of its own.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Model(source) => source.hint(),
            Self::Cache(source) => source.hint(),
            Self::Setting { .. } => Some("`wush generate --help` says what it takes".to_owned()),
            Self::TooLong { .. } => Some("pass a shorter prompt".to_owned()),
        }
    }
}
