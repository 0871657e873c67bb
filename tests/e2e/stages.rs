//! The stages one by one: statistics, their sums, transforms, and how calibration text comes in.

use std::fs;

use safetensors::SafeTensors;
use wush_tests::{Scratch, contents, fixture, names};

use crate::common::{args, assert_schema, model, on_demo, on_tiny, text, tiny, token_ids, wush};

/// Sums of the same f64 terms in two orders: each addition errs by at most 2^-53 of a partial sum, and there are a few
/// hundred.
const SUM_REL_TOL: f64 = 1e-12;

fn stats_values(path: &std::path::Path) -> Vec<(String, Vec<f64>)> {
    let bytes = fs::read(path).expect("read");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let f64s = |data: &[u8]| data.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().expect("8 bytes"))).collect();
    let mut all: Vec<_> = file.iter().map(|(name, view)| (name.to_owned(), f64s(view.data()))).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

#[test]
fn shards_merge_to_the_whole() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    let whole = program.ok(&on_demo("calibrate", &["--out", "whole.safetensors", "--format", "json"])).json();
    assert_schema("calibrate", &whole);
    for shard in ["1/3", "2/3", "3/3"] {
        let out = format!("part-{}.safetensors", &shard[..1]);
        let report = program.ok(&on_demo("calibrate", &["--shard", shard, "--out", &out, "--format", "json"])).json();
        assert_schema("calibrate", &report);
        assert_eq!(report["calibration"]["sequences"], 2);
    }
    let parts = ["part-1.safetensors", "part-2.safetensors", "part-3.safetensors"];
    let merge = ["merge", parts[0], parts[1], parts[2], "--out", "merged.safetensors", "--format", "json"];
    let merged = program.ok(&merge).json();
    assert_schema("merge", &merged);
    assert_eq!(merged["calibration"], whole["calibration"]);

    let (sum, expected) =
        (stats_values(&scratch.join("merged.safetensors")), stats_values(&scratch.join("whole.safetensors")));
    assert!(!expected.is_empty());
    for ((name, found), (expected_name, expected)) in sum.iter().zip(&expected) {
        assert_eq!(name, expected_name);
        let largest = expected.iter().fold(0.0, |a: f64, x| a.max(x.abs()));
        let worst = found.iter().zip(expected).fold(0.0, |a: f64, (x, y)| a.max((x - y).abs()));
        assert!(found.len() == expected.len() && worst <= SUM_REL_TOL * largest, "{name}: {worst:e} of {largest:e}");
    }
    program.ok(&["inspect", "merged.safetensors"]);
}

#[test]
fn merge_refuses_what_does_not_add_up() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    program.ok(&on_tiny(&scratch, "calibrate", &tiny(), &["--out", "a.safetensors"]));
    let run = program.run(&["merge", "a.safetensors", "a.safetensors", "--out", "sum.safetensors"]);
    assert_eq!(run.code, Some(2), "{run:?}");
    assert!(run.stderr.contains("is counted already") && run.stderr.contains("hint: "), "{run:?}");

    let other = args([
        &"calibrate",
        &fixture("tiny/qwen3"),
        &"--calib",
        &token_ids(&scratch, "other.json", 2, 12),
        &"--out",
        &"b.safetensors",
    ]);
    program.ok(&other);
    let run = program.run(&["merge", "a.safetensors", "b.safetensors", "--out", "sum.safetensors"]);
    assert_eq!(run.code, Some(2), "{run:?}");
    assert!(run.stderr.contains("cannot add statistics number 2 to the first"), "{run:?}");
    assert!(!scratch.join("sum.safetensors").exists());
}

#[test]
fn every_transform_solves_from_statistics() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    let everything = ["--hessian", "attention", "--second-pass", "oscar", "--out", "stats.safetensors"];
    program.ok(&on_tiny(&scratch, "calibrate", &tiny(), &everything));
    program.ok(&args([&"inspect", &"stats.safetensors", &"--base", &tiny()]));
    for transform in ["identity", "random", "hadamard", "oscar", "oscar-per-head", "wush", "wush-a"] {
        let out = format!("{transform}.safetensors");
        let solve = ["solve", "stats.safetensors", "--transform", transform, "--out", &out, "--format", "json"];
        let report = program.ok(&solve).json();
        assert_schema("solve", &report);
        let head = &report["layers"][0]["key"][0];
        let gain = head["predicted_gain"].as_f64().expect("a number");
        // Orthogonal transforms leave both traces, so their gain is 1; no transform beats Eq. 1.
        assert!(
            if transform.starts_with("wush") { gain > 1.0 } else { (gain - 1.0).abs() <= 1e-9 },
            "{transform}: {gain}"
        );
        program.ok(&["inspect", &out]);
    }
}

/// What a transform needs is gathered for it by `convert`, and asked for by name where a file does not hold it.
#[test]
fn transforms_of_more_than_moments_convert_or_say_what_they_need() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    for transform in ["oscar", "oscar-per-head", "wush-a"] {
        let out = format!("bundle-{transform}");
        let more = ["--transform", transform, "--out", &out, "--format", "json"];
        let report = program.ok(&on_tiny(&scratch, "convert", &tiny(), &more)).json();
        assert_eq!(
            (&report["solve"]["transform"], &report["equivalence"]["passed"]),
            (&transform.into(), &true.into())
        );
        program.ok(&args([&"inspect", &out.as_str(), &"--base", &tiny()]));
    }
    program.ok(&on_tiny(&scratch, "calibrate", &tiny(), &["--out", "plain.safetensors"]));
    for (transform, option) in
        [("oscar", "--second-pass oscar"), ("oscar-per-head", "--second-pass oscar"), ("wush-a", "--hessian attention")]
    {
        let run = program.run(&["solve", "plain.safetensors", "--transform", transform, "--out", "t.safetensors"]);
        assert_eq!(run.code, Some(2), "{run:?}");
        assert!(run.stderr.contains("made from more than these statistics hold"), "{run:?}");
        assert!(run.stderr.contains(&format!("calibrate with {option}")), "{run:?}");
    }
}

/// A second pass weighs by the sums of one run: neither a share nor a sum of shares has one.
#[test]
fn a_second_pass_is_of_one_run() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    let weighed = ["--second-pass", "oscar", "--out", "a.safetensors"];
    let shard = [&weighed[..], &["--shard", "1/2"]].concat();
    let run = program.run(&on_tiny(&scratch, "calibrate", &tiny(), &shard));
    assert_eq!(run.code, Some(2), "{run:?}");
    assert!(run.stderr.contains("--second-pass"), "{run:?}");
    program.ok(&on_tiny(&scratch, "calibrate", &tiny(), &[&weighed[..], &["--sequences", "2"]].concat()));
    program.ok(&on_tiny(&scratch, "calibrate", &tiny(), &["--shard", "2/2", "--out", "b.safetensors"]));
    let run = program.run(&["merge", "b.safetensors", "a.safetensors", "--out", "sum.safetensors"]);
    assert_eq!(run.code, Some(2), "{run:?}");
    assert!(run.stderr.contains("cannot add statistics number 2") && run.stderr.contains("second pass"), "{run:?}");
}

/// Everything beyond the paper at once: solved, folded, verified, audited, and recorded.
#[test]
fn centring_exponent_factor_and_feedback_reach_the_bundle() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    let beyond = ["--exponent", "0.4", "--factor", "balanced", "--center-keys", "always", "--feedback"];
    let more = [&["--out", "bundle", "--format", "json"], &beyond[..]].concat();
    let report = program.ok(&on_tiny(&scratch, "convert", &tiny(), &more)).json();
    assert_schema("convert", &report);
    assert_eq!(report["equivalence"]["passed"], true);
    let solve = &report["solve"];
    assert_eq!((&solve["exponent"], &solve["factor"]), (&0.4.into(), &"balanced".into()));
    assert_eq!((&solve["center_keys"], &solve["feedback"]), (&"always".into(), &true.into()));
    let centered = report["layers"][0]["centered_keys"].as_array().expect("a list").len();
    assert_eq!(centered, report["layers"][0]["key"].as_array().expect("a list").len());
    assert!(scratch.join("bundle/wush/value_feedback.safetensors").is_file());
    program.ok(&args([&"inspect", &"bundle", &"--base", &tiny()]));

    // The same in steps: the same sidecar.
    program.ok(&on_tiny(&scratch, "calibrate", &tiny(), &["--out", "stats.safetensors"]));
    program.ok(&[&["solve", "stats.safetensors", "--out", "t.safetensors"], &beyond[..]].concat());
    program.ok(&["inspect", "t.safetensors"]);
    program.ok(&args([&"fold", &tiny(), &"t.safetensors", &"--out", &"again"]));
    for name in ["key_transforms", "value_transforms", "value_feedback"] {
        let of = |dir: &str| fs::read(scratch.join(&format!("{dir}/wush/{name}.safetensors"))).expect("read");
        assert_eq!(of("bundle"), of("again"), "{name}");
    }
}

/// A softcap comes between the keys and the softmax: there is nothing to centre.
#[test]
fn capped_logits_are_not_centred() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    let model = fixture("tiny").join("gemma2");
    let ids = token_ids(&scratch, "ids.json", 4, 14);
    program.ok(&args([&"calibrate", &model, &"--calib", &ids, &"--out", &"stats.safetensors"]));
    let solve = |rule: &str| {
        program.run(&[
            "solve",
            "stats.safetensors",
            "--center-keys",
            rule,
            "--out",
            "t.safetensors",
            "--format",
            "json",
        ])
    };
    let run = solve("always");
    assert_eq!(run.code, Some(2), "{run:?}");
    assert!(run.stderr.contains("gemma2 caps its attention logits") && run.stderr.contains("hint"), "{run:?}");
    let run = solve("auto");
    assert_eq!(run.code, Some(0), "{run:?}");
    assert_eq!(run.json()["layers"][0]["centered_keys"], serde_json::json!([]));
}

#[test]
fn token_ids_are_used_as_they_are() {
    let scratch = Scratch::new();
    let report =
        wush(&scratch).ok(&on_tiny(&scratch, "calibrate", &tiny(), &["--out", "a.safetensors", "--format", "json"]));
    let report = report.json();
    assert_eq!((&report["calibration"]["sequences"], &report["calibration"]["tokens"]), (&4.into(), &96.into()));
    assert_eq!(report["calibration"]["source"], "ids.json", "no directory of this machine");
    let fewer = wush(&scratch).ok(&on_tiny(
        &scratch,
        "calibrate",
        &tiny(),
        &["--sequences", "2", "--out", "b.safetensors", "--format", "json"],
    ));
    assert_eq!(fewer.json()["calibration"]["tokens"], 48);
}

#[test]
fn every_tiny_family_converts_and_passes_its_audit() {
    let scratch = Scratch::new();
    let ids = token_ids(&scratch, "ids.json", 4, 14);
    let families = names(&fixture("tiny"));
    let mut n_families = 0;
    for family in families.iter().filter(|name| fixture("tiny").join(name).is_dir()) {
        let model = fixture("tiny").join(family);
        let out = format!("out-{family}");
        let convert = args([&"convert", &model, &"--calib", &ids, &"--out", &out.as_str(), &"--format", &"json"]);
        let report = wush(&scratch).ok(&convert).json();
        assert_eq!(report["equivalence"]["passed"], true, "{family}");
        let audit = wush(&scratch).run(&args([&"inspect", &out.as_str(), &"--base", &model]));
        assert_eq!(audit.code, Some(0), "{family}: {audit:?}");
        n_families += 1;
    }
    assert!(n_families >= 10, "{families:?}");
}

#[test]
fn a_fold_refuses_transforms_of_another_model() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    program.ok(&on_tiny(&scratch, "calibrate", &tiny(), &["--out", "stats.safetensors"]));
    program.ok(&["solve", "stats.safetensors", "--out", "transforms.safetensors"]);
    let model = scratch.copy_of(&tiny(), "model");
    let path = model.join("model.safetensors");
    let mut bytes = fs::read(&path).expect("read");
    let last = bytes.len() - 2;
    bytes[last] ^= 1;
    fs::write(&path, bytes).expect("written");
    let run = program.run(&["fold", "model", "transforms.safetensors", "--out", "bundle"]);
    assert_eq!(run.code, Some(2), "{run:?}");
    assert!(run.stderr.contains("belong to model"), "{run:?}");
    assert!(!names(scratch.path()).iter().any(|name| name.contains("bundle")), "{:?}", names(scratch.path()));
}

#[test]
fn a_fold_reads_as_much_text_as_it_checks() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    let calibrate = args([&"calibrate", &model(), &"--calib", &text(), &"--out", &"stats.safetensors"]);
    program.ok(&[&calibrate[..], &["--sequences", "1", "--seq-len", "128"].map(str::to_owned)].concat());
    program.ok(&["solve", "stats.safetensors", "--out", "transforms.safetensors"]);
    // 3 sequences of 128 tokens are there, but not two of the model's 4096.
    let long = fs::read_to_string(text()).expect("text");
    let part = scratch.write("part.txt", &long[..2400]);
    let fold = args([&"fold", &model(), &"transforms.safetensors", &"--calib", &part, &"--out", &"bundle"]);
    let run = program.ok(&[&fold[..], &["--format", "json"].map(str::to_owned)].concat());
    assert_eq!(run.json()["equivalence"]["tokens"], 2 * 127);
    assert_eq!(run.json()["verify_text"], "part.txt");
    assert!(run.stderr.contains("verify     part.txt: 2 sequences"), "{run:?}");

    let without = args([&"fold", &model(), &"transforms.safetensors", &"--out", &"other", &"--seq-len", &"64"]);
    let refused = program.run(&without);
    assert!(refused.code == Some(2) && refused.stderr.contains("--calib"), "{refused:?}");
}

#[test]
fn a_check_on_fewer_sequences_says_so() {
    let scratch = Scratch::new();
    let command = on_tiny(&scratch, "convert", &tiny(), &["--out", "bundle", "--verify-sequences", "5"]);
    let run = wush(&scratch).ok(&command);
    assert!(run.stdout.contains("equivalence was checked on 4 sequences, all that there are, and not on 5"), "{run:?}");
}

#[test]
fn a_fold_without_text_says_that_nothing_was_checked() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    program.ok(&on_tiny(&scratch, "calibrate", &tiny(), &["--out", "stats.safetensors"]));
    program.ok(&["solve", "stats.safetensors", "--out", "transforms.safetensors"]);
    let fold = args([&"fold", &tiny(), &"transforms.safetensors", &"--out", &"bundle", &"--format", &"json"]);
    let report = program.ok(&fold).json();
    assert_schema("fold", &report);
    assert!(report["equivalence"].is_null());
    assert!(report["notes"].to_string().contains("equivalence not checked"), "{report}");
    fs::remove_dir_all(scratch.join("bundle")).expect("removed");
    let text = program.ok(&fold[..5]).stdout;
    assert!(text.contains("verdict      ok, equivalence not checked"), "{text}");
    assert!(text.contains("next: wush inspect bundle --base "), "{text}");
    assert!(contents(&scratch.join("bundle")).len() > 4);
}
