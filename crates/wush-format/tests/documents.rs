//! The transforms file, the sidecars and the manifest: round trips, and one case a documented refusal.

use std::collections::BTreeMap;
use std::path::Path;

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use wush_format::FormatError;
use wush_format::bundle::{FeedbackLayer, KeyLayer, KeySidecar, ValueFeedback, ValueLayer, ValueSidecar};
use wush_format::hash::Sha;
use wush_format::manifest::{
    Basis, Calibration, FileEntry, FoldReport, HeadReport, LayerReport, Manifest, ModuleError, Sensitivity, Solve,
    Source, Status, is_inside,
};
use wush_format::seal::seal;
use wush_format::tensor_file::{NewTensor, TensorFile, write_tensor_file};
use wush_format::transforms::{HeadMatrices, LayerTransforms, Transforms};

fn head_report() -> HeadReport {
    HeadReport {
        // Not every reader of decimal numbers gets this one right.
        cond_gram: 0.1 + 0.2,
        cond_hessian: 1e300,
        cond_transform: 5e-324,
        rank_gram: 2,
        rank_hessian: 2,
        dead_channels: 0,
        trace_product_over_bound: 1.0 + f64::EPSILON,
        feedback_gain: None,
        predicted_gain: 1.5,
        imbalance: 7.450580596923828e-9,
        mean_norm: None,
    }
}

fn calibration() -> Calibration {
    Calibration {
        source: "calibration.txt".to_owned(),
        tokens_hash: Sha::of(b"tokens"),
        sequences: 2,
        tokens: 64,
        max_seq_len: 32,
        rope_scaling: None,
        device: "cpu".to_owned(),
        compute: "f32".to_owned(),
    }
}

fn layer_report(layer: usize) -> LayerReport {
    LayerReport { layer, key: vec![head_report()], value: vec![head_report()], centered_keys: vec![0] }
}

fn transforms() -> Transforms {
    let matrices = |first: f64| HeadMatrices { n_heads: 1, dim: 2, data: vec![first, 0.0, -0.0, 1.0 / 3.0] };
    let lower = |below: f64| HeadMatrices { n_heads: 1, dim: 2, data: vec![1.0, -0.0, below, 1.0] };
    let layer = |first| LayerTransforms {
        key_mean: Some(vec![first, -0.0]),
        key_feedback: Some(lower(1.0 / 3.0)),
        value_feedback: Some(lower(-f64::from(1 << 26))),
        ..LayerTransforms::new(matrices(first), matrices(-first))
    };
    Transforms {
        layers: BTreeMap::from([(0, layer(1.0)), (10, layer(0.1)), (2, layer(f64::MIN_POSITIVE))]),
        model_hash: Sha::of(b"model"),
        solve: Solve {
            damping: 0.1 + 0.2,
            exponent: 0.1 + 0.3,
            seed: u64::MAX,
            stats_hash: Some(Sha::of(b"stats")),
            center_keys: "auto".to_owned(),
            feedback: true,
            ..Solve::as_published("wush")
        },
        calibration: Some(calibration()),
        report: vec![layer_report(0), layer_report(2), layer_report(10)],
    }
}

fn file_entry(path: &str) -> FileEntry {
    FileEntry { path: path.to_owned(), n_bytes: 1, sha256: Sha::of(path.as_bytes()) }
}

fn manifest() -> Manifest {
    Manifest {
        format_version: 2,
        tool: "wush 0.1.0".to_owned(),
        status: Status::Complete,
        source: Source {
            id: "org/name".to_owned(),
            revision: None,
            family: "llama".to_owned(),
            model_hash: Sha::of(b"model"),
            files: vec![file_entry("config.json"), file_entry("model.safetensors")],
        },
        basis: Basis { kind: "folded-values".to_owned(), model_hash: Sha::of(b"folded") },
        solve: Solve::as_published("wush"),
        calibration: Some(calibration()),
        layers: vec![layer_report(0), layer_report(1)],
        fold: FoldReport { dtype: "keep".to_owned(), max_rel_error: 1e-3, worst_layer: 1 },
        equivalence: None,
        sensitivity: None,
        files: vec![file_entry("config.json"), file_entry("wush/README.md")],
    }
}

/// Saves, loads, and asks for the same bytes from what was loaded.
macro_rules! round_trip {
    ($type:ty, $value:expr) => {{
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("file");
        let value = $value;
        value.save(&path).expect("saves");
        let bytes = std::fs::read(&path).expect("reads");
        let loaded = <$type>::load(&path).expect("loads");
        assert_eq!(loaded, value);
        loaded.save(&path).expect("saves");
        assert_eq!(std::fs::read(&path).expect("reads"), bytes, "the bytes depend on more than the content");
    }};
}

#[test]
fn every_document_reads_back_bit_for_bit() {
    round_trip!(Transforms, transforms());
    round_trip!(
        Transforms,
        Transforms {
            solve: Solve { transform: "identity".to_owned(), stats_hash: None, ..transforms().solve },
            calibration: None,
            report: vec![],
            ..transforms()
        }
    );
    round_trip!(Manifest, manifest());
}

fn invalid(manifest: &Manifest) -> String {
    let json = serde_json::to_vec(manifest).expect("serializes");
    let error = Manifest::parse(Path::new("manifest.json"), &json).expect_err("must be refused");
    let dir = tempfile::tempdir().expect("a temporary directory");
    manifest.save(&dir.path().join("m")).expect_err("what is not read is not written");
    error.to_string()
}

#[test]
fn a_manifest_with_unsorted_repeated_or_escaping_entries_is_refused() {
    let mut m = manifest();
    m.files.reverse();
    assert!(invalid(&m).contains("files: expected paths sorted and unique"));
    let mut m = manifest();
    m.source.files[1] = m.source.files[0].clone();
    assert!(invalid(&m).contains("source.files: expected paths sorted and unique"));
    let mut m = manifest();
    m.files[0] = file_entry("../config.json");
    assert!(invalid(&m).contains("\"../config.json\" is not a relative path"));
    let mut m = manifest();
    m.files[1] = file_entry("wush/manifest.json");
    assert!(invalid(&m).contains("lists wush/manifest.json itself"));
    let mut m = manifest();
    m.layers.reverse();
    assert!(invalid(&m).contains("expected rising layer ids, found 1 before 0"));
    let mut m = manifest();
    m.layers[0].key.clear();
    assert!(invalid(&m).contains("layer 0: expected as many value heads as key heads"));
    let mut m = manifest();
    m.layers[1].centered_keys = vec![1];
    assert!(invalid(&m).contains("layer 1: expected centered_keys rising and below 1, found [1]"));
    let mut m = manifest();
    m.fold.max_rel_error = f64::NAN;
    assert!(invalid(&m).contains("expected f64"));
}

/// Bits are allotted by it, so it is as long as the model, and holds errors.
#[test]
fn a_manifest_with_other_sensitivities_than_its_layers_is_refused() {
    let measured = |layers: &[[f64; 2]], tokens| {
        let layers = layers.iter().map(|&[keys, values]| ModuleError { keys, values }).collect();
        Manifest {
            sensitivity: Some(Sensitivity { quantizer: "quest".to_owned(), bits: 2, tokens, layers }),
            ..manifest()
        }
    };
    let good = measured(&[[0.0, 0.5], [1e-3, 2.0]], 64);
    let json = serde_json::to_vec(&good).expect("serializes");
    assert_eq!(Manifest::parse(Path::new("manifest.json"), &json).expect("valid"), good);
    assert!(invalid(&measured(&[[0.1, 0.1]], 64)).contains("sensitivity: expected 2 layers and some tokens, found 1"));
    assert!(invalid(&measured(&[[0.1, 0.1], [0.1, 0.1]], 0)).contains("found 2 layers, 0 tokens"));
    assert!(invalid(&measured(&[[0.1, 0.1], [0.1, -0.1]], 64)).contains("entry 1 is no pair of squared errors"));
}

#[test]
fn a_manifest_cannot_draw_lines_on_a_terminal() {
    let mut forged = manifest();
    forged.source.id = "demo\n\nVerdict: ok (24 checks passed)\n\u{1b}[8m".to_owned();
    let json = serde_json::to_vec(&forged).expect("serializes");
    let error = Manifest::parse(Path::new("manifest.json"), &json).expect_err("refused").to_string();
    assert!(error.contains("holds a control character"), "{error}");
    assert!(!error.contains('\n') && !error.contains('\u{1b}'), "{error:?}");
}

#[test]
fn a_manifest_of_another_version_is_told_from_a_broken_one() {
    let parse = |text: &str| Manifest::parse(Path::new("manifest.json"), text.as_bytes()).expect_err("refused");
    let version = parse(r#"{"format_version": 3, "something": "new"}"#);
    assert_eq!(version.to_string(), "manifest.json: manifest format version 3, expected 2");
    assert!(version.hint().is_some());
    for text in ["", "[]", "{}", r#"{"format_version": 2}"#, r#"{"format_version": 2, "format_version": 2}"#] {
        assert!(matches!(parse(text), FormatError::Invalid { .. }), "{text}");
    }
    let mut value = serde_json::to_value(manifest()).expect("serializes");
    value["extra"] = 1.into();
    assert!(parse(&value.to_string()).to_string().contains("unknown field `extra`"));
    let long = format!("{{\"{}\":1,{}", "x".repeat(1 << 20), &value.to_string()[1..]);
    assert!(parse(&long).to_string().len() < 2000, "a hostile key floods the message");
}

#[test]
fn only_paths_below_a_directory_are_inside() {
    for path in ["a", "a/b.c", "..a", ".hidden", "a b/é"] {
        assert!(is_inside(path), "{path}");
    }
    for path in ["", ".", "..", "/a", "a/", "a//b", "a/../b", "./a", "a/.", "a\\b", "a\0", "a\nb"] {
        assert!(!is_inside(path), "{path}");
    }
}

/// A transforms file whose tensors or metadata were changed.
fn changed(change: impl FnOnce(&mut BTreeMap<String, NewTensor>, &mut BTreeMap<String, String>)) -> FormatError {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("t.safetensors");
    transforms().save(&path).expect("saves");
    let file = TensorFile::open(&path).expect("valid");
    let mut metadata = file.metadata().clone();
    let own = |name: &String| {
        let view = file.tensor(name).expect("listed");
        let tensor = NewTensor { dtype: view.dtype, shape: view.shape.to_vec(), bytes: view.bytes.to_vec() };
        (name.clone(), tensor)
    };
    let mut tensors: BTreeMap<_, _> = file.tensors().keys().map(own).collect();
    change(&mut tensors, &mut metadata);
    // Who edits a file on purpose hashes it again.
    seal(&tensors, &mut metadata);
    write_tensor_file(&path, &tensors, &metadata).expect("writes");
    Transforms::load(&path).expect_err("must be refused")
}

#[test]
fn a_transforms_file_with_missing_unknown_or_misshapen_tensors_is_refused() {
    let error = changed(|tensors, _| drop(tensors.remove("layers.2.value")));
    assert!(matches!(&error, FormatError::MissingTensor { name, .. } if name == "layers.2.value"), "{error}");
    for name in ["layers.02.key", "layers.0.query", "layer.0.key", "layers.65536.key", "layers.+1.key", "layers..key"] {
        let error = changed(|tensors, _| drop(tensors.insert(name.to_owned(), NewTensor::f64(&[1, 1, 1], &[1.0]))));
        assert!(error.to_string().contains("unknown tensor"), "{name}: {error}");
    }
    let cases: [(&[usize], &[f64]); 4] =
        [(&[4], &[1.0; 4]), (&[1, 1, 2], &[1.0; 2]), (&[0, 2, 2], &[]), (&[1, 0, 0], &[])];
    for (shape, values) in cases {
        let error =
            changed(|tensors, _| drop(tensors.insert("layers.0.key".to_owned(), NewTensor::f64(shape, values))));
        assert!(error.to_string().contains("expected shape [n_heads, d, d]"), "{error}");
    }
    let two_heads = NewTensor::f64(&[2, 1, 1], &[1.0; 2]);
    let error = changed(|tensors, _| drop(tensors.insert("layers.0.value".to_owned(), two_heads)));
    assert!(error.to_string().contains("expected 1 heads, as the keys have, found 2 heads"), "{error}");
    let half = NewTensor::f32(&[1, 2, 2], &[1.0; 4]);
    let error = changed(|tensors, _| drop(tensors.insert("layers.0.key".to_owned(), half)));
    assert!(error.to_string().contains("expected F64 [1, 2, 2], found F32 [1, 2, 2]"), "{error}");
    let error = changed(|tensors, _| tensors.clear());
    assert!(error.to_string().contains("it holds no layer"), "{error}");
}

#[test]
fn a_transforms_file_with_bad_metadata_is_refused() {
    let negative = Solve { damping: -1.0, ..Solve::as_published("wush") };
    let negative = serde_json::to_string(&negative).expect("plain data");
    let cases: [(&str, &str, &str); 7] = [
        ("format", "wush-key-transforms", "expected the metadata entry format = wush-transforms"),
        ("version", "2", "wush-transforms format version \"2\", expected 3"),
        ("model_hash", "abc", "metadata entry model_hash = \"abc\""),
        ("solve", "{}", "metadata entry solve: missing field"),
        ("solve", &negative, "damping -1, expected a finite number"),
        ("report", "[{}]", "metadata entry report: missing field"),
        ("calibration", "1", "metadata entry calibration"),
    ];
    for (key, value, expected) in cases {
        let error = changed(|_, metadata| drop(metadata.insert(key.to_owned(), value.to_owned()))).to_string();
        assert!(error.contains(expected), "{key}: {error}");
    }
    let error = changed(|_, metadata| drop(metadata.remove("solve"))).to_string();
    assert!(error.contains("metadata entry \"solve\" is missing"), "{error}");
}

#[test]
fn no_flipped_bit_is_read() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("t.safetensors");
    transforms().save(&path).expect("saves");
    let whole = std::fs::read(&path).expect("there");
    let load = |bytes: &[u8]| Transforms::from_file(&TensorFile::from_bytes(&path, bytes.to_vec())?);
    load(&whole).expect("nothing is wrong with it");
    for bit in 0..8 * whole.len() {
        let mut flipped = whole.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(load(&flipped).is_err(), "bit {} of byte {}", bit % 8, bit / 8);
    }
    let mut last = whole;
    *last.last_mut().expect("not empty") ^= 1;
    let error = load(&last).expect_err("a bit of the last element").to_string();
    assert!(error.contains("its content is not what was written: content_hash is \""), "{error}");
}

/// A fold copies the record into the manifest, so a file whose record is of something else makes a bundle that nobody reads.
#[test]
fn transforms_that_are_not_what_their_record_says_are_neither_written_nor_read() {
    type Edit = fn(&mut Transforms);
    let cases: [(Edit, &str); 9] = [
        (|t| t.solve.feedback = false, "solve says feedback false, and layer 0 has some: key_feedback"),
        (
            |t| t.layers.values_mut().for_each(|l| l.key_feedback = None),
            "solve says feedback true, and layer 0 has none: key_feedback",
        ),
        (
            |t| t.layers.values_mut().for_each(|l| l.value_feedback = None),
            "solve says feedback true, and layer 0 has none: value_feedback",
        ),
        (|t| t.solve.center_keys = "never".to_owned(), "solve says center_keys never, and layer 0 has some: key_mean"),
        (
            |t| t.layers.values_mut().for_each(|l| l.key_mean = None),
            "solve says center_keys auto, and layer 0 has none: key_mean",
        ),
        (
            |t| drop(t.report.remove(1)),
            "it has layer 10 with 1 key and 1 value heads, of which [0] are centred, they have layer 2",
        ),
        (|t| t.report[2].value.clear(), "it has layer 10 with 1 key and 0 value heads"),
        (
            |t| t.report[0].centered_keys.clear(),
            "of which [] are centred, they have layer 0 with 1 key and 1 value heads, of which [0]",
        ),
        (
            |t| t.report.push(layer_report(11)),
            "it has layer 11 with 1 key and 1 value heads, of which [0] are centred, they have nothing",
        ),
    ];
    for (edit, expected) in cases {
        refused_both_ways(edit, expected);
    }
}

#[test]
fn feedback_that_no_encoder_takes_is_neither_written_nor_read() {
    type Edit = fn(&mut [f64]);
    let cases: [(Edit, &str); 4] = [
        (|l| l[1] = 0.5, "5e-1 in head 0, row 0, column 1"),
        (|l| l[3] = 1.0 + f64::EPSILON, "in head 0, row 1, column 1"),
        (|l| l[0] = 0.0, "0e0 in head 0, row 0, column 0"),
        (|l| l[2] = f64::from(1 << 26) + 1.0, "6.7108865e7 in head 0, row 1, column 0"),
    ];
    for (edit, expected) in cases {
        let edit_layer = |t: &mut Transforms| {
            edit(&mut t.layers.get_mut(&2).expect("there").value_feedback.as_mut().expect("there").data)
        };
        refused_both_ways(edit_layer, expected);
    }
}

/// What `save` refuses, put into a file some other way, is what `load` refuses.
fn refused_both_ways(edit: impl Fn(&mut Transforms), expected: &str) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("t.safetensors");
    let mut edited = transforms();
    edit(&mut edited);
    let error = edited.save(&path).expect_err(expected).to_string();
    assert!(error.contains(expected) && !path.exists(), "{expected}: {error}");
    let error = changed(|tensors, metadata| {
        metadata.insert("solve".to_owned(), serde_json::to_string(&edited.solve).expect("plain data"));
        metadata.insert("report".to_owned(), serde_json::to_string(&edited.report).expect("plain data"));
        for (layer, entry) in &edited.layers {
            let square = [("key_feedback", &entry.key_feedback), ("value_feedback", &entry.value_feedback)];
            for (role, matrices) in square {
                match matrices {
                    Some(m) => tensors.insert(format!("layers.{layer}.{role}"), NewTensor::f64(&[1, 2, 2], &m.data)),
                    None => tensors.remove(&format!("layers.{layer}.{role}")),
                };
            }
            if entry.key_mean.is_none() {
                tensors.remove(&format!("layers.{layer}.key_mean"));
            }
        }
    });
    assert!(error.to_string().contains(expected), "{expected}: {error}");
}

#[test]
fn a_number_that_is_not_finite_is_named_and_neither_written_nor_read() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("t.safetensors");
    let mut t = transforms();
    t.layers.get_mut(&2).expect("a layer").value.data[3] = f64::INFINITY;
    let expected = "tensor layers.2.value: expected finite numbers, found NaN or infinity in head 0, row 1, column 1";
    assert!(t.save(&path).expect_err("refused").to_string().contains(expected));
    let bad = NewTensor::f64(&[1, 2, 2], &[0.0, 0.0, 0.0, f64::NAN]);
    assert!(
        changed(|tensors, _| drop(tensors.insert("layers.2.value".to_owned(), bad))).to_string().contains(expected)
    );
    let mut t = transforms();
    t.report[0].key[0].cond_gram = f64::INFINITY;
    assert!(t.save(&path).expect_err("refused").to_string().contains("a number is not finite"));
    let mut layer = KeyLayer::new(1, 1, vec![1.0], vec![f32::NAN]);
    let mut key = KeySidecar { layers: BTreeMap::from([(3, layer.clone())]), model_hash: Sha::of(b"") };
    assert!(key.save(&path).expect_err("refused").to_string().contains("tensor layers.3.query: expected finite"));
    layer.query = vec![1.0, 2.0];
    key.layers.insert(3, layer);
    assert!(matches!(key.save(&path), Err(FormatError::WrongTensor { .. })));
    assert!(!path.exists());
}

#[test]
fn one_sidecar_is_not_read_as_the_other() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("v.safetensors");
    let layer = ValueLayer { n_kv_heads: 1, head_dim: 1, value: vec![1.0] };
    let value = ValueSidecar { layers: BTreeMap::from([(0, layer)]), model_hash: Sha::of(b"") };
    value.save(&path).expect("saves");
    let error = KeySidecar::load(&path).expect_err("it holds values").to_string();
    assert!(error.contains("format = wush-key-transforms, found \"wush-value-transforms\""), "{error}");
    assert!(Transforms::load(&path).is_err());
    assert!(matches!(KeySidecar::load(&dir.path().join("none")), Err(FormatError::Io { .. })));
}

/// What is optional is in all layers or in none, of the layer's shape, and finite.
#[test]
fn optional_tensors_are_complete_or_absent() {
    let error = changed(|tensors, _| drop(tensors.remove("layers.2.key_mean")));
    assert!(matches!(&error, FormatError::MissingTensor { name, .. } if name == "layers.2.key_mean"), "{error}");
    let cases: [(&str, &[usize], &[f64]); 3] = [
        ("layers.0.key_mean", &[2], &[1.0; 2]),
        ("layers.0.key_feedback", &[1, 1, 1], &[1.0]),
        ("layers.0.value_feedback", &[2, 2, 2], &[1.0; 8]),
    ];
    for (name, shape, values) in cases {
        let error = changed(|tensors, _| drop(tensors.insert(name.to_owned(), NewTensor::f64(shape, values))));
        assert!(matches!(&error, FormatError::WrongTensor { name: found, .. } if found == name), "{error}");
    }
    let bad = NewTensor::f64(&[1, 2], &[0.0, f64::NAN]);
    let error = changed(|tensors, _| drop(tensors.insert("layers.2.key_mean".to_owned(), bad))).to_string();
    assert!(
        error.contains("layers.2.key_mean: expected finite numbers, found NaN or infinity in head 0, coordinate 1"),
        "{error}"
    );

    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("t.safetensors");
    let mut t = transforms();
    t.layers.get_mut(&10).expect("a layer").value_feedback = None;
    let error = t.save(&path).expect_err("what is not read is not written");
    assert!(matches!(&error, FormatError::MissingTensor { name, .. } if name == "layers.10.value_feedback"), "{error}");
    let plain = KeyLayer::new(1, 1, vec![1.0], vec![1.0]);
    let centered = KeyLayer { key_mean: Some(vec![2.0]), ..plain.clone() };
    let key = KeySidecar { layers: BTreeMap::from([(0, centered), (1, plain)]), model_hash: Sha::of(b"") };
    let error = key.save(&path).expect_err("what is not read is not written");
    assert!(matches!(&error, FormatError::MissingTensor { name, .. } if name == "layers.1.key_mean"), "{error}");
    assert!(!path.exists());
}

#[test]
fn centered_heads_are_those_with_a_mean() {
    let zeros = || HeadMatrices::zeros(3, 2);
    let mut layer = LayerTransforms::new(zeros(), zeros());
    assert_eq!(layer.centered_keys(), [0; 0]);
    layer.key_mean = Some(vec![0.0, 0.0, 0.0, -1.0, 2.0, 0.0]);
    assert_eq!(layer.centered_keys(), [1, 2]);
}

/// `[n, d]` and the values of two tensors `[n, d, d]`.
fn pair() -> impl Strategy<Value = (usize, usize, Vec<f32>, Vec<f32>)> {
    let finite = prop::num::f32::NORMAL | prop::num::f32::SUBNORMAL | prop::num::f32::ZERO;
    (1_usize..4, 1_usize..5).prop_flat_map(move |(n, d)| {
        let values = || prop::collection::vec(finite, n * d * d);
        (Just(n), Just(d), values(), values())
    })
}

/// Unit lower triangular, of numbers below 1 in magnitude.
fn unit_lower(n_heads: usize, dim: usize, data: &[f32]) -> HeadMatrices {
    let element = |(at, &x): (usize, &f32)| match (at / dim % dim).cmp(&(at % dim)) {
        std::cmp::Ordering::Less => 0.0,
        std::cmp::Ordering::Equal => 1.0,
        std::cmp::Ordering::Greater => f64::from(x) / f64::from(f32::MAX),
    };
    HeadMatrices { n_heads, dim, data: data.iter().enumerate().map(element).collect() }
}

/// The same cases in every run.
fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, rng_seed: RngSeed::Fixed(1), ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config(48))]

    #[test]
    fn sidecars_and_transforms_read_back(
        layers in prop::collection::btree_map(0_usize..200, pair(), 1..4),
        with_extras in any::<bool>(),
    ) {
        let model_hash = Sha::of(b"model");
        let mut keys = KeySidecar { layers: BTreeMap::new(), model_hash };
        let mut values = ValueSidecar { layers: BTreeMap::new(), model_hash };
        let mut feedbacks = ValueFeedback { layers: BTreeMap::new(), model_hash };
        for (&layer, &(n_kv_heads, head_dim, ref first, ref second)) in &layers {
            let mut key = KeyLayer::new(n_kv_heads, head_dim, first.clone(), second.clone());
            if with_extras {
                key.key_mean = Some(second[..n_kv_heads * head_dim].to_vec());
                key.key_feedback = Some(first.clone());
            }
            keys.layers.insert(layer, key);
            let feedback = FeedbackLayer { n_kv_heads, head_dim, value_feedback: second.clone() };
            feedbacks.layers.insert(layer, feedback);
            values.layers.insert(layer, ValueLayer { n_kv_heads, head_dim, value: first.clone() });
        }
        round_trip!(KeySidecar, keys);
        round_trip!(ValueSidecar, values);
        round_trip!(ValueFeedback, feedbacks);
        let wide = |n_heads: &usize, dim: &usize, data: &[f32]| {
            HeadMatrices { n_heads: *n_heads, dim: *dim, data: data.iter().map(|&x| f64::from(x) / 3.0).collect() }
        };
        let layers = layers.iter().map(|(&layer, (n, d, key, value))| {
            let mut transforms = LayerTransforms::new(wide(n, d, key), wide(n, d, value));
            if with_extras {
                transforms.key_mean = Some(wide(n, d, key).data[..n * d].to_vec());
                transforms.key_feedback = Some(unit_lower(*n, *d, value));
                transforms.value_feedback = Some(unit_lower(*n, *d, key));
            }
            (layer, transforms)
        });
        let center_keys = if with_extras { "auto" } else { "never" }.to_owned();
        let solve = Solve { center_keys, feedback: with_extras, ..transforms().solve };
        round_trip!(Transforms, Transforms { layers: layers.collect(), solve, report: vec![], ..transforms() });
    }

    #[test]
    fn arbitrary_text_is_never_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = Manifest::parse(Path::new("m"), &bytes);
    }

    #[test]
    fn every_finite_float_of_a_manifest_reads_back(bits in any::<u64>()) {
        let value = f64::from_bits(bits);
        prop_assume!(value.is_finite());
        let mut m = manifest();
        m.fold.max_rel_error = value;
        let json = serde_json::to_vec(&m).expect("serializes");
        let read = Manifest::parse(Path::new("m"), &json).expect("valid").fold.max_rel_error;
        prop_assert_eq!(read.to_bits(), value.to_bits());
    }
}
