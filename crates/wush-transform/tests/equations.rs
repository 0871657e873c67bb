//! The equations that Eq. 1 must satisfy, on random input; and `docs/equations.md`, whose every row must be true.

mod common;

use std::path::PathBuf;

use common::{Source, assert_close, identity, product, rounding, trace, transposed};
use proptest::prelude::*;
use wush_transform::{HeadProblem, hadamard, imbalance, measure, sensitivity, theorem3_bound, trace_product, wush};

const DIMS: [usize; 7] = [1, 2, 4, 12, 20, 64, 80];
/// Condition number that products of the well-conditioned random pairs stay below.
const COND: f64 = 1e6;

fn pairs() -> impl Iterator<Item = (usize, Vec<f64>, Vec<f64>)> {
    DIMS.into_iter().enumerate().map(|(seed, dim)| {
        let mut source = Source::new(seed as u64);
        (dim, source.spd(dim, 2.0), source.spd(dim, 2.0))
    })
}

#[test]
fn equation_1_inverse_is_the_inverse() {
    for (dim, gram, hessian) in pairs() {
        for damping in [0.0, 1e-2, 1.0] {
            let solution = wush(&gram, &hessian, dim, damping).expect("definite");
            let found = product(&solution.transform, &solution.inverse, dim);
            assert_close(&format!("T T⁻¹, d {dim}"), &found, &identity(dim), rounding(dim, COND));
        }
    }
}

#[test]
fn equation_1_keeps_the_norm_without_damping() {
    for (dim, gram, hessian) in pairs() {
        let t = wush(&gram, &hessian, dim, 0.0).expect("definite").transform;
        let found = trace(&product(&product(&t, &gram, dim), &transposed(&t, dim), dim), dim);
        assert_close(&format!("‖TX‖², d {dim}"), &[found], &[trace(&gram, dim)], rounding(dim, COND));
    }
}

/// Eq. 16 as it is written, 24⁻¹ Σ_j Δ_j² tr(B_T) from the columns of X, against the trace product.
#[test]
fn equation_16_is_proportional_to_the_trace_product() {
    let (dim, n, bits, alpha) = (12, 40, 2, 1.5);
    let mut source = Source::new(5);
    let x = source.matrix(dim, n);
    let gram = product(&x, &transposed(&x, n), n);
    let hessian = source.spd(dim, 2.0);
    let step = 2.0 * alpha / ((1 << bits) - 1) as f64;
    let loss = |t: &[f64], inverse: &[f64]| {
        let y = product(t, &x, dim);
        let squares: f64 = y.iter().map(|v| v * v).sum::<f64>() / dim as f64 * step * step;
        squares * sensitivity(inverse, &hessian, dim).expect("valid").iter().sum::<f64>() / 24.0
    };
    let solution = wush(&gram, &hessian, dim, 1e-2).expect("solvable");
    let found = loss(&solution.transform, &solution.inverse);
    let product = trace_product(&solution.transform, &solution.inverse, &gram, &hessian, dim).expect("valid");
    let scale = alpha * alpha / (6.0 * dim as f64 * f64::powi(3.0, 2));
    assert_close("Eq. 16", &[found], &[scale * product], rounding(dim, COND));
    let unit = identity(dim);
    let gain = solution.info.measures.expect("statistics").predicted_gain;
    assert_close("predicted gain", &[gain], &[loss(&unit, &unit) / found], rounding(dim, COND));
}

#[test]
fn equation_18_is_attained_without_damping() {
    for (dim, gram, hessian) in pairs() {
        let solution = wush(&gram, &hessian, dim, 0.0).expect("definite");
        let found = trace_product(&solution.transform, &solution.inverse, &gram, &hessian, dim).expect("valid");
        let bound = theorem3_bound(&gram, &hessian, dim).expect("valid");
        assert_close(&format!("bound, d {dim}"), &[found], &[bound], rounding(dim, COND));
    }
}

#[test]
fn equation_20_holds_without_damping() {
    for (dim, gram, hessian) in pairs() {
        let s = wush(&gram, &hessian, dim, 0.0).expect("definite");
        let rotation = hadamard(dim).expect("supported");
        let mut scaled = rotation.clone();
        scaled.iter_mut().enumerate().for_each(|(at, x)| *x *= s.eigenvalues[at % dim].sqrt());
        let core = product(&scaled, &transposed(&rotation, dim), dim);
        let times = |factor: f64| core.iter().map(|x| x * factor).collect::<Vec<_>>();
        let found = product(&product(&s.transform, &gram, dim), &transposed(&s.transform, dim), dim);
        assert_close(&format!("T M Tᵀ, d {dim}"), &found, &times(s.c * s.c), rounding(dim, COND));
        let found = product(&product(&transposed(&s.inverse, dim), &hessian, dim), &s.inverse, dim);
        assert_close(&format!("T⁻ᵀ H T⁻¹, d {dim}"), &found, &times((s.c * s.c).recip()), rounding(dim, COND));
    }
}

#[test]
fn equation_21_holds_without_damping_and_not_for_the_identity() {
    for (dim, gram, hessian) in pairs() {
        let s = wush(&gram, &hessian, dim, 0.0).expect("definite");
        let found = imbalance(&sensitivity(&s.inverse, &hessian, dim).expect("valid"));
        assert!(found <= rounding(dim, COND), "d {dim}: {found:e}");
        let unit = identity(dim);
        let plain = measure(&unit, &unit, &HeadProblem::new(&gram, &hessian, dim), 0.0).expect("valid").imbalance;
        assert!(dim == 1 || plain > 0.01, "d {dim}: a random H is balanced? {plain:e}");
    }
}

#[test]
fn imbalance_is_the_largest_relative_deviation() {
    assert_eq!(imbalance(&[1.0, 3.0]), 0.5);
    assert_eq!(imbalance(&[2.0, 2.0, 2.0]), 0.0);
    assert_eq!(imbalance(&[0.0, 0.0]), 0.0);
    assert_eq!(imbalance(&[]), 0.0);
}

/// Supported dimensions and a seed.
fn problems() -> impl Strategy<Value = (usize, u64)> {
    (prop::sample::select(vec![1usize, 2, 4, 8, 12, 16, 20]), any::<u64>())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// Theorem 3: no invertible matrix, in particular none near T, has a smaller trace product.
    #[test]
    fn perturbing_t_never_lowers_the_trace_product((dim, seed) in problems(), exponent in -6.0..0.0_f64) {
        let mut source = Source::new(seed);
        let (gram, hessian) = (source.spd(dim, 2.0), source.spd(dim, 2.0));
        let s = wush(&gram, &hessian, dim, 0.0).expect("definite");
        let best = trace_product(&s.transform, &s.inverse, &gram, &hessian, dim).expect("valid");
        let size = 10f64.powf(exponent) * common::frobenius(&s.transform) / dim as f64;
        let other: Vec<f64> = s.transform.iter().map(|x| x + size * source.symmetric()).collect();
        let inverse = common::inverse(&other, dim);
        prop_assume!(inverse.iter().all(|x| x.is_finite()));
        let found = trace_product(&other, &inverse, &gram, &hessian, dim).expect("valid");
        prop_assert!(found >= best * (1.0 - rounding(dim, COND)), "{found:e} < {best:e}");
    }

    /// Section 3: Wush(ρ_M M, ρ_H H) = Wush(M, H); the bytes are the same for powers of 16.
    #[test]
    fn rescaling_either_matrix_changes_nothing((dim, seed) in problems(), a in -200i32..200, b in -200i32..200, r in 0.1..10.0_f64) {
        let mut source = Source::new(seed);
        let (gram, hessian) = (source.spd(dim, 2.0), source.spd(dim, 2.0));
        let scaled = |m: &[f64], factor: f64| m.iter().map(|x| x * factor).collect::<Vec<_>>();
        let expected = wush(&gram, &hessian, dim, 1e-2).expect("definite");
        let found = wush(&scaled(&gram, 16f64.powi(a)), &scaled(&hessian, 16f64.powi(b)), dim, 1e-2).expect("definite");
        prop_assert_eq!(&found.transform, &expected.transform);
        prop_assert_eq!(&found.inverse, &expected.inverse);
        prop_assert_eq!(found.info, expected.info);
        let found = wush(&scaled(&gram, r), &scaled(&hessian, 1.0 / r), dim, 1e-2).expect("definite");
        let metric = |t: &[f64]| product(&transposed(t, dim), t, dim);
        assert_close("TᵀT", &metric(&found.transform), &metric(&expected.transform), rounding(dim, COND));
    }

    /// The bound is at most the trace product of any transform, and symmetric in M and H.
    #[test]
    fn the_bound_is_a_bound((dim, seed) in problems(), rank_m in 1usize..6, rank_h in 1usize..6) {
        let mut source = Source::new(seed);
        let (gram, hessian) = (source.low_rank(dim, rank_m), source.low_rank(dim, rank_h));
        let t = source.matrix(dim, dim);
        let inverse = common::inverse(&t, dim);
        prop_assume!(inverse.iter().all(|x| x.is_finite()));
        let found = trace_product(&t, &inverse, &gram, &hessian, dim).expect("valid");
        let bound = theorem3_bound(&gram, &hessian, dim).expect("valid");
        let cond = common::frobenius(&t) * common::frobenius(&inverse);
        prop_assert!(found >= bound * (1.0 - rounding(dim, cond)), "{found:e} < {bound:e}");
        // Squares of singular values carry ε of the largest square, so the roots carry √ε of the largest root each.
        let mirrored = theorem3_bound(&hessian, &gram, dim).expect("valid");
        let tol = dim as f64 * (rounding(dim, 1.0)).sqrt();
        prop_assert!((bound - mirrored).abs() <= tol * bound.max(mirrored), "{bound:e} {mirrored:e}");
    }
}

/// `docs/equations.md`: every row names a file that exists and a function in it whose doc, or file header, names the
/// equation; every test named exists.
#[test]
fn the_table_of_equations_is_true() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text = std::fs::read_to_string(root.join("docs/equations.md")).expect("docs/equations.md is there");
    let rows: Vec<Vec<&str>> = text
        .lines()
        .filter(|line| line.starts_with("| Eq. "))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    assert!(rows.len() >= 10, "only {} rows", rows.len());
    for row in rows {
        let [equation, _, homes, tests] = row[..] else { panic!("four columns expected: {row:?}") };
        for home in homes.split(", ") {
            check_home(&root, equation, home);
        }
        for test in tests.split(", ") {
            let (file, name) = location(test);
            let source = read(&root, file);
            assert!(source.contains(&format!("fn {name}")), "{equation}: no test {name} in {file}");
        }
    }
}

/// The table of kernels: every row names an entry point of its file, whose header names the equation, and tests that exist.
#[test]
fn the_table_of_kernels_is_true() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text = read(&root, "docs/equations.md");
    let rows: Vec<&str> = text.lines().filter(|line| line.starts_with("| `kernels/")).collect();
    assert!(rows.len() >= 5, "only {} rows", rows.len());
    for row in rows {
        let [kernel, equation, tests] = row.trim_matches('|').split('|').map(str::trim).collect::<Vec<_>>()[..] else {
            panic!("three columns expected: {row}")
        };
        let (file, entry) = location(kernel);
        let source = read(&root, file);
        let is_name = |word: &str| word.strip_prefix(entry).is_some_and(|rest| rest.starts_with('('));
        let is_entry = |part: &str| part.split('{').next().is_some_and(|head| head.split_whitespace().any(is_name));
        assert!(source.split("extern \"C\"").skip(1).any(is_entry), "{file}: no kernel {entry}");
        let header: String = source.lines().take_while(|line| line.starts_with("//")).collect();
        assert!(names(&header, equation), "{file}: its header does not name {equation}");
        for test in tests.split(", ") {
            let (file, name) = location(test);
            assert!(read(&root, file).contains(&format!("fn {name}(")), "no test {name} in {file}");
        }
    }
}

fn check_home(root: &std::path::Path, equation: &str, home: &str) {
    let (file, name) = location(home);
    let source = read(root, file);
    let lines: Vec<&str> = source.lines().map(str::trim_start).collect();
    let definition = |line: &str| {
        let name_of = |rest: &str| rest.split(|c: char| !c.is_alphanumeric() && c != '_').next() == Some(name);
        ["fn ", "pub fn ", "pub(crate) fn ", "pub(super) fn "]
            .iter()
            .any(|kind| line.strip_prefix(kind).is_some_and(name_of))
    };
    let homes: Vec<usize> = (0..lines.len()).filter(|&at| definition(lines[at])).collect();
    assert!(!homes.is_empty(), "{equation}: no {name} in {file}");
    let in_header = lines.iter().take_while(|line| line.starts_with("//!")).any(|line| names(line, equation));
    let in_doc = homes.iter().any(|&at| {
        let doc = lines[..at].iter().rev().take_while(|line| line.starts_with("///") || line.starts_with("#["));
        doc.into_iter().any(|line| names(line, equation))
    });
    assert!(in_doc || in_header, "{equation}: the doc of {name} in {file} does not name it");
}

/// Whether a line names the equation: "Eq. 1" is not named by "Eq. 18".
fn names(line: &str, equation: &str) -> bool {
    line.match_indices(equation).any(|(at, _)| !line[at + equation.len()..].starts_with(|c: char| c.is_ascii_digit()))
}

/// `` `path::name` `` to path and name.
fn location(cell: &str) -> (&str, &str) {
    cell.trim_matches('`').rsplit_once("::").unwrap_or_else(|| panic!("expected `path::name`, found {cell}"))
}

fn read(root: &std::path::Path, file: &str) -> String {
    std::fs::read_to_string(root.join(file)).unwrap_or_else(|e| panic!("{file}: {e}"))
}
