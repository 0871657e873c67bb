//! Documents of one text file. Enters: a `.txt`, `.jsonl` or `.parquet` path. Leaves: documents one after the other,
//! read as they are asked for. Skips blank documents; joins and cuts nothing (that is `pack`), except that a `.txt`
//! document longer than [`MAX_PIECE_BYTES`] comes in pieces.

use std::path::Path;

use crate::lines::{Lines, MAX_LINE_BYTES};
use crate::record::{self, Field};
use crate::source::{Compression, FileKind};
use crate::table::Table;
use crate::{DataError, Result};

/// The line that parts two documents of a `.txt`, where the tokenizer knows it as a special token.
pub(crate) const SEPARATOR: &str = "<|endoftext|>";
/// A longer `.txt` document is handed on in pieces of at least this size, each ending at a line's end: bounds memory
/// and the time to the first sequence.
const MAX_PIECE_BYTES: usize = 4 << 20;
/// Longest text that is tokenized in one piece: a document of a `.jsonl` or a table, a line of a `.txt`. The tokenizer takes some
/// hundred times that memory and cannot be interrupted, and where else a text may be cut it does not say. 16 MiB are about as many
/// tokens as the paper's whole calibration.
pub(crate) const MAX_DOCUMENT_BYTES: usize = 16 << 20;

/// A document, or a part of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Document {
    pub(crate) text: String,
    /// False when this continues the document before it.
    pub(crate) is_new: bool,
}

/// How the documents of a file are told apart.
#[derive(Debug, Clone)]
pub(crate) struct ReadOptions {
    /// Column or key that holds the text.
    pub(crate) text_field: String,
    /// [`SEPARATOR`] parts the documents of a `.txt`.
    pub(crate) separator: bool,
}

/// The documents of a file, in order.
pub(crate) enum Documents {
    Text(TextFile),
    JsonLines(JsonLines),
    Table(Table),
}

impl Documents {
    /// Opens a text file. `kind` is not [`FileKind::TokenIds`].
    pub(crate) fn open(path: &Path, options: &ReadOptions) -> Result<Self> {
        match FileKind::of(path) {
            Some((FileKind::Text, compression)) => Ok(Self::Text(TextFile::open(path, compression, options)?)),
            Some((FileKind::JsonLines, compression)) => Ok(Self::JsonLines(JsonLines {
                lines: Lines::open(path, compression, MAX_LINE_BYTES)?,
                field: options.text_field.clone(),
            })),
            Some((FileKind::Parquet, _)) => Ok(Self::Table(Table::open(path, &options.text_field)?)),
            Some((FileKind::TokenIds, _)) | None => Err(DataError::UnknownKind { path: path.to_owned() }),
        }
    }

    /// The next document that is not blank; `None` after the last.
    pub(crate) fn next(&mut self) -> Result<Option<Document>> {
        match self {
            Self::Text(file) => file.next(),
            Self::JsonLines(file) => Ok(file.next()?.map(whole)),
            Self::Table(table) => Ok(table.next()?.map(whole)),
        }
    }
}

fn whole(text: String) -> Document {
    Document { text, is_new: true }
}

/// Refuses a document of more than [`MAX_DOCUMENT_BYTES`].
pub(crate) fn check_length(n_bytes: usize, path: &Path, place: impl FnOnce() -> String) -> Result<()> {
    if n_bytes <= MAX_DOCUMENT_BYTES {
        return Ok(());
    }
    Err(DataError::LongDocument { path: path.to_owned(), place: place(), max_bytes: MAX_DOCUMENT_BYTES })
}

/// Nothing but white space.
pub(crate) fn is_blank(text: &str) -> bool {
    text.trim().is_empty()
}

/// A `.txt`: one document, or several with [`SEPARATOR`] lines between them.
pub(crate) struct TextFile {
    lines: Lines,
    separator: bool,
    max_piece_bytes: usize,
    /// The next piece begins a document.
    is_new: bool,
}

impl TextFile {
    fn open(path: &Path, compression: Compression, options: &ReadOptions) -> Result<Self> {
        let lines = Lines::open(path, compression, MAX_DOCUMENT_BYTES)?;
        Ok(Self { lines, separator: options.separator, max_piece_bytes: MAX_PIECE_BYTES, is_new: true })
    }

    fn next(&mut self) -> Result<Option<Document>> {
        let mut text = String::new();
        // Of `text`; a blank start of any length is dropped as it comes.
        let mut blank = true;
        loop {
            let is_new = self.is_new;
            let line = self.lines.next_line()?;
            let is_separator = |line: &&str| self.separator && line.trim_end_matches(['\r', '\n']) == SEPARATOR;
            match line {
                // The line end before a separator belongs to it, as the one after it does.
                Some(line) if is_separator(&line) => {
                    self.is_new = true;
                    strip_line_end(&mut text);
                    if !blank {
                        return Ok(Some(Document { text, is_new }));
                    }
                    text.clear();
                }
                Some(line) => {
                    text.push_str(line);
                    blank &= is_blank(line);
                    if text.len() >= self.max_piece_bytes {
                        if !blank {
                            self.is_new = false;
                            return Ok(Some(Document { text, is_new }));
                        }
                        text.clear();
                    }
                }
                None if blank => return Ok(None),
                None => return Ok(Some(Document { text, is_new })),
            }
        }
    }
}

fn strip_line_end(text: &mut String) {
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
}

/// A `.jsonl`: an object a line.
pub(crate) struct JsonLines {
    lines: Lines,
    field: String,
}

impl JsonLines {
    fn next(&mut self) -> Result<Option<String>> {
        loop {
            let Some(line) = self.lines.next_line()? else { return Ok(None) };
            if is_blank(line) {
                continue;
            }
            let text = record::read(line, &self.field);
            let (path, place) = (self.lines.path(), || format!("line {}", self.lines.number()));
            let text = match text {
                Ok(Field::Text(text)) => text,
                Ok(Field::Null) => continue,
                Ok(Field::Other(found)) => {
                    let (path, field) = (path.to_owned(), self.field.clone());
                    return Err(DataError::NotText { path, place: place(), field, found: found.to_owned() });
                }
                Ok(Field::Absent { names }) => {
                    let (path, field) = (path.to_owned(), self.field.clone());
                    return Err(DataError::NoField { path, place: place(), field, available: names });
                }
                Err(detail) => {
                    return Err(DataError::Json { path: path.to_owned(), line: self.lines.number(), detail });
                }
            };
            check_length(text.len(), path, place)?;
            if !is_blank(&text) {
                return Ok(Some(text));
            }
        }
    }
}
