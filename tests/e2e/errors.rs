//! Documented errors, one case each, as a user meets them: exit code 2, one message that names the file, tensor or key, a hint, no
//! backtrace, and nothing written.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, SafeTensors};
use serde_json::{Value, json};
use wush_tests::{Outcome, Scratch, names};

use crate::common::{
    Tensors, args, edit_config, edit_tensors, model, not_finite, on_demo, on_tiny, save, text, tiny, token_ids, wush,
};

/// Runs `command` and asserts an error that says all of `expected`, with a hint.
fn assert_error(scratch: &Scratch, command: &[String], expected: &[&str]) -> Outcome {
    let run = assert_failure(scratch, command, expected);
    assert!(run.stderr.lines().any(|line| line.starts_with("hint: ")), "no hint: {run:?}");
    run
}

/// As [`assert_error`], for a message that says itself what to do: a hint, if any, is not empty.
fn assert_failure(scratch: &Scratch, command: &[String], expected: &[&str]) -> Outcome {
    let before = names(scratch.path());
    let run = wush(scratch).run(command);
    assert_eq!(run.code, Some(2), "{command:?}: {run:?}");
    assert!(run.stdout.is_empty(), "{run:?}");
    let message =
        run.stderr.lines().find(|line| line.starts_with("error: ")).unwrap_or_else(|| panic!("no message: {run:?}"));
    for part in expected {
        assert!(message.contains(part), "the message does not say {part:?}: {run:?}");
    }
    assert!(!run.stderr.lines().any(|line| line.trim_end() == "hint:"), "an empty hint: {run:?}");
    assert!(!run.stderr.contains("panicked") && !run.stderr.contains("stack backtrace"), "{run:?}");
    assert_eq!(names(scratch.path()), before, "something was left behind: {run:?}");
    run
}

/// A copy of the tiny model, spoiled, must be refused by `convert` with a message that says all of `expected`.
fn assert_refused(spoil: impl FnOnce(&Path), expected: &[&str]) {
    let scratch = Scratch::new();
    let model = scratch.copy_of(&tiny(), "model");
    spoil(&model);
    let command = on_tiny(&scratch, "convert", &model, &["--out", "bundle"]);
    assert_error(&scratch, &command, expected);
}

/// Splits the one shard into two with an index.
fn shard(model: &Path) {
    let path = model.join("model.safetensors");
    let bytes = fs::read(&path).expect("read");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let (mut parts, mut map) = ([Tensors::new(), Tensors::new()], serde_json::Map::new());
    for (at, (name, view)) in file.iter().collect::<BTreeMap<_, _>>().into_iter().enumerate() {
        let name_of_shard = format!("model-0000{}-of-00002.safetensors", at % 2 + 1);
        map.insert(name.to_owned(), name_of_shard.into());
        parts[at % 2].insert(name.to_owned(), (view.dtype(), view.shape().to_vec(), view.data().to_vec()));
    }
    for (at, part) in parts.iter().enumerate() {
        save(&model.join(format!("model-0000{}-of-00002.safetensors", at + 1)), part);
    }
    fs::remove_file(path).expect("removed");
    let index = json!({ "metadata": { "total_size": 0 }, "weight_map": map });
    fs::write(model.join("model.safetensors.index.json"), index.to_string()).expect("written");
}

#[test]
fn a_model_that_is_nowhere() {
    let scratch = Scratch::new();
    let ids = token_ids(&scratch, "ids.json", 2, 8);
    let on = |model: &str| args([&"convert", &model, &"--calib", &ids, &"--out", &"bundle"]);
    assert_error(&scratch, &on("no-org/no-model"), &["there is no directory no-org/no-model; taken as a hub id: "]);
    assert_error(&scratch, &on("./no-such-directory"), &["no-such-directory"]);
    fs::create_dir(scratch.join("empty")).expect("created");
    assert_error(&scratch, &on("empty"), &["empty"]);
}

#[test]
fn a_data_set_without_a_network() {
    let scratch = Scratch::new();
    // The default is the paper's data set on the hub.
    let command = args([&"convert", &model(), &"--out", &"bundle"]);
    let run = assert_error(&scratch, &command, &["HuggingFaceFW/fineweb-edu"]);
    assert!(run.stderr.contains("--calib"), "the hint says what to pass: {run:?}");
}

#[test]
fn outputs_that_are_there_already() {
    let scratch = Scratch::new();
    fs::create_dir(scratch.join("bundle")).expect("created");
    scratch.write("stats.safetensors", "not ours");
    assert_error(&scratch, &on_tiny(&scratch, "convert", &tiny(), &["--out", "bundle"]), &["bundle: exists already"]);
    assert_error(
        &scratch,
        &on_tiny(&scratch, "calibrate", &tiny(), &["--out", "stats.safetensors"]),
        &["exists already"],
    );
    fs::create_dir(scratch.join("other.failed")).expect("created");
    assert_error(
        &scratch,
        &on_tiny(&scratch, "convert", &tiny(), &["--out", "other"]),
        &["other.failed: exists already"],
    );
    assert_eq!(fs::read(scratch.join("stats.safetensors")).expect("read"), b"not ours");
}

#[test]
fn outputs_that_cannot_be() {
    let scratch = Scratch::new();
    let model = scratch.copy_of(&tiny(), "model");
    assert_error(&scratch, &on_tiny(&scratch, "convert", &model, &["--out", "no/such/dir"]), &["no/such"]);
    assert_error(
        &scratch,
        &on_tiny(&scratch, "convert", &model, &["--out", "model/inside"]),
        &["inside the checkpoint directory"],
    );
    scratch.write("file", "");
    assert_error(&scratch, &on_tiny(&scratch, "convert", &model, &["--out", "file/below"]), &["file"]);
}

/// Files of a checkpoint are read, copied and hashed together: nothing is written into any, at any depth.
#[test]
fn outputs_inside_checkpoints_and_bundles() {
    let scratch = Scratch::new();
    wush(&scratch).ok(&on_tiny(&scratch, "convert", &tiny(), &["--out", "bundle"]));
    wush(&scratch).ok(&on_tiny(&scratch, "calibrate", &tiny(), &["--out", "s.safetensors"]));
    wush(&scratch).ok(&["solve", "s.safetensors", "--out", "t.safetensors"]);
    scratch.copy_of(&tiny(), "other");
    fs::create_dir(scratch.join("other/notes")).expect("created");
    for dir in ["bundle", "bundle/wush", "other", "other/notes"] {
        let (file, folder) = (format!("{dir}/x.safetensors"), format!("{dir}/x"));
        let page = format!("{dir}/x.html");
        let commands = [
            on_tiny(&scratch, "convert", &tiny(), &["--out", &folder]),
            on_tiny(&scratch, "calibrate", &tiny(), &["--out", &file]),
            args([&"merge", &"s.safetensors", &"--out", &file.as_str()]),
            args([&"solve", &"s.safetensors", &"--out", &file.as_str()]),
            args([&"fold", &tiny(), &"t.safetensors", &"--out", &folder.as_str()]),
            args([&"unfold", &"bundle", &"--out", &folder.as_str()]),
            args([&"demo", &"--out", &folder.as_str()]),
            args([&"eval", &"recon", &tiny(), &"--text", &"ids.json", &"--html", &page.as_str()]),
            args([&"inspect", &"t.safetensors", &"--html", &page.as_str()]),
        ];
        for command in commands {
            assert_error(&scratch, &command, &["the output lies inside the checkpoint directory"]);
        }
        let left = names(&scratch.join(dir)).into_iter().find(|name| name.trim_start_matches('.').starts_with("x."));
        assert_eq!(left, None, "{dir}");
    }
}

#[test]
fn options_that_nothing_looks_at() {
    let scratch = Scratch::new();
    let convert = |more: &[&str]| on_tiny(&scratch, "convert", &tiny(), &[&["--out", "bundle"], more].concat());
    for (transform, option, value) in [
        ("hadamard", "--exponent", "0.4"),
        ("oscar", "--exponent", "0.4"),
        ("random", "--factor", "balanced"),
        ("identity", "--damping", "0.1"),
        ("hadamard", "--center-keys", "auto"),
        ("hadamard", "--feedback", "true"),
    ] {
        let command = convert(&["--transform", transform, option, value]);
        let run = assert_error(&scratch, &command, &[&format!("{option}: {transform} would not look at it")]);
        assert!(run.stderr.contains("hint: leave it out: it is for "), "{run:?}");
    }
    let unchecked = convert(&["--verify-sequences", "0", "--tolerance", "0.1"]);
    assert_error(&scratch, &unchecked, &["--tolerance: expected none where nothing is checked", "found 0.1"]);
    let field = convert(&["--text-field", "body"]);
    assert_error(&scratch, &field, &["--text-field: expected none with token-id lists", "found body"]);
    let plain = on_demo("convert", &["--out", "bundle", "--text-field", "body"]);
    assert_error(&scratch, &plain, &["--text-field: expected none with plain text", "found body"]);
    let bounded = convert(&["--device", "cpu", "--max-gpu-memory", "24GiB"]);
    assert_error(&scratch, &bounded, &["--max-gpu-memory: expected none with --device cpu", "found 25769803776"]);
    wush(&scratch).ok(&on_tiny(&scratch, "calibrate", &tiny(), &["--out", "s.safetensors"]));
    let solve = args([&"solve", &"s.safetensors", &"--out", &"t.safetensors", &"--transform", &"identity"]);
    let solve = [solve, args([&"--exponent", &"0.3"])].concat();
    assert_error(&scratch, &solve, &["--exponent: identity would not look at it"]);
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_behind_stdout_and_a_directory_for_a_file() {
    let scratch = Scratch::new();
    wush(&scratch).ok(&on_tiny(&scratch, "calibrate", &tiny(), &["--out", "s.safetensors"]));
    let commands = [
        args([&"inspect", &"s.safetensors"]),
        args([&"inspect", &"s.safetensors", &"--format", &"json"]),
        args([&"generate", &model(), &"--prompt", &"The", &"--max-new-tokens", &"8"]),
        args([&"schema"]),
    ];
    for command in commands {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").expect("a device");
        let run = Outcome::of(wush(&scratch).command(&command).stdout(full).output().expect("started"));
        assert_eq!(run.code, Some(2), "{command:?}: {run:?}");
        for line in ["error: stdout: cannot write: ", "hint: free some space"] {
            assert!(run.stderr.lines().any(|found| found.starts_with(line)), "{command:?}: no {line}: {run:?}");
        }
    }
    fs::create_dir(scratch.join("dir")).expect("created");
    let run = assert_error(&scratch, &args([&"generate", &model(), &"--prompt-file", &"dir"]), &["dir: cannot read: "]);
    assert!(run.stderr.contains("hint: pass a file: this is a directory"), "{run:?}");
    let windows = args([&"generate", &model(), &"--prompt", &"a", &"--kv-bits", &"2", &"--flush", &"0"]);
    assert_error(&scratch, &windows, &["--flush: expected 1 to"]);
}

#[test]
fn a_bundle_is_not_converted_again() {
    let scratch = Scratch::new();
    wush(&scratch).ok(&on_tiny(&scratch, "convert", &tiny(), &["--out", "bundle"]));
    let again = on_tiny(&scratch, "convert", &scratch.join("bundle"), &["--out", "twice"]);
    assert_error(&scratch, &again, &["is a bundle already"]);
    assert_error(&scratch, &args([&"unfold", &tiny(), &"--out", &"back"]), &["is not a bundle"]);
}

#[test]
fn a_gpu_that_is_not_there() {
    let scratch = Scratch::new();
    let command = on_tiny(&scratch, "convert", &tiny(), &["--out", "bundle", "--device", "cuda"]);
    // No driver, or none of its devices: the tests hide them.
    let run = assert_error(&scratch, &command, &["GPU: "]);
    assert!(run.stderr.contains("--device cpu"), "{run:?}");
    let command = args([&"generate", &tiny(), &"--prompt", &"a", &"--device", &"cuda"]);
    assert_error(&scratch, &command, &["--device: expected auto or cpu", "found cuda"]);
}

#[test]
fn numbers_out_of_range() {
    let scratch = Scratch::new();
    for (option, value, expected) in [
        ("--damping", "-1", "--damping: expected a number from 0 to 1e6, found -1"),
        ("--damping", "NaN", "--damping: expected"),
        ("--damping", "much", "expected a number, such as"),
        ("--tolerance", "none", "expected a number, such as"),
        ("--seed", "-1", "expected a whole number from 0"),
        ("--seq-len", "8", "--seq-len: expected none with token-id lists"),
        ("--sequences", "0", "--sequences: expected at least 1, found 0"),
        ("--sequences", "5", "wanted, found 4"),
        ("--sequences", "-1", "expected a whole number"),
        ("--seq-len", "-1", "expected a whole number"),
        ("--shard", "1/9", "--shard: expected"),
        ("--threads", "0", "--threads: expected"),
        ("--threads", "1000000", "--threads: expected"),
        ("--tolerance", "0", "--tolerance: expected a positive number, found 0"),
        ("--tolerance", "-0.1", "--tolerance: expected a positive number, found -0.1"),
    ] {
        let (command, out) = if option == "--shard" { ("calibrate", "s.safetensors") } else { ("convert", "bundle") };
        // One share of nine of four sequences is empty.
        let command = on_tiny(&scratch, command, &tiny(), &["--out", out, option, value]);
        assert_failure(&scratch, &command, &[expected]);
    }
    let mut long = args([&"convert", &model(), &"--calib", &text(), &"--out", &"bundle", &"--seq-len", &"4097"]);
    assert_failure(&scratch, &long, &["--seq-len", "2 to 4096", "4097"]);
    let last = long.len() - 1;
    long[last] = "1".to_owned();
    assert_failure(&scratch, &long, &["--seq-len"]);
    let ids = scratch.write("long.json", serde_json::to_string(&vec![vec![1; 5000]]).expect("JSON"));
    assert_failure(
        &scratch,
        &args([&"convert", &model(), &"--calib", &ids, &"--out", &"bundle"]),
        &["long.json: sequence 0 is longer than 4096 tokens"],
    );
}

#[test]
fn too_little_text() {
    let scratch = Scratch::new();
    let short = scratch.write("short.txt", "Once upon a time there was a very short text.");
    let command = args([&"convert", &model(), &"--calib", &short, &"--out", &"bundle"]);
    assert_error(&scratch, &command, &["short.txt", "wanted", "found 0"]);
    let other = scratch.write("rows.jsonl", "{\"body\": \"no field of that name\"}\n");
    let command = args([&"convert", &model(), &"--calib", &other, &"--out", &"bundle"]);
    let run = assert_error(&scratch, &command, &["rows.jsonl", "text", "body"]);
    assert!(run.stderr.contains("--text-field"), "{run:?}");
}

#[test]
fn token_ids_outside_the_vocabulary() {
    let scratch = Scratch::new();
    let ids = scratch.write("ids.json", "[[1, 2, 64]]");
    let command = args([&"convert", &tiny(), &"--calib", &ids, &"--out", &"bundle"]);
    assert_error(&scratch, &command, &["64", "vocabulary"]);
}

#[test]
fn a_missing_tokenizer() {
    let scratch = Scratch::new();
    let text = scratch.write("text.txt", "Once upon a time.");
    assert_error(&scratch, &args([&"convert", &tiny(), &"--calib", &text, &"--out", &"bundle"]), &["tokenizer.json"]);
}

#[test]
fn adapters_and_quantized_weights() {
    assert_refused(
        |model| fs::write(model.join("adapter_config.json"), "{}").expect("written"),
        &["adapter_config.json"],
    );
    let quantized = json!({ "quant_method": "fp8" });
    assert_refused(
        |model| edit_config(model, |config| drop(config.insert("quantization_config".to_owned(), quantized))),
        &["quantization_config", "fp8"],
    );
    assert_refused(
        |model| {
            edit_tensors(model, |tensors| {
                let name = "model.layers.0.self_attn.v_proj.weight";
                let (_, shape, _) = tensors[name].clone();
                let bytes = vec![0; shape.iter().product()];
                tensors.insert(name.to_owned(), (Dtype::F8_E4M3, shape, bytes));
            });
        },
        &["model.layers.0.self_attn.v_proj.weight", "F8_E4M3"],
    );
}

#[test]
fn unknown_and_unsafe_models() {
    let config = |key: &str, value: Value| {
        let key = key.to_owned();
        move |model: &Path| edit_config(model, |config| drop(config.insert(key, value)))
    };
    assert_refused(config("model_type", json!("martian")), &["martian"]);
    assert_refused(config("kv_lora_rank", json!(512)), &["kv_lora_rank"]);
    assert_refused(config("clip_qkv", json!(8.0)), &["clip_qkv"]);
    assert_refused(config("num_key_value_heads", json!(3)), &["num_key_value_heads"]);
    assert_refused(
        |model| {
            edit_tensors(model, |tensors| {
                let norm = tensors["model.norm.weight"].clone();
                tensors.insert("model.layers.1.self_attn.mystery.weight".to_owned(), norm);
            });
        },
        &["model.layers.1.self_attn.mystery.weight"],
    );
}

#[test]
fn damaged_files() {
    assert_refused(|model| fs::write(model.join("config.json"), "{").expect("written"), &["config.json"]);
    assert_refused(|model| fs::remove_file(model.join("config.json")).expect("removed"), &["config.json"]);
    assert_refused(|model| truncate(&model.join("model.safetensors"), 100), &["model.safetensors"]);
    assert_refused(|model| truncate(&model.join("model.safetensors"), 4), &["model.safetensors"]);
    assert_refused(|model| truncate_by(&model.join("model.safetensors"), 1), &["model.safetensors"]);
    assert_refused(|model| huge_header(&model.join("model.safetensors")), &["model.safetensors"]);
    assert_refused(
        |model| edit_tensors(model, |tensors| drop(tensors.remove("model.layers.1.self_attn.o_proj.weight"))),
        &["model.layers.1.self_attn.o_proj.weight"],
    );
}

fn truncate(path: &Path, len: u64) {
    fs::OpenOptions::new().write(true).open(path).expect("opened").set_len(len).expect("cut");
}

fn truncate_by(path: &Path, n_bytes: u64) {
    truncate(path, path.metadata().expect("there").len() - n_bytes);
}

fn huge_header(path: &Path) {
    let mut bytes = fs::read(path).expect("read");
    bytes[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    fs::write(path, bytes).expect("written");
}

#[test]
fn sharded_checkpoints_that_do_not_fit_their_index() {
    assert_refused(
        |model| {
            shard(model);
            fs::remove_file(model.join("model-00002-of-00002.safetensors")).expect("removed");
        },
        &["model-00002-of-00002.safetensors"],
    );
    assert_refused(
        |model| {
            shard(model);
            let (one, two) =
                (model.join("model-00001-of-00002.safetensors"), model.join("model-00002-of-00002.safetensors"));
            fs::copy(one, two).expect("copied");
        },
        &["model-0000"],
    );
    assert_refused(
        |model| {
            shard(model);
            let index = model.join("model.safetensors.index.json");
            let text = fs::read_to_string(&index).expect("read");
            fs::write(index, text.replace("model-00002", "../model-00002")).expect("written");
        },
        &["../model-00002-of-00002.safetensors"],
    );
}

#[cfg(unix)]
#[test]
fn links_that_lead_out_of_the_directory() {
    use std::os::unix::fs::symlink;
    assert_refused(
        |model| {
            let outside = model.parent().expect("in a scratch directory").join("outside.safetensors");
            fs::rename(model.join("model.safetensors"), &outside).expect("moved");
            symlink(outside, model.join("model.safetensors")).expect("linked");
        },
        &["model.safetensors", "leads out of the checkpoint directory"],
    );
    assert_refused(
        |model| symlink("/etc/passwd", model.join("notes.txt")).expect("linked"),
        &["notes.txt", "leads out of the checkpoint directory"],
    );
}

#[test]
fn weights_that_are_not_finite() {
    let nan = |model: &Path| not_finite(model, "model.layers.1.self_attn.k_proj.weight");
    assert_refused_midway(nan, &["calibrate: layer 1", "keys", "not finite"]);
}

/// As [`assert_refused`], for what only the forward pass can see: the work directory may be left, no output.
fn assert_refused_midway(spoil: impl FnOnce(&Path), expected: &[&str]) {
    let scratch = Scratch::new();
    let model = scratch.copy_of(&tiny(), "model");
    spoil(&model);
    let run = wush(&scratch).run(&on_tiny(&scratch, "convert", &model, &["--out", "bundle"]));
    assert_eq!(run.code, Some(2), "{run:?}");
    for part in expected {
        assert!(run.stderr.contains(part), "the message does not say {part:?}: {run:?}");
    }
    assert!(!scratch.join("bundle").exists());
}

#[test]
fn files_of_another_kind() {
    let scratch = Scratch::new();
    let weights = tiny().join("model.safetensors");
    assert_error(&scratch, &args([&"solve", &weights, &"--out", &"t.safetensors"]), &["model.safetensors"]);
    assert_error(&scratch, &args([&"fold", &tiny(), &weights, &"--out", &"bundle"]), &["model.safetensors"]);
    assert_error(&scratch, &args([&"merge", &weights, &"--out", &"sum.safetensors"]), &["model.safetensors"]);
    let text = scratch.write("notes.safetensors", "not a tensor file");
    assert_error(&scratch, &args([&"inspect", &text]), &["notes.safetensors"]);
    for command in [&["inspect", "no-such-path"][..], &["solve", "no-such-path", "--out", "t.safetensors"]] {
        let command: Vec<_> = command.iter().map(|arg| (*arg).to_owned()).collect();
        let run = assert_error(&scratch, &command, &["no-such-path"]);
        assert!(run.stderr.contains("hint: check the path: nothing is there"), "{run:?}");
    }
    let run =
        assert_error(&scratch, &args([&"solve", &tiny(), &"--out", &"t.safetensors"]), &["is a checkpoint, not a"]);
    assert!(run.stderr.contains("hint: `wush calibrate` makes statistics of a checkpoint"), "{run:?}");
    for missing in ["no-such-bundle", "org/bundle"] {
        let run =
            assert_error(&scratch, &args([&"unfold", &missing, &"--out", &"back"]), &["there is no such directory"]);
        assert!(run.stderr.contains("hf download"), "{run:?}");
    }
    assert_error(&scratch, &args([&"solve", &"no-such-path", &"--out", &"t.safetensors"]), &["no-such-path"]);
}

#[test]
fn files_of_wush_that_another_command_takes() {
    let scratch = Scratch::new();
    wush(&scratch).ok(&on_tiny(&scratch, "calibrate", &tiny(), &["--out", "stats.safetensors"]));
    wush(&scratch).ok(&["solve", "stats.safetensors", "--out", "transforms.safetensors"]);
    let solve = args([&"solve", &"transforms.safetensors", &"--out", &"t.safetensors"]);
    let run = assert_error(&scratch, &solve, &["transforms.safetensors: is a transforms file, not a statistics file"]);
    assert!(run.stderr.contains("wush fold"), "{run:?}");
    let fold = args([&"fold", &tiny(), &"stats.safetensors", &"--out", &"bundle"]);
    let run = assert_error(&scratch, &fold, &["stats.safetensors: is a statistics file, not a transforms file"]);
    assert!(run.stderr.contains("wush solve"), "{run:?}");
    let merge = args([&"merge", &"transforms.safetensors", &"--out", &"sum.safetensors"]);
    assert_error(&scratch, &merge, &["is a transforms file, not a statistics file"]);
    let other = args([&"fold", &model(), &"transforms.safetensors", &"--out", &"bundle"]);
    assert_error(&scratch, &other, &["the transforms were made from another model"]);
}

#[test]
fn corrupted_bundles_never_pass() {
    let scratch = Scratch::new();
    wush(&scratch).ok(&on_tiny(&scratch, "convert", &tiny(), &["--out", "bundle"]));
    type Spoil = (&'static str, fn(&PathBuf));
    let cases: &[Spoil] = &[
        ("wush/manifest.json", |path| fs::remove_file(path).expect("removed")),
        ("wush/manifest.json", |path| fs::write(path, "{}").expect("written")),
        ("wush/manifest.json", |path| truncate_by(path, 20)),
        ("wush/key_transforms.safetensors", |path| fs::remove_file(path).expect("removed")),
        ("wush/key_transforms.safetensors", |path| truncate_by(path, 1)),
        ("wush/value_transforms.safetensors", |path| huge_header(path)),
        ("model.safetensors", |path| truncate_by(path, 1)),
        ("model.safetensors", |path| fs::remove_file(path).expect("removed")),
        ("config.json", |path| fs::remove_file(path).expect("removed")),
    ];
    for (at, (name, spoil)) in cases.iter().enumerate() {
        let spoiled = scratch.copy_of(&scratch.join("bundle"), &format!("spoiled-{at}"));
        spoil(&spoiled.join(name));
        let run = wush(&scratch).run(&args([&"inspect", &spoiled]));
        // A plain checkpoint is left when the manifest is gone: no bundle, so nothing to audit.
        assert!(matches!(run.code, Some(1 | 2)), "case {at}, {name}: {run:?}");
        assert!(!run.stderr.contains("panicked"), "case {at}, {name}: {run:?}");
    }
}
