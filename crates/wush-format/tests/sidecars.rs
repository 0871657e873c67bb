//! A bundle's sidecars against its manifest and its model: whole ones are read, and whatever does not fit is refused by name.

use std::collections::BTreeMap;
use std::path::Path;

use wush_format::FormatError;
use wush_format::bundle::{
    FeedbackLayer, KEY_TRANSFORMS, KeyLayer, KeySidecar, MANIFEST, VALUE_FEEDBACK, ValueFeedback, WUSH_DIR,
};
use wush_format::hash::{Sha, hash_file};
use wush_format::manifest::{
    Basis, FileEntry, FoldReport, HeadReport, LayerReport, MANIFEST_VERSION, Manifest, Solve, Source, Status,
};
use wush_format::sidecars::Sidecars;

const WEIGHTS: Sha = Sha([3; 32]);

/// What a bundle of two layers of one head of dimension 2 is made from.
#[derive(Clone)]
struct Parts {
    manifest: Manifest,
    keys: KeySidecar,
    values: ValueFeedback,
}

fn parts() -> Parts {
    let unit = vec![1.0, 0.0, 0.0, 1.0];
    let key = KeyLayer {
        key_mean: Some(vec![0.5, 0.0]),
        key_feedback: Some(unit.clone()),
        ..KeyLayer::new(1, 2, unit.clone(), unit.clone())
    };
    let value = FeedbackLayer { n_kv_heads: 1, head_dim: 2, value_feedback: unit };
    Parts {
        manifest: manifest(),
        keys: KeySidecar { layers: BTreeMap::from([(0, key.clone()), (1, key)]), model_hash: WEIGHTS },
        values: ValueFeedback { layers: BTreeMap::from([(0, value.clone()), (1, value)]), model_hash: WEIGHTS },
    }
}

fn manifest() -> Manifest {
    let figures = HeadReport {
        cond_gram: 1.0,
        cond_hessian: 1.0,
        cond_transform: 1.0,
        rank_gram: 2,
        rank_hessian: 2,
        dead_channels: 0,
        trace_product_over_bound: 1.0,
        predicted_gain: 1.0,
        feedback_gain: Some(1.0),
        imbalance: 0.0,
        mean_norm: None,
    };
    let report =
        |layer| LayerReport { layer, key: vec![figures.clone()], value: vec![figures.clone()], centered_keys: vec![0] };
    Manifest {
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
        basis: Basis { kind: "folded-values".to_owned(), model_hash: WEIGHTS },
        solve: Solve { center_keys: "auto".to_owned(), feedback: true, ..Solve::as_published("wush") },
        calibration: None,
        layers: vec![report(0), report(1)],
        fold: FoldReport { dtype: "keep".to_owned(), max_rel_error: 1e-3, worst_layer: 0 },
        equivalence: None,
        sensitivity: None,
        files: Vec::new(),
    }
}

/// Writes the parts, with a manifest that lists them as they are, and what `after` does to the directory.
fn load(parts: Parts, after: impl FnOnce(&Path)) -> Result<Sidecars, FormatError> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let folder = dir.path().join(WUSH_DIR);
    std::fs::create_dir(&folder).expect("created");
    let Parts { mut manifest, keys, values } = parts;
    keys.save(&folder.join(KEY_TRANSFORMS)).expect("saved");
    if !values.layers.is_empty() {
        values.save(&folder.join(VALUE_FEEDBACK)).expect("saved");
    }
    for name in [KEY_TRANSFORMS, VALUE_FEEDBACK] {
        if let Ok((sha256, n_bytes)) = hash_file(&folder.join(name)) {
            manifest.files.push(FileEntry { path: format!("{WUSH_DIR}/{name}"), n_bytes, sha256 });
        }
    }
    manifest.save(&folder.join(MANIFEST)).expect("saved");
    after(&folder);
    Sidecars::load(dir.path())
}

fn refused(edit: impl FnOnce(&mut Parts), expected: &str) {
    let mut parts = parts();
    edit(&mut parts);
    assert_unfit(load(parts, |_| {}), expected);
}

fn assert_unfit<T: std::fmt::Debug>(result: Result<T, FormatError>, expected: &str) {
    let error = result.expect_err(expected);
    assert!(matches!(error, FormatError::Unfit { .. }) && error.hint().is_some(), "{error:?}");
    let message = error.to_string();
    assert!(message.contains("does not fit its bundle: ") && message.contains(expected), "{expected}: {message}");
}

#[test]
fn what_fits_is_read() {
    let whole = parts();
    let sidecars = load(whole.clone(), |_| {}).expect("it fits");
    assert_eq!((&sidecars.keys, sidecars.values.as_ref()), (&whole.keys, Some(&whole.values)));
    sidecars.check_model(WEIGHTS, &[(1, 2), (1, 2)]).expect("the model");

    let mut plain = whole;
    for layer in plain.keys.layers.values_mut() {
        (layer.key_mean, layer.key_feedback) = (None, None);
    }
    plain.values.layers.clear();
    plain.manifest.solve = Solve::as_published("wush");
    plain.manifest.layers.clear();
    let sidecars = load(plain, |_| {}).expect("nothing more is claimed");
    assert_eq!(sidecars.values, None);
}

#[test]
fn sidecars_without_what_the_manifest_says_are_refused() {
    refused(
        |p| p.keys.layers.values_mut().for_each(|l| l.key_mean = None),
        "key_mean, by solve of the manifest: expected in every layer, found none",
    );
    refused(
        |p| p.keys.layers.values_mut().for_each(|l| l.key_feedback = None),
        "key_feedback, by solve of the manifest: expected in every layer, found none",
    );
    refused(
        |p| p.keys.layers.get_mut(&1).expect("there").key_mean = Some(vec![0.0; 2]),
        "layer 1, by the manifest's report: expected 1 KV heads, of which [0] are centred, found 1 KV heads, of which [] are centred",
    );
    refused(|p| p.values.layers.clear(), "files: expected wush/value_feedback.safetensors, found no such entry");
    refused(
        |p| drop(p.values.layers.remove(&1)),
        "value feedback of layer 1: expected 1 KV heads of dimension 2, found none",
    );
    refused(|p| drop(p.keys.layers.remove(&0)), "layers: expected layer 0, found layer 1");
    refused(
        |p| drop(p.keys.layers.remove(&1)),
        "value feedback of layer 1: expected none, found 1 KV heads of dimension 2",
    );
    let last = |p: &mut Parts| {
        p.keys.layers.remove(&1);
        p.values.layers.remove(&1);
    };
    refused(
        last,
        "layer 1, by the manifest's report: expected 1 KV heads, of which [0] are centred, found no such layer",
    );
}

#[test]
fn sidecars_with_more_than_the_manifest_says_are_refused() {
    refused(
        |p| p.manifest.solve.center_keys = "never".to_owned(),
        "key_mean, by solve of the manifest: expected none, found in every",
    );
    refused(|p| p.manifest.solve.feedback = false, "solve.feedback of the manifest: expected true, found false");
    refused(
        |p| drop(p.manifest.layers.pop()),
        "layer 1, by the manifest's report: expected no such layer, found 1 KV heads",
    );
}

#[test]
fn other_files_than_the_listed_ones_are_refused() {
    refused(|p| p.keys.model_hash = Sha([4; 32]), "hash of the weights: expected 0303");
    refused(|p| p.values.model_hash = Sha([4; 32]), "hash of the weights: expected 0303");
    for name in [KEY_TRANSFORMS, VALUE_FEEDBACK] {
        assert_unfit(
            load(parts(), |folder| std::fs::remove_file(folder.join(name)).expect("there")),
            "expected it, found nothing",
        );
        let flip = |folder: &Path| {
            let mut bytes = std::fs::read(folder.join(name)).expect("there");
            *bytes.last_mut().expect("not empty") ^= 1;
            std::fs::write(folder.join(name), bytes).expect("written");
        };
        assert_unfit(load(parts(), flip), "SHA-256 that the manifest lists: expected ");
    }
}

#[test]
fn sidecars_of_another_model_are_refused() {
    let sidecars = load(parts(), |_| {}).expect("it fits");
    let refused =
        |hash, heads: &[(usize, usize)], expected: &str| assert_unfit(sidecars.check_model(hash, heads), expected);
    refused(Sha([9; 32]), &[(1, 2), (1, 2)], "hash of the weights: expected 0909");
    let of = "key transforms of layer";
    refused(WEIGHTS, &[(1, 2)], &format!("{of} 1: expected none, found 1 KV heads of dimension 2"));
    refused(WEIGHTS, &[(1, 2); 3], &format!("{of} 2: expected 1 KV heads of dimension 2, found none"));
    refused(WEIGHTS, &[(2, 2), (1, 2)], &format!("{of} 0: expected 2 KV heads of dimension 2, found 1 KV heads"));
}
