//! Bundles: what `convert` writes, that it can be trusted, that it does not depend on threads or on the way it was made.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use wush_tests::{Scratch, contents, fixture, names};

use crate::common::{args, assert_schema, model, on_demo, on_tiny, text, tiny, wush};

/// bf16 keeps 8 bits of a significand: half a unit in the last place is 2^-9 of a number's power of two, 2^-8 of the number.
const BF16_UNIT_ROUNDOFF: f64 = 1.0 / 256.0;

fn manifest(bundle: &Path) -> Value {
    let text = fs::read_to_string(bundle.join("wush/manifest.json")).expect("a manifest");
    serde_json::from_str(&text).expect("JSON")
}

/// Tensors of a one-shard checkpoint, widened.
fn tensors(dir: &Path) -> BTreeMap<String, (Dtype, Vec<f64>)> {
    let bytes = fs::read(dir.join("model.safetensors")).expect("read");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let widen = |(name, view): (&str, safetensors::tensor::TensorView<'_>)| {
        let data = match view.dtype() {
            Dtype::BF16 => pairs(view.data(), |x| f64::from(f32::from_bits(u32::from(x) << 16))),
            Dtype::F32 => {
                view.data().chunks_exact(4).map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))).collect()
            }
            other => panic!("{name}: {other:?}"),
        };
        (name.to_owned(), (view.dtype(), data))
    };
    file.iter().map(widen).collect()
}

fn pairs(bytes: &[u8], widen: impl Fn(u16) -> f64) -> Vec<f64> {
    bytes.chunks_exact(2).map(|b| widen(u16::from_le_bytes([b[0], b[1]]))).collect()
}

fn is_folded(name: &str) -> bool {
    name.contains(".v_proj.") || name.contains(".o_proj.")
}

#[test]
fn a_converted_model_passes_its_audit() {
    let scratch = Scratch::new();
    let report = wush(&scratch).ok(&on_demo("convert", &["--out", "bundle", "--format", "json"])).json();
    assert_schema("convert", &report);
    assert_eq!(report["verdict"], "ok");
    assert_eq!(report["calibration"]["tokens"], 6 * 96);
    assert_eq!(report["equivalence"]["passed"], true);
    assert_eq!(names(scratch.path()), ["bundle"], "nothing but the bundle is left");

    let audit = wush(&scratch).ok(&args([&"inspect", &"bundle", &"--base", &model(), &"--format", &"json"])).json();
    assert_schema("inspect", &audit);
    assert_eq!(audit["verdict"], "ok");
    let checks = audit["checks"].as_array().expect("checks");
    assert!(checks.len() >= 5 && checks.iter().all(|check| check["ok"] == true), "{checks:#?}");
    assert_eq!(audit["layers"].as_array().expect("layers").len(), 6);
    assert_schema("manifest", &manifest(&scratch.join("bundle")));
}

#[test]
fn only_value_and_output_projections_change_and_all_other_files_are_copied() {
    let scratch = Scratch::new();
    let source = scratch.copy_of(&model(), "source");
    fs::create_dir(source.join("extra")).expect("created");
    for (name, content) in
        [("chat_template.jinja", "{{ x }}"), ("modeling_custom.py", "x = 1\n"), ("extra/LICENSE", "free")]
    {
        fs::write(source.join(name), content).expect("written");
    }
    let mut command = on_demo("convert", &["--out", "bundle", "--verify-sequences", "0"]);
    command[1] = "source".to_owned();
    wush(&scratch).ok(&command);

    let bundle = scratch.join("bundle");
    let shown: BTreeMap<_, _> = contents(&bundle).into_iter().filter(|(name, _)| !name.starts_with("wush/")).collect();
    let original: BTreeMap<_, _> = contents(&source).into_iter().collect();
    assert_eq!(shown.keys().collect::<Vec<_>>(), original.keys().collect::<Vec<_>>());
    for (name, bytes) in &original {
        assert!(name == "model.safetensors" || shown[name] == *bytes, "{name} was changed");
    }
    let (before, after) = (tensors(&source), tensors(&bundle));
    assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>());
    for (name, tensor) in &before {
        assert_eq!(after[name] != *tensor, is_folded(name), "{name}");
        assert_eq!(after[name].0, tensor.0, "{name}: dtype");
    }
    let wush_files: Vec<_> = names(&bundle.join("wush"));
    assert_eq!(
        wush_files,
        [
            "README.md",
            "key_transforms.safetensors",
            "manifest.json",
            "value_feedback.safetensors",
            "value_transforms.safetensors"
        ]
    );
}

#[test]
fn the_bytes_depend_neither_on_threads_nor_on_the_way() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    program.ok(&on_demo("convert", &["--out", "one", "--threads", "1"]));
    program.ok(&on_demo("convert", &["--out", "two", "--threads", "2"]));
    let one = contents(&scratch.join("one"));
    assert!(one == contents(&scratch.join("two")), "1 and 2 threads give other bytes");

    program.ok(&on_demo("calibrate", &["--out", "stats.safetensors"]));
    program.ok(&["solve", "stats.safetensors", "--out", "transforms.safetensors"]);
    // The text is cut as the transforms' was, without being told how.
    program.ok(&args([&"fold", &model(), &"transforms.safetensors", &"--calib", &text(), &"--out", &"staged"]));
    let staged = contents(&scratch.join("staged"));
    for ((name, bytes), (staged_name, staged_bytes)) in one.iter().zip(&staged) {
        assert_eq!(name, staged_name);
        assert!(bytes == staged_bytes, "{name}: the stages one by one give other bytes than convert");
    }
    assert_eq!(one.len(), staged.len());
}

#[test]
fn an_f32_fold_changes_no_token() {
    let scratch = Scratch::new();
    let report =
        wush(&scratch).ok(&on_demo("convert", &["--out", "bundle", "--fold-dtype", "f32", "--format", "json"])).json();
    let equivalence = &report["equivalence"];
    assert!(equivalence["max_nll_diff"].as_f64().expect("a number") <= 1e-3, "{equivalence}");
    assert!(equivalence["tolerance"].as_f64().expect("a number") <= 1e-4, "{equivalence}");
    for (name, (dtype, _)) in tensors(&scratch.join("bundle")) {
        assert_eq!(dtype, if is_folded(&name) { Dtype::F32 } else { Dtype::BF16 }, "{name}");
    }
    // The model's config.json says bfloat16, which loaders follow.
    assert_noted(&report, &scratch, "tell the server float32");
    wush(&scratch).ok(&args([&"inspect", &"bundle", &"--base", &model()]));
}

/// Asserts that the report has such a note, and that the model card says it, too.
fn assert_noted(report: &Value, scratch: &Scratch, expected: &str) {
    let notes = report["notes"].as_array().expect("notes");
    let note = notes.iter().filter_map(Value::as_str).find(|note| note.contains(expected));
    let note = note.unwrap_or_else(|| panic!("no note says {expected:?}: {notes:?}"));
    let card = fs::read_to_string(scratch.join("bundle/wush/README.md")).expect("a card");
    assert!(card.contains(note), "{card}");
}

#[test]
fn a_scaled_calibration_says_how_to_serve_it() {
    let scratch = Scratch::new();
    let options = ["--out", "bundle", "--rope-scaling", "yarn:4", "--format", "json"];
    let report = wush(&scratch).ok(&on_demo("convert", &options)).json();
    assert_noted(&report, &scratch, r#"{"rope_type": "yarn", "factor": 4.0"#);
}

#[test]
fn a_wrong_base_is_said_to_be_one_and_no_more() {
    let scratch = Scratch::new();
    wush(&scratch).ok(&on_tiny(&scratch, "convert", &tiny(), &["--out", "bundle"]));
    assert_audit(
        &scratch,
        &args([&"inspect", &"bundle", &"--base", &fixture("tiny/qwen3"), &"--format", &"json"]),
        &["same model"],
    );
}

#[test]
fn what_passed_narrowly_is_a_note_and_no_failure() {
    let scratch = Scratch::new();
    wush(&scratch).ok(&on_demo("convert", &["--out", "bundle", "--verify-sequences", "0"]));
    let run = wush(&scratch).ok(&["inspect", "bundle"]);
    assert!(run.stdout.contains("  note  enough calibration") && run.stdout.contains("ok, 3 warnings ("), "{run:?}");
    let report = wush(&scratch).ok(&["inspect", "bundle", "--format", "json"]).json();
    let notes: Vec<_> = report["notes"].as_array().expect("notes").iter().filter_map(Value::as_str).collect();
    assert!(
        notes.len() == 3 && notes.iter().any(|note| note.starts_with("enough calibration: 576 tokens")),
        "{notes:?}"
    );
    let length = "calibrated length: 96 tokens of the 4096 positions that the model reaches: of later ones";
    assert!(notes.iter().any(|note| note.starts_with(length)), "{notes:?}");
    assert!(report["checks"].as_array().expect("checks").iter().all(|check| check["ok"] == true));
}

#[test]
fn too_little_text_is_told() {
    let scratch = Scratch::new();
    let mut command = on_demo("convert", &["--out", "bundle", "--format", "json"]);
    // 32 tokens for heads of dimension 64.
    command[5] = "1".to_owned();
    command[7] = "32".to_owned();
    let run = wush(&scratch).ok(&command);
    assert!(run.stderr.contains("too little text: 32 tokens"), "{run:?}");
    assert_noted(&run.json(), &scratch, "too little text: 32 tokens");
}

#[test]
fn other_copies_of_the_weights_are_left_out_and_a_changed_sidecar_is_not_unfolded() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    let source = scratch.join("source");
    fs::create_dir(&source).expect("made");
    for entry in fs::read_dir(model()).expect("listed") {
        let entry = entry.expect("an entry");
        fs::copy(entry.path(), source.join(entry.file_name())).expect("copied");
    }
    fs::write(source.join("consolidated.safetensors"), "x").expect("written");
    let calib = model().join("calibration.txt").display().to_string();
    let command = ["convert", "source", "--out", "bundle", "--calib", &calib, "--sequences", "2", "--seq-len", "64"];
    let run = program.ok(&[&command[..], &["--format", "json"]].concat());
    assert!(run.json()["notes"].to_string().contains("consolidated.safetensors"), "{run:?}");
    assert!(!scratch.join("bundle/consolidated.safetensors").exists());

    let sidecar = scratch.join("bundle/wush/value_transforms.safetensors");
    let mut bytes = fs::read(&sidecar).expect("read");
    let at = bytes.len() - 3;
    bytes[at] ^= 1;
    fs::write(&sidecar, bytes).expect("written");
    let run = program.run(&["unfold", "bundle", "--out", "back"]);
    assert_eq!(run.code, Some(2), "{run:?}");
    assert!(run.stderr.contains("is not the one that the manifest lists"), "{run:?}");
    assert!(!scratch.join("back").exists());
}

#[test]
fn unfolding_gives_the_original_within_rounding() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    program.ok(&on_demo("convert", &["--out", "bundle", "--fold-dtype", "f32", "--verify-sequences", "0"]));
    let report = program.ok(&["unfold", "bundle", "--out", "back", "--format", "json"]).json();
    assert_schema("unfold", &report);
    let (original, back) = (tensors(&model()), tensors(&scratch.join("back")));
    assert_eq!(original.keys().collect::<Vec<_>>(), back.keys().collect::<Vec<_>>());
    for (name, (dtype, values)) in &original {
        let (back_dtype, found) = &back[name];
        assert_eq!((dtype, values.len()), (back_dtype, found.len()), "{name}");
        let largest = values.iter().fold(0.0, |a: f64, x| a.max(x.abs()));
        let diff = values.iter().zip(found).fold(0.0, |a: f64, (x, y)| a.max((x - y).abs()));
        let tol = if is_folded(name) { BF16_UNIT_ROUNDOFF * largest } else { 0.0 };
        assert!(diff <= tol, "{name}: {diff:e} > {tol:e}");
    }
    assert!(!scratch.join("back/wush").exists());
    program.ok(&args([&"inspect", &"back", &"--base", &model()]));
    // The folded weights are the same function; without their manifest they pass for the original, which they are not.
    fs::remove_dir_all(scratch.join("bundle/wush")).expect("removed");
    assert_audit(
        &scratch,
        &args([&"inspect", &"bundle", &"--base", &model(), &"--format", &"json"]),
        &["same coordinates"],
    );
}

/// Runs an audit with `--format json` and asserts which checks fail.
fn assert_audit(scratch: &Scratch, command: &[String], expected: &[&str]) {
    let run = wush(scratch).run(command);
    let report = run.json();
    let checks = report["checks"].as_array().expect("checks");
    let failed: Vec<_> = checks.iter().filter(|check| check["ok"] == false).map(|check| &check["name"]).collect();
    assert_eq!(failed, expected, "{checks:#?}");
    assert_eq!(run.code, Some(i32::from(!expected.is_empty())), "{run:?}");
}

#[test]
fn a_manifest_is_held_to_what_can_be_computed_again() {
    let scratch = Scratch::new();
    wush(&scratch).ok(&on_demo("convert", &["--out", "bundle", "--verify-sequences", "0"]));
    let whole = manifest(&scratch.join("bundle"));
    let alone = args([&"inspect", &"bundle", &"--format", &"json"]);
    let with_base = args([&"inspect", &"bundle", &"--base", &model(), &"--format", &"json"]);
    let (keys, values) = ("key transforms are the solver's", "value transforms are the solver's");
    let (key_feedback, value_feedback) = ("key feedback is the solver's", "value feedback is the solver's");
    // Of the values' figures, what the base's weights decide.
    let fit = "value transforms fit the base";
    for (place, value, expected, without_base) in [
        ("/source/family", "llama".into(), &["family"][..], true),
        ("/basis/kind", "original".into(), &["basis"], true),
        ("/fold/dtype", "f32".into(), &["fold dtype"], true),
        ("/calibration/sequences", 5.into(), &["calibration figures"], true),
        ("/layers/2/key/1/cond_gram", 0.5.into(), &["solver's figures", key_feedback], true),
        ("/layers/2/key/1/cond_transform", 1.0.into(), &[keys], true),
        ("/layers/2/value/1", whole["layers"][3]["value"][0].clone(), &[values, value_feedback, fit], true),
        ("/layers/2/value/1/imbalance", 0.123.into(), &[value_feedback, fit], true),
        ("/solve/stats_hash", Value::Null, &["solver's record"], true),
        ("/fold/max_rel_error", 1e-4.into(), &["fold error"], false),
        ("/fold/worst_layer", 6.into(), &["fold error"], false),
    ] {
        let mut edited = whole.clone();
        *edited.pointer_mut(place).expect("a key of the manifest") = value;
        fs::write(scratch.join("bundle/wush/manifest.json"), edited.to_string()).expect("written");
        let by_itself: Vec<&str> = expected.iter().copied().filter(|name| without_base && *name != fit).collect();
        assert_audit(&scratch, &alone, &by_itself);
        assert_audit(&scratch, &with_base, expected);
    }
}

#[test]
fn statistics_are_checked_on_load_and_against_their_model() {
    let scratch = Scratch::new();
    wush(&scratch).ok(&on_demo("calibrate", &["--out", "stats.safetensors"]));
    let audit =
        |base: &Path| args([&"inspect", &"stats.safetensors", &"--base", &base.to_owned(), &"--format", &"json"]);
    assert_audit(&scratch, &audit(&model()), &[]);
    assert_audit(&scratch, &audit(&fixture("tiny/qwen3")), &["same model"]);

    let path = scratch.join("stats.safetensors");
    let mut bytes = fs::read(&path).expect("read");
    let at = bytes.len() - 8;
    bytes[at] ^= 1;
    fs::write(&path, bytes).expect("written");
    let run = wush(&scratch).run(&["solve", "stats.safetensors", "--out", "transforms.safetensors"]);
    assert_eq!(run.code, Some(2), "{run:?}");
    assert!(run.stderr.contains("its content is not what was written") && run.stderr.contains("hint: "), "{run:?}");
}

#[test]
fn transforms_without_statistics_need_no_text() {
    let scratch = Scratch::new();
    for transform in ["identity", "random", "hadamard"] {
        let out = format!("bundle-{transform}");
        let command = args([
            &"convert",
            &model(),
            &"--transform",
            &transform,
            &"--verify-sequences",
            &"0",
            &"--out",
            &out.as_str(),
            &"--format",
            &"json",
        ]);
        let report = wush(&scratch).ok(&command).json();
        assert_schema("convert", &report);
        assert_eq!(report["calibration"], Value::Null);
        wush(&scratch).ok(&args([&"inspect", &out.as_str(), &"--base", &model()]));
    }
    let seeded = |out: &str, seed: &str| {
        let command = args([
            &"convert",
            &model(),
            &"--transform",
            &"random",
            &"--seed",
            &seed,
            &"--verify-sequences",
            &"0",
            &"--out",
            &out,
        ]);
        wush(&scratch).ok(&command);
        contents(&scratch.join(out))
    };
    let first = seeded("seed-1", "1");
    assert!(first == seeded("seed-1-again", "1"));
    assert!(first != seeded("seed-2", "2"));
}

#[test]
fn an_identity_fold_changes_no_weight() {
    let scratch = Scratch::new();
    let command = args([
        &"convert",
        &model(),
        &"--transform",
        &"identity",
        &"--calib",
        &text(),
        &"--seq-len",
        &"64",
        &"--out",
        &"bundle",
        &"--format",
        &"json",
    ]);
    let report = wush(&scratch).ok(&command).json();
    assert_eq!(report["equivalence"]["max_logit_diff"], 0.0);
    let bytes = |dir: &Path| fs::read(dir.join("model.safetensors")).expect("read");
    assert!(bytes(&model()) == bytes(&scratch.join("bundle")));
}

#[test]
fn a_failed_equivalence_check_is_exit_1_and_marked() {
    let scratch = Scratch::new();
    let run = wush(&scratch).run(&on_demo("convert", &["--out", "bundle", "--tolerance", "1e-15", "--format", "json"]));
    assert_eq!(run.code, Some(1), "{run:?}");
    assert_eq!(run.json()["verdict"], "failed");
    assert!(
        run.json()["notes"].to_string().contains("--resume and --fold-dtype f32 or a larger --tolerance"),
        "{run:?}"
    );
    assert_eq!(names(scratch.path()), ["bundle.failed", "bundle.wush-work"]);
    assert_eq!(manifest(&scratch.join("bundle.failed"))["status"], "failed");
    let card = fs::read_to_string(scratch.join("bundle.failed/wush/README.md")).expect("a card");
    assert!(card.contains("equivalence check failed"), "{card}");
    let audit = wush(&scratch).run(&["inspect", "bundle.failed"]);
    assert_eq!(audit.code, Some(1), "{audit:?}");
    let unfolded = wush(&scratch).ok(&["unfold", "bundle.failed", "--out", "back"]);
    assert!(unfolded.stdout.contains("note         the bundle's equivalence check had failed"), "{unfolded:?}");
    fs::remove_dir_all(scratch.join("back")).expect("removed");

    // Another tolerance needs no other statistics.
    let again = on_demo("convert", &["--out", "bundle", "--resume"]);
    let run = wush(&scratch).run(&again);
    assert!(run.stderr.contains("bundle.failed: exists already") && run.stderr.contains("failed its check"), "{run:?}");
    fs::remove_dir_all(scratch.join("bundle.failed")).expect("removed");
    let run = wush(&scratch).ok(&again);
    assert!(run.stderr.contains("all sequences are done"), "{run:?}");
    assert_eq!(names(scratch.path()), ["bundle"]);
    let run = wush(&scratch).run(&again);
    assert!(run.stderr.contains("that run is finished"), "{run:?}");
}

#[test]
fn small_tolerances_are_told_as_they_are() {
    let scratch = Scratch::new();
    let run = wush(&scratch).run(&on_tiny(&scratch, "convert", &tiny(), &["--out", "bundle", "--tolerance", "1e-12"]));
    assert!(run.stdout.contains("tolerance 1.0e-10 %"), "{run:?}");
}

#[test]
fn tampering_is_caught_by_the_audit() {
    let scratch = Scratch::new();
    wush(&scratch).ok(&on_tiny(&scratch, "convert", &tiny(), &["--out", "bundle"]));
    wush(&scratch).ok(&args([&"inspect", &"bundle", &"--base", &tiny()]));
    for (name, offset_from_end) in [
        ("model.safetensors", 8),
        ("wush/key_transforms.safetensors", 8),
        ("wush/value_transforms.safetensors", 8),
        ("config.json", 3),
    ] {
        let spoiled = scratch.copy_of(&scratch.join("bundle"), "spoiled");
        let path = spoiled.join(name);
        let mut bytes = fs::read(&path).expect("read");
        let at = bytes.len() - offset_from_end;
        bytes[at] ^= 0x04;
        fs::write(&path, bytes).expect("written");
        let run = wush(&scratch).run(&["inspect", "spoiled"]);
        assert!(matches!(run.code, Some(1 | 2)), "{name}: {run:?}");
        fs::remove_dir_all(&spoiled).expect("removed");
    }
}

#[test]
fn the_html_report_is_one_page() {
    let scratch = Scratch::new();
    wush(&scratch).ok(&on_tiny(&scratch, "convert", &tiny(), &["--out", "bundle"]));
    wush(&scratch).ok(&["inspect", "bundle", "--html", "page.html"]);
    wush(&scratch).ok(&["inspect", "bundle", "--html", "page.html"]);
    let weights = fs::read(scratch.join("bundle/model.safetensors")).expect("weights");
    let refused = wush(&scratch).run(&["inspect", "bundle", "--html", "bundle/model.safetensors"]);
    assert_eq!(refused.code, Some(2), "{refused:?}");
    assert_eq!(fs::read(scratch.join("bundle/model.safetensors")).expect("weights"), weights);
    // A page among a bundle's or a checkpoint's files would be one of them.
    let base = scratch.copy_of(&tiny(), "base");
    for (page, more) in
        [("bundle/page.html", &[][..]), ("base/page.html", &["--base", "base"]), ("base/page.html", &[])]
    {
        let refused = wush(&scratch).run(&[&["inspect", "bundle", "--html", page][..], more].concat());
        assert_eq!(refused.code, Some(2), "{refused:?}");
        assert!(refused.stderr.contains("inside the checkpoint directory"), "{refused:?}");
    }
    assert!(!base.join("page.html").exists() && !scratch.join("bundle/page.html").exists());
    let again = wush(&scratch).ok(&["inspect", "bundle", "--html", "page.html"]);
    assert!(again.stderr.contains("page: page.html, in place of an older one"), "{again:?}");
    let page = fs::read_to_string(scratch.join("page.html")).expect("a page");
    assert!(page.starts_with("<!DOCTYPE html>") || page.starts_with("<!doctype html>"), "{}", &page[..40]);
    assert!(page.contains("<svg") && !page.contains("http-equiv") && !page.contains("src=\"http"));
}
