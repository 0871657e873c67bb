//! The one error type of this crate: every variant names the file and says what was expected and what was found.

use std::path::{Path, PathBuf};

use crate::text::printable;

/// Result of this crate.
pub type Result<T, E = FormatError> = std::result::Result<T, E>;

/// Longest detail of a message, in characters; parsers repeat what they found, and that may be the whole file.
const MAX_DETAIL_CHARS: usize = 600;

/// Actions of [`FormatError::Io`] that make something.
const WRITING: [&str; 5] = ["create", "write", "write into", "rename", "rename to"];

/// Why a file could not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// The operating system refused.
    #[error("{path}: cannot {action}: {source}")]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What was being done, as a verb: "read", "create", "rename".
        action: &'static str,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A file is not what its kind must be (header, offsets, overlap, length).
    #[error("{path}: not a valid {kind} file: {detail}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What it was read as: "safetensors", "manifest", "transforms".
        kind: &'static str,
        /// What was expected and what was found.
        detail: String,
    },
    /// A tensor that must be there is absent.
    #[error("{path}: tensor {name} is missing")]
    MissingTensor {
        /// The file.
        path: PathBuf,
        /// The tensor's name.
        name: String,
    },
    /// A tensor has another shape or dtype than its role demands.
    #[error("{path}: tensor {name}: expected {expected}, found {found}")]
    WrongTensor {
        /// The file.
        path: PathBuf,
        /// The tensor's name.
        name: String,
        /// The expected shape or dtype.
        expected: String,
        /// The one found.
        found: String,
    },
    /// A file was written in a layout that this version does not know.
    #[error("{path}: {kind} format version {found}, expected {expected}")]
    Version {
        /// The file.
        path: PathBuf,
        /// What it was read as: "manifest", "transforms".
        kind: &'static str,
        /// The version it names.
        found: String,
        /// The version that can be read.
        expected: u32,
    },
    /// Parts of a bundle that do not belong together: a sidecar and the manifest, or both and the model.
    #[error("{path}: does not fit its bundle: {what}: {detail}")]
    Unfit {
        /// The part.
        path: PathBuf,
        /// In what.
        what: String,
        /// What the manifest, or the model, has, and what the part has.
        detail: String,
    },
    /// The output is there already.
    #[error("{path}: exists already")]
    Exists {
        /// The output.
        path: PathBuf,
    },
    /// Another run is writing the same output.
    #[error("{path}: another run is writing here")]
    Busy {
        /// The output.
        path: PathBuf,
    },
}

impl FormatError {
    /// Wraps an I/O error with the path and the action.
    pub fn io(path: impl Into<PathBuf>, action: &'static str, source: std::io::Error) -> Self {
        Self::Io { path: path.into(), action, source }
    }

    /// `Invalid`, with a detail that a hostile file can neither make long nor let draw on a terminal.
    pub fn invalid(path: &Path, kind: &'static str, detail: impl Into<String>) -> Self {
        let mut detail = printable(&detail.into()).into_owned();
        if let Some((cut, _)) = detail.char_indices().nth(MAX_DETAIL_CHARS) {
            detail.truncate(cut);
            detail.push('…');
        }
        Self::Invalid { path: path.to_owned(), kind, detail }
    }

    /// The same of `to` where it names `from` or something below it: a user knows the output, and not the hidden place where it
    /// is built.
    pub fn moved(mut self, from: &Path, to: &Path) -> Self {
        let path = match &mut self {
            Self::Io { path, .. }
            | Self::Invalid { path, .. }
            | Self::MissingTensor { path, .. }
            | Self::WrongTensor { path, .. }
            | Self::Version { path, .. }
            | Self::Unfit { path, .. }
            | Self::Exists { path }
            | Self::Busy { path } => path,
        };
        if let Ok(rest) = path.strip_prefix(from) {
            *path = if rest.as_os_str().is_empty() { to.to_owned() } else { to.join(rest) };
        }
        self
    }

    /// The remedy, if one is known: a line of its own, never part of the message.
    pub fn hint(&self) -> Option<String> {
        use std::io::ErrorKind::{
            FileTooLarge, InvalidFilename, IsADirectory, NotADirectory, NotFound, OutOfMemory, PermissionDenied,
            QuotaExceeded, ReadOnlyFilesystem, StorageFull, UnexpectedEof,
        };
        let hint = match self {
            Self::Io { source, action, .. } => match source.kind() {
                StorageFull | QuotaExceeded => "free some space, or write to another disk",
                FileTooLarge => "lift the limit on file sizes (ulimit -f), or write to another disk",
                InvalidFilename => "choose a shorter name, without special characters",
                NotFound | NotADirectory if WRITING.contains(action) => {
                    "check the path; a directory to write into must exist already"
                }
                NotFound | NotADirectory => "check the path: nothing is there",
                PermissionDenied => "check who owns the path and its permissions",
                ReadOnlyFilesystem => "write to another disk",
                IsADirectory => "pass a file: this is a directory",
                UnexpectedEof => "the file became shorter while it was read: try again once nothing writes to it",
                OutOfMemory => "close other programs, or use a machine with more memory",
                _ => return None,
            },
            Self::Invalid { kind: "safetensors" | "index" | "config.json", .. } => {
                "the file is damaged or incomplete: copy or download it again"
            }
            Self::Invalid { kind: "configuration", .. } => "correct the value, or copy or download the file again",
            Self::Invalid { .. } | Self::MissingTensor { .. } | Self::WrongTensor { .. } => {
                "the file is damaged or of another kind: make it again with this version of wush"
            }
            Self::Version { .. } => "make the file again with this version of wush, or use the version that made it",
            Self::Unfit { .. } => {
                "a part of the bundle is missing, damaged or another bundle's: `wush inspect` says what else; copy it whole, or make \
                 it again"
            }
            Self::Exists { .. } => "remove it, or choose another output path",
            Self::Busy { .. } => "wait for the other run, or choose another output path",
        };
        Some(hint.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_in_the_hidden_place_is_named_by_the_output() {
        let (from, to) = (Path::new("/x/.out.wush-partial"), Path::new("/x/out"));
        for (path, expected) in [
            ("/x/.out.wush-partial/wush/manifest.json", "/x/out/wush/manifest.json"),
            ("/x/.out.wush-partial", "/x/out"),
            ("/x/.out.wush-partials/a", "/x/.out.wush-partials/a"),
            ("/y", "/y"),
        ] {
            let busy = FormatError::Busy { path: path.into() }.moved(from, to).to_string();
            assert_eq!(busy, format!("{expected}: another run is writing here"));
        }
    }
}
