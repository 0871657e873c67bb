//! The files of a checkpoint's directory, and the one rule on links: a file must lie in the directory itself, or be a
//! blob of the same repository in the hub's cache.

use std::fs;
use std::path::{Path, PathBuf};

use wush_format::FormatError;
use wush_format::json::shown;
use wush_format::manifest::is_inside;

use crate::{CheckpointError, Result};

/// Most files a checkpoint's directory may hold, and most levels of folders.
const MAX_FILES: usize = 100_000;
const MAX_DEPTH: usize = 16;
/// Top-level folders that are not the model's: wush's own, version control, download caches.
const SKIPPED: [&str; 3] = [wush_format::bundle::WUSH_DIR, ".git", ".cache"];

/// Names of all entries of `dir` that are not folders, sorted.
pub(crate) fn top_level(dir: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in entries(dir)? {
        if !entry.path.is_dir() {
            names.push(entry.name);
        }
    }
    Ok(names)
}

/// Relative paths of all files below `dir`, sorted, forward slashes; [`SKIPPED`] folders are left out.
///
/// # Errors
/// `Escapes` for a link that leads out, `Unsupported` for a linked folder, a link to nothing, what is neither file nor
/// folder, or a name that no manifest may list, `NotACheckpoint` beyond [`MAX_FILES`] or [`MAX_DEPTH`], `Format` when
/// something cannot be read.
pub(crate) fn all_files(dir: &Path) -> Result<Vec<String>> {
    let home = Home::new(dir)?;
    let mut found = Vec::new();
    walk(&home, dir, "", 0, &mut found)?;
    found.sort();
    Ok(found)
}

fn walk(home: &Home, dir: &Path, prefix: &str, depth: usize, found: &mut Vec<String>) -> Result<()> {
    for entry in entries(dir)? {
        let relative = format!("{prefix}{}", entry.name);
        if depth == 0 && SKIPPED.contains(&entry.name.as_str()) {
            continue;
        }
        if entry.is_dir {
            if depth == MAX_DEPTH {
                return Err(too_large(&home.dir, format!("folders nested deeper than {MAX_DEPTH}")));
            }
            walk(home, &entry.path, &format!("{relative}/"), depth + 1, found)?;
            continue;
        }
        if found.len() == MAX_FILES {
            return Err(too_large(&home.dir, format!("more than {MAX_FILES} files")));
        }
        if !is_inside(&relative) {
            let detail = "a backslash or a control character is in its name, so the manifest cannot list it";
            return Err(bad_name(&home.dir, shown(&relative), detail));
        }
        home.check_file(&relative)?;
        found.push(relative);
    }
    Ok(())
}

fn bad_name(dir: &Path, name: String, detail: &str) -> CheckpointError {
    CheckpointError::Unsupported {
        path: dir.to_owned(),
        what: format!("file {name}"),
        detail: detail.to_owned(),
        hint: "rename or remove it",
    }
}

fn too_large(dir: &Path, detail: String) -> CheckpointError {
    let hint = "pass the directory that holds config.json and the .safetensors files, and nothing above it";
    CheckpointError::NotACheckpoint { dir: dir.to_owned(), detail, hint }
}

struct Entry {
    name: String,
    path: PathBuf,
    /// A folder itself, not a link to one.
    is_dir: bool,
}

/// The entries of one folder, sorted by name.
fn entries(dir: &Path) -> Result<Vec<Entry>> {
    let io = |e| FormatError::io(dir, "list", e);
    let mut list = Vec::new();
    for entry in fs::read_dir(dir).map_err(io)? {
        let entry = entry.map_err(io)?;
        if list.len() == MAX_FILES {
            return Err(too_large(dir, format!("more than {MAX_FILES} files")));
        }
        let name = entry.file_name().into_string().map_err(|name| {
            bad_name(dir, format!("{name:?}"), "its name is not UTF-8, so the manifest cannot list it")
        })?;
        let is_dir = entry.file_type().map_err(io)?.is_dir();
        list.push(Entry { name, path: entry.path(), is_dir });
    }
    list.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(list)
}

/// A checkpoint's directory, resolved once, with the blob folder of its repository when it is a snapshot of the cache.
pub(crate) struct Home {
    dir: PathBuf,
    real_dir: PathBuf,
    blobs: Option<PathBuf>,
}

impl Home {
    pub(crate) fn new(dir: &Path) -> Result<Self> {
        let real_dir = fs::canonicalize(dir).map_err(|e| FormatError::io(dir, "open", e))?;
        Ok(Self { dir: dir.to_owned(), blobs: blob_folder(&real_dir), real_dir })
    }

    /// A regular file that can be opened, reached without leaving the directory (or into the blobs).
    pub(crate) fn check_file(&self, relative: &str) -> Result<()> {
        let path = self.dir.join(relative);
        let unsupported = |detail: &str, hint| CheckpointError::Unsupported {
            path: self.dir.clone(),
            what: relative.to_owned(),
            detail: detail.to_owned(),
            hint,
        };
        if is_dangling(&path) {
            return Err(unsupported("it is a link to nothing", "download the file again, or remove the link"));
        }
        let real = fs::canonicalize(&path).map_err(|e| FormatError::io(&path, "open", e))?;
        let inside = real.starts_with(&self.real_dir);
        if !inside && !self.blobs.as_ref().is_some_and(|blobs| real.starts_with(blobs)) {
            return Err(CheckpointError::Escapes { path: self.dir.clone(), entry: relative.to_owned() });
        }
        if !real.is_file() {
            let detail = "expected a regular file, found a linked folder or a special file";
            return Err(unsupported(detail, "replace it by what it stands for, or remove it"));
        }
        fs::File::open(&path).map_err(|e| FormatError::io(&path, "open", e))?;
        Ok(())
    }
}

/// Whether there is a link at `path`, and nothing where it leads.
pub(crate) fn is_dangling(path: &Path) -> bool {
    path.is_symlink() && !path.exists()
}

/// `REPO/blobs` for `REPO/snapshots/REVISION`.
fn blob_folder(real_dir: &Path) -> Option<PathBuf> {
    let snapshots = real_dir.parent()?;
    (snapshots.file_name()? == "snapshots").then(|| snapshots.with_file_name("blobs"))
}
