//! The header of a safetensors file: read as hostile input, written deterministically.
//!
//! Layout: a little-endian u64 length N, N bytes of JSON, then the tensors' bytes. Every offset in the JSON counts
//! from the first byte after the header.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use safetensors::Dtype;
use serde::Deserialize;
use serde::de::value::{Error as ValueError, StrDeserializer};
use serde::de::{Deserializer, Error as _, IntoDeserializer, MapAccess, SeqAccess, Visitor};

use super::TensorInfo;
use crate::json::{Object, UniqueMap, shown};
use crate::{FormatError, Result};

/// Longest JSON header, in bytes: the limit of the safetensors format.
pub const MAX_HEADER_BYTES: usize = 100_000_000;
/// Most dimensions of a tensor; NumPy's limit.
pub const MAX_RANK: usize = 64;
/// The data section of a written file starts at a multiple of this, so that every element is aligned in the map.
const ALIGNMENT: usize = 8;
/// Bytes of the length before the JSON.
const LENGTH_BYTES: usize = 8;
/// The reserved name.
const METADATA: &str = "__metadata__";
/// What messages call the file.
pub(super) const KIND: &str = "safetensors";

/// A checked header.
#[derive(Debug)]
pub(super) struct Header {
    pub tensors: BTreeMap<String, TensorInfo>,
    pub metadata: BTreeMap<String, String>,
    pub data_start: usize,
}

/// Parses and checks the header of the file whose bytes are `bytes`; `path` is for messages.
pub(super) fn parse(path: &Path, bytes: &[u8]) -> Result<Header> {
    let invalid = |detail: String| FormatError::invalid(path, KIND, detail);
    let json = header_json(bytes).map_err(invalid)?;
    let raw: RawHeader = serde_json::from_slice(json).map_err(|e| invalid(format!("header: {e}")))?;
    let data_start = LENGTH_BYTES + json.len();
    let mut tensors = BTreeMap::new();
    for (name, tensor) in raw.tensors {
        let info = check_tensor(&tensor, data_start, bytes.len())
            .map_err(|detail| invalid(format!("tensor {}: {detail}", shown(&name))))?;
        tensors.insert(name, info);
    }
    check_tiling(&tensors, data_start, bytes.len()).map_err(invalid)?;
    Ok(Header { tensors, metadata: raw.metadata.unwrap_or_default(), data_start })
}

/// The JSON text, its length checked against the file and the cap.
fn header_json(bytes: &[u8]) -> Result<&[u8], String> {
    let Some((length, rest)) = bytes.split_first_chunk::<LENGTH_BYTES>() else {
        return Err(format!("expected at least {LENGTH_BYTES} bytes, found {}", bytes.len()));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES as u64 {
        return Err(format!("header of {length} bytes, at most {MAX_HEADER_BYTES} are allowed"));
    }
    let json = rest
        .get(..length as usize)
        .ok_or_else(|| format!("header of {length} bytes, but only {} follow its length", rest.len()))?;
    // The format demands it; it also keeps other readers from seeing something else.
    if json.first() != Some(&b'{') {
        return Err("the header does not begin with {".to_owned());
    }
    Ok(json)
}

/// One tensor on its own: dtype, size in checked arithmetic, range inside the data section.
fn check_tensor(raw: &RawTensor, data_start: usize, n_bytes: usize) -> Result<TensorInfo, String> {
    let deserializer: StrDeserializer<'_, ValueError> = raw.dtype.as_str().into_deserializer();
    let dtype = Dtype::deserialize(deserializer).map_err(|_| format!("unknown dtype {}", shown(&raw.dtype)))?;
    let size = byte_len(dtype, &raw.shape)
        .ok_or_else(|| format!("{dtype} {:?} is not a whole number of bytes that fits memory", raw.shape))?;
    let [begin, end] = raw.data_offsets;
    let data_len = n_bytes - data_start;
    if begin > end || end > data_len {
        return Err(format!("data offsets [{begin}, {end}] in a data section of {data_len} bytes"));
    }
    if end - begin != size {
        return Err(format!("{dtype} {:?} needs {size} bytes, its offsets span {}", raw.shape, end - begin));
    }
    Ok(TensorInfo { dtype, shape: raw.shape.clone(), range: data_start + begin..data_start + end })
}

/// Bytes of `shape` elements of `dtype`; none when that overflows or is not whole.
pub(super) fn byte_len(dtype: Dtype, shape: &[usize]) -> Option<usize> {
    let elements = shape.iter().try_fold(1_usize, |product, &axis| product.checked_mul(axis))?;
    let bits = elements.checked_mul(dtype.bitsize())?;
    (bits % 8 == 0).then_some(bits / 8)
}

/// The ranges tile the data section: no gap, no overlap, nothing behind the last.
fn check_tiling(tensors: &BTreeMap<String, TensorInfo>, data_start: usize, n_bytes: usize) -> Result<(), String> {
    let mut by_place: Vec<_> = tensors.iter().collect();
    by_place.sort_by_key(|(_, info)| (info.range.start, info.range.end));
    let mut cursor = data_start;
    for (name, info) in by_place {
        if info.range.start != cursor {
            let what = if info.range.start < cursor { "overlaps the tensor before it" } else { "follows a gap" };
            let (found, expected) = (info.range.start - data_start, cursor - data_start);
            return Err(format!("tensor {} {what}: begins at {found}, expected {expected}", shown(name)));
        }
        cursor = info.range.end;
    }
    if cursor != n_bytes {
        return Err(format!("{} bytes after the last tensor", n_bytes - cursor));
    }
    Ok(())
}

/// The header as JSON has it, keys unique.
struct RawHeader {
    tensors: BTreeMap<String, RawTensor>,
    metadata: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTensor {
    dtype: String,
    #[serde(deserialize_with = "bounded_shape")]
    shape: Vec<usize>,
    data_offsets: [usize; 2],
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = RawHeader;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<RawHeader, A::Error> {
        let mut header = RawHeader { tensors: BTreeMap::new(), metadata: None };
        while let Some(name) = access.next_key::<String>()? {
            let fresh = if name == METADATA {
                header.metadata.replace(access.next_value::<UniqueMap<String>>()?.0).is_none()
            } else {
                // The check comes first: `shown` must still have the name when it fails.
                let fresh = !header.tensors.contains_key(&name);
                if fresh {
                    header.tensors.insert(name.clone(), access.next_value::<Object<RawTensor>>()?.0);
                }
                fresh
            };
            if !fresh {
                return Err(A::Error::custom(format_args!("key {} appears twice", shown(&name))));
            }
        }
        Ok(header)
    }
}

fn bounded_shape<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<usize>, D::Error> {
    struct ShapeVisitor;
    impl<'de> Visitor<'de> for ShapeVisitor {
        type Value = Vec<usize>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(f, "a shape of at most {MAX_RANK} dimensions")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Vec<usize>, A::Error> {
            let mut shape = Vec::new();
            while let Some(axis) = access.next_element()? {
                if shape.len() == MAX_RANK {
                    return Err(A::Error::invalid_length(MAX_RANK + 1, &self));
                }
                shape.push(axis);
            }
            Ok(shape)
        }
    }
    deserializer.deserialize_seq(ShapeVisitor)
}

/// One tensor of a header to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeaderEntry<'a> {
    /// The tensor's name.
    pub name: &'a str,
    /// Element type.
    pub dtype: Dtype,
    /// Row-major shape.
    pub shape: &'a [usize],
}

/// The bytes before the data section (length and JSON) of a file that holds `entries` in this order, without gaps.
/// Padded with spaces so that the data section starts at a multiple of 8. `path` is for messages.
///
/// # Errors
/// `Invalid` for a reserved or repeated name, a size that overflows, or a header beyond [`MAX_HEADER_BYTES`].
pub fn encode_header(path: &Path, entries: &[HeaderEntry<'_>], metadata: &BTreeMap<String, String>) -> Result<Vec<u8>> {
    let invalid = |detail: String| FormatError::invalid(path, KIND, detail);
    let mut fields = Vec::with_capacity(entries.len() + 1);
    if !metadata.is_empty() {
        fields.push(format!("{}:{}", quoted(METADATA), serde_json::json!(metadata)));
    }
    let mut names = std::collections::BTreeSet::from([METADATA]);
    let mut begin = 0_usize;
    for entry in entries {
        if !names.insert(entry.name) {
            return Err(invalid(format!("tensor name {} is reserved or used twice", shown(entry.name))));
        }
        let end = byte_len(entry.dtype, entry.shape)
            .and_then(|size| begin.checked_add(size))
            .ok_or_else(|| invalid(format!("tensor {}: its size overflows", shown(entry.name))))?;
        fields.push(encode_entry(entry, begin, end));
        begin = end;
    }
    let mut json = format!("{{{}}}", fields.join(","));
    let padded = (LENGTH_BYTES + json.len()).next_multiple_of(ALIGNMENT) - LENGTH_BYTES;
    json.extend(std::iter::repeat_n(' ', padded - json.len()));
    if json.len() > MAX_HEADER_BYTES {
        return Err(invalid(format!("header of {} bytes, at most {MAX_HEADER_BYTES} are allowed", json.len())));
    }
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    Ok(bytes)
}

fn encode_entry(entry: &HeaderEntry<'_>, begin: usize, end: usize) -> String {
    let mut text = quoted(entry.name);
    let shape = entry.shape.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    write!(text, r#":{{"dtype":"{}","shape":[{shape}],"data_offsets":[{begin},{end}]}}"#, entry.dtype)
        .expect("a String takes all");
    text
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
