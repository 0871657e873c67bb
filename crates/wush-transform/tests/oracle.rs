//! Eq. 1 against the float64 oracle (`tests/fixtures/oracle`): every case, every quantity the files hold.

mod common;

use std::path::PathBuf;

use common::{assert_close, damped, product, trace, transposed};
use safetensors::SafeTensors;
use wush_transform::{hadamard_signs, theorem3_bound, trace_product, wush};

/// The oracle's own suggestion: it agrees with itself by another route to 3e-10 at worst.
const ORACLE_REL_TOL: f64 = 1e-8;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/oracle").join(name)
}

fn cases(name: &str) -> Vec<serde_json::Value> {
    serde_json::from_slice(&std::fs::read(fixture(name)).expect("the fixture is there")).expect("valid JSON")
}

fn f64s(file: &SafeTensors<'_>, name: &str) -> Vec<f64> {
    let tensor = file.tensor(name).unwrap_or_else(|_| panic!("{name} is there"));
    match tensor.dtype() {
        safetensors::Dtype::F64 => {
            tensor.data().chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().expect("8 bytes"))).collect()
        }
        safetensors::Dtype::I8 => tensor.data().iter().map(|&b| f64::from(b.cast_signed())).collect(),
        other => panic!("{name}: {other:?}"),
    }
}

/// diag(a) + B Bᵀ.
fn expand(file: &SafeTensors<'_>, name: &str, dim: usize) -> Vec<f64> {
    let (a, b) = (f64s(file, &format!("{name}.a")), f64s(file, &format!("{name}.B")));
    let rank = b.len() / dim;
    let mut matrix = product(&b, &transposed(&b, rank), rank);
    (0..dim).for_each(|i| matrix[i * dim + i] += a[i]);
    matrix
}

#[test]
fn hadamard_matrices_are_the_oracles() {
    let bytes = std::fs::read(fixture("wush.safetensors")).expect("the fixture is there");
    let file = SafeTensors::deserialize(&bytes).expect("valid");
    let mut n_compared = 0;
    for name in file.names() {
        let Some(dim) = name.strip_prefix("had.").map(|d| d.parse::<usize>().expect("a dimension")) else { continue };
        let found: Vec<f64> = hadamard_signs(dim).expect("supported").into_iter().map(f64::from).collect();
        assert_eq!(found, f64s(&file, name), "{name}");
        n_compared += 1;
    }
    assert!(n_compared >= 5, "only {n_compared} matrices in the file");
}

#[test]
fn every_case_is_met() {
    let bytes = std::fs::read(fixture("wush.safetensors")).expect("the fixture is there");
    let file = SafeTensors::deserialize(&bytes).expect("valid");
    let cases = cases("wush.json");
    assert!(cases.len() >= 30, "only {} cases", cases.len());
    for case in &cases {
        check_case(&file, case);
    }
}

fn check_case(file: &SafeTensors<'_>, case: &serde_json::Value) {
    let name = case["name"].as_str().expect("a name");
    let number = |key: &str| case[key].as_f64().unwrap_or_else(|| panic!("{name}: {key}"));
    let (dim, damping) = (number("d") as usize, number("gamma"));
    let (gram, hessian) = (expand(file, &format!("{name}.M"), dim), expand(file, &format!("{name}.H"), dim));
    let solution = wush(&gram, &hessian, dim, damping).unwrap_or_else(|e| panic!("{name}: {e}"));
    let tensor = |key: &str| f64s(file, &format!("{name}.{key}"));
    let close = |key: &str, found: &[f64], expected: &[f64]| {
        assert_close(&format!("{name} {key}"), found, expected, ORACLE_REL_TOL);
    };

    let (t, ti, z) = (&solution.transform, &solution.inverse, tensor("Z"));
    let (tt, tit) = (transposed(t, dim), transposed(ti, dim));
    let apply = |a: &[f64], x: &[f64]| product(a, x, dim);
    close("TtT_Z", &apply(&tt, &apply(t, &z)), &tensor("TtT_Z"));
    close("TiTit_Z", &apply(ti, &apply(&tit, &z)), &tensor("TiTit_Z"));
    let (gram_damped, hessian_damped) = (damped(&gram, dim, damping), damped(&hessian, dim, damping));
    close("TMgTt_Z", &apply(t, &apply(&gram_damped, &apply(&tt, &z))), &tensor("TMgTt_Z"));
    close("TitHgTi_Z", &apply(&tit, &apply(&hessian_damped, &apply(ti, &z))), &tensor("TitHgTi_Z"));
    close("lam", &solution.eigenvalues, &tensor("lam"));
    if file.names().contains(&format!("{name}.T").as_str()) {
        close("T", t, &tensor("T"));
    }
    close("c", &[solution.c], &[number("c")]);

    let conjugated = |a: &[f64], x: &[f64], at: &[f64]| trace(&apply(a, &apply(x, at)), dim);
    close("tr_TMTt", &[conjugated(t, &gram, &tt)], &[number("tr_TMTt")]);
    close("tr_TitHTi", &[conjugated(&tit, &hessian, ti)], &[number("tr_TitHTi")]);
    close("tr_TMgTt", &[conjugated(t, &gram_damped, &tt)], &[number("tr_TMgTt")]);
    close("tr_TitHgTi", &[conjugated(&tit, &hessian_damped, ti)], &[number("tr_TitHgTi")]);
    let both = trace_product(t, ti, &gram, &hessian, dim).expect("valid");
    close("trace product", &[both], &[number("tr_TMTt") * number("tr_TitHTi")]);
    let bound = theorem3_bound(&gram_damped, &hessian_damped, dim).expect("valid");
    close("bound", &[bound], &[number("bound")]);
    let roots: f64 = solution.eigenvalues.iter().map(|x| x.sqrt()).sum();
    close("bound from the eigenvalues", &[roots * roots], &[number("bound")]);
    check_measures(name, &solution, &number);
}

fn check_measures(name: &str, solution: &wush_transform::Solution, number: &dyn Fn(&str) -> f64) {
    let measures = solution.info.measures.expect("there are statistics");
    let close = |key: &str, found: f64, expected: f64| {
        assert_close(&format!("{name} {key}"), &[found], &[expected], ORACLE_REL_TOL);
    };
    close("cond_Mg", measures.cond_gram, number("cond_Mg"));
    close("cond_Hg", measures.cond_hessian, number("cond_Hg"));
    close("cond_product", solution.info.cond_product, number("cond_product"));
    let gain = number("tr_M") * number("tr_H") / (number("tr_TMTt") * number("tr_TitHTi"));
    close("predicted gain", measures.predicted_gain, gain);
    assert!(measures.trace_product_over_bound >= 1.0 - ORACLE_REL_TOL, "{name}: {}", measures.trace_product_over_bound);
    if number("gamma") == 0.0 {
        close("Theorem 3 at γ = 0", measures.trace_product_over_bound, 1.0);
    }
}

#[test]
fn equation_4_pairs_give_the_oracles_metric() {
    let bytes = std::fs::read(fixture("attention.safetensors")).expect("the fixture is there");
    let file = SafeTensors::deserialize(&bytes).expect("valid");
    for case in cases("attention.json") {
        let (name, dim) = (case["name"].as_str().expect("a name"), case["d"].as_u64().expect("d") as usize);
        for role in ["K", "V"] {
            let tensor = |key: &str| f64s(&file, &format!("{name}.{key}"));
            let (grams, hessians) = (tensor(&format!("M{role}")), tensor(&format!("H{role}_wush")));
            let metrics = tensor(&format!("G{role}_wush"));
            let heads = grams.chunks_exact(dim * dim).zip(hessians.chunks_exact(dim * dim));
            for ((gram, hessian), metric) in heads.zip(metrics.chunks_exact(dim * dim)) {
                let t = wush(gram, hessian, dim, 0.01).expect("solvable").transform;
                let found = product(&transposed(&t, dim), &t, dim);
                assert_close(&format!("{name} G{role}"), &found, metric, ORACLE_REL_TOL);
            }
        }
    }
}
