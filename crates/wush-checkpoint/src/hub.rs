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
mod problem;
mod transfer;

use std::fmt;
use std::path::{Path, PathBuf};

use globset::{GlobBuilder, GlobMatcher};
use wush_format::monitor::Monitor;

use crate::Result;
use cache::RepoCache;
use client::{Hub, RemoteFile};
use ids::{Kind, RepoId};
use problem::Problem;

/// Where the hub is and how it is used. [`HubOptions::default`] reads the environment as Python's client does.
#[derive(Clone)]
pub struct HubOptions {
    /// Base URL; `None` is `https://huggingface.co`. Default: `HF_ENDPOINT`.
    pub endpoint: Option<String>,
    /// Access token. Default: `HF_TOKEN`, else the file at `HF_TOKEN_PATH`, else `HF_HOME/token`.
    pub token: Option<String>,
    /// Cache directory; `None` is `~/.cache/huggingface/hub`. Default: `HF_HUB_CACHE`, else `HF_HOME/hub`.
    pub cache_dir: Option<PathBuf>,
    /// Use the cache only. Default: `HF_HUB_OFFLINE` (or `TRANSFORMERS_OFFLINE`) is 1, on, yes or true.
    pub offline: bool,
}

impl fmt::Debug for HubOptions {
    /// The token is a secret: only whether there is one is shown.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HubOptions")
            .field("endpoint", &self.endpoint)
            .field("token", &self.token.as_ref().map(|_| "…"))
            .field("cache_dir", &self.cache_dir)
            .field("offline", &self.offline)
            .finish()
    }
}

impl Default for HubOptions {
    fn default() -> Self {
        Self::from_variables(|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }
}

impl HubOptions {
    fn from_variables(get: impl Fn(&str) -> Option<String>) -> Self {
        let under_home = |name: &str| get("HOME").map(|home| Path::new(&home).join(name));
        let hf_home = get("HF_HOME")
            .map(PathBuf::from)
            .or_else(|| get("XDG_CACHE_HOME").map(|dir| Path::new(&dir).join("huggingface")))
            .or_else(|| under_home(".cache/huggingface"));
        let cache_dir = get("HF_HUB_CACHE")
            .or_else(|| get("HUGGINGFACE_HUB_CACHE"))
            .map(PathBuf::from)
            .or_else(|| hf_home.as_ref().map(|home| home.join("hub")));
        let token_file = get("HF_TOKEN_PATH").map(PathBuf::from).or_else(|| hf_home.map(|home| home.join("token")));
        let stored = || token_file.and_then(|path| std::fs::read_to_string(path).ok());
        let token = get("HF_TOKEN").or_else(stored).map(|token| token.trim().to_owned());
        let offline = get("HF_HUB_OFFLINE").or_else(|| get("TRANSFORMERS_OFFLINE"));
        Self {
            endpoint: get("HF_ENDPOINT"),
            token: token.filter(|token| !token.is_empty()),
            cache_dir,
            offline: offline.is_some_and(|value| is_true(&value)),
        }
    }
}

fn is_true(value: &str) -> bool {
    ["1", "on", "yes", "true"].iter().any(|word| value.eq_ignore_ascii_case(word))
}

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
/// When the hub cannot be reached and the cache holds the revision, the cached files are used and `monitor` is told.
/// An interrupted download is resumed by the next call.
///
/// # Errors
/// `Hub` when `arg` is neither, the repository, the revision or the weights are not there, access is refused, the hub
/// cannot be reached, a transfer breaks off again and again, or offline mode finds nothing cached; `Format` when the cache cannot be
/// written; `Interrupted`.
pub fn resolve_model(arg: &str, options: &HubOptions, monitor: &dyn Monitor) -> Result<ResolvedModel> {
    let local = Path::new(arg);
    if local.is_dir() {
        return Ok(ResolvedModel { dir: local.to_owned(), id: directory_name(local), revision: None });
    }
    let (id, revision) = ids::parse(arg, Kind::Model)?;
    let commit = if options.offline {
        cached_commit(&id, &revision, options, Problem::Offline)?
    } else {
        match fetch_model(&id, &revision, options, monitor) {
            Ok(commit) => commit,
            Err(error) => fall_back(&id, &revision, options, error, monitor)?,
        }
    };
    let dir = RepoCache::new(options, &id)?.snapshot_dir(&commit);
    Ok(ResolvedModel { dir, id: id.to_string(), revision: Some(commit) })
}

fn directory_name(dir: &Path) -> String {
    let whole = dir.canonicalize();
    let name = whole.as_deref().unwrap_or(dir).file_name();
    name.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

fn fetch_model(id: &RepoId, revision: &str, options: &HubOptions, monitor: &dyn Monitor) -> Result<String> {
    let hub = Hub::connect(id, options)?;
    let commit = hub.commit_of(revision, monitor)?;
    let listing = hub.list(&commit, "", monitor)?;
    let files = ids::needed_model_files(&listing);
    if !files.iter().any(|file| ids::is_weights(&file.path)) {
        return Err(Problem::NoWeights { instead: ids::foreign_weights(&listing) }.of(id));
    }
    hub.download_all(&commit, &files, monitor)?;
    hub.cache().write_ref(revision, &commit)?;
    Ok(commit)
}

/// The commit that the cache holds for `revision`, or `problem` with this repository's name.
fn cached_commit(id: &RepoId, revision: &str, options: &HubOptions, problem: Problem) -> Result<String> {
    RepoCache::new(options, id)?.cached_commit(revision)?.ok_or_else(|| problem.of(id))
}

/// Uses the cache in place of a hub that does not answer; every other error stands.
fn fall_back(
    id: &RepoId,
    revision: &str,
    options: &HubOptions,
    error: Failure,
    monitor: &dyn Monitor,
) -> Result<String> {
    if !problem::is_unreachable(&error) {
        return Err(error);
    }
    let cache = RepoCache::new(options, id)?;
    let Some(commit) = cache.cached_commit(revision)?.filter(|commit| cache.is_complete_model(commit)) else {
        return Err(error);
    };
    monitor.note(&format!("the hub does not answer; using the cached {id} at commit {commit}"));
    Ok(commit)
}
