//! The one error type of this crate: what failed, in which layer and head, what was expected and what was found.

use std::path::PathBuf;

use wush_format::FormatError;
use wush_format::hash::Sha;
use wush_quant::QuantError;

use crate::SequenceId;

/// Result of this crate.
pub type Result<T, E = RuntimeError> = std::result::Result<T, E>;

/// Why a cache could not be made, filled, read, saved or loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RuntimeError {
    /// A number of bits that no cache has.
    #[error("bits: expected 2, 3, 4, 8, or 16 for none quantized, found {found}")]
    Bits {
        /// As given.
        found: u8,
    },
    /// A field of the configuration is out of range.
    #[error("cache configuration, {place}: expected {expected}, found {found}")]
    Config {
        /// The field, with its layer if it has one.
        place: String,
        /// The range.
        expected: String,
        /// As given.
        found: String,
    },
    /// A quantizer refused.
    #[error("layer {layer}: {source}")]
    Quant {
        /// Layer.
        layer: usize,
        /// Why.
        source: QuantError,
    },
    /// A file could not be read or written.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A sidecar or a saved cache belongs to other weights.
    #[error("{path}: made for the model with hash {found}, this model's hash is {expected}")]
    OtherModel {
        /// The file.
        path: PathBuf,
        /// Hash of the weights in use.
        expected: Sha,
        /// Hash that the file names.
        found: Sha,
    },
    /// The two matrices of a head do not undo each other: attention would change.
    #[error(
        "{path}: layer {layer}, KV head {head}: query is not key^{{-T}} (off by {excess:.3} of its rounding bound)"
    )]
    NotInverse {
        /// The sidecar.
        path: PathBuf,
        /// Layer.
        layer: usize,
        /// KV head.
        head: usize,
        /// Largest |key · queryᵀ − I| over what rounding explains; at most 1 is accepted.
        excess: f64,
    },
    /// A mean key that is no key: what is cached is T_K (k − μ).
    #[error(
        "{path}: layer {layer}, KV head {head}: coordinate {coordinate} of {what} is {value}, expected a magnitude up to 2^120"
    )]
    Mean {
        /// The sidecar.
        path: PathBuf,
        /// Layer.
        layer: usize,
        /// KV head.
        head: usize,
        /// "the mean key", or "the transformed mean key".
        what: &'static str,
        /// Coordinate inside the head.
        coordinate: usize,
        /// What stands there.
        value: f64,
    },
    /// A sidecar's heads are not those of the cache.
    #[error(
        "transforms or feedback of layer {layer}: expected {expected:?} (KV heads, head dimension), found {found:?}"
    )]
    OtherHeads {
        /// Layer.
        layer: usize,
        /// `(KV heads, head dimension)` of the configuration.
        expected: (usize, usize),
        /// Those of the sidecar.
        found: (usize, usize),
    },
    /// No such layer.
    #[error("layer {layer}: the cache has layers 0 to {last}")]
    NoLayer {
        /// As given.
        layer: usize,
        /// The last there is.
        last: usize,
    },
    /// A layer without key transforms.
    #[error("layer {layer}: the sidecar has no key transforms for it")]
    NoTransforms {
        /// As given.
        layer: usize,
    },
    /// Key transforms other than those that the cache's configuration names.
    #[error("key transforms: the cache is of those with hash {expected}, found {found}")]
    OtherTransforms {
        /// The configuration's.
        expected: Sha,
        /// Those given.
        found: Sha,
    },
    /// No such sequence: never added, or removed.
    #[error("sequence {sequence}: the cache holds none of this id")]
    NoSequence {
        /// As given.
        sequence: SequenceId,
    },
    /// A sequence stands twice in one batch.
    #[error("sequence {sequence} stands twice in one batch")]
    Twice {
        /// The sequence.
        sequence: SequenceId,
    },
    /// A slice has another length than the shapes ask for.
    #[error("layer {layer}, {what}: expected {expected} elements, found {found}")]
    Length {
        /// Layer.
        layer: usize,
        /// Which slice, with its shape: "keys [tokens, KV heads, head dimension]".
        what: &'static str,
        /// The length that fits.
        expected: usize,
        /// The length found.
        found: usize,
    },
    /// A key or value is NaN, infinite, or too large to be quantized.
    #[error(
        "layer {layer}, {what} of token {token} (row of the batch), KV head {head}, coordinate {coordinate}: {value} cannot be cached"
    )]
    OutOfRange {
        /// Layer.
        layer: usize,
        /// "key" or "value".
        what: &'static str,
        /// Row of the batch.
        token: usize,
        /// KV head.
        head: usize,
        /// Coordinate inside the head.
        coordinate: usize,
        /// What stands there.
        value: f32,
    },
    /// More query positions than a sequence has tokens.
    #[error("layer {layer}, sequence {sequence}: {found} query positions, but the cache holds {n_tokens} tokens")]
    Positions {
        /// Layer.
        layer: usize,
        /// The sequence.
        sequence: SequenceId,
        /// Query positions asked for.
        found: usize,
        /// Tokens held.
        n_tokens: usize,
    },
    /// A sliding-window layer has let go of tokens that would be needed.
    #[error(
        "layer {layer}, sequence {sequence}: position {needed} is needed, but the sliding window let go of all before {first}"
    )]
    Freed {
        /// Layer.
        layer: usize,
        /// The sequence.
        sequence: SequenceId,
        /// First position needed.
        needed: usize,
        /// First position still held (after the sink).
        first: usize,
    },
    /// A saved cache was made with another configuration.
    #[error("{path}: the cache was saved with another configuration: {field}: expected {expected}, found {found}")]
    OtherConfig {
        /// The file.
        path: PathBuf,
        /// The first field that differs.
        field: String,
        /// This cache's.
        expected: String,
        /// The file's.
        found: String,
    },
    /// Layers of different lengths: a forward pass has not reached all of them.
    #[error("sequence {sequence}: layer {layer} holds {found} tokens, layer 0 holds {expected}: it is not saved")]
    Uneven {
        /// The sequence.
        sequence: SequenceId,
        /// The first layer of another length.
        layer: usize,
        /// Tokens of layer 0.
        expected: usize,
        /// Tokens of the layer.
        found: usize,
    },
    /// A candle tensor has another shape than the configuration asks for.
    #[cfg(feature = "candle")]
    #[error(
        "layer {layer}, {what}: expected shape {expected:?} (batch, heads, tokens, head dimension), found {found:?}"
    )]
    Shape {
        /// Layer.
        layer: usize,
        /// "queries", "keys" or "values".
        what: &'static str,
        /// The shape that fits.
        expected: [usize; 4],
        /// The shape found.
        found: Vec<usize>,
    },
    /// A candle tensor could not be read or made.
    #[cfg(feature = "candle")]
    #[error("candle: {0}")]
    Candle(#[from] candle_core::Error),
}

impl RuntimeError {
    /// The remedy, if one is known: a line of its own, never part of the message.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::Format(source) => return source.hint(),
            Self::Quant { source, .. } => return source.hint().map(str::to_owned),
            Self::OtherModel { .. } => "use the file that lies in the model's own bundle",
            Self::NotInverse { .. } | Self::Mean { .. } => {
                "the sidecar is damaged: fold the bundle again, or copy it again"
            }
            Self::OtherHeads { .. } => "use the sidecar of this model",
            Self::OutOfRange { .. } => {
                "a NaN or an infinity in a key or value comes from the model or its dtype: look there"
            }
            Self::Freed { .. } => "raise `rewind` in the cache's configuration, or truncate to 0 and compute again",
            Self::OtherConfig { .. } => "load it with the configuration that it was saved with, or compute it again",
            Self::Bits { .. } => "2 bits is what the transforms are made for; 16 quantizes nothing",
            Self::Config { .. } => {
                "change that field of the configuration; a window that is not wanted is 0 tokens long"
            }
            Self::NoTransforms { .. } => {
                "the sidecar is another model's, or incomplete: use the one of this model's bundle"
            }
            Self::OtherTransforms { .. } => "use the transforms that the configuration was made for",
            Self::Uneven { .. } => "save between forward passes, or truncate to the tokens that every layer has",
            Self::NoSequence { .. } => "`KvCache::add` and `KvCache::fork` give ids; a removed one is not used again",
            Self::Twice { .. } => "append a sequence's tokens as one part",
            _ => return None,
        };
        Some(hint.to_owned())
    }
}
