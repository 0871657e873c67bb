//! Value transforms against the base's output projections. The Hessian of the values is of the weights alone (Eq. 4), so with a
//! base at hand all that follows from it and from T can be computed again: what is left to a false claim is another Gram matrix M.

use faer::linalg::matmul::matmul;
use faer::linalg::triangular_solve::solve_lower_triangular_in_place;
use faer::{Accum, Mat, Par, Side};
use wush_fold::{HeadWeights, invert};
use wush_format::manifest::HeadReport;
use wush_transform::{Factor, HeadMeasures, HeadProblem, Needs, find, hadamard, measure, sensitivity};

use crate::metric::other_feedback;
use crate::number::shown;
use crate::solver::{Precision, REL_TOL, Record};

/// What the solver's own arithmetic, and sums in another order, leave relatively: 2^-40, above d·ε for d ≤ 2^12.
pub(crate) const ARITHMETIC: f64 = 1.0 / (1u64 << 40) as f64;

/// What is stored of one value head, widened, row-major `[d, d]`.
pub(crate) struct ValueHead<'a> {
    /// T.
    pub(crate) matrix: &'a [f64],
    /// L, where there is feedback.
    pub(crate) lower: Option<&'a [f64]>,
}

/// The first thing that the record says of one value head and that cannot be with the base's weights; none where it says
/// nothing.
pub(crate) fn contradiction(
    base: &HeadWeights,
    ValueHead { matrix, lower }: ValueHead<'_>,
    record: &Record<'_>,
    precision: Precision,
) -> Option<String> {
    let kind = find(&record.solve.transform).ok()?;
    // Exact Hessians are of the text, too.
    if kind.needs == Needs::AttentionHessians {
        return None;
    }
    let layer = record.layers.iter().find(|layer| layer.layer == base.layer)?;
    let stated = layer.value.get(base.head)?;
    let dim = base.value.nrows();
    if matrix.len() != dim * dim {
        return Some("not of the base's dimension".to_owned());
    }
    let hessian = hessian(base);
    let (found, inverse) = match measured(matrix, &hessian, dim, record.solve.damping) {
        Ok(found) => found,
        Err(error) => return Some(error.to_string()),
    };
    let tol = REL_TOL + 2.0 * dim as f64 * precision.roundoff() * found.cond_transform;
    let head = Head { matrix, inverse: &inverse, hessian: &hessian, dim, damping: record.solve.damping };
    let feedback = || other_feedback(&head, lower?, stated, precision);
    let problem = other_figure(&found, stated, &hessian, tol).or_else(feedback);
    if kind.is_orthogonal {
        return problem;
    }
    let gain = || {
        let (stated, expected) = (shown(stated.predicted_gain), shown(other_gain(&head, stated, tol)?));
        Some(format!("predicted_gain {stated}, the transform and the base's output projection give {expected}"))
    };
    let problem = problem.or_else(gain);
    // Another orthogonal factor depends on the Gram matrix or the seed: with R unknown, any T is a solution for some M.
    let is_hadamard = record.solve.factor == Factor::PUBLISHED.name;
    problem.or_else(|| is_hadamard.then(|| other_solution(&head, precision)).flatten())
}

/// H = 2 Σ_g W_O(h,g) W_O(h,g)ᵀ, row-major `[d, d]`.
fn hessian(base: &HeadWeights) -> Vec<f64> {
    let dim = base.value.nrows();
    let mut sum = Mat::<f64>::zeros(dim, dim);
    for output in &base.outputs {
        matmul(sum.as_mut(), Accum::Add, output.transpose(), output.as_ref(), 2.0, Par::Seq);
    }
    // A product of two equal factors is symmetric only up to rounding.
    (0..dim * dim).map(|at| sum[((at / dim).max(at % dim), (at / dim).min(at % dim))]).collect()
}

/// The figures that need no Gram matrix (the identity stands in for it), and T⁻¹.
fn measured(
    matrix: &[f64],
    hessian: &[f64],
    dim: usize,
    damping: f64,
) -> wush_transform::Result<(HeadMeasures, Vec<f64>)> {
    let identity: Vec<f64> = (0..dim * dim).map(|at| if at / dim == at % dim { 1.0 } else { 0.0 }).collect();
    let inverse = invert(matrix, dim).matrix;
    let found = measure(matrix, &inverse, &HeadProblem::new(&identity, hessian, dim), damping)?;
    Ok((found, inverse))
}

/// Figures of H, and of H with T. A relative rounding u of T moves each (T⁻ᵀHT⁻¹)_ii by at most 2·d·u·cond(T), relatively to
/// their mean: `tol`.
fn other_figure(found: &HeadMeasures, stated: &HeadReport, hessian: &[f64], tol: f64) -> Option<String> {
    let dim = hessian.len().isqrt();
    let n_zero = hessian.iter().step_by(dim + 1).filter(|&&x| x == 0.0).count();
    let condition_tol = REL_TOL + dim as f64 * f64::EPSILON * found.cond_hessian;
    let close = |a: f64, b: f64, by: f64| (a - b).abs() <= by;
    let figures = [
        (
            "cond_hessian",
            stated.cond_hessian,
            found.cond_hessian,
            close(stated.cond_hessian, found.cond_hessian, condition_tol * found.cond_hessian),
        ),
        (
            "rank_hessian",
            stated.rank_hessian as f64,
            found.rank_hessian as f64,
            stated.rank_hessian == found.rank_hessian,
        ),
        ("dead_channels", stated.dead_channels as f64, n_zero as f64, stated.dead_channels <= n_zero),
        (
            "imbalance",
            stated.imbalance,
            found.imbalance,
            close(stated.imbalance, found.imbalance, tol * (1.0 + found.imbalance)),
        ),
    ];
    let (name, stated, found, _) = figures.into_iter().find(|&(.., ok)| !ok)?;
    Some(format!("{name} {}, the base's output projection gives {}", shown(stated), shown(found)))
}

/// A transform and the Hessian that it was solved for, row-major `[d, d]`.
pub(crate) struct Head<'a> {
    pub(crate) matrix: &'a [f64],
    pub(crate) inverse: &'a [f64],
    /// Undamped.
    pub(crate) hessian: &'a [f64],
    pub(crate) dim: usize,
    pub(crate) damping: f64,
}

/// Eq. 1's scale makes tr(T M' Tᵀ) = tr(M') of the damped M' = M + γ tr(M)/d I. So tr(T M Tᵀ) / tr(M) is 1 + γ − γ ‖T‖²/d, and
/// the gain tr(M) tr(H) / (tr(T M Tᵀ) tr(T⁻ᵀHT⁻¹)) follows from T and H, whatever M was. By definition it is 1 where M or H is zero.
/// The gain that should be stated, where another is.
pub(crate) fn other_gain(head: &Head<'_>, stated: &HeadReport, tol: f64) -> Option<f64> {
    let trace: f64 = head.hessian.iter().step_by(head.dim + 1).sum();
    let cost = sensitivity(head.inverse, head.hessian, head.dim).map_or(f64::NAN, |diagonal| diagonal.iter().sum());
    let added = head.damping * head.matrix.iter().map(|x| x * x).sum::<f64>() / head.dim as f64;
    let kept = 1.0 + head.damping - added;
    let lossless = trace == 0.0 || stated.rank_gram == 0;
    let expected = if lossless { 1.0 } else { trace / (cost * kept) };
    let tol = if lossless { REL_TOL } else { tol + tol * added / kept.abs() };
    let close = expected > 0.0 && (stated.predicted_gain - expected).abs() <= tol * expected;
    (!close).then_some(expected)
}

/// Whether some Gram matrix has this T by Eq. 1: with the Hadamard matrix ℋ and H' = L Lᵀ of the damped H, the rows of
/// ℋᵀ T L⁻ᵀ = c Λ^-p Uᵀ are orthogonal, the longest first. Rounding T by u moves each by at most u ‖T‖_F ‖L⁻¹‖_F.
fn other_solution(head: &Head<'_>, precision: Precision) -> Option<String> {
    let dim = head.dim;
    let at = |data: &[f64]| Mat::from_fn(dim, dim, |i, j| data[i * dim + j]);
    let rotation = at(&hadamard(dim).ok()?);
    let trace: f64 = head.hessian.iter().step_by(dim + 1).sum();
    let mut damped = if trace == 0.0 { Mat::identity(dim, dim) } else { at(head.hessian) };
    (0..dim).for_each(|i| damped[(i, i)] += head.damping * trace / dim as f64);
    let Ok(factor) = damped.llt(Side::Lower) else { return Some("the damped Hessian is singular".to_owned()) };
    // Columns of L⁻¹ Tᵀ ℋ.
    let mut rows = Mat::<f64>::zeros(dim, dim);
    matmul(rows.as_mut(), Accum::Replace, at(head.matrix).transpose(), rotation.as_ref(), 1.0, Par::Seq);
    solve_lower_triangular_in_place(factor.L(), rows.as_mut(), Par::Seq);
    let mut lower_inverse = Mat::<f64>::identity(dim, dim);
    solve_lower_triangular_in_place(factor.L(), lower_inverse.as_mut(), Par::Seq);
    let moved = (precision.roundoff() + ARITHMETIC) * at(head.matrix).norm_l2() * lower_inverse.norm_l2();
    let mut products = Mat::<f64>::zeros(dim, dim);
    matmul(products.as_mut(), Accum::Replace, rows.transpose(), rows.as_ref(), 1.0, Par::Seq);
    let length = |i: usize| products[(i, i)].sqrt();
    let orthogonal = |i: usize, j: usize| products[(i, j)].abs() <= moved * (length(i) + length(j) + moved);
    let fits = (0..dim).all(|i| (0..i).all(|j| orthogonal(i, j) && length(i) <= length(j) + 2.0 * moved));
    (!fits).then(|| "not the solution of Eq. 1 for the base's output projection and any Gram matrix".to_owned())
}
