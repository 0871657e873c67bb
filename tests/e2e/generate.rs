//! `wush generate`: text on stdout while it comes, what it took on stderr, and a message for everything that cannot be continued.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;

use serde_json::{Value, json};
use wush_tests::{Outcome, Scratch, fixture, signal};

use crate::common::{args, assert_schema, edit_config, edit_tensors, model, on_demo, wush};

/// Text that the model was not trained on, long enough that most of it leaves small windows.
fn prompt() -> String {
    fs::read_to_string(model().join("heldout.txt")).expect("a text")[..1500].to_owned()
}

/// Windows that leave most of a short sequence to the quantizer.
const WINDOWS: [&str; 6] = ["--sink", "4", "--keep", "32", "--flush", "8"];

/// `generate` of `model` with 24 tokens at most and `more`.
fn command(model: &Path, more: &[&str]) -> Vec<String> {
    let few: &[&str] = if more.contains(&"--max-new-tokens") { &[] } else { &["--max-new-tokens", "24"] };
    let mut all = args([&"generate", &model.to_owned()]);
    all.extend(few.iter().chain(more).map(|arg| (*arg).to_owned()));
    all
}

fn report(scratch: &Scratch, model: &Path, more: &[&str]) -> Value {
    let report = wush(scratch).ok(&command(model, &[more, &["--format", "json"]].concat())).json();
    assert_schema("generate", &report);
    report
}

fn text(report: &Value) -> &str {
    report["text"].as_str().expect("a text")
}

#[test]
fn text_goes_to_stdout_and_what_it_took_to_stderr() {
    let scratch = Scratch::new();
    let prompt = prompt();
    let given = ["--prompt", prompt.as_str()];
    let report = report(&scratch, &model(), &given);
    assert_eq!((&report["stop"], &report["generated"]["tokens"]), (&json!("max-new-tokens"), &json!(24)), "{report}");
    assert_eq!((&report["cache"]["bits"], &report["cache"]["quantizer"]), (&json!(16), &json!(null)), "{report}");
    assert!(!text(&report).is_empty());

    let told = wush(&scratch).ok(&command(&model(), &given));
    assert_eq!(told.stdout.trim_end_matches('\n'), text(&report).trim_end_matches('\n'));
    assert!(told.stdout.ends_with('\n'), "{told:?}");
    for part in ["memory", "tokens/s", "prompt", "generated", "cache", "of BF16's"] {
        assert!(told.stderr.contains(part), "no {part}: {told:?}");
    }
    let quiet = wush(&scratch).ok(&command(&model(), &[&given[..], &["--quiet"]].concat()));
    assert_eq!((quiet.stdout, quiet.stderr.as_str()), (told.stdout, ""));
}

#[test]
fn a_bundle_is_used_with_its_own_transforms_at_every_width() {
    let scratch = Scratch::new();
    wush(&scratch).ok(&on_demo("convert", &["--out", "b", "--feedback", "--center-keys", "always"]));
    let (bundle, prompt) = (scratch.join("b"), prompt());
    let of = |model: &Path, bits: Option<&str>| {
        let windows = if bits == Some("16") { &[][..] } else { &WINDOWS[..] };
        let bits: Vec<&str> = bits.into_iter().flat_map(|bits| ["--kv-bits", bits]).collect();
        report(&scratch, model, &[&["--prompt", &prompt, "--chunk", "16"], windows, &bits].concat())
    };
    let exact = of(&bundle, Some("16"));
    assert_eq!(exact["cache"]["transforms"], false, "nothing is transformed that is not quantized: {exact}");
    let mut smaller = 0.0;
    for bits in ["2", "3", "4", "8"] {
        let found = of(&bundle, Some(bits));
        let cache = &found["cache"];
        assert_eq!((&cache["transforms"], &cache["quantizer"]), (&json!(true), &json!("quest-wide")), "{found}");
        let ratio = cache["ratio"].as_f64().expect("a number");
        assert!(ratio > smaller && ratio < 1.0, "{bits} bits: {found}");
        smaller = ratio;
        let notes = found["notes"].as_array().expect("notes");
        let calibrated =
            notes.iter().any(|note| note.as_str().is_some_and(|note| note.contains("calibrated on sequences of 96")));
        assert!(calibrated, "{found}");
    }
    let eight = of(&bundle, Some("8"));
    assert_eq!(text(&eight)[..8], text(&exact)[..8], "8 bits change little: {eight} {exact}");
    assert_eq!(of(&bundle, None)["cache"]["bits"], 2);
    let allotted = of(&bundle, Some("auto:2.5"));
    assert_eq!(
        (&allotted["cache"]["bits"], allotted["cache"]["allotment"].as_array().map(Vec::len)),
        (&json!(2.5), Some(6))
    );
    let bytes = |report: &Value| report["cache"]["bytes"].as_u64().expect("bytes");
    let (two, three) = (of(&bundle, Some("2")), of(&bundle, Some("3")));
    assert!(bytes(&two) < bytes(&allotted) && bytes(&allotted) < bytes(&three), "{allotted}");
    let (first, again) = (of(&bundle, Some("2")), of(&bundle, Some("2")));
    assert_eq!(without_times(again, &first), first);

    let plain = of(&model(), Some("2"));
    assert_eq!(plain["cache"]["transforms"], false, "{plain}");
    assert!(plain["notes"][0].as_str().is_some_and(|note| note.contains("has no key and value transforms")), "{plain}");
}

/// `report` with the times of `other`.
fn without_times(mut report: Value, other: &Value) -> Value {
    for key in ["prompt", "generated", "seconds"] {
        report[key] = other[key].clone();
    }
    report
}

#[test]
fn draws_follow_the_seed() {
    let scratch = Scratch::new();
    let drawn = |seed: &str, more: &[&str]| {
        let fixed = ["--prompt", "The", "--temperature", "1.2", "--seed", seed];
        text(&report(&scratch, &model(), &[&fixed[..], more].concat())).to_owned()
    };
    assert_eq!(drawn("1", &[]), drawn("1", &[]));
    assert_ne!(drawn("1", &[]), drawn("2", &[]));
    let greedy = text(&report(&scratch, &model(), &["--prompt", "The"])).to_owned();
    assert_eq!(drawn("1", &["--top-k", "1"]), greedy);
    assert_eq!(drawn("2", &["--top-p", "0.000001"]), greedy);
}

#[test]
fn prompts_come_from_files_and_from_stdin() {
    let scratch = Scratch::new();
    let expected = report(&scratch, &model(), &["--prompt", "The river\nand"]);
    scratch.write("prompt.txt", "The river\nand\r\n");
    let of_file = report(&scratch, &model(), &["--prompt-file", "prompt.txt"]);
    let piped = command(&model(), &["--prompt-file", "-", "--format", "json"]);
    let mut child = wush(&scratch)
        .command(&piped)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("started");
    child.stdin.take().expect("piped").write_all(b"The river\nand\n").expect("written");
    let of_stdin = Outcome::of(child.wait_with_output().expect("ended")).json();
    for found in [of_file, of_stdin] {
        assert_eq!((text(&found), &found["prompt"]["tokens"]), (text(&expected), &expected["prompt"]["tokens"]));
    }
}

/// Adds keys to a copy's tokenizer_config.json.
fn edit_tokenizer_config(model: &Path, key: &str, value: Value) {
    let path = model.join("tokenizer_config.json");
    let mut config: Value = serde_json::from_str(&fs::read_to_string(&path).expect("read")).expect("JSON");
    config[key] = value;
    fs::write(path, config.to_string()).expect("written");
}

#[test]
fn a_chat_template_is_used_where_there_is_one() {
    let scratch = Scratch::new();
    let chat = scratch.copy_of(&model(), "chat");
    let template = "{% for message in messages %}\n{{ eos_token }}{{ message.role }}: {{ message.content }}\n{% endfor %}\n\
                    {% if add_generation_prompt %}assistant:{% endif %}";
    edit_tokenizer_config(&chat, "chat_template", template.into());
    let run = |more: &[&str]| report(&scratch, &chat, &[&["--prompt", "Hello there"], more].concat());
    let (auto, never) = (run(&[]), run(&["--chat", "never"]));
    assert_eq!((&auto["chat"], &never["chat"]), (&json!(true), &json!(false)));
    let spelled = "<|endoftext|>user: Hello there\nassistant:";
    let by_hand = report(&scratch, &chat, &["--prompt", spelled, "--chat", "never"]);
    assert_eq!((text(&auto), &auto["prompt"]["tokens"]), (text(&by_hand), &by_hand["prompt"]["tokens"]));
    assert_ne!(auto["prompt"]["tokens"], never["prompt"]["tokens"]);
    let system = run(&["--system", "Be brief"]);
    let spelled = format!("<|endoftext|>system: Be brief\n{spelled}");
    let by_hand = report(&scratch, &chat, &["--prompt", &spelled, "--chat", "never"]);
    assert_eq!((text(&system), &system["prompt"]["tokens"]), (text(&by_hand), &by_hand["prompt"]["tokens"]));
    let plain = report(&scratch, &model(), &["--prompt", "Hello there"]);
    assert_eq!((text(&never), &plain["chat"]), (text(&plain), &json!(false)));
}

#[test]
fn the_models_end_of_text_and_its_positions_end_the_text() {
    let scratch = Scratch::new();
    let short = scratch.copy_of(&model(), "short");
    edit_config(&short, |config| {
        config.insert("max_position_embeddings".to_owned(), 10.into());
    });
    let found = report(&scratch, &short, &["--prompt", "The river and"]);
    let n_prompt = found["prompt"]["tokens"].as_u64().expect("a number");
    assert_eq!(
        (&found["stop"], &found["generated"]["tokens"]),
        (&json!("positions"), &json!(11 - n_prompt)),
        "{found}"
    );
    assert!(found["notes"][0].as_str().is_some_and(|note| note.contains("the model reaches 10 positions")), "{found}");

    // The first token that it gives is made its end of text.
    let ends = scratch.copy_of(&model(), "ends");
    let first = report(&scratch, &model(), &["--prompt", "The river and", "--max-new-tokens", "1"]);
    let tokenizer: Value =
        serde_json::from_str(&fs::read_to_string(model().join("tokenizer.json")).expect("read")).expect("JSON");
    let spelled = text(&first).replace(' ', "\u{120}");
    let id = tokenizer["model"]["vocab"][&spelled].as_u64().unwrap_or_else(|| panic!("no token {spelled:?}"));
    fs::write(ends.join("generation_config.json"), json!({ "eos_token_id": [0, id] }).to_string()).expect("written");
    let found = report(&scratch, &ends, &["--prompt", "The river and"]);
    assert_eq!((text(&found), &found["stop"]), ("", &json!("end-of-text")), "{found}");
}

/// The command must end with exit code 2, one message that says `expected`, and nothing on stdout.
fn assert_refused(scratch: &Scratch, command: &[String], expected: &str) {
    let run = wush(scratch).run(command);
    assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""), "{run:?}");
    let messages: Vec<&str> = run.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    assert!(messages.len() == 1 && messages[0].contains(expected), "no {expected:?}: {run:?}");
    assert!(!run.stderr.contains("panicked"), "{run:?}");
}

#[test]
fn what_cannot_be_continued_is_refused_by_name() {
    let scratch = Scratch::new();
    let refused = |more: &[&str], expected: &str| assert_refused(&scratch, &command(&model(), more), expected);
    refused(&["--prompt", ""], "the prompt is empty");
    refused(&["--prompt", "a", "--kv-bits", "5"], "invalid value '5' for '--kv-bits <BITS>'");
    refused(&["--prompt", "a", "--kv-bits", "1"], "invalid value '1' for '--kv-bits <BITS>'");
    refused(&["--prompt", "a", "--kv-bits", "auto:2.5"], "--kv-bits: expected a number of bits, or a bundle for auto");
    refused(&["--prompt", "a", "--chat", "always"], "has no chat template");
    refused(&["--prompt", "a", "--system", "b"], "has no chat template");
    refused(&["--prompt", "a", "--system", "b", "--chat", "never"], "--system: expected none with --chat never");
    for (option, value) in [("--quantizer", "quest"), ("--sink", "4"), ("--keep", "4"), ("--flush", "4")] {
        let expected = format!("{option}: expected none at 16 bits, which quantize nothing (--kv-bits 2 does), found");
        refused(&["--prompt", "a", option, value], &expected);
    }
    refused(&["--prompt", "a", "--kv-bits", "16", "--sink", "64"], "--sink: expected none at 16 bits");
    refused(&["--prompt", "a", "--top-k", "3"], "--temperature: expected a number above 0 with --top-k or --top-p");
    refused(&["--prompt", "a", "--temperature", "-1"], "temperature: expected a finite number, 0 or above, found -1");
    refused(&["--prompt", "a", "--temperature", "1", "--top-p", "0"], "top-p: expected a number above 0");
    refused(&["--prompt", "a", "--chunk", "0"], "--chunk: expected at least 1");
    refused(&["--prompt", "a", "--kv-bits", "2", "--flush", "0"], "--flush: expected 1 to");
    refused(&["--prompt-file", "absent.txt"], "absent.txt");
    scratch.write("latin.txt", b"caf\xe9");
    refused(
        &["--prompt-file", "latin.txt"],
        "--prompt-file: expected text in UTF-8, found another byte at 3 of latin.txt",
    );
    let long = model().join("heldout.txt");
    refused(&["--prompt-file", long.to_str().expect("UTF-8")], "the model reaches 4096 positions");
    let of_tiny = command(&fixture("tiny/llama-gqa"), &["--prompt", "a"]);
    assert_refused(&scratch, &of_tiny, "no tokenizer.json");
    let empty = scratch.write("empty.txt", "\n");
    refused(&["--prompt-file", empty.to_str().expect("UTF-8")], "the prompt is empty");
}

#[test]
fn a_bad_chat_template_is_refused_by_name() {
    let scratch = Scratch::new();
    let chat = scratch.copy_of(&model(), "chat");
    fs::write(chat.join("chat_template.jinja"), "{% if messages %}").expect("written");
    let command = command(&chat, &["--prompt", "a"]);
    assert_refused(&scratch, &command, "chat_template.jinja: chat template: ");
    fs::write(chat.join("chat_template.jinja"), "{{ raise_exception('no system message') }}").expect("written");
    assert_refused(&scratch, &command, "no system message (line 1)");
    let run = wush(&scratch).run(&command);
    assert!(run.stderr.contains("hint: pass --chat never"), "{run:?}");
}

#[test]
fn a_bundle_of_other_weights_than_its_sidecar_is_refused() {
    let scratch = Scratch::new();
    wush(&scratch).ok(&on_demo("convert", &["--out", "b"]));
    let bundle = scratch.join("b");
    edit_tensors(&bundle, |tensors| {
        let (_, _, bytes) = tensors.get_mut("model.norm.weight").expect("there");
        bytes[0] ^= 1;
    });
    let refused = command(&bundle, &["--prompt", "a"]);
    assert_refused(&scratch, &refused, "manifest.json: does not fit its bundle: hash of the weights: expected ");
    // Without its sidecar it is a checkpoint like any other.
    report(&scratch, &bundle, &["--prompt", "a", "--kv-bits", "16"]);
}

#[test]
fn a_reader_that_leaves_and_a_stop_end_the_text() {
    let scratch = Scratch::new();
    let endless = ["--prompt", "The", "--max-new-tokens", "4000", "--temperature", "1"];
    let all = [args([&"generate", &model()]), endless.map(str::to_owned).to_vec()].concat();
    let mut child = wush(&scratch).start(&all);
    drop(child.stdout.take());
    let run = Outcome::of(child.wait_with_output().expect("ended"));
    assert_eq!(run.code, Some(0), "{run:?}");
    assert!(!run.stderr.contains("panicked"), "{run:?}");

    let mut child = wush(&scratch).start(&all);
    let mut first = [0];
    std::io::Read::read_exact(child.stdout.as_mut().expect("piped"), &mut first).expect("some text");
    signal(&child, "INT");
    let run = Outcome::of(child.wait_with_output().expect("ended"));
    assert_eq!(run.code, Some(130), "{run:?}");
    assert!(run.stdout.ends_with('\n') && run.stderr.contains("interrupted"), "{run:?}");
}
