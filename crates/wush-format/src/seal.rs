//! The hash that a safetensors file of wush states of its own content: against bits that flipped on a disk or on the way, where
//! no manifest lists the file. Enters: metadata and tensors. Leaves: one metadata entry, or a refusal. Who changes a file on
//! purpose can hash it again.

use std::collections::BTreeMap;

use crate::hash::Sha;
use crate::json::shown;
use crate::layers::{FORMAT_KEY, VERSION_KEY};
use crate::tensor_file::{NewTensor, TensorFile};
use crate::{FormatError, Result};

/// Metadata key of the hash.
pub const CONTENT_HASH: &str = "content_hash";

/// SHA-256 over one line an entry, in the order given: name, NUL, the SHA-256 of its bytes in lower-case hex, LF.
pub fn content_hash<'a>(entries: impl Iterator<Item = (&'a str, &'a [u8])>) -> Sha {
    let lines: String = entries.map(|(name, bytes)| format!("{name}\0{}\n", Sha::of(bytes))).collect();
    Sha::of(lines.as_bytes())
}

/// Adds the hash over `tensors` and `metadata` to the latter: see [`check_seal`].
pub fn seal(tensors: &BTreeMap<String, NewTensor>, metadata: &mut BTreeMap<String, String>) {
    let of_tensors = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor.bytes.as_slice()));
    let hash = content_hash(hashed(metadata).chain(of_tensors)).to_string();
    metadata.insert(CONTENT_HASH.to_owned(), hash);
}

/// Refuses a file of which a byte of the metadata or of a tensor is not the one written. Hashed are all metadata entries but
/// `format`, `version` (which a reader compares) and the hash itself, then the tensors, each sorted by name.
///
/// # Errors
/// `Invalid`.
pub fn check_seal(file: &TensorFile, kind: &'static str) -> Result<()> {
    let stated = file.meta(CONTENT_HASH)?;
    let tensors = file.tensors().iter().map(|(name, info)| (name.as_str(), &file.bytes()[info.range.clone()]));
    let found = content_hash(hashed(file.metadata()).chain(tensors)).to_string();
    if stated == found {
        return Ok(());
    }
    let detail = format!("its content is not what was written: {CONTENT_HASH} is {}, found {found}", shown(stated));
    Err(FormatError::invalid(file.path(), kind, detail))
}

fn hashed(metadata: &BTreeMap<String, String>) -> impl Iterator<Item = (&str, &[u8])> {
    let is_hashed = |key: &str| ![FORMAT_KEY, VERSION_KEY, CONTENT_HASH].contains(&key);
    metadata.iter().filter(move |(key, _)| is_hashed(key)).map(|(key, text)| (key.as_str(), text.as_bytes()))
}
