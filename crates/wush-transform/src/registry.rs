//! The transforms that exist: one const slice, one entry each. Help texts, docs and tests are made from it; adding a
//! transform is one function and one entry.

use crate::dense::from_rows;
use crate::hadamard::hadamard;
use crate::measures::measure_pair;
use crate::oscar::oscar_rotation;
use crate::pair::{Pair, check_shape};
use crate::random::haar_orthogonal;
use crate::wush::{PUBLISHED_DAMPING, PUBLISHED_EXPONENT, Solution, SolveInfo, wush_with};
use crate::{Factor, Result, TransformError};

/// One entry of the registry.
#[derive(Clone, Copy)]
pub struct TransformKind {
    /// Name on the command line and in files.
    pub name: &'static str,
    /// One line for help and docs.
    pub doc: &'static str,
    /// Whether it is built from calibration statistics.
    pub needs_statistics: bool,
    /// What it needs of them beyond Gram matrices and Eq. 4's Hessians.
    pub needs: Needs,
    /// Whether T is orthogonal, whatever the statistics.
    pub is_orthogonal: bool,
    construct: fn(&HeadProblem<'_>, &Settings) -> Result<Solution>,
}

impl std::fmt::Debug for TransformKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TransformKind").field("name", &self.name).finish_non_exhaustive()
    }
}

/// What a transform needs of the statistics beyond Gram matrices and Eq. 4's Hessians.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Needs {
    /// Nothing.
    Nothing,
    /// The attention-aware Hessians of Appendix C in place of Eq. 4's.
    AttentionHessians,
    /// OSCAR's covariances, one for all KV heads of a layer.
    LayerCovariance,
    /// OSCAR's covariances, one a KV head.
    HeadCovariance,
}

/// Every transform.
pub const TRANSFORMS: &[TransformKind] = &[
    TransformKind {
        name: "identity",
        doc: "No transform: T = I.",
        needs_statistics: false,
        needs: Needs::Nothing,
        is_orthogonal: true,
        construct: |problem, _| orthogonal(problem, identity(problem.dim)),
    },
    TransformKind {
        name: "random",
        doc: "A random orthogonal matrix per layer, head and role (Haar), from --seed.",
        needs_statistics: false,
        needs: Needs::Nothing,
        is_orthogonal: true,
        construct: |problem, settings| orthogonal(problem, haar_orthogonal(problem.dim, settings.stream())),
    },
    TransformKind {
        name: "hadamard",
        doc: "The normalized Hadamard matrix of the head dimension.",
        needs_statistics: false,
        needs: Needs::Nothing,
        is_orthogonal: true,
        construct: |problem, _| orthogonal(problem, hadamard(problem.dim)?),
    },
    TransformKind {
        name: "oscar",
        doc: "OSCAR's rotation, one a layer: eigenvectors, Hadamard matrix, bit-reversed order.",
        needs_statistics: true,
        needs: Needs::LayerCovariance,
        is_orthogonal: true,
        construct: |problem, _| orthogonal(problem, oscar_rotation(problem.covariance, problem.dim)?),
    },
    TransformKind {
        name: "oscar-per-head",
        doc: "The same, one a KV head.",
        needs_statistics: true,
        needs: Needs::HeadCovariance,
        is_orthogonal: true,
        construct: |problem, _| orthogonal(problem, oscar_rotation(problem.covariance, problem.dim)?),
    },
    TransformKind {
        name: "wush",
        doc: "The WUSH transform of Eq. 1, from Gram matrix and Hessian.",
        needs_statistics: true,
        needs: Needs::Nothing,
        is_orthogonal: false,
        construct: wush_with,
    },
    TransformKind {
        name: "wush-a",
        doc: "The same with the exact, attention-aware Hessians of Appendix C.",
        needs_statistics: true,
        needs: Needs::AttentionHessians,
        is_orthogonal: false,
        construct: wush_with,
    },
];

/// What a head's transform is built from and measured on.
#[derive(Debug, Clone, Copy)]
pub struct HeadProblem<'a> {
    /// Gram matrix M, row-major `[dim, dim]`; empty where there are no statistics.
    pub gram: &'a [f64],
    /// Hessian H, row-major `[dim, dim]`; empty where there are no statistics.
    pub hessian: &'a [f64],
    /// What OSCAR's rotation diagonalizes, row-major `[dim, dim]`; empty for every other transform.
    pub covariance: &'a [f64],
    /// Head dimension d.
    pub dim: usize,
}

impl<'a> HeadProblem<'a> {
    /// Of statistics alone, both matrices row-major `[dim, dim]`, or both empty.
    pub const fn new(gram: &'a [f64], hessian: &'a [f64], dim: usize) -> Self {
        Self { gram, hessian, covariance: &[], dim }
    }

    fn has_statistics(&self) -> bool {
        !(self.gram.is_empty() && self.hessian.is_empty())
    }
}

/// Whether a transform acts on keys or on values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Keys, after RoPE.
    Key,
    /// Values.
    Value,
}

/// What a transform depends on besides the statistics.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    /// γ of Eq. 1.
    pub damping: f64,
    /// Exponent p of Λ, 0 to ½: ¼ in Eq. 1.
    pub exponent: f64,
    /// The last, orthogonal factor: the Hadamard matrix in Eq. 1.
    pub factor: &'static Factor,
    /// Seed of random matrices.
    pub seed: u64,
    /// Global layer id.
    pub layer: usize,
    /// KV head.
    pub head: usize,
    /// Keys or values.
    pub role: Role,
}

impl Settings {
    /// As published: γ = 0.01, p = ¼, the Hadamard factor; seed 0.
    pub fn published(layer: usize, head: usize, role: Role) -> Self {
        let (damping, exponent, factor) = (PUBLISHED_DAMPING, PUBLISHED_EXPONENT, Factor::PUBLISHED);
        Self { damping, exponent, factor, seed: 0, layer, head, role }
    }

    /// The random stream of this head: seed, layer, head and role as four little-endian u64.
    pub(crate) fn stream(&self) -> [u8; 32] {
        let role = match self.role {
            Role::Key => 0,
            Role::Value => 1,
        };
        let mut bytes = [0; 32];
        let words = [self.seed, self.layer as u64, self.head as u64, role];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}

/// The registry's entry of this name.
///
/// # Errors
/// `UnknownTransform`, listing the known ones.
pub fn find(name: &str) -> Result<&'static TransformKind> {
    TRANSFORMS.iter().find(|kind| kind.name == name).ok_or_else(|| TransformError::UnknownTransform {
        name: name.to_owned(),
        known: TRANSFORMS.iter().map(|kind| kind.name).collect::<Vec<_>>().join(", "),
    })
}

/// Builds one head's transform and measures it on the head's statistics, if there are any.
///
/// Sequential and deterministic: call it for many heads from as many threads as there are.
///
/// # Errors
/// `NeedsStatistics`, and those of the transform; the caller adds layer, head and role.
pub fn solve(kind: &TransformKind, problem: &HeadProblem<'_>, settings: &Settings) -> Result<Solution> {
    if kind.needs_statistics && !problem.has_statistics() {
        return Err(TransformError::NeedsStatistics { transform: kind.name });
    }
    let mut solution = (kind.construct)(problem, settings)?;
    if solution.info.measures.is_none() && problem.has_statistics() {
        let pair = Pair::new(problem.gram, problem.hessian, problem.dim)?;
        let (transform, inverse) =
            (from_rows(&solution.transform, problem.dim), from_rows(&solution.inverse, problem.dim));
        solution.info.measures = Some(measure_pair(&pair, settings.damping, transform, inverse)?);
        (solution.info.zero_gram, solution.info.zero_hessian) = (pair.gram.is_zero, pair.hessian.is_zero);
    }
    Ok(solution)
}

fn identity(dim: usize) -> Vec<f64> {
    let mut rows = vec![0.0; dim * dim];
    rows.iter_mut().step_by(dim + 1).for_each(|x| *x = 1.0);
    rows
}

/// An orthogonal transform: the inverse is the transpose, exactly.
fn orthogonal(problem: &HeadProblem<'_>, transform: Vec<f64>) -> Result<Solution> {
    let dim = problem.dim;
    check_shape("transform", &transform, dim)?;
    let inverse = (0..dim * dim).map(|at| transform[(at % dim) * dim + at / dim]).collect();
    let info =
        SolveInfo { damping_used: 0.0, zero_gram: false, zero_hessian: false, cond_product: 1.0, measures: None };
    Ok(Solution { transform, inverse, c: 1.0, eigenvalues: Vec::new(), info })
}
