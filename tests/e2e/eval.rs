//! `wush eval`: perplexity through the quantized cache.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStderr};

use serde_json::Value;

use crate::common::{args, assert_schema, edit_tensors, model, on_demo, text, wush};
use wush_tests::{Outcome, Program, Scratch, names, signal};

/// Windows of 512 tokens, so that most of each is quantized.
const WINDOWS: [&str; 4] = ["--seq-len", "512", "--windows", "2"];
/// How a run calibrates.
const CALIBRATION: [&str; 4] = ["--sequences", "16", "--calib-seq-len", "512"];

fn owned(parts: &[&str]) -> Vec<String> {
    parts.iter().map(|&part| part.to_owned()).collect()
}

/// `wush eval ppl` of `what` on the demonstration model's text, with `more`.
fn evaluate(program: &Program, what: &str, more: &[&str]) -> Outcome {
    let fixed = args([&"eval", &"ppl", &what, &"--text", &text(), &"--format", &"json"]);
    program.run(&[fixed, owned(&WINDOWS), owned(more)].concat())
}

/// The report of a run that succeeds.
fn report(program: &Program, what: &str, more: &[&str]) -> Value {
    let run = evaluate(program, what, more);
    assert_eq!(run.code, Some(0), "{run:?}");
    let report = run.json();
    assert_schema("eval-ppl", &report);
    report
}

fn on_model() -> String {
    model().to_str().expect("test paths are UTF-8").to_owned()
}

/// `--calib` on the demonstration model's text.
fn calibration() -> Vec<String> {
    [args([&"--calib", &text()]), owned(&CALIBRATION)].concat()
}

fn ppl(report: &Value, transform: &str, bits: u64) -> f64 {
    let rows = report["rows"].as_array().expect("rows");
    let row = rows.iter().find(|row| row["transform"] == transform && row["bits"] == bits);
    row.and_then(|row| row["ppl"].as_f64()).unwrap_or_else(|| panic!("no row {transform}, {bits} bits: {report}"))
}

#[test]
fn perplexity_rises_as_bits_fall_and_feedback_holds_it_down() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    let calibration = calibration();
    let calibration: Vec<&str> = calibration.iter().map(String::as_str).collect();
    let evaluate = |more: &[&str]| report(&program, &on_model(), &[&calibration, more].concat());
    let plain = evaluate(&["--preset", "paper", "--bits", "8,2", "--transform", "identity,wush"]);
    assert_eq!(plain["rows"][0]["transform"], "none");
    let exact = ppl(&plain, "none", 16);
    assert!((ppl(&plain, "wush", 8) / exact - 1.0).abs() < 1e-3, "{plain}");
    assert!(ppl(&plain, "identity", 2) > ppl(&plain, "wush", 2), "{plain}");
    assert!(ppl(&plain, "wush", 2) > exact, "{plain}");
    let options =
        ["--bits", "2", "--transform", "wush", "--exponent", "0.4", "--feedback", "true", "--quantizer", "quest:1.85"];
    let better = evaluate(&options);
    assert!(ppl(&better, "wush", 2) < ppl(&plain, "wush", 2), "{better} {plain}");
}

/// An option goes to the transforms of the list that take it, and statistics that none needs are not read: both are told.
#[test]
fn options_that_are_for_some_transforms_are_told() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    let calibration = calibration();
    let calibration: Vec<&str> = calibration.iter().map(String::as_str).collect();
    let fixed = ["--bits", "2", "--quantizer", "quest", "--preset", "paper"];
    let of = |more: &[&str]| report(&program, &on_model(), &[&fixed[..], more].concat());
    let mixed = of(&[&calibration[..], &["--transform", "hadamard,wush", "--exponent", "0.4"]].concat());
    assert_eq!(mixed["notes"][0], "--exponent is for wush, not for hadamard", "{mixed}");
    let plain = of(&["--transform", "hadamard", "--calib", "nowhere.txt"]);
    assert_eq!(plain["notes"][0], "--calib is not read: no statistics are needed for hadamard", "{plain}");
    assert_eq!(ppl(&mixed, "hadamard", 2), ppl(&plain, "hadamard", 2));
    let published = of(&[&calibration[..], &["--transform", "wush"]].concat());
    assert_ne!(ppl(&mixed, "wush", 2), ppl(&published, "wush", 2));
}

/// Hints name the options of the text that they are about.
#[test]
fn hints_name_the_options_of_their_text() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    scratch.write("rows.jsonl", "{\"body\": \"no field of that name\"}\n");
    let of = |more: &[&str]| {
        let run = program.run(&[args([&"eval", &"ppl", &model(), &"--transform", &"wush"]), owned(more)].concat());
        assert_eq!(run.code, Some(2), "{run:?}");
        run.stderr.lines().find(|line| line.starts_with("hint: ")).unwrap_or_default().to_owned()
    };
    assert_eq!(of(&["--text", "none.txt"]), "hint: pass --text FILE, a folder, or hf:org/name[@revision][:glob]");
    assert_eq!(of(&["--text", "rows.jsonl"]), "hint: name the text with --text-field");
    let words = text();
    let words = words.to_str().expect("test paths are UTF-8");
    let many = of(&["--text", words, "--windows", "100000"]);
    assert!(many.starts_with("hint: ask for --windows ") && many.contains("a smaller --seq-len"), "{many}");
    let given = ["--text", words, "--windows", "1"];
    let of_calib = |more: &[&str]| of(&[&given[..], more].concat());
    assert_eq!(of_calib(&["--calib", "rows.jsonl"]), "hint: name the text with --calib-text-field");
    let many = of_calib(&["--calib", words, "--sequences", "100000"]);
    assert!(many.starts_with("hint: ask for --sequences ") && many.contains("a smaller --calib-seq-len"), "{many}");
}

/// A text is scored whole unless a number of windows is asked for.
#[test]
fn all_of_the_text_is_scored() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    let words = fs::read_to_string(text()).expect("read");
    let short: String = words.chars().take(6000).collect();
    let short = scratch.write("short.txt", short);
    let fixed = args([&"eval", &"ppl", &model(), &"--text", &short, &"--seq-len", &"256", &"--format", &"json"]);
    let run = |more: &[&str]| program.run(&[fixed.clone(), owned(&["--transform", "identity"]), owned(more)].concat());
    let all = run(&["--bits", "8"]).json();
    let n = all["sequences"].as_u64().expect("a number");
    assert!(n > 1, "{all}");
    assert_eq!(all["rows"][0]["tokens"], n * 255, "all but the first of each");
    let refused = run(&["--windows", &(n + 1).to_string()]);
    assert_eq!(refused.code, Some(2), "{refused:?}");
    assert!(refused.stderr.contains(&format!("found {n}")), "{refused:?}");
}

/// One calibration gathers what every transform of the list is made from, and leaves nothing behind.
#[test]
fn calibrating_within_a_run_gives_the_numbers_of_a_statistics_file() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    let cut = ["--sequences", "6", "--seq-len", "256", "--out", "s.safetensors"];
    let gather = ["--hessian", "attention", "--second-pass", "oscar"];
    program.ok(&[args([&"calibrate", &model(), &"--calib", &text()]), owned(&cut), owned(&gather)].concat());
    let list = ["--bits", "2", "--transform", "oscar,oscar-per-head,wush,wush-a", "--quantizer", "quest,oscar"];
    let from_file = report(&program, &on_model(), &[&list[..], &["--stats", "s.safetensors"]].concat());
    let source = text().to_str().expect("test paths are UTF-8").to_owned();
    let from_text = ["--calib", &source, "--sequences", "6", "--calib-seq-len", "256"];
    let at_once = report(&program, &on_model(), &[&list[..], &from_text].concat());
    assert_eq!(from_file["rows"].as_array().expect("rows").len(), 9);
    assert_eq!(from_file["rows"], at_once["rows"]);
    assert_eq!(from_file["calibration"], at_once["calibration"]);
    let note = at_once["notes"][0].as_str().expect("a note");
    assert!(note.contains("calibrated on sequences of 256 tokens, this run may reach 512"), "{note}");
    assert_eq!(names(scratch.path()), ["s.safetensors"]);
}

#[test]
fn a_calibration_as_long_as_the_text_gets_no_warning() {
    let scratch = Scratch::new();
    let source = text().to_str().expect("test paths are UTF-8").to_owned();
    let more = ["--bits", "8", "--transform", "wush", "--calib", &source, "--sequences", "2"];
    let run = evaluate(&wush(&scratch), &on_model(), &more);
    assert_eq!(run.json()["calibration"]["max_seq_len"], 512, "{run:?}");
    assert_eq!(run.json()["notes"], Value::Array(vec![]), "{run:?}");
    for told in
        ["calibrate  calibration.txt: 2 sequences, 1024 tokens", "row        wush, quest-wide, 8 bits: perplexity"]
    {
        assert!(run.stderr.contains(told), "{told}: {}", run.stderr);
    }
}

/// What no hash forbids, since people have reasons for it, but what changes the numbers.
#[test]
fn a_bundle_under_other_settings_than_its_calibrations_says_so() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    let fixed = args([&"convert", &model(), &"--calib", &text(), &"--out", &"b"]);
    program.ok(&[fixed, owned(&["--sequences", "2", "--seq-len", "512", "--rope-scaling", "linear:2"])].concat());
    let notes = |more: &[&str]| {
        let found = report(&program, "b", &[&["--bits", "8"], more].concat());
        found["notes"].as_array().expect("notes").iter().map(|note| note.as_str().expect("text").to_owned()).collect()
    };
    let told = |notes: &Vec<String>, what: &str| notes.iter().any(|note| note.contains(what));
    let other = "calibrated under RoPE scaling linear:2, run under the configuration's own";
    let (plain, same): (Vec<String>, Vec<String>) = (notes(&[]), notes(&["--rope-scaling", "linear:2"]));
    assert!(told(&plain, other) && !told(&same, "RoPE scaling"), "{plain:?} {same:?}");
    let config = scratch.join("b/config.json");
    let mut edited = fs::read_to_string(&config).expect("a configuration");
    edited.push('\n');
    fs::write(&config, edited).expect("written");
    let edited: Vec<String> = notes(&[]);
    let changed = "config.json is not the file that the bundle was written with";
    assert!(told(&edited, changed) && !told(&plain, changed), "{edited:?}");
    let run = program.run(&["generate", "b", "--prompt", "The", "--max-new-tokens", "2", "--kv-bits", "2"]);
    assert!(run.code == Some(0) && run.stderr.contains(changed) && run.stderr.contains(other), "{run:?}");
}

/// Its transforms, mean keys and feedback matrices are those that its model gets with the same options; folded in f32, what
/// differs is the rounding of values.
#[test]
fn a_bundle_is_evaluated_with_all_that_it_holds() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    let fixed = args([&"convert", &model(), &"--calib", &text()]);
    let cut = ["--sequences", "16", "--seq-len", "512", "--fold-dtype", "f32"];
    let options = ["--center-keys", "always", "--feedback", "true", "--exponent", "0.4"];
    let paper = ["--preset", "paper"];
    program.ok(&[fixed, owned(&cut), owned(&paper), owned(&options), owned(&["--out", "b"])].concat());
    let calibration = calibration();
    let calibration: Vec<&str> = calibration.iter().map(String::as_str).collect();
    let cache = ["--bits", "2", "--quantizer", "quest:1.85", "--sink", "4", "--keep", "16"];
    let bundle = report(&program, "b", &cache);
    let of_model = |options: &[&str]| {
        let more = [&cache[..], &["--transform", "wush"], &calibration, &paper, options].concat();
        ppl(&report(&program, &on_model(), &more), "wush", 2)
    };
    let (own, same) = (ppl(&bundle, "bundle", 2), of_model(&options));
    assert!((own / same - 1.0).abs() < 2e-4, "{own} {same}");
    // Each of the three alone is told apart.
    for other in [&options[2..], &[&options[..2], &options[4..]].concat()[..], &options[..4]] {
        let other_ppl = of_model(other);
        assert!((own / other_ppl - 1.0).abs() > 1e-3, "{other:?}: {own} {other_ppl}");
    }
    assert_eq!(bundle["calibration"]["max_seq_len"], 512);
}

/// The manifest's errors decide, an average is kept, and the modules' errors fall: below uniform bits of the same average, too.
#[test]
fn bits_are_allotted_by_what_convert_measured() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    let fixed = args([&"convert", &model(), &"--calib", &text(), &"--out", &"b"]);
    program.ok(&[fixed, owned(&["--sequences", "16", "--seq-len", "512"])].concat());
    let fixed = args([&"eval", &"recon", &"b", &"--text", &text(), &"--format", &"json"]);
    let found =
        program.ok(&[fixed, owned(&WINDOWS), owned(&["--bits", "2,auto:2.25,auto:3,3,auto:4"])].concat()).json();
    assert_schema("eval-recon", &found);
    let rows = found["rows"].as_array().expect("rows");
    let average = |row: &Value| row["bits"].as_f64().expect("a number");
    let averages: Vec<f64> = rows.iter().map(average).collect();
    assert_eq!(averages, [2.0, 2.25, 3.0, 3.0, 4.0], "{found}");
    let manifest = fs::read(scratch.join("b/wush/manifest.json")).expect("written");
    let manifest: Value = serde_json::from_slice(&manifest).expect("JSON");
    let measured = manifest["sensitivity"]["layers"].as_array().expect("measured");
    let of = |layer: usize, side: &str| measured[layer][side].as_f64().expect("a number");
    let allotment = rows[1]["allotment"].as_array().expect("allotted");
    assert_eq!((rows[1]["asked_bits"].as_f64(), rows[0].get("asked_bits")), (Some(2.25), None));
    assert_eq!((allotment.len(), rows[0].get("allotment")), (measured.len(), None));
    // One bit more is worth the same part of an error everywhere: whoever has three had the larger error.
    let sides = |bits: u64| {
        let each =
            allotment.iter().enumerate().flat_map(|(at, layer)| ["keys", "values"].map(|side| (at, side, layer)));
        each.filter(move |(_, side, layer)| layer[side] == bits).map(|(at, side, _)| of(at, side)).collect::<Vec<f64>>()
    };
    let (two, three) = (sides(2), sides(3));
    assert!(!three.is_empty() && two.iter().all(|error| three.iter().all(|more| more >= error)), "{two:?} {three:?}");
    let sum = |row: usize| {
        let layers = rows[row]["layers"].as_array().expect("layers");
        layers.iter().flat_map(|layer| ["keys", "values"].map(|side| layer[side].as_f64())).flatten().sum::<f64>()
    };
    assert!(sum(1) < sum(0) && sum(2) < sum(3) && sum(4) < sum(2), "{found}");
}

/// Without a bundle, the modules are measured on the calibration text, and only there.
#[test]
fn bits_are_allotted_by_calibration_text_or_not_at_all() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    let calibration = calibration();
    let calibration: Vec<&str> = calibration.iter().map(String::as_str).collect();
    let auto = ["--bits", "auto:2.5", "--transform", "wush"];
    let found = report(&program, &on_model(), &[&calibration, &auto[..]].concat());
    assert_eq!(found["rows"][1]["bits"], 2.5, "{found}");
    let table = program.ok(&[
        args([&"eval", &"ppl", &model(), &"--text", &text()]),
        owned(&WINDOWS),
        owned(&calibration),
        owned(&auto),
    ]
    .concat());
    assert!(table.stdout.contains("wush, 2.5 bits: keys 3 bits in layers "), "{table:?}");
    program.ok(&on_demo("calibrate", &["--out", "s.safetensors"]));
    let refused = evaluate(&program, &on_model(), &[&auto[..], &["--stats", "s.safetensors"]].concat());
    assert_eq!(refused.code, Some(2));
    assert!(refused.stderr.contains("found auto for wush, of which nothing is measured"), "{refused:?}");
    for wrong in ["auto", "auto:1.9", "auto:5", "auto:x"] {
        let refused = evaluate(&program, &on_model(), &["--bits", wrong, "--transform", "hadamard"]);
        assert!(refused.stderr.contains(&format!("invalid value '{wrong}' for '--bits <LIST>'")), "{refused:?}");
    }
}

#[test]
fn a_bundle_takes_no_other_transforms() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    program.ok(&on_demo("convert", &["--out", "b"]));
    let exact = report(&program, "b", &["--bits", "8"]);
    assert!((ppl(&exact, "bundle", 8) / ppl(&exact, "none", 16) - 1.0).abs() < 1e-3, "{exact}");
    for option in
        [["--transform", "identity"], ["--stats", "s.safetensors"], ["--calib", "text.txt"], ["--feedback", "false"]]
    {
        let refused = evaluate(&program, "b", &option);
        assert_eq!(refused.code, Some(2), "{refused:?}");
        assert!(refused.stderr.contains(&format!("{}: expected none: a bundle is evaluated with its own", option[0])));
    }
}

#[test]
fn what_cannot_be_evaluated_is_said_before_anything_runs() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    let cases = [
        (&["--transform", "wush"][..], "--calib: expected text to make wush from, or statistics of it (--stats FILE"),
        (&["--bits", "5"], "--bits"),
        (&["--chunk", "0"], "--chunk: expected at least 1, found 0"),
        (&["--flush", "0"], "--flush: expected at least 1, found 0"),
        (&["--calib", "x.txt", "--stats", "s.safetensors"], "cannot be used with"),
        (
            &["--transform", "oscar", "--calib", "x.txt", "--sequences", "0"],
            "--sequences: expected at least 1, found 0",
        ),
        (&["--transform", "identity", "--center-keys", "always"], "--center-keys: identity would not look at it"),
        (
            &["--transform", "identity,hadamard", "--exponent", "0.3"],
            "--exponent: identity, hadamard would not look at it",
        ),
        (
            &["--transform", "hadamard,identity,hadamard"],
            "--transform: expected a list of different ones, found hadamard",
        ),
        (&["--transform", "identity", "--bits", "4,2,2"], "--bits: expected a list of different ones, found 2 twice"),
        (&["--transform", "identity", "--quantizer", "quest,quest"], "--quantizer: expected a list of different ones"),
    ];
    for (more, message) in cases {
        let run = evaluate(&program, &on_model(), more);
        assert_eq!(run.code, Some(2), "{run:?}");
        assert!(run.stderr.contains(message) && !run.stderr.contains("evaluate:"), "{message}: {run:?}");
    }
    let fixed = args([&"eval", &"ppl", &model(), &"--text", &text()]);
    for (option, value) in [("--windows", "0"), ("--seq-len", "1"), ("--seq-len", "5000")] {
        let run = program.run(&[fixed.clone(), owned(&[option, value])].concat());
        assert_eq!(run.code, Some(2), "{run:?}");
        assert!(run.stderr.contains(&format!("{option}: expected")), "{run:?}");
    }
}

#[test]
fn the_page_holds_a_chart_a_quantizer_and_the_table_and_loads_nothing() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    let list = ["--bits", "4,2", "--transform", "identity,hadamard", "--quantizer", "quest,oscar:0.9"];
    let report = report(&program, &on_model(), &[&list[..], &["--html", "ppl.html"]].concat());
    let page = fs::read_to_string(scratch.join("ppl.html")).expect("a page");
    assert_eq!(page.matches("<svg").count(), 2, "one a quantizer");
    assert_eq!(page.matches("<circle").count(), 8, "one a row");
    for row in report["rows"].as_array().expect("rows") {
        let ppl = format!("<td>{:.4}</td>", row["ppl"].as_f64().expect("a number"));
        assert!(page.contains(&ppl), "{ppl}");
    }
    for foreign in ["src=", "href=", "url(", "@import", "<script", "<link"] {
        assert!(!page.contains(foreign), "{foreign}");
    }
    // Over an older page, and over nothing else.
    assert!(
        evaluate(&program, &on_model(), &["--bits", "8", "--transform", "identity", "--html", "ppl.html"]).code
            == Some(0)
    );
    scratch.write("notes.txt", "kept");
    let other = evaluate(&program, &on_model(), &["--html", "notes.txt"]);
    assert!(other.code == Some(2) && !other.stderr.contains("row "), "before any work: {other:?}");
    let inside = model().join("ppl.html");
    let refused = evaluate(&program, &on_model(), &["--html", inside.to_str().expect("test paths are UTF-8")]);
    assert_eq!(refused.code, Some(2), "{refused:?}");
    assert!(!inside.exists());
}

/// What a run says after its line that begins so.
fn read_up_to(child: &mut Child, start: &str) -> BufReader<ChildStderr> {
    let mut stderr = BufReader::new(child.stderr.take().expect("piped"));
    let mut line = String::new();
    while !line.starts_with(start) {
        line.clear();
        assert!(stderr.read_line(&mut line).expect("text") > 0, "{start} never came");
    }
    stderr
}

/// The folder of the page goes away while it scores.
#[test]
fn a_page_that_cannot_be_written_does_not_take_the_report_with_it() {
    let scratch = Scratch::new();
    let pages = scratch.join("pages");
    fs::create_dir(&pages).expect("made");
    let fixed = args([&"eval", &"ppl", &model(), &"--text", &text(), &"--format", &"json"]);
    let more = ["--bits", "4", "--transform", "identity", "--html", "pages/ppl.html"];
    let mut child = wush(&scratch).start(&[fixed, owned(&WINDOWS), owned(&more)].concat());
    let mut stderr = read_up_to(&mut child, "row        none");
    fs::remove_dir(&pages).expect("empty");
    let mut rest = String::new();
    stderr.read_to_string(&mut rest).expect("text");
    let outcome = Outcome::of(child.wait_with_output().expect("waited for"));
    assert_eq!(outcome.code, Some(2), "{outcome:?} {rest}");
    assert!(rest.contains("error: pages: cannot write into"), "{rest}");
    assert_eq!(outcome.json()["rows"].as_array().map(Vec::len), Some(2), "{outcome:?}");
}

/// While it calibrates and while it scores: nothing is kept, and no option is proposed that the command does not have.
#[test]
fn a_stop_ends_it_and_leaves_nothing() {
    for stop_at in ["calibrate  ", "row        none"] {
        let scratch = Scratch::new();
        let sequences = if stop_at.starts_with("row") { "1" } else { "64" };
        let fixed = args([&"eval", &"ppl", &model(), &"--text", &text(), &"--calib", &text()]);
        let more = ["--seq-len", "1024", "--windows", "8", "--transform", "wush", "--bits", "8,4,3,2"];
        let all = [fixed, owned(&more), owned(&["--sequences", sequences])].concat();
        let mut child = wush(&scratch).start(&all);
        let mut stderr = read_up_to(&mut child, stop_at);
        signal(&child, "INT");
        let mut rest = String::new();
        stderr.read_to_string(&mut rest).expect("text");
        let outcome = Outcome::of(child.wait_with_output().expect("waited for"));
        assert_eq!(outcome.code, Some(130), "{stop_at}: {outcome:?} {rest}");
        assert!(rest.contains("interrupted") && !rest.contains("--resume"), "{stop_at}: {rest}");
        assert!(outcome.stdout.is_empty() && names(scratch.path()).is_empty(), "{stop_at}: {outcome:?}");
    }
}

/// The paper's order on the demo model, and that what is quantized more finely loses less.
#[test]
fn errors_inside_modules_are_least_with_wush() {
    let scratch = Scratch::new();
    let on_text = args([&"eval", &"recon", &model(), &"--text", &text(), &"--windows", &"4", &"--seq-len", &"512"]);
    let more = ["--bits", "2,4", "--transform", "identity,hadamard,wush", "--preset", "paper", "--html", "p.html"];
    let run = wush(&scratch).ok(&[on_text, calibration(), owned(&more), owned(&["--format", "json"])].concat());
    let rows = run.json()["rows"].as_array().expect("rows").clone();
    let of = |transform: &str, bits: u64, what: &str| {
        let row = rows.iter().find(|row| row["transform"] == transform && row["bits"] == bits).expect("the row");
        assert_eq!(row["layers"].as_array().expect("layers").len(), 6);
        row[what].as_f64().expect("a number")
    };
    for what in ["products", "probabilities", "keys", "values", "both"] {
        assert!(of("wush", 2, what) < of("hadamard", 2, what), "{what}");
        assert!(of("wush", 4, what) < 0.5 * of("wush", 2, what), "{what}");
    }
    assert!(of("wush", 2, "both") > of("wush", 2, "keys") && of("wush", 2, "both") > of("wush", 2, "values"));
    let page = fs::read_to_string(scratch.join("p.html")).expect("a page");
    assert_eq!(page.matches("<svg").count(), 10);
}

/// A sidecar of other bytes, one that is gone, and a bundle without its manifest are refused by whoever would use them.
#[test]
fn a_changed_bundle_is_not_used() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    program.ok(&on_demo("convert", &["--out", "b"]));
    let file = |name: &str| scratch.join("b").join("wush").join(name);
    let refused = |expected: &str| {
        let generate = program.run(&["generate", "b", "--prompt", "a"]);
        for run in [evaluate(&program, "b", &["--bits", "2"]), generate] {
            assert_eq!(run.code, Some(2), "{run:?}");
            assert!(run.stderr.contains(expected), "{expected}: {}", run.stderr);
        }
    };
    let whole = fs::read(file("key_transforms.safetensors")).expect("read");
    let mut changed = whole.clone();
    *changed.last_mut().expect("not empty") ^= 1;
    fs::write(file("key_transforms.safetensors"), &changed).expect("written");
    refused("is not the file that the bundle's manifest lists");
    fs::write(file("key_transforms.safetensors"), &whole).expect("written");
    fs::rename(file("value_feedback.safetensors"), scratch.join("feedback")).expect("moved");
    refused("value_feedback.safetensors");
    fs::rename(scratch.join("feedback"), file("value_feedback.safetensors")).expect("moved");
    fs::remove_file(file("manifest.json")).expect("removed");
    refused("manifest.json");
    let again = program.run(
        &on_demo("convert", &["--out", "c"])
            .iter()
            .map(|part| match part {
                part if *part == on_model() => "b".to_owned(),
                part => part.clone(),
            })
            .collect::<Vec<_>>(),
    );
    assert!(again.code == Some(2) && again.stderr.contains("is a bundle already"), "{again:?}");
}

/// What the manifest says of the sidecars and what they hold must agree, for both that encode with them, in the same words.
#[test]
fn sidecars_that_contradict_the_manifest_are_used_by_nobody() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    program.ok(&on_demo("convert", &["--out", "b"]));
    let (manifest, feedback) =
        (scratch.join("b/wush/manifest.json"), scratch.join("b/wush/value_feedback.safetensors"));
    let honest = fs::read_to_string(&manifest).expect("read");
    let refused = |edit: &dyn Fn(&mut Value), expected: &str| {
        let mut json: Value = serde_json::from_str(&honest).expect("JSON");
        edit(&mut json);
        fs::write(&manifest, json.to_string()).expect("written");
        let message = |run: Outcome| {
            assert_eq!(run.code, Some(2), "{run:?}");
            let line = run.stderr.lines().find(|line| line.contains("does not fit its bundle: "));
            let (_, message) = line.unwrap_or_else(|| panic!("{run:?}")).split_once("b/wush/").expect("a file of it");
            message.to_owned()
        };
        let of_eval = message(evaluate(&program, "b", &["--bits", "2"]));
        assert_eq!(message(program.run(&["generate", "b", "--prompt", "a"])), of_eval);
        assert!(of_eval.contains(expected), "{expected}: {of_eval}");
    };
    refused(&|m| m["solve"]["feedback"] = false.into(), "solve.feedback of the manifest: expected true, found false");
    refused(&|m| m["solve"]["center_keys"] = "never".into(), "key_mean, by solve of the manifest: expected none");
    refused(&|m| m["layers"][0]["centered_keys"] = Value::Array(Vec::new()), "layer 0, by the manifest's report");
    let shorter = |m: &mut Value| {
        m.as_object_mut().expect("an object").remove("sensitivity");
        m["layers"].as_array_mut().expect("a list").pop();
    };
    refused(&shorter, "by the manifest's report: expected no such layer");
    fs::remove_file(feedback).expect("removed");
    let unlisted = |m: &mut Value| {
        m["files"].as_array_mut().expect("a list").retain(|file| file["path"] != "wush/value_feedback.safetensors");
    };
    refused(&unlisted, "files: expected wush/value_feedback.safetensors, found no such entry");
}

#[test]
fn windows_that_stay_exact_are_told() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    for (seq_len, expected) in [("128", "nothing was quantized"), ("200", "are quantized: longer windows")] {
        let fixed = args([&"eval", &"ppl", &model(), &"--text", &text(), &"--windows", &"1", &"--seq-len", &seq_len]);
        let run = program.ok(&[fixed, owned(&["--transform", "hadamard", "--bits", "2"])].concat());
        assert!(run.stdout.contains(expected), "{expected}: {run:?}");
    }
    let more = ["--transform", "hadamard", "--bits", "2", "--flush", "1000"];
    let run =
        program.ok(&[args([&"eval", &"ppl", &model(), &"--text", &text()]), owned(&WINDOWS), owned(&more)].concat());
    assert!(run.stdout.contains("no 1000 are older than the newest 128"), "{run:?}");
}

/// A projection that is zero has no error, and would make a geometric mean zero.
#[test]
fn a_module_without_an_error_is_left_out_of_the_means_and_told() {
    let scratch = Scratch::new();
    let dead = scratch.copy_of(&model(), "dead");
    edit_tensors(&dead, |tensors| {
        let (_, _, bytes) = tensors.get_mut("model.layers.2.self_attn.v_proj.weight").expect("there");
        bytes.fill(0);
    });
    let fixed = args([&"eval", &"recon", &"dead", &"--text", &text(), &"--format", &"json"]);
    let found = wush(&scratch)
        .ok(&[fixed, owned(&WINDOWS), owned(&["--transform", "hadamard", "--bits", "2"])].concat())
        .json();
    let row = &found["rows"][0];
    assert_eq!(row["layers"][2]["values"], 0.0, "{row}");
    assert!(row["values"].as_f64().is_some_and(|mean| mean > 1e-3), "{row}");
    assert!(found["notes"][0].as_str().is_some_and(|note| note.contains("of layer 2 is zero")), "{found}");
}
