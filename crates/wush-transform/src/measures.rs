//! What a transform is worth on a pair of statistics: the trace product of Eq. 16, Theorem 3's bound (Eq. 18), the
//! balance of Eq. 21, condition numbers and ranks. Enters: matrices, row-major f64. Leaves: plain numbers, all finite,
//! so that they survive JSON. Decides nothing: thresholds belong to whoever reads a report.

use faer::{Mat, MatRef};

use crate::dense::{self, from_rows, product, symmetrized};
use crate::pair::{Pair, check_finite, check_shape, noise_rel_tol, saturated_ratio};
use crate::{HeadProblem, Result};

/// Above this ratio of the extreme eigenvalues of TᵀT, each of which carries d·ε of the largest as error, the condition
/// number of T is good to d·ε / 2^-20 < 10^-7 for d ≤ 256.
const ACCURATE_RATIO: f64 = 1.0 / (1u64 << 20) as f64;

/// The report on one transform of one head. Traces are of the undamped matrices; ratios have no unit.
///
/// Where the Gram matrix or the Hessian is all zero nothing can be lost: both ratios are 1 by definition.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadMeasures {
    /// Condition number of the damped Gram matrix, saturated at 1/ε (1 when all zero).
    pub cond_gram: f64,
    /// Condition number of the damped Hessian, saturated at 1/ε (1 when all zero).
    pub cond_hessian: f64,
    /// Condition number of T (2-norm), saturated at 1/ε.
    pub cond_transform: f64,
    /// Numerical rank of the undamped Gram matrix ([`crate::rank_rel_tol`]).
    pub rank_gram: usize,
    /// Numerical rank of the undamped Hessian.
    pub rank_hessian: usize,
    /// Coordinates whose Gram and Hessian diagonals are both zero.
    pub dead_channels: usize,
    /// tr(T M Tᵀ) tr(T^{-T} H T^{-1}) over Theorem 3's bound: at least 1 up to rounding, saturated at 1/ε (a Gram
    /// matrix and a Hessian on disjoint subspaces have the bound 0).
    pub trace_product_over_bound: f64,
    /// tr(M) tr(H) over the trace product: by how much this transform shrinks Eq. 16's rounding loss against the
    /// identity, the Hadamard and every other orthogonal transform.
    pub predicted_gain: f64,
    /// Largest relative deviation of the diagonal of T^{-T} H T^{-1} from its mean (Eq. 21).
    pub imbalance: f64,
}

/// Measures any invertible transform on a head's statistics.
///
/// `transform` is T, `inverse` T^{-1}, row-major `[dim, dim]`; `damping` enters the condition numbers only.
///
/// # Errors
/// Input that is no pair of symmetric positive semidefinite matrices, non-finite transforms, `NoConvergence`.
pub fn measure(transform: &[f64], inverse: &[f64], problem: &HeadProblem<'_>, damping: f64) -> Result<HeadMeasures> {
    let HeadProblem { gram, hessian, dim, .. } = *problem;
    let pair = Pair::new(gram, hessian, dim)?;
    let transform = checked("transform", transform, dim)?;
    measure_pair(&pair, damping, transform, checked("inverse", inverse, dim)?)
}

/// The transform's factor in Eq. 16's unclipped rounding loss: tr(T M Tᵀ) tr(T^{-T} H T^{-1}).
///
/// ℓ_rnd(T) = α_b² / (6 d (2^b − 1)²) · tr(T M Tᵀ) tr(B_T): everything else in it is the quantizer's. `transform` is T,
/// `inverse` T^{-1}, `gram` M, `hessian` H, all row-major `[dim, dim]`.
///
/// # Errors
/// `Dimension`, `Shape`, `NonFinite`.
pub fn trace_product(transform: &[f64], inverse: &[f64], gram: &[f64], hessian: &[f64], dim: usize) -> Result<f64> {
    let (transform, gram) = (checked("transform", transform, dim)?, checked("Gram matrix", gram, dim)?);
    let (inverse, hessian) = (checked("inverse", inverse, dim)?, checked("Hessian", hessian, dim)?);
    Ok(transformed_trace(transform, gram) * sensitivity_of(inverse, hessian).iter().sum::<f64>())
}

/// Theorem 3's lower bound of the trace product, the right side of Eq. 18: (Σ_i σ_i)², σ_i the singular values of
/// M^{1/2} H^{1/2}. `gram` is M, `hessian` H, row-major `[dim, dim]`. 0 when either is all zero.
///
/// Singular input is fine. An eigenvalue of M or H that is noise in f64 (d·ε of the largest) counts as zero, so the
/// figure errs, if at all, on the side of a lower bound. Overflows to infinity only where tr(M) tr(H) does.
///
/// # Errors
/// Input that is no pair of symmetric positive semidefinite matrices, `NoConvergence`.
pub fn theorem3_bound(gram: &[f64], hessian: &[f64], dim: usize) -> Result<f64> {
    let pair = Pair::new(gram, hessian, dim)?;
    if pair.is_lossless() {
        return Ok(0.0);
    }
    Ok(libm::scalbn(scaled_bound(&pair)?, 4 * (pair.gram.log16 + pair.hessian.log16)))
}

/// Diagonal of B_T = T^{-T} H T^{-1} (Section B.1): how much an error in each transformed coordinate costs.
///
/// For the undamped WUSH transform Eq. 20 gives B_T = c^{-2} ℋ Λ^{1/2} ℋᵀ, whose diagonal is constant. `inverse` is
/// T^{-1}, `hessian` H, row-major `[dim, dim]`.
///
/// # Errors
/// `Dimension`, `Shape`, `NonFinite`.
pub fn sensitivity(inverse: &[f64], hessian: &[f64], dim: usize) -> Result<Vec<f64>> {
    Ok(sensitivity_of(checked("inverse", inverse, dim)?, checked("Hessian", hessian, dim)?))
}

/// How far from Eq. 21, (B_T)_ii = tr(B_T)/d for every i, a diagonal is: max_i |B_ii / mean − 1|. 0 for an all-zero or
/// empty diagonal.
pub fn imbalance(diagonal: &[f64]) -> f64 {
    let mean = diagonal.iter().sum::<f64>() / diagonal.len() as f64;
    if mean > 0.0 { diagonal.iter().fold(0.0, |max: f64, x| max.max((x / mean - 1.0).abs())) } else { 0.0 }
}

/// Condition number in the 2-norm of a row-major `[dim, dim]` matrix, saturated at 1/ε.
///
/// # Errors
/// `Dimension`, `Shape`, `NonFinite`, `NoConvergence`.
pub fn condition_number(matrix: &[f64], dim: usize) -> Result<f64> {
    condition_of(checked("transform", matrix, dim)?)
}

/// [`measure`] on checked input.
pub(crate) fn measure_pair(
    pair: &Pair,
    damping: f64,
    transform: MatRef<'_, f64>,
    inverse: MatRef<'_, f64>,
) -> Result<HeadMeasures> {
    let Pair { dim, gram, hessian } = pair;
    // All on the scaled matrices: every figure is a ratio, free of their scale.
    let diagonal = sensitivity_of(inverse, hessian.mat.as_ref());
    let (over_bound, gain) = if pair.is_lossless() {
        (1.0, 1.0)
    } else {
        let product = transformed_trace(transform, gram.mat.as_ref()) * diagonal.iter().sum::<f64>();
        (saturated_ratio(product, scaled_bound(pair)?), gram.trace() * hessian.trace() / product)
    };
    let is_dead = |i| is_zero_at(&gram.mat, gram.is_zero, i) && is_zero_at(&hessian.mat, hessian.is_zero, i);
    Ok(HeadMeasures {
        cond_gram: gram.condition(damping),
        cond_hessian: hessian.condition(damping),
        cond_transform: condition_of(transform)?,
        rank_gram: gram.rank(),
        rank_hessian: hessian.rank(),
        dead_channels: (0..*dim).filter(|&i| is_dead(i)).count(),
        trace_product_over_bound: over_bound,
        predicted_gain: gain,
        imbalance: if hessian.is_zero { 0.0 } else { imbalance(&diagonal) },
    })
}

fn is_zero_at(mat: &Mat<f64>, all_zero: bool, i: usize) -> bool {
    all_zero || mat[(i, i)] == 0.0
}

/// Theorem 3's bound of the scaled pair: with H = R Rᵀ the σ_i² are the eigenvalues of Rᵀ M R. Those that are noise, d·ε
/// of the largest, count as zero.
fn scaled_bound(pair: &Pair) -> Result<f64> {
    let root = dense::pivoted_root(pair.hessian.mat.as_ref()).ok_or_else(|| pair.hessian.indefinite())?;
    let inner = product(root.transpose(), product(pair.gram.mat.as_ref(), root.as_ref()).as_ref());
    let squares = dense::eigenvalues(symmetrized(inner.as_ref()).as_ref(), "product of Gram matrix and Hessian")?;
    let floor = noise_rel_tol(pair.dim) * squares.last().copied().unwrap_or(0.0);
    let sum: f64 = squares.iter().filter(|&&x| x > floor).map(|x| x.sqrt()).sum();
    Ok(sum * sum)
}

/// tr(T M Tᵀ).
fn transformed_trace(transform: MatRef<'_, f64>, gram: MatRef<'_, f64>) -> f64 {
    column_products(product(gram, transform.transpose()).as_ref(), transform.transpose()).iter().sum()
}

fn sensitivity_of(inverse: MatRef<'_, f64>, hessian: MatRef<'_, f64>) -> Vec<f64> {
    column_products(product(hessian, inverse).as_ref(), inverse)
}

/// Σ_i a_ij b_ij for every j.
fn column_products(a: MatRef<'_, f64>, b: MatRef<'_, f64>) -> Vec<f64> {
    (0..a.ncols()).map(|j| a.col(j).iter().zip(b.col(j).iter()).map(|(x, y)| x * y).sum()).collect()
}

/// From the eigenvalues of TᵀT where they are accurate, else from the singular values of T, at three times the cost.
fn condition_of(matrix: MatRef<'_, f64>) -> Result<f64> {
    let squares = dense::eigenvalues(product(matrix.transpose(), matrix).as_ref(), "transform")?;
    let (smallest, largest) = (squares[0], squares[squares.len() - 1]);
    if smallest > ACCURATE_RATIO * largest {
        return Ok((largest / smallest).sqrt());
    }
    let values = dense::singular_values(matrix, "transform")?;
    Ok(saturated_ratio(values[0], values[values.len() - 1]))
}

/// A matrix of the right shape and finite.
pub(crate) fn checked<'a>(name: &'static str, data: &'a [f64], dim: usize) -> Result<MatRef<'a, f64>> {
    check_shape(name, data, dim)?;
    check_finite(name, data, dim)?;
    Ok(from_rows(data, dim))
}
