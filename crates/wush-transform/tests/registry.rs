//! The registry: every entry builds an invertible transform, measures it, and gives the same bytes on every thread.

mod common;

use common::{Source, assert_close, identity, product, rounding};
use rayon::prelude::*;
use wush_transform::{Factor, HeadProblem, Role, Settings, Solution, TRANSFORMS, TransformError, find, solve};

const SETTINGS: Settings =
    Settings { damping: 0.01, exponent: 0.25, factor: Factor::PUBLISHED, seed: 3, layer: 5, head: 1, role: Role::Key };

#[test]
fn every_entry_builds_an_invertible_transform_and_its_measures() {
    let dim = 16;
    let mut source = Source::new(1);
    let (gram, hessian) = (source.spd(dim, 2.0), source.spd(dim, 2.0));
    let problem = HeadProblem { covariance: &gram, ..HeadProblem::new(&gram, &hessian, dim) };
    let mut gains = Vec::new();
    for kind in TRANSFORMS {
        let s = solve(kind, &problem, &SETTINGS).unwrap_or_else(|e| panic!("{}: {e}", kind.name));
        assert_close(kind.name, &product(&s.transform, &s.inverse, dim), &identity(dim), rounding(dim, 1e4));
        let m = s.info.measures.expect("there are statistics");
        assert!(m.trace_product_over_bound >= 1.0 && !kind.doc.is_empty());
        gains.push((kind.name, m.predicted_gain));
    }
    let gain = |name| gains.iter().find(|(n, _)| *n == name).expect("registered").1;
    // Orthogonal transforms leave both traces as they are; Eq. 1 does not.
    for kind in TRANSFORMS.iter().filter(|kind| kind.is_orthogonal) {
        assert_close(kind.name, &[gain(kind.name)], &[1.0], rounding(dim, 1.0));
    }
    assert_eq!(gain("wush-a"), gain("wush"), "they differ by the Hessian that they are given");
    assert!(gain("wush") > 1.1, "{}", gain("wush"));
}

#[test]
fn without_statistics_only_some_can_be_built() {
    for kind in TRANSFORMS {
        let built = solve(kind, &HeadProblem::new(&[], &[], 80), &SETTINGS);
        match built {
            Ok(solution) => assert!(!kind.needs_statistics && solution.info.measures.is_none(), "{}", kind.name),
            Err(error) => {
                assert!(kind.needs_statistics);
                assert_eq!(error, TransformError::NeedsStatistics { transform: kind.name });
            }
        }
    }
}

#[test]
fn names_are_unique_and_unknown_ones_are_answered_with_the_list() {
    for (i, kind) in TRANSFORMS.iter().enumerate() {
        assert_eq!(find(kind.name).expect("registered").name, kind.name);
        assert!(TRANSFORMS[..i].iter().all(|other| other.name != kind.name), "{} twice", kind.name);
    }
    let message = find("whush").expect_err("unknown").to_string();
    assert!(
        message.contains("whush")
            && message.contains("identity, random, hadamard, oscar, oscar-per-head, wush, wush-a"),
        "{message}"
    );
}

#[test]
fn random_differs_by_seed_layer_head_and_role_and_by_nothing_else() {
    let random = find("random").expect("registered");
    let build =
        |settings: Settings| solve(random, &HeadProblem::new(&[], &[], 12), &settings).expect("builds").transform;
    let base = build(SETTINGS);
    assert_eq!(base, build(Settings { damping: 0.5, ..SETTINGS }));
    for other in [
        Settings { seed: 4, ..SETTINGS },
        Settings { layer: 6, ..SETTINGS },
        Settings { head: 2, ..SETTINGS },
        Settings { role: Role::Value, ..SETTINGS },
        Settings { layer: 1, head: 5, ..SETTINGS },
    ] {
        assert_ne!(base, build(other), "{other:?}");
    }
}

/// The bits that a Python program of its own (ChaCha8, the polar method, Gram-Schmidt twice) gives for the same stream.
#[test]
fn random_is_portable() {
    let random = find("random").expect("registered");
    let problem = HeadProblem::new(&[], &[], 3);
    let t = solve(random, &problem, &SETTINGS).expect("builds").transform;
    let bits: Vec<u64> = t.iter().map(|x| x.to_bits()).collect();
    assert_eq!(bits, PINNED);
}

#[rustfmt::skip]
const PINNED: [u64; 9] = [
    4572961819692322188, 4590427310206657245, 13830525468170758963,
    13829041074339224990, 4603159557465644358, 4585900933474471002,
    4603172208592940861, 4605642956395346851, 4589677333334917247,
];

#[test]
fn the_bytes_do_not_depend_on_the_thread_count() {
    let dim = 64;
    let heads: Vec<(Vec<f64>, Vec<f64>)> = (0..8)
        .map(|seed| {
            let mut source = Source::new(seed);
            (source.spd(dim, 3.0), source.spd(dim, 3.0))
        })
        .collect();
    let kind = find("wush").expect("registered");
    let solve_all = |threads: usize| -> Vec<Solution> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
        let one =
            |(gram, hessian): &(Vec<f64>, Vec<f64>)| solve(kind, &HeadProblem::new(gram, hessian, dim), &SETTINGS);
        pool.install(|| heads.par_iter().map(|head| one(head).expect("solvable")).collect())
    };
    let expected = solve_all(1);
    for threads in [2, 5] {
        assert_eq!(solve_all(threads), expected, "{threads} threads");
    }
}
