//! T^{-1} of a transform, in f64, with the condition number that decides whether it may be used.

use faer::dyn_stack::{MemBuffer, MemStack};
use faer::linalg::lu::partial_pivoting::{factor, inverse};
use faer::{Mat, Par};

use crate::dense::view;

/// Largest 1-norm condition number of a transform that is folded, 0.01 / (d·eps) (3.5e11 at d = 128).
///
/// Forming `W_O T^{-1}` and `T W_V` in f64 leaves `W_O (T^{-1} T) W_V` off by at most about d·eps·cond, relatively. Up
/// to this limit that is at most one percent, and what it really is goes into the report (see
/// [`crate::HeadError::inverse_error`]); beyond it T cannot be told from a singular matrix in any useful sense.
pub fn condition_limit(head_dim: usize) -> f64 {
    0.01 / (head_dim.max(1) as f64 * f64::EPSILON)
}

/// T^{-1} and what is known about it.
#[derive(Debug, Clone)]
pub struct Inverse {
    /// Row-major `[dim, dim]`.
    pub matrix: Vec<f64>,
    /// ‖T‖₁ ‖T^{-1}‖₁; infinite when a pivot is zero.
    pub condition: f64,
}

/// Inverts a row-major `[dim, dim]` matrix by LU with partial pivoting. A singular one gives an infinite condition and a
/// meaningless matrix: the caller compares with [`condition_limit`] (in a form that NaN fails).
pub fn invert(transform: &[f64], dim: usize) -> Inverse {
    let mut factors = view(transform, dim, dim).to_owned();
    let (mut forward, mut backward) = (vec![0_usize; dim], vec![0_usize; dim]);
    let mut memory = MemBuffer::new(
        factor::lu_in_place_scratch::<usize, f64>(dim, dim, Par::Seq, Default::default())
            .or(inverse::inverse_scratch::<usize, f64>(dim, Par::Seq)),
    );
    let stack = MemStack::new(&mut memory);
    let (_, permutation) =
        factor::lu_in_place(factors.as_mut(), &mut forward, &mut backward, Par::Seq, stack, Default::default());
    let singular = (0..dim).any(|i| factors[(i, i)] == 0.0);
    let mut out = Mat::<f64>::zeros(dim, dim);
    if !singular {
        inverse::inverse(out.as_mut(), factors.as_ref(), factors.as_ref(), permutation, Par::Seq, stack);
    }
    let matrix: Vec<f64> = (0..dim * dim).map(|i| out[(i / dim, i % dim)]).collect();
    let condition = if singular { f64::INFINITY } else { norm_1(transform, dim) * norm_1(&matrix, dim) };
    Inverse { matrix, condition }
}

/// Largest absolute column sum.
fn norm_1(matrix: &[f64], dim: usize) -> f64 {
    let sum = |col: usize| matrix.iter().skip(col).step_by(dim).map(|x| x.abs()).sum::<f64>();
    // A NaN must not disappear in a maximum.
    (0..dim).map(sum).fold(0.0, |a, b| if a.is_nan() || b.is_nan() { f64::NAN } else { f64::max(a, b) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inverse_of_a_permuted_triangle_is_exact() {
        // [[0, 2, 0], [1, 0, 0], [4, 0, 8]]
        let found = invert(&[0.0, 2.0, 0.0, 1.0, 0.0, 0.0, 4.0, 0.0, 8.0], 3);
        assert_eq!(found.matrix, [0.0, 1.0, 0.0, 0.5, 0.0, 0.0, 0.0, -0.5, 0.125]);
        assert_eq!(found.condition, 8.0 * 1.5);
    }

    #[test]
    fn singular_matrices_are_seen() {
        assert_eq!(invert(&[1.0, 2.0, 2.0, 4.0], 2).condition, f64::INFINITY);
        assert_eq!(invert(&[0.0; 9], 3).condition, f64::INFINITY);
        let usable = |matrix: &[f64]| invert(matrix, 2).condition <= condition_limit(2);
        let third = 1.0 / 3.0;
        assert!(usable(&[third, 1.0, third + 1e-3, 1.0]));
        assert!(!usable(&[third, 1.0, third + 1e-15, 1.0]));
        assert!(!usable(&[1.0, f64::NAN, 0.0, 1.0]));
    }
}
