//! Names: hub ids, revisions, paths inside a repository, and which of a model's files are needed. Enters: text of users
//! and of the hub, neither trusted as a path. Leaves: parts that are safe to join to the cache directory.

use std::fmt;
use std::path::{Component, Path};

use super::client::RemoteFile;
use super::problem::HubProblem;
use crate::{CheckpointError, Result};

/// The branch that a repository's files are on unless a revision is named.
pub(super) const DEFAULT_REVISION: &str = "main";

/// The two kinds of repositories that wush reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HubKind {
    /// A model.
    Model,
    /// A data set.
    Dataset,
}

impl HubKind {
    /// The kind's name in API paths and cache folders.
    pub(super) fn plural(self) -> &'static str {
        match self {
            Self::Model => "models",
            Self::Dataset => "datasets",
        }
    }
}

impl fmt::Display for HubKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Model => "model",
            Self::Dataset => "data set",
        })
    }
}

/// A checked `org/name`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RepoId {
    pub(super) kind: HubKind,
    pub(super) owner: String,
    pub(super) name: String,
}

impl fmt::Display for RepoId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.owner, self.name)
    }
}

impl RepoId {
    /// Parses `org/name[@revision]`; the revision defaults to [`DEFAULT_REVISION`].
    pub(super) fn parse(kind: HubKind, text: &str) -> Result<(Self, String)> {
        let bad = |detail: &str| {
            let problem = HubProblem::BadId { detail: detail.to_owned() };
            CheckpointError::Hub { kind, id: text.to_owned(), problem }
        };
        if kind == HubKind::Model && Path::new(text).exists() {
            return Err(bad("is a file; expected a directory or a hub id"));
        }
        let (repository, revision) = text.split_once('@').unwrap_or((text, DEFAULT_REVISION));
        let neither = match kind {
            HubKind::Model => "neither an existing directory nor a hub id (org/name[@revision])",
            HubKind::Dataset => "not a hub id (org/name)",
        };
        let (owner, name) = repository.split_once('/').ok_or_else(|| bad(neither))?;
        if !is_id_part(owner) || !is_id_part(name) {
            return Err(bad(neither));
        }
        let id = Self { kind, owner: owner.to_owned(), name: name.to_owned() };
        check_revision(&id, revision)?;
        Ok((id, revision.to_owned()))
    }

    /// An error about this repository.
    pub(super) fn error(&self, problem: HubProblem) -> CheckpointError {
        CheckpointError::Hub { kind: self.kind, id: self.to_string(), problem }
    }
}

/// The hub's own rule for both halves of an id: letters, digits, `-`, `_`, `.`; at most 96; no `..` or `--`; no `-` or
/// `.` at either end.
fn is_id_part(part: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    (1..=96).contains(&part.len())
        && part.chars().all(allowed)
        && !part.contains("..")
        && !part.contains("--")
        && !part.starts_with(['-', '.'])
        && !part.ends_with(['-', '.'])
}

/// Refuses a revision that could not be a Git ref, or would lead out of the cache's `refs` directory.
pub(super) fn check_revision(id: &RepoId, revision: &str) -> Result<()> {
    if is_safe_path(revision) && !revision.contains(char::is_whitespace) {
        return Ok(());
    }
    let detail = format!("{revision:?} is not a revision: expected a branch, a tag or a commit");
    Err(id.error(HubProblem::BadId { detail }))
}

/// A relative path of plain names, with `/` between them.
pub(super) fn is_safe_path(path: &str) -> bool {
    !path.is_empty()
        && !path.contains(['\\', '\0', ':'])
        && !path.contains("//")
        && !path.ends_with('/')
        && Path::new(path).components().all(|part| matches!(part, Component::Normal(_)))
}

/// A full Git commit: 40 lower-case hex digits.
pub(super) fn is_commit(revision: &str) -> bool {
    is_hex(revision, 40)
}

/// `len` lower-case hex digits.
pub(super) fn is_hex(text: &str, len: usize) -> bool {
    text.len() == len && text.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'))
}

/// The directories of `glob` before its first special character: only this part of the repository must be listed.
pub(super) fn fixed_directory(glob: &str) -> &str {
    let special = glob.find(['*', '?', '[', '{', '\\']).unwrap_or(glob.len());
    glob[..special].rfind('/').map_or("", |slash| &glob[..slash])
}

/// Weights that wush reads.
pub(super) fn is_weights(path: &str) -> bool {
    path.ends_with(".safetensors")
}

/// Files beside the weights that a bundle must carry on or that describe the model.
const COMPANIONS: &[&str] =
    &[".json", ".jsonl", ".py", ".jinja", ".md", ".txt", ".model", ".tiktoken", ".vocab", ".spm", ".yaml", ".yml"];
/// The same, by the start of the file's name.
const COMPANION_STARTS: &[&str] = &["tokenizer", "LICENSE", "LICENCE", "NOTICE", "USE_POLICY", "COPYING"];
/// Directories that hold the same model in another format.
const OTHER_FORMATS: &[&str] = &["onnx", "openvino", "original", "coreml", "gguf", "metal", "runs"];
/// Weights of formats that wush does not read, for the message.
const FOREIGN_WEIGHTS: &[&str] = &[".bin", ".gguf", ".pth", ".pt", ".ckpt", ".h5", ".msgpack", ".onnx"];

/// The files of a model's listing that are fetched: the weights that its index (or its single file) stands for, and
/// everything small beside them. Companions come first, so that a refusal shows before gigabytes are moved.
pub(super) fn needed_model_files(listing: &[RemoteFile]) -> Vec<&RemoteFile> {
    let has = |name: &str| listing.iter().any(|file| file.path == name);
    let (sharded, single) = (has("model.safetensors.index.json"), has("model.safetensors"));
    let wanted_weights = |path: &str| match (sharded, single) {
        (true, _) => path.contains("-of-"),
        (false, true) => path == "model.safetensors",
        // `consolidated` repeats the same weights under other names; an adapter is not a model.
        (false, false) => !path.starts_with("consolidated") && !path.starts_with("adapter"),
    };
    let companions = listing.iter().filter(|file| is_companion(&file.path));
    let is_root_weights = |path: &str| is_weights(path) && !path.contains('/') && wanted_weights(path);
    let weights = listing.iter().filter(|file| is_root_weights(&file.path));
    companions.chain(weights).collect()
}

fn is_companion(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    let elsewhere = path.split_once('/').is_some_and(|(directory, _)| OTHER_FORMATS.contains(&directory));
    let by_end = COMPANIONS.iter().any(|end| name.ends_with(end));
    let by_start = COMPANION_STARTS.iter().any(|start| name.starts_with(start));
    !elsewhere && !is_weights(name) && !is_foreign(name) && (by_end || by_start)
}

fn is_foreign(path: &str) -> bool {
    FOREIGN_WEIGHTS.iter().any(|end| path.ends_with(end))
}

/// Weights that are there although none are needed, for the message: another format, an adapter, a consolidated copy.
pub(super) fn foreign_weights(listing: &[RemoteFile]) -> Option<String> {
    let mut paths = listing.iter().map(|file| &file.path);
    paths.find(|path| is_foreign(path) || is_weights(path)).cloned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_stay_inside() {
        for path in ["a", "a/b.json", "refs/pr/1", ".gitattributes", "a b/é.txt"] {
            assert!(is_safe_path(path), "{path}");
        }
        for path in ["", "/a", "..", "a/..", "../a", "a/../b", "./a", "a//b", "a/", "a\\b", "C:a", "a\0b"] {
            assert!(!is_safe_path(path), "{path}");
        }
    }

    #[test]
    fn ids_follow_the_hubs_rule() {
        for part in ["Qwen3-8B", "a", "a.b_c-d", &"a".repeat(96)] {
            assert!(is_id_part(part), "{part}");
        }
        for part in ["", ".", "..", "-a", "a-", "a.", "a--b", "a..b", "a b", "é", &"a".repeat(97)] {
            assert!(!is_id_part(part), "{part}");
        }
    }

    #[test]
    fn only_the_fixed_directory_is_listed() {
        for (glob, expected) in [
            ("*", ""),
            ("**/*.parquet", ""),
            ("sample/10BT/*", "sample/10BT"),
            ("data/train-*.parquet", "data"),
            ("data/a.jsonl", "data"),
            ("a/{b,c}/d", "a"),
            ("a/b[0-9]/c", "a"),
        ] {
            assert_eq!(fixed_directory(glob), expected, "{glob}");
        }
    }

    #[test]
    fn companions_come_before_weights() {
        let listing: Vec<RemoteFile> = [
            "README.md",
            "adapter_model.safetensors",
            "config.json",
            "consolidated.safetensors",
            "model.fp16.safetensors",
            "model.safetensors",
            "original/params.json",
            "tokenizer.model",
            "training_args.bin",
        ]
        .map(|path| RemoteFile { path: path.to_owned(), size: 1 })
        .to_vec();
        let needed: Vec<&str> = needed_model_files(&listing).iter().map(|file| file.path.as_str()).collect();
        assert_eq!(needed, ["README.md", "config.json", "tokenizer.model", "model.safetensors"]);
        assert_eq!(foreign_weights(&listing).as_deref(), Some("adapter_model.safetensors"));
    }
}
