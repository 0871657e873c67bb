//! Plain matrices in row-major vectors, one comparison helper, and random input: what the tests check the solver with, none
//! of it the solver's own.

#![allow(dead_code, clippy::allow_attributes, reason = "each test file uses its own part")]

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// `a b`, `[n, k]` by `[k, m]`.
pub fn product(a: &[f64], b: &[f64], k: usize) -> Vec<f64> {
    let (n, m) = (a.len() / k, b.len() / k);
    let mut out = vec![0.0; n * m];
    for i in 0..n {
        for l in 0..k {
            for j in 0..m {
                out[i * m + j] += a[i * k + l] * b[l * m + j];
            }
        }
    }
    out
}

/// `aᵀ` of `[n, m]`.
pub fn transposed(a: &[f64], m: usize) -> Vec<f64> {
    let n = a.len() / m;
    (0..n * m).map(|at| a[(at % n) * m + at / n]).collect()
}

pub fn trace(a: &[f64], dim: usize) -> f64 {
    a.iter().step_by(dim + 1).sum()
}

pub fn identity(dim: usize) -> Vec<f64> {
    (0..dim * dim).map(|at| f64::from(u8::from(at % (dim + 1) == 0))).collect()
}

/// A + γ tr(A)/d I.
pub fn damped(a: &[f64], dim: usize, damping: f64) -> Vec<f64> {
    let shift = damping * trace(a, dim) / dim as f64;
    a.iter().enumerate().map(|(at, x)| if at % (dim + 1) == 0 { x + shift } else { *x }).collect()
}

/// Gauss-Jordan with row pivoting.
pub fn inverse(a: &[f64], dim: usize) -> Vec<f64> {
    let unit = identity(dim);
    let mut rows: Vec<Vec<f64>> = (0..dim).map(|i| [&a[i * dim..][..dim], &unit[i * dim..][..dim]].concat()).collect();
    for col in 0..dim {
        let pivot =
            (col..dim).max_by(|&i, &j| rows[i][col].abs().total_cmp(&rows[j][col].abs())).expect("rows are left");
        rows.swap(col, pivot);
        let head = rows[col][col];
        rows[col].iter_mut().for_each(|x| *x /= head);
        let reduced = rows[col].clone();
        for row in rows.iter_mut().enumerate().filter(|(i, _)| *i != col).map(|(_, row)| row) {
            let factor = row[col];
            row.iter_mut().zip(&reduced).for_each(|(x, y)| *x -= factor * y);
        }
    }
    rows.iter().flat_map(|row| row[dim..].to_vec()).collect()
}

pub fn frobenius(a: &[f64]) -> f64 {
    a.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// Fails unless ‖found − expected‖_F ≤ tol ‖expected‖_F; says where they differ most.
pub fn assert_close(what: &str, found: &[f64], expected: &[f64], tol: f64) {
    assert_eq!(found.len(), expected.len(), "{what}: length");
    assert!(found.iter().chain(expected).all(|x| x.is_finite()), "{what}: not finite");
    let difference: Vec<f64> = found.iter().zip(expected).map(|(x, y)| x - y).collect();
    let error = frobenius(&difference) / frobenius(expected).max(f64::MIN_POSITIVE);
    let worst = (0..difference.len()).max_by(|&i, &j| difference[i].abs().total_cmp(&difference[j].abs()));
    let worst = worst.map(|at| (at, found[at], expected[at]));
    assert!(
        error <= tol,
        "{what}: relative error {error:.3e}, tolerance {tol:.1e}; worst (index, found, expected) {worst:?}"
    );
}

/// A seeded source of numbers.
pub struct Source(ChaCha8Rng);

impl Source {
    pub fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    /// Uniform on [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform on [−1, 1).
    pub fn symmetric(&mut self) -> f64 {
        2.0 * self.unit() - 1.0
    }

    pub fn matrix(&mut self, rows: usize, cols: usize) -> Vec<f64> {
        (0..rows * cols).map(|_| self.symmetric()).collect()
    }

    /// `B Bᵀ` with B `[dim, rank]`.
    pub fn low_rank(&mut self, dim: usize, rank: usize) -> Vec<f64> {
        let b = self.matrix(dim, rank);
        product(&b, &transposed(&b, rank), rank)
    }

    /// `diag(a) + B Bᵀ`, a log-uniform over `decades` decades below 1.
    pub fn spd(&mut self, dim: usize, decades: f64) -> Vec<f64> {
        let mut a = self.low_rank(dim, (dim / 8).max(1));
        for i in 0..dim {
            a[i * dim + i] += 10.0_f64.powf(-decades * self.unit());
        }
        a
    }
}

/// Relative error that d-dimensional products and decompositions of matrices with condition number `cond` may show:
/// d·ε·cond, with a factor of 16 for the number of steps.
pub fn rounding(dim: usize, cond: f64) -> f64 {
    16.0 * dim as f64 * f64::EPSILON * cond
}
