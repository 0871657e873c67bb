//! Replays the fuzzing corpus: `ok-*` must be accepted, `bad-*` refused, and nothing may break a promise that
//! `fuzz/src/checks.rs` asserts.

use std::fs;
use std::path::Path;

#[path = "../../../fuzz/src/checks.rs"]
mod checks;

/// Replays one target's files.
fn replay(target: &str, check: fn(&[u8]) -> bool) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let mut seen = [0, 0];
    for entry in fs::read_dir(&dir).expect("the corpus is in the repository") {
        let path = entry.expect("lists").path();
        let name = path.file_name().expect("a file").to_string_lossy().into_owned();
        let accepted = check(&fs::read(&path).expect("reads"));
        if name.starts_with("ok-") {
            assert!(accepted, "{target}/{name} must be accepted");
            seen[0] += 1;
        } else if name.starts_with("bad-") {
            assert!(!accepted, "{target}/{name} must be refused");
            seen[1] += 1;
        }
    }
    assert!(seen[0] > 0 && seen[1] > 0, "{target}: seeds are missing");
}

#[test]
fn safetensors_header() {
    replay("safetensors_header", checks::safetensors_header);
}

#[test]
fn index() {
    replay("index", checks::index);
}

#[test]
fn sidecar() {
    replay("sidecar", checks::sidecar);
}

#[test]
fn manifest() {
    replay("manifest", checks::manifest);
}
