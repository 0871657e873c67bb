//! What can go wrong.

use std::io;

use plotters::drawing::DrawingAreaErrorKind;
use wush_model::ModelError;
use wush_quant::QuantError;

/// Result with an [`EvalError`].
pub type Result<T, E = EvalError> = std::result::Result<T, E>;

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    /// The forward pass failed.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A quantizer refused its parameters.
    #[error(transparent)]
    Quant(#[from] QuantError),
    /// A chart could not be drawn.
    #[error("plot: {0}")]
    Plot(#[from] DrawingAreaErrorKind<io::Error>),
    /// Matrices or vectors of a cache that are not the model's.
    #[error("layer {layer}: {what} has {found} values, and the model needs {expected}")]
    Shape {
        /// Global layer id.
        layer: usize,
        /// Which tensor.
        what: &'static str,
        /// Number of values for the model's heads.
        expected: usize,
        /// Number of values given.
        found: usize,
    },
    /// Bits cannot have this average.
    #[error("an average of {found} bits: it is a number from 2 to 4")]
    Average {
        /// As asked for.
        found: f64,
    },
    /// An error to allot bits by that is none.
    #[error("layer {layer}: its module's measured error is no squared error")]
    Sensitivity {
        /// Global layer id.
        layer: usize,
    },
    /// No token to score.
    #[error("nothing to score: every sequence has fewer than two tokens")]
    NothingToScore,
}

impl EvalError {
    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Model(error) => error.hint(),
            Self::Quant(error) => error.hint().map(str::to_owned),
            Self::Plot(_) => Some("leave --html out: the report has all numbers".to_owned()),
            Self::Shape { .. } => Some("solve the transforms on statistics of this model".to_owned()),
            Self::Average { .. } => Some("such as auto:2.25".to_owned()),
            Self::Sensitivity { .. } => Some("the manifest is damaged: convert the checkpoint again".to_owned()),
            Self::NothingToScore => Some("pass a longer text or a smaller --seq-len".to_owned()),
        }
    }
}
