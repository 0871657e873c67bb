//! A bundle made the short way, and an attacker who recomputes every hash, so that nothing but the numbers can tell.

#![allow(dead_code, clippy::allow_attributes, reason = "each test file uses its own part")]

#[path = "../../../wush-fold/tests/support/mod.rs"]
pub mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use support::{Layout, Rng, Tiny, model_hash};
use tempfile::TempDir;
use wush_checkpoint::Checkpoint;
use wush_fold::{FoldDtype, FoldOutcome, HeadWeights, fold, invert};
use wush_format::bundle::{
    FeedbackLayer, KEY_TRANSFORMS, KeyLayer, KeySidecar, MANIFEST, VALUE_FEEDBACK, VALUE_TRANSFORMS, ValueFeedback,
    ValueLayer, ValueSidecar, WUSH_DIR,
};
use wush_format::hash::{Sha, hash_file};
use wush_format::manifest::{
    Basis, Calibration, Equivalence, FileEntry, FoldReport, HeadReport, LayerReport, MANIFEST_VERSION, Manifest, Solve,
    Source, Status,
};
use wush_format::monitor::Quiet;
use wush_format::transforms::{HeadMatrices, LayerTransforms, Transforms};
use wush_inspect::{Report, Verdict, inspect, to_text};
use wush_model::arch::resolve;
use wush_stats::{Statistics, StatsInfo};
use wush_transform::condition_number;

pub struct Bundle {
    pub _root: TempDir,
    pub source: PathBuf,
    pub dir: PathBuf,
}

/// Wide enough that W_V has many more columns than rows, as in real models.
pub fn tiny(layout: Layout) -> Tiny {
    Tiny { n_heads: 4, n_kv_heads: 2, head_dim: 8, hidden: 96, layout, ..Tiny::default() }
}

impl Bundle {
    pub fn of(tiny: &Tiny, dtype: FoldDtype) -> Self {
        let root = TempDir::new().expect("temporary directory");
        let source = root.path().join("source");
        tiny.write(&source);
        let transforms = solved(tiny.transforms(&source), &source);
        Self::make(root, source, &transforms, dtype)
    }

    pub fn make(root: TempDir, source: PathBuf, transforms: &Transforms, dtype: FoldDtype) -> Self {
        let dir = root.path().join("bundle");
        let checkpoint = Checkpoint::open(&source).expect("opens");
        let spec = resolve(&checkpoint, None).expect("understood");
        fs::create_dir(&dir).expect("directory");
        let outcome = fold(&checkpoint, &spec, transforms, &dir, dtype, &Quiet).expect("folds");
        fs::create_dir(dir.join(WUSH_DIR)).expect("directory");
        sidecars(transforms, outcome.folded_hash, &dir);
        fs::write(dir.join("wush/README.md"), "# A card\n").expect("write");
        let bundle = Self { _root: root, source, dir };
        let mut manifest = manifest(transforms, &outcome, dtype);
        manifest.source.family = spec.family.to_owned();
        manifest.save(&bundle.manifest_path()).expect("a valid manifest");
        bundle.rehash();
        bundle
    }

    pub fn manifest_path(&self) -> PathBuf {
        self.dir.join(WUSH_DIR).join(MANIFEST)
    }

    pub fn edit_manifest(&self, edit: impl FnOnce(&mut Manifest)) {
        let mut manifest = Manifest::load(&self.manifest_path()).expect("valid");
        edit(&mut manifest);
        manifest.save(&self.manifest_path()).expect("valid");
    }

    /// Makes every hash fit what lies there now: what an attacker would do.
    pub fn rehash(&self) {
        let hash = model_hash(&self.dir);
        let path = |name| self.dir.join(WUSH_DIR).join(name);
        if let Ok(mut keys) = KeySidecar::load(&path(KEY_TRANSFORMS)) {
            keys.model_hash = hash;
            keys.save(&path(KEY_TRANSFORMS)).expect("saved");
        }
        if let Ok(mut feedback) = ValueFeedback::load(&path(VALUE_FEEDBACK)) {
            feedback.model_hash = hash;
            feedback.save(&path(VALUE_FEEDBACK)).expect("saved");
        }
        if let Ok(mut values) = ValueSidecar::load(&path(VALUE_TRANSFORMS)) {
            values.model_hash = hash;
            values.save(&path(VALUE_TRANSFORMS)).expect("saved");
        }
        let files = list(&self.dir, "");
        self.edit_manifest(|manifest| {
            manifest.basis.model_hash = hash;
            // What was copied is said to be the source's, too.
            for source in &mut manifest.source.files {
                let copied = files.iter().find(|file| file.path == source.path);
                let copied = copied.filter(|file| !file.path.contains(".safetensors"));
                *source = copied.unwrap_or(source).clone();
            }
            let known =
                |path: &str| path.starts_with("wush/") || manifest.source.files.iter().any(|file| file.path == path);
            let added: Vec<_> = files.iter().filter(|file| !known(&file.path)).cloned().collect();
            manifest.source.files.extend(added);
            manifest.source.files.sort_by(|a, b| a.path.cmp(&b.path));
            manifest.files = files;
        });
    }

    pub fn inspect(&self, with_base: bool) -> Report {
        inspect(&self.dir, with_base.then_some(self.source.as_path()), &Quiet).expect("it can be inspected")
    }

    /// Changes one element of a tensor in place, in units of its shape's row-major order.
    pub fn poke(&self, name: &str, element: usize, change: impl Fn(f64) -> f64) {
        let checkpoint = Checkpoint::open(&self.dir).expect("opens");
        let (shard, info) = checkpoint.locate(name).expect("there");
        let dtype = format!("{:?}", info.dtype);
        let (path, n_bytes) = (self.dir.join(&checkpoint.shards()[shard].file_name), support::size_of_dtype(&dtype));
        let at = info.range.start + element * n_bytes;
        drop(checkpoint);
        let mut bytes = fs::read(&path).expect("readable");
        let old = support::decode(&dtype, &bytes[at..at + n_bytes])[0];
        let new = support::encode(&dtype, &[change(old)]);
        assert_ne!(new, bytes[at..at + n_bytes], "the change must change something");
        bytes[at..at + n_bytes].copy_from_slice(&new);
        fs::remove_file(&path).expect("remove");
        fs::write(&path, bytes).expect("write");
    }
}

pub fn list(dir: &Path, prefix: &str) -> Vec<FileEntry> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).expect("directory") {
        let entry = entry.expect("entry");
        let path = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if entry.path().is_dir() {
            files.extend(list(&entry.path(), &format!("{path}/")));
        } else if path != format!("{WUSH_DIR}/{MANIFEST}") {
            let (sha256, n_bytes) = hash_file(&entry.path()).expect("readable");
            files.push(FileEntry { path, n_bytes, sha256 });
        }
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    files
}

pub fn sidecars(transforms: &Transforms, model_hash: Sha, dir: &Path) {
    let narrow = |values: &[f64]| values.iter().map(|&x| x as f32).collect::<Vec<_>>();
    let mut keys = KeySidecar { layers: BTreeMap::new(), model_hash };
    let mut values = ValueSidecar { layers: BTreeMap::new(), model_hash };
    for (&layer, LayerTransforms { key, value, key_mean, key_feedback, .. }) in &transforms.layers {
        let mut query = Vec::new();
        for head in 0..key.n_heads {
            let inverse = invert(key.head(head), key.dim).matrix;
            query.extend((0..key.dim * key.dim).map(|at| inverse[(at % key.dim) * key.dim + at / key.dim]));
        }
        let (n_kv_heads, head_dim) = (key.n_heads, key.dim);
        let (key, query) = (narrow(&key.data), narrow(&query));
        let key_mean = key_mean.as_deref().map(narrow);
        let key_feedback = key_feedback.as_ref().map(|feedback| narrow(&feedback.data));
        keys.layers.insert(layer, KeyLayer { n_kv_heads, head_dim, key, query, key_mean, key_feedback });
        values.layers.insert(layer, ValueLayer { n_kv_heads, head_dim, value: narrow(&value.data) });
    }
    let feedback = transforms.layers.iter().filter_map(|(&layer, entry)| {
        let HeadMatrices { n_heads, dim, data } = entry.value_feedback.as_ref()?;
        Some((layer, FeedbackLayer { n_kv_heads: *n_heads, head_dim: *dim, value_feedback: narrow(data) }))
    });
    let feedback = ValueFeedback { layers: feedback.collect(), model_hash };
    if !feedback.layers.is_empty() {
        feedback.save(&dir.join(WUSH_DIR).join(VALUE_FEEDBACK)).expect("saved");
    }
    keys.save(&dir.join(WUSH_DIR).join(KEY_TRANSFORMS)).expect("saved");
    values.save(&dir.join(WUSH_DIR).join(VALUE_TRANSFORMS)).expect("saved");
}

/// A report that the matrix could have been solved with: its own condition number, and figures in their ranges.
pub fn head_report(matrix: &[f64], dim: usize, gain: f64) -> HeadReport {
    HeadReport {
        cond_gram: 800.0,
        cond_hessian: 800.0,
        cond_transform: condition_number(matrix, dim).expect("finite"),
        rank_gram: dim,
        rank_hessian: dim,
        dead_channels: 0,
        trace_product_over_bound: 1.02,
        feedback_gain: None,
        predicted_gain: gain,
        imbalance: 0.01,
        mean_norm: None,
    }
}

pub fn layer_reports(transforms: &Transforms) -> Vec<LayerReport> {
    if !transforms.report.is_empty() {
        return transforms.report.clone();
    }
    let heads = |matrices: &HeadMatrices, layer: usize| {
        let gain = |head: usize| 1.5 + layer as f64 + 0.25 * head as f64;
        (0..matrices.n_heads).map(|head| head_report(matrices.head(head), matrices.dim, gain(head))).collect::<Vec<_>>()
    };
    let report = |(&layer, entry): (&usize, &LayerTransforms)| LayerReport {
        layer,
        key: heads(&entry.key, layer),
        value: heads(&entry.value, layer),
        centered_keys: entry.centered_keys(),
    };
    transforms.layers.iter().map(report).collect()
}

/// A value head's Gram matrix and Hessian, that of the base's weights.
pub fn value_problem(source: &Path, layer: usize, head: usize) -> (Vec<f64>, Vec<f64>) {
    let checkpoint = Checkpoint::open(source).expect("opens");
    let spec = resolve(&checkpoint, None).expect("understood");
    let weights = HeadWeights::read(&checkpoint, &spec.layers[layer].attn, layer, head).expect("readable");
    let dim = weights.value.nrows();
    let mut rng = Rng((13 * layer + head) as u64 + 1);
    let mut gram = vec![0.0; dim * dim];
    for _ in 0..2 * dim {
        let x = rng.normals(dim, 1.0);
        (0..dim * dim).for_each(|at| gram[at] += x[at / dim] * x[at % dim]);
    }
    let products = |output: &faer::Mat<f64>| output.transpose() * output;
    let hessian: faer::Mat<f64> =
        weights.outputs.iter().map(products).fold(faer::Mat::zeros(dim, dim), |sum, output| sum + output);
    (gram, (0..dim * dim).map(|at| 2.0 * hessian[(at / dim, at % dim)]).collect())
}

/// The value transforms solved for the weights in `source`, with their report.
pub fn solved(mut transforms: Transforms, source: &Path) -> Transforms {
    let mut reports = layer_reports(&transforms);
    for ((&layer, entry), report) in transforms.layers.iter_mut().zip(&mut reports) {
        for head in 0..entry.value.n_heads {
            let (gram, hessian) = value_problem(source, layer, head);
            let solution = wush_transform::wush(&gram, &hessian, entry.value.dim, 0.01).expect("solved");
            entry.value.head_mut(head).copy_from_slice(&solution.transform);
            report.value[head] = wush_inspect::head_report(&solution.info.measures.expect("measured"));
        }
    }
    transforms.report = reports;
    transforms
}

/// Adds what a solver says of transforms that need statistics.
pub fn complete(mut transforms: Transforms) -> Transforms {
    transforms.solve.stats_hash = Some(Sha([2; 32]));
    transforms.calibration = Some(calibration());
    transforms.report = layer_reports(&transforms);
    transforms
}

pub fn calibration() -> Calibration {
    Calibration {
        source: "text.txt".to_owned(),
        tokens_hash: Sha([1; 32]),
        sequences: 4,
        tokens: 256,
        max_seq_len: 64,
        rope_scaling: None,
        device: "cpu".to_owned(),
        compute: "f32".to_owned(),
    }
}

/// As [`calibration`], in one sequence.
pub fn one_sequence(tokens: u64) -> Calibration {
    Calibration { sequences: 1, tokens, max_seq_len: tokens, ..calibration() }
}

pub fn manifest(transforms: &Transforms, outcome: &FoldOutcome, dtype: FoldDtype) -> Manifest {
    Manifest {
        format_version: MANIFEST_VERSION,
        tool: "wush 0.1.0".to_owned(),
        status: Status::Complete,
        source: Source {
            id: "tiny".to_owned(),
            revision: None,
            family: "llama".to_owned(),
            model_hash: outcome.model_hash,
            files: outcome.source_files.clone(),
        },
        basis: Basis { kind: "folded-values".to_owned(), model_hash: outcome.folded_hash },
        solve: Solve { stats_hash: Some(Sha([2; 32])), ..transforms.solve.clone() },
        calibration: Some(calibration()),
        layers: layer_reports(transforms),
        fold: FoldReport {
            dtype: dtype.name().to_owned(),
            max_rel_error: outcome.report.max_rel_error,
            worst_layer: outcome.report.worst_layer,
        },
        sensitivity: None,
        equivalence: Some(Equivalence {
            tokens: 63,
            nll_source: 2.0,
            nll_bundle: 2.0001,
            mean_kl: 1e-6,
            max_logit_diff: 0.01,
            max_nll_diff: 0.001,
            tolerance: 5e-4,
            passed: true,
        }),
        files: outcome.files.clone(),
    }
}

pub fn failed(report: &Report) -> Vec<&str> {
    report.checks.iter().filter(|check| !check.ok).map(|check| check.name.as_str()).collect()
}

#[track_caller]
pub fn assert_only(report: &Report, expected: &[&str]) {
    assert_eq!(failed(report), expected, "{}", to_text(report));
    assert_eq!(report.verdict, if expected.is_empty() { Verdict::Ok } else { Verdict::Failed });
}

pub fn detail<'a>(report: &'a Report, name: &str) -> &'a str {
    report.checks.iter().find(|check| check.name == name).map_or("", |check| check.detail.as_str())
}

/// Statistics of the checkpoint in `source`: all keys of a head the same, values with one dead coordinate.
pub fn statistics(tiny: &Tiny, source: &Path) -> Statistics {
    let checkpoint = Checkpoint::open(source).expect("opens");
    let spec = resolve(&checkpoint, None).expect("understood");
    let (n_tokens, dim) = (64, tiny.head_dim);
    let info = StatsInfo {
        format_version: wush_stats::STATS_VERSION,
        tool: "wush 0.1.0".to_owned(),
        model_id: "tiny".to_owned(),
        model_hash: model_hash(source),
        family: "llama".to_owned(),
        n_heads: tiny.n_heads,
        n_kv_heads: tiny.n_kv_heads,
        head_dim: dim,
        positions: n_tokens,
        max_seq_len: n_tokens,
        source: "text.txt".to_owned(),
        rope_scaling: None,
        shift_invariant: true,
        attention_hessians: false,
        second_pass: false,
        device: "cpu".to_owned(),
        compute: "f32".to_owned(),
        sequence_hashes: vec![Sha([5; 32])],
    };
    let mut statistics = Statistics::new(&spec, info);
    let mut rng = Rng(11);
    for layer in statistics.layers.values_mut() {
        for head in 0..tiny.n_kv_heads {
            // All keys the same: rank 1, and all their energy in the mean. Values with one dead coordinate.
            let key = rng.normals(dim, 1.0);
            let add = |gram: &mut HeadMatrices, x: &[f64]| {
                let gram = gram.head_mut(head);
                (0..dim * dim).for_each(|at| gram[at] += x[at / dim] * x[at % dim]);
            };
            for _ in 0..n_tokens {
                add(&mut layer.key_gram, &key);
                add(&mut layer.query_gram, &rng.normals(dim, 1.0));
                let mut value = rng.normals(dim, 1.0);
                value[2] = 0.0;
                add(&mut layer.value_gram, &value);
            }
            layer.key_sum[head * dim..(head + 1) * dim]
                .iter_mut()
                .zip(&key)
                .for_each(|(sum, x)| *sum = x * n_tokens as f64);
        }
    }
    wush_stats::output_gram(&checkpoint, &spec, &mut statistics).expect("of the weights");
    statistics
}
