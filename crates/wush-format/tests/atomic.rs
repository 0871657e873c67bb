//! Output is whole or absent: what stands on disk after success, failure, a kill and a second run.

use std::fs;
use std::io::Write as _;
use std::path::Path;

use wush_format::FormatError;
use wush_format::atomic::{AtomicFile, StagedDir, write_file};

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir)
        .expect("lists")
        .map(|entry| entry.expect("lists").file_name().into_string().expect("UTF-8"))
        .collect();
    names.sort();
    names
}

#[test]
fn a_file_replaces_the_old_one_only_when_whole() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("x");
    write_file(&path, b"old").expect("writes");
    let mut unfinished = AtomicFile::create(&path).expect("creates");
    unfinished.write_all(b"ne").expect("writes");
    assert_eq!(fs::read(&path).expect("reads"), b"old");
    drop(unfinished);
    assert_eq!(names(dir.path()), ["x"]);
    write_file(&path, b"new").expect("writes");
    assert_eq!(fs::read(&path).expect("reads"), b"new");
    assert_eq!(names(dir.path()), ["x"]);
}

#[test]
fn a_leftover_file_of_a_killed_run_is_overwritten() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    fs::write(dir.path().join(".x.wush-partial"), b"a longer leftover").expect("writes");
    write_file(&dir.path().join("x"), b"new").expect("writes");
    assert_eq!(fs::read(dir.path().join("x")).expect("reads"), b"new");
    assert_eq!(names(dir.path()), ["x"]);
}

#[test]
fn two_runs_do_not_write_the_same_file_or_directory() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("x");
    let first = AtomicFile::create(&path).expect("creates");
    let error = AtomicFile::create(&path).expect_err("the first is at work");
    assert!(matches!(error, FormatError::Busy { .. }), "{error}");
    first.commit().expect("commits");
    AtomicFile::create(&path).expect("the first is done").commit().expect("commits");

    let path = dir.path().join("d");
    let first = StagedDir::create(&path).expect("creates");
    fs::write(first.path().join("f"), b"1").expect("writes");
    let error = StagedDir::create(&path).expect_err("the first is at work");
    assert!(matches!(error, FormatError::Busy { .. }), "{error}");
    assert!(error.hint().is_some());
    first.commit().expect("the refused run left it alone");
    assert_eq!(names(&path), ["f"]);
}

#[test]
fn many_threads_writing_one_file_leave_one_whole_file() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("x");
    std::thread::scope(|scope| {
        for byte in b'a'..b'e' {
            let path = &path;
            scope.spawn(move || {
                for _ in 0..50 {
                    match write_file(path, &[byte; 1000]) {
                        Ok(()) | Err(FormatError::Busy { .. }) => {}
                        Err(e) => panic!("{e}"),
                    }
                }
            });
        }
    });
    let bytes = fs::read(&path).expect("reads");
    assert!(bytes.len() == 1000 && bytes.iter().all(|byte| *byte == bytes[0]), "torn: {} bytes", bytes.len());
    assert_eq!(names(dir.path()), ["x"]);
}

/// Also between making a directory and locking it, when another run may take it for a leftover.
#[test]
fn of_many_threads_that_take_one_name_each_has_it_or_learns_who_has() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("x");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..500 {
                    match StagedDir::create(&path) {
                        Ok(staged) => assert!(staged.path().is_dir()),
                        Err(FormatError::Busy { .. }) => {}
                        Err(e) => panic!("{e}"),
                    }
                }
            });
        }
    });
    assert_eq!(names(dir.path()), [""; 0]);
}

#[test]
fn a_staged_directory_appears_at_once_or_never() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let target = dir.path().join("out");
    let staged = StagedDir::create(&target).expect("creates");
    fs::create_dir(staged.path().join("sub")).expect("makes");
    fs::write(staged.path().join("sub/f"), b"1").expect("writes");
    assert!(!target.exists());
    drop(staged);
    assert_eq!(names(dir.path()), [""; 0]);

    let staged = StagedDir::create(&target).expect("creates");
    fs::write(staged.path().join("f"), b"1").expect("writes");
    assert_eq!(staged.commit().expect("commits"), target);
    assert_eq!(names(dir.path()), ["out"]);
    assert_eq!(names(&target), ["f"]);
}

#[test]
fn an_existing_output_is_never_replaced() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let target = dir.path().join("out");
    fs::create_dir(&target).expect("makes");
    assert!(matches!(StagedDir::create(&target), Err(FormatError::Exists { .. })));
    fs::remove_dir(&target).expect("removes");
    // It appears while the run is at work, even empty.
    let staged = StagedDir::create(&target).expect("creates");
    fs::create_dir(&target).expect("makes");
    let error = staged.commit().expect_err("it is there");
    assert!(matches!(&error, FormatError::Exists { path } if *path == target), "{error}");
    assert_eq!(names(dir.path()), ["out"]);
}

#[test]
fn a_leftover_directory_of_a_killed_run_is_removed() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let leftover = dir.path().join(".out.wush-partial");
    fs::create_dir_all(leftover.join("sub")).expect("makes");
    fs::write(leftover.join("sub/old"), b"1").expect("writes");
    let staged = StagedDir::create(&dir.path().join("out")).expect("creates");
    assert_eq!(names(staged.path()), [""; 0]);
}

#[cfg(unix)]
#[test]
fn a_link_in_the_temporary_place_is_not_followed() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let precious = dir.path().join("precious");
    fs::create_dir(&precious).expect("makes");
    fs::write(precious.join("f"), b"1").expect("writes");
    for name in [".out.wush-partial", ".x.wush-partial"] {
        std::os::unix::fs::symlink(&precious, dir.path().join(name)).expect("links");
    }
    assert!(matches!(StagedDir::create(&dir.path().join("out")), Err(FormatError::Exists { .. })));
    assert!(matches!(AtomicFile::create(&dir.path().join("x")), Err(FormatError::Exists { .. })));
    assert_eq!(names(&precious), ["f"]);
}

#[test]
fn a_bad_place_is_named() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let error = write_file(&dir.path().join("none/x"), b"").expect_err("no such directory");
    assert!(error.to_string().contains("none: cannot write into: "), "{error}");
    assert!(error.hint().is_some());
    assert!(write_file(Path::new("/"), b"").is_err());
    assert!(StagedDir::create(&dir.path().join("..")).is_err());
    // A directory in the file's place.
    fs::create_dir(dir.path().join("x")).expect("makes");
    assert!(matches!(write_file(&dir.path().join("x"), b""), Err(FormatError::Io { .. })));
    assert_eq!(names(dir.path()), ["x"]);
}

/// The device that is always full answers as a full disk does.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_one_clear_message() {
    let mut full = fs::File::options().write(true).open("/dev/full").expect("Linux has it");
    let source = full.write_all(b"x").expect_err("it is full");
    let error = FormatError::io("out/model.safetensors", "write", source);
    assert_eq!(error.to_string(), "out/model.safetensors: cannot write: No space left on device (os error 28)");
    assert!(error.hint().expect("a remedy").contains("free some space"));
}
