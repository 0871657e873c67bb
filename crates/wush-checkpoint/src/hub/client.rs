//! One repository on the hub: what a revision stands for, what files it has, and their download in order. Enters: a
//! checked id. Leaves: facts about the repository, and files in the cache. Every wait can be interrupted.

use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use hf_hub::repository::RepoTreeEntry;
use hf_hub::{HFClient, HFRepository, HFResult, RepoType};
use tokio::runtime::Runtime;
use wush_format::monitor::Monitor;

use super::HubOptions;
use super::cache::RepoCache;
use super::ids::{self, HubKind, RepoId};
use super::problem::{self, HubProblem};
use crate::{CheckpointError, Result};

/// How long a wait may last before the monitor is asked again whether to go on.
const TICK: Duration = Duration::from_millis(100);
/// How long the hub may say nothing: longer than its load balancer's own time limit.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// Attempts after the first, for an API call.
const RETRIES: usize = 3;
/// Most files that a listing may have: twenty times the largest data sets' shards in use; bounds memory.
const MAX_FILES: usize = 1_000_000;
/// The public hub.
const DEFAULT_ENDPOINT: &str = "https://huggingface.co";

/// A file of the repository, as listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RemoteFile {
    /// Path inside the repository; checked to be safe.
    pub(super) path: String,
    /// Length in bytes.
    pub(super) size: u64,
}

/// A connection to one repository.
pub(super) struct Hub {
    pub(super) id: RepoId,
    pub(super) http: reqwest::Client,
    pub(super) endpoint: String,
    pub(super) token: Option<String>,
    client: HFClient,
    runtime: Runtime,
    cache: RepoCache,
}

impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hub").field("id", &self.id).field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}

impl Hub {
    /// Prepares clients; nothing is sent yet.
    pub(super) fn connect(id: &RepoId, options: &HubOptions) -> Result<Self> {
        let endpoint = options.endpoint.as_deref().unwrap_or(DEFAULT_ENDPOINT).trim_end_matches('/').to_owned();
        let unusable = |detail: String| id.error(HubProblem::Unreachable { endpoint: endpoint.clone(), detail });
        let mut builder = HFClient::builder().endpoint(&endpoint).retry_max_attempts(RETRIES).cache_enabled(false);
        if let Some(token) = &options.token {
            builder = builder.token(token);
        }
        let client = builder.build().map_err(|e| unusable(e.to_string()))?;
        // Redirects are followed by hand: the hub's own answer, not the storage server's, names commit and ETag.
        let http = reqwest::Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(PATIENCE)
            .user_agent(concat!("wush/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|e| unusable(problem::chain(&e)))?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|e| unusable(e.to_string()))?;
        let cache = RepoCache::new(options, id);
        Ok(Self { id: id.clone(), http, token: options.token.clone(), client, runtime, cache, endpoint })
    }

    pub(super) fn cache(&self) -> &RepoCache {
        &self.cache
    }

    /// The commit that `revision` stands for.
    pub(super) fn commit_of(&self, revision: &str, monitor: &dyn Monitor) -> Result<String> {
        let (owner, name) = (self.id.owner.as_str(), self.id.name.as_str());
        let sha = self.wait(monitor, async {
            match self.id.kind {
                HubKind::Model => {
                    let info = self.client.model(owner, name).info().revision(revision).send().await?;
                    HFResult::Ok(info.sha)
                }
                HubKind::Dataset => {
                    let info = self.client.dataset(owner, name).info().revision(revision).send().await?;
                    HFResult::Ok(info.sha)
                }
            }
        })?;
        let what = format!("{} of this name with revision {revision}", self.id.kind);
        let sha = sha.map_err(|e| problem::translate(&self.id, &self.endpoint, &what, e))?;
        sha.filter(|sha| ids::is_commit(sha))
            .ok_or_else(|| self.bad_answer("no commit in the repository's information"))
    }

    /// The files below `directory` ("" for all), sorted by path.
    pub(super) fn list(&self, commit: &str, directory: &str, monitor: &dyn Monitor) -> Result<Vec<RemoteFile>> {
        let (owner, name) = (self.id.owner.as_str(), self.id.name.as_str());
        let entries = self.wait(monitor, async {
            match self.id.kind {
                HubKind::Model => entries(self.client.model(owner, name), commit, directory).await,
                HubKind::Dataset => entries(self.client.dataset(owner, name), commit, directory).await,
            }
        })?;
        let what = format!("directory {directory}");
        let entries = entries.map_err(|e| problem::translate(&self.id, &self.endpoint, &what, e))?;
        if entries.len() > MAX_FILES {
            return Err(self.bad_answer(&format!("more than {MAX_FILES} files")));
        }
        let mut files = Vec::with_capacity(entries.len());
        for entry in entries {
            if let RepoTreeEntry::File { path, size, .. } = entry {
                if !ids::is_safe_path(&path) {
                    return Err(self.bad_answer(&format!("a file's path leads out of the repository: {path:?}")));
                }
                files.push(RemoteFile { path, size });
            }
        }
        files.sort_unstable_by(|a, b| a.path.cmp(&b.path));
        Ok(files)
    }

    /// Brings `files` into the cache, in order, one after the other; progress in bytes over all of them.
    pub(super) fn download(&self, commit: &str, files: &[&RemoteFile], monitor: &dyn Monitor) -> Result<()> {
        let missing = |file: &&&RemoteFile| !self.cache.pointer(commit, &file.path).is_file();
        let wanted: Vec<&RemoteFile> = files.iter().filter(missing).copied().collect();
        if wanted.is_empty() {
            return Ok(());
        }
        let n_bytes = wanted.iter().fold(0_u64, |sum, file| sum.saturating_add(file.size));
        monitor.begin(&format!("download {}", self.id), "bytes", n_bytes);
        let result = wanted.iter().try_for_each(|file| self.fetch_file(commit, file, monitor));
        monitor.end();
        result
    }

    pub(super) fn bad_answer(&self, detail: &str) -> CheckpointError {
        self.id.error(HubProblem::BadAnswer { detail: detail.to_owned() })
    }

    /// Runs `future` until it is done, the user wants to stop, or nothing came for [`PATIENCE`].
    pub(super) fn wait<T>(&self, monitor: &dyn Monitor, future: impl Future<Output = T>) -> Result<T> {
        self.runtime.block_on(async {
            let mut future = pin!(future);
            let mut waited = Duration::ZERO;
            loop {
                if let Ok(value) = tokio::time::timeout(TICK, future.as_mut()).await {
                    return Ok(value);
                }
                waited += TICK;
                if monitor.interrupted() {
                    return Err(CheckpointError::Interrupted);
                }
                if waited >= PATIENCE {
                    let detail = format!("no answer within {} seconds", PATIENCE.as_secs());
                    return Err(self.id.error(HubProblem::Unreachable { endpoint: self.endpoint.clone(), detail }));
                }
            }
        })
    }
}

async fn entries<T: RepoType>(
    repository: HFRepository<T>,
    commit: &str,
    directory: &str,
) -> HFResult<Vec<RepoTreeEntry>> {
    let directory = Some(directory).filter(|directory| !directory.is_empty());
    let stream = repository.list_tree().revision(commit).maybe_path_in_repo(directory).recursive(true).send()?;
    stream.take(MAX_FILES + 1).try_collect().await
}
