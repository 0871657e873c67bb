//! What an encoder with error feedback needs of a head: the factor of the metric in which errors of the cache count.
//! Enters: T⁻¹ and the Hessian. Leaves: a unit lower triangular matrix. The encoder itself is a quantizer's, not here.

use faer::{Mat, MatRef};

use crate::dense::{self, product, symmetrized, to_rows};
use crate::measures::checked;
use crate::pair::{Psd, check_damping};
use crate::{Result, TransformError};

/// What an encoder with error feedback takes, and what it is worth.
#[derive(Debug, Clone, PartialEq)]
pub struct ErrorFeedback {
    /// L, row-major `[dim, dim]`.
    pub lower: Vec<f64>,
    /// By how much Eq. 16's rounding loss shrinks: tr(G) / tr(L^{-1} G L^{-T}) at γ = 0. What is rounded then is the target
    /// of each coordinate, ε = Lᵀ e, so that the loss is eᵀGe = εᵀ L^{-1} G L^{-T} ε with ε white. 1 for an all-zero H.
    pub gain: f64,
}

/// Unit lower triangular L of the metric G = T^{-T} (H + γ d⁻¹ tr(H) I) T^{-1} = L D Lᵀ.
///
/// An error e of the cached T x costs eᵀGe, to second order, which is `Σᵢ Dᵢ (eᵢ + Σ_{j>i} L_ji e_j)²`: a coordinate that is
/// quantized after those behind it can make up for their errors. `inverse` is T^{-1}, `hessian` H, row-major
/// `[dim, dim]`; so is the result. L does not change with the scale of either. For the transform of Eq. 1
/// G = c⁻² R Λ^{2p} Rᵀ, which is as well conditioned as Λ^{2p}.
///
/// An all-zero H (a head that is never read) has no preference; the identity stands in for it, as in Eq. 1.
///
/// # Errors
/// `Dimension`, `Shape`, `Damping`, `NonFinite`, `Asymmetric`, `Indefinite`; `Singular` where G is not positive definite in
/// f64 (at γ = 0, a rank-deficient H).
pub fn error_feedback(inverse: &[f64], hessian: &[f64], dim: usize, damping: f64) -> Result<ErrorFeedback> {
    check_damping(damping)?;
    let inverse = checked("inverse", inverse, dim)?;
    let undamped = checked("Hessian", hessian, dim)?;
    let hessian = Psd::new("Hessian", hessian, dim)?;
    hessian.check_definite(damping)?;
    let metric = product(inverse.transpose(), product(hessian.damped(damping).as_ref(), inverse).as_ref());
    let metric = symmetrized(metric.as_ref());
    let mut lower = dense::cholesky(metric.as_ref()).ok_or_else(|| TransformError::Singular {
        matrix: "metric of the cache",
        damping,
        rank: hessian.rank(),
        dim,
        condition: hessian.condition(damping),
    })?;
    let pivots: Vec<f64> = (0..dim).map(|j| lower[(j, j)]).collect();
    dense::scale_columns(&mut lower, |j| pivots[j].recip());
    let gain = gain(undamped, inverse, &lower);
    let mut rows = to_rows(lower.as_ref());
    // x · (1/x) may round.
    rows.iter_mut().step_by(dim + 1).for_each(|x| *x = 1.0);
    match rows.iter().position(|x| !x.is_finite()) {
        None => Ok(ErrorFeedback { lower: rows, gain }),
        Some(at) => {
            Err(TransformError::NonFinite { matrix: "feedback", row: at / dim, col: at % dim, value: rows[at] })
        }
    }
}

/// tr(G) / tr(L^{-1} G L^{-T}) with the undamped metric.
fn gain(hessian: MatRef<'_, f64>, inverse: MatRef<'_, f64>, lower: &Mat<f64>) -> f64 {
    let dim = lower.nrows();
    let metric = product(inverse.transpose(), product(hessian, inverse).as_ref());
    let whole: f64 = (0..dim).map(|i| metric[(i, i)]).sum();
    if whole == 0.0 {
        return 1.0;
    }
    let root = dense::solve_transposed(lower, Mat::identity(dim, dim));
    let carried = product(metric.as_ref(), root.as_ref());
    let left: f64 = (0..dim).flat_map(|j| (0..dim).map(move |i| (i, j))).map(|at| root[at] * carried[at]).sum();
    whole / left
}

#[cfg(test)]
mod tests {
    use super::*;

    /// T = [[2, 1], [0, 1]] by hand: T⁻¹ = [[½, −½], [0, 1]], H = diag(4, 1), G = [[1, −1], [−1, 2]] = L diag(1, 1) Lᵀ.
    #[test]
    fn a_small_case_by_hand() {
        let lower = error_feedback(&[0.5, -0.5, 0.0, 1.0], &[4.0, 0.0, 0.0, 1.0], 2, 0.0).expect("definite");
        // tr(G) = 3, and L⁻¹ G L⁻ᵀ = diag(1, 1).
        assert!((lower.gain - 1.5).abs() <= 4.0 * f64::EPSILON, "{lower:?}");
        for (found, expected) in lower.lower.iter().zip([1.0, 0.0, -1.0, 1.0]) {
            assert!((found - expected).abs() <= 4.0 * f64::EPSILON, "{lower:?}");
        }
    }

    #[test]
    fn what_has_no_factor_is_refused() {
        let unit = [1.0, 0.0, 0.0, 1.0];
        let singular = error_feedback(&unit, &[1.0, 1.0, 1.0, 1.0], 2, 0.0);
        assert!(matches!(singular, Err(TransformError::Singular { .. })), "{singular:?}");
        assert!(error_feedback(&unit, &[1.0, 1.0, 1.0, 1.0], 2, 0.01).is_ok());
        let dead = error_feedback(&unit, &[0.0; 4], 2, 0.01).expect("the identity stands in");
        assert_eq!((&dead.lower[..], dead.gain), (&unit[..], 1.0));
        assert!(matches!(error_feedback(&unit, &[1.0; 3], 2, 0.01), Err(TransformError::Shape { .. })));
        assert!(matches!(error_feedback(&unit, &unit, 2, -1.0), Err(TransformError::Damping { .. })));
    }
}
