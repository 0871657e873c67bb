//! SHA-256 of files, and of streams as they pass.

use std::fmt;
use std::io::{self, Read, Write};
use std::path::Path;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::json::open_regular;
use crate::{FormatError, Result};

/// A SHA-256 digest; lower-case hex in text and JSON.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sha(pub [u8; 32]);

impl Sha {
    /// Digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }
}

impl fmt::Display for Sha {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Sha {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Text that is not 64 lower-case hex digits.
#[derive(Debug, thiserror::Error)]
#[error("not a SHA-256 digest: expected 64 lower-case hex digits")]
pub struct NotASha;

impl FromStr for Sha {
    type Err = NotASha;

    fn from_str(text: &str) -> Result<Self, NotASha> {
        let digit = |c: u8| match c {
            b'0'..=b'9' => Ok(c - b'0'),
            b'a'..=b'f' => Ok(c - b'a' + 10),
            _ => Err(NotASha),
        };
        let hex: &[u8; 64] = text.as_bytes().try_into().map_err(|_| NotASha)?;
        let mut out = [0; 32];
        for (byte, pair) in out.iter_mut().zip(hex.chunks_exact(2)) {
            *byte = digit(pair[0])? << 4 | digit(pair[1])?;
        }
        Ok(Self(out))
    }
}

impl Serialize for Sha {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Sha {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl schemars::JsonSchema for Sha {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Sha256".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": "string", "pattern": "^[0-9a-f]{64}$" })
    }
}

/// SHA-256 of a sequence of token ids: its length as little-endian u64, then its ids as little-endian u32.
pub fn sequence_hash(ids: &[u32]) -> Sha {
    let mut bytes = Vec::with_capacity(8 + 4 * ids.len());
    bytes.extend_from_slice(&(ids.len() as u64).to_le_bytes());
    ids.iter().for_each(|id| bytes.extend_from_slice(&id.to_le_bytes()));
    Sha::of(&bytes)
}

/// SHA-256 of the digests of sequences, in order: merged statistics, which know no token ids, can state it too.
pub fn tokens_hash(sequence_hashes: &[Sha]) -> Sha {
    Sha::of(&sequence_hashes.iter().flat_map(|sha| sha.0).collect::<Vec<u8>>())
}

/// Bytes per read when a file is hashed.
const BLOCK: usize = 1 << 20;

/// Digest and length in bytes of a file.
///
/// # Errors
/// [`FormatError::Io`] when it cannot be read, or is no regular file.
pub fn hash_file(path: &Path) -> Result<(Sha, u64)> {
    let mut file = open_regular(path)?;
    let mut hasher = Sha256::new();
    let mut block = vec![0; BLOCK];
    let mut n_bytes = 0;
    loop {
        let n = file.read(&mut block).map_err(|e| FormatError::io(path, "read", e))?;
        if n == 0 {
            return Ok((Sha(hasher.finalize().into()), n_bytes));
        }
        hasher.update(&block[..n]);
        n_bytes += n as u64;
    }
}

/// A writer that hashes what passes through.
pub struct HashingWriter<W> {
    inner: W,
    hasher: Sha256,
    n_bytes: u64,
}

impl<W: Write> HashingWriter<W> {
    /// Wraps `inner`.
    pub fn new(inner: W) -> Self {
        Self { inner, hasher: Sha256::new(), n_bytes: 0 }
    }

    /// The inner writer, the digest of everything written, and its length in bytes.
    pub fn finish(self) -> (W, Sha, u64) {
        (self.inner, Sha(self.hasher.finalize().into()), self.n_bytes)
    }
}

impl<W: Write> Write for HashingWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.inner.write(bytes)?;
        self.hasher.update(&bytes[..n]);
        self.n_bytes += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_of_abc_is_the_published_one() {
        let hex = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(Sha::of(b"abc").to_string(), hex);
        assert_eq!(hex.parse::<Sha>().expect("valid"), Sha::of(b"abc"));
    }

    /// Opening a pipe would wait for somebody who writes.
    #[cfg(unix)]
    #[test]
    fn a_pipe_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let pipe = folder.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs");
        assert!(made.success());
        let error = hash_file(&pipe).expect_err("no file").to_string();
        assert!(error.ends_with("not a regular file"), "{error}");
    }

    #[test]
    fn bad_hex_is_refused() {
        let long = "a".repeat(65);
        let upper = "A".repeat(64);
        for text in ["", "abc", &long, &upper, &"é".repeat(32)] {
            assert!(text.parse::<Sha>().is_err(), "{text}");
        }
    }

    #[test]
    fn sequences_are_told_apart_by_ids_cuts_and_order() {
        // Python: hashlib.sha256(struct.pack("<QII", 2, 1, 258)).hexdigest()
        let expected = "63666746b40cd3ee26094b3a844429e90b5a9837926e063100575aed05d44e7e";
        assert_eq!(sequence_hash(&[1, 258]).to_string(), expected);
        assert_ne!(sequence_hash(&[]), sequence_hash(&[0]));
        let (a, b) = (sequence_hash(&[1, 2]), sequence_hash(&[3]));
        assert_ne!(tokens_hash(&[a, b]), tokens_hash(&[b, a]));
        assert_ne!(tokens_hash(&[]), tokens_hash(&[a]));
    }

    #[test]
    fn writer_hashes_what_it_passes_on() {
        let mut writer = HashingWriter::new(Vec::new());
        writer.write_all(b"a").expect("a Vec takes all");
        writer.write_all(b"bc").expect("a Vec takes all");
        assert_eq!(writer.finish(), (b"abc".to_vec(), Sha::of(b"abc"), 3));
    }
}
