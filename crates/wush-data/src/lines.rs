//! Lines of a file that may be compressed. Enters: a path. Leaves: one UTF-8 line at a time, with its number. Reads no
//! further than the line asked for (and a buffer), so a compressed file never expands beyond what is used of it.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;
use wush_format::FormatError;
use wush_format::json::open_regular;

use crate::source::Compression;
use crate::{DataError, Result};

/// Longest line of a `.jsonl` that is read, with all its fields. Bounds memory against a file without line ends.
pub(crate) const MAX_LINE_BYTES: usize = 64 << 20;

/// What some editors put in front of UTF-8; it is no text.
pub(crate) const BYTE_ORDER_MARK: &[u8; 3] = b"\xef\xbb\xbf";

/// Opens a file for reading, decompressed.
pub(crate) fn open(path: &Path, compression: Compression) -> Result<Box<dyn Read>> {
    let file = open_regular(path)?;
    Ok(match compression {
        Compression::None => Box::new(file),
        Compression::Gzip => Box::new(MultiGzDecoder::new(file)),
        Compression::Zstd => {
            let decoder = zstd::stream::read::Decoder::new(file);
            Box::new(decoder.map_err(|e| read_error(path, compression, e))?)
        }
    })
}

/// What the system says is its own; what it does not say, the decompressor found in the file.
pub(crate) fn read_error(path: &Path, compression: Compression, error: std::io::Error) -> DataError {
    match compression {
        Compression::Gzip | Compression::Zstd if error.raw_os_error().is_none() => {
            DataError::Damaged { path: path.to_owned(), detail: error.to_string() }
        }
        _ => FormatError::io(path, "read", error).into(),
    }
}

/// The lines of a file, in order.
pub(crate) struct Lines {
    path: PathBuf,
    compression: Compression,
    reader: BufReader<Box<dyn Read>>,
    line: Vec<u8>,
    max_bytes: usize,
    number: u64,
    /// Offset of the current line's first byte, after decompression.
    offset: u64,
}

impl Lines {
    /// Lines of at most `max_bytes`.
    pub(crate) fn open(path: &Path, compression: Compression, max_bytes: usize) -> Result<Self> {
        let reader = open(path, compression)?;
        Ok(Self { compression, ..Self::new(path, reader, max_bytes) })
    }

    fn new(path: &Path, reader: Box<dyn Read>, max_bytes: usize) -> Self {
        let reader = BufReader::with_capacity(64 << 10, reader);
        let compression = Compression::None;
        Self { path: path.to_owned(), compression, reader, line: Vec::new(), max_bytes, number: 0, offset: 0 }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The number of the line that was returned last, from 1.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// The next line with its line end; `None` at the end of the file. A byte order mark at the start is left out.
    pub(crate) fn next_line(&mut self) -> Result<Option<&str>> {
        self.offset += self.line.len() as u64;
        self.line.clear();
        let mut bounded = (&mut self.reader).take(self.max_bytes as u64 + 1);
        let read = bounded.read_until(b'\n', &mut self.line);
        let n = read.map_err(|e| read_error(&self.path, self.compression, e))?;
        if n == 0 {
            return Ok(None);
        }
        self.number += 1;
        if n > self.max_bytes {
            let path = self.path.clone();
            return Err(DataError::LineTooLong { path, line: self.number, max_bytes: self.max_bytes });
        }
        match std::str::from_utf8(&self.line) {
            Ok(line) if self.number == 1 => Ok(Some(line.strip_prefix('\u{feff}').unwrap_or(line))),
            Ok(line) => Ok(Some(line)),
            Err(e) => {
                let offset = self.offset + e.valid_up_to() as u64;
                Err(DataError::InvalidUtf8 { path: self.path.clone(), offset, line: self.number })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(bytes: &'static [u8], max_bytes: usize) -> Lines {
        Lines::new(Path::new("a.txt"), Box::new(bytes), max_bytes)
    }

    #[test]
    fn lines_keep_their_ends() {
        let mut lines = lines(b"a\r\n\nlast", 10);
        let mut found = Vec::new();
        while let Some(line) = lines.next_line().expect("valid") {
            found.push(line.to_owned());
        }
        assert_eq!(found, ["a\r\n", "\n", "last"]);
        assert_eq!(lines.number(), 3);
    }

    #[test]
    fn a_byte_order_mark_is_no_text() {
        let mut lines = lines(b"\xef\xbb\xbfab\n\xef\xbb\xbfc", 10);
        assert_eq!(lines.next_line().expect("valid"), Some("ab\n"));
        assert_eq!(lines.next_line().expect("valid"), Some("\u{feff}c"), "elsewhere it is a character");
    }

    #[test]
    fn wrong_bytes_are_located() {
        let mut lines = lines(b"ab\ncd\xffe\n", 10);
        assert_eq!(lines.next_line().expect("valid"), Some("ab\n"));
        let error = lines.next_line().expect_err("0xff is never UTF-8");
        assert!(matches!(error, DataError::InvalidUtf8 { offset: 5, line: 2, .. }), "{error}");
    }

    #[test]
    fn long_lines_are_refused() {
        assert_eq!(lines(b"123\n", 4).next_line().expect("fits"), Some("123\n"));
        let error = lines(b"1234\n", 4).next_line().expect_err("one byte more");
        assert!(matches!(error, DataError::LineTooLong { line: 1, max_bytes: 4, .. }), "{error}");
    }
}
