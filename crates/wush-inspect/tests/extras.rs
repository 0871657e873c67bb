//! Key means and feedback matrices: honest ones pass, alone and in a bundle; what contradicts the record does not.

mod bundle;

use std::path::PathBuf;

use bundle::support::{Layout, Rng};
use bundle::{Bundle, assert_only, complete, detail, tiny, value_problem};
use tempfile::TempDir;
use wush_fold::FoldDtype;
use wush_format::bundle::{KEY_TRANSFORMS, KeyLayer, KeySidecar, VALUE_FEEDBACK, ValueFeedback, WUSH_DIR};
use wush_format::manifest::{HeadReport, LayerReport};
use wush_format::monitor::Quiet;
use wush_format::transforms::{HeadMatrices, Transforms};
use wush_inspect::{Report, head_report, inspect};
use wush_transform::{Factor, HeadProblem, Role, Settings, error_feedback, wush_with};

/// Positions that the made-up keys were summed over.
const POSITIONS: usize = 64;

/// Transforms as the default preset solves them: keys of made-up statistics, with means of head 1 of every layer; values for
/// the output projections of the source.
fn transforms(root: &TempDir, factor: &'static str) -> (PathBuf, Transforms) {
    let tiny = tiny(Layout::Llama);
    let source = root.path().join("source");
    tiny.write(&source);
    let mut transforms = complete(tiny.transforms(&source));
    for (entry, report) in transforms.layers.values_mut().zip(&mut transforms.report) {
        let (n_heads, dim, layer) = (entry.key.n_heads, entry.key.dim, report.layer);
        entry.key_feedback = Some(HeadMatrices::zeros(n_heads, dim));
        entry.value_feedback = Some(HeadMatrices::zeros(n_heads, dim));
        let mut means = vec![0.0; n_heads * dim];
        means[dim..2 * dim].fill(0.5);
        for head in 0..n_heads {
            let mut numbers = Rng((7 * layer + head) as u64 + 3);
            let key = (gram(&mut numbers, dim), gram(&mut numbers, dim));
            let value = value_problem(&source, layer, head);
            let of_key = (&mut entry.key, &mut entry.key_feedback, &mut report.key[head]);
            let of_value = (&mut entry.value, &mut entry.value_feedback, &mut report.value[head]);
            for ((matrices, feedback, report), (gram, hessian)) in [(of_key, &key), (of_value, &value)] {
                let factor = Factor::find(factor).expect("known");
                let settings = Settings { exponent: 0.4, factor, ..Settings::published(layer, head, Role::Key) };
                let solution = wush_with(&HeadProblem::new(gram, hessian, dim), &settings).expect("solved");
                let found = error_feedback(&solution.inverse, hessian, dim, 0.01).expect("definite");
                matrices.head_mut(head).copy_from_slice(&solution.transform);
                feedback.as_mut().expect("there").head_mut(head).copy_from_slice(&found.lower);
                let measures = solution.info.measures.expect("measured");
                *report = HeadReport { feedback_gain: Some(found.gain), ..head_report(&measures) };
            }
        }
        let norm = |mean: &[f64]| mean.iter().map(|x| x * x).sum::<f64>().sqrt();
        report.key[1].mean_norm = Some(norm(&means[dim..2 * dim]));
        report.centered_keys = vec![1];
        entry.key_mean = Some(means);
    }
    transforms.solve.exponent = 0.4;
    transforms.solve.factor = factor.to_owned();
    transforms.solve.center_keys = "auto".to_owned();
    transforms.solve.feedback = true;
    (source, transforms)
}

/// A positive definite matrix.
fn gram(numbers: &mut Rng, dim: usize) -> Vec<f64> {
    let mut gram = vec![0.0; dim * dim];
    for _ in 0..POSITIONS {
        let x: Vec<f64> = numbers.normals(dim, 1.0).iter().enumerate().map(|(i, x)| x / (1.0 + i as f64)).collect();
        (0..dim * dim).for_each(|at| gram[at] += x[at / dim] * x[at % dim]);
    }
    gram
}

fn bundle() -> Bundle {
    with_factor("hadamard")
}

fn with_factor(factor: &'static str) -> Bundle {
    let root = TempDir::new().expect("temporary directory");
    let (source, transforms) = transforms(&root, factor);
    Bundle::make(root, source, &transforms, FoldDtype::Keep)
}

/// A transforms file after `edit`, inspected.
fn file(edit: impl FnOnce(&mut Transforms)) -> Report {
    let root = TempDir::new().expect("temporary directory");
    let (_, mut transforms) = transforms(&root, "hadamard");
    edit(&mut transforms);
    let path = root.path().join("t.safetensors");
    transforms.save(&path).expect("saved");
    inspect(&path, None, &Quiet).expect("inspected")
}

/// Why transforms after `edit` are no file at all.
fn refused(edit: impl FnOnce(&mut Transforms)) -> String {
    let root = TempDir::new().expect("temporary directory");
    let (_, mut transforms) = transforms(&root, "hadamard");
    edit(&mut transforms);
    transforms.save(&root.path().join("t.safetensors")).expect_err("its record contradicts it").to_string()
}

#[test]
fn honest_extras_pass() {
    let bundle = bundle();
    let report = bundle.inspect(false);
    assert_only(&report, &[]);
    assert_only(&bundle.inspect(true), &[]);
    assert!(detail(&report, "centred keys").starts_with("auto: "), "{}", detail(&report, "centred keys"));
    assert!(detail(&report, "key feedback").contains("unit lower triangular"));
    assert_eq!(report.layers[0].heads[0].key_centered, Some(false));
    assert_eq!(report.layers[0].heads[1].key_centered, Some(true));
    assert_only(&file(|_| {}), &[]);
    for name in [KEY_TRANSFORMS, VALUE_FEEDBACK] {
        let report = inspect(&bundle.dir.join(WUSH_DIR).join(name), None, &Quiet).expect("inspected");
        assert_only(&report, &[]);
    }
}

#[test]
fn means_that_contradict_the_record_are_found() {
    let none = |t: &mut Transforms| t.layers.values_mut().for_each(|l| l.key_mean = None);
    let never = refused(|t| t.solve.center_keys = "never".to_owned());
    for message in [never, refused(none), refused(|t| t.report[0].centered_keys = vec![0])] {
        assert!(message.contains("key_mean") || message.contains("are centred"), "{message}");
    }
    assert_only(&file(|t| t.solve.center_keys = "always".to_owned()), &["centred keys"]);
    assert_only(&file(|t| t.solve.center_keys = "sometimes".to_owned()), &["centred keys"]);
    let bundle = bundle();
    let path = bundle.dir.join(WUSH_DIR).join(KEY_TRANSFORMS);
    let mut keys = KeySidecar::load(&path).expect("valid");
    keys.layers.get_mut(&0).expect("a layer").key_mean.as_mut().expect("means")[0] = 1.0;
    keys.save(&path).expect("saved");
    bundle.rehash();
    assert_only(&bundle.inspect(false), &["centred keys"]);
}

#[test]
fn feedback_that_contradicts_the_record_is_found() {
    let none = |t: &mut Transforms| t.layers.values_mut().for_each(|l| l.key_feedback = None);
    let upper = |t: &mut Transforms| {
        t.layers.get_mut(&1).expect("a layer").value_feedback.as_mut().expect("feedback").data[1] = 0.5;
    };
    for message in [refused(|t| t.solve.feedback = false), refused(none), refused(upper)] {
        assert!(message.contains("_feedback"), "{message}");
    }

    let changed = bundle();
    edit_values(&changed, |feedback| feedback[0] = 2.0);
    assert_only(&changed.inspect(false), &["value feedback matrices", VALUES]);

    let removed = bundle();
    std::fs::remove_file(removed.dir.join(WUSH_DIR).join(VALUE_FEEDBACK)).expect("removed");
    removed.rehash();
    assert_only(&removed.inspect(false), &["wush folder", "value feedback"]);
    let unasked = bundle();
    unasked.edit_manifest(|manifest| manifest.solve.feedback = false);
    assert_only(&unasked.inspect(false), &["wush folder", "key feedback"]);
}

#[test]
fn settings_that_no_solver_takes_are_found() {
    assert_only(&file(|t| t.solve.exponent = 0.75), &["solver's record", KEYS, VALUES]);
    let report = file(|t| t.solve.factor = "dct".to_owned());
    assert_only(&report, &["solver's record"]);
    assert!(detail(&report, "solver's record").contains("hadamard, random, balanced"));
}

/// The checks of feedback matrices against their transforms and figures.
const KEYS: &str = "key feedback is the solver's";
const VALUES: &str = "value feedback is the solver's";

/// Changes layer 0 of the key sidecar, with hashes that fit.
fn edit_keys(bundle: &Bundle, edit: impl FnOnce(&mut KeyLayer)) {
    let path = bundle.dir.join(WUSH_DIR).join(KEY_TRANSFORMS);
    let mut keys = KeySidecar::load(&path).expect("valid");
    edit(keys.layers.get_mut(&0).expect("a layer"));
    keys.save(&path).expect("saved");
    bundle.rehash();
}

/// Changes layer 0 of the values' feedback, `[2, 8, 8]`, with hashes that fit.
fn edit_values(bundle: &Bundle, edit: impl FnOnce(&mut [f32])) {
    let path = bundle.dir.join(WUSH_DIR).join(VALUE_FEEDBACK);
    let mut feedback = ValueFeedback::load(&path).expect("valid");
    edit(&mut feedback.layers.get_mut(&0).expect("a layer").value_feedback);
    feedback.save(&path).expect("saved");
    bundle.rehash();
}

/// Changes matrices in place.
type Forgery = fn(&mut [f32]);

/// Forgeries of `[2, 8, 8]` that are unit lower triangular: none, others, another head's, and one slightly off.
const FORGERIES: [(&str, Forgery); 5] = [
    ("none", |lower| below(lower, |_| 0.0)),
    ("another", |lower| below(lower, |_| 0.25)),
    ("large", |lower| below(lower, |_| 3.0)),
    ("another head's", |lower| lower.rotate_left(64)),
    ("off", |lower| below(lower, |x| x * 1.001)),
];

/// Changes the elements below the diagonals.
fn below(lower: &mut [f32], change: impl Fn(f32) -> f32) {
    let elements = lower.iter_mut().enumerate().filter(|(at, _)| at / 8 % 8 > at % 8);
    elements.for_each(|(_, x)| *x = change(*x));
}

#[test]
fn forged_feedback_is_found_from_the_transform_and_its_figures() {
    for (what, forge) in FORGERIES {
        println!("{what}");
        let (keys, values) = (bundle(), bundle());
        edit_keys(&keys, |layer| forge(layer.key_feedback.as_mut().expect("feedback")));
        edit_values(&values, forge);
        for (bundle, expected) in [(keys, KEYS), (values, VALUES)] {
            let report = bundle.inspect(false);
            assert_only(&report, &[expected]);
            assert!(detail(&report, expected).starts_with("layer 0, KV head 0: "), "{}", detail(&report, expected));
        }
    }
}

/// Nothing else is known of keys with a random factor.
#[test]
fn elements_beyond_what_the_figures_allow_are_found_whatever_the_factor() {
    let bundle = with_factor("random");
    assert_only(&bundle.inspect(true), &[]);
    edit_keys(&bundle, |layer| layer.key_feedback.as_mut().expect("feedback")[64 + 3 * 8 + 1] = 1e4);
    let report = bundle.inspect(true);
    assert_only(&report, &["key feedback"]);
    let found = detail(&report, "key feedback");
    assert!(found.starts_with("layer 0, KV head 1: element [3, 1] is 10000, at most "), "{found}");
    let alone = inspect(&bundle.dir.join(WUSH_DIR).join(KEY_TRANSFORMS), None, &Quiet).expect("inspected");
    assert_only(&alone, &[]);
    edit_keys(&bundle, |layer| layer.key_feedback.as_mut().expect("feedback")[64 + 3 * 8 + 1] = 1e9);
    let alone = inspect(&bundle.dir.join(WUSH_DIR).join(KEY_TRANSFORMS), None, &Quiet).expect("inspected");
    assert_only(&alone, &["key feedback"]);
}

#[test]
fn figures_of_the_feedback_are_computed_again() {
    let edits: [(&str, FigureEdit); 5] = [
        ("cond_hessian", |figures| figures.cond_hessian *= 1.01),
        ("cond_gram", |figures| figures.cond_gram *= 1.01),
        ("imbalance", |figures| figures.imbalance += 1e-2),
        ("feedback_gain", |figures| figures.feedback_gain = figures.feedback_gain.map(|gain| gain * 1.01)),
        ("predicted_gain", |figures| figures.predicted_gain *= 1.01),
    ];
    let bundle = bundle();
    for (name, edit) in edits {
        let roles: [(&str, OfRole); 2] = [(KEYS, key_figures), (VALUES, value_figures)];
        for (expected, of_role) in roles {
            println!("{name}: {expected}");
            let mut honest = None;
            bundle.edit_manifest(|manifest| {
                honest = Some(manifest.layers.clone());
                edit(of_role(&mut manifest.layers[1]));
            });
            let report = bundle.inspect(false);
            assert_only(&report, &[expected]);
            let found = detail(&report, expected);
            assert!(found.starts_with(&format!("layer 1, KV head 0: {name} ")), "{found}");
            bundle.edit_manifest(|manifest| manifest.layers = honest.expect("kept"));
        }
    }
}

type FigureEdit = fn(&mut HeadReport);
type OfRole = fn(&mut LayerReport) -> &mut HeadReport;

fn key_figures(layer: &mut LayerReport) -> &mut HeadReport {
    &mut layer.key[0]
}

fn value_figures(layer: &mut LayerReport) -> &mut HeadReport {
    &mut layer.value[0]
}

#[test]
fn forged_feedback_of_values_is_found_from_the_base_whatever_the_factor() {
    let fit = "value transforms fit the base";
    for (what, forge) in FORGERIES {
        println!("{what}");
        let bundle = with_factor("balanced");
        assert_only(&bundle.inspect(true), &[]);
        edit_values(&bundle, forge);
        assert_only(&bundle.inspect(false), &[]);
        let report = bundle.inspect(true);
        assert_only(&report, &[fit]);
        assert!(detail(&report, fit).starts_with("layer 0, KV head 0: feedback"), "{}", detail(&report, fit));
    }
    let bundle = with_factor("balanced");
    bundle.edit_manifest(|m| m.layers[0].value[1].feedback_gain = Some(2.5));
    assert!(detail(&bundle.inspect(true), fit).starts_with("layer 0, KV head 1: feedback_gain 2.50, "));
}

#[test]
fn forged_means_are_found() {
    let bundle = bundle();
    let scale = |by: f32| move |layer: &mut KeyLayer| layer.key_mean.iter_mut().flatten().for_each(|x| *x *= by);
    edit_keys(&bundle, scale(1.001));
    let report = bundle.inspect(false);
    assert_only(&report, &["centred keys"]);
    let expected = "layer 0, KV head 1: a mean of norm 1.42, the solver's report says 1.41";
    assert_eq!(detail(&report, "centred keys"), expected);
    bundle.edit_manifest(|m| m.layers[0].key[1].mean_norm = None);
    assert!(detail(&bundle.inspect(false), "centred keys").ends_with("the solver's report says nothing"));

    // With a report that fits, longer than any key.
    edit_keys(&bundle, scale(1e4 / 1.001));
    bundle.edit_manifest(|m| m.layers[0].key[1].mean_norm = Some(1e4 * 2f64.sqrt()));
    let report = bundle.inspect(false);
    assert_only(&report, &["mean keys"]);
    let found = detail(&report, "mean keys");
    assert!(found.starts_with("layer 0, KV head 1: a mean of norm 14142, and no key is longer than "), "{found}");
}
