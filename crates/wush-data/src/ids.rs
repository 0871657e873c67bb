//! Lists of token ids. Enters: a `.json` file `[[1, 2, …], …]`. Leaves: its sequences, in order, as they are. Stops
//! reading after the last one wanted.

use std::fmt;
use std::io::BufReader;
use std::path::Path;

use serde::de::{DeserializeSeed, Deserializer, Error as _, SeqAccess, Visitor};
use wush_format::FormatError;

use crate::lines;
use crate::source::Compression;
use crate::{DataError, Result};

/// Most ids that are taken in: 1 GiB of them. Bounds memory against a file that expands without end.
const MAX_IDS: usize = 1 << 28;

/// Reads at most `limit` sequences (`None`: all).
pub(crate) fn read(path: &Path, compression: Compression, limit: Option<usize>) -> Result<Vec<Vec<u32>>> {
    let reader = BufReader::new(lines::open(path, compression)?);
    let mut deserializer = serde_json::Deserializer::from_reader(reader);
    let mut lists = Lists { sequences: Vec::new(), limit, n_ids: 0, stop: None };
    let outcome = deserializer.deserialize_seq(&mut lists).and_then(|()| deserializer.end());
    match (lists.stop, outcome) {
        (Some(Stop::Enough), _) | (None, Ok(())) => Ok(lists.sequences),
        (Some(Stop::TooMany), _) => Err(DataError::TooManyIds { source_name: crate::file_name(path), max: MAX_IDS }),
        (None, Err(e)) if e.is_io() => Err(FormatError::io(path, "read", e.into()).into()),
        (None, Err(e)) => {
            let detail = format!("expected lists of token ids, [[1, 2, …], …]: {e}");
            Err(DataError::Json { path: path.to_owned(), line: e.line() as u64, detail })
        }
    }
}

/// Why reading stopped before the end of the file.
#[derive(Clone, Copy)]
enum Stop {
    Enough,
    TooMany,
}

struct Lists {
    sequences: Vec<Vec<u32>>,
    limit: Option<usize>,
    n_ids: usize,
    stop: Option<Stop>,
}

impl<'de> Visitor<'de> for &mut Lists {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of lists of token ids")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut rows: A) -> Result<(), A::Error> {
        loop {
            if self.limit == Some(self.sequences.len()) {
                self.stop = Some(Stop::Enough);
                return Err(A::Error::custom("the rest is not needed"));
            }
            match rows.next_element_seed(Row(self))? {
                Some(sequence) => self.sequences.push(sequence),
                None => return Ok(()),
            }
        }
    }
}

/// One list.
struct Row<'a>(&'a mut Lists);

impl<'de> DeserializeSeed<'de> for Row<'_> {
    type Value = Vec<u32>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Vec<u32>, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Row<'_> {
    type Value = Vec<u32>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of token ids")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut ids: A) -> Result<Vec<u32>, A::Error> {
        let mut sequence = Vec::new();
        while let Some(id) = ids.next_element()? {
            self.0.n_ids += 1;
            if self.0.n_ids > MAX_IDS {
                self.0.stop = Some(Stop::TooMany);
                return Err(A::Error::custom("too many ids"));
            }
            sequence.push(id);
        }
        Ok(sequence)
    }
}
