//! The transfer of one file into the cache: what the hub announces (`HEAD`), then its bytes, from where an earlier
//! transfer stopped (`Range`), into `blobs/ETAG.incomplete`, checked and renamed when whole. Length is checked always,
//! SHA-256 where the ETag is one (files in large-file storage, hence all weights).

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use reqwest::header::{ACCEPT_ENCODING, CONTENT_RANGE, ETAG, HeaderMap, LOCATION, RANGE};
use reqwest::{Method, Response, StatusCode, Url};
use sha2::{Digest, Sha256};
use wush_format::FormatError;
use wush_format::hash::Sha;
use wush_format::monitor::Monitor;

use super::cache::make_parent;
use super::client::{Hub, RemoteFile};
use super::ids::{self, HubKind};
use super::problem::{self, HubProblem};
use crate::{CheckpointError, Result};

/// Attempts in a row that may fail without one new byte.
const MAX_FRUITLESS: u32 = 5;
/// Pause after the first fruitless attempt; doubled after each further one: 6 seconds in all.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// Redirects that are followed.
const MAX_REDIRECTS: usize = 8;
/// Bytes per read when a partial file is hashed before it is continued.
const BLOCK: usize = 1 << 20;

/// How an attempt ended that did not end well.
enum Setback {
    /// Worth another attempt.
    Transient(String),
    /// Not worth one.
    Final(CheckpointError),
}

impl From<CheckpointError> for Setback {
    fn from(error: CheckpointError) -> Self {
        match error {
            CheckpointError::Hub { problem: HubProblem::Unreachable { detail, .. }, .. } => Self::Transient(detail),
            error => Self::Final(error),
        }
    }
}

/// The partial file, its running digest, and how much of it the monitor was told about.
struct Partial {
    path: PathBuf,
    file: File,
    n_bytes: u64,
    hasher: Option<Sha256>,
    n_reported: u64,
}

impl Hub {
    /// Brings one file into the cache: from a blob that is there already, or over the network.
    pub(super) fn fetch_file(&self, commit: &str, file: &RemoteFile, monitor: &dyn Monitor) -> Result<()> {
        let etag = self.persist(file, monitor, |_| self.announced(commit, file, monitor))?;
        let _lock = self.cache().lock(&etag, monitor)?;
        if self.cache().blob(&etag).is_file() {
            monitor.advance(file.size);
        } else {
            self.fetch_blob(commit, file, &etag, monitor)?;
        }
        self.cache().link(commit, &file.path, &etag)?;
        Ok(())
    }

    /// The file's ETag, which names its blob.
    fn announced(&self, commit: &str, file: &RemoteFile, monitor: &dyn Monitor) -> Result<String, Setback> {
        let answer = self.send(Method::HEAD, commit, file, 0, monitor)?;
        if !is_announcement(&answer) {
            self.check_status(&answer, file)?;
        }
        let etag = etag_of(answer.headers());
        etag.ok_or_else(|| self.bad_answer(&format!("{}: no usable ETag", file.path)).into())
    }

    fn fetch_blob(&self, commit: &str, file: &RemoteFile, etag: &str, monitor: &dyn Monitor) -> Result<()> {
        let mut partial = Partial::open(self.cache().partial(etag), ids::is_hex(etag, 64), monitor)?;
        if partial.n_bytes > file.size {
            partial.clear()?;
        }
        partial.report(monitor);
        self.persist(file, monitor, |n_bytes| {
            let result = self.continue_transfer(commit, file, &mut partial, monitor);
            *n_bytes = partial.n_bytes;
            result
        })?;
        self.check_digest(file, etag, &mut partial)?;
        partial.file.sync_all().map_err(|e| FormatError::io(&partial.path, "sync", e))?;
        let blob = self.cache().blob(etag);
        fs::rename(&partial.path, &blob).map_err(|e| FormatError::io(blob, "rename", e))?;
        Ok(())
    }

    /// Repeats `attempt` until it succeeds, fails for good, or failed [`MAX_FRUITLESS`] times in a row without a new
    /// byte. `attempt` keeps the number of bytes received so far in its argument.
    fn persist<T>(
        &self,
        file: &RemoteFile,
        monitor: &dyn Monitor,
        mut attempt: impl FnMut(&mut u64) -> Result<T, Setback>,
    ) -> Result<T> {
        let (mut n_bytes, mut fruitless) = (0, 0);
        loop {
            let before = n_bytes;
            let detail = match attempt(&mut n_bytes) {
                Ok(value) => return Ok(value),
                Err(Setback::Final(error)) => return Err(error),
                Err(Setback::Transient(detail)) => detail,
            };
            fruitless = if n_bytes > before { 0 } else { fruitless + 1 };
            if fruitless == MAX_FRUITLESS {
                return Err(self.id.error(match n_bytes {
                    0 => HubProblem::Unreachable { endpoint: self.endpoint.clone(), detail },
                    _ => HubProblem::Broken { file: file.path.clone(), n_bytes, expected: file.size, detail },
                }));
            }
            pause(fruitless, monitor)?;
        }
    }

    /// Receives what is still missing of the file, or as much as comes.
    fn continue_transfer(
        &self,
        commit: &str,
        file: &RemoteFile,
        partial: &mut Partial,
        monitor: &dyn Monitor,
    ) -> Result<(), Setback> {
        if partial.n_bytes == file.size {
            return Ok(());
        }
        let mut answer = self.send(Method::GET, commit, file, partial.n_bytes, monitor)?;
        self.align(&answer, file, partial)?;
        loop {
            let chunk = self.wait(monitor, answer.chunk())?;
            let Some(bytes) = chunk.map_err(|e| Setback::Transient(problem::chain(&e)))? else { break };
            if partial.n_bytes + bytes.len() as u64 > file.size {
                partial.clear()?;
                let detail = format!("{}: more than the announced {} bytes", file.path, file.size);
                return Err(self.bad_answer(&detail).into());
            }
            partial.append(&bytes)?;
            partial.report(monitor);
            if monitor.interrupted() {
                return Err(CheckpointError::Interrupted.into());
            }
        }
        if partial.n_bytes < file.size {
            return Err(Setback::Transient(format!("it ended after {} bytes", partial.n_bytes)));
        }
        Ok(())
    }

    /// Makes the partial file end where the answer's body begins: a server may send the whole file instead of the
    /// range asked for, and must not send another range.
    fn align(&self, answer: &Response, file: &RemoteFile, partial: &mut Partial) -> Result<(), Setback> {
        match answer.status() {
            StatusCode::PARTIAL_CONTENT if range_start(answer.headers()) == Some(partial.n_bytes) => Ok(()),
            StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE => {
                let detail = format!("the server does not continue at byte {}", partial.n_bytes);
                partial.clear()?;
                Err(Setback::Transient(detail))
            }
            _ => {
                self.check_status(answer, file)?;
                Ok(partial.clear()?)
            }
        }
    }

    /// Sends a request for the file from byte `start` on, and follows redirects. A `HEAD` stops at the first answer
    /// that announces the file. The token goes to the hub's own origin only.
    fn send(
        &self,
        method: Method,
        commit: &str,
        file: &RemoteFile,
        start: u64,
        monitor: &dyn Monitor,
    ) -> Result<Response, Setback> {
        let hub = self.file_url(commit, &file.path)?;
        let mut url = hub.clone();
        for _ in 0..=MAX_REDIRECTS {
            let mut request = self.http.request(method.clone(), url.clone()).header(ACCEPT_ENCODING, "identity");
            if let Some(token) = self.token.as_ref().filter(|_| url.origin() == hub.origin()) {
                request = request.bearer_auth(token);
            }
            if start > 0 {
                request = request.header(RANGE, format!("bytes={start}-"));
            }
            let answer = self.wait(monitor, request.send())?;
            let answer = answer.map_err(|e| Setback::Transient(problem::chain(&e)))?;
            let announced = method == Method::HEAD && is_announcement(&answer);
            let location = text(answer.headers(), LOCATION.as_str()).filter(|_| answer.status().is_redirection());
            match location {
                Some(location) if !announced => {
                    let next = url.join(location);
                    url = next.map_err(|e| self.bad_answer(&format!("redirect to {location:?}: {e}")))?;
                }
                _ => return Ok(answer),
            }
        }
        Err(self.bad_answer(&format!("{}: more than {MAX_REDIRECTS} redirects", file.path)).into())
    }

    fn file_url(&self, commit: &str, path: &str) -> Result<Url> {
        let prefix = match self.id.kind {
            HubKind::Model => "",
            HubKind::Dataset => "datasets/",
        };
        let base = format!("{}/{prefix}{}/resolve/{commit}", self.endpoint, self.id);
        let unusable = |detail: String| HubProblem::Unreachable { endpoint: self.endpoint.clone(), detail };
        let mut url = Url::parse(&base).map_err(|e| self.id.error(unusable(e.to_string())))?;
        match url.path_segments_mut() {
            Ok(mut segments) => segments.extend(path.split('/')),
            Err(()) => return Err(self.id.error(unusable("not an http or https URL".to_owned()))),
        };
        Ok(url)
    }

    fn check_status(&self, answer: &Response, file: &RemoteFile) -> Result<()> {
        if answer.status().is_success() {
            return Ok(());
        }
        let code = text(answer.headers(), "x-error-code");
        let what = format!("file {}", file.path);
        Err(self.id.error(problem::of_status(&self.id, &self.endpoint, &what, answer.status().as_u16(), code)))
    }

    fn check_digest(&self, file: &RemoteFile, etag: &str, partial: &mut Partial) -> Result<()> {
        let Some(hasher) = partial.hasher.take() else { return Ok(()) };
        let found = Sha(hasher.finalize().into()).to_string();
        if found == etag {
            return Ok(());
        }
        partial.clear()?;
        Err(self.id.error(HubProblem::Mismatch { file: file.path.clone(), expected: etag.to_owned(), found }))
    }
}

impl Partial {
    /// Opens or creates the partial file; what it holds already is hashed when `with_digest`.
    fn open(path: PathBuf, with_digest: bool, monitor: &dyn Monitor) -> Result<Self> {
        make_parent(&path)?;
        let file = File::options().create(true).truncate(false).read(true).write(true).open(&path);
        let file = file.map_err(|e| FormatError::io(&path, "open", e))?;
        let mut partial = Self { path, file, n_bytes: 0, hasher: with_digest.then(Sha256::new), n_reported: 0 };
        let mut block = vec![0; BLOCK];
        loop {
            let n = partial.file.read(&mut block).map_err(|e| FormatError::io(&partial.path, "read", e))?;
            if n == 0 {
                return Ok(partial);
            }
            partial.take_in(&block[..n]);
            if monitor.interrupted() {
                return Err(CheckpointError::Interrupted);
            }
        }
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|e| FormatError::io(&self.path, "write", e))?;
        self.take_in(bytes);
        Ok(())
    }

    fn take_in(&mut self, bytes: &[u8]) {
        if let Some(hasher) = &mut self.hasher {
            hasher.update(bytes);
        }
        self.n_bytes += bytes.len() as u64;
    }

    fn clear(&mut self) -> Result<()> {
        let emptied = self.file.set_len(0).and_then(|()| self.file.seek(SeekFrom::Start(0)));
        emptied.map_err(|e| FormatError::io(&self.path, "empty", e))?;
        self.hasher = self.hasher.take().map(|_| Sha256::new());
        self.n_bytes = 0;
        Ok(())
    }

    /// Tells the monitor of bytes that it was not told of: none twice, even when a transfer starts over.
    fn report(&mut self, monitor: &dyn Monitor) {
        let news = self.n_bytes.saturating_sub(self.n_reported);
        if news > 0 {
            monitor.advance(news);
            self.n_reported += news;
        }
    }
}

/// The hub's own answer about a file: also a redirect to storage, if it says what the file is.
fn is_announcement(answer: &Response) -> bool {
    let headers = answer.headers();
    let announces = headers.contains_key("x-linked-etag") || headers.contains_key("x-repo-commit");
    answer.status().is_success() || (answer.status().is_redirection() && announces && etag_of(headers).is_some())
}

fn etag_of(headers: &HeaderMap) -> Option<String> {
    let raw = text(headers, "x-linked-etag").or_else(|| text(headers, ETAG.as_str()))?;
    let etag = raw.trim_start_matches("W/").trim_matches('"');
    // It becomes a file name.
    let usable = (1..=128).contains(&etag.len()) && etag.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'-');
    usable.then(|| etag.to_owned())
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// The first byte of `Content-Range: bytes START-END/LENGTH`.
fn range_start(headers: &HeaderMap) -> Option<u64> {
    text(headers, CONTENT_RANGE.as_str())?.strip_prefix("bytes ")?.split('-').next()?.parse().ok()
}

/// Waits before the next attempt, 200 ms doubled for every fruitless one before it.
fn pause(fruitless: u32, monitor: &dyn Monitor) -> Result<()> {
    let end = Instant::now() + FIRST_PAUSE * 2_u32.saturating_pow(fruitless.saturating_sub(1));
    while Instant::now() < end {
        if monitor.interrupted() {
            return Err(CheckpointError::Interrupted);
        }
        std::thread::sleep(FIRST_PAUSE / 4);
    }
    Ok(())
}
