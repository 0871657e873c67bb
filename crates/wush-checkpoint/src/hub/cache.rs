//! The cache directory, in the layout of Python's `huggingface_hub`:
//! `models--org--name/{refs/REVISION, snapshots/COMMIT/PATH → blobs/ETAG, blobs/ETAG}`, a partial transfer at
//! `blobs/ETAG.incomplete` and locks under `.locks`. Enters: names checked by `ids`. Leaves: paths. Talks to nobody.

use std::fs::{self, File, TryLockError};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use wush_format::monitor::Monitor;
use wush_format::{FormatError, atomic};

use super::HubOptions;
use super::ids::{self, RepoId};
use crate::{CheckpointError, Result};

/// How often a lock that another process holds is tried again.
const LOCK_POLL: Duration = Duration::from_millis(100);
/// Largest index that is read to see whether a cached model is whole. Real ones are below 1 MB.
const MAX_INDEX_BYTES: u64 = 64 << 20;

/// One repository's part of the cache.
#[derive(Debug, Clone)]
pub(super) struct RepoCache {
    root: PathBuf,
    folder: String,
}

impl RepoCache {
    pub(super) fn new(options: &HubOptions, id: &RepoId) -> Self {
        let root = options.cache_dir.clone().unwrap_or_else(|| PathBuf::from(".cache/huggingface/hub"));
        Self { root, folder: format!("{}--{}--{}", id.kind.plural(), id.owner, id.name) }
    }

    fn repo_dir(&self) -> PathBuf {
        self.root.join(&self.folder)
    }

    pub(super) fn snapshot_dir(&self, commit: &str) -> PathBuf {
        self.repo_dir().join("snapshots").join(commit)
    }

    pub(super) fn pointer(&self, commit: &str, path: &str) -> PathBuf {
        self.snapshot_dir(commit).join(path)
    }

    pub(super) fn blob(&self, etag: &str) -> PathBuf {
        self.repo_dir().join("blobs").join(etag)
    }

    pub(super) fn partial(&self, etag: &str) -> PathBuf {
        self.repo_dir().join("blobs").join(format!("{etag}.incomplete"))
    }

    /// The commit that `revision` stood for when it was last fetched, if its snapshot is there.
    pub(super) fn cached_commit(&self, revision: &str) -> Result<Option<String>> {
        let path = self.repo_dir().join("refs").join(revision);
        let commit = match fs::read_to_string(&path) {
            Ok(text) => text.trim().to_owned(),
            Err(_) if ids::is_commit(revision) => revision.to_owned(),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(FormatError::io(path, "read", e).into()),
        };
        Ok(Some(commit).filter(|commit| ids::is_commit(commit) && self.snapshot_dir(commit).is_dir()))
    }

    /// Remembers which commit `revision` stands for. A commit needs no entry.
    pub(super) fn write_ref(&self, revision: &str, commit: &str) -> Result<()> {
        if ids::is_commit(revision) {
            return Ok(());
        }
        let path = self.repo_dir().join("refs").join(revision);
        make_parent(&path)?;
        Ok(atomic::write_file(&path, commit.as_bytes())?)
    }

    /// Makes `snapshots/COMMIT/PATH` point to the blob; a pointer that leads nowhere is replaced.
    pub(super) fn link(&self, commit: &str, path: &str, etag: &str) -> Result<PathBuf> {
        let pointer = self.pointer(commit, path);
        if pointer.exists() {
            return Ok(pointer);
        }
        make_parent(&pointer)?;
        match fs::remove_file(&pointer) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(FormatError::io(pointer, "replace", e).into());
            }
            _ => {}
        }
        // From snapshots/COMMIT/PATH's directory up to the repository's folder.
        let up = "../".repeat(path.matches('/').count() + 2);
        let target = PathBuf::from(format!("{up}blobs/{etag}"));
        match make_link(&target, &self.blob(etag), &pointer) {
            // Another process was quicker.
            Err(_) if pointer.exists() => Ok(pointer),
            Err(e) => Err(FormatError::io(pointer, "link", e).into()),
            Ok(()) => Ok(pointer),
        }
    }

    /// Waits until no other process (Python's client included) fetches this blob.
    pub(super) fn lock(&self, etag: &str, monitor: &dyn Monitor) -> Result<File> {
        let path = self.root.join(".locks").join(&self.folder).join(format!("{etag}.lock"));
        make_parent(&path)?;
        let file = File::options().create(true).append(true).open(&path);
        let file = file.map_err(|e| FormatError::io(&path, "open", e))?;
        let mut told = false;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::Error(e)) => return Err(FormatError::io(path, "lock", e).into()),
                Err(TryLockError::WouldBlock) if monitor.interrupted() => return Err(CheckpointError::Interrupted),
                Err(TryLockError::WouldBlock) => {}
            }
            if !std::mem::replace(&mut told, true) {
                monitor.note("another process fetches the same file; waiting for it");
            }
            std::thread::sleep(LOCK_POLL);
        }
    }

    /// The cached files of a snapshot, sorted. Pointers that lead nowhere are left out.
    pub(super) fn files(&self, commit: &str) -> Result<Vec<String>> {
        let root = self.snapshot_dir(commit);
        let mut found = Vec::new();
        let mut pending = vec![(root, String::new())];
        while let Some((dir, prefix)) = pending.pop() {
            let entries = fs::read_dir(&dir).map_err(|e| FormatError::io(&dir, "list", e))?;
            for entry in entries {
                let entry = entry.map_err(|e| FormatError::io(&dir, "list", e))?;
                let path = format!("{prefix}{}", entry.file_name().to_string_lossy());
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    pending.push((entry.path(), format!("{path}/")));
                } else if entry.path().is_file() {
                    found.push(path);
                }
            }
        }
        found.sort_unstable();
        Ok(found)
    }

    /// The first file that a cached model lacks: its configuration, a shard of its index, or any weights.
    pub(super) fn missing_of_model(&self, commit: &str) -> Option<String> {
        let missing = |name: &str| !self.pointer(commit, name).is_file();
        if missing("config.json") {
            return Some("config.json".to_owned());
        }
        if let Some(shards) = self.indexed_shards(commit) {
            return shards.into_iter().find(|name| missing(name));
        }
        let any = self.files(commit).is_ok_and(|files| files.iter().any(|path| ids::is_weights(path)));
        (!any).then(|| "a *.safetensors file".to_owned())
    }

    /// The shards that the index names, sorted; `None` without a readable index.
    fn indexed_shards(&self, commit: &str) -> Option<Vec<String>> {
        #[derive(Deserialize)]
        struct Index {
            weight_map: std::collections::BTreeMap<String, String>,
        }
        let file = File::open(self.pointer(commit, "model.safetensors.index.json")).ok()?;
        let index: Index = serde_json::from_reader(std::io::BufReader::new(file.take(MAX_INDEX_BYTES))).ok()?;
        let mut shards: Vec<String> = index.weight_map.into_values().collect();
        shards.sort_unstable();
        shards.dedup();
        Some(shards)
    }
}

/// Creates the directory that `path` lies in.
pub(super) fn make_parent(path: &Path) -> Result<()> {
    let parent = path.parent().unwrap_or(Path::new("."));
    Ok(fs::create_dir_all(parent).map_err(|e| FormatError::io(parent, "create", e))?)
}

#[cfg(unix)]
fn make_link(target: &Path, _blob: &Path, pointer: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(target, pointer)
}

/// Where links need privileges, the snapshot holds a copy, as with Python's client.
#[cfg(not(unix))]
fn make_link(_target: &Path, blob: &Path, pointer: &Path) -> std::io::Result<()> {
    fs::copy(blob, pointer).map(|_| ())
}
