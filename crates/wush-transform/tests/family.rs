//! The family around Eq. 1, other exponents and orthogonal factors, and the encoder's factor of its metric.

mod common;

use common::{Source, assert_close, damped, identity, product, rounding, trace, transposed};
use wush_transform::{
    FACTORS, Factor, HeadProblem, Role, Settings, TransformError, error_feedback, imbalance, sensitivity, wush,
    wush_with,
};

const DIM: usize = 20;
/// Condition number that products of the well-conditioned random pairs stay below.
const COND: f64 = 1e6;
const EXPONENTS: [f64; 5] = [0.0, 0.25, 0.35, 0.4, 0.5];

fn pair(seed: u64) -> (Vec<f64>, Vec<f64>) {
    let mut source = Source::new(seed);
    (source.spd(DIM, 2.0), source.spd(DIM, 2.0))
}

fn settings(exponent: f64, factor: &str) -> Settings {
    let factor = Factor::find(factor).expect("known");
    Settings { exponent, factor, seed: 9, ..Settings::published(2, 1, Role::Value) }
}

/// `A B Aᵀ`.
fn conjugated(a: &[f64], b: &[f64]) -> Vec<f64> {
    product(&product(a, b, DIM), &transposed(a, DIM), DIM)
}

#[test]
fn the_published_settings_are_equation_1_to_the_bit() {
    let (gram, hessian) = pair(1);
    let problem = HeadProblem::new(&gram, &hessian, DIM);
    let expected = wush(&gram, &hessian, DIM, 0.01).expect("solvable");
    assert_eq!(wush_with(&problem, &settings(0.25, "hadamard")).expect("solvable"), expected);
}

/// T M_γ Tᵀ has the eigenvalues c² Λ^{1−2p} and T^{-T} H_γ T^{-1} those of c⁻² Λ^{2p}, in one basis; the norm is kept.
#[test]
fn every_member_diagonalizes_both_matrices_at_once() {
    for (seed, exponent) in EXPONENTS.into_iter().enumerate() {
        for factor in FACTORS {
            let (gram, hessian) = pair(seed as u64);
            let problem = HeadProblem::new(&gram, &hessian, DIM);
            let s = wush_with(&problem, &settings(exponent, factor.name)).expect("solvable");
            let what = format!("p {exponent}, {}", factor.name);
            let cache = conjugated(&s.transform, &damped(&gram, DIM, 0.01));
            let metric = conjugated(&transposed(&s.inverse, DIM), &damped(&hessian, DIM, 0.01));
            assert_close(&what, &product(&s.transform, &s.inverse, DIM), &identity(DIM), rounding(DIM, COND));
            assert_close(&what, &[trace(&cache, DIM)], &[1.01 * trace(&gram, DIM)], rounding(DIM, COND));
            // Both are functions of R Λ Rᵀ, so they commute, and the powers multiply to Λ.
            let (one, other) = (product(&cache, &metric, DIM), product(&metric, &cache, DIM));
            assert_close(&what, &one, &other, rounding(DIM, COND));
            assert_close(&what, &[trace(&one, DIM)], &[s.eigenvalues.iter().sum()], rounding(DIM, COND));
            let power = |p: f64| s.eigenvalues.iter().map(|x| x.powf(p)).sum::<f64>();
            let sums = [s.c * s.c * power(1.0 - 2.0 * exponent), power(2.0 * exponent) / (s.c * s.c)];
            assert_close(&what, &[trace(&cache, DIM), trace(&metric, DIM)], &sums, rounding(DIM, COND));
        }
    }
}

#[test]
fn the_balanced_factor_gives_every_coordinate_one_variance() {
    let (gram, hessian) = pair(7);
    let problem = HeadProblem::new(&gram, &hessian, DIM);
    let spread = |exponent, factor| {
        let s = wush_with(&problem, &settings(exponent, factor)).expect("solvable");
        let cache = conjugated(&s.transform, &damped(&gram, DIM, 0.01));
        imbalance(&cache.iter().step_by(DIM + 1).copied().collect::<Vec<_>>())
    };
    for exponent in EXPONENTS {
        assert!(spread(exponent, "balanced") <= rounding(DIM, COND), "p {exponent}");
    }
    assert!(spread(0.25, "random") > 0.1, "a random factor is not balanced");
    // Eq. 21, where the paper has it.
    let undamped = Settings { damping: 0.0, ..settings(0.25, "balanced") };
    let s = wush_with(&problem, &undamped).expect("definite");
    assert!(imbalance(&sensitivity(&s.inverse, &hessian, DIM).expect("valid")) <= rounding(DIM, COND));
}

#[test]
fn exponents_out_of_range_are_refused() {
    let (gram, hessian) = pair(1);
    let problem = HeadProblem::new(&gram, &hessian, DIM);
    for exponent in [-0.1, 0.51, f64::NAN, f64::INFINITY] {
        let found = wush_with(&problem, &settings(exponent, "hadamard"));
        assert!(matches!(found, Err(TransformError::Exponent { .. })), "{exponent}");
    }
}

/// L is unit lower triangular, and L⁻¹ G L⁻ᵀ is diagonal and positive.
#[test]
fn feedback_factors_the_metric() {
    for (seed, exponent) in EXPONENTS.into_iter().enumerate() {
        let (gram, hessian) = pair(20 + seed as u64);
        let problem = HeadProblem::new(&gram, &hessian, DIM);
        let s = wush_with(&problem, &settings(exponent, "balanced")).expect("solvable");
        let lower = error_feedback(&s.inverse, &hessian, DIM, 0.01).expect("definite").lower;
        let metric = conjugated(&transposed(&s.inverse, DIM), &damped(&hessian, DIM, 0.01));
        for (at, &x) in lower.iter().enumerate() {
            let (row, col) = (at / DIM, at % DIM);
            assert!(if row == col { x == 1.0 } else { col < row || x == 0.0 }, "[{row}, {col}] is {x}");
        }
        let pivots = conjugated(&common::inverse(&lower, DIM), &metric);
        let diagonal: Vec<f64> =
            pivots.iter().enumerate().map(|(at, &x)| if at % (DIM + 1) == 0 { x } else { 0.0 }).collect();
        assert!(diagonal.iter().step_by(DIM + 1).all(|&x| x > 0.0));
        assert_close(&format!("L⁻¹ G L⁻ᵀ, p {exponent}"), &pivots, &diagonal, rounding(DIM, COND));
        let rebuilt = conjugated(&lower, &diagonal);
        assert_close(&format!("L D Lᵀ, p {exponent}"), &rebuilt, &metric, rounding(DIM, COND));
    }
}
