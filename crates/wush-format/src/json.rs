//! JSON as hostile input: files are read up to a cap, and an object that names a key twice is refused.
//!
//! Two readers of one document must not see two things; `serde_json`'s own maps keep the last of equal keys silently.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::marker::PhantomData;
use std::path::Path;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};

use crate::{FormatError, Result};

/// Longest text of a hostile string that a message repeats, in characters.
const SHOWN_CHARS: usize = 120;

/// Reads a regular file of at most `max_bytes` bytes. `kind` names it in messages.
///
/// # Errors
/// `Io` (also for a pipe, a device or a directory), `Invalid` when it is longer.
pub fn read_bounded(path: &Path, kind: &'static str, max_bytes: u64) -> Result<Vec<u8>> {
    let file = open_regular(path)?;
    let mut bytes = Vec::new();
    let limit = max_bytes.saturating_add(1);
    let n = file.take(limit).read_to_end(&mut bytes).map_err(|e| FormatError::io(path, "read", e))?;
    if n as u64 > max_bytes {
        return Err(FormatError::invalid(path, kind, format!("longer than {max_bytes} bytes")));
    }
    Ok(bytes)
}

/// Opens a regular file: opening a pipe could wait forever, and its length means nothing.
///
/// # Errors
/// `Io`.
pub fn open_regular(path: &Path) -> Result<File> {
    let metadata = std::fs::metadata(path).map_err(|e| FormatError::io(path, "open", e))?;
    if !metadata.is_file() {
        let reason = std::io::Error::new(std::io::ErrorKind::InvalidInput, "not a regular file");
        return Err(FormatError::io(path, "open", reason));
    }
    File::open(path).map_err(|e| FormatError::io(path, "open", e))
}

/// A string of a file, quoted, escaped and cut to a length fit for a message.
pub fn shown(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARS) {
        None => format!("{text:?}"),
        Some((cut, _)) => format!("{:?}… ({} bytes)", &text[..cut], text.len()),
    }
}

/// A JSON object in which no key may appear twice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UniqueMap<V>(pub BTreeMap<String, V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(UniqueVisitor(PhantomData))
    }
}

struct UniqueVisitor<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for UniqueVisitor<V> {
    type Value = UniqueMap<V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
        let mut map = BTreeMap::new();
        while let Some(key) = access.next_key::<String>()? {
            if map.contains_key(&key) {
                return Err(A::Error::custom(format_args!("key {} appears twice", shown(&key))));
            }
            map.insert(key, access.next_value()?);
        }
        Ok(UniqueMap(map))
    }
}

/// A struct that must be written as an object: a derived `Deserialize` would also take the bare list of its fields.
pub(crate) struct Object<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ObjectVisitor(PhantomData))
    }
}

struct ObjectVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectVisitor<T> {
    type Value = Object<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, access: A) -> Result<Self::Value, A::Error> {
        T::deserialize(MapAccessDeserializer::new(access)).map(Object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_keys_are_refused() {
        let twice = serde_json::from_str::<UniqueMap<u32>>(r#"{"a":1,"a":1}"#);
        assert!(twice.expect_err("twice").to_string().contains("key \"a\" appears twice"));
        let once = serde_json::from_str::<UniqueMap<u32>>(r#"{"b":2,"a":1}"#).expect("two keys");
        assert_eq!(once.0.into_iter().collect::<Vec<_>>(), [("a".to_owned(), 1), ("b".to_owned(), 2)]);
    }

    #[test]
    fn a_long_or_special_file_is_refused() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("x.json");
        std::fs::write(&path, b"12345").expect("writes");
        assert_eq!(read_bounded(&path, "test", 5).expect("short enough"), b"12345");
        assert!(matches!(read_bounded(&path, "test", 4), Err(FormatError::Invalid { .. })));
        assert!(matches!(read_bounded(dir.path(), "test", 4), Err(FormatError::Io { .. })));
    }

    #[test]
    fn messages_stay_short() {
        assert_eq!(shown("a\n"), "\"a\\n\"");
        assert!(shown(&"é".repeat(1 << 20)).len() < 1000);
    }
}
