//! Feedback matrices against what they are factors of. L is the unit lower triangular factor of the metric in which errors of
//! the cache count, G = T^{-T} H' T^{-1} = L D Lᵀ with the damped Hessian H'; D is not stored.
//!
//! Where H is at hand (values, with a base), L^{-1} G L^{-T} must be diagonal. Where it is not, the transform's own structure
//! decides: with Eq. 1's family and the Hadamard matrix ℋ, G = c⁻² ℋ Λ^{2p} ℋᵀ. Its diagonal is constant, which gives D and
//! with it G up to its scale; ℋᵀ G ℋ must be diagonal. G and T then give H' = TᵀGT, and M' = T^{-1} ℋ (Λ^{1−2p}) ℋᵀ T^{-T}, up to
//! their scales, and with them every figure that the solver's report states as a ratio. What is left to a false claim is a
//! transform, a feedback matrix and a report that are all those of some other pair of statistics.

use faer::linalg::matmul::matmul;
use faer::linalg::triangular_solve::solve_lower_triangular_in_place;
use faer::{Accum, Mat, MatRef, Par};
use rayon::prelude::*;
use wush_fold::invert;
use wush_format::manifest::HeadReport;
use wush_transform::{Factor, Role, condition_number, error_feedback, find, hadamard, imbalance, sensitivity};

use crate::extras::Feedback;
use crate::files::list;
use crate::hessian::{ARITHMETIC, Head, other_gain};
use crate::number::{count, shown};
use crate::report::Report;
use crate::solver::{Precision, REL_TOL, Record, Stored};

/// Of a report without the gain of the feedback that is there.
const NO_GAIN: &str = "feedback_gain is missing";

/// Feedback matrices of one role against the transforms and the solver's report, where the transform's structure is known.
pub(crate) fn check_metric(
    report: &mut Report,
    role: Role,
    (transforms, found): (&[Stored], &[Feedback]),
    record: &Record<'_>,
    precision: Precision,
) {
    let Ok(kind) = find(&record.solve.transform) else { return };
    // Another factor depends on the seed or the Gram matrix; an orthogonal transform leaves G to the Hessian.
    if found.is_empty() || kind.is_orthogonal || record.solve.factor != Factor::PUBLISHED.name {
        return;
    }
    let compare = |feedback: &Feedback| {
        let Feedback { layer, head, .. } = *feedback;
        let at = transforms.iter().find(|at| (at.layer, at.head) == (layer, head))?;
        let stated = record.head(role, layer, head)?;
        let claim = Claim { matrix: &at.matrix, lower: &feedback.matrix, dim: at.dim, stated, record, precision };
        Some(match claim.compare() {
            Outcome::Wrong(found) => Outcome::Wrong(format!("layer {layer}, KV head {head}: {found}")),
            other => other,
        })
    };
    let outcomes: Vec<Outcome> = found.par_iter().filter_map(compare).collect();
    let name = match role {
        Role::Key => "key feedback is the solver's",
        Role::Value => "value feedback is the solver's",
    };
    let n_open = outcomes.iter().filter(|outcome| matches!(outcome, Outcome::Open)).count();
    let problems = outcomes.into_iter().filter_map(|outcome| match outcome {
        Outcome::Wrong(found) => Some(found),
        Outcome::Fits | Outcome::Open => None,
    });
    let problems: Vec<String> = problems.collect();
    let good = format!("{}, with the transform and the figures of its report", count(found.len(), "head"));
    match (problems.is_empty(), n_open) {
        (true, 0) => report.check(name, true, good),
        (true, _) => {
            let open = count(n_open, "head");
            report.warn(name, format!("{good}; of {open} the rounding of what is stored leaves nothing to compare"));
        }
        (false, _) => report.check(name, false, list(&problems)),
    }
}

/// What a comparison came to.
enum Outcome {
    Fits,
    /// What is stored is rounded too coarsely to tell.
    Open,
    /// The first thing that cannot be.
    Wrong(String),
}

/// One head's transform, feedback and report, of Eq. 1's family with the Hadamard matrix.
struct Claim<'a> {
    /// T, row-major `[d, d]`.
    matrix: &'a [f64],
    /// L, likewise.
    lower: &'a [f64],
    dim: usize,
    stated: &'a HeadReport,
    record: &'a Record<'a>,
    precision: Precision,
}

impl Claim<'_> {
    fn compare(&self) -> Outcome {
        let dim = self.dim;
        if self.matrix.len() != dim * dim || self.lower.len() != dim * dim {
            return Outcome::Wrong("not of the transform's dimension".to_owned());
        }
        let Ok(rotation) = hadamard(dim) else {
            return Outcome::Wrong(format!("there is no Hadamard matrix of order {dim}"));
        };
        let rotation = rows(&rotation, dim);
        let metric = Metric::of_unit_diagonal(self.lower, dim, self.precision);
        let spectrum = product(product(rotation.transpose(), metric.whole.as_ref()).as_ref(), rotation);
        let squares = |a: &Mat<f64>, on: bool| -> f64 {
            (0..dim * dim).filter(|at| (at / dim == at % dim) == on).map(|at| a[(at / dim, at % dim)].powi(2)).sum()
        };
        let off = squares(&spectrum, false).sqrt();
        let values: Vec<f64> = (0..dim).map(|i| spectrum[(i, i)]).collect();
        let smallest = values.iter().copied().fold(f64::INFINITY, f64::min);
        let possible = metric.is_possible && off <= metric.error && smallest + metric.error > 0.0;
        if !possible {
            let off = shown(off / squares(&spectrum, true).sqrt());
            return Outcome::Wrong(format!("no metric of Eq. 1 has this factor: {off} of it lies beside the diagonal"));
        }
        // How far rounding moves the eigenvalues of G, relatively.
        let of_transform = 2.0 * (dim as f64).sqrt() * self.precision.roundoff() * self.stated.cond_transform;
        let moved = metric.error / smallest + of_transform;
        let known_well = smallest > 0.0 && moved < 1.0;
        if !known_well {
            return Outcome::Open;
        }
        let transform = rows(self.matrix, dim);
        let damped = to_rows(&product(transform.transpose(), product(metric.whole.as_ref(), transform).as_ref()));
        let known = Known { metric, rotation, values, moved, damped, inverse: invert(self.matrix, dim).matrix };
        self.other_condition(&known).or_else(|| self.other_trace(&known)).map_or(Outcome::Fits, Outcome::Wrong)
    }

    /// Condition numbers of H' and M': two eigenvalues each, moved by as much, and f64's own noise in the smaller.
    fn other_condition(&self, known: &Known<'_>) -> Option<String> {
        let (dim, stated) = (self.dim, self.stated);
        let hessian = condition_number(&known.damped, dim).unwrap_or(f64::INFINITY);
        let figures =
            [("cond_hessian", stated.cond_hessian, hessian), ("cond_gram", stated.cond_gram, self.cond_gram(known))];
        let tol = |found: f64| REL_TOL + 2.0 * known.moved + dim as f64 * f64::EPSILON * found;
        let other = figures.into_iter().find(|&(_, stated, found)| !close(stated, found, tol(found)))?;
        Some(contradicted(other))
    }

    /// Figures that are ratios of traces. With s the damping that H' has on its diagonal, G − s T^{-T} T^{-1} is the undamped
    /// metric: its traces are off by `moved` times those of the damped one.
    fn other_trace(&self, known: &Known<'_>) -> Option<String> {
        let (dim, damping, stated) = (self.dim, self.record.solve.damping, self.stated);
        let Some(feedback_gain) = stated.feedback_gain else { return Some(NO_GAIN.to_owned()) };
        // By definition 1 or 0 where there is nothing to lose.
        if stated.rank_hessian == 0 || stated.rank_gram == 0 {
            return None;
        }
        let trace: f64 = known.damped.iter().step_by(dim + 1).sum();
        let shift = damping / (1.0 + damping) * trace / dim as f64;
        let mut hessian = known.damped.clone();
        hessian.iter_mut().step_by(dim + 1).for_each(|x| *x -= shift);
        let diagonal = sensitivity(&known.inverse, &hessian, dim).ok()?;
        let undamped: f64 = diagonal.iter().sum();
        let (rest, damped_rest) = known.metric.rest(self.lower, &known.inverse, shift);
        let tol = REL_TOL + 2.0 * known.moved * (dim as f64 / undamped + damped_rest / rest).abs();
        let figures =
            [("imbalance", stated.imbalance, imbalance(&diagonal)), ("feedback_gain", feedback_gain, undamped / rest)];
        if let Some(other) = figures.into_iter().find(|&(_, stated, found)| !close(stated, found, tol)) {
            return Some(contradicted(other));
        }
        let head = Head { matrix: self.matrix, inverse: &known.inverse, hessian: &hessian, dim, damping };
        other_gain(&head, stated, tol).map(|found| contradicted(("predicted_gain", stated.predicted_gain, found)))
    }

    /// Condition number of M' = T^{-1} ℋ Λ^{1−2p} ℋᵀ T^{-T}, from Λ^{2p} up to scale; what is stated where p = 0 leaves it open.
    fn cond_gram(&self, known: &Known<'_>) -> f64 {
        let (dim, exponent) = (self.dim, self.record.solve.exponent);
        if exponent == 0.0 {
            return self.stated.cond_gram;
        }
        let root = (1.0 - 2.0 * exponent) / (4.0 * exponent);
        let mut half = product(rows(&known.inverse, dim), known.rotation);
        for (j, &value) in known.values.iter().enumerate() {
            half.col_mut(j).iter_mut().for_each(|x| *x *= value.powf(root));
        }
        condition_number(&to_rows(&half), dim).map_or(f64::INFINITY, |condition| condition * condition)
    }
}

/// What T and L give where they can be those of Eq. 1.
struct Known<'a> {
    metric: Metric,
    /// ℋ.
    rotation: MatRef<'a, f64>,
    /// Λ^{2p} up to its scale.
    values: Vec<f64>,
    /// How far rounding moves eigenvalues, relatively.
    moved: f64,
    /// H' up to its scale, row-major.
    damped: Vec<f64>,
    /// T^{-1}, row-major.
    inverse: Vec<f64>,
}

/// NaN is close to nothing.
fn close(stated: f64, found: f64, tol: f64) -> bool {
    (stated - found).abs() <= tol * found.max(1.0)
}

fn contradicted((name, stated, found): (&str, f64, f64)) -> String {
    format!("{name} {}, the transform and its feedback give {}", shown(stated), shown(found))
}

/// G up to its scale, with a unit diagonal.
struct Metric {
    /// `[d, d]`.
    whole: Mat<f64>,
    /// D.
    pivots: Vec<f64>,
    /// How far the rounding of L can have moved G, in the Frobenius norm.
    error: f64,
    /// Whether no D_i is negative beyond that.
    is_possible: bool,
}

impl Metric {
    /// From `1 = G_ii = D_i + Σ_{j<i} L_ij² D_j`, row after row. Each L_ij is off by u of itself, so D_i by at most
    /// `e_i = 2u (1 − D_i) + Σ_{j<i} L_ij² e_j`, and G_ij by `Σ_k |L_ik L_jk| (e_k + 2u D_k)`, to first order; the same again leaves
    /// room for the second.
    fn of_unit_diagonal(lower: &[f64], dim: usize, precision: Precision) -> Self {
        let roundoff = precision.roundoff() + ARITHMETIC;
        let (mut pivots, mut errors) = (vec![0.0; dim], vec![0.0; dim]);
        for i in 0..dim {
            let squares = lower[i * dim..i * dim + i].iter().map(|x| x * x);
            let (sum, error) = squares
                .enumerate()
                .fold((0.0, 0.0), |(sum, error), (j, square)| (sum + square * pivots[j], error + square * errors[j]));
            pivots[i] = 1.0 - sum;
            errors[i] = 2.0 * roundoff * sum.abs() + error;
        }
        let weighted = |of: &dyn Fn(usize) -> f64, magnitude: bool| {
            let element = |x: f64| if magnitude { x.abs() } else { x };
            let left = Mat::from_fn(dim, dim, |i, k| element(lower[i * dim + k]) * of(k));
            let right = Mat::from_fn(dim, dim, |i, k| element(lower[i * dim + k]));
            product(left.as_ref(), right.transpose())
        };
        let whole = weighted(&|k| pivots[k], false);
        let error = 2.0 * weighted(&|k| errors[k] + 2.0 * roundoff * pivots[k].abs(), true).norm_l2();
        let is_possible = pivots.iter().zip(&errors).all(|(pivot, error)| *pivot > -2.0 * error);
        Self { whole, pivots, error, is_possible }
    }

    /// tr(L^{-1} G L^{-T}) of the undamped metric G − s T^{-T} T^{-1}, and of G.
    fn rest(&self, lower: &[f64], inverse: &[f64], shift: f64) -> (f64, f64) {
        let dim = self.pivots.len();
        // Rows of T^{-1} L^{-T}, as columns.
        let mut half = rows(inverse, dim).transpose().to_owned();
        solve_lower_triangular_in_place(rows(lower, dim), half.as_mut(), Par::Seq);
        let whole: f64 = self.pivots.iter().sum();
        (whole - shift * half.norm_l2().powi(2), whole)
    }
}

/// The first thing that cannot be of a feedback matrix L whose Hessian is at hand, with a transform T (both row-major `[d, d]`).
///
/// L^{-1} G L^{-T} is diagonal. Rounding T by u moves G to (I + E)^{-T} G (I + E)^{-1} with ‖E‖ ≤ u √d cond(T), and rounding L by u
/// what is divided by its row's and column's size by u √d cond(G)^½: an element over the root of its two diagonal ones by at
/// most twice √d u cond(G)^½ (1 + cond(T)).
pub(crate) fn other_feedback(
    head: &Head<'_>,
    lower: &[f64],
    stated: &HeadReport,
    precision: Precision,
) -> Option<String> {
    let Head { inverse, hessian, dim, damping, .. } = *head;
    if lower.len() != dim * dim {
        return Some("feedback: not of the base's dimension".to_owned());
    }
    let expected = match error_feedback(inverse, hessian, dim, damping) {
        Ok(expected) => expected,
        Err(error) => return Some(format!("feedback: {error}")),
    };
    let trace: f64 = hessian.iter().step_by(dim + 1).sum();
    let mut damped = rows(hessian, dim).to_owned();
    (0..dim).for_each(|i| damped[(i, i)] += if trace == 0.0 { 1.0 } else { damping * trace / dim as f64 });
    let inverse = rows(inverse, dim);
    let mut rest = product(inverse.transpose(), product(damped.as_ref(), inverse).as_ref());
    let condition = condition_number(&to_rows(&rest), dim).unwrap_or(f64::INFINITY);
    let tol =
        2.0 * (dim as f64 * condition).sqrt() * (precision.roundoff() + ARITHMETIC) * (1.0 + stated.cond_transform);
    for _ in 0..2 {
        solve_lower_triangular_in_place(rows(lower, dim), rest.as_mut(), Par::Seq);
        rest = rest.transpose().to_owned();
    }
    let beside = |(i, j): (usize, usize)| rest[(i, j)].abs() / (rest[(i, i)] * rest[(j, j)]).sqrt();
    let fits = |at| beside(at) <= tol;
    let mut pairs = (0..dim).flat_map(|i| (0..i).map(move |j| (i, j)));
    if let Some((i, j)) = pairs.find(|&at| !fits(at)) {
        let (found, tol) = (shown(beside((i, j))), shown(tol));
        return Some(format!(
            "feedback: not the factor of the metric that the base's output projection gives: coordinates {i} and {j} have \
             correlation {found}, at most {tol} is rounding"
        ));
    }
    let Some(gain) = stated.feedback_gain else { return Some(NO_GAIN.to_owned()) };
    let tol = REL_TOL + 2.0 * tol;
    (!close(gain, expected.gain, tol)).then(|| {
        let (gain, expected) = (shown(gain), shown(expected.gain));
        format!("feedback_gain {gain}, the transform and the base's output projection give {expected}")
    })
}

fn rows(data: &[f64], dim: usize) -> MatRef<'_, f64> {
    MatRef::from_row_major_slice(data, dim, dim)
}

fn to_rows(a: &Mat<f64>) -> Vec<f64> {
    let dim = a.nrows();
    (0..dim * dim).map(|at| a[(at / dim, at % dim)]).collect()
}

fn product(a: MatRef<'_, f64>, b: MatRef<'_, f64>) -> Mat<f64> {
    let mut out = Mat::zeros(a.nrows(), b.ncols());
    matmul(out.as_mut(), Accum::Replace, a, b, 1.0, Par::Seq);
    out
}
