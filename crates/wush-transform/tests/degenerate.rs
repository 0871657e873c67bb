//! Input at the edge: singular, dead, zero, tiny, huge, ill-conditioned, hostile. Solved and reported, or refused by name.

mod common;

use common::{Source, assert_close, identity, product, rounding, transposed};
use wush_transform::{HeadMeasures, HeadProblem, MAX_DIM, Solution, TransformError, hadamard, measure, wush};

fn measures(solution: &Solution) -> HeadMeasures {
    solution.info.measures.expect("there are statistics")
}

/// A + γI bounds the condition number of a damped matrix by 1 + d/γ.
fn damped_cond(dim: usize, damping: f64) -> f64 {
    1.0 + dim as f64 / damping
}

fn assert_inverse(what: &str, s: &Solution, dim: usize) {
    let cond = measures(s).cond_transform.powi(2);
    assert_close(what, &product(&s.transform, &s.inverse, dim), &identity(dim), rounding(dim, cond));
}

#[test]
fn rank_deficient_pairs_are_solved_and_counted() {
    let (dim, damping) = (64, 1e-2);
    let mut source = Source::new(1);
    let s = wush(&source.low_rank(dim, 5), &source.low_rank(dim, 3), dim, damping).expect("damped");
    assert_inverse("rank 5 and 3", &s, dim);
    let m = measures(&s);
    assert_eq!((m.rank_gram, m.rank_hessian, m.dead_channels), (5, 3, 0));
    assert!(m.cond_gram <= damped_cond(dim, damping) && m.cond_hessian <= damped_cond(dim, damping));
    assert!(m.predicted_gain > 1.0 && m.trace_product_over_bound >= 1.0);
}

#[test]
fn dead_channels_are_solved_and_counted() {
    let (dim, dead) = (16, [0usize, 7, 15]);
    let mut source = Source::new(2);
    let kill = |a: Vec<f64>| -> Vec<f64> {
        a.iter()
            .enumerate()
            .map(|(at, x)| if dead.contains(&(at / dim)) || dead.contains(&(at % dim)) { 0.0 } else { *x })
            .collect()
    };
    let (gram, hessian) = (kill(source.spd(dim, 1.0)), kill(Source::new(3).spd(dim, 1.0)));
    let s = wush(&gram, &hessian, dim, 1e-2).expect("damped");
    assert_inverse("dead channels", &s, dim);
    assert_eq!((measures(&s).dead_channels, measures(&s).rank_gram), (3, 13));
    // Dead in one matrix only is not dead.
    let s = wush(&gram, &Source::new(3).spd(dim, 1.0), dim, 1e-2).expect("damped");
    assert_eq!(measures(&s).dead_channels, 0);
}

#[test]
fn an_all_zero_matrix_acts_as_the_identity_and_is_reported() {
    let dim = 8;
    let (zero, unit, some) = (vec![0.0; dim * dim], identity(dim), Source::new(4).spd(dim, 1.0));
    for (gram, hessian, stand_in) in
        [(&zero, &some, (&unit, &some)), (&some, &zero, (&some, &unit)), (&zero, &zero, (&unit, &unit))]
    {
        let s = wush(gram, hessian, dim, 1e-2).expect("damped");
        let expected = wush(stand_in.0, stand_in.1, dim, 1e-2).expect("damped");
        assert_eq!(s.transform, expected.transform);
        assert_eq!((s.info.zero_gram, s.info.zero_hessian), (gram == &zero, hessian == &zero));
        let m = measures(&s);
        // Nothing is stored, or nothing is read: nothing can be lost, or gained.
        assert_eq!((m.trace_product_over_bound, m.predicted_gain), (1.0, 1.0));
        assert_eq!((m.rank_gram == 0, m.rank_hessian == 0), (s.info.zero_gram, s.info.zero_hessian));
    }
    let both = wush(&zero, &zero, dim, 1e-2).expect("damped");
    assert_close("T = ℋ", &both.transform, &hadamard(dim).expect("supported"), rounding(dim, 1.0));
    assert_eq!(measures(&both).dead_channels, dim);
}

/// Limit ρ → 0 of Wush(ρI): the same for every ρ, hence the stand-in.
#[test]
fn the_stand_in_is_the_limit_of_a_vanishing_isotropic_matrix() {
    let dim = 8;
    let some = Source::new(4).spd(dim, 1.0);
    let tiny: Vec<f64> = identity(dim).iter().map(|x| x * 1e-280).collect();
    let expected = wush(&some, &tiny, dim, 1e-2).expect("damped").transform;
    let found = wush(&some, &vec![0.0; dim * dim], dim, 1e-2).expect("damped").transform;
    assert_close("limit", &found, &expected, rounding(dim, 1e4));
}

#[test]
fn singular_input_without_damping_names_the_remedy() {
    let dim = 16;
    let mut source = Source::new(5);
    let (full, low, zero) = (source.spd(dim, 1.0), source.low_rank(dim, 4), vec![0.0; dim * dim]);
    for (gram, hessian, name, rank) in
        [(&low, &full, "Gram matrix", 4), (&full, &low, "Hessian", 4), (&zero, &full, "Gram matrix", 0)]
    {
        let error = wush(gram, hessian, dim, 0.0).expect_err("singular");
        let TransformError::Singular { matrix, rank: found, condition, .. } = &error else { panic!("{error}") };
        assert_eq!((*matrix, *found), (name, rank));
        assert!(*condition > 1e12 && condition.is_finite());
        assert!(error.hint().expect("a remedy").contains("--damping"), "{:?}", error.hint());
    }
}

#[test]
fn eight_decades_are_solved_to_rounding() {
    for dim in [64, 128] {
        let mut source = Source::new(6);
        let mut wide = || {
            let mut diagonal = vec![0.0; dim * dim];
            (0..dim).for_each(|i| diagonal[i * dim + i] = 10.0_f64.powf(-8.0 * i as f64 / (dim - 1) as f64));
            let turn = wush(&source.spd(dim, 1.0), &source.spd(dim, 1.0), dim, 0.1).expect("damped").transform;
            let turned = product(&product(&turn, &diagonal, dim), &transposed(&turn, dim), dim);
            // Symmetric to the last bit: the products above are not.
            (0..dim * dim)
                .map(|at| turned[(at / dim).max(at % dim) * dim + (at / dim).min(at % dim)])
                .collect::<Vec<_>>()
        };
        let (gram, hessian) = (wide(), wide());
        let s = wush(&gram, &hessian, dim, 1e-2).expect("damped");
        assert_inverse("eight decades", &s, dim);
        assert!(measures(&s).trace_product_over_bound >= 1.0);
    }
}

#[test]
fn tiny_dimensions() {
    let s = wush(&[3.0], &[5.0], 1, 0.0).expect("definite");
    assert_close("d = 1: T = 1", &s.transform, &[1.0], 1e-15);
    assert_eq!(measures(&s).imbalance, 0.0);
    for dim in [2, 4] {
        let mut source = Source::new(7);
        assert_inverse("tiny", &wush(&source.spd(dim, 1.0), &source.spd(dim, 1.0), dim, 0.0).expect("definite"), dim);
    }
}

#[test]
fn orders_without_a_hadamard_matrix_are_refused() {
    for dim in [3, 6, 7, 92] {
        let error = wush(&identity(dim), &identity(dim), dim, 0.01).expect_err("no Hadamard matrix");
        assert_eq!(error, TransformError::UnsupportedOrder { order: dim });
        assert!(error.to_string().contains(&dim.to_string()) && error.hint().is_some());
    }
}

#[test]
fn extreme_scales_neither_overflow_nor_underflow() {
    let dim = 12;
    let mut source = Source::new(8);
    let (gram, hessian) = (source.spd(dim, 1.0), source.spd(dim, 1.0));
    let expected = wush(&gram, &hessian, dim, 0.0).expect("definite");
    for (a, b) in [(1e300, 1e300), (1e-300, 1e-300), (1e300, 1e-300)] {
        let scaled = |m: &[f64], factor: f64| m.iter().map(|x| x * factor).collect::<Vec<_>>();
        let s = wush(&scaled(&gram, a), &scaled(&hessian, b), dim, 0.0).expect("definite");
        assert_close("T", &s.transform, &expected.transform, rounding(dim, 1e6));
        let m = measures(&s);
        assert_close("ratio", &[m.trace_product_over_bound], &[1.0], rounding(dim, 1e6));
    }
}

#[test]
fn proportional_matrices_leave_nothing_to_gain() {
    let dim = 20;
    let gram = Source::new(9).low_rank(dim, 6);
    let hessian: Vec<f64> = gram.iter().map(|x| 7.0 * x).collect();
    let m = measure(&identity(dim), &identity(dim), &HeadProblem::new(&gram, &hessian, dim), 0.01).expect("valid");
    assert_close("ratio", &[m.trace_product_over_bound], &[1.0], rounding(dim, 1e3));
}

#[test]
fn disjoint_supports_stay_finite() {
    let s = wush(&[1.0, 0.0, 0.0, 0.0], &[0.0, 0.0, 0.0, 1.0], 2, 1e-2).expect("damped");
    let m = measures(&s);
    assert!(m.trace_product_over_bound.is_finite() && m.trace_product_over_bound > 1e12, "{m:?}");
    assert!(m.predicted_gain.is_finite() && m.predicted_gain > 1.0, "{m:?}");
}

#[test]
fn hostile_input_is_named() {
    let good = identity(4);
    let with = |at: usize, value: f64| {
        let mut bad = good.clone();
        bad[at] = value;
        bad
    };
    for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let error = wush(&good, &with(6, value), 4, 0.01).expect_err("not finite");
        assert!(matches!(error, TransformError::NonFinite { matrix: "Hessian", row: 1, col: 2, .. }), "{error}");
    }
    let error = wush(&with(6, 1e-3), &good, 4, 0.01).expect_err("asymmetric");
    assert!(matches!(error, TransformError::Asymmetric { matrix: "Gram matrix", row: 2, col: 1, .. }), "{error}");
    let error = wush(&with(5, -1.0), &good, 4, 0.01).expect_err("indefinite");
    assert!(matches!(error, TransformError::Indefinite { matrix: "Gram matrix", .. }), "{error}");
    assert!(matches!(
        wush(&good, &good[1..], 4, 0.01),
        Err(TransformError::Shape { matrix: "Hessian", found: 15, .. })
    ));
    for dim in [0, MAX_DIM + 1, usize::MAX] {
        assert_eq!(wush(&good, &good, dim, 0.01).expect_err("dimension"), TransformError::Dimension { dim });
    }
    for damping in [-1e-9, f64::NAN, f64::INFINITY] {
        assert!(matches!(wush(&good, &good, 4, damping), Err(TransformError::Damping { .. })));
    }
}

#[test]
fn rounding_asymmetry_is_accepted_and_removed() {
    let dim = 8;
    let gram = Source::new(10).spd(dim, 1.0);
    let mut nudged = gram.clone();
    nudged[1] *= 1.0 + 1e-13;
    let expected = wush(&gram, &gram, dim, 0.01).expect("definite").transform;
    assert_close("T", &wush(&nudged, &gram, dim, 0.01).expect("definite").transform, &expected, 1e-10);
}
