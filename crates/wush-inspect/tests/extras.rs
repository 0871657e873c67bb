//! Key means and feedback matrices: honest ones pass, alone and in a bundle; what contradicts the record does not.

mod bundle;

use bundle::support::Layout;
use bundle::{Bundle, assert_only, complete, detail, tiny};
use tempfile::TempDir;
use wush_fold::FoldDtype;
use wush_format::bundle::{KEY_TRANSFORMS, KeySidecar, VALUE_FEEDBACK, ValueFeedback, WUSH_DIR};
use wush_format::monitor::Quiet;
use wush_format::transforms::{HeadMatrices, Transforms};
use wush_inspect::{Report, inspect};

/// A unit lower triangular stack.
fn unit_lower(n_heads: usize, dim: usize) -> HeadMatrices {
    let element = |at: usize| match (at / dim % dim).cmp(&(at % dim)) {
        std::cmp::Ordering::Less => 0.0,
        std::cmp::Ordering::Equal => 1.0,
        std::cmp::Ordering::Greater => 0.25,
    };
    HeadMatrices { n_heads, dim, data: (0..n_heads * dim * dim).map(element).collect() }
}

/// Transforms with means of head 1 of every layer, and feedback.
fn transforms(root: &TempDir) -> (std::path::PathBuf, Transforms) {
    let tiny = tiny(Layout::Llama);
    let source = root.path().join("source");
    tiny.write(&source);
    let mut transforms = tiny.transforms(&source);
    for entry in transforms.layers.values_mut() {
        let (n_heads, dim) = (entry.key.n_heads, entry.key.dim);
        entry.key_mean = Some((0..n_heads * dim).map(|at| if at / dim == 1 { 0.5 } else { 0.0 }).collect());
        entry.key_feedback = Some(unit_lower(n_heads, dim));
        entry.value_feedback = Some(unit_lower(n_heads, dim));
    }
    transforms.solve.center_keys = "auto".to_owned();
    transforms.solve.feedback = true;
    (source, complete(transforms))
}

fn bundle() -> Bundle {
    let root = TempDir::new().expect("temporary directory");
    let (source, transforms) = transforms(&root);
    Bundle::make(root, source, &transforms, FoldDtype::Keep)
}

/// A transforms file after `edit`, inspected.
fn file(edit: impl FnOnce(&mut Transforms)) -> Report {
    let root = TempDir::new().expect("temporary directory");
    let (_, mut transforms) = transforms(&root);
    edit(&mut transforms);
    let path = root.path().join("t.safetensors");
    transforms.save(&path).expect("saved");
    inspect(&path, None, &Quiet).expect("inspected")
}

#[test]
fn honest_extras_pass() {
    let bundle = bundle();
    // Its figures are made up, so there is no base that they could fit.
    let report = bundle.inspect(false);
    assert_only(&report, &[]);
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
    assert_only(&file(|t| t.solve.center_keys = "never".to_owned()), &["centred keys"]);
    assert_only(&file(|t| t.solve.center_keys = "always".to_owned()), &["centred keys"]);
    assert_only(&file(|t| t.solve.center_keys = "sometimes".to_owned()), &["centred keys"]);
    assert_only(&file(|t| t.report[0].centered_keys = vec![0]), &["centred keys"]);
    assert_only(&file(|t| t.layers.values_mut().for_each(|l| l.key_mean = None)), &["centred keys"]);
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
    assert_only(&file(|t| t.solve.feedback = false), &["key feedback", "value feedback matrices"]);
    let none = |t: &mut Transforms| t.layers.values_mut().for_each(|l| l.key_feedback = None);
    assert_only(&file(none), &["key feedback"]);
    let upper = |t: &mut Transforms| {
        t.layers.get_mut(&1).expect("a layer").value_feedback.as_mut().expect("feedback").data[1] = 0.5;
    };
    let report = file(upper);
    assert_only(&report, &["value feedback matrices"]);
    assert_eq!(detail(&report, "value feedback matrices"), "layer 1, KV head 0: element [0, 1] is 0.5");

    let changed = bundle();
    let path = changed.dir.join(WUSH_DIR).join(VALUE_FEEDBACK);
    let mut feedback = ValueFeedback::load(&path).expect("valid");
    feedback.layers.get_mut(&0).expect("a layer").value_feedback[0] = 2.0;
    feedback.save(&path).expect("saved");
    changed.rehash();
    assert_only(&changed.inspect(false), &["value feedback matrices"]);

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
    assert_only(&file(|t| t.solve.exponent = 0.75), &["solver's record"]);
    let report = file(|t| t.solve.factor = "dct".to_owned());
    assert_only(&report, &["solver's record"]);
    assert!(detail(&report, "solver's record").contains("hadamard, random, balanced"));
}
