//! The last, orthogonal factor of T: it spreads what one coordinate of the diagonalized pair holds over all of them. One
//! const slice, one entry each. Enters: the spectrum that the factor meets, and a random stream. Leaves: an orthogonal
//! matrix, row-major.

use crate::hadamard::hadamard;
use crate::random::haar_orthogonal;
use crate::{Result, TransformError};

/// One entry of the registry.
#[derive(Clone, Copy)]
pub struct Factor {
    /// Name on the command line and in files.
    pub name: &'static str,
    /// One line for help and docs.
    pub doc: &'static str,
    construct: fn(&[f64], [u8; 32]) -> Result<Vec<f64>>,
}

/// Every factor; the first is the paper's.
pub const FACTORS: &[Factor] = &[
    Factor {
        name: "hadamard",
        doc: "The normalized Hadamard matrix, as in Eq. 1.",
        construct: |spectrum, _| hadamard(spectrum.len()),
    },
    Factor {
        name: "random",
        doc: "A random orthogonal matrix per layer, head and role (Haar), from --seed.",
        construct: |spectrum, stream| Ok(haar_orthogonal(spectrum.len(), stream)),
    },
    Factor {
        name: "balanced",
        doc: "The same, then rotated until every coordinate of the cache has the same variance.",
        construct: |spectrum, stream| Ok(balanced(haar_orthogonal(spectrum.len(), stream), spectrum)),
    },
];

impl std::fmt::Debug for Factor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Factor").field("name", &self.name).finish_non_exhaustive()
    }
}

impl PartialEq for Factor {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Factor {
    /// The paper's: the Hadamard matrix.
    pub const PUBLISHED: &'static Self = &FACTORS[0];

    /// The registry's entry of this name.
    ///
    /// # Errors
    /// `UnknownFactor`, listing the known ones.
    pub fn find(name: &str) -> Result<&'static Self> {
        FACTORS.iter().find(|factor| factor.name == name).ok_or_else(|| TransformError::UnknownFactor {
            name: name.to_owned(),
            known: FACTORS.iter().map(|factor| factor.name).collect::<Vec<_>>().join(", "),
        })
    }

    /// The orthogonal matrix R, row-major `[d, d]`, for coordinates of variances `spectrum` `[d]`.
    pub(crate) fn build(&self, spectrum: &[f64], stream: [u8; 32]) -> Result<Vec<f64>> {
        (self.construct)(spectrum, stream)
    }
}

/// Rotates the rows of an orthogonal R until diag(R S Rᵀ) is constant, S = diag(`spectrum`), in d − 1 Givens rotations
/// (Bendel and Mickey): each takes the coordinates of least and greatest variance and turns them until the first has the
/// mean. Later rotations leave it alone, so the last coordinate has the mean too, up to rounding.
fn balanced(mut rotation: Vec<f64>, spectrum: &[f64]) -> Vec<f64> {
    let dim = spectrum.len();
    let mean = spectrum.iter().sum::<f64>() / dim as f64;
    let mut covariance = conjugated(&rotation, spectrum);
    let mut left: Vec<usize> = (0..dim).collect();
    while left.len() > 1 {
        let variance = |&at: &usize| covariance[at * dim + at];
        let by_variance = |a: &usize, b: &usize| variance(a).total_cmp(&variance(b)).then(a.cmp(b));
        let (Some(&least), Some(&most)) =
            (left.iter().min_by(|a, b| by_variance(a, b)), left.iter().max_by(|a, b| by_variance(a, b)))
        else {
            break;
        };
        let (low, high) = (variance(&least) - mean, variance(&most) - mean);
        // Rounding alone can leave all on one side.
        if low < 0.0 && high > 0.0 {
            let (cosine, sine) = turn(low, high, covariance[least * dim + most]);
            rotate_rows(&mut rotation, dim, [least, most], cosine, sine);
            rotate_rows(&mut covariance, dim, [least, most], cosine, sine);
            rotate_columns(&mut covariance, dim, [least, most], cosine, sine);
        }
        left.retain(|&at| at != least);
    }
    rotation
}

/// Cosine c and sine s with c² low + s² high − 2 c s cross = 0, for low < 0 < high: of the two angles the smaller.
fn turn(low: f64, high: f64, cross: f64) -> (f64, f64) {
    let root = (cross * cross - low * high).sqrt();
    let tangent = if cross >= 0.0 { low / (cross + root) } else { low / (cross - root) };
    let cosine = (1.0 + tangent * tangent).sqrt().recip();
    (cosine, cosine * tangent)
}

/// R diag(s) Rᵀ.
fn conjugated(rotation: &[f64], spectrum: &[f64]) -> Vec<f64> {
    let dim = spectrum.len();
    let row = |i: usize| &rotation[i * dim..][..dim];
    let entry = |i: usize, j: usize| row(i).iter().zip(row(j)).zip(spectrum).map(|((x, y), s)| x * y * s).sum();
    (0..dim * dim).map(|at| entry(at / dim, at % dim)).collect()
}

/// Rows `(i, j)` become `(c i − s j, s i + c j)`.
fn rotate_rows(matrix: &mut [f64], dim: usize, [i, j]: [usize; 2], cosine: f64, sine: f64) {
    for col in 0..dim {
        let (x, y) = (matrix[i * dim + col], matrix[j * dim + col]);
        (matrix[i * dim + col], matrix[j * dim + col]) = (cosine * x - sine * y, sine * x + cosine * y);
    }
}

/// The same of columns.
fn rotate_columns(matrix: &mut [f64], dim: usize, [i, j]: [usize; 2], cosine: f64, sine: f64) {
    for row in matrix.chunks_exact_mut(dim) {
        let (x, y) = (row[i], row[j]);
        (row[i], row[j]) = (cosine * x - sine * y, sine * x + cosine * y);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// d rotations of an orthogonal matrix, each exact to a few ε.
    fn rounding(dim: usize) -> f64 {
        16.0 * dim as f64 * f64::EPSILON
    }

    #[test]
    fn every_factor_is_orthogonal() {
        for factor in FACTORS {
            for dim in [1, 2, 12, 64, 80] {
                let spectrum: Vec<f64> = (0..dim).map(|i| 10f64.powf(-6.0 * i as f64 / dim as f64)).collect();
                let r = factor.build(&spectrum, [3; 32]).expect("a supported order");
                for (at, x) in conjugated(&r, &vec![1.0; dim]).into_iter().enumerate() {
                    let unit = f64::from(u8::from(at / dim == at % dim));
                    assert!((x - unit).abs() <= rounding(dim), "{}, dim {dim} [{at}]: {x}", factor.name);
                }
            }
        }
    }

    #[test]
    fn balanced_gives_every_coordinate_the_mean_variance() {
        for dim in [1, 2, 3, 12, 64, 80] {
            // One strong direction, one dead one, and all between; and no difference at all.
            let steep: Vec<f64> =
                (0..dim).map(|i| if i == 1 { 0.0 } else { 10f64.powf(4.0 - 7.0 * i as f64 / dim as f64) }).collect();
            for spectrum in [steep, vec![2.0; dim], vec![0.0; dim]] {
                let r = balanced(haar_orthogonal(dim, [5; 32]), &spectrum);
                let (covariance, mean) = (conjugated(&r, &spectrum), spectrum.iter().sum::<f64>() / dim as f64);
                for i in 0..dim {
                    let off = (covariance[i * dim + i] - mean).abs();
                    assert!(
                        off <= dim as f64 * rounding(dim) * mean,
                        "dim {dim}, coordinate {i}: off by {off:e} of {mean}"
                    );
                }
            }
        }
    }

    #[test]
    fn unknown_factors_are_answered_with_the_list() {
        let message = Factor::find("dct").expect_err("unknown").to_string();
        assert!(message.contains("dct") && message.contains("hadamard, random, balanced"), "{message}");
        assert_eq!(Factor::find("hadamard").expect("known"), Factor::PUBLISHED);
    }
}
