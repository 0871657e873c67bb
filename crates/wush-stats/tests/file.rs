//! The file: round trip, determinism, and every way in which a hostile one is refused.

mod common;

use std::collections::BTreeMap;
use std::path::Path;

use common::{sequences, statistics};
use proptest::prelude::*;
use wush_format::FormatError;
use wush_format::hash::Sha;
use wush_format::tensor_file::{NewTensor, TensorFile, write_tensor_file};
use wush_stats::{Statistics, StatsError};

type Tensors = BTreeMap<String, NewTensor>;
type Metadata = BTreeMap<String, String>;
type Edit<'a> = &'a dyn Fn(&mut Tensors);

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn save_and_load_are_inverse(seed in any::<u64>(), n in 0usize..5) {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let (first, second) = (dir.path().join("a"), dir.path().join("b"));
        let statistics = statistics(&sequences(n, seed));
        let written = statistics.save(&first).expect("writes");
        let loaded = Statistics::load(&first).expect("what was saved loads");
        prop_assert_eq!(&loaded, &statistics);
        prop_assert_eq!(written, loaded.save(&second).expect("writes"));
    }
}

fn parts(path: &Path) -> (Tensors, Metadata) {
    let file = TensorFile::open(path).expect("valid");
    let tensor = |name: &String| {
        let view = file.tensor(name).expect("there");
        NewTensor { dtype: view.dtype, shape: view.shape.to_vec(), bytes: view.bytes.to_vec() }
    };
    (file.tensors().keys().map(|name| (name.clone(), tensor(name))).collect(), file.metadata().clone())
}

/// Loads a good file after an edit.
fn load_edited(edit: impl FnOnce(&mut Tensors, &mut Metadata)) -> Result<Statistics, StatsError> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("stats.safetensors");
    statistics(&sequences(4, 1)).save(&path).expect("writes");
    let (mut tensors, mut metadata) = parts(&path);
    edit(&mut tensors, &mut metadata);
    // Who edits a file on purpose hashes it again.
    if metadata.contains_key("content_hash") {
        metadata.insert("content_hash".into(), content_hash(&tensors, &metadata));
    }
    write_tensor_file(&path, &tensors, &metadata).expect("writes");
    Statistics::load(&path)
}

/// As `docs/formats.md` has it.
fn content_hash(tensors: &Tensors, metadata: &Metadata) -> String {
    let info = metadata.get("info").map_or("", String::as_str);
    let mut lines = format!("info\0{}\n", Sha::of(info.as_bytes()));
    tensors.iter().for_each(|(name, tensor)| lines += &format!("{name}\0{}\n", Sha::of(&tensor.bytes)));
    Sha::of(lines.as_bytes()).to_string()
}

/// What an unfinished run saved is read by who goes on from it, and passes for finished statistics nowhere.
#[test]
fn the_sums_of_an_unfinished_run_are_no_statistics() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("stats.safetensors");
    let statistics = statistics(&sequences(4, 1));
    statistics.save_unfinished(&path, 9).expect("writes");
    let error = Statistics::load(&path).expect_err("5 sequences are missing");
    let expected = format!("{}: holds the sums of an unfinished run: 4 of 9 sequences are done", path.display());
    assert_eq!(error.to_string(), expected);
    assert!(error.hint().is_some());
    assert_eq!(Statistics::load_saved(&path).expect("to go on from"), statistics);

    // Without its mark it is another file than the one that was written.
    let (tensors, mut metadata) = parts(&path);
    metadata.remove("unfinished");
    write_tensor_file(&path, &tensors, &metadata).expect("writes");
    for loaded in [Statistics::load(&path), Statistics::load_saved(&path)] {
        assert!(loaded.expect_err("changed").to_string().contains("its content is not what was written"));
    }
    statistics.save(&path).expect("writes");
    assert_eq!(Statistics::load_saved(&path).expect("finished ones, too"), statistics);
}

fn set(tensors: &mut Tensors, name: &str, at: usize, value: f64) {
    let bytes = &mut tensors.get_mut(name).expect("there").bytes;
    bytes[at * 8..][..8].copy_from_slice(&value.to_le_bytes());
}

fn get(tensors: &Tensors, name: &str, at: usize) -> f64 {
    f64::from_le_bytes(tensors[name].bytes[at * 8..][..8].try_into().expect("8 bytes"))
}

#[test]
fn an_unedited_file_loads() {
    load_edited(|_, _| ()).expect("nothing is wrong with it");
}

#[test]
fn matrices_that_no_calibration_gives_are_refused_by_name() {
    for role in ["key_gram", "query_gram", "value_gram", "output_gram"] {
        let name = &format!("layers.1.{role}");
        // Row 2, column 3 of head 0, d = 6: index 15; its mirror 20; the diagonal of row 3: 21.
        let edits: [(&str, Edit<'_>); 6] = [
            ("NaN", &|t| set(t, name, 15, f64::NAN)),
            ("mirrored NaN", &|t| set(t, name, 20, f64::NAN)),
            ("infinity", &|t| set(t, name, 21, f64::INFINITY)),
            ("negative diagonal", &|t| set(t, name, 21, -1.0)),
            ("beyond its diagonal", &|t| {
                set(t, name, 15, 1e9);
                set(t, name, 20, 1e9);
            }),
            ("asymmetric", &|t| {
                set(t, name, 0, 10.0);
                set(t, name, 7, 10.0);
                set(t, name, 1, 1.0);
                set(t, name, 6, 1.1);
            }),
        ];
        for (what, edit) in edits {
            let error = load_edited(|t, _| edit(t)).expect_err(what);
            let StatsError::Format(FormatError::WrongTensor { name: found, .. }) = &error else {
                panic!("{role}, {what}: {error}")
            };
            assert_eq!(found, name, "{what}");
        }
    }
}

#[test]
fn asymmetry_within_rounding_is_accepted() {
    load_edited(|t, _| {
        let x = get(t, "layers.1.key_gram", 1);
        set(t, "layers.1.key_gram", 1, x * (1.0 + 1e-13));
    })
    .expect("rounding");
}

#[test]
fn key_sums_beyond_what_the_gram_allows_are_refused() {
    for value in [1e6, -1e6, f64::NAN, f64::INFINITY] {
        let error = load_edited(|t, _| set(t, "layers.0.key_sum", 5, value)).expect_err("impossible");
        assert!(error.to_string().contains("layers.0.key_sum") && error.to_string().contains("head 1"), "{error}");
    }
}

#[test]
fn tensors_that_are_missing_unknown_or_misshapen_are_refused_by_name() {
    let remove = |name: &'static str| load_edited(move |t, _| drop(t.remove(name))).expect_err(name).to_string();
    for name in ["layers.0.key_gram", "layers.1.output_gram", "layers.1.key_sum"] {
        assert!(remove(name).contains(name), "{name}");
    }
    for name in ["layers.2.key", "layers.00.key_gram", "layers.+1.key_gram", "layers.99999999999999999999.key_sum", "x"]
    {
        let add = |t: &mut Tensors, _: &mut Metadata| drop(t.insert(name.to_owned(), NewTensor::f64(&[1], &[0.0])));
        let error = load_edited(add).expect_err(name).to_string();
        assert!(error.contains("unknown tensor") && error.contains(name), "{error}");
    }
    let reshape = |shape: &'static [usize]| {
        load_edited(move |t, _| t.get_mut("layers.0.key_sum").expect("there").shape = shape.to_vec())
    };
    for shape in [&[8][..], &[4, 2], &[1, 8], &[2, 4, 1]] {
        assert!(matches!(reshape(shape), Err(StatsError::Format(FormatError::WrongTensor { .. }))), "{shape:?}");
    }
    let narrow = |t: &mut Tensors, _: &mut Metadata| {
        drop(t.insert("layers.0.key_gram".into(), NewTensor::f32(&[2, 4, 4], &[0.0; 32])));
    };
    assert!(load_edited(narrow).expect_err("f32").to_string().contains("layers.0.key_gram"));
    assert!(load_edited(|t, _| t.clear()).expect_err("empty").to_string().contains("no layer"));
}

#[test]
fn files_of_other_kinds_and_versions_are_refused() {
    let with = |key: &'static str, value: &'static str| {
        load_edited(move |_, m| drop(m.insert(key.into(), value.into()))).expect_err(key)
    };
    assert!(with("format", "wush-transforms").to_string().contains("wush-statistics"));
    assert!(matches!(with("version", "1"), StatsError::Format(FormatError::Version { expected: 4, .. })));
    for key in ["format", "version", "info", "content_hash"] {
        load_edited(move |_, m| drop(m.remove(key))).expect_err(key);
    }
    assert!(with("info", "{}").to_string().contains("info"));
    assert!(with("info", "[[[[").hint().is_some());
}

#[test]
fn counts_that_contradict_each_other_are_refused() {
    let edit_info = |key: &'static str, value: serde_json::Value| {
        load_edited(move |_, m| {
            let mut info: serde_json::Value = serde_json::from_str(&m["info"]).expect("valid");
            info[key] = value;
            m.insert("info".into(), info.to_string());
        })
    };
    for (key, value) in [
        ("positions", 100.into()),
        ("positions", 1.into()),
        ("max_seq_len", u64::MAX.into()),
        ("max_seq_len", 0.into()),
        ("sequence_hashes", serde_json::json!([])),
        ("sequence_hashes", serde_json::json!(["abc"])),
        ("positions", (-1).into()),
        ("format_version", 1.into()),
        ("positions", 0.into()),
        ("n_heads", 0.into()),
        ("n_heads", 3.into()),
        ("n_kv_heads", 1.into()),
        ("n_kv_heads", 0.into()),
        ("head_dim", 5.into()),
        ("source", "\u{1b}[2J".into()),
        ("model_id", "a\u{202e}b".into()),
        ("surprise", 1.into()),
    ] {
        let error = edit_info(key, value.clone()).expect_err(key);
        assert!(matches!(error, StatsError::Format(FormatError::Invalid { .. })), "{key} = {value}: {error}");
    }
}

#[test]
fn sums_beyond_the_range_of_squares_of_f32_are_refused() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("stats.safetensors");
    for scale in [1e150, 1e-150] {
        let mut stats = statistics(&sequences(4, 1));
        for layer in stats.layers.values_mut() {
            layer.value_gram.data.iter_mut().for_each(|x| *x *= scale);
        }
        stats.save(&path).expect("writes");
        let error = Statistics::load(&path).expect_err("no f32 values have such squares");
        assert!(error.to_string().contains("value_gram: expected zero or 1.96e-90 to "), "{error}");
    }
}

#[test]
fn damage_is_found_by_the_content_hash() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("stats.safetensors");
    statistics(&sequences(4, 1)).save(&path).expect("writes");
    let whole = std::fs::read(&path).expect("reads");
    let text = String::from_utf8_lossy(&whole[8..]).find("\\\"tool\\\":\\\"").expect("there") + 8 + 12;
    // The lowest bit of the last f64, which no other check can see, and a letter of the description.
    for (at, bit) in [(whole.len() - 8, 1), (text, 2)] {
        let mut bytes = whole.clone();
        bytes[at] ^= bit;
        std::fs::write(&path, bytes).expect("writes");
        let error = Statistics::load(&path).expect_err("damaged");
        assert!(error.to_string().contains("its content is not what was written"), "{error}");
        assert!(error.hint().expect("a remedy").contains("make it again"));
    }
}

#[test]
fn positions_that_the_mean_key_rules_out_are_refused() {
    // Keys (1 ± 3, 1 ∓ 3, 0, 0): along their mean they never vary, in each coordinate they do.
    let mut few = statistics(&sequences(4, 1));
    let layer = few.layers.get_mut(&0).expect("there");
    let (dim, n) = (layer.head_dim(), few.info.positions as f64);
    for head in 0..layer.n_kv_heads() {
        let gram = layer.key_gram.head_mut(head);
        gram.fill(0.0);
        (gram[0], gram[1], gram[dim], gram[dim + 1]) = (10.0 * n, -8.0 * n, -8.0 * n, 10.0 * n);
        layer.key_sum[head * dim..][..dim].fill(0.0);
        layer.key_sum[head * dim..][..2].fill(n);
    }
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("stats.safetensors");
    few.save(&path).expect("writes");
    Statistics::load(&path).expect("the sums of exactly these positions");
    few.info.positions -= 1;
    few.save(&path).expect("writes");
    let error = Statistics::load(&path).expect_err("one position less").to_string();
    assert!(error.contains("layers.0.key_sum"), "{error}");
}

#[test]
fn what_could_not_be_loaded_is_not_saved() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("stats.safetensors");
    let mut statistics = statistics(&sequences(2, 1));
    statistics.layers.get_mut(&0).expect("there").value_gram.data[3] = f64::NAN;
    let error = statistics.save(&path).expect_err("NaN");
    assert!(error.to_string().contains("layers.0.value_gram"), "{error}");
    let mut named = common::statistics(&sequences(2, 1));
    named.info.source = "a\u{1b}[2J.txt".into();
    assert!(named.save(&path).expect_err("an escape").to_string().contains("control character"));
    assert!(!path.exists());
}
