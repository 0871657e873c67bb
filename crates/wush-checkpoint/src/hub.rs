//! Models and data sets of the Hugging Face hub.
//!
//! Enters: a local directory or a hub id `org/name[@revision]`. Leaves: paths of files on this machine, in the cache
//! layout that Python's `huggingface_hub` reads and writes, so that either side uses what the other fetched, offline
//! too. Only the files that wush needs are fetched. Nothing is interpreted here, and nothing is ever uploaded.
//!
//! hf-hub 1.0 is the maintained line of Hugging Face's own client, so it does the API calls: repository information,
//! paginated listings, retries, error details. Its downloads do not fit (they start over instead of resuming, store
//! the body of an error page or a cut transfer as the file, and cannot be interrupted), and the older hf-hub 0.5 resumes but appends
//! a whole body to a partial file when a server ignores `Range`. So the transfer of one file is our own
//! (`hub/transfer.rs`), over the same HTTP client.

mod cache;
mod client;
mod ids;
mod options;
mod problem;
mod transfer;

use std::path::{Path, PathBuf};

use globset::{GlobBuilder, GlobMatcher};
use wush_format::monitor::Monitor;

use crate::{CheckpointError, Result, files, refusals};
use cache::RepoCache;
use client::{Hub, RemoteFile};
use ids::RepoId;

pub use ids::HubKind;
pub use options::HubOptions;
pub use problem::HubProblem;

/// A model's directory on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvedModel {
    /// The directory that holds config.json and the weights.
    pub dir: PathBuf,
    /// The hub id `org/name`, or the name of a local directory (without the directories above it).
    pub id: String,
    /// The hub's commit, 40 hex digits; `None` for a local directory.
    pub revision: Option<String>,
}

/// Finds `arg` as an existing directory, else as a hub id `org/name[@revision]`, whose files are then in the cache.
///
/// When the hub cannot be reached and the cache holds the whole revision, that is used and `monitor` is told. An
/// interrupted download is resumed by the next call.
///
/// # Errors
/// `NotACheckpoint` for a link to nothing; `Hub` when `arg` is neither, when the repository, the revision or the weights
/// are not there, access is refused, the hub cannot be reached, a transfer breaks off again and again, or offline mode
/// finds too little in the cache;
/// `Format` when the cache cannot be written; `Interrupted`.
pub fn resolve_model(arg: &str, options: &HubOptions, monitor: &dyn Monitor) -> Result<ResolvedModel> {
    let local = Path::new(arg);
    if local.is_dir() {
        return Ok(ResolvedModel { dir: local.to_owned(), id: directory_name(local), revision: None });
    }
    if files::is_dangling(local) {
        return Err(refusals::not_a_directory(local));
    }
    let (id, revision) = RepoId::parse(HubKind::Model, arg)?;
    let cache = RepoCache::new(options, &id);
    let commit = match fetch_unless_offline(options, || fetch_model(&id, &revision, options, monitor)) {
        Ok(commit) => commit,
        Err(error) => {
            let commit = cached_instead(&cache, &id, &revision, error)?;
            if let Some(missing) = cache.missing_of_model(&commit) {
                return Err(id.error(HubProblem::NotCached { revision, missing: Some(missing) }));
            }
            note_cached(&id, &commit, options, monitor);
            commit
        }
    };
    Ok(ResolvedModel { dir: cache.snapshot_dir(&commit), id: id.to_string(), revision: Some(commit) })
}

fn directory_name(dir: &Path) -> String {
    let named = dir.file_name().map(|name| name.to_string_lossy().into_owned());
    let resolved = || dir.canonicalize().ok()?.file_name().map(|name| name.to_string_lossy().into_owned());
    named.or_else(resolved).unwrap_or_else(|| "model".to_owned())
}

fn fetch_model(id: &RepoId, revision: &str, options: &HubOptions, monitor: &dyn Monitor) -> Result<String> {
    let hub = Hub::connect(id, options)?;
    let commit = hub.commit_of(revision, monitor)?;
    let listing = hub.list(&commit, "", monitor)?;
    let files = ids::needed_model_files(&listing);
    if !files.iter().any(|file| ids::is_weights(&file.path)) {
        return Err(id.error(HubProblem::NoWeights { instead: ids::foreign_weights(&listing) }));
    }
    hub.download(&commit, &files, monitor)?;
    hub.cache().write_ref(revision, &commit)?;
    Ok(commit)
}

/// Runs `fetch`, unless offline mode is on: then the answer is that of a hub which is not there.
fn fetch_unless_offline<T>(
    options: &HubOptions,
    fetch: impl FnOnce() -> Result<T>,
) -> Result<T, Option<CheckpointError>> {
    if options.offline { Err(None) } else { fetch().map_err(Some) }
}

/// The cached commit of `revision`, in place of a hub that is switched off (`None`) or does not answer. Every other
/// error stands.
fn cached_instead(cache: &RepoCache, id: &RepoId, revision: &str, error: Option<CheckpointError>) -> Result<String> {
    let unreachable =
        |e: &CheckpointError| matches!(e, CheckpointError::Hub { problem: HubProblem::Unreachable { .. }, .. });
    match (cache.cached_commit(revision)?, error) {
        (Some(commit), None) => Ok(commit),
        (Some(commit), Some(error)) if unreachable(&error) => Ok(commit),
        (_, Some(error)) => Err(error),
        (None, None) => Err(id.error(HubProblem::NotCached { revision: revision.to_owned(), missing: None })),
    }
}

fn note_cached(id: &RepoId, commit: &str, options: &HubOptions, monitor: &dyn Monitor) {
    if !options.offline {
        monitor.note(&format!("the hub does not answer; using the cached {id} at commit {commit}"));
    }
}

/// Files of a data set that match a glob. They are downloaded one by one, as [`HubDataset::fetch`] asks for them.
#[derive(Debug)]
pub struct HubDataset {
    /// Paths inside the repository, sorted.
    pub files: Vec<String>,
    /// The hub id `org/name`.
    pub id: String,
    /// The commit, 40 hex digits.
    pub revision: String,
    /// `None` when only the cache is used.
    hub: Option<(Hub, Vec<RemoteFile>)>,
    cache: RepoCache,
}

impl HubDataset {
    /// The path of file `i` on this machine; downloaded, or resumed, unless it is cached.
    ///
    /// # Errors
    /// As [`resolve_model`].
    ///
    /// # Panics
    /// When `i` is not an index of [`HubDataset::files`].
    pub fn fetch(&self, i: usize, monitor: &dyn Monitor) -> Result<PathBuf> {
        if let Some((hub, remote)) = &self.hub {
            hub.download(&self.revision, &[&remote[i]], monitor)?;
        }
        Ok(self.cache.pointer(&self.revision, &self.files[i]))
    }
}

/// Finds the files of data set `id` (`org/name`) that match `glob` at `revision` (default `main`). `*` and `?` stay
/// inside a directory, `**` crosses them. Offline, only cached files are seen, and `monitor` is told how many.
///
/// # Errors
/// `Hub` as in [`resolve_model`], and when the glob is not valid or matches no file; `Format`; `Interrupted`.
pub fn resolve_dataset(
    id: &str,
    revision: Option<&str>,
    glob: &str,
    options: &HubOptions,
    monitor: &dyn Monitor,
) -> Result<HubDataset> {
    let (id, _) = RepoId::parse(HubKind::Dataset, id)?;
    let revision = revision.unwrap_or(ids::DEFAULT_REVISION);
    ids::check_revision(&id, revision)?;
    let matcher = compile(&id, glob)?;
    let found = match fetch_unless_offline(options, || list_dataset(&id, revision, glob, &matcher, options, monitor)) {
        Ok(found) => found,
        Err(error) => cached_dataset(&id, revision, &matcher, options, error, monitor)?,
    };
    if found.files.is_empty() {
        return Err(id.error(HubProblem::NoMatch { glob: glob.to_owned(), revision: found.revision }));
    }
    Ok(found)
}

fn compile(id: &RepoId, glob: &str) -> Result<GlobMatcher> {
    let glob = GlobBuilder::new(glob).literal_separator(true).build();
    let glob = glob.map_err(|e| id.error(HubProblem::BadGlob { detail: e.to_string() }))?;
    Ok(glob.compile_matcher())
}

fn list_dataset(
    id: &RepoId,
    revision: &str,
    glob: &str,
    matcher: &GlobMatcher,
    options: &HubOptions,
    monitor: &dyn Monitor,
) -> Result<HubDataset> {
    let hub = Hub::connect(id, options)?;
    let commit = hub.commit_of(revision, monitor)?;
    let mut remote = hub.list(&commit, ids::fixed_directory(glob), monitor)?;
    remote.retain(|file| matcher.is_match(&file.path));
    hub.cache().write_ref(revision, &commit)?;
    Ok(HubDataset {
        files: remote.iter().map(|file| file.path.clone()).collect(),
        id: id.to_string(),
        revision: commit,
        cache: RepoCache::new(options, id),
        hub: Some((hub, remote)),
    })
}

fn cached_dataset(
    id: &RepoId,
    revision: &str,
    matcher: &GlobMatcher,
    options: &HubOptions,
    error: Option<CheckpointError>,
    monitor: &dyn Monitor,
) -> Result<HubDataset> {
    let cache = RepoCache::new(options, id);
    let commit = cached_instead(&cache, id, revision, error)?;
    let mut files = cache.files(&commit)?;
    files.retain(|path| matcher.is_match(path));
    note_cached(id, &commit, options, monitor);
    monitor.note(&format!("{id}: {} cached files; others of the data set are not seen offline", files.len()));
    Ok(HubDataset { files, id: id.to_string(), revision: commit, hub: None, cache })
}
