//! Key transforms: loading, refusing what is wrong, both products against f64, and that attention does not change.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use wush_format::FormatError;
use wush_format::bundle::{FeedbackLayer, KeyLayer, KeySidecar, ValueFeedback};
use wush_format::hash::{Sha, hash_file};
use wush_format::manifest::{Basis, FileEntry, FoldReport, MANIFEST_VERSION, Manifest, Solve, Source, Status};
use wush_runtime::{CacheConfig, Chunk, KeyTransforms, KvCache, Part, Precision, RuntimeError, Windows};

use crate::common::{Numbers, config, layer};

const HASH: Sha = Sha([3; 32]);

/// Well-conditioned matrices `[n, d, d]` and their inverse transposes: products of Householder reflections and a diagonal.
fn pair(n: usize, d: usize, numbers: &mut Numbers) -> (Vec<f32>, Vec<f32>) {
    let (mut key, mut query) = (Vec::new(), Vec::new());
    for _ in 0..n {
        let [u, v, s] = [(), (), ()].map(|()| numbers.take(d));
        let size = |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
        let (uu, vv) = (size(&u), size(&v));
        let reflect = |w: &[f32], ww: f64, i: usize, j: usize| {
            f64::from(u8::from(i == j)) - 2.0 * f64::from(w[i]) * f64::from(w[j]) / ww
        };
        let scale = |k: usize| (f64::from(s[k]) * 0.5).exp();
        for i in 0..d {
            for j in 0..d {
                let term = |k: usize| (reflect(&u, uu, i, k) * reflect(&v, vv, k, j), scale(k));
                key.push((0..d).map(term).map(|(r, s)| r * s).sum::<f64>() as f32);
                query.push((0..d).map(term).map(|(r, s)| r / s).sum::<f64>() as f32);
            }
        }
    }
    (key, query)
}

fn sidecar(n_kv_heads: usize, head_dim: usize) -> KeySidecar {
    let (key, query) = pair(n_kv_heads, head_dim, &mut Numbers::new(9));
    let layers = BTreeMap::from([(0, KeyLayer::new(n_kv_heads, head_dim, key, query))]);
    KeySidecar { layers, model_hash: HASH }
}

fn saved(dir: &Path, sidecar: &KeySidecar) -> PathBuf {
    let path = dir.join("key_transforms.safetensors");
    sidecar.save(&path).expect("saved");
    path
}

/// T_K (k − μ) is T_K applied to k − μ, up to the rounding of both ways in f32.
#[test]
fn means_are_taken_from_keys() {
    let (n_kv, d) = (2, 64);
    let mut sidecar = sidecar(n_kv, d);
    let plain = KeyTransforms::from_sidecar(Path::new("sidecar"), &sidecar).expect("an inverse pair");
    let means = Numbers::new(5).take(n_kv * d);
    sidecar.layers.get_mut(&0).expect("a layer").key_mean = Some(means.clone());
    let centered = KeyTransforms::from_sidecar(Path::new("sidecar"), &sidecar).expect("an inverse pair");
    let mut found = Numbers::new(6).take(3 * n_kv * d);
    let mut expected: Vec<f32> = found.iter().enumerate().map(|(at, k)| k - means[at % (n_kv * d)]).collect();
    centered.transform_keys(0, &mut found).expect("whole");
    plain.transform_keys(0, &mut expected).expect("whole");
    let largest = expected.iter().fold(0.0f32, |max, x| max.max(x.abs()));
    for (x, y) in found.iter().zip(&expected) {
        // Sums of d products a way, each rounded to f32: d·ε of numbers that are at most some times the largest.
        assert!((x - y).abs() <= d as f32 * f32::EPSILON * largest, "{x} against {y}, the largest {largest}");
    }
}

#[test]
fn products_are_those_of_f64() {
    for (n_kv, group, d) in [(2, 3, 64), (1, 1, 80), (3, 4, 16), (2, 5, 20)] {
        let sidecar = sidecar(n_kv, d);
        let transforms = KeyTransforms::from_sidecar(Path::new("sidecar"), &sidecar).expect("an inverse pair");
        for n_tokens in [0, 1, 3, 64, 65, 130] {
            let mut numbers = Numbers::new(n_tokens as u64);
            let (keys, queries) = (numbers.take(n_tokens * n_kv * d), numbers.take(n_tokens * n_kv * group * d));
            let (mut new_keys, mut new_queries) = (keys.clone(), queries.clone());
            transforms.transform_keys(0, &mut new_keys).expect("whole");
            transforms.transform_queries(0, n_kv * group, &mut new_queries).expect("whole");
            check(&sidecar.layers[&0].key, &keys, &new_keys, (n_kv, 1, d));
            check(&sidecar.layers[&0].query, &queries, &new_queries, (n_kv, group, d));
        }
    }
}

/// Every head of `[tokens, n_kv, group, d]` is its matrix times what it was, within the error of d products in f32.
fn check(matrices: &[f32], before: &[f32], after: &[f32], (n_kv, group, d): (usize, usize, usize)) {
    for (vector, (x, y)) in before.chunks_exact(d).zip(after.chunks_exact(d)).enumerate() {
        let matrix = &matrices[vector / group % n_kv * d * d..][..d * d];
        for (row, found) in matrix.chunks_exact(d).zip(y) {
            let terms = row.iter().zip(x).map(|(a, b)| f64::from(*a) * f64::from(*b));
            let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
            let bound = (d as f64 + 4.0) * 2f64.powi(-24) * size;
            assert!((f64::from(*found) - sum).abs() <= bound, "vector {vector}: {found} for {sum}");
        }
    }
}

#[test]
fn attention_does_not_change() {
    /// Both factors are rounded to f32 (their product is off by 2⁻²³ of |key||query|ᵀ, condition number about 10 here) and
    /// products sum 64 terms in f32: logits move by less than 1e-5, and outputs of values in ±4 by less than that times 8. A mean
    /// moves all logits of a query alike, so it changes nothing either.
    const TRANSFORMED_TOL: f32 = 1e-4;
    let mut sidecar = sidecar(2, 64);
    for mean in [None, Some(Numbers::new(6).take(2 * 64))] {
        sidecar.layers.get_mut(&0).expect("there").key_mean = mean;
        let transforms = KeyTransforms::from_sidecar(Path::new("sidecar"), &sidecar).expect("an inverse pair");
        attends_alike(&transforms, TRANSFORMED_TOL);
    }
}

fn attends_alike(transforms: &KeyTransforms, tol: f32) {
    let plain = layer(6, 2, 64, [16, 16]);
    let mut cache = KvCache::new(config(plain, Windows::STUDY, 64)).expect("valid");
    transforms.check(cache.config()).expect("it fits");
    let mut numbers = Numbers::new(5);
    let n_tokens = 200;
    let [mut queries, mut keys, values] = [6, 2, 2].map(|heads| numbers.take(n_tokens * heads * 64));
    let mut outs = [(); 2].map(|()| vec![0.0; queries.len()]);
    for out in &mut outs {
        let part = Part { sequence: cache.add(), n_tokens };
        cache.step(0, &[part], Chunk { queries: &queries, keys: &keys, values: &values }, out).expect("valid");
        transforms.transform_keys(0, &mut keys).expect("whole");
        transforms.transform_queries(0, 6, &mut queries).expect("whole");
    }
    for (a, b) in outs[0].iter().zip(&outs[1]) {
        assert!((a - b).abs() <= tol, "{a} and {b}");
    }
}

#[test]
fn wrong_sidecars_are_refused() {
    let dir = tempfile::tempdir().expect("room");
    let good = sidecar(2, 32);
    let path = saved(dir.path(), &good);
    let transforms = KeyTransforms::load(&path, HASH).expect("good");
    assert_eq!(transforms.layers().collect::<Vec<_>>(), [0]);

    let error = KeyTransforms::load(&path, Sha([4; 32])).expect_err("another model's");
    let expected = format!("made for the model with hash {HASH}, this model's hash is {}", Sha([4; 32]));
    assert!(error.to_string().contains(&expected), "{error}");

    for at in [0, 700, 2 * 32 * 32 - 1] {
        let mut bad = good.clone();
        // One element off by 1e-4 of the rows' size, or a matrix that was swapped for its transpose.
        bad.layers.get_mut(&0).expect("there").query[at] += 1e-4;
        let path = saved(dir.path(), &bad);
        let error = KeyTransforms::load(&path, HASH).expect_err("no inverse");
        assert!(matches!(error, RuntimeError::NotInverse { layer: 0, head, .. } if head == at / 1024), "{error}");
    }
    let mut swapped = good.clone();
    let entry = swapped.layers.get_mut(&0).expect("there");
    std::mem::swap(&mut entry.key, &mut entry.query);
    entry.query = good.layers[&0].query.clone();
    let path = saved(dir.path(), &swapped);
    assert!(matches!(KeyTransforms::load(&path, HASH), Err(RuntimeError::NotInverse { .. })));
    std::fs::write(&path, b"no sidecar").expect("written");
    assert!(matches!(KeyTransforms::load(&path, HASH), Err(RuntimeError::Format(_))));
}

#[test]
fn means_that_are_no_keys_are_refused() {
    let load = |edit: &dyn Fn(&mut KeyLayer)| {
        let mut sidecar = sidecar(2, 32);
        let layer = sidecar.layers.get_mut(&0).expect("there");
        layer.key_mean = Some(vec![0.5; 64]);
        edit(layer);
        KeyTransforms::from_sidecar(Path::new("sidecar"), &sidecar)
    };
    let mean = |value: f32| move |layer: &mut KeyLayer| layer.key_mean.as_mut().expect("there")[37] = value;
    assert!(load(&|_| {}).is_ok());
    for value in [f32::NAN, f32::INFINITY, -2f32.powi(121)] {
        let error = load(&mean(value)).expect_err("no key").to_string();
        let expected = "sidecar: layer 0, KV head 1: coordinate 5 of the mean key is ";
        assert!(error.starts_with(expected) && error.ends_with("expected a magnitude up to 2^120"), "{error}");
    }
    // Half of what a key may be, and eight times as much once it is transformed.
    let scaled = |layer: &mut KeyLayer| {
        mean(2f32.powi(119))(layer);
        layer.key.iter_mut().for_each(|x| *x *= 16.0);
        layer.query.iter_mut().for_each(|x| *x /= 16.0);
    };
    let error = load(&scaled).expect_err("no key").to_string();
    assert!(error.contains("KV head 1") && error.contains("of the transformed mean key is "), "{error}");
    let short = load(&|layer| layer.key_mean = Some(vec![0.5; 63]));
    assert!(matches!(short, Err(RuntimeError::Length { expected: 64, found: 63, .. })));
}

#[test]
fn feedback_that_no_metric_has_is_refused() {
    let mut cache = KvCache::new(config(layer(4, 2, 32, [2, 2]), Windows::STUDY, 64)).expect("valid");
    let mut matrices = lower(2, 32);
    for (value, is_good) in [(2f32.powi(26), true), (2f32.powi(26) + 8.0, false), (f32::NAN, false)] {
        // Row 9, column 3 of head 1.
        matrices[1024 + 9 * 32 + 3] = value;
        let set = cache.set_feedback(0, Some(&matrices), None);
        assert_eq!(set.is_ok(), is_good, "{value}");
        let Err(error) = set else { continue };
        let message = error.to_string();
        assert!(message.starts_with("layer 0: feedback: element [9, 3] is ") && message.contains("2^26"), "{message}");
        assert!(error.hint().is_some());
    }
}

/// Unit lower triangular matrices `[n, d, d]`.
fn lower(n: usize, d: usize) -> Vec<f32> {
    let mut numbers = Numbers::new(12);
    let element = |at: usize| match (at / d % d).cmp(&(at % d)) {
        std::cmp::Ordering::Less => 0.0,
        std::cmp::Ordering::Equal => 1.0,
        std::cmp::Ordering::Greater => 0.2 * numbers.take(1)[0],
    };
    (0..n * d * d).map(element).collect()
}

/// A bundle's folder as far as the runtime reads it.
fn bundle(dir: &Path, keys: &KeySidecar, values: Option<&ValueFeedback>) {
    let folder = dir.join("wush");
    std::fs::create_dir_all(&folder).expect("created");
    keys.save(&folder.join("key_transforms.safetensors")).expect("saved");
    if let Some(values) = values {
        values.save(&folder.join("value_feedback.safetensors")).expect("saved");
    }
    let entry = |name: &str| {
        let (sha256, n_bytes) = hash_file(&folder.join(name)).ok()?;
        Some(FileEntry { path: format!("wush/{name}"), n_bytes, sha256 })
    };
    let files = ["key_transforms.safetensors", "value_feedback.safetensors"].into_iter().filter_map(entry).collect();
    let has_means = keys.layers.values().any(|layer| layer.key_mean.is_some());
    let manifest = Manifest {
        format_version: MANIFEST_VERSION,
        tool: "wush".to_owned(),
        status: Status::Complete,
        source: Source {
            id: "model".to_owned(),
            revision: None,
            family: "llama".to_owned(),
            model_hash: Sha([1; 32]),
            files: Vec::new(),
        },
        basis: Basis { kind: "folded-values".to_owned(), model_hash: HASH },
        solve: Solve {
            feedback: values.is_some(),
            center_keys: if has_means { "auto" } else { "never" }.to_owned(),
            ..Solve::as_published("wush")
        },
        calibration: None,
        layers: Vec::new(),
        fold: FoldReport { dtype: "keep".to_owned(), max_rel_error: 1e-3, worst_layer: 0 },
        equivalence: None,
        sensitivity: None,
        files,
    };
    manifest.save(&folder.join("manifest.json")).expect("saved");
}

#[test]
fn a_bundle_gives_its_transforms_and_its_feedback() {
    let dir = tempfile::tempdir().expect("room");
    let (mut keys, config) = (sidecar(2, 32), config(layer(4, 2, 32, [2, 2]), Windows::STUDY, 64));
    let mut cache = KvCache::new(config.clone()).expect("valid");
    bundle(dir.path(), &keys, None);
    assert_eq!(KeyTransforms::of_bundle(dir.path()).expect("good").model_hash(), HASH);
    assert!(!cache.set_feedback_of_bundle(dir.path()).expect("none there"));

    let of_layer = |n_kv_heads, head_dim, value_feedback| FeedbackLayer { n_kv_heads, head_dim, value_feedback };
    let file = |layer, model_hash| ValueFeedback { layers: BTreeMap::from([(0, layer)]), model_hash };
    keys.layers.get_mut(&0).expect("there").key_feedback = Some(lower(2, 32));
    bundle(dir.path(), &keys, Some(&file(of_layer(2, 32, lower(2, 32)), HASH)));
    assert!(cache.set_feedback_of_bundle(dir.path()).expect("good"));
    // The same as setting it by hand, and not as without.
    let mut by_hand = KvCache::new(config.clone()).expect("valid");
    by_hand.set_feedback(0, Some(&lower(2, 32)), Some(&lower(2, 32))).expect("good");
    let [a, b, c] = [cache.clone(), by_hand, KvCache::new(config).expect("valid")].map(|mut cache| {
        let part = Part { sequence: cache.add(), n_tokens: 300 };
        let kv = Numbers::new(3).take(300 * 64);
        cache.append(0, &[part], &kv, &kv).expect("valid");
        cache.flush(0, &[part]).expect("valid");
        let path = dir.path().join("cache");
        cache.save(part.sequence, &path).expect("saved");
        std::fs::read(path).expect("there")
    });
    assert!(a == b && a != c);

    bundle(dir.path(), &keys, Some(&file(of_layer(2, 32, lower(2, 32)), Sha([8; 32]))));
    assert_unfit(cache.set_feedback_of_bundle(dir.path()), "hash of the weights");
    bundle(dir.path(), &keys, Some(&file(of_layer(8, 16, lower(8, 16)), HASH)));
    assert_unfit(
        cache.set_feedback_of_bundle(dir.path()),
        "value feedback of layer 0: expected 2 KV heads of dimension 32",
    );
}

fn assert_unfit<T: std::fmt::Debug>(result: Result<T, RuntimeError>, expected: &str) {
    let error = result.expect_err(expected);
    assert!(matches!(error, RuntimeError::Format(FormatError::Unfit { .. })), "{error:?}");
    assert!(error.to_string().contains(expected), "{error}");
}

/// A layer without transforms would run with others: its keys as they are.
#[test]
fn a_bundle_without_all_that_it_should_have_is_refused_everywhere() {
    let dir = tempfile::tempdir().expect("room");
    let one = layer(4, 2, 32, [2, 2]);
    let two_layers = CacheConfig { windows: Windows::STUDY, ..CacheConfig::new(vec![one.clone(), one.clone()]) };
    let mut keys = sidecar(2, 32);
    bundle(dir.path(), &keys, None);
    let transforms = KeyTransforms::of_bundle(dir.path()).expect("a whole bundle of one layer");
    assert!(matches!(transforms.check(&two_layers), Err(RuntimeError::NoTransforms { layer: 1 })));
    let expected = "key transforms of layer 1: expected 2 KV heads of dimension 32, found none";
    assert_unfit(KvCache::of_bundle(two_layers.clone(), dir.path()), expected);
    let mut cache = KvCache::new(two_layers).expect("valid");
    assert_unfit(cache.set_feedback_of_bundle(dir.path()), expected);

    // The manifest says feedback, and the sidecars have none of the keys'.
    let lower_layer = FeedbackLayer { n_kv_heads: 2, head_dim: 32, value_feedback: lower(2, 32) };
    let values = ValueFeedback { layers: BTreeMap::from([(0, lower_layer)]), model_hash: HASH };
    bundle(dir.path(), &keys, Some(&values));
    assert_unfit(
        KeyTransforms::of_bundle(dir.path()),
        "key_feedback, by solve of the manifest: expected in every layer",
    );
    keys.layers.get_mut(&0).expect("there").key_feedback = Some(lower(2, 32));
    bundle(dir.path(), &keys, Some(&values));
    let other = CacheConfig { model_hash: Some(Sha([8; 32])), ..CacheConfig::new(vec![one.clone()]) };
    assert_unfit(KvCache::of_bundle(other, dir.path()), "hash of the weights: expected 0808");
    let (cache, transforms) = KvCache::of_bundle(CacheConfig::new(vec![one]), dir.path()).expect("a whole bundle");
    assert_eq!(cache.config().key_transforms, Some(transforms.hash()));
    assert_eq!(cache.config().model_hash, Some(HASH));
}

/// Bundles of the same weights, and a cache saved under the first: the numbers mean something else under every other.
#[test]
fn a_cache_of_other_transforms_means_feedback_or_positions_is_refused() {
    let dir = tempfile::tempdir().expect("room");
    let path = dir.path().join("cache");
    let mut keys = sidecar(2, 32);
    let entry = keys.layers.get_mut(&0).expect("there");
    (entry.key_mean, entry.key_feedback) = (Some(vec![0.5; 64]), Some(lower(2, 32)));
    let values = |scale: f32| {
        let value_feedback = lower(2, 32).iter().map(|&x| if x == 1.0 { x } else { scale * x }).collect();
        let layer = FeedbackLayer { n_kv_heads: 2, head_dim: 32, value_feedback };
        ValueFeedback { layers: BTreeMap::from([(0, layer)]), model_hash: HASH }
    };
    let base = config(layer(4, 2, 32, [2, 2]), Windows::STUDY, 64);
    let base = CacheConfig { rope: Some("yarn:4".to_owned()), ..base };
    let open = |keys: &KeySidecar, values: &ValueFeedback, config: &CacheConfig| {
        bundle(dir.path(), keys, Some(values));
        KvCache::of_bundle(config.clone(), dir.path()).expect("a bundle").0
    };
    let mut cache = open(&keys, &values(1.0), &base);
    let part = Part { sequence: cache.add(), n_tokens: 300 };
    let kv = Numbers::new(3).take(300 * 64);
    cache.append(0, &[part], &kv, &kv).expect("valid");
    cache.save(part.sequence, &path).expect("saved");
    open(&keys, &values(1.0), &base).load(&path).expect("the same bundle");

    let other_keys = |edit: fn(&mut KeyLayer)| {
        let mut keys = keys.clone();
        edit(keys.layers.get_mut(&0).expect("there"));
        keys
    };
    let scaled = other_keys(|layer| {
        layer.key.iter_mut().for_each(|x| *x *= 2.0);
        layer.query.iter_mut().for_each(|x| *x *= 0.5);
    });
    let other_mean = other_keys(|layer| layer.key_mean.as_mut().expect("there")[40] = 0.25);
    let plain = CacheConfig { rope: None, ..base.clone() };
    let mut without = KvCache::new(CacheConfig { model_hash: Some(HASH), ..base.clone() }).expect("valid");
    let mut no_feedback = open(&keys, &values(1.0), &base);
    no_feedback.set_feedback(0, None, None).expect("none");
    for (cache, field) in [
        (&mut open(&scaled, &values(1.0), &base), "key_transforms: expected \""),
        (&mut open(&other_mean, &values(1.0), &base), "key_transforms: expected \""),
        (&mut open(&keys, &values(0.5), &base), "feedback.values: expected \""),
        (&mut no_feedback, "feedback.keys: expected null"),
        (&mut open(&keys, &values(1.0), &plain), "rope: expected null, found \"yarn:4\""),
        (&mut without, ": expected null"),
    ] {
        let error = cache.load(&path).expect_err(field);
        assert!(matches!(error, RuntimeError::OtherConfig { .. }), "{error:?}");
        let message = error.to_string();
        assert!(
            message.contains("the cache was saved with another configuration: ") && message.contains(field),
            "{message}"
        );
    }
}

#[test]
fn transforms_other_than_the_configuration_names_are_refused() {
    let from =
        |sidecar: &KeySidecar| KeyTransforms::from_sidecar(Path::new("sidecar"), sidecar).expect("an inverse pair");
    let good = sidecar(2, 32);
    let mut other = good.clone();
    other.layers.get_mut(&0).expect("there").key_mean = Some(vec![1.0; 64]);
    let mut cache = KvCache::new(config(layer(4, 2, 32, [2, 2]), Windows::STUDY, 64)).expect("valid");
    cache.set_transforms(&from(&good)).expect("none were named");
    cache.set_transforms(&from(&good)).expect("the same");
    assert!(matches!(cache.set_transforms(&from(&other)), Err(RuntimeError::OtherTransforms { .. })));
}

#[test]
fn wrong_heads_layers_and_lengths_are_refused() {
    let transforms = KeyTransforms::from_sidecar(Path::new("sidecar"), &sidecar(2, 32)).expect("an inverse pair");
    let other = |layer| CacheConfig::new(vec![layer]);
    let error = transforms.check(&other(layer(4, 4, 32, [2, 2]))).expect_err("4 heads");
    assert_eq!(
        error.to_string(),
        "transforms or feedback of layer 0: expected (4, 32) (KV heads, head dimension), found (2, 32)"
    );
    assert!(transforms.check(&other(layer(4, 2, 64, [2, 2]))).is_err());
    transforms.check(&other(layer(8, 2, 32, [2, 2]).stored(Precision::Full, Precision::Full))).expect("it fits");

    let error = transforms.transform_keys(1, &mut []).expect_err("no layer 1");
    assert_eq!(error.to_string(), "layer 1: the sidecar has no key transforms for it");
    let error = transforms.transform_keys(0, &mut [0.0; 65]).expect_err("no whole tokens");
    assert!(error.to_string().ends_with("expected 64 elements, found 65"), "{error}");
    for (n_heads, n) in [(3, 96), (1, 32), (0, 0), (4, 127)] {
        assert!(transforms.transform_queries(0, n_heads, &mut vec![0.0; n]).is_err(), "{n_heads} heads, {n}");
    }
}
