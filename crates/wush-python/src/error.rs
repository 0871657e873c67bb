//! The one error type of this crate, and the one exception that Python sees: the message, and the hint as a line of its own.

use std::path::PathBuf;
use std::sync::OnceLock;

use pyo3::PyErr;
use pyo3::exceptions::PyValueError;
use wush_format::FormatError;
use wush_format::hash::Sha;
use wush_quant::QuantError;
use wush_runtime::RuntimeError;

pyo3::create_exception!(
    wush_kv,
    WushError,
    PyValueError,
    "A bundle that is not what it says, or numbers that cannot be cached."
);

/// Result of this crate.
pub(crate) type Result<T, E = BindingError> = std::result::Result<T, E>;

/// Why a bundle was refused, or something could not be packed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BindingError {
    /// A file could not be read, or is not what its name says.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A sidecar's numbers or hashes contradict each other.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// A quantizer refused.
    #[error(transparent)]
    Quant(#[from] QuantError),
    /// The bundle's own check had failed.
    #[error("{path}: the bundle's equivalence check failed when it was made: it does not compute what its source does")]
    Failed {
        /// The bundle.
        path: PathBuf,
    },
    /// A directory that is no bundle.
    #[error("{path}: not a bundle: it has no wush/manifest.json")]
    NoBundle {
        /// The directory.
        path: PathBuf,
    },
    /// The process is a fork of one that used the package: its threads are not here.
    #[error("wush-kv was used before this process was forked, and its threads are in the other process")]
    Forked,
    /// A file is not the one that the manifest lists.
    #[error("{path}: not the file that the manifest lists: expected {expected}, found {found}")]
    OtherFile {
        /// The file.
        path: PathBuf,
        /// Length or digest of the manifest.
        expected: String,
        /// Of the file.
        found: String,
    },
    /// Weights that the manifest does not list, which a loader might take instead.
    #[error("{path}: weights that the manifest does not list lie beside the bundle's own")]
    ExtraWeights {
        /// The file.
        path: PathBuf,
    },
    /// The listed shards are not the weights that the sidecars belong to.
    #[error("{path}: the listed weights have hash {found}, the transforms belong to {expected}")]
    OtherBasis {
        /// The manifest.
        path: PathBuf,
        /// What the sidecars name.
        expected: Sha,
        /// Of the list.
        found: Sha,
    },
    /// An argument that names nothing.
    #[error("{what}: expected {expected}, found {found}")]
    Argument {
        /// The argument.
        what: &'static str,
        /// What it may be.
        expected: String,
        /// As given.
        found: String,
    },
}

/// Refuses to wait for threads that a fork left behind.
///
/// # Errors
/// `Forked`.
pub(crate) fn not_forked() -> Result<()> {
    static FIRST_USE: OnceLock<u32> = OnceLock::new();
    let id = std::process::id();
    if *FIRST_USE.get_or_init(|| id) == id { Ok(()) } else { Err(BindingError::Forked) }
}

impl BindingError {
    /// The remedy, if one is known.
    fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::Format(source) => return source.hint(),
            Self::Runtime(source) => return source.hint(),
            Self::Quant(source) => return source.hint().map(str::to_owned),
            Self::Failed { .. } => "convert again with --fold-dtype f32; `wush inspect` says more",
            Self::OtherFile { .. } | Self::OtherBasis { .. } => "copy or download the bundle again, whole",
            Self::ExtraWeights { .. } => "move it elsewhere: which weights a loader takes is its own choice",
            Self::NoBundle { .. } => {
                "pass a directory that `wush convert` or `wush fold` wrote: it makes one of a checkpoint"
            }
            Self::Forked => {
                "start processes by spawn (multiprocessing.set_start_method(\"spawn\")), or use the package after the fork only"
            }
            Self::Argument { .. } => return None,
        };
        Some(hint.to_owned())
    }
}

impl From<BindingError> for PyErr {
    fn from(error: BindingError) -> Self {
        let hint = error.hint().map(|hint| format!("\nhint: {hint}"));
        WushError::new_err(format!("{error}{}", hint.unwrap_or_default()))
    }
}
