//! Every kind of bad input gets its own message, and changes nothing.

use std::collections::BTreeMap;
use std::path::Path;

use wush_format::hash::Sha;
use wush_format::seal::seal;
use wush_format::tensor_file::{NewTensor, TensorFile, write_tensor_file};
use wush_quant::{Method, Role, ScaleDtype};
use wush_runtime::{CacheConfig, Chunk, FullDtype, KvCache, LayerConfig, Part, Precision, RuntimeError, Windows};

use crate::common::{Numbers, config, layer, precision};

/// A change of a file's tensors and metadata.
type Change<'a> = &'a dyn Fn(&mut BTreeMap<String, NewTensor>, &mut BTreeMap<String, String>);

const WINDOWS: Windows = Windows { sink: 2, keep: 4, flush: 2 };

fn base() -> CacheConfig {
    config(layer(4, 2, 16, [2, 2]), WINDOWS, 8)
}

fn filled(config: &CacheConfig, n_tokens: usize) -> (KvCache, Part) {
    let mut cache = KvCache::new(config.clone()).expect("valid");
    let part = Part { sequence: cache.add(), n_tokens };
    let kv = Numbers::new(1).take(n_tokens * config.layers[0].n_kv_heads * config.layers[0].head_dim);
    cache.append(0, &[part], &kv, &kv).expect("valid");
    cache.flush(0, &[part]).expect("valid");
    (cache, part)
}

#[test]
fn bits_out_of_range_are_named() {
    let method: Method = "quest".parse().expect("a name");
    for bits in [0, 1, 5, 7, 9, 15, 17, 255] {
        let error = Precision::new(bits, &method, Role::Key, ScaleDtype::Bf16).expect_err("no such bits");
        assert_eq!(error.to_string(), format!("bits: expected 2, 3, 4, 8, or 16 for none quantized, found {bits}"));
    }
    assert_eq!(precision(16, Role::Key), Precision::Full);
    assert_eq!([2, 3, 4, 8, 16].map(|bits| precision(bits, Role::Value).bits()), [2, 3, 4, 8, 16]);
}

#[test]
fn every_field_of_a_configuration_is_checked() {
    type Spoil = fn(&mut CacheConfig);
    let cases: [(Spoil, &str); 15] = [
        (|c| c.layers.clear(), "layers: expected 1 to 1048576, found 0"),
        (|c| c.windows.flush = 0, "windows.flush: expected 1 to 1048576, found 0"),
        (|c| c.windows.sink = usize::MAX, "windows.sink: expected 0 to"),
        (|c| c.windows.keep = 1 << 30, "windows.keep: expected 0 to"),
        (|c| c.page_tokens = 0, "page_tokens: expected 1 to 16384, found 0"),
        (|c| c.page_tokens = 1 << 20, "page_tokens: expected 1 to 16384, found 1048576"),
        (|c| c.rewind = usize::MAX, "rewind: expected 0 to"),
        (|c| c.layers[0].n_kv_heads = 0, "layer 0, n_kv_heads: expected 1 to"),
        (|c| c.layers[0].n_heads = 0, "layer 0, n_heads: expected 1 to"),
        (|c| c.layers[0].n_heads = 5, "layer 0, n_heads: expected a multiple of 2 KV heads, found 5"),
        (|c| c.layers[0].head_dim = 4096, "layer 0, head_dim: expected 1 to 2048, found 4096"),
        (|c| c.layers[0].sliding_window = Some(0), "layer 0, sliding_window: expected at least 1, or none, found 0"),
        (|c| c.layers[0].scale = f32::NAN, "layer 0, scale: expected a finite number above 0, found NaN"),
        (|c| c.layers[0].softcap = Some(-1.0), "layer 0, softcap: expected a finite number above 0, or none, found -1"),
        (|c| c.layers.push(LayerConfig { n_heads: 3, ..c.layers[0].clone() }), "layer 1, n_heads: expected a multiple"),
    ];
    for (spoil, message) in cases {
        let mut config = base();
        spoil(&mut config);
        let error = KvCache::new(config).expect_err(message).to_string();
        assert!(error.starts_with(&format!("cache configuration, {message}")), "{error}");
    }
}

#[test]
fn numbers_that_cannot_be_cached_are_found_before_anything_changes() {
    let (mut cache, part) = filled(&base(), 20);
    let before = (cache.memory(), cache.quantized(part.sequence, 0).expect("there"));
    for (role, bad) in [(0, f32::NAN), (1, f32::INFINITY), (0, f32::NEG_INFINITY), (1, 3e38)] {
        let mut kv = [vec![0.0; 5 * 2 * 16], vec![0.0; 5 * 2 * 16]];
        kv[role][3 * 32 + 16 + 7] = bad;
        let mut out = vec![0.0; 5 * 4 * 16];
        let chunk = Chunk { queries: &out.clone(), keys: &kv[0], values: &kv[1] };
        let error = cache.step(0, &[Part { n_tokens: 5, ..part }], chunk, &mut out).expect_err("a bad number");
        let what = ["key", "value"][role];
        let start = format!("layer 0, {what} of token 3 (row of the batch), KV head 1, coordinate 7: ");
        assert!(error.to_string().starts_with(&start), "{error}");
        assert!(error.hint().is_some());
    }
    assert_eq!((cache.memory(), cache.quantized(part.sequence, 0).expect("there")), before);
}

#[test]
fn wrong_lengths_layers_and_sequences_are_named() {
    let (mut cache, part) = filled(&base(), 20);
    let one = Part { n_tokens: 1, ..part };
    let (queries, kv) = (vec![0.0; 64], vec![0.0; 32]);
    let mut out = vec![0.0; 64];
    let chunk = Chunk { queries: &queries, keys: &kv, values: &kv };
    let mut check = |cache: &mut KvCache, layer, parts: &[Part], chunk, message: &str| {
        let error = cache.step(layer, parts, chunk, &mut out).expect_err(message);
        assert_eq!(error.to_string(), message);
    };
    check(&mut cache, 1, &[one], chunk, "layer 1: the cache has layers 0 to 0");
    check(
        &mut cache,
        0,
        &[one, one],
        Chunk { queries: &[0.0; 128], ..chunk },
        "layer 0, outputs [tokens, heads, head dimension]: expected 128 elements, found 64",
    );
    let short = Chunk { keys: &kv[..31], ..chunk };
    check(
        &mut cache,
        0,
        &[one],
        short,
        "layer 0, keys [tokens, KV heads, head dimension]: expected 32 elements, found 31",
    );
    let short = Chunk { values: &[], ..chunk };
    check(
        &mut cache,
        0,
        &[one],
        short,
        "layer 0, values [tokens, KV heads, head dimension]: expected 32 elements, found 0",
    );
    let short = Chunk { queries: &queries[..1], ..chunk };
    check(
        &mut cache,
        0,
        &[one],
        short,
        "layer 0, queries [tokens, heads, head dimension]: expected 64 elements, found 1",
    );
    let twice = cache.append(0, &[one, one], &[0.0; 64], &[0.0; 64]).expect_err("twice");
    assert_eq!(twice.to_string(), format!("sequence {} stands twice in one batch", part.sequence));
    let all = Part { n_tokens: 21, ..part };
    let many = cache.attend(0, &[all], &vec![0.0; 21 * 64], &mut vec![0.0; 21 * 64]).expect_err("too many");
    assert!(many.to_string().ends_with("21 query positions, but the cache holds 20 tokens"), "{many}");
    let feedback = cache.set_feedback(0, Some(&[1.0; 5]), None).expect_err("too short");
    assert!(feedback.to_string().contains("expected 512 elements, found 5"), "{feedback}");
    let feedback = cache.set_feedback(0, None, Some(&[1.0; 512])).expect_err("not triangular");
    assert!(feedback.to_string().starts_with("layer 0: feedback: element [0, 1] is 1"), "{feedback}");

    cache.remove(part.sequence).expect("there");
    let gone = [
        cache.remove(part.sequence).map(drop),
        cache.fork(part.sequence).map(drop),
        cache.truncate(part.sequence, 0),
        cache.len(part.sequence, 0).map(drop),
        cache.append(0, &[one], &kv, &kv),
    ];
    for error in gone {
        assert!(matches!(error, Err(RuntimeError::NoSequence { sequence }) if sequence == part.sequence));
    }
}

#[test]
fn a_saved_cache_of_another_configuration_is_refused_by_field() {
    let dir = tempfile::tempdir().expect("room");
    let path = dir.path().join("cache");
    let (cache, part) = filled(&base(), 40);
    cache.save(part.sequence, &path).expect("saved");
    type Edit = fn(&mut CacheConfig);
    let cases: [(Edit, &str); 11] = [
        (|c| c.key_transforms = Some(Sha([7; 32])), "key_transforms: expected \"0707"),
        (|c| c.rope = Some("yarn:4".to_owned()), "rope: expected \"yarn:4\", found null"),
        (|c| c.windows.keep = 5, "windows.keep: expected 5, found 4"),
        (|c| c.full = FullDtype::Bf16, "full: expected \"bf16\", found \"f32\""),
        (|c| c.page_tokens = 16, "page_tokens: expected 16, found 8"),
        (|c| c.model_hash = Some(Sha([7; 32])), "model_hash: expected \"0707"),
        (|c| c.layers.push(c.layers[0].clone()), "layers: expected [{"),
        (|c| c.layers[0].head_dim = 32, "layers[0].head_dim: expected 32, found 16"),
        (|c| c.layers[0].n_kv_heads = 4, "layers[0].n_kv_heads: expected 4, found 2"),
        (|c| c.layers[0].keys = precision(3, Role::Key), "layers[0].keys.packed.bits: expected 3, found 2"),
        (|c| c.layers[0].values = Precision::Full, "layers[0].values: expected \"full\", found {\"packed\""),
    ];
    for (change, message) in cases {
        let mut config = base();
        change(&mut config);
        let error = KvCache::new(config).expect("valid").load(&path).expect_err(message).to_string();
        let start = format!("{}: the cache was saved with another configuration: {message}", path.display());
        assert!(error.starts_with(&start), "{error}");
    }
    let longer = CacheConfig { rewind: 1000, ..base() };
    KvCache::new(longer).expect("valid").load(&path).expect("rewind is no property of what is stored");
}

/// Writes the file again with one change.
fn rewritten(path: &Path, change: Change<'_>) {
    let file = TensorFile::open(path).expect("a file");
    let copy = |name: &String| {
        let view = file.tensor(name).expect("there");
        (name.clone(), NewTensor { dtype: view.dtype, shape: view.shape.to_vec(), bytes: view.bytes.to_vec() })
    };
    let mut tensors = file.tensors().keys().map(copy).collect();
    let mut metadata = file.metadata().clone();
    change(&mut tensors, &mut metadata);
    // Who edits a file on purpose hashes it again.
    seal(&tensors, &mut metadata);
    write_tensor_file(path, &tensors, &metadata).expect("written");
}

#[test]
fn damaged_files_are_refused() {
    let dir = tempfile::tempdir().expect("room");
    let path = dir.path().join("cache");
    let (mut cache, part) = filled(&base(), 40);
    let refused = |cache: &KvCache, message: &str, change: Change<'_>| {
        cache.save(part.sequence, &path).expect("saved");
        rewritten(&path, change);
        let mut other = KvCache::new(base()).expect("valid");
        let error = other.load(&path).expect_err(message).to_string();
        assert!(error.contains(message), "{error}");
        assert_eq!(other.sequences().count(), 0, "nothing is left of a file that was refused");
    };
    let set = |key: &'static str, value: &'static str| {
        move |_: &mut _, metadata: &mut BTreeMap<String, String>| {
            metadata.insert(key.to_owned(), value.to_owned());
        }
    };
    refused(&cache, "format = wush-kv-cache, found \"other\"", &set("format", "other"));
    refused(&cache, "format version \"1\", expected 2", &set("version", "1"));
    refused(&cache, "metadata entry layers", &set("layers", "[{}]"));
    refused(&cache, "expected 1 layers, found 0", &set("layers", "[]"));
    for counts in [
        r#"[{"len": 40, "n_packed": 39, "n_freed": 0}]"#,
        r#"[{"len": 40, "n_packed": 34, "n_freed": 35}]"#,
        r#"[{"len": 40, "n_packed": 34, "n_freed": 8}]"#,
        r#"[{"len": 18446744073709551615, "n_packed": 34, "n_freed": 0}]"#,
    ] {
        refused(&cache, "contradict each other", &set("layers", counts));
    }
    refused(&cache, "expected U8 [2, 32, 8]", &set("layers", r#"[{"len": 40, "n_packed": 32, "n_freed": 0}]"#));
    refused(&cache, "layers.0.page_keys is missing", &|tensors, _| drop(tensors.remove("layers.0.page_keys")));
    refused(&cache, "expected 6 tensors, found 7", &|tensors, _| {
        tensors.insert("more".to_owned(), NewTensor::u8(&[1], &[0]));
    });
    refused(&cache, "a number that cannot be cached", &|tensors, _| {
        let bytes = &mut tensors.get_mut("layers.0.recent_values").expect("there").bytes;
        bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    refused(&cache, "a packed number is not finite", &|tensors, _| {
        tensors.get_mut("layers.0.page_values").expect("there").bytes[4..6].copy_from_slice(&0x7fc0u16.to_le_bytes());
    });
    cache.remove(part.sequence).expect("there");
    let error = cache.save(part.sequence, &path).expect_err("gone");
    assert!(matches!(error, RuntimeError::NoSequence { .. }), "{error}");
}

#[test]
fn no_flipped_bit_is_read() {
    let dir = tempfile::tempdir().expect("room");
    let path = dir.path().join("cache");
    let (cache, part) = filled(&base(), 12);
    cache.save(part.sequence, &path).expect("saved");
    let whole = std::fs::read(&path).expect("there");
    let mut other = KvCache::new(base()).expect("valid");
    for byte in 0..whole.len() {
        let mut flipped = whole.clone();
        flipped[byte] ^= 1 << (byte % 8);
        std::fs::write(&path, flipped).expect("written");
        assert!(other.load(&path).is_err(), "bit {} of byte {byte}", byte % 8);
    }
    assert_eq!(other.sequences().count(), 0);
    let mut last = whole;
    *last.last_mut().expect("not empty") ^= 1;
    std::fs::write(&path, last).expect("written");
    let error = other.load(&path).expect_err("a bit of the last element").to_string();
    assert!(error.contains("its content is not what was written: content_hash is \""), "{error}");
}

/// Between two layers of a forward pass there is no sequence to save, and none that would be read.
#[test]
fn layers_of_different_lengths_are_neither_saved_nor_loaded() {
    let dir = tempfile::tempdir().expect("room");
    let path = dir.path().join("cache");
    let two = CacheConfig { layers: vec![base().layers[0].clone(); 2], ..base() };
    let (mut cache, part) = filled(&two, 40);
    let error = cache.save(part.sequence, &path).expect_err("layer 1 is empty");
    assert!(matches!(error, RuntimeError::Uneven { layer: 1, expected: 40, found: 0, .. }), "{error:?}");
    assert!(error.hint().is_some() && !path.exists());
    let kv = vec![0.5; 40 * 2 * 16];
    cache.append(1, &[part], &kv, &kv).expect("valid");
    cache.flush(1, &[part]).expect("valid");
    cache.save(part.sequence, &path).expect("saved");
    rewritten(&path, &|tensors, metadata| {
        // One token less in the recent window, in everything that says so.
        let counts = r#"[{"len": 40, "n_packed": 34, "n_freed": 0}, {"len": 39, "n_packed": 34, "n_freed": 0}]"#;
        metadata.insert("layers".to_owned(), counts.to_owned());
        for name in ["layers.1.recent_keys", "layers.1.recent_values"] {
            let tensor = tensors.get_mut(name).expect("there");
            tensor.shape[1] -= 1;
            tensor.bytes = [&tensor.bytes[..3 * 64], &tensor.bytes[4 * 64..7 * 64]].concat();
        }
    });
    let error = KvCache::new(two).expect("valid").load(&path).expect_err("uneven").to_string();
    assert!(error.ends_with("layer 1 holds 39 tokens, layer 0 holds 40"), "{error}");
}
