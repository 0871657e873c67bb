//! The command line itself: help, what is printed where, schemas and generated pages that must not drift.

use std::io::Read;
use std::process::Stdio;

use wush_tests::{Scratch, names, root};

use crate::common::{args, assert_schema, filters, model, on_demo, on_tiny, stable, tiny, wush};

/// Every command that `docs/cli.md` describes.
const COMMANDS: &[&str] = &[
    "convert",
    "calibrate",
    "merge",
    "solve",
    "fold",
    "unfold",
    "export",
    "inspect",
    "eval",
    "generate",
    "serve",
    "demo",
    "doctor",
    "bench",
    "schema",
];

/// Commands of commands, on the page as well.
const SUBCOMMANDS: &[[&str; 2]] = &[["eval", "ppl"], ["eval", "recon"], ["bench", "kernels"], ["bench", "calibrate"]];

/// With `WUSH_UPDATE=1` in the environment, generated files are rewritten instead of compared.
fn assert_same_or_update(path: &str, generated: &str) {
    let path = root().join(path);
    if std::env::var_os("WUSH_UPDATE").is_some() {
        std::fs::write(&path, generated).expect("written");
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == generated,
        "{} is stale: WUSH_UPDATE=1 cargo test --release -p wush --test e2e drift",
        path.display()
    );
}

#[test]
fn schemas_do_not_drift() {
    let scratch = Scratch::new();
    let names = wush(&scratch).ok(&["schema"]).stdout;
    let mut files = Vec::new();
    for name in names.lines() {
        let schema = wush(&scratch).ok(&["schema", name]).stdout;
        assert_same_or_update(&format!("schemas/{name}.json"), &schema);
        files.push(format!("{name}.json"));
    }
    assert_eq!(wush_tests::names(&root().join("schemas")), files, "schemas/ holds what `wush schema` lists, no more");
}

#[test]
fn the_page_of_options_does_not_drift() {
    let scratch = Scratch::new();
    let help = |args: &[&str]| {
        let text = wush(&scratch).ok(args).stdout;
        // The compiled-in version is the changelog's business.
        text.trim_end().to_owned()
    };
    let mut page = String::from(
        "# Command line\n\nGenerated from the program: `WUSH_UPDATE=1 cargo test --release -p wush --test e2e drift`.\n",
    );
    page += &format!("\n## wush\n\n```text\n{}\n```\n", help(&["--help"]));
    for command in COMMANDS {
        page += &format!("\n## wush {command}\n\n```text\n{}\n```\n", help(&[command, "--help"]));
        for [_, sub] in SUBCOMMANDS.iter().filter(|[of, _]| of == command) {
            page += &format!("\n## wush {command} {sub}\n\n```text\n{}\n```\n", help(&[command, sub, "--help"]));
        }
    }
    assert_same_or_update("docs/cli.md", &page);
}

#[test]
fn every_command_is_on_the_page() {
    let scratch = Scratch::new();
    let help = wush(&scratch).ok(&["--help"]).stdout;
    let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let listed: Vec<_> =
        listed.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help").collect();
    assert_eq!(listed, COMMANDS);
}

/// There is no sense in measuring the CPU in a GPU's place.
#[test]
fn a_benchmark_of_a_gpu_needs_one() {
    let scratch = Scratch::new();
    for (of, expected) in [("kernels", "one GPU: cuda or cuda:N"), ("calibrate", "GPUs: cuda, cuda:N or cuda:all")] {
        let on_cpu = wush(&scratch).run(&["bench", of, "--device", "cpu"]);
        assert_eq!(on_cpu.code, Some(2), "{on_cpu:?}");
        let message = format!("--device: expected {expected}, found cpu");
        assert!(on_cpu.stderr.contains(&message), "{on_cpu:?}");
        let none = wush(&scratch).run(&["bench", of, "--device", "cpu", "--seq-len", "0"]);
        assert!(none.stderr.contains("--seq-len: expected at least 1, found 0"), "{none:?}");
        let unknown = wush(&scratch).run(&["bench", of, "--shape", "other"]);
        assert!(unknown.stderr.contains("qwen3-8b"), "the shapes are listed: {unknown:?}");
    }
}

#[test]
fn the_doctor_says_what_is_found_and_what_is_not() {
    let scratch = Scratch::new();
    let report = wush(&scratch).ok(&["doctor", "--format", "json"]).stdout;
    let report: serde_json::Value = serde_json::from_str(&report).expect("JSON");
    assert_schema("doctor", &report);
    let libraries = report["libraries"].as_array().expect("a list");
    assert_eq!(libraries.len(), 3);
    for library in libraries {
        assert_ne!(library["path"].is_null(), library["problem"].is_null(), "found, or why not: {library}");
    }
    assert_eq!(report["auto"] == "cpu", !report["because"].is_null(), "a reason where no GPU is used: {report}");
    let shown = wush(&scratch).ok(&["doctor"]).stdout;
    assert!(shown.contains("libcuda.so.1"), "{shown}");
}

#[test]
fn reports_read_well() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    let shown = |text: &str| stable(text, &scratch);
    let convert = program.ok(&on_demo("convert", &["--out", "bundle"]));
    program.ok(&on_demo("calibrate", &["--out", "stats.safetensors"]));
    let solve = program.ok(&["solve", "stats.safetensors", "--out", "transforms.safetensors"]);
    let unfold = program.ok(&["unfold", "bundle", "--out", "back"]);
    let card = std::fs::read_to_string(scratch.join("bundle/wush/README.md")).expect("a card");
    insta::with_settings!({ filters => filters(), snapshot_path => "snapshots", prepend_module_to_snapshot => false }, {
        insta::assert_snapshot!("convert_stdout", shown(&convert.stdout));
        insta::assert_snapshot!("convert_stderr", shown(&convert.stderr));
        insta::assert_snapshot!("solve_stdout", shown(&solve.stdout));
        insta::assert_snapshot!("unfold_stdout", shown(&unfold.stdout));
        insta::assert_snapshot!("card", shown(&card));
    });
}

#[test]
fn the_demo_runs_offline_and_leaves_a_bundle() {
    let scratch = Scratch::new();
    let report = wush(&scratch).ok(&["demo", "--format", "json"]).json();
    assert_schema("demo", &report);
    assert_eq!((&report["convert"]["verdict"], &report["inspect"]["verdict"]), (&"ok".into(), &"ok".into()));
    assert_eq!(names(&scratch.join("wush-demo")), ["demo-model", "demo-model-wush"]);
    assert_eq!(report["convert"]["out"]["path"], "wush-demo/demo-model-wush");
    wush(&scratch).ok(&["inspect", "wush-demo/demo-model-wush", "--base", "wush-demo/demo-model"]);

    let again = wush(&scratch).run(&["demo"]);
    assert_eq!(again.code, Some(2), "{again:?}");
    assert!(again.stderr.contains("wush-demo: exists already") && again.stderr.contains("--out"), "{again:?}");
    let repeat = &report["again"];
    assert!(scratch.join(repeat["text"].as_str().expect("a path")).is_file(), "{repeat}");
}

#[test]
fn reports_go_to_stdout_and_all_else_to_stderr() {
    let scratch = Scratch::new();
    let loud =
        wush(&scratch).ok(&on_tiny(&scratch, "calibrate", &tiny(), &["--out", "a.safetensors", "--format", "json"]));
    loud.json();
    assert!(loud.stderr.contains("memory") && loud.stderr.contains("4 sequences"), "{loud:?}");
    let quiet = wush(&scratch).ok(&on_tiny(&scratch, "calibrate", &tiny(), &["--out", "b.safetensors", "--quiet"]));
    assert_eq!(quiet.stderr, "");
    let verbose = wush(&scratch).ok(&on_tiny(&scratch, "calibrate", &tiny(), &["--out", "c.safetensors", "-v"]));
    assert!(verbose.stderr.contains("calibrate: 96 tokens in"), "{verbose:?}");
}

#[test]
fn a_closed_pipe_is_no_panic() {
    let scratch = Scratch::new();
    wush(&scratch).ok(&args([
        &"convert",
        &model(),
        &"--transform",
        &"identity",
        &"--verify-sequences",
        &"0",
        &"--out",
        &"bundle",
    ]));
    let mut child = wush(&scratch)
        .command(&["inspect", "bundle", "--format", "json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("started");
    drop(child.stdout.take());
    let mut stderr = String::new();
    child.stderr.take().expect("piped").read_to_string(&mut stderr).expect("text");
    assert_eq!(child.wait().expect("waited for").code(), Some(0), "{stderr}");
    assert!(!stderr.contains("panic") && !stderr.contains("error"), "{stderr}");
}

#[test]
fn usage_errors_are_exit_2() {
    let scratch = Scratch::new();
    for bad in [
        vec!["no-such-command"],
        vec!["convert"],
        vec!["convert", "model"],
        vec!["convert", "model", "--out", "x", "--transform", "magic"],
        vec!["convert", "model", "--out", "x", "--device", "tpu"],
        vec!["convert", "model", "--out", "x", "--rope-scaling", "yarn"],
        vec!["calibrate", "model", "--out", "x", "--shard", "3/2"],
        vec!["fold", "model", "transforms", "--out", "x", "--calib", "text.txt", "--sequences", "4"],
        vec!["fold", "model", "transforms", "--out", "x", "--text-field", "body"],
        vec!["inspect", "x", "--quiet", "--verbose"],
    ] {
        let run = wush(&scratch).run(&bad);
        assert_eq!(run.code, Some(2), "{bad:?}: {run:?}");
        assert!(
            run.stdout.is_empty() && !run.stderr.is_empty() && !run.stderr.contains("panicked"),
            "{bad:?}: {run:?}"
        );
    }
}
