//! The one error type of this crate: every variant names the layer, head or tensor; [`FoldError::hint`] the remedy.

use wush_checkpoint::CheckpointError;
use wush_format::FormatError;
use wush_format::hash::Sha;
use wush_format::tensor_file::Dtype;

/// Result of this crate.
pub type Result<T, E = FoldError> = std::result::Result<T, E>;

/// Why a fold or an unfold did not happen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FoldError {
    /// A file could not be read or written.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The checkpoint is not what it must be.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The transforms were made for other weights.
    #[error("the transforms belong to model {expected}, but this checkpoint is {found}")]
    WrongModel {
        /// The hash that the transforms name.
        expected: Sha,
        /// The hash of the checkpoint's weights.
        found: Sha,
    },
    /// The checkpoint was folded before.
    #[error("{dir}: is a bundle of wush already: its values are in transformed coordinates")]
    AlreadyFolded {
        /// The checkpoint's directory.
        dir: std::path::PathBuf,
    },
    /// A layer of the model has no transform.
    #[error("layer {layer}: the model has it, the transforms do not")]
    MissingLayer {
        /// Global layer id.
        layer: usize,
    },
    /// A transform for a layer that the model does not have.
    #[error("layer {layer}: the transforms have it, the model (of {n_layers} layers) does not")]
    UnknownLayer {
        /// Global layer id.
        layer: usize,
        /// Number of layers of the model.
        n_layers: usize,
    },
    /// A transform of another size than the model's heads.
    #[error("layer {layer}: value transforms: expected shape {expected:?}, found {found:?}")]
    WrongShape {
        /// Global layer id.
        layer: usize,
        /// `[n_kv_heads, head_dim, head_dim]` of the model.
        expected: [usize; 3],
        /// The transforms' own.
        found: [usize; 3],
    },
    /// A transform that holds NaN or infinity.
    #[error("layer {layer}, KV head {head}: the value transform has a non-finite entry")]
    NonFiniteTransform {
        /// Global layer id.
        layer: usize,
        /// KV head.
        head: usize,
    },
    /// A transform that cannot be inverted in f64 well enough to be folded.
    #[error(
        "layer {layer}, KV head {head}: the value transform cannot be inverted: \
         condition number {condition:.3e}, at most {limit:.3e} can be folded"
    )]
    Singular {
        /// Global layer id.
        layer: usize,
        /// KV head.
        head: usize,
        /// 1-norm condition number; infinite when a pivot is zero.
        condition: f64,
        /// [`crate::condition_limit`] of the head dimension.
        limit: f64,
    },
    /// A tensor that the fold changes is absent or has another shape than the model says.
    #[error("tensor {tensor}: expected shape [{rows}, {cols}], found {found}")]
    WrongTensor {
        /// Name in the checkpoint.
        tensor: String,
        /// Rows expected.
        rows: usize,
        /// Columns expected (1 for a vector).
        cols: usize,
        /// The shape found, or "nothing".
        found: String,
    },
    /// A tensor whose elements are not plain floating-point numbers.
    #[error("tensor {tensor}: expected BF16, F16, F32 or F64, found {dtype:?}")]
    WrongDtype {
        /// Name in the checkpoint.
        tensor: String,
        /// Its dtype.
        dtype: Dtype,
    },
    /// Two roles read the same elements: folding one would change the other.
    #[error("tensor {tensor}: {first} and {second} share its elements, so folding one would change the other")]
    SharedTensor {
        /// Name in the checkpoint.
        tensor: String,
        /// One role.
        first: String,
        /// The other.
        second: String,
    },
    /// A weight that a fold changes is NaN or infinite.
    #[error("tensor {tensor}: element {index} is {value}, expected a finite number")]
    NonFiniteWeight {
        /// Name in the checkpoint.
        tensor: String,
        /// Of the first such element, row-major.
        index: usize,
        /// NaN or an infinity.
        value: f64,
    },
    /// A folded element is too large for the stored dtype.
    #[error("tensor {tensor}: folding gives {value:e}, which {dtype:?} cannot hold")]
    Overflow {
        /// Name in the checkpoint.
        tensor: String,
        /// The exact value.
        value: f64,
        /// The stored dtype.
        dtype: Dtype,
    },
    /// The index's `metadata.total_size` cannot be corrected without touching anything else.
    #[error("{file}: metadata.total_size: {detail}")]
    Index {
        /// The index file.
        file: String,
        /// What was expected and what was found.
        detail: String,
    },
    /// A shard's header cannot be rewritten.
    #[error("{file}: header: {detail}")]
    Header {
        /// The shard.
        file: String,
        /// What was expected and what was found.
        detail: String,
    },
    /// A thread of the fold ended early.
    #[error("internal: the {thread} thread ended early")]
    Internal {
        /// Which one.
        thread: &'static str,
    },
    /// The user asked to stop.
    #[error("interrupted")]
    Interrupted,
}

impl FoldError {
    /// The remedy, if one is known: a line of its own, never part of the message.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::Format(error) => return error.hint(),
            Self::Checkpoint(error) => return error.hint(),
            Self::WrongModel { .. }
            | Self::MissingLayer { .. }
            | Self::UnknownLayer { .. }
            | Self::WrongShape { .. } => {
                "use the checkpoint that the statistics were taken from, or calibrate and solve again for this one"
            }
            Self::AlreadyFolded { .. } => "start from the original checkpoint, or `unfold` this one first",
            Self::NonFiniteTransform { .. } => "solve again: the transforms file is damaged or its statistics are",
            Self::Singular { .. } => "solve again with more damping, for example --damping 0.1",
            Self::WrongDtype { .. } => "convert the checkpoint to BF16, F16 or F32 first",
            Self::NonFiniteWeight { .. } => {
                "the checkpoint is damaged: compare it with its source, or download it again"
            }
            Self::Overflow { dtype: Dtype::F32 | Dtype::F64, .. } => {
                "the weights or the transform are out of range: compare the checkpoint with its source, or solve again with \
                 more damping"
            }
            Self::Overflow { .. } => "keep folded tensors wide with --fold-dtype f32",
            Self::Index { .. } | Self::Header { .. } => {
                "save the checkpoint again with safetensors, or use --fold-dtype keep"
            }
            Self::WrongTensor { .. } => {
                "the checkpoint and its config.json do not belong together, or a file is damaged"
            }
            Self::SharedTensor { .. } => "save the checkpoint with a copy of the tensor for each role",
            Self::Internal { .. } => "this should not happen: please report it, with the model's name",
            Self::Interrupted => return None,
        };
        Some(hint.to_owned())
    }
}
