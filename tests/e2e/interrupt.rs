//! Kills, signals and resumes: nothing lost, nothing half there, the same bytes in the end.

use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;
use std::thread::sleep;
use std::time::{Duration, Instant};

use wush_tests::{Outcome, Scratch, contents, names, signal};

use crate::common::{args, model, text, tiny, wush};

/// Enough groups of sequences that a kill lands between some of them.
const LONG: [&str; 4] = ["--sequences", "64", "--seq-len", "1024"];
/// Longest wait for a run to reach a state, generous for a loaded machine.
const PATIENCE: Duration = Duration::from_secs(120);

fn command(stage: &str, out: &str, more: &[&str]) -> Vec<String> {
    let mut all = args([&stage, &model(), &"--calib", &text(), &"--out", &out]);
    all.extend(LONG.iter().chain(more).map(|arg| (*arg).to_owned()));
    all
}

/// Waits until `ready` holds.
fn wait_for(what: &str, mut ready: impl FnMut() -> bool) {
    let start = Instant::now();
    while !ready() {
        assert!(start.elapsed() < PATIENCE, "waited in vain for {what}");
        sleep(Duration::from_millis(5));
    }
}

/// Delays in milliseconds: an early one, so that one run at least is killed, then a seeded sequence up to half of a whole run,
/// which covers all stages since every run begins where the last one stopped.
fn delays(n: usize, whole_run: u64) -> Vec<u64> {
    let mut state = 20_261_129_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % (whole_run / 2)
    };
    std::iter::once(whole_run / 8).chain((1..n).map(|_| next())).collect()
}

/// `nohup`, and a background job of a script: what the process was started to ignore it goes on ignoring.
#[test]
fn signals_that_are_ignored_from_the_start_stay_so() {
    let scratch = Scratch::new();
    let few = ["--sequences", "4", "--seq-len", "512"];
    let mut all = args([&"calibrate", &model(), &"--calib", &text(), &"--out", &"s.safetensors"]);
    all.extend(few.map(str::to_owned));
    let mut child = wush(&scratch)
        .command_after("trap '' HUP INT", &all)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("started");
    let mut stderr = BufReader::new(child.stderr.take().expect("piped"));
    let mut line = String::new();
    stderr.read_line(&mut line).expect("text");
    ["HUP", "INT"].iter().for_each(|name| signal(&child, name));
    let mut rest = String::new();
    stderr.read_to_string(&mut rest).expect("text");
    assert_eq!(child.wait().expect("waited for").code(), Some(0), "{line}{rest}");
}

#[test]
fn killed_at_any_moment_and_resumed_gives_the_same_bytes() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    let start = Instant::now();
    program.ok(&command("convert", "whole", &[]));
    let whole_run = start.elapsed().as_millis() as u64;

    let mut n_kills = 0;
    for delay in delays(8, whole_run) {
        let mut child = program
            .command(&command("convert", "killed", &["--resume"]))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("started");
        sleep(Duration::from_millis(delay));
        child.kill().expect("SIGKILL can be sent");
        let finished = child.wait().expect("waited for").success();
        let seen = names(scratch.path());
        assert!(seen.iter().all(|name| !name.ends_with(".failed")), "{seen:?}");
        n_kills += usize::from(!finished);
        // A kill between the rename and the end leaves the whole bundle, which is compared below.
        if finished || scratch.join("killed").exists() {
            break;
        }
    }
    assert!(n_kills > 0, "no run was killed");
    if !scratch.join("killed").exists() {
        program.ok(&command("convert", "killed", &["--resume"]));
    }
    assert!(contents(&scratch.join("whole")) == contents(&scratch.join("killed")), "{n_kills} kills left a trace");
    let left: Vec<_> = names(scratch.path()).into_iter().filter(|name| name.starts_with('.')).collect();
    assert!(left.is_empty(), "temporaries are left: {left:?}");
}

#[test]
fn a_killed_calibration_goes_on_from_its_last_save() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    program.ok(&command("calibrate", "whole.safetensors", &[]));

    let partial = scratch.join("part.safetensors.wush-resume");
    let mut child = program.start(&command("calibrate", "part.safetensors", &[]));
    wait_for("the first save", || partial.exists() || matches!(child.try_wait(), Ok(Some(_))));
    child.kill().expect("SIGKILL can be sent");
    child.wait().expect("waited for");
    assert!(partial.exists(), "the run ended before it could be killed");

    // Under another name it passes for finished statistics nowhere.
    std::fs::copy(&partial, scratch.join("renamed.safetensors")).expect("copied");
    let evaluate = args([&"eval", &"ppl", &model(), &"--text", &text(), &"--stats", &"renamed.safetensors"]);
    let solve = ["solve", "renamed.safetensors", "--out", "t.safetensors"].map(str::to_owned).to_vec();
    for (user, code) in [(evaluate, 2), (solve, 2), (args([&"inspect", &"renamed.safetensors"]), 1)] {
        let run = program.run(&user);
        assert_eq!(run.code, Some(code), "{run:?}");
        let said = [run.stdout.as_str(), &run.stderr].concat();
        assert!(said.contains("holds the sums of an unfinished run: "), "{run:?}");
    }
    std::fs::remove_file(scratch.join("renamed.safetensors")).expect("removed");

    let again = program.run(&command("calibrate", "part.safetensors", &[]));
    assert_eq!(again.code, Some(2), "{again:?}");
    assert!(
        again.stderr.contains("holds the work of an earlier run") && again.stderr.contains("--resume"),
        "{again:?}"
    );

    let mut other = command("calibrate", "part.safetensors", &["--resume"]);
    other.extend(["--rope-scaling".to_owned(), "linear:2".to_owned()]);
    let other = program.run(&other);
    assert_eq!(other.code, Some(2), "{other:?}");
    assert!(other.stderr.contains("was begun with another --rope-scaling: none there, linear:2 here"), "{other:?}");

    let mut shorter = command("calibrate", "part.safetensors", &["--resume"]);
    let at = shorter.iter().position(|arg| arg == "1024").expect("--seq-len");
    shorter[at] = "512".to_owned();
    let shorter = program.run(&shorter);
    assert!(shorter.stderr.contains("another --seq-len: 1024 there, 512 here"), "{shorter:?}");

    let resumed = program.ok(&command("calibrate", "part.safetensors", &["--resume", "--format", "json"])).json();
    assert!(resumed["resumed_sequences"].as_u64().expect("a count") > 0);
    let read = |name: &str| std::fs::read(scratch.join(name)).expect("read");
    assert!(read("whole.safetensors") == read("part.safetensors"));
    assert_eq!(names(scratch.path()), ["part.safetensors", "whole.safetensors"]);
}

#[test]
fn ctrl_c_stops_cleanly_and_says_how_to_resume() {
    for name in ["INT", "TERM"] {
        let scratch = Scratch::new();
        let program = wush(&scratch);
        let child = program.start(&command("convert", "bundle", &[]));
        wait_for("the first save", || scratch.join("bundle.wush-work/partial.safetensors").exists());
        signal(&child, name);
        let run = Outcome::of(child.wait_with_output().expect("waited for"));
        assert_eq!(run.code, Some(130), "{name}: {run:?}");
        assert!(
            run.stderr.contains("interrupted: kept ")
                && run.stderr.contains(" of 64 sequences")
                && run.stderr.contains("hint: ")
                && run.stderr.contains("--resume"),
            "{run:?}"
        );
        assert!(run.stdout.is_empty(), "{run:?}");
        assert_eq!(names(scratch.path()), ["bundle.wush-work"]);
    }
}

#[test]
fn the_second_ctrl_c_ends_at_once() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    // Sequences so long that the next safe point is some way off.
    let mut slow = args([&"calibrate", &model(), &"--calib", &text(), &"--out", &"stats.safetensors"]);
    slow.extend(["--sequences", "36", "--seq-len", "4096"].map(str::to_owned));
    let child = program.start(&slow);
    sleep(Duration::from_millis(600));
    signal(&child, "INT");
    sleep(Duration::from_millis(20));
    signal(&child, "INT");
    let run = Outcome::of(child.wait_with_output().expect("waited for"));
    assert_eq!(run.code, Some(130), "{run:?}");
    assert!(!scratch.join("stats.safetensors").exists());
}

#[test]
fn an_interrupted_demo_leaves_nothing() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    let child = program.start(&["demo", "--out", "tour"]);
    wait_for("calibration", || scratch.join(".tour.wush-partial").exists());
    sleep(Duration::from_millis(200));
    signal(&child, "INT");
    let run = Outcome::of(child.wait_with_output().expect("waited for"));
    assert_eq!(run.code, Some(130), "{run:?}");
    assert!(names(scratch.path()).is_empty(), "{:?}", names(scratch.path()));
    assert!(!run.stderr.contains("--resume"), "the tour has no such option: {run:?}");
}

#[test]
fn what_an_earlier_run_calibrated_is_used_by_a_longer_one() {
    let scratch = Scratch::new();
    let program = wush(&scratch);
    // Three tokens span no head: without damping there is nothing to solve, and the statistics are kept.
    let ids = scratch.write("ids.json", "[[1, 2, 3], [4, 5, 6], [7, 8, 9]]");
    let convert = |out: &str, more: &[&str]| {
        let mut all = args([&"convert", &tiny(), &"--calib", &ids, &"--out", &out]);
        all.extend(more.iter().map(|arg| (*arg).to_owned()));
        all
    };
    let failed = program.run(&convert("bundle", &["--sequences", "1", "--damping", "0"]));
    assert_eq!(failed.code, Some(2), "{failed:?}");
    assert!(
        failed.stderr.contains("solve: layer 0") && failed.stderr.contains("--resume --damping 0.01"),
        "{failed:?}"
    );
    let again = program.run(&convert("bundle", &["--sequences", "1"]));
    assert_eq!(again.code, Some(2), "{again:?}");
    assert!(again.stderr.contains("holds the work of an earlier run"), "{again:?}");

    let resumed = program.ok(&convert("bundle", &["--sequences", "3", "--resume"]));
    assert!(resumed.stderr.contains("1 of 3 sequences are done"), "{resumed:?}");
    program.ok(&convert("whole", &["--sequences", "3"]));
    assert!(contents(&scratch.join("whole")) == contents(&scratch.join("bundle")));
    assert_eq!(names(scratch.path()), ["bundle", "ids.json", "whole"]);
}

#[test]
fn there_may_be_nothing_to_resume() {
    let scratch = Scratch::new();
    let ids = scratch.write("ids.json", "[[1, 2, 3], [4, 5, 6], [7, 8, 9]]");
    for (stage, out) in [("calibrate", "stats.safetensors"), ("convert", "bundle")] {
        let command = args([&stage, &tiny(), &"--calib", &ids, &"--out", &out, &"--resume"]);
        // A directory from which the sums were removed is none.
        std::fs::create_dir(scratch.join("bundle.wush-work")).expect("made");
        let run = wush(&scratch).ok(&command);
        assert!(run.stderr.contains("resume     nothing is saved here"), "{run:?}");
        let again = wush(&scratch).run(&command);
        assert_eq!(again.code, Some(2), "{again:?}");
        assert!(again.stderr.contains(&format!("{out}: exists already: that run is finished")), "{again:?}");
        std::fs::remove_dir(scratch.join("bundle.wush-work")).ok();
    }
}
