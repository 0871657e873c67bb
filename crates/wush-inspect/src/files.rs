//! The files of a bundle against its manifest: each there, as long as stated, with the stated digest; and none besides. In `wush/`
//! only what wush writes, and no links.

use std::collections::BTreeSet;
use std::path::Path;

use rayon::prelude::*;
use wush_format::bundle::{CARD, KEY_TRANSFORMS, MANIFEST, VALUE_FEEDBACK, VALUE_TRANSFORMS, WUSH_DIR};
use wush_format::hash::hash_file;
use wush_format::manifest::FileEntry;
use wush_format::monitor::Monitor;
use wush_format::text::human_bytes;

use crate::number::{count, digest};
use crate::{InspectError, Result};

/// Most problems that one check spells out.
pub(crate) const MAX_SHOWN: usize = 5;
/// Most entries of a bundle's directory, and most levels of folders, that are listed.
const MAX_FILES: usize = 100_000;
const MAX_DEPTH: usize = 16;
/// Everything that `wush/` holds, but for what is there with feedback alone.
const WUSH_FILES: [&str; 4] = [CARD, KEY_TRANSFORMS, MANIFEST, VALUE_TRANSFORMS];
/// Top-level folders that are not part of what is served: version control, a download cache.
const BESIDE: [&str; 2] = [".cache", ".git"];

/// Digests of all listed files, computed in parallel; a message for every one that is not as the manifest says.
pub(crate) fn check_listed(dir: &Path, files: &[FileEntry], monitor: &dyn Monitor) -> Result<Result<String, String>> {
    monitor.begin("inspect", "bytes", files.iter().map(|file| file.n_bytes).sum());
    let problems: Result<Vec<Option<String>>> = files
        .par_iter()
        .map(|file| {
            if monitor.interrupted() {
                return Err(InspectError::Interrupted);
            }
            let problem = problem_of(dir, file);
            monitor.advance(file.n_bytes);
            Ok(problem)
        })
        .collect();
    monitor.end();
    let problems: Vec<String> = problems?.into_iter().flatten().collect();
    let total = files.iter().map(|file| file.n_bytes).sum();
    Ok(if problems.is_empty() {
        Ok(format!("{}, {}, all with the stated length and SHA-256", count(files.len(), "file"), human_bytes(total)))
    } else {
        Err(list(&problems))
    })
}

fn problem_of(dir: &Path, file: &FileEntry) -> Option<String> {
    let path = dir.join(&file.path);
    if leads_out(dir, &path) {
        return Some(format!("{}: a link that leads out of the bundle", file.path));
    }
    let metadata = match std::fs::metadata(&path) {
        Ok(metadata) if metadata.is_file() => metadata,
        Ok(_) => return Some(format!("{}: not a file", file.path)),
        Err(error) => return Some(format!("{}: {error}", file.path)),
    };
    if metadata.len() != file.n_bytes {
        return Some(format!("{}: expected {} bytes, found {}", file.path, file.n_bytes, metadata.len()));
    }
    match hash_file(&path) {
        Ok((sha256, _)) if sha256 == file.sha256 => None,
        Ok((sha256, _)) => {
            Some(format!("{}: expected SHA-256 {}, found {}", file.path, digest(&file.sha256), digest(&sha256)))
        }
        Err(error) => Some(error.to_string()),
    }
}

/// Whether `path` is another file than one below `dir`, or than a blob of the snapshot that `dir` is.
fn leads_out(dir: &Path, path: &Path) -> bool {
    let (Ok(root), Ok(target)) = (dir.canonicalize(), path.canonicalize()) else { return false };
    !target.starts_with(root) && !is_blob(dir, path)
}

/// Whether every file below `dir` is in the manifest.
pub(crate) fn check_unlisted(dir: &Path, files: &[FileEntry]) -> Result<String, String> {
    let mut found = Vec::new();
    walk(dir, "", 0, &mut found)?;
    let manifest = format!("{WUSH_DIR}/{MANIFEST}");
    let known: BTreeSet<&str> = files.iter().map(|file| file.path.as_str()).chain([manifest.as_str()]).collect();
    found.sort();
    let extra: Vec<String> = found.into_iter().filter(|path| !known.contains(path.as_str())).collect();
    if extra.is_empty() { Ok("none".to_owned()) } else { Err(list(&extra)) }
}

/// The folders that are not part of the bundle, and were not looked at.
pub(crate) fn beside(dir: &Path) -> Vec<&'static str> {
    BESIDE.into_iter().filter(|name| dir.join(name).symlink_metadata().is_ok()).collect()
}

/// Whether `wush/` holds the files that wush writes and nothing else, listed in the manifest or not: what lies there is read as
/// wush's. A link could lead anywhere tomorrow; only those of a snapshot in the hub's cache, to blobs of the same repository, are
/// what its downloads look like.
///
/// `with_feedback`: whether the values' feedback is to be there; either way where nobody knows.
pub(crate) fn check_wush_folder(dir: &Path, with_feedback: Option<bool>) -> Result<String, String> {
    let feedback = (with_feedback == Some(true)).then_some(VALUE_FEEDBACK);
    let expected: BTreeSet<&str> = WUSH_FILES.into_iter().chain(feedback).collect();
    let may_be = |name: &str| expected.contains(name) || (with_feedback.is_none() && name == VALUE_FEEDBACK);
    let wush = dir.join(WUSH_DIR);
    let unreadable = |error: std::io::Error| format!("{}: {error}", wush.display());
    let mut problems = Vec::new();
    let mut found = BTreeSet::new();
    if wush.symlink_metadata().map_err(unreadable)?.is_symlink() {
        problems.push(format!("{WUSH_DIR} is a link"));
    }
    for entry in std::fs::read_dir(&wush).map_err(unreadable)?.take(MAX_FILES) {
        let entry = entry.map_err(unreadable)?;
        let (name, kind) = (entry.file_name().to_string_lossy().into_owned(), entry.file_type().map_err(unreadable)?);
        if !may_be(&name) {
            problems.push(format!("{WUSH_DIR}/{name} is nothing that wush writes"));
        } else if kind.is_symlink() && !is_blob(dir, &entry.path()) {
            problems.push(format!("{WUSH_DIR}/{name} is a link"));
        } else if kind.is_dir() {
            problems.push(format!("{WUSH_DIR}/{name} is a folder"));
        }
        found.insert(name);
    }
    problems.sort();
    problems.extend(expected.iter().filter(|name| !found.contains(**name)).map(|name| format!("{name} is missing")));
    if problems.is_empty() { Ok(count(found.len(), "file")) } else { Err(list(&problems)) }
}

/// Whether `path` leads to `REPO/blobs` and `dir` is `REPO/snapshots/REVISION`.
fn is_blob(dir: &Path, path: &Path) -> bool {
    let (Ok(dir), Ok(target)) = (dir.canonicalize(), path.canonicalize()) else { return false };
    let snapshots = dir.parent().filter(|parent| parent.file_name().is_some_and(|name| name == "snapshots"));
    snapshots.is_some_and(|snapshots| target.parent() == Some(&snapshots.with_file_name("blobs")))
}

fn walk(dir: &Path, prefix: &str, depth: usize, found: &mut Vec<String>) -> Result<(), String> {
    let unreadable = |error: std::io::Error| format!("{}: {error}", dir.display());
    for entry in std::fs::read_dir(dir).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let name = entry.file_name();
        // A name that is not Unicode cannot be in the manifest.
        let path = format!("{prefix}{}", name.to_string_lossy());
        if depth == 0 && BESIDE.iter().any(|beside| name == *beside) {
            continue;
        }
        if found.len() == MAX_FILES || depth == MAX_DEPTH {
            return Err(format!("more than {MAX_FILES} files or {MAX_DEPTH} levels of folders"));
        }
        if entry.file_type().map_err(unreadable)?.is_dir() {
            walk(&entry.path(), &format!("{path}/"), depth + 1, found)?;
        } else {
            found.push(path);
        }
    }
    Ok(())
}

/// The first few problems, and how many there are.
pub(crate) fn list(problems: &[String]) -> String {
    let shown = problems.iter().take(MAX_SHOWN).map(String::as_str).collect::<Vec<_>>().join("; ");
    match problems.len() {
        n if n > MAX_SHOWN => format!("{shown}; and {} more", n - MAX_SHOWN),
        _ => shown,
    }
}
