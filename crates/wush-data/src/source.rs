//! Where calibration data comes from. Enters: the text of `--calib`, paths. Leaves: [`CalibSource`], and the kind of a
//! file by its name. Opens no file.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::{DataError, Result};

/// Text kinds, for messages.
pub(crate) const TEXT_KINDS: &str = ".txt, .jsonl (each also .gz or .zst) or .parquet";
/// All kinds, for messages.
pub(crate) const KNOWN_KINDS: &str = ".txt, .jsonl, .json (each also .gz or .zst) or .parquet";
/// Every text file of a data set, when no glob is given.
pub(crate) const ANY_TEXT: &str = "**/*.{parquet,jsonl,jsonl.gz,jsonl.zst,txt,txt.gz,txt.zst}";

/// A source of calibration data. [`CalibSource::default`] is the paper's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CalibSource {
    /// A file, or a folder of text files.
    Path(PathBuf),
    /// A data set of the Hugging Face hub.
    Hub {
        /// `org/name`.
        id: String,
        /// Branch, tag or commit; `None` for the main branch.
        revision: Option<String>,
        /// Which files, by their path in the repository; `None` for every text file.
        glob: Option<String>,
    },
}

impl Default for CalibSource {
    fn default() -> Self {
        Self::Hub { id: "HuggingFaceFW/fineweb-edu".to_owned(), revision: None, glob: Some("sample/10BT/*".to_owned()) }
    }
}

impl CalibSource {
    /// Whether it is a file of token-id lists, which are used as they are: no tokenizer is needed.
    pub fn is_token_ids(&self) -> bool {
        match self {
            Self::Path(path) => {
                !path.is_dir() && FileKind::of(path).is_some_and(|(kind, _)| kind == FileKind::TokenIds)
            }
            Self::Hub { .. } => false,
        }
    }

    /// Whether its documents can have fields: not those of one file of plain text.
    pub fn has_fields(&self) -> bool {
        match self {
            Self::Path(path) => path.is_dir() || FileKind::of(path).is_none_or(|(kind, _)| kind != FileKind::Text),
            Self::Hub { .. } => true,
        }
    }
}

impl FromStr for CalibSource {
    type Err = DataError;

    /// `hf:org/name[@revision][:glob]`, or a path.
    fn from_str(text: &str) -> Result<Self> {
        let bad = |detail| DataError::BadSource { text: text.to_owned(), detail };
        if text.is_empty() {
            return Err(bad("empty"));
        }
        let Some(rest) = text.strip_prefix("hf:") else {
            return Ok(Self::Path(PathBuf::from(text)));
        };
        let (repository, glob) = rest.split_once(':').map_or((rest, None), |(left, right)| (left, Some(right)));
        let (id, revision) = repository.split_once('@').map_or((repository, None), |(id, rev)| (id, Some(rev)));
        let is_id = id.split_once('/').is_some_and(|(owner, name)| !owner.is_empty() && !name.is_empty());
        if !is_id || id.matches('/').count() != 1 {
            return Err(bad("expected hf:org/name[@revision][:glob]"));
        }
        if revision == Some("") || glob == Some("") {
            return Err(bad("an empty revision or glob"));
        }
        Ok(Self::Hub { id: id.to_owned(), revision: revision.map(str::to_owned), glob: glob.map(str::to_owned) })
    }
}

impl fmt::Display for CalibSource {
    /// The text that parses to the same source.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "{}", path.display()),
            Self::Hub { id, revision, glob } => {
                write!(f, "hf:{id}")?;
                revision.as_ref().map_or(Ok(()), |revision| write!(f, "@{revision}"))?;
                glob.as_ref().map_or(Ok(()), |glob| write!(f, ":{glob}"))
            }
        }
    }
}

/// What a file holds, by the end of its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileKind {
    /// Plain text.
    Text,
    /// One JSON object a line.
    JsonLines,
    /// Lists of token ids.
    TokenIds,
    /// A table.
    Parquet,
}

/// How a file is compressed, by the end of its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compression {
    None,
    Gzip,
    Zstd,
}

impl FileKind {
    /// The kind that a file's name stands for; `None` for other names. Upper and lower case are the same.
    pub(crate) fn of(path: &Path) -> Option<(Self, Compression)> {
        let name = path.file_name()?.to_str()?.to_ascii_lowercase();
        let (stem, compression) = match name.rsplit_once('.')? {
            (stem, "gz") => (stem, Compression::Gzip),
            (stem, "zst") => (stem, Compression::Zstd),
            _ => (name.as_str(), Compression::None),
        };
        let kind = match stem.rsplit_once('.')?.1 {
            "txt" => Self::Text,
            "jsonl" => Self::JsonLines,
            "json" => Self::TokenIds,
            "parquet" if compression == Compression::None => Self::Parquet,
            _ => return None,
        };
        Some((kind, compression))
    }

    /// Holds documents, not ids.
    pub(crate) fn is_text(self) -> bool {
        self != Self::TokenIds
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TextOptions;

    fn hub(id: &str, revision: Option<&str>, glob: Option<&str>) -> CalibSource {
        let owned = |text: Option<&str>| text.map(str::to_owned);
        CalibSource::Hub { id: id.to_owned(), revision: owned(revision), glob: owned(glob) }
    }

    #[test]
    fn sources_parse_and_print_the_same() {
        let cases = [
            ("text.txt", CalibSource::Path("text.txt".into())),
            ("a@b/c:d.jsonl", CalibSource::Path("a@b/c:d.jsonl".into())),
            ("hf:org/name", hub("org/name", None, None)),
            ("hf:org/name@v1", hub("org/name", Some("v1"), None)),
            ("hf:org/name:data/*", hub("org/name", None, Some("data/*"))),
            ("hf:org/name@refs/pr/1:a/**/b.txt", hub("org/name", Some("refs/pr/1"), Some("a/**/b.txt"))),
            ("hf:HuggingFaceFW/fineweb-edu:sample/10BT/*", CalibSource::default()),
        ];
        for (text, expected) in cases {
            assert_eq!(text.parse::<CalibSource>().expect("valid"), expected, "{text}");
            assert_eq!(expected.to_string(), text);
        }
    }

    #[test]
    fn bad_sources_are_refused() {
        for text in ["", "hf:", "hf:name", "hf:a/b/c", "hf:/b", "hf:a/", "hf:a/b@", "hf:a/b:", "hf:a/b@:x"] {
            let error = text.parse::<CalibSource>().expect_err(text);
            assert!(matches!(error, DataError::BadSource { .. }), "{text}: {error}");
            assert!(error.hint(&TextOptions::CALIBRATION).is_some_and(|hint| hint.contains("--calib")));
        }
    }

    #[test]
    fn kinds_go_by_the_name() {
        use Compression::{Gzip, None as Plain, Zstd};
        let cases = [
            ("a.txt", Some((FileKind::Text, Plain))),
            ("A.TXT.GZ", Some((FileKind::Text, Gzip))),
            ("a.b.jsonl.zst", Some((FileKind::JsonLines, Zstd))),
            ("ids.tokens.json.gz", Some((FileKind::TokenIds, Gzip))),
            ("t.parquet", Some((FileKind::Parquet, Plain))),
            ("t.parquet.gz", None),
            ("README.md", None),
            ("txt", None),
            ("a.gz", None),
        ];
        for (name, expected) in cases {
            assert_eq!(FileKind::of(Path::new(name)), expected, "{name}");
        }
    }
}
