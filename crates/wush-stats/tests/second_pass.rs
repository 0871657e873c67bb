//! The second pass: OSCAR's weighted values against the definition, in files and merges.

mod common;

use common::{SHAPES, qkv, sequences, statistics};
use wush_model::cpu::Cpu;
use wush_model::observer::Observer;
use wush_stats::{SecondPass, Statistics, StatsError};

fn weigh(statistics: &mut Statistics, sequences: &[Vec<u32>]) {
    let mut pass = SecondPass::new(statistics).expect("finished");
    for layer in 0..SHAPES.len() {
        for ids in sequences {
            let [q, k, v] = qkv(ids, layer);
            let seen = pass.see(&Cpu, layer, &q, &k, &v).expect("finite");
            Observer::<Cpu>::add(&mut pass, layer, seen).expect("finite");
        }
    }
    pass.finish();
}

/// C_V = n⁻¹ Σ_t w_t v_t v_tᵀ with w_t = kᵀ A k scaled to the sum n, position by position.
#[test]
fn the_weighted_values_are_those_of_the_definition() {
    let sequences = sequences(5, 3);
    let mut statistics = statistics(&sequences);
    weigh(&mut statistics, &sequences);
    assert!(statistics.info.second_pass);
    let positions = statistics.info.positions;
    for (layer, shape) in SHAPES.iter().enumerate() {
        let (dim, group, sums) = (shape.head_dim, shape.n_heads / shape.n_kv_heads, &statistics.layers[&layer]);
        for head in 0..shape.n_kv_heads {
            let a: Vec<f64> =
                sums.query_gram.head(head).iter().map(|x| x / (positions as f64 * group as f64)).collect();
            let (mut total, mut weighted) = (0.0, vec![0.0; dim * dim]);
            for ids in &sequences {
                let [_, k, v] = qkv(ids, layer);
                for (k, v) in k.data.chunks(k.width).zip(v.data.chunks(v.width)) {
                    let wide = |x: &[f32]| x[head * dim..][..dim].iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
                    let (k, v) = (wide(k), wide(v));
                    let w: f64 = (0..dim * dim).map(|at| k[at / dim] * a[at] * k[at % dim]).sum();
                    total += w;
                    (0..dim * dim).for_each(|at| weighted[at] += w * v[at / dim] * v[at % dim]);
                }
            }
            let found = sums.oscar_value(head, positions).expect("there was a second pass");
            for (x, y) in found.iter().zip(weighted.iter().map(|x| x / total)) {
                // Sums of some tens of products of numbers below 1.
                assert!((x - y).abs() <= 1e-12, "layer {layer}, head {head}: {x:e}, expected {y:e}");
            }
        }
    }
}

#[test]
fn a_second_pass_is_saved_dropped_and_not_merged() {
    let (some, others) = (sequences(3, 1), sequences(2, 99));
    let plain = statistics(&some);
    let mut weighed = plain.clone();
    weigh(&mut weighed, &some);
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("s.safetensors");
    weighed.save(&path).expect("saved");
    assert_eq!(Statistics::load(&path).expect("valid"), weighed);

    let parts = || (weighed.clone(), statistics(&others));
    let (a, b) = parts();
    assert!(matches!(Statistics::merge(vec![a, b]), Err(StatsError::SecondPass { number: 1 })));
    let (a, b) = parts();
    let error = Statistics::merge(vec![b, a]).expect_err("refused");
    assert!(matches!(error, StatsError::SecondPass { number: 2 }) && error.hint().is_some());

    let mut dropped = weighed.clone();
    dropped.drop_second_pass();
    assert_eq!(dropped, plain);
    assert_eq!(plain.layers[&0].oscar_value(0, 9), None);
    // Again over the same gives the same bytes.
    weigh(&mut dropped, &some);
    assert_eq!(dropped, weighed);
}
