//! The one error type of this crate: why transforms do not fit a server's format. [`ExportError::hint`] is the remedy.

use wush_format::FormatError;

use crate::Role;

/// Result of this crate.
pub type Result<T, E = ExportError> = std::result::Result<T, E>;

/// Why nothing was exported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// A file could not be written.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A transform that is no rotation.
    #[error(
        "layer {layer}, KV head {head}: the {role} transform is not orthogonal: R Rᵀ differs from I by {found:.1e}, and by at \
         most {limit:.1e} where rounding alone is to blame. The format {}", .role.reason()
    )]
    NotOrthogonal {
        /// Global layer id.
        layer: usize,
        /// KV head.
        head: usize,
        /// Whose transform.
        role: Role,
        /// Largest element of |R Rᵀ − I|.
        found: f64,
        /// [`crate::ORTHOGONALITY_TOL`].
        limit: f64,
    },
    /// Keys that are centred before they are transformed.
    #[error("layer {layer}, KV head {head}: a mean is taken from its keys, and the format has no place for one")]
    CenteredKeys {
        /// Global layer id.
        layer: usize,
        /// KV head.
        head: usize,
    },
    /// Transforms for an encoder with error feedback.
    #[error("the transforms are for an encoder with error feedback, and the format's servers have none")]
    Feedback,
    /// Heads with rotations of their own where a layer has one.
    #[error("layer {layer}: KV head {head} has another {role} rotation than head 0, and {format} holds one a layer")]
    HeadsDiffer {
        /// Global layer id.
        layer: usize,
        /// KV head.
        head: usize,
        /// Whose rotation.
        role: Role,
        /// The format's name.
        format: &'static str,
    },
    /// A number beyond what the file's layout can hold.
    #[error("{what}: {found} is beyond {limit}, the most that the file can state")]
    TooLarge {
        /// What was counted.
        what: &'static str,
        /// The number.
        found: usize,
        /// The largest that fits.
        limit: usize,
    },
}

impl ExportError {
    /// The remedy, where one is known: one line, without "hint:".
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::Format(e) => return e.hint(),
            Self::NotOrthogonal { .. } => {
                "convert or solve with an orthogonal transform: --transform oscar, oscar-per-head, hadamard, random or \
                 identity; docs/serving.md names the servers that take any"
            }
            Self::CenteredKeys { .. } => "convert or solve again with --center-keys never",
            Self::Feedback => "convert or solve again with --feedback false",
            Self::HeadsDiffer { .. } => "pass --to oscar-2, which holds one a head, or use --transform oscar",
            Self::TooLarge { .. } => return None,
        };
        Some(hint.to_owned())
    }
}
