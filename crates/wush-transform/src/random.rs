//! Haar-distributed orthogonal matrices from a seed, with the same bytes on every platform: a ChaCha stream, normals by
//! Marsaglia's polar method with a software logarithm, and an orthogonalization in plain, fixed-order arithmetic.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// A row-major `[dim, dim]` orthogonal matrix, Haar-distributed over seeds.
///
/// It is the orthogonal factor of a Gaussian matrix whose triangular factor has a positive diagonal, which is what
/// Gram-Schmidt gives. Each row is orthogonalized twice against its predecessors: twice is enough for ‖QQᵀ − I‖ ~ d·ε.
pub(crate) fn haar_orthogonal(dim: usize, seed: [u8; 32]) -> Vec<f64> {
    let mut normals = Normals::new(seed);
    let mut rows = vec![0.0; dim * dim];
    // The same matrix transposed, so that both passes below run along contiguous memory.
    let mut cols = vec![0.0; dim * dim];
    let mut row = vec![0.0; dim];
    for i in 0..dim {
        row.iter_mut().for_each(|x| *x = normals.next());
        for _ in 0..2 {
            orthogonalize(&mut row, &rows[..i * dim], &cols, i);
        }
        // A Gaussian row lies in the span of fewer than d others with probability 0: the norm is positive.
        let norm = row.iter().map(|x| x * x).sum::<f64>().sqrt();
        for (k, x) in row.iter().enumerate() {
            rows[i * dim + k] = x / norm;
            cols[k * dim + i] = x / norm;
        }
    }
    rows
}

/// Subtracts the projection onto the `n` rows found so far.
fn orthogonalize(row: &mut [f64], rows: &[f64], cols: &[f64], n: usize) {
    let dim = row.len();
    let mut coefficients = vec![0.0; n];
    for (x, col) in row.iter().zip(cols.chunks_exact(dim)) {
        coefficients.iter_mut().zip(&col[..n]).for_each(|(c, q)| *c += x * q);
    }
    for (c, q) in coefficients.iter().zip(rows.chunks_exact(dim)) {
        row.iter_mut().zip(q).for_each(|(x, q)| *x -= c * q);
    }
}

/// Standard normals.
struct Normals {
    rng: ChaCha8Rng,
    spare: Option<f64>,
}

impl Normals {
    fn new(seed: [u8; 32]) -> Self {
        Self { rng: ChaCha8Rng::from_seed(seed), spare: None }
    }

    fn next(&mut self) -> f64 {
        if let Some(x) = self.spare.take() {
            return x;
        }
        loop {
            let (u, v) = (self.symmetric_uniform(), self.symmetric_uniform());
            let s = u * u + v * v;
            if s > 0.0 && s < 1.0 {
                let factor = (-2.0 * libm::log(s) / s).sqrt();
                self.spare = Some(v * factor);
                return u * factor;
            }
        }
    }

    /// Uniform on [−1, 1) in steps of 2^-52.
    fn symmetric_uniform(&mut self) -> f64 {
        (self.rng.next_u64() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// ‖QQᵀ − I‖_max of twice-orthogonalized rows stays within a small multiple of d·ε.
    fn orthogonality_tol(dim: usize) -> f64 {
        8.0 * dim as f64 * f64::EPSILON
    }

    #[test]
    fn rows_are_orthonormal() {
        for dim in [1, 2, 3, 7, 64, 80, 128] {
            let q = haar_orthogonal(dim, [7; 32]);
            for i in 0..dim {
                for j in 0..dim {
                    let dot: f64 = (0..dim).map(|k| q[i * dim + k] * q[j * dim + k]).sum();
                    let error = (dot - f64::from(u8::from(i == j))).abs();
                    assert!(error <= orthogonality_tol(dim), "dim {dim} [{i}, {j}]: {error:e}");
                }
            }
        }
    }

    /// Haar: every entry has mean 0 and variance 1/d, and the trace has mean 0 and variance 1.
    #[test]
    fn moments_are_haars() {
        const N: usize = 2000;
        const DIM: usize = 5;
        let (mut first, mut square, mut trace, mut trace_square) = (0.0, 0.0, 0.0, 0.0);
        for i in 0..N {
            let mut seed = [0; 32];
            seed[..8].copy_from_slice(&(i as u64).to_le_bytes());
            let q = haar_orthogonal(DIM, seed);
            first += q[0] / N as f64;
            square += q[0] * q[0] / N as f64;
            let t: f64 = (0..DIM).map(|k| q[k * DIM + k]).sum();
            trace += t / N as f64;
            trace_square += t * t / N as f64;
        }
        // Five standard errors of each mean: 5 sqrt(var / N), with the variances of the four quantities at most 3.
        let tol = 5.0 * (3.0 / N as f64).sqrt();
        assert!(first.abs() <= tol * 0.3 && (square - 0.2).abs() <= tol * 0.3, "{first} {square}");
        assert!(trace.abs() <= tol && (trace_square - 1.0).abs() <= tol, "{trace} {trace_square}");
    }

    #[test]
    fn the_stream_is_pinned() {
        let q = haar_orthogonal(2, [0; 32]);
        assert_eq!(q, haar_orthogonal(2, [0; 32]));
        assert_ne!(q, haar_orthogonal(2, [1; 32]));
    }
}
