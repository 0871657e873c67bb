//! The one error type of this crate. A message names the argument and the numbers; the caller adds layer and head.

/// Result of this crate.
pub type Result<T, E = QuantError> = std::result::Result<T, E>;

/// Why something could not be quantized, read or computed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum QuantError {
    /// A number of bits that has no packed form.
    #[error("bits: expected 2, 3, 4 or 8, found {found}")]
    Bits {
        /// Bits a code, as given.
        found: u64,
    },
    /// A head dimension that is zero or too large.
    #[error("head dimension: expected 1 to {max}, found {found}")]
    HeadDim {
        /// As given.
        found: usize,
        /// [`MAX_HEAD_DIM`](crate::MAX_HEAD_DIM).
        max: usize,
    },
    /// A quantizer's parameter is outside its range.
    #[error("{parameter}: expected {expected}, found {found}")]
    Parameter {
        /// "alpha" or "kappa".
        parameter: &'static str,
        /// The range.
        expected: &'static str,
        /// As given.
        found: f64,
    },
    /// A text that names no quantizer.
    #[error("quantizer {text:?}: expected one of {known}, with a number after a colon for another parameter")]
    UnknownMethod {
        /// As given.
        text: String,
        /// The names that exist.
        known: String,
    },
    /// A text that names no storage type of scales.
    #[error("scale type {text:?}: expected bf16 or f32")]
    UnknownScaleDtype {
        /// As given.
        text: String,
    },
    /// A slice has another length than the others and the layout ask for.
    #[error("{what}: expected {expected} elements, found {found}")]
    Length {
        /// Which slice.
        what: &'static str,
        /// The length that fits.
        expected: usize,
        /// The length found.
        found: usize,
    },
    /// A feedback matrix that is not unit lower triangular, or with an element beyond
    /// [`MAX_FEEDBACK`](crate::MAX_FEEDBACK).
    #[error(
        "feedback: element [{row}, {col}] is {value}, expected a unit lower triangular matrix with magnitudes up to 2^26"
    )]
    NotUnitLower {
        /// Row of the first such element.
        row: usize,
        /// Its column.
        col: usize,
        /// What stands there.
        value: f32,
    },
    /// Queries or accumulators were made for another layout.
    #[error("{what} were made for another layout of packed token-heads")]
    OtherLayout {
        /// "queries" or "accumulators".
        what: &'static str,
    },
    /// A coordinate is NaN, infinite, or larger than [`MAX_MAGNITUDE`](crate::MAX_MAGNITUDE).
    #[error("token {token}, coordinate {coordinate}: {value} cannot be quantized (expected a magnitude up to 2^120)")]
    OutOfRange {
        /// Index of the token-head in the input.
        token: usize,
        /// Index inside the head.
        coordinate: usize,
        /// What stands there.
        value: f32,
    },
    /// Vector instructions that this machine does not have.
    #[error("this machine has no {level}")]
    NoSuchLevel {
        /// The instructions asked for.
        level: &'static str,
    },
}

impl QuantError {
    /// The remedy, if one is known: a line of its own, never part of the message.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::HeadDim { .. } => Some("heads this wide cannot be packed; 16 bits quantize nothing"),
            Self::Parameter { .. } | Self::UnknownMethod { .. } => Some(
                "quest, quest-wide, oscar and oscar-linear also stand alone, with the parameter that suits the bits",
            ),
            Self::NoSuchLevel { .. } => Some("leave the choice to run-time detection"),
            Self::Bits { .. } => Some("2 bits is what the transforms are made for; 8 loses next to nothing"),
            Self::OutOfRange { .. } => {
                Some("a NaN or an infinity in a key or value comes from the model or its dtype: look there")
            }
            Self::NotUnitLower { .. } => Some("the file is damaged or was not written by wush: take the bundle anew"),
            Self::OtherLayout { .. } => Some("prepare them again for the layer's own bits and head dimension"),
            _ => None,
        }
    }
}
