//! What goes wrong around a run: another run to the same output, leftovers, limits, odd names, odd token ids. Everything that
//! can be known before the calibration is refused before it.

use std::fs;
use std::path::Path;
use std::process::{Child, Stdio};

use wush_tests::{Outcome, Scratch, names};

use crate::common::{args, edit_config, edit_tensors, model, not_finite, on_demo, on_tiny, tiny, token_ids, wush};

/// Calibrations that last a while: two of them started one after the other run at the same time.
const LONG: [&str; 4] = ["--sequences", "24", "--seq-len", "1024"];

/// `command` on the demonstration model, long enough to be met by a second run.
fn long(command: &str, out: &str) -> Vec<String> {
    let mut all = on_demo(command, &["--out", out]);
    all.splice(4..8, LONG.map(str::to_owned));
    all
}

/// Runs and asserts exit code 2, one message with all of `expected`, a hint, and that the calibration had not begun.
fn assert_refused_early(scratch: &Scratch, command: &[String], expected: &[&str]) {
    let before = names(scratch.path());
    let run = wush(scratch).run(command);
    assert_eq!(run.code, Some(2), "{command:?}: {run:?}");
    for part in expected {
        assert!(run.stderr.contains(part), "the message does not say {part:?}: {run:?}");
    }
    assert!(run.stderr.lines().filter(|line| line.starts_with("error: ")).count() == 1, "{run:?}");
    assert!(!run.stderr.contains("memory     about"), "the work had begun: {run:?}");
    assert_eq!(names(scratch.path()), before, "something was left behind: {run:?}");
}

/// Of two runs to one output one ends with exit code 0 and the other one, which says so, with 2.
fn assert_one_of_two(first: Child, second: Child) {
    let runs = [first, second].map(|child| Outcome::of(child.wait_with_output().expect("waited for")));
    let mut codes = runs.each_ref().map(|run| run.code);
    codes.sort();
    assert_eq!(codes, [Some(0), Some(2)], "{runs:?}");
    let loser = if runs[0].code == Some(2) { &runs[0] } else { &runs[1] };
    let told = ["another run is writing here", "exists already"];
    assert!(told.iter().any(|text| loser.stderr.contains(text)) && loser.stderr.contains("hint: "), "{loser:?}");
}

#[test]
fn two_runs_to_one_output() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    for command in ["calibrate", "convert"] {
        let [first, second] = [0, 1].map(|_| program.start(&long(command, command)));
        assert_one_of_two(first, second);
    }
    assert_eq!(names(scratch.path()), ["calibrate", "convert"]);
    program.ok(&["solve", "calibrate", "--out", "transforms.safetensors"]);
    for command in [
        args([&"fold", &model(), &"transforms.safetensors", &"--out", &"folded"]),
        args([&"unfold", &"convert", &"--out", &"unfolded"]),
    ] {
        let [first, second] = [0, 1].map(|_| program.start(&command));
        assert_one_of_two(first, second);
    }
    assert!(!names(scratch.path()).iter().any(|name| name.starts_with('.')), "{:?}", names(scratch.path()));
}

#[test]
fn head_dimensions_without_a_hadamard_matrix() {
    let scratch = Scratch::new();
    let model = scratch.copy_of(&tiny(), "model");
    // 8 columns of every head are cut to 6.
    edit_config(&model, |config| drop(config.insert("head_dim".to_owned(), 6.into())));
    edit_tensors(&model, |tensors| {
        for (name, (_, shape, bytes)) in tensors.iter_mut() {
            let axis = match name.rsplit('.').nth(1) {
                Some("q_proj" | "k_proj" | "v_proj") => 0,
                Some("o_proj") => 1,
                _ => continue,
            };
            let old = shape[axis];
            shape[axis] = old / 8 * 6;
            let width = bytes.len()
                / shape.iter().enumerate().map(|(at, n)| if at == axis { old } else { *n }).product::<usize>();
            let n_elements: usize = shape.iter().product();
            bytes.truncate(n_elements * width);
        }
    });
    for transform in ["wush", "hadamard"] {
        let command = on_tiny(&scratch, "convert", &model, &["--out", "bundle", "--transform", transform]);
        assert_refused_early(&scratch, &command, &["no Hadamard matrix of order 6", "identity and random"]);
    }
    wush(&scratch).ok(&on_tiny(&scratch, "convert", &model, &["--out", "bundle", "--transform", "random"]));
}

#[test]
fn output_names_that_end_in_no_name() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    for out in ["..", "x/..", "/"] {
        let run = program.run(&on_tiny(&scratch, "convert", &tiny(), &["--out", out]));
        assert_eq!(run.code, Some(2), "{out:?}: {run:?}");
        assert!(run.stderr.contains("--out: expected a path that ends in a name"), "{out:?}: {run:?}");
    }
    program.ok(&on_tiny(&scratch, "convert", &tiny(), &["--out", "bundle/."]));
    program.ok(&on_tiny(&scratch, "calibrate", &tiny(), &["--out", "./stats.safetensors"]));
    assert_eq!(names(scratch.path()), ["bundle", "ids.json", "stats.safetensors"]);
    let name = "n".repeat(250);
    for command in ["convert", "calibrate"] {
        let command = on_tiny(&scratch, command, &tiny(), &["--out", &name]);
        assert_refused_early(&scratch, &command, &["File name too long", "hint: choose a shorter name"]);
    }
}

#[test]
fn outputs_inside_a_checkpoint() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    let model = scratch.copy_of(&tiny(), "model");
    for command in ["convert", "calibrate"] {
        let command = on_tiny(&scratch, command, &model, &["--out", "model/model-x.safetensors"]);
        assert_refused_early(&scratch, &command, &["the output lies inside the checkpoint directory"]);
    }
    program.ok(&on_tiny(&scratch, "calibrate", &model, &["--out", "stats.safetensors"]));
    for command in ["solve", "merge"] {
        let command = args([&command, &"stats.safetensors", &"--out", &"model/model-x.safetensors"]);
        assert_refused_early(&scratch, &command, &["the output lies inside the checkpoint directory"]);
    }
    assert_eq!(names(&model), names(&tiny()));
}

#[cfg(unix)]
#[test]
fn files_of_a_checkpoint_that_cannot_be_copied() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let scratch = Scratch::new();
    let model = scratch.copy_of(&tiny(), "model");
    let command = on_tiny(&scratch, "convert", &model, &["--out", "bundle"]);
    for name in ["back\\slash.txt", "two\nlines.txt"] {
        fs::write(model.join(name), "").expect("written");
        assert_refused_early(&scratch, &command, &["so the manifest cannot list it", "rename or remove it"]);
        fs::remove_file(model.join(name)).expect("removed");
    }
    symlink("nowhere", model.join("link.txt")).expect("linked");
    assert_refused_early(&scratch, &command, &["link.txt", "a link to nothing"]);
    fs::remove_file(model.join("link.txt")).expect("removed");

    let secret = model.join("secret.txt");
    fs::write(&secret, "").expect("written");
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o000)).expect("set");
    // root reads everything.
    if fs::File::open(&secret).is_err() {
        assert_refused_early(&scratch, &command, &["secret.txt: cannot open", "its permissions"]);
    }
    fs::remove_file(&secret).expect("removed");

    symlink("nowhere", scratch.join("dangling")).expect("linked");
    let command = on_tiny(&scratch, "convert", Path::new("dangling"), &["--out", "bundle"]);
    assert_refused_early(&scratch, &command, &["dangling", "a link to nothing"]);
}

#[test]
fn a_directory_name_that_would_draw_on_the_terminal() {
    let scratch = Scratch::new();
    let model = scratch.copy_of(&tiny(), "red\u{1b}[31m\nmodel");
    let command = on_tiny(&scratch, "convert", &model, &["--out", "bundle"]);
    assert_refused_early(&scratch, &command, &[r"red\u{1b}[31m\nmodel", "hint: rename the directory"]);
    let run = wush(&scratch).run(&on_tiny(&scratch, "convert", &tiny(), &["--out", "no\u{1b}[31m/x"]));
    assert!(run.stderr.contains(r"no\u{1b}[31m") && !run.stderr.contains('\u{1b}'), "{run:?}");
    let run = wush(&scratch).ok(&on_tiny(&scratch, "convert", &tiny(), &["--out", "bundle\n\u{1b}"]));
    assert!(run.stdout.contains(r"next: wush inspect $'bundle\012\033'"), "{run:?}");
    assert!(!run.stdout.contains('\u{1b}') && !run.stderr.contains('\u{1b}'), "{run:?}");
}

#[test]
fn a_failed_calibration_leaves_nothing_in_the_way() {
    let scratch = Scratch::new();
    let model = scratch.copy_of(&tiny(), "model");
    not_finite(&model, "model.layers.1.self_attn.k_proj.weight");
    let command = on_tiny(&scratch, "convert", &model, &["--out", "bundle"]);
    for _ in 0..2 {
        let run = wush(&scratch).run(&command);
        assert_eq!(run.code, Some(2), "{run:?}");
        assert!(run.stderr.contains("calibrate: layer 1"), "{run:?}");
        assert_eq!(names(scratch.path()), ["ids.json", "model"]);
    }
    // What a killed run leaves before its first save is no work to continue.
    fs::create_dir(scratch.join("bundle.wush-work")).expect("created");
    fs::create_dir(scratch.join(".bundle.wush-partial")).expect("created");
    wush(&scratch).ok(&on_tiny(&scratch, "convert", &tiny(), &["--out", "bundle"]));
    assert_eq!(names(scratch.path()), ["bundle", "ids.json", "model"]);
}

#[cfg(unix)]
#[test]
fn what_is_not_ours_in_the_work_directorys_place_is_left_alone() {
    let scratch = Scratch::new();
    let command = on_tiny(&scratch, "convert", &tiny(), &["--out", "bundle", "--resume"]);
    let work = scratch.join("bundle.wush-work");
    fs::create_dir(scratch.join("elsewhere")).expect("created");
    std::os::unix::fs::symlink("elsewhere", &work).expect("linked");
    assert_refused_early(&scratch, &command, &["bundle.wush-work", "found a link", "move it away"]);
    fs::remove_file(&work).expect("removed");
    fs::create_dir(&work).expect("created");
    fs::write(work.join("thesis.txt"), "mine").expect("written");
    assert_refused_early(&scratch, &command, &["a directory with \"thesis.txt\" in it"]);
    assert_eq!(fs::read(work.join("thesis.txt")).expect("read"), b"mine");
    fs::remove_file(work.join("thesis.txt")).expect("removed");
    fs::write(work.join("statistics.safetensors"), "damaged").expect("written");
    let run = wush(&scratch).run(&command);
    assert!(run.stderr.contains("hint: remove ") && run.stderr.contains("to start over"), "{run:?}");
}

#[cfg(target_os = "linux")]
#[test]
fn an_output_that_cannot_be_made_is_named_as_it_was_typed() {
    let scratch = Scratch::new();
    let run = wush(&scratch).run(&on_tiny(&scratch, "convert", &tiny(), &["--out", "/proc/bundle"]));
    assert_eq!(run.code, Some(2), "{run:?}");
    assert!(run.stderr.contains("/proc/bundle: cannot create") && !run.stderr.contains("wush-partial"), "{run:?}");
}

/// The limit stands in for a full disk, and for a user's `ulimit -f`.
#[cfg(unix)]
#[test]
fn a_limit_on_file_sizes_is_an_ordinary_error() {
    let scratch = Scratch::new();
    // 4096 blocks of 512 bytes hold the statistics, not the weights.
    let limited = wush(&scratch).command_after("ulimit -f 4096", &on_demo("convert", &["--out", "bundle"])).output();
    let run = Outcome::of(limited.expect("started"));
    assert_eq!(run.code, Some(2), "{run:?}");
    assert!(run.stderr.contains("model.safetensors: cannot write: File too large"), "{run:?}");
    assert!(
        run.stderr.contains("hint: lift the limit on file sizes") && run.stderr.contains("--resume continues"),
        "{run:?}"
    );
    assert!(run.stderr.contains("bundle/model.safetensors: ") && !run.stderr.contains("wush-partial"), "{run:?}");
    assert_eq!(names(scratch.path()), ["bundle.wush-work"]);
    let resumed = wush(&scratch).ok(&on_demo("convert", &["--out", "bundle", "--resume"]));
    assert!(resumed.stderr.contains("all sequences are done"), "{resumed:?}");

    let stats = on_tiny(&scratch, "calibrate", &tiny(), &["--out", "stats.safetensors"]);
    let limited = wush(&scratch).command_after("ulimit -f 1", &stats).output().expect("started");
    let run = Outcome::of(limited);
    assert_eq!(run.code, Some(2), "{run:?}");
    assert!(run.stderr.contains("stats.safetensors: cannot write") && !run.stderr.contains("wush-partial"), "{run:?}");
    assert_eq!(names(scratch.path()), ["bundle", "ids.json"]);
}

#[test]
fn folded_weights_that_are_not_finite_are_found_at_once() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    program.ok(&on_tiny(&scratch, "calibrate", &tiny(), &["--out", "stats.safetensors"]));
    program.ok(&["solve", "stats.safetensors", "--out", "transforms.safetensors"]);
    for name in ["model.layers.0.self_attn.v_proj.weight", "model.layers.1.self_attn.o_proj.weight"] {
        let model = scratch.copy_of(&tiny(), "model");
        not_finite(&model, name);
        let expected = [name, "element 0 is NaN", "hint: the checkpoint is damaged"];
        assert_refused_early(&scratch, &on_tiny(&scratch, "convert", &model, &["--out", "bundle"]), &expected);
        let fold = args([&"fold", &model, &"transforms.safetensors", &"--out", &"bundle"]);
        assert_refused_early(&scratch, &fold, &expected);
        fs::remove_dir_all(model).expect("removed");
    }
}

#[test]
fn odd_files_of_token_ids() {
    let scratch = Scratch::new();
    for (name, bytes, expected) in [
        ("empty.json", &b"[[1], [], [], []]"[..], &["sequence 1 is empty", "leave the empty list out"][..]),
        (
            "digits.json",
            &[&b"[["[..], &[b'1'; 309], b"]]"].concat(),
            &["a whole number below 2^32, found a larger one"],
        ),
        ("text.json", b"[[\"a\"]]", &["line 1: expected a token id", "[[1, 2, "]),
        (
            "cut.json.gz",
            b"\x1f\x8b\x08\0\0\0\0\0\0\xff\x8b\x8e",
            &["cannot be decompressed", "copy or download it again"],
        ),
        ("not.json.zst", b"not zstd", &["cannot be decompressed", "copy or download it again"]),
    ] {
        let ids = scratch.write(name, bytes);
        let command = args([&"calibrate", &tiny(), &"--calib", &ids, &"--out", &"stats.safetensors"]);
        assert_refused_early(&scratch, &command, expected);
    }
    let marked = scratch.write("marked.json", "\u{feff}[[1, 2, 3]]");
    wush(&scratch).ok(&args([&"calibrate", &tiny(), &"--calib", &marked, &"--out", &"stats.safetensors"]));
    // Two millions of lists are refused at the first that is one too many.
    let many = scratch.write("many.json", format!("[{}[1]]", "[1],".repeat(2_000_000)));
    let command = args([&"calibrate", &tiny(), &"--calib", &many, &"--out", &"many.safetensors"]);
    assert_refused_early(&scratch, &command, &["more than 1048576 sequences", "--sequences"]);
}

#[test]
fn sequences_of_one_token_check_nothing_and_say_so() {
    let scratch = Scratch::new();
    let ids = scratch.write("ids.json", "[[1], [2], [3]]");
    let run = wush(&scratch).ok(&args([&"convert", &tiny(), &"--calib", &ids, &"--out", &"bundle"]));
    let told = "equivalence not checked: every sequence is a single token";
    assert!(run.stdout.contains(told) && run.stderr.contains(told), "{run:?}");
}

#[test]
fn names_that_do_not_say_what_is_in_the_file() {
    let scratch = Scratch::new();
    let ids = token_ids(&scratch, "ids.json", 4, 40);
    let run = wush(&scratch).ok(&args([&"calibrate", &tiny(), &"--calib", &ids, &"--out", &"stats"]));
    let told = "reads files whose names end in .safetensors";
    assert!(run.stdout.contains(told) && run.stderr.contains(told), "{run:?}");
    assert!(wush(&scratch).ok(&["solve", "stats", "--out", "transforms"]).stdout.contains(told));
    assert!(!wush(&scratch).ok(&["merge", "stats", "--out", "sum.safetensors"]).stdout.contains(told));
}

#[test]
fn an_end_of_text_id_that_is_none() {
    let scratch = Scratch::new();
    let model = scratch.copy_of(&model(), "model");
    edit_config(&model, |config| drop(config.insert("eos_token_id".to_owned(), "</s>".into())));
    let mut command = on_demo("calibrate", &["--out", "stats.safetensors"]);
    command[1] = "model".to_owned();
    let expected = ["config.json", "eos_token_id: expected a token id", "hint: correct the value"];
    assert_refused_early(&scratch, &command, &expected);
}

#[test]
fn half_floats_that_vanish_are_told() {
    let scratch = Scratch::new();
    let model = scratch.copy_of(&tiny(), "model");
    // Values of f16's smallest steps: the fold mixes them and most are lost.
    edit_tensors(&model, |tensors| {
        for (name, (dtype, shape, bytes)) in tensors.iter_mut() {
            if name.contains("v_proj.weight") {
                let n_elements: usize = shape.iter().product();
                *dtype = safetensors::Dtype::F16;
                *bytes = (0..n_elements).flat_map(|i| ((i * 7 % 5) as u16 % 3).to_le_bytes()).collect();
            }
        }
    });
    let convert = |more: &[&str]| {
        let options = [&["--out", "bundle", "--verify-sequences", "0"], more].concat();
        let run = wush(&scratch).ok(&on_tiny(&scratch, "convert", &model, &options));
        fs::remove_dir_all(scratch.join("bundle")).expect("removed");
        run.stdout
    };
    let told = "folding lost precision";
    assert!(convert(&[]).contains(told) && convert(&[]).contains("--fold-dtype f32"));
    assert!(!convert(&["--fold-dtype", "f32"]).contains(told));
}

/// A bar, an estimate of the time left, and no character that a terminal would not expect.
#[cfg(target_os = "linux")]
#[test]
fn a_terminal_gets_a_bar() {
    let scratch = Scratch::new();
    let mut command = std::process::Command::new("script");
    let words: Vec<String> = long("calibrate", "stats.safetensors").iter().map(|word| format!("'{word}'")).collect();
    command.args(["-qec", &format!("'{}' {}", env!("CARGO_BIN_EXE_wush"), words.join(" ")), "/dev/null"]);
    command.current_dir(scratch.path()).stdin(Stdio::null()).env("TERM", "xterm");
    let Ok(output) = command.output() else {
        eprintln!("skipped: there is no `script`, which makes a terminal");
        return;
    };
    let run = Outcome::of(output);
    assert_eq!(run.code, Some(0), "{run:?}");
    assert!(run.stdout.contains("tokens/s, ") && run.stdout.contains(" left"), "{run:?}");
    assert!(run.stdout.contains("next: wush solve stats.safetensors"), "{run:?}");
}

/// The announced memory bounds what was used, and not by much: a plan that is always right because it is huge helps nobody.
#[cfg(target_os = "linux")]
#[test]
fn the_memory_plan_is_an_upper_bound() {
    /// What the constants of the plan, measured on other machines, may be off.
    const SLACK: f64 = 1.25;
    let scratch = Scratch::new();
    let mut command = long("convert", "bundle");
    command.extend(["--threads", "2", "--format", "json"].map(str::to_owned));
    let mut child = wush(&scratch).start(&command);
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0.0;
    while child.try_wait().expect("asked").is_none() {
        let text = fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kibibytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<f64>().ok());
        peak = kibibytes.map_or(peak, |n| f64::max(peak, n * 1024.0));
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    let run = Outcome::of(child.wait_with_output().expect("waited for"));
    let memory = &run.json()["memory"];
    let planned = ["anonymous", "mapped"].map(|key| memory[key].as_f64().expect("a number")).iter().sum::<f64>();
    assert!(peak > 0.0 && peak <= planned * SLACK, "{peak:e} used, {planned:e} planned");
    assert!(planned <= peak * SLACK * SLACK, "{peak:e} used, {planned:e} planned");
}
