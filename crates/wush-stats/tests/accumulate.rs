//! Sums: cut and continued, failed, incomplete; and the weights' Gram matrix.

mod common;

use common::{SHAPES, Shape, Source, info, observe, qkv, sequences, show, spec, statistics, write_checkpoint};
use wush_checkpoint::Checkpoint;
use wush_format::hash::sequence_hash;
use wush_model::ModelError;
use wush_stats::{Accumulator, Statistics, StatsError, output_gram};

fn bytes(statistics: &Statistics) -> Vec<u8> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("stats.safetensors");
    statistics.save(&path).expect("writes");
    std::fs::read(path).expect("reads")
}

#[test]
fn a_run_cut_anywhere_and_resumed_ends_in_the_same_bytes() {
    let sequences = sequences(6, 1);
    let expected = bytes(&statistics(&sequences));
    let dir = tempfile::tempdir().expect("a temporary directory");
    let partial = dir.path().join("partial.safetensors");
    for cut in 0..=sequences.len() {
        let mut first = Statistics::new(&spec(&SHAPES, 8), info());
        observe(&mut first, &sequences[..cut]).expect("finite");
        first.save(&partial).expect("writes");
        let mut resumed = Statistics::load(&partial).expect("what was saved loads");
        assert_eq!(resumed.info.sequence_hashes.len(), cut);
        observe(&mut resumed, &sequences[cut..]).expect("finite");
        assert!(bytes(&resumed) == expected, "cut after {cut} sequences");
    }
}

#[test]
fn the_description_counts_what_was_observed() {
    let sequences = sequences(5, 2);
    let info = statistics(&sequences).info;
    assert_eq!(info.positions, sequences.iter().map(|ids| ids.len() as u64).sum::<u64>());
    assert_eq!(info.max_seq_len, 6);
    let hashes: Vec<_> = sequences.iter().map(|ids| sequence_hash(ids)).collect();
    assert_eq!(info.sequence_hashes, hashes);
}

/// `sha256(struct.pack("<QII", 2, 1, 258))`, by Python.
#[test]
fn a_sequence_hash_is_over_length_and_ids() {
    let expected = "63666746b40cd3ee26094b3a844429e90b5a9837926e063100575aed05d44e7e";
    assert_eq!(sequence_hash(&[1, 258]).to_string(), expected);
    assert_ne!(sequence_hash(&[]), sequence_hash(&[0]));
}

#[test]
fn what_is_not_finite_is_named_with_layer_tensor_and_sequence() {
    let sequences = sequences(3, 3);
    for (tensor, what) in ["queries", "keys", "values"].into_iter().enumerate() {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut statistics = statistics(&common::sequences(2, 9));
            let mut accumulator = Accumulator::new(&mut statistics, &sequences);
            accumulator_pass(&mut accumulator, &sequences[..1]);
            let mut poisoned = qkv(&sequences[1], 1);
            *poisoned[tensor].data.last_mut().expect("not empty") = value;
            let [q, k, v] = &poisoned;
            let error = show(&mut accumulator, 1, [q, k, v]).expect_err("not finite");
            // Two sequences were counted by an earlier pass.
            assert!(
                matches!(error, ModelError::NonFinite { layer: 1, what: found, sequence: 3 } if found == what),
                "{error}"
            );
        }
    }
}

fn accumulator_pass(accumulator: &mut Accumulator<'_>, sequences: &[Vec<u32>]) {
    for layer in 0..SHAPES.len() {
        for ids in sequences {
            let [q, k, v] = qkv(ids, layer);
            show(accumulator, layer, [&q, &k, &v]).expect("finite");
        }
    }
}

/// The largest f32 squares to a finite f64: it is no error.
#[test]
fn huge_finite_activations_are_summed() {
    let sequences = [vec![1, 2]];
    let mut statistics = Statistics::new(&spec(&SHAPES[..1], 8), info());
    let mut accumulator = Accumulator::new(&mut statistics, &sequences);
    let [q, mut k, v] = qkv(&sequences[0], 0);
    k.data[0] = f32::MAX;
    show(&mut accumulator, 0, [&q, &k, &v]).expect("finite");
    accumulator.finish().expect("complete");
    assert!(statistics.layers[&0].key_gram.data[0] > 1e76);
}

#[test]
fn half_done_sums_can_neither_be_saved_nor_continued() {
    let sequences = sequences(2, 4);
    let mut statistics = Statistics::new(&spec(&SHAPES, 8), info());
    let mut accumulator = Accumulator::new(&mut statistics, &sequences);
    accumulator_pass(&mut accumulator, &sequences[..1]);
    let error = accumulator.finish().expect_err("one sequence is missing");
    assert!(matches!(error, StatsError::Incomplete { layer: 0, expected: 2, found: 1 }), "{error}");
    let path = tempfile::tempdir().expect("a temporary directory").path().join("x.safetensors");
    assert!(matches!(statistics.save(&path), Err(StatsError::Unfinished)));
    assert!(!path.exists());
    assert!(matches!(observe(&mut statistics, &sequences), Err(StatsError::Unfinished)));
    assert!(matches!(Statistics::merge(vec![statistics]), Err(StatsError::Unfinished)));
}

#[test]
fn more_sequences_or_layers_than_announced_are_refused() {
    let sequences = sequences(1, 5);
    let mut statistics = Statistics::new(&spec(&SHAPES, 8), info());
    let mut accumulator = Accumulator::new(&mut statistics, &sequences);
    accumulator_pass(&mut accumulator, &sequences);
    let [q, k, v] = qkv(&sequences[0], 0);
    let error = show(&mut accumulator, 0, [&q, &k, &v]).expect_err("one too many");
    assert!(matches!(error, ModelError::Sequence { sequence: 1, .. }), "{error}");
    let mut accumulator = Accumulator::new(&mut statistics, &sequences);
    let error = show(&mut accumulator, 7, [&q, &k, &v]).expect_err("no such layer");
    assert!(error.to_string().contains("layer 7"), "{error}");
}

/// Σ_g W_Oᵀ-block products by their definition, over more rows than one block.
#[test]
fn output_gram_is_its_definition_on_every_thread_count() {
    let (hidden, shapes) = (1100, SHAPES);
    let spec = spec(&shapes, hidden);
    let mut source = Source(6);
    let weights: Vec<Vec<f32>> = shapes.iter().map(|s| source.rows(hidden, s.n_heads * s.head_dim).data).collect();
    let dir = tempfile::tempdir().expect("a temporary directory");
    write_checkpoint(dir.path(), &spec, &weights);
    let checkpoint = Checkpoint::open(dir.path()).expect("valid");
    let on = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
        let mut statistics = Statistics::new(&spec, info());
        pool.install(|| output_gram(&checkpoint, &spec, &mut statistics)).expect("readable");
        statistics
    };
    let found = on(1);
    assert!(found == on(2) && found == on(5));
    for (id, (&Shape { n_heads, n_kv_heads, head_dim: dim }, weight)) in shapes.iter().zip(&weights).enumerate() {
        let (width, group) = (n_heads * dim, n_heads / n_kv_heads);
        for (at, x) in found.layers[&id].output_gram.data.iter().enumerate() {
            let (head, i, j) = (at / dim / dim, at / dim % dim, at % dim);
            let term = |row: usize, g: usize| {
                let at = row * width + (head * group + g) * dim;
                f64::from(weight[at + i]) * f64::from(weight[at + j])
            };
            let expected: f64 =
                (0..hidden).flat_map(|row| (0..group).map(move |g| (row, g))).map(|(r, g)| term(r, g)).sum();
            // Two orders of the same n products of magnitude at most 1.
            let tol = (hidden * group) as f64 * f64::EPSILON * hidden as f64;
            assert!((x - expected).abs() <= tol, "layer {id} [{head}, {i}, {j}]: {x:e}, expected {expected:e}");
        }
    }
}

#[test]
fn output_gram_refuses_another_model_and_broken_weights() {
    let spec = spec(&SHAPES[..1], 8);
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut weight = vec![0.5; 8 * 16];
    weight[77] = f32::NAN;
    write_checkpoint(dir.path(), &spec, &[weight]);
    let checkpoint = Checkpoint::open(dir.path()).expect("valid");
    let error = output_gram(&checkpoint, &spec, &mut Statistics::new(&spec, info())).expect_err("NaN");
    assert!(matches!(&error, StatsError::NonFiniteWeight { layer: 0, name } if name == "layers.0.o"), "{error}");
    let other = common::spec(&SHAPES, 8);
    let error = output_gram(&checkpoint, &spec, &mut Statistics::new(&other, info())).expect_err("another model");
    assert!(matches!(error, StatsError::NonFiniteWeight { .. } | StatsError::Shape { layer: 1, .. }), "{error}");
    let one = common::spec(&[SHAPES[1]], 8);
    let error = output_gram(&checkpoint, &spec, &mut Statistics::new(&one, info())).expect_err("another model");
    assert!(matches!(error, StatsError::Shape { layer: 0, .. }), "{error}");
}
