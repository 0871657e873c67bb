//! The solver's input, checked once: a Gram matrix and a Hessian, symmetric, finite, positive semidefinite, scaled by
//! exact powers of two, with their spectra. Everything downstream may rely on it and checks nothing again.

use faer::Mat;

use crate::dense::{self, from_rows};
use crate::{MAX_DIM, Result, TransformError};

/// |A_ij − A_ji| / max|A| that rounding explains. A sum of n products carries at most n·2^-53 relative to
/// sqrt(A_ii A_jj) ≤ max|A|; n = 2^22 positions on either side give 2^-30.
pub const SYMMETRY_REL_TOL: f64 = 1.0 / (1u64 << 30) as f64;

/// A negative eigenvalue up to this fraction of the largest is rounding of the sums: the same bound as
/// [`SYMMETRY_REL_TOL`], for the same n.
pub const NEGATIVE_REL_TOL: f64 = SYMMETRY_REL_TOL;

/// Relative rounding error of an f32 activation.
const F32_UNIT_ROUNDOFF: f64 = 1.0 / (1u64 << 24) as f64;

/// Eigenvalues at or below this fraction of the largest do not count for the numerical rank: f32 rounding of the
/// activations alone puts an eigenvalue of up to d·u² of the largest, u = 2^-24, into every null direction.
pub fn rank_rel_tol(dim: usize) -> f64 {
    dim as f64 * F32_UNIT_ROUNDOFF * F32_UNIT_ROUNDOFF
}

/// At or below this fraction of the largest, an eigenvalue computed in f64 is noise: d·ε, the backward error of the
/// decomposition.
pub(crate) fn noise_rel_tol(dim: usize) -> f64 {
    dim as f64 * f64::EPSILON
}

/// One symmetric positive semidefinite matrix.
pub(crate) struct Psd {
    /// What messages call it.
    pub(crate) name: &'static str,
    /// The matrix over 16^`log16`: largest magnitude in [1, 16). The identity when the input is all zero.
    pub(crate) mat: Mat<f64>,
    /// Exact scale that was divided out, as a power of 16 (so that fourth roots stay exact).
    pub(crate) log16: i32,
    /// Whether the input was all zero.
    pub(crate) is_zero: bool,
    /// Eigenvalues of `mat`, ascending.
    pub(crate) values: Vec<f64>,
}

impl Psd {
    pub(crate) fn new(name: &'static str, data: &[f64], dim: usize) -> Result<Self> {
        check_finite(name, data, dim)?;
        let largest = data.iter().fold(0.0_f64, |max, x| max.max(x.abs()));
        let is_zero = largest == 0.0;
        let (mat, log16) = if is_zero {
            (Mat::identity(dim, dim), 0)
        } else {
            check_symmetric(name, data, dim, largest)?;
            scaled(data, dim, largest)
        };
        let values = dense::eigenvalues(mat.as_ref(), name)?;
        let psd = Self { name, mat, log16, is_zero, values };
        if psd.smallest() < -NEGATIVE_REL_TOL * psd.largest()
            || psd.mat.diagonal().column_vector().iter().any(|&x| x < 0.0)
        {
            return Err(psd.indefinite());
        }
        Ok(psd)
    }

    /// The error that says so, with the eigenvalues of the matrix as given.
    pub(crate) fn indefinite(&self) -> TransformError {
        let unscaled = |x| libm::scalbn(x, 4 * self.log16);
        let (smallest, largest) = (unscaled(self.smallest()), unscaled(self.largest()));
        TransformError::Indefinite { matrix: self.name, smallest, largest }
    }

    /// Smallest eigenvalue of `mat`; may be negative by rounding.
    fn smallest(&self) -> f64 {
        self.values[0]
    }

    /// Largest eigenvalue of `mat`, positive.
    fn largest(&self) -> f64 {
        self.values[self.values.len() - 1]
    }

    /// Trace of `mat`.
    pub(crate) fn trace(&self) -> f64 {
        self.mat.diagonal().column_vector().iter().sum()
    }

    /// The mean eigenvalue's share that damping adds to the diagonal: γ tr(A) / d.
    fn shift(&self, damping: f64) -> f64 {
        damping * self.trace() / self.mat.nrows() as f64
    }

    /// A + γ d^{-1} tr(A) I.
    pub(crate) fn damped(&self, damping: f64) -> Mat<f64> {
        let (mut mat, shift) = (self.mat.clone(), self.shift(damping));
        mat.diagonal_mut().column_vector_mut().iter_mut().for_each(|x| *x += shift);
        mat
    }

    /// Condition number of the damped matrix, saturated at 1/ε: beyond, f64 says no more than "singular".
    pub(crate) fn condition(&self, damping: f64) -> f64 {
        let shift = self.shift(damping);
        saturated_ratio(self.largest() + shift, self.smallest() + shift)
    }

    /// Whether the damped matrix is positive definite in f64.
    ///
    /// # Errors
    /// `Singular`.
    pub(crate) fn check_definite(&self, damping: f64) -> Result<()> {
        let shift = self.shift(damping);
        let dim = self.values.len();
        // At γ = 0 an all-zero input is singular like any other; its stand-in, the identity, is for γ > 0.
        let zero = self.is_zero && damping == 0.0;
        if !zero && self.smallest() + shift > noise_rel_tol(dim) * (self.largest() + shift) {
            return Ok(());
        }
        let condition = if zero { f64::EPSILON.recip() } else { self.condition(damping) };
        Err(TransformError::Singular { matrix: self.name, damping, rank: self.rank(), dim, condition })
    }

    /// Number of eigenvalues above [`rank_rel_tol`]; 0 for an all-zero input.
    pub(crate) fn rank(&self) -> usize {
        let floor = rank_rel_tol(self.values.len()) * self.largest();
        if self.is_zero { 0 } else { self.values.iter().filter(|&&x| x > floor).count() }
    }
}

/// `largest / smallest`, at most 1/ε.
pub(crate) fn saturated_ratio(largest: f64, smallest: f64) -> f64 {
    largest / smallest.max(largest * f64::EPSILON)
}

/// Both matrices of one transform.
pub(crate) struct Pair {
    pub(crate) dim: usize,
    pub(crate) gram: Psd,
    pub(crate) hessian: Psd,
}

impl Pair {
    /// Checks both matrices, row-major `[dim, dim]`.
    ///
    /// # Errors
    /// `Dimension`, `Shape`, `NonFinite`, `Asymmetric`, `Indefinite`, `NoConvergence`.
    pub(crate) fn new(gram: &[f64], hessian: &[f64], dim: usize) -> Result<Self> {
        check_shape("Gram matrix", gram, dim)?;
        check_shape("Hessian", hessian, dim)?;
        let gram = Psd::new("Gram matrix", gram, dim)?;
        let hessian = Psd::new("Hessian", hessian, dim)?;
        Ok(Self { dim, gram, hessian })
    }

    /// Whether one of the two is all zero, so that nothing is lost whatever the transform.
    pub(crate) fn is_lossless(&self) -> bool {
        self.gram.is_zero || self.hessian.is_zero
    }
}

/// Checks a damping ratio.
///
/// # Errors
/// `Damping`.
pub(crate) fn check_damping(damping: f64) -> Result<()> {
    if damping.is_finite() && damping >= 0.0 { Ok(()) } else { Err(TransformError::Damping { value: damping }) }
}

/// Checks that `data` is `[dim, dim]`.
///
/// # Errors
/// `Dimension`, `Shape`.
pub(crate) fn check_shape(matrix: &'static str, data: &[f64], dim: usize) -> Result<()> {
    if dim == 0 || dim > MAX_DIM {
        return Err(TransformError::Dimension { dim });
    }
    let expected = dim * dim;
    if data.len() != expected {
        return Err(TransformError::Shape { matrix, dim, expected, found: data.len() });
    }
    Ok(())
}

/// Checks that every element is finite.
///
/// # Errors
/// `NonFinite`.
pub(crate) fn check_finite(matrix: &'static str, data: &[f64], dim: usize) -> Result<()> {
    match data.iter().position(|x| !x.is_finite()) {
        None => Ok(()),
        Some(at) => Err(TransformError::NonFinite { matrix, row: at / dim, col: at % dim, value: data[at] }),
    }
}

fn check_symmetric(matrix: &'static str, data: &[f64], dim: usize, largest: f64) -> Result<()> {
    let (mut worst, mut at) = (0.0, (0, 0));
    for row in 0..dim {
        for col in 0..row {
            // Divided before subtracting: the difference of two huge elements must not overflow.
            let difference = (data[row * dim + col] / largest - data[col * dim + row] / largest).abs();
            if difference > worst {
                (worst, at) = (difference, (row, col));
            }
        }
    }
    if worst <= SYMMETRY_REL_TOL {
        return Ok(());
    }
    let tolerance = SYMMETRY_REL_TOL;
    Err(TransformError::Asymmetric { matrix, row: at.0, col: at.1, difference: worst, tolerance })
}

/// The symmetric part over 16^k, and k: exact, and free of over- and underflow downstream.
fn scaled(data: &[f64], dim: usize, largest: f64) -> (Mat<f64>, i32) {
    let log16 = libm::ilogb(largest).div_euclid(4);
    let data = from_rows(data, dim);
    let at = |i, j| libm::scalbn(data[(i, j)], -4 * log16);
    (Mat::from_fn(dim, dim, |i, j| (at(i, j) + at(j, i)) / 2.0), log16)
}
