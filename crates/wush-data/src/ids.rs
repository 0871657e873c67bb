//! Lists of token ids. Enters: a `.json` file `[[1, 2, …], …]`. Leaves: its sequences, in order, as they are. Stops
//! reading after the last one wanted.
//!
//! The format is this small, and a file may be hostile or expand without end, so it is read byte by byte by rules of its own:
//! whatever the file holds, memory is that of the ids taken in. A general parser reads a whole string or number, of any length,
//! to say that it is none, and does not stop in the middle of a list.

use std::io::{BufReader, Bytes, Read};
use std::path::Path;

use crate::lines::{self, read_error};
use crate::source::Compression;
use crate::{DataError, Result};

/// Most ids that are taken in: 1 GiB of them.
const MAX_IDS: usize = 1 << 28;
/// Most sequences that are taken in. Each costs some hundred bytes beside its ids, and the paper uses 128.
const MAX_SEQUENCES: usize = 1 << 20;
/// Bytes of a wrong word that a message repeats.
const SHOWN_BYTES: usize = 20;

/// What the model takes, and how much is wanted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Sequences wanted; `None`: all.
    pub(crate) sequences: Option<usize>,
    /// Longest sequence, tokens.
    pub(crate) seq_len: usize,
    /// Ids are below this.
    pub(crate) vocab_size: usize,
}

/// Reads at most `limits.sequences` sequences.
pub(crate) fn read(path: &Path, compression: Compression, limits: Limits) -> Result<Vec<Vec<u32>>> {
    let bytes = BufReader::new(lines::open(path, compression)?).bytes();
    let mut lists = Lists { path, compression, limits, bytes, next: None, line: 1, n_ids: 0, sequences: Vec::new() };
    lists.read_all()?;
    Ok(lists.sequences)
}

/// The file while it is read.
struct Lists<'a, R: Read> {
    path: &'a Path,
    compression: Compression,
    limits: Limits,
    bytes: Bytes<R>,
    /// The byte to look at; none at the end of the file.
    next: Option<u8>,
    /// Of that byte, from 1.
    line: u64,
    n_ids: usize,
    sequences: Vec<Vec<u32>>,
}

impl<R: Read> Lists<'_, R> {
    fn read_all(&mut self) -> Result<()> {
        self.advance()?;
        self.skip_byte_order_mark()?;
        self.skip_blanks()?;
        self.expect(b'[', "[ before the first list")?;
        self.skip_blanks()?;
        if self.next == Some(b']') {
            self.advance()?;
            return self.end();
        }
        loop {
            let sequence = self.list()?;
            self.sequences.push(sequence);
            if self.limits.sequences == Some(self.sequences.len()) {
                return Ok(());
            }
            if self.sequences.len() == MAX_SEQUENCES {
                return Err(DataError::TooManySequences { source_name: self.name(), max: MAX_SEQUENCES });
            }
            if !self.more("a comma or ] after a list")? {
                return self.end();
            }
        }
    }

    fn end(&mut self) -> Result<()> {
        self.skip_blanks()?;
        match self.next {
            None => Ok(()),
            Some(_) => Err(self.wrong("nothing after the last ]")),
        }
    }

    /// One list, not empty.
    fn list(&mut self) -> Result<Vec<u32>> {
        self.expect(b'[', "[ at the start of a list of token ids")?;
        self.skip_blanks()?;
        let sequence = self.sequences.len();
        if self.next == Some(b']') {
            return Err(DataError::EmptySequence { source_name: self.name(), sequence });
        }
        let mut ids = Vec::new();
        loop {
            if ids.len() == self.limits.seq_len {
                let (source_name, max) = (self.name(), self.limits.seq_len);
                return Err(DataError::LongSequence { source_name, sequence, max });
            }
            if self.n_ids == MAX_IDS {
                return Err(DataError::TooManyIds { source_name: self.name(), max: MAX_IDS });
            }
            let id = self.id()?;
            if usize::try_from(id).is_ok_and(|id| id < self.limits.vocab_size) {
                ids.push(id);
                self.n_ids += 1;
            } else {
                let (position, vocab_size) = (ids.len(), self.limits.vocab_size);
                return Err(DataError::TokenId { source_name: self.name(), sequence, position, id, vocab_size });
            }
            if !self.more("a comma or ] after a token id")? {
                return Ok(ids);
            }
        }
    }

    /// A whole number in decimal digits.
    fn id(&mut self) -> Result<u32> {
        const EXPECTED: &str = "a token id, a whole number below 2^32";
        let mut id: Option<u32> = None;
        while let Some(digit) = self.next.filter(u8::is_ascii_digit) {
            let longer = id.unwrap_or(0).checked_mul(10).and_then(|id| id.checked_add(u32::from(digit - b'0')));
            id = Some(longer.ok_or_else(|| self.json(format!("expected {EXPECTED}, found a larger one")))?);
            self.advance()?;
        }
        id.ok_or_else(|| self.wrong(EXPECTED))
    }

    /// What follows an element: true for a comma, with the blanks after it; false for the end of the list.
    fn more(&mut self, expected: &str) -> Result<bool> {
        self.skip_blanks()?;
        if self.next == Some(b',') {
            self.advance()?;
            self.skip_blanks()?;
            return Ok(true);
        }
        self.expect(b']', expected)?;
        Ok(false)
    }

    fn expect(&mut self, byte: u8, expected: &str) -> Result<()> {
        if self.next == Some(byte) { self.advance() } else { Err(self.wrong(expected)) }
    }

    fn skip_byte_order_mark(&mut self) -> Result<()> {
        if self.next == Some(lines::BYTE_ORDER_MARK[0]) {
            for &byte in lines::BYTE_ORDER_MARK {
                self.expect(byte, "[ before the first list")?;
            }
        }
        Ok(())
    }

    fn skip_blanks(&mut self) -> Result<()> {
        while matches!(self.next, Some(b' ' | b'\t' | b'\r' | b'\n')) {
            self.advance()?;
        }
        Ok(())
    }

    fn advance(&mut self) -> Result<()> {
        self.line += u64::from(self.next == Some(b'\n'));
        self.next = self.bytes.next().transpose().map_err(|e| read_error(self.path, self.compression, e))?;
        Ok(())
    }

    /// The error for what stands here instead of `expected`.
    fn wrong(&mut self, expected: &str) -> DataError {
        let mut found = Vec::new();
        while let Some(byte) = self.next.filter(|&byte| found.len() < SHOWN_BYTES && !b",]\r\n".contains(&byte)) {
            found.push(byte);
            // What cannot be read any more is not shown.
            self.next = self.bytes.next().and_then(std::result::Result::ok);
        }
        if found.is_empty() {
            found.extend(self.next);
        }
        let found = match found.is_empty() {
            true => "the end of the file".to_owned(),
            false => format!("{:?}", String::from_utf8_lossy(&found)),
        };
        self.json(format!("expected {expected}, found {found}"))
    }

    fn json(&self, detail: String) -> DataError {
        DataError::Json { path: self.path.to_owned(), line: self.line, detail }
    }

    fn name(&self) -> String {
        crate::file_name(self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TextOptions;

    fn parse(text: &[u8], sequences: Option<usize>) -> Result<Vec<Vec<u32>>> {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("ids.json");
        std::fs::write(&path, text).expect("written");
        read(&path, Compression::None, Limits { sequences, seq_len: 4, vocab_size: 1000 })
    }

    #[test]
    fn lists_are_read_as_they_are() {
        let expected = [vec![1, 2, 3], vec![999]];
        for text in ["[[1,2,3],[999]]", " [ [1 ,2,\t3 ] ,\r\n[ 999 ] ]\n", "\u{feff}[[1,2,3],[999]]"] {
            assert_eq!(parse(text.as_bytes(), None).expect(text), expected, "{text:?}");
        }
        assert!(parse(b"[]", None).expect("no list").is_empty());
    }

    #[test]
    fn nothing_is_read_after_the_last_list_wanted() {
        assert_eq!(parse(b"[[1],[2] rubbish", Some(2)).expect("two"), [[1], [2]]);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        for (text, expected) in [
            ("", "line 1: expected [ before the first list, found the end of the file"),
            ("{}", "line 1: expected [ before the first list, found \"{}\""),
            ("[1, 2]", "line 1: expected [ at the start of a list of token ids, found \"1\""),
            ("[[1],\n[2,\n-3]]", "line 3: expected a token id, a whole number below 2^32, found \"-3\""),
            ("[[1.5]]", "line 1: expected a comma or ] after a token id, found \".5\""),
            ("[[\"a\"]]", "line 1: expected a token id, a whole number below 2^32, found \"\\\"a\\\"\""),
            ("[[1,]]", "line 1: expected a token id, a whole number below 2^32, found \"]\""),
            ("[[4294967296]]", "line 1: expected a token id, a whole number below 2^32, found a larger one"),
            ("[[1]", "line 1: expected a comma or ] after a list, found the end of the file"),
            ("[[1]] x", "line 1: expected nothing after the last ], found \"x\""),
            ("[[1],[]]", "ids.json: sequence 1 is empty"),
            ("[[1,2,3,4,5]]", "ids.json: sequence 0 is longer than 4 tokens"),
            ("[[7,1000]]", "ids.json: sequence 0, position 1: token id 1000 is outside the vocabulary of 1000"),
        ] {
            let error = parse(text.as_bytes(), None).expect_err(text);
            assert!(error.to_string().ends_with(expected), "{text:?}: {error}");
            assert!(error.hint(&TextOptions::CALIBRATION).is_some(), "{text:?}");
        }
    }

    #[test]
    fn a_number_without_end_is_refused_at_its_eleventh_digit() {
        let text = format!("[[{}]]", "1".repeat(309));
        let error = parse(text.as_bytes(), None).expect_err("no id");
        assert!(error.to_string().ends_with("found a larger one"), "{error}");
    }
}
