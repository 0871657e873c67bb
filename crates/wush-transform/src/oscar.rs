//! The rotation of the OSCAR baseline. Enters: a covariance. Leaves: an orthogonal matrix. How the covariance comes about is
//! the statistics' business.

use crate::dense;
use crate::hadamard::hadamard;
use crate::pair::{Psd, check_shape};
use crate::wush::fix_signs;
use crate::{Result, TransformError};

/// T = Rᵀ, row-major `[dim, dim]`, of `R = U ℋ P`: C = U Λ Uᵀ, ℋ the normalized Sylvester Hadamard matrix, and P the
/// permutation whose column `bitrev(i)` is the unit vector of the index at which the i-th largest eigenvalue stands.
///
/// `covariance` is C, row-major `[dim, dim]`, up to its scale. Each eigenvector's largest entry is positive (of tied ones, the
/// first). An all-zero C has no directions: U is the identity then.
///
/// # Errors
/// `Dimension`, `Shape`, `NotPowerOfTwo`, `NonFinite`, `Asymmetric`, `Indefinite`, `NoConvergence`.
pub(crate) fn oscar_rotation(covariance: &[f64], dim: usize) -> Result<Vec<f64>> {
    check_shape("covariance", covariance, dim)?;
    if !dim.is_power_of_two() {
        return Err(TransformError::NotPowerOfTwo { order: dim });
    }
    let covariance = Psd::new("covariance", covariance, dim)?;
    let (_, mut vectors) = dense::eigen(covariance.mat.as_ref(), covariance.name)?;
    fix_signs(&mut vectors);
    let rotated = dense::product(vectors.as_ref(), dense::from_rows(&hadamard(dim)?, dim));
    let mut transform = vec![0.0; dim * dim];
    for rank in 0..dim {
        // Eigenvalues ascend: the i-th largest stands at d − 1 − i.
        let (from, row) = (dim - 1 - rank, bit_reversed(rank, dim));
        for (col, x) in transform[row * dim..][..dim].iter_mut().enumerate() {
            *x = rotated[(col, from)];
        }
    }
    Ok(transform)
}

/// The log₂(dim) low bits of `i`, in reverse order.
fn bit_reversed(i: usize, dim: usize) -> usize {
    match dim.trailing_zeros() {
        0 => 0,
        bits => i.reverse_bits() >> (usize::BITS - bits),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A diagonal C with falling entries: U swaps nothing but the order, so T can be written down.
    #[test]
    fn a_small_case_by_hand() {
        // Ascending eigenvalues 1, 2, 3, 4 stand for e3, e2, e1, e0; R's columns before P are ℋ's combinations of them.
        let covariance: Vec<f64> = (0..16).map(|at| if at % 5 == 0 { 4.0 - (at / 5) as f64 } else { 0.0 }).collect();
        let t = oscar_rotation(&covariance, 4).expect("a power of two");
        // Columns of U ℋ / ½: with U = [e3 e2 e1 e0], column j is Σ_i H_ij e_{3-i}.
        let columns = [[1.0, 1.0, 1.0, 1.0], [-1.0, 1.0, -1.0, 1.0], [-1.0, -1.0, 1.0, 1.0], [1.0, -1.0, -1.0, 1.0]];
        // Largest first: columns 3, 2, 1, 0 go to rows bitrev(0, 1, 2, 3) = 0, 2, 1, 3.
        let expected = [columns[3], columns[1], columns[2], columns[0]].concat();
        for (x, y) in t.iter().zip(expected) {
            assert!((x - 0.5 * y).abs() <= 4.0 * f64::EPSILON, "{t:?}");
        }
    }

    #[test]
    fn it_is_orthogonal_and_needs_a_power_of_two() {
        for dim in [1_usize, 2, 8, 64] {
            let covariance: Vec<f64> =
                (0..dim * dim).map(|at| ((at / dim).abs_diff(at % dim) as f64 * -0.3).exp()).collect();
            for covariance in [covariance, vec![0.0; dim * dim]] {
                let t = oscar_rotation(&covariance, dim).expect("a power of two");
                for (i, j) in (0..dim).flat_map(|i| (0..dim).map(move |j| (i, j))) {
                    let dot: f64 = (0..dim).map(|k| t[i * dim + k] * t[j * dim + k]).sum();
                    let unit = f64::from(u8::from(i == j));
                    assert!((dot - unit).abs() <= 16.0 * dim as f64 * f64::EPSILON, "dim {dim} [{i}, {j}]: {dot}");
                }
            }
        }
        assert!(matches!(oscar_rotation(&[1.0; 9], 3), Err(TransformError::NotPowerOfTwo { order: 3 })));
    }
}
