//! Documents of one text file. Enters: a `.txt`, `.jsonl` or `.parquet` path. Leaves: documents one after the other,
//! read as they are asked for. Skips blank documents; joins and cuts nothing (that is `pack`), except that a `.txt`
//! document longer than [`MAX_PIECE_BYTES`] comes in pieces.

use std::path::Path;

use serde_json::Value;

use crate::lines::Lines;
use crate::source::{Compression, FileKind};
use crate::table::Table;
use crate::{DataError, Result};

/// The line that parts two documents of a `.txt`, where the tokenizer knows it as a special token.
pub(crate) const SEPARATOR: &str = "<|endoftext|>";
/// A longer `.txt` document is handed on in pieces of at least this size, each ending at a line's end: bounds memory
/// and the time to the first sequence.
const MAX_PIECE_BYTES: usize = 4 << 20;

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
                lines: Lines::open(path, compression)?,
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
        let lines = Lines::open(path, compression)?;
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
            let parsed = serde_json::from_str(line);
            let text = self.text_of(parsed)?;
            if !is_blank(&text) {
                return Ok(Some(text));
            }
        }
    }

    /// The text of one record; a null is an empty document.
    fn text_of(&self, parsed: serde_json::Result<Value>) -> Result<String> {
        let (path, line) = (self.lines.path().to_owned(), self.lines.number());
        let (field, place) = (self.field.clone(), format!("line {line}"));
        let mut record = match parsed {
            Ok(Value::Object(record)) => record,
            Ok(other) => {
                let detail = format!("expected a JSON object, found {}", kind_of(&other));
                return Err(DataError::Json { path, line, detail });
            }
            Err(e) => {
                return Err(DataError::Json { path, line, detail: format!("not JSON (column {}): {e}", e.column()) });
            }
        };
        match record.remove(&field) {
            Some(Value::String(text)) => Ok(text),
            Some(Value::Null) => Ok(String::new()),
            Some(other) => Err(DataError::NotText { path, place, field, found: kind_of(&other).to_owned() }),
            None => {
                let names: Vec<&str> = record.keys().map(String::as_str).collect();
                Err(DataError::NoField { path, place, field, available: names.join(", ") })
            }
        }
    }
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
