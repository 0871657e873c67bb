//! What can go wrong with the hub, and what the user can do about it. Enters: answers and failures of the client.
//! Leaves: one sentence and one hint each.

use hf_hub::HFError;

use super::ids::{HubKind, RepoId};
use crate::CheckpointError;

/// Why the hub did not give what was asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubProblem {
    /// The argument is no directory and cannot be a hub id.
    #[error("{detail}")]
    BadId {
        /// What was expected and what was found.
        detail: String,
    },
    /// The hub wants a token, another one, or an accepted licence.
    #[error("the hub refuses access (HTTP {status}{})", if *gated { ", gated repository" } else { "" })]
    Refused {
        /// 401 or 403.
        status: u16,
        /// The repository is gated: its terms must be accepted first.
        gated: bool,
    },
    /// The repository, the revision or the file is not there.
    #[error("the hub has no {what}")]
    NotFound {
        /// What was looked for.
        what: String,
    },
    /// No answer.
    #[error("the hub at {endpoint} cannot be reached: {detail}")]
    Unreachable {
        /// The base URL.
        endpoint: String,
        /// The client's words.
        detail: String,
    },
    /// An answer that is not what the hub's API promises.
    #[error("unexpected answer of the hub: {detail}")]
    BadAnswer {
        /// What was expected and what was found.
        detail: String,
    },
    /// A transfer that broke off several times without any progress.
    #[error("{file}: the transfer broke off at {n_bytes} of {expected} bytes: {detail}")]
    Broken {
        /// Path inside the repository.
        file: String,
        /// Bytes received and kept.
        n_bytes: u64,
        /// Bytes of the whole file.
        expected: u64,
        /// The last failure.
        detail: String,
    },
    /// What was received is not the file that the hub announced; it was deleted.
    #[error("{file}: the content received does not match its SHA-256: expected {expected}, found {found}")]
    Mismatch {
        /// Path inside the repository.
        file: String,
        /// The announced digest, hex.
        expected: String,
        /// The digest of what was received, hex.
        found: String,
    },
    /// A model without safetensors weights.
    #[error("the repository has no safetensors weights{}", .instead.as_deref().map(|name| format!(" (found {name})")).unwrap_or_default())]
    NoWeights {
        /// Weights of another format that are there.
        instead: Option<String>,
    },
    /// A glob that cannot be parsed.
    #[error("not a valid glob: {detail}")]
    BadGlob {
        /// The parser's words.
        detail: String,
    },
    /// A glob that matches nothing.
    #[error("no file matches {glob} at commit {revision}")]
    NoMatch {
        /// The glob.
        glob: String,
        /// The commit.
        revision: String,
    },
    /// Offline, and not (or not wholly) in the cache.
    #[error("{} at revision {revision}", .missing.as_deref().map_or_else(|| "not in the local cache".to_owned(), |name| format!("{name} is not in the local cache")))]
    NotCached {
        /// The revision asked for.
        revision: String,
        /// The first file found missing; `None` when nothing of the revision is there.
        missing: Option<String>,
    },
}

impl HubProblem {
    /// What to do.
    pub fn hint(&self, kind: HubKind, id: &str) -> String {
        let instead = match kind {
            HubKind::Model => "pass the path of a local checkpoint directory",
            HubKind::Dataset => "pass local text with --calib FILE (.txt, .jsonl, .parquet, or token ids in .json)",
        };
        match self {
            Self::BadId { .. } => format!("{instead}, or a hub id org/name[@revision]"),
            Self::Refused { gated: true, .. } => {
                format!("accept the terms on the hub's page of {id} and set HF_TOKEN, or {instead}")
            }
            Self::Refused { .. } => format!("set HF_TOKEN to a token that may read {id}, or {instead}"),
            Self::NotFound { .. } => format!("check the spelling; a private {kind} needs HF_TOKEN; or {instead}"),
            Self::Unreachable { .. } => {
                format!("check the network (HF_ENDPOINT names a mirror); without network, {instead}")
            }
            Self::BadAnswer { .. } => format!("check HF_ENDPOINT; or {instead}"),
            Self::Broken { .. } => "run the same command again: the transfer resumes where it stopped".to_owned(),
            Self::Mismatch { .. } => "run the same command again: the file was deleted and is fetched anew".to_owned(),
            Self::NoWeights { .. } => "choose a repository with *.safetensors, or convert the weights first".to_owned(),
            Self::BadGlob { .. } | Self::NoMatch { .. } => {
                format!("write hf:{id}:GLOB with * inside a directory and ** across directories, or {instead}")
            }
            Self::NotCached { .. } => format!(
                "{instead}; or, with network, fetch it first (unset HF_HUB_OFFLINE, or `hf download{} {id}`)",
                if kind == HubKind::Dataset { " --repo-type dataset" } else { "" }
            ),
        }
    }
}

/// Translates what the client reports. `endpoint` is the base URL, `what` the thing asked for.
pub(super) fn translate(id: &RepoId, endpoint: &str, what: &str, error: HFError) -> CheckpointError {
    let unreachable = |detail: String| HubProblem::Unreachable { endpoint: endpoint.to_owned(), detail };
    let problem = match error {
        HFError::AuthRequired { context } | HFError::Forbidden { context } | HFError::Http { context } => {
            of_status(id, endpoint, what, context.status.as_u16(), context.error_code.as_deref())
        }
        HFError::RepoNotFound { context, .. }
        | HFError::RevisionNotFound { context, .. }
        | HFError::EntryNotFound { context, .. } => {
            of_status(id, endpoint, what, 404, context.and_then(|context| context.error_code).as_deref())
        }
        HFError::RateLimited { .. } => unreachable("too many requests (HTTP 429)".to_owned()),
        HFError::Request { source, .. } if source.is_decode() => HubProblem::BadAnswer { detail: chain(&source) },
        HFError::Request { source, .. } => unreachable(chain(&source)),
        HFError::Io(source) => unreachable(source.to_string()),
        other => HubProblem::BadAnswer { detail: other.to_string() },
    };
    id.error(problem)
}

/// The problem that a failing status stands for. The hub answers 401 for what it does not want to admit exists, and
/// tells the cases apart in `X-Error-Code`.
pub(super) fn of_status(id: &RepoId, endpoint: &str, what: &str, status: u16, code: Option<&str>) -> HubProblem {
    match (status, code) {
        (401 | 404, Some("RepoNotFound")) => HubProblem::NotFound { what: format!("{} of this name", id.kind) },
        (_, Some("RevisionNotFound")) | (404, _) => HubProblem::NotFound { what: what.to_owned() },
        (401 | 403, code) => HubProblem::Refused { status, gated: code == Some("GatedRepo") },
        (429 | 500..=599, _) => {
            HubProblem::Unreachable { endpoint: endpoint.to_owned(), detail: format!("HTTP {status} for {what}") }
        }
        _ => HubProblem::BadAnswer { detail: format!("HTTP {status} for {what}") },
    }
}

/// An error with its causes, the innermost last: reqwest keeps "connection refused" three levels down.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}
