//! Is a checkpoint without a manifest in its base's own coordinates? A fold and its undoing leave two roundings; another T would
//! be the same function, but a folded checkpoint that does not say so.
//!
//! With `W' = T W + N`, W the values `[d, n]` of one KV head and N the roundings, the difference `D = W' − W` is N alone when
//! T = I, and `(T − I) W + N` else. Two things tell, row by row:
//!
//! 1. **size**: ‖D‖ of a head is at most [`MAX_ROUNDINGS`] times what one rounding can give.
//! 2. **direction**: with Z = L⁻¹ W, W Wᵀ = L Lᵀ, an orthonormal basis of W's row space, ‖D Zᵀ‖² of a row is on average
//!    Σ_k D_k² ‖z_k‖² when the D_k are independent with mean zero, and up to ‖D‖², n/d times as much, when D lies in the row
//!    space, as `(T − I) W` does. The ratio of the two scatters by √(2/d); [`SIGMAS`] of that pass.
//!
//! A change below both is within the roundings. Where n < 4 d or so the second says little, and the first decides.

use faer::linalg::matmul::matmul;
use faer::linalg::triangular_solve::solve_lower_triangular_in_place;
use faer::{Accum, Mat, Par, Side};
use wush_fold::HeadWeights;

use crate::number::worse;

/// Most that the difference may exceed half a spacing of the stored numbers, in the root mean square over a head: one rounding
/// of its own, and a first one that the undoing of T amplified by at most 32 (as the comparison of functions allows, too).
const MAX_ROUNDINGS: f64 = 33.0;
/// Standard deviations of the ratio that pass; a χ² of 64 degrees is beyond with probability 1e-10.
const SIGMAS: f64 = 9.0;

/// How far a head's values are from the base's coordinates: the larger of both ratios over its bound; at most 1 passes.
pub(crate) fn excess(base: &HeadWeights, found: &HeadWeights) -> f64 {
    let (dim, n) = (base.value.nrows(), base.value.ncols());
    let difference = Mat::from_fn(dim, n, |i, j| found.value[(i, j)] - base.value[(i, j)]);
    let squares = |a: &Mat<f64>| a.col_iter().flat_map(|col| col.iter()).map(|x| x * x).sum::<f64>();
    let squared = squares(&difference);
    if squared == 0.0 {
        return 0.0;
    }
    let size = (squared / squares(&found.value_halves)).sqrt() / MAX_ROUNDINGS;
    let Some(basis) = row_space(&base.value) else { return size };
    let limit = 1.0 + SIGMAS * (2.0 / dim as f64).sqrt();
    worse(size, largest_share(&difference, &basis) / limit)
}

/// Z `[d, n]` with orthonormal rows that span the rows of `a`; none when it is not finite or all zero. Directions that are noise
/// in f64 come out short.
fn row_space(a: &Mat<f64>) -> Option<Mat<f64>> {
    let dim = a.nrows();
    let mut gram = Mat::<f64>::zeros(dim, dim);
    matmul(gram.as_mut(), Accum::Replace, a.as_ref(), a.transpose(), 1.0, Par::Seq);
    let trace: f64 = (0..dim).map(|i| gram[(i, i)]).sum();
    (0..dim).for_each(|i| gram[(i, i)] += dim as f64 * f64::EPSILON * trace);
    let factor = gram.llt(Side::Lower).ok().filter(|_| trace > 0.0)?;
    let mut basis = a.clone();
    solve_lower_triangular_in_place(factor.L(), basis.as_mut(), Par::Seq);
    Some(basis)
}

/// Over rows, the largest ‖D Zᵀ‖² / Σ_k D_k² ‖z_k‖².
fn largest_share(difference: &Mat<f64>, basis: &Mat<f64>) -> f64 {
    let (dim, n) = (difference.nrows(), difference.ncols());
    let mut inside = Mat::<f64>::zeros(dim, dim);
    matmul(inside.as_mut(), Accum::Replace, difference.as_ref(), basis.transpose(), 1.0, Par::Seq);
    let leverage: Vec<f64> = basis.col_iter().map(|col| col.iter().map(|x| x * x).sum()).collect();
    let share = |row: usize| {
        let found: f64 = (0..dim).map(|k| inside[(row, k)] * inside[(row, k)]).sum();
        let expected: f64 = (0..n).map(|k| difference[(row, k)] * difference[(row, k)] * leverage[k]).sum();
        if found == 0.0 { 0.0 } else { found / expected }
    };
    (0..dim).map(share).fold(0.0, worse)
}
