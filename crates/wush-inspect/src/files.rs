//! The files of a bundle against its manifest: each there, as long as stated, with the stated digest; and none besides.

use std::collections::BTreeSet;
use std::path::Path;

use rayon::prelude::*;
use wush_format::bundle::{MANIFEST, WUSH_DIR};
use wush_format::hash::hash_file;
use wush_format::manifest::FileEntry;
use wush_format::monitor::Monitor;

use crate::number::{bytes, count, digest};
use crate::{InspectError, Result};

/// Most problems that one check spells out.
pub(crate) const MAX_SHOWN: usize = 5;
/// Most entries of a bundle's directory, and most levels of folders, that are listed.
const MAX_FILES: usize = 100_000;
const MAX_DEPTH: usize = 16;

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
        Ok(format!("{}, {}, all with the stated length and SHA-256", count(files.len(), "file"), bytes(total)))
    } else {
        Err(list(&problems))
    })
}

fn problem_of(dir: &Path, file: &FileEntry) -> Option<String> {
    let path = dir.join(&file.path);
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

fn walk(dir: &Path, prefix: &str, depth: usize, found: &mut Vec<String>) -> Result<(), String> {
    let unreadable = |error: std::io::Error| format!("{}: {error}", dir.display());
    for entry in std::fs::read_dir(dir).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let name = entry.file_name();
        // A name that is not Unicode cannot be in the manifest.
        let path = format!("{prefix}{}", name.to_string_lossy());
        // A version control folder or a download cache beside the files is not part of what is served.
        if depth == 0 && (name == ".git" || name == ".cache") {
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
