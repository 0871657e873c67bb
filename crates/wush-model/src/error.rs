//! What can go wrong between a `config.json` and a forward pass.

use wush_checkpoint::CheckpointError;

/// Result of this crate.
pub type Result<T, E = ModelError> = std::result::Result<T, E>;

/// What a device says when it cannot go on.
pub trait DeviceFailure: std::error::Error + Send + Sync {
    /// The remedy, as a line of its own.
    fn hint(&self) -> Option<String>;
}

/// Why a model cannot be understood or run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A configuration key is absent or has a value that cannot be.
    #[error("config.json: {key}: expected {expected}, found {found}")]
    Config {
        /// The key, dotted when nested.
        key: String,
        /// What was expected.
        expected: String,
        /// What was found.
        found: String,
    },
    /// The model has a part for which folding or the key transform is not exact, or whose forward is not built.
    #[error("{what}: {why}")]
    Unsupported {
        /// The configuration key or tensor that shows it.
        what: String,
        /// What it does, and why that is refused.
        why: String,
        /// What to do instead.
        way_out: String,
    },
    /// `model_type` names no family of the registry.
    #[error("config.json: model_type {model_type:?} is not supported; supported: {supported}")]
    UnknownFamily {
        /// As found.
        model_type: String,
        /// The registry's names.
        supported: String,
    },
    /// A RoPE scaling that cannot be read, or that does not fit the checkpoint.
    #[error("RoPE scaling: expected {expected}, found {found}")]
    RopeScaling {
        /// What was expected.
        expected: String,
        /// What was found.
        found: String,
    },
    /// A tensor has another shape or dtype than its role demands.
    #[error("tensor {name}: expected {expected}, found {found}")]
    Tensor {
        /// Name in the checkpoint.
        name: String,
        /// Shape or dtype expected.
        expected: String,
        /// Shape or dtype found.
        found: String,
    },
    /// A tensor that the family needs is absent.
    #[error("tensor {name} is missing")]
    MissingTensor {
        /// Name in the checkpoint.
        name: String,
    },
    /// A tensor of a decoder layer has no known role: what it does to keys, values or outputs is unknown.
    #[error("tensor {name} belongs to a decoder layer but has no known role")]
    UnknownTensor {
        /// Name in the checkpoint.
        name: String,
    },
    /// NaN or infinity appeared.
    #[error("layer {layer}: {what} of sequence {sequence} are not finite")]
    NonFinite {
        /// Global layer id.
        layer: usize,
        /// "keys", "queries", "values", "hidden states", "logits", …
        what: &'static str,
        /// Index of the sequence in this run.
        sequence: usize,
    },
    /// Token ids or lengths that the model cannot take.
    #[error("sequence {sequence}: {detail}")]
    Sequence {
        /// Index of the sequence in this run.
        sequence: usize,
        /// What is wrong with it.
        detail: String,
    },
    /// The checkpoint could not be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The device that runs the model failed.
    #[error("{0}")]
    Device(Box<dyn DeviceFailure>),
    /// The user asked to stop.
    #[error("interrupted")]
    Interrupted,
}

impl ModelError {
    /// The remedy, as a line of its own.
    pub fn hint(&self) -> Option<String> {
        let text = match self {
            Self::NonFinite { .. } => {
                "the weights or the calibration text make this model overflow; check the checkpoint against its source, \
                 or pass other calibration text"
            }
            Self::Config { .. } => {
                "check config.json against the checkpoint's source: it may be damaged or of another model"
            }
            Self::UnknownFamily { .. } => "docs/families.md lists what is supported and what is refused, and why",
            Self::MissingTensor { .. } | Self::Tensor { .. } => {
                "the checkpoint and its config.json do not belong together, or a file is damaged"
            }
            Self::Unsupported { way_out, .. } => return Some(way_out.clone()),
            Self::UnknownTensor { .. } => {
                "docs/families.md lists the supported families; a checkpoint with extra tensors is another architecture \
                 under a known name"
            }
            Self::RopeScaling { .. } => "kinds with a factor are linear:F, dynamic:F and yarn:F, such as yarn:4",
            Self::Sequence { .. } => "use token ids of this model's own tokenizer, no more than its positions",
            Self::Checkpoint(error) => return error.hint(),
            Self::Device(failure) => return failure.hint(),
            Self::Interrupted => return None,
        };
        Some(text.into())
    }
}
