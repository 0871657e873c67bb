//! Export to another server's format: what is written, what it is for, and what is refused with a way on. That the files are
//! what Python and candle read is tested in `crates/wush-export/tests` and `tests/external/export_oscar.py`.

use std::fs;

use serde_json::Value;
use wush_tests::{Program, Scratch, contents, names};

use crate::common::{args, assert_schema, filters, model, on_demo, stable, tiny, wush};

/// A bundle of the demonstration model by a transform, made without text where it needs none.
fn bundle(program: &Program, transform: &str, out: &str) {
    match transform {
        "oscar" | "oscar-per-head" | "wush" => {
            program.ok(&on_demo("convert", &["--transform", transform, "--verify-sequences", "0", "--out", out]))
        }
        _ => {
            let verify: &str = "--verify-sequences";
            program.ok(&args([&"convert", &model(), &"--transform", &transform, &verify, &"0", &"--out", &out]))
        }
    };
}

/// Runs that must fail with exit code 2, a message with `expected` and a hint with `way`; nothing may be left behind.
fn assert_refused(scratch: &Scratch, command: &[&str], expected: &str, way: &str) {
    let before = names(scratch.path());
    let run = wush(scratch).run(command);
    assert_eq!(run.code, Some(2), "{command:?}: {run:?}");
    assert!(run.stdout.is_empty() && run.stderr.lines().count() == 2, "{command:?}: {run:?}");
    let lines: Vec<&str> = run.stderr.lines().collect();
    assert!(lines[0].starts_with("error: ") && lines[0].contains(expected), "{command:?}: {run:?}");
    assert!(lines[1].starts_with("hint: ") && lines[1].contains(way), "{command:?}: {run:?}");
    assert_eq!(names(scratch.path()), before, "{command:?}");
}

#[test]
fn an_oscar_bundle_is_exported_for_its_own_weights() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    bundle(&program, "oscar", "bundle");
    let report = program.ok(&["export", "bundle", "--out", "rotations", "--format", "json"]).json();
    assert_schema("export", &report);
    let export = &report["export"];
    assert_eq!((&export["format"], &export["format_version"]), (&"oscar".into(), &1.into()));
    assert_eq!((&export["serves"], &export["solve"]["transform"]), (&"bundle".into(), &"oscar".into()));
    let manifest: Value = serde_json::from_slice(&fs::read(scratch.join("bundle/wush/manifest.json")).expect("read"))
        .expect("a manifest");
    assert_eq!(export["model_hash"], manifest["basis"]["model_hash"]);
    let layers = export["layers"].as_array().expect("a list");
    assert_eq!(layers.len(), manifest["layers"].as_array().expect("a list").len());
    assert!(layers.iter().all(|layer| layer["value_error"] == 0.0), "the identity: {layers:?}");
    assert_eq!(report["notes"], serde_json::json!([]));

    assert_eq!(names(&scratch.join("rotations")), ["export.json", "k_rotation.pt", "v_rotation.pt"]);
    let record: Value =
        serde_json::from_slice(&fs::read(scratch.join("rotations/export.json")).expect("read")).expect("JSON");
    assert_eq!(&record, export);
    let verified = export["files"].as_array().expect("a list").iter().map(|file| {
        let path = scratch.join("rotations").join(file["path"].as_str().expect("a path"));
        fs::metadata(path).expect("there").len() == file["n_bytes"].as_u64().expect("a length")
    });
    assert_eq!(verified.collect::<Vec<_>>(), [true, true]);

    // The same input gives the same bytes, and nothing that is there is touched.
    program.ok(&["export", "bundle", "--out", "again"]);
    assert_eq!(contents(&scratch.join("again")), contents(&scratch.join("rotations")));
    assert_refused(&scratch, &["export", "bundle", "--out", "again"], "again: exists already", "--out");
    assert_refused(&scratch, &["export", "bundle", "--out", "bundle/rotations"], "lies inside", "outside");
}

#[test]
fn transforms_are_exported_for_the_model_that_they_were_solved_for() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    program.ok(&on_demo("calibrate", &["--second-pass", "oscar", "--out", "stats.safetensors"]));
    for (transform, version) in [("oscar", 1), ("oscar-per-head", 2), ("hadamard", 1), ("random", 2), ("identity", 1)] {
        let file = format!("{transform}.safetensors");
        program.ok(&["solve", "stats.safetensors", "--transform", transform, "--out", &file]);
        let report = program.ok(&["export", &file, "--out", transform, "--format", "json"]).json();
        assert_schema("export", &report);
        let export = &report["export"];
        assert_eq!((&export["serves"], &export["format_version"]), (&"source".into(), &version.into()), "{transform}");
        // The Hadamard matrix of 64 has elements ±1/8.
        let exact = ["identity", "hadamard"].contains(&transform);
        let errors = export["layers"].as_array().expect("a list").iter();
        let errors: Vec<f64> = errors.map(|layer| layer["value_error"].as_f64().expect("a number")).collect();
        assert!(errors.iter().all(|&error| error <= 2.4e-7 && (error == 0.0) == exact), "{transform}: {errors:?}");
    }
    program.ok(&["export", "oscar.safetensors", "--to", "oscar-2", "--out", "per-head"]);
    let per_head = ["export", "oscar-per-head.safetensors", "--to", "oscar-1", "--out", "per-layer"];
    assert_refused(&scratch, &per_head, "KV head 1 has another key rotation", "--to oscar-2");
    assert_refused(&scratch, &["export", "stats.safetensors", "--out", "x"], "is a statistics file", "wush solve");
}

#[test]
fn what_has_no_place_in_the_format_is_refused() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    bundle(&program, "wush", "wush");
    assert_refused(&scratch, &["export", "wush", "--out", "x"], "the key transform is not orthogonal", "oscar");
    let convert = |out: &str, more: &[&str]| {
        let all = [&["--transform", "oscar", "--verify-sequences", "0", "--out", out], more].concat();
        program.ok(&on_demo("convert", &all));
    };
    convert("centered", &["--center-keys", "always"]);
    assert_refused(&scratch, &["export", "centered", "--out", "x"], "a mean is taken", "--center-keys never");
    convert("feedback", &["--feedback"]);
    assert_refused(&scratch, &["export", "feedback", "--out", "x"], "error feedback", "--feedback false");

    let tiny = tiny().display().to_string();
    assert_refused(&scratch, &["export", &tiny, "--out", "x"], "is not a bundle", "wush convert");
    assert_refused(&scratch, &["export", "nothing", "--out", "x"], "nothing: cannot", "nothing is there");
}

#[test]
fn a_changed_sidecar_is_not_exported() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    bundle(&program, "hadamard", "bundle");
    let sidecar = scratch.join("bundle/wush/key_transforms.safetensors");
    let mut bytes = fs::read(&sidecar).expect("read");
    let at = bytes.len() - 3;
    bytes[at] ^= 1;
    fs::write(&sidecar, bytes).expect("written");
    assert_refused(&scratch, &["export", "bundle", "--out", "x"], "SHA-256 that the manifest lists", "wush inspect");
}

#[test]
fn the_report_of_an_export_reads_well() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    bundle(&program, "hadamard", "bundle");
    let shown = |text: &str| stable(text, &scratch);
    let export = program.ok(&["export", "bundle", "--out", "rotations"]);
    insta::with_settings!({ filters => filters(), snapshot_path => "snapshots", prepend_module_to_snapshot => false }, {
        insta::assert_snapshot!("export_stdout", shown(&export.stdout));
    });
}

/// What llama.cpp needs: a last factor that its own rotation of quantized caches does not cancel.
#[test]
fn a_bundle_with_a_random_factor_is_made_and_passes_the_audit() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    let convert =
        program.ok(&on_demo("convert", &["--factor", "random", "--out", "bundle", "--format", "json"])).json();
    assert_schema("convert", &convert);
    assert_eq!((&convert["verdict"], &convert["solve"]["factor"]), (&"ok".into(), &"random".into()));
    let base = model().display().to_string();
    program.ok(&["inspect", "bundle", "--base", &base]);

    program.ok(&on_demo("calibrate", &["--out", "stats.safetensors"]));
    program.ok(&["solve", "stats.safetensors", "--factor", "random", "--out", "transforms.safetensors"]);
    let text = model().join("calibration.txt").display().to_string();
    program.ok(&["fold", &base, "transforms.safetensors", "--calib", &text, "--out", "folded"]);
    let sidecars = |name: &str| fs::read(scratch.join(name).join("wush/value_transforms.safetensors")).expect("read");
    assert_eq!(sidecars("folded"), sidecars("bundle"), "both ways give the same transforms");
}
