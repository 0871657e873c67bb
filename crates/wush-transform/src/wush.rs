//! Equation 1. Enters: a Gram matrix, a Hessian, a damping ratio. Leaves: T, its inverse, and what the solver found and
//! altered. Knows nothing of keys, values or models.

use faer::{Mat, MatRef};

use crate::dense::{self, from_rows, product, scale_columns, symmetrized, to_rows};
use crate::measures::{HeadMeasures, measure_pair};
use crate::pair::{Pair, check_damping, noise_rel_tol, saturated_ratio};
use crate::{HeadProblem, Result, Role, Settings, TransformError};

/// γ of the paper.
pub const PUBLISHED_DAMPING: f64 = 0.01;
/// Exponent of Λ in Eq. 1.
pub const PUBLISHED_EXPONENT: f64 = 0.25;

/// Entries of an eigenvector within this fraction of its largest magnitude count as tied for it; the first of them
/// decides the sign. Rounding of the decomposition moves an entry by about d·ε ≤ 2^-40 for d ≤ 2^12; 2^-36 is clear
/// of that, so the sign of a vector such as (1, −1)/√2 does not hang on the last bit.
const TIE_REL_TOL: f64 = 1.0 / (1u64 << 36) as f64;

/// A transform, its inverse and the report on it.
#[derive(Debug, Clone, PartialEq)]
pub struct Solution {
    /// T, row-major `[d, d]`, column convention: the cache holds `T x`.
    pub transform: Vec<f64>,
    /// T^{-1}, row-major `[d, d]`.
    pub inverse: Vec<f64>,
    /// The scalar c of Eq. 1; 1 for transforms without it.
    pub c: f64,
    /// Λ of Eq. 1, ascending; empty for transforms without it. Scales as tr(M) tr(H), and over- or underflows where that does.
    pub eigenvalues: Vec<f64>,
    /// What the solver found and altered.
    pub info: SolveInfo,
}

/// What a solver found and altered.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SolveInfo {
    /// γ as applied to both matrices; 0 for transforms without damping.
    pub damping_used: f64,
    /// The Gram matrix was all zero and the identity stood in for it.
    pub zero_gram: bool,
    /// The Hessian was all zero and the identity stood in for it.
    pub zero_hessian: bool,
    /// λ_max / λ_min of Λ, saturated at 1/ε; 1 for transforms without it.
    pub cond_product: f64,
    /// The measures; none when there were no statistics to measure on.
    pub measures: Option<HeadMeasures>,
}

/// Eq. 1: the WUSH transform of a Gram matrix and a Hessian.
///
/// ```text
/// L Lᵀ = H + γ d⁻¹ tr(H) I          U Λ Uᵀ = Lᵀ (M + γ d⁻¹ tr(M) I) L
/// c = (1 + γ)^½ tr(M)^½ tr(Λ^½)^-½   T = c ℋ Λ^-¼ Uᵀ Lᵀ          T⁻¹ = c⁻¹ L^-T U Λ^¼ ℋᵀ
/// ```
///
/// | symbol | argument or field | meaning, shape |
/// |---|---|---|
/// | M | `gram` | Gram matrix of what is quantized, `[d, d]`, symmetric positive semidefinite |
/// | H | `hessian` | Hessian of the loss, `[d, d]`, symmetric positive semidefinite |
/// | γ | `damping` | ratio to the mean eigenvalue, at least 0; 0.01 in the paper |
/// | ℋ | | normalized Hadamard matrix of order d ([`hadamard()`](crate::hadamard())) |
/// | Λ, U | `eigenvalues` | ascending; each eigenvector's largest entry is positive (of tied ones, the first) |
/// | c | `c` | makes ‖T X‖_F = ‖X‖_F at γ = 0 |
///
/// The paper leaves order and signs of U open; T depends on them, TᵀT does not. The result does not change when M or H
/// is rescaled, and for powers of 16 not in a single bit.
///
/// Degenerate input. γ > 0 makes every nonzero matrix definite: rank-deficient matrices and dead channels are solved.
/// An all-zero matrix (a head that is never read, values that are always 0) says nothing about directions; the
/// identity stands in for it, which is the limit of Wush(ρI) as ρ → 0, and [`SolveInfo`] says so. With both
/// all zero T = ℋ. At γ = 0 singular input, zero included, is an error.
///
/// # Errors
/// `Dimension`, `Shape`, `Damping`, `NonFinite`, `Asymmetric`, `Indefinite`, `Singular`, `UnsupportedOrder`,
/// `NoConvergence`. The caller adds layer and head.
pub fn wush(gram: &[f64], hessian: &[f64], dim: usize, damping: f64) -> Result<Solution> {
    let settings = Settings { damping, ..Settings::published(0, 0, Role::Key) };
    wush_with(&HeadProblem::new(gram, hessian, dim), &settings)
}

/// The family that Eq. 1 is a member of: another exponent p of Λ, and another orthogonal matrix R in place of ℋ.
///
/// ```text
/// T = c R Λ^-p Uᵀ Lᵀ     T⁻¹ = c⁻¹ L^-T U Λ^p Rᵀ     c = (1 + γ)^½ tr(M)^½ tr(Λ^{1−2p})^-½
/// ```
///
/// p = ¼ and R = ℋ are Eq. 1, to the bit. c keeps ‖T X‖_F at every p. What is cached has the covariance
/// c² R Λ^{1−2p} Rᵀ and errors in it cost c⁻² R Λ^{2p} Rᵀ: p shifts the spread of Λ from the one to the other. At p = ½ the
/// cache is white, and only an encoder with error feedback knows which errors count; at p = 0 all errors count alike.
/// TᵀT is the weighted geometric mean of H and M⁻¹ (weights 1 − 2p and 2p), up to its scale. Eq. 21's balance is exact at
/// p = ¼ for the Hadamard and the balanced factor.
///
/// # Errors
/// Those of [`wush`], and `Exponent`.
pub fn wush_with(problem: &HeadProblem<'_>, settings: &Settings) -> Result<Solution> {
    let (damping, exponent) = (settings.damping, settings.exponent);
    check_damping(damping)?;
    if !(0.0..=0.5).contains(&exponent) {
        return Err(TransformError::Exponent { value: exponent });
    }
    let pair = Pair::new(problem.gram, problem.hessian, problem.dim)?;
    pair.gram.check_definite(damping)?;
    pair.hessian.check_definite(damping)?;
    let factors = Factors::new(&pair, damping, exponent)?;
    let variances: Vec<f64> = factors.values.iter().map(|&x| power(x, 1.0 - 2.0 * exponent)).collect();
    let rotation = settings.factor.build(&variances, settings.stream())?;
    let (transform, inverse) = factors.assemble(from_rows(&rotation, problem.dim));
    let measures = measure_pair(&pair, damping, transform.as_ref(), inverse.as_ref())?;
    Ok(Solution {
        transform: to_rows(transform.as_ref()),
        inverse: to_rows(inverse.as_ref()),
        c: factors.unscaled_c(&pair),
        eigenvalues: factors.unscaled_values(&pair),
        info: SolveInfo {
            damping_used: damping,
            zero_gram: pair.gram.is_zero,
            zero_hessian: pair.hessian.is_zero,
            cond_product: saturated_ratio(factors.values[problem.dim - 1], factors.values[0]),
            measures: Some(measures),
        },
    })
}

/// x^p. The published powers are roots, which are exact where they can be.
fn power(x: f64, p: f64) -> f64 {
    if p == 0.25 {
        x.sqrt().sqrt()
    } else if p == 0.5 {
        x.sqrt()
    } else {
        libm::pow(x, p)
    }
}

/// L, U, Λ and c of the scaled pair.
struct Factors {
    lower: Mat<f64>,
    vectors: Mat<f64>,
    values: Vec<f64>,
    exponent: f64,
    c: f64,
}

impl Factors {
    fn new(pair: &Pair, damping: f64, exponent: f64) -> Result<Self> {
        let lower = dense::cholesky(pair.hessian.damped(damping).as_ref()).ok_or_else(|| TransformError::Singular {
            matrix: pair.hessian.name,
            damping,
            rank: pair.hessian.rank(),
            dim: pair.dim,
            condition: pair.hessian.condition(damping),
        })?;
        let inner = product(lower.transpose(), product(pair.gram.damped(damping).as_ref(), lower.as_ref()).as_ref());
        let (values, mut vectors) = dense::eigen(symmetrized(inner.as_ref()).as_ref(), "damped product")?;
        check_product(&values, damping)?;
        fix_signs(&mut vectors);
        let sum_of_powers: f64 = values.iter().map(|&x| power(x, 1.0 - 2.0 * exponent)).sum();
        let c = ((1.0 + damping) * pair.gram.trace() / sum_of_powers).sqrt();
        Ok(Self { lower, vectors, values, exponent, c })
    }

    /// c scales as M's scale to the p, times H's to the p − ½: at p = ¼ by powers of 2, exact.
    fn unscaled_c(&self, pair: &Pair) -> f64 {
        let log16 = self.exponent * f64::from(pair.gram.log16) + (self.exponent - 0.5) * f64::from(pair.hessian.log16);
        self.c * libm::exp2(4.0 * log16)
    }

    /// Λ scales as the product of both scales: a power of 2, exact.
    fn unscaled_values(&self, pair: &Pair) -> Vec<f64> {
        let log2 = 4 * (pair.gram.log16 + pair.hessian.log16);
        self.values.iter().map(|x| libm::scalbn(*x, log2)).collect()
    }

    /// T and T^{-1} with R = `rotation`.
    fn assemble(&self, rotation: MatRef<'_, f64>) -> (Mat<f64>, Mat<f64>) {
        let root = |j: usize| power(self.values[j], self.exponent);
        let mut transposed = product(self.lower.as_ref(), self.vectors.as_ref());
        scale_columns(&mut transposed, |j| self.c / root(j));
        let mut scaled = self.vectors.clone();
        scale_columns(&mut scaled, |j| root(j) / self.c);
        let inverse = dense::solve_transposed(&self.lower, scaled);
        (product(rotation, transposed.transpose()), product(inverse.as_ref(), rotation.transpose()))
    }
}

/// Both damped matrices can be definite and their product still beyond f64.
fn check_product(values: &[f64], damping: f64) -> Result<()> {
    let (dim, largest) = (values.len(), values[values.len() - 1]);
    let floor = noise_rel_tol(dim) * largest;
    if values[0] > floor {
        return Ok(());
    }
    let rank = values.iter().filter(|&&x| x > floor).count();
    let condition = saturated_ratio(largest, values[0]);
    Err(TransformError::Singular { matrix: "product of Gram matrix and Hessian", damping, rank, dim, condition })
}

/// Makes the largest entry of every column positive; of entries tied within [`TIE_REL_TOL`], the first.
pub(crate) fn fix_signs(vectors: &mut Mat<f64>) {
    for j in 0..vectors.ncols() {
        let largest = vectors.col(j).iter().fold(0.0_f64, |max, x| max.max(x.abs()));
        let decides = vectors.col(j).iter().find(|x| x.abs() >= largest * (1.0 - TIE_REL_TOL)).copied();
        if decides.is_some_and(|x| x < 0.0) {
            vectors.col_mut(j).iter_mut().for_each(|x| *x = -*x);
        }
    }
}
