//! Merging: what adds up, in which order, and what is refused.

mod common;

use common::{sequences, statistics};
use proptest::prelude::*;
use wush_format::hash::Sha;
use wush_stats::{LayerStats, Statistics, StatsError};

/// Two orders of adding n terms differ by at most n 2^-53 relative to sqrt(A_ii A_jj): n < 2^8 positions here.
const ORDER_REL_TOL: f64 = 1.0 / (1u64 << 45) as f64;

fn close(a: &LayerStats, b: &LayerStats) -> bool {
    let grams = [
        (&a.key_gram, &b.key_gram),
        (&a.query_gram, &b.query_gram),
        (&a.value_gram, &b.value_gram),
        (&a.output_gram, &b.output_gram),
    ];
    let dim = a.head_dim();
    grams.iter().all(|(x, y)| {
        (0..x.data.len()).all(|at| {
            let (head, i, j) = (at / dim / dim, at / dim % dim, at % dim);
            let diagonal = |i: usize| x.head(head)[i * dim + i].sqrt();
            (x.data[at] - y.data[at]).abs() <= ORDER_REL_TOL * diagonal(i) * diagonal(j)
        })
    }) && a.key_sum.iter().zip(&b.key_sum).all(|(x, y)| (x - y).abs() <= ORDER_REL_TOL * 256.0)
}

fn assert_same_sums(a: &Statistics, b: &Statistics) {
    assert_eq!(a.info.positions, b.info.positions);
    assert_eq!(a.info.max_seq_len, b.info.max_seq_len);
    assert!(a.layers.keys().eq(b.layers.keys()));
    for (id, layer) in &a.layers {
        assert!(close(layer, &b.layers[id]), "layer {id}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any cut into parts, merged in any order and grouping, is the whole.
    #[test]
    fn parts_add_up_to_the_whole(seed in any::<u64>(), cuts in prop::collection::vec(0usize..=12, 2), order in Just(vec![0, 1, 2]).prop_shuffle()) {
        let sequences = sequences(12, seed);
        let whole = statistics(&sequences);
        let (low, high) = (cuts[0].min(cuts[1]), cuts[0].max(cuts[1]));
        let parts = [&sequences[..low], &sequences[low..high], &sequences[high..]].map(statistics);
        let shuffled: Vec<Statistics> = order.iter().map(|&i| parts[i].clone()).collect();
        assert_same_sums(&Statistics::merge(shuffled).expect("disjoint"), &whole);
        let [a, b, c] = parts;
        let right = Statistics::merge(vec![b, c]).expect("disjoint");
        let merged = Statistics::merge(vec![a, right]).expect("disjoint");
        assert_same_sums(&merged, &whole);
        prop_assert_eq!(merged.info.sequence_hashes, whole.info.sequence_hashes);
    }
}

#[test]
fn one_file_merges_to_itself_and_two_commute_to_the_bit() {
    let (a, b) = (statistics(&sequences(3, 1)), statistics(&sequences(4, 2)));
    assert_eq!(Statistics::merge(vec![a.clone()]).expect("one"), a);
    let ab = Statistics::merge(vec![a.clone(), b.clone()]).expect("disjoint");
    let ba = Statistics::merge(vec![b, a]).expect("disjoint");
    assert_eq!(ab.layers, ba.layers);
    assert!(matches!(Statistics::merge(vec![]), Err(StatsError::NothingToMerge)));
}

#[test]
fn a_sequence_twice_is_refused_and_named() {
    let (a, b, c) = (sequences(3, 1), sequences(3, 2), sequences(3, 3));
    let again = [c.clone(), a[1..2].to_vec()].concat();
    let error = Statistics::merge([a.as_slice(), &b, &again].map(statistics).to_vec()).expect_err("twice");
    let StatsError::SameSequence { number: 3, hash } = error else { panic!("{error}") };
    assert_eq!(hash, wush_format::hash::sequence_hash(&a[1]));
    assert!(error.hint().expect("a remedy").contains("--shard"));
}

/// What makes two files unmergeable.
type Edit = fn(&mut Statistics);

#[test]
fn other_models_and_settings_are_refused_by_name() {
    let edits: [(&str, Edit); 7] = [
        ("model's weights", |s| s.info.model_hash = Sha::of(b"other")),
        ("family", |s| s.info.family = "qwen3".into()),
        ("RoPE scaling", |s| s.info.rope_scaling = Some("yarn:4".into())),
        ("arithmetic", |s| s.info.compute = "bf16".into()),
        ("list of layers", |s| drop(s.layers.remove(&1))),
        ("layer 1's", |s| drop(s.layers.insert(1, LayerStats::zeros(2, 6)))),
        ("layer 0, head 1, output_gram[2, 3]", |s| {
            let gram = &mut s.layers.get_mut(&0).expect("there").output_gram;
            gram.head_mut(1)[2 * 4 + 3] = 1.0;
        }),
    ];
    for (what, edit) in edits {
        let mut other = statistics(&sequences(2, 2));
        edit(&mut other);
        let error = Statistics::merge(vec![statistics(&sequences(2, 1)), other]).expect_err(what);
        assert!(matches!(error, StatsError::Mismatch { number: 2, .. }), "{what}: {error}");
        assert!(error.to_string().contains(what), "{what}: {error}");
    }
}

#[test]
fn sources_and_devices_are_united() {
    let mut parts: Vec<Statistics> = (1..4).map(|seed| statistics(&sequences(2, seed))).collect();
    parts[1].info.source = "b.txt".into();
    parts[1].info.device = "cuda:0".into();
    let info = Statistics::merge(parts).expect("disjoint").info;
    assert_eq!((info.source.as_str(), info.device.as_str()), ("b.txt + text.txt", "cpu + cuda:0"));
}

#[test]
fn counts_that_overflow_are_refused() {
    let (mut a, b) = (statistics(&sequences(2, 1)), statistics(&sequences(2, 2)));
    a.info.positions = u64::MAX;
    assert!(matches!(Statistics::merge(vec![a, b]), Err(StatsError::TooManyPositions)));
}
