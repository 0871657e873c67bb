//! `wush eval`: perplexity through the quantized cache.

use serde_json::Value;

use crate::common::{args, assert_schema, model, on_demo, text, wush};
use wush_tests::Scratch;

/// Windows of 512 tokens, so that most of each is quantized.
const WINDOWS: [&str; 4] = ["--seq-len", "512", "--windows", "2"];

fn ppl(report: &Value, transform: &str, bits: u64) -> f64 {
    let rows = report["rows"].as_array().expect("rows");
    let row = rows.iter().find(|row| row["transform"] == transform && row["bits"] == bits);
    row.and_then(|row| row["ppl"].as_f64()).unwrap_or_else(|| panic!("no row {transform}, {bits} bits: {report}"))
}

#[test]
fn perplexity_rises_as_bits_fall_and_feedback_holds_it_down() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    let cut = ["--sequences", "32", "--seq-len", "512", "--out", "s.safetensors"];
    program.ok(&[args([&"calibrate", &model(), &"--calib", &text()]), cut.map(str::to_owned).to_vec()].concat());
    let evaluate = |more: &[&str]| {
        let fixed =
            args([&"eval", &"ppl", &model(), &"--text", &text(), &"--stats", &"s.safetensors", &"--format", &"json"]);
        let all = [fixed, WINDOWS.map(str::to_owned).to_vec(), more.iter().map(|&s| s.to_owned()).collect()].concat();
        let report = program.ok(&all).json();
        assert_schema("eval-ppl", &report);
        report
    };
    let plain = evaluate(&["--bits", "8,2", "--transform", "identity,wush"]);
    assert_eq!(plain["rows"][0]["transform"], "none");
    let exact = ppl(&plain, "none", 16);
    assert!((ppl(&plain, "wush", 8) / exact - 1.0).abs() < 1e-3, "{plain}");
    assert!(ppl(&plain, "identity", 2) > ppl(&plain, "wush", 2), "{plain}");
    assert!(ppl(&plain, "wush", 2) > exact, "{plain}");
    let options =
        ["--bits", "2", "--transform", "wush", "--exponent", "0.4", "--feedback", "--quantizer", "quest:1.85"];
    let better = evaluate(&options);
    assert!(ppl(&better, "wush", 2) < ppl(&plain, "wush", 2), "{better} {plain}");
}

#[test]
fn a_bundle_is_evaluated_with_its_own_transforms() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    program.ok(&on_demo("convert", &["--out", "b"]));
    let run = |more: &[&str]| {
        let fixed = args([&"eval", &"ppl", &"b", &"--text", &text(), &"--bits", &"8", &"--format", &"json"]);
        program
            .run(&[fixed, WINDOWS.map(str::to_owned).to_vec(), more.iter().map(|&s| s.to_owned()).collect()].concat())
    };
    let report = run(&[]).json();
    assert!((ppl(&report, "bundle", 8) / ppl(&report, "none", 16) - 1.0).abs() < 1e-3, "{report}");
    let refused = run(&["--transform", "identity"]);
    assert_eq!(refused.code, Some(2), "{refused:?}");
    assert!(refused.stderr.contains("a bundle is evaluated with its own"), "{refused:?}");
}

#[test]
fn what_a_transform_needs_is_said_before_anything_runs() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    let run = program.run(&args([&"eval", &"ppl", &model(), &"--text", &text(), &"--transform", &"wush"]));
    assert_eq!(run.code, Some(2), "{run:?}");
    assert!(run.stderr.contains("--stats"), "{run:?}");
    let run = program.run(&args([&"eval", &"ppl", &model(), &"--text", &text(), &"--bits", &"5"]));
    assert_eq!(run.code, Some(2), "{run:?}");
}
