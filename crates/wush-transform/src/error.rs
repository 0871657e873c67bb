//! The one error type of this crate. A message names the matrix and the numbers; the caller adds layer, head and role.

/// Result of this crate.
pub type Result<T, E = TransformError> = std::result::Result<T, E>;

/// Why a transform could not be built.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TransformError {
    /// A matrix has another number of elements than `dim * dim`.
    #[error("{matrix}: expected {expected} elements ({dim} x {dim}), found {found}")]
    Shape {
        /// Which matrix: "Gram matrix", "Hessian", "transform", "inverse".
        matrix: &'static str,
        /// The dimension d.
        dim: usize,
        /// `dim * dim`.
        expected: usize,
        /// Elements found.
        found: usize,
    },
    /// The dimension is zero or beyond [`crate::MAX_DIM`].
    #[error("dimension {dim}: expected 1 to {max}", max = crate::MAX_DIM)]
    Dimension {
        /// As given.
        dim: usize,
    },
    /// The damping ratio is negative or not finite.
    #[error("damping: expected a finite number >= 0, found {value}")]
    Damping {
        /// As given.
        value: f64,
    },
    /// The exponent of Λ is outside its range.
    #[error("exponent: expected 0 to 0.5, found {value}")]
    Exponent {
        /// As given.
        value: f64,
    },
    /// NaN or infinity in an input.
    #[error("{matrix}: element [{row}, {col}] is {value}, expected a finite number")]
    NonFinite {
        /// Which matrix.
        matrix: &'static str,
        /// Row of the first such element.
        row: usize,
        /// Its column.
        col: usize,
        /// NaN or an infinity.
        value: f64,
    },
    /// An input that must be symmetric is not.
    #[error(
        "{matrix}: not symmetric: [{row}, {col}] and its mirror differ by {difference:.3e} of the largest element, \
         tolerance {tolerance:.3e}"
    )]
    Asymmetric {
        /// Which matrix.
        matrix: &'static str,
        /// Row of the worst element.
        row: usize,
        /// Its column.
        col: usize,
        /// |A_ij - A_ji| / max |A|.
        difference: f64,
        /// What rounding can explain.
        tolerance: f64,
    },
    /// An eigenvalue is negative beyond rounding: the input is no sum of outer products.
    #[error("{matrix}: not positive semidefinite: smallest eigenvalue {smallest:.3e}, largest {largest:.3e}")]
    Indefinite {
        /// Which matrix.
        matrix: &'static str,
        /// Smallest eigenvalue.
        smallest: f64,
        /// Largest eigenvalue.
        largest: f64,
    },
    /// The damped matrix is not positive definite in f64.
    #[error(
        "{matrix}: singular with damping {damping:e}: numerical rank {rank} of {dim}, condition number {condition:.3e}"
    )]
    Singular {
        /// Which matrix.
        matrix: &'static str,
        /// The damping ratio γ.
        damping: f64,
        /// Numerical rank of the undamped matrix.
        rank: usize,
        /// The dimension d.
        dim: usize,
        /// Condition number of the damped matrix (saturated at 1/ε).
        condition: f64,
    },
    /// OSCAR's bit-reversed order is one of powers of two.
    #[error("OSCAR's rotation of order {order}: expected a power of two")]
    NotPowerOfTwo {
        /// The order asked for.
        order: usize,
    },
    /// No Hadamard matrix of this order is built here.
    #[error("no Hadamard matrix of order {order}: expected 2^k, or 2^k m with a Paley matrix of order m")]
    UnsupportedOrder {
        /// The order asked for.
        order: usize,
    },
    /// An iterative decomposition did not converge.
    #[error("{what}: the decomposition did not converge")]
    NoConvergence {
        /// What was decomposed.
        what: &'static str,
    },
    /// The transform is built from statistics and there are none.
    #[error("transform {transform} needs calibration statistics, and none were given")]
    NeedsStatistics {
        /// Registry name.
        transform: &'static str,
    },
    /// The registry has no such orthogonal factor.
    #[error("orthogonal factor {name:?} is not known; known: {known}")]
    UnknownFactor {
        /// As asked for.
        name: String,
        /// The registry's names.
        known: String,
    },
    /// The registry has no such transform.
    #[error("transform {name:?} is not known; known: {known}")]
    UnknownTransform {
        /// As asked for.
        name: String,
        /// The registry's names.
        known: String,
    },
}

impl TransformError {
    /// The remedy, as a line of its own.
    pub fn hint(&self) -> Option<String> {
        let text = match self {
            Self::Singular { damping: 0.0, .. } => {
                "pass a positive damping (--damping 0.01): it makes every nonzero matrix positive definite"
            }
            Self::Singular { .. } => "pass a larger damping (--damping 0.01)",
            Self::NonFinite { .. } | Self::Indefinite { .. } | Self::Asymmetric { .. } => {
                "the statistics are damaged: calibrate again"
            }
            Self::NotPowerOfTwo { .. } => "wush, hadamard, random and identity exist for this head dimension",
            Self::NeedsStatistics { .. } => "calibrate first, or choose a transform that needs no statistics",
            Self::UnsupportedOrder { .. } => {
                "head dimensions in use (64, 72, 80, 96, 112, 120, 128, 160, 192, 256) are supported; for this one only \
                 the transforms identity and random exist"
            }
            Self::Damping { .. } => "0.01 is the paper's; more of it makes hard heads easier",
            Self::Exponent { .. } => "0.25 is the paper's; 0.4 suits an encoder with error feedback",
            Self::NoConvergence { .. } => "pass a larger damping (--damping 0.1), or calibrate on more text",
            Self::Shape { .. } | Self::Dimension { .. } => {
                "the statistics are damaged or of another model: calibrate again"
            }
            Self::UnknownFactor { .. } | Self::UnknownTransform { .. } => return None,
        };
        Some(text.into())
    }
}
