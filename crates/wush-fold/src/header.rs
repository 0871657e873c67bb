//! Headers and the index, changed as little as possible.
//!
//! Where a tensor changes its dtype, its own `dtype` and every offset behind it change; the order of the keys, the
//! names, the shapes and `__metadata__` stay. In the index only `metadata.total_size` changes, in place: all other
//! bytes are those of the source.

use std::collections::HashMap;
use std::fmt;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use wush_format::tensor_file::TensorFile;

use crate::number::Element;
use crate::plan::TensorPlan;
use crate::{FoldError, Result};

/// The header (8-byte length and JSON) of a shard after folding: the source's own bytes when no dtype changes.
pub(crate) fn rewrite(file_name: &str, file: &TensorFile, changes: &HashMap<&str, &TensorPlan>) -> Result<Vec<u8>> {
    if changes.values().all(|plan| plan.source == plan.target) {
        return Ok(file.header_bytes().to_vec());
    }
    let invalid = |detail: String| FoldError::Header { file: file_name.to_owned(), detail };
    let json = file.header_bytes().get(8..).unwrap_or_default();
    let header: Header = serde_json::from_slice(json).map_err(|error| invalid(error.to_string()))?;
    let lengths = lengths_by_offset(file, changes);
    let mut begin = 0_u64;
    let mut offsets = HashMap::new();
    for (name, n_bytes) in lengths {
        let end = begin.checked_add(n_bytes).ok_or_else(|| invalid("the shard would be too long".to_owned()))?;
        offsets.insert(name, [begin, end]);
        begin = end;
    }
    let text = render(&header, file, changes, &offsets).map_err(|error| invalid(error.to_string()))?;
    // The format wants the data section aligned to 8 bytes; spaces may pad the JSON.
    let padded = text.len().next_multiple_of(8);
    let mut out = (padded as u64).to_le_bytes().to_vec();
    out.extend_from_slice(text.as_bytes());
    out.resize(8 + padded, b' ');
    Ok(out)
}

/// Bytes that the shard grows by.
pub(crate) fn growth(file: &TensorFile, changes: &HashMap<&str, &TensorPlan>) -> i64 {
    let by = |(name, plan): (&&str, &&TensorPlan)| {
        let n = file.tensors().get(*name).map_or(0, |info| info.range.len() / plan.source.n_bytes());
        (n * plan.target.n_bytes()) as i64 - (n * plan.source.n_bytes()) as i64
    };
    changes.iter().map(by).sum()
}

/// Tensor names in the order of the data section, with their lengths after folding.
fn lengths_by_offset<'a>(file: &'a TensorFile, changes: &HashMap<&str, &TensorPlan>) -> Vec<(&'a str, u64)> {
    let mut order: Vec<_> = file.tensors().iter().collect();
    order.sort_by_key(|(name, info)| (info.range.start, info.range.end, *name));
    let length = |(name, info): (&'a String, &wush_format::tensor_file::TensorInfo)| {
        let scale = changes.get(name.as_str()).map_or((1, 1), |plan| (plan.target.n_bytes(), plan.source.n_bytes()));
        (name.as_str(), (info.range.len() / scale.1 * scale.0) as u64)
    };
    order.into_iter().map(length).collect()
}

fn render(
    header: &Header,
    file: &TensorFile,
    changes: &HashMap<&str, &TensorPlan>,
    offsets: &HashMap<&str, [u64; 2]>,
) -> serde_json::Result<String> {
    let mut text = String::from("{");
    for (i, entry) in header.0.iter().enumerate() {
        if i > 0 {
            text.push(',');
        }
        match entry {
            Entry::Metadata(pairs) => {
                let pair = |(key, value): &(String, String)| {
                    Ok(format!("{}:{}", serde_json::to_string(key)?, serde_json::to_string(value)?))
                };
                let pairs = pairs.iter().map(pair).collect::<serde_json::Result<Vec<_>>>()?;
                text.push_str(&format!("\"__metadata__\":{{{}}}", pairs.join(",")));
            }
            Entry::Tensor { name, dtype } => {
                let dtype =
                    changes.get(name.as_str()).map_or(dtype.as_str(), |plan: &&TensorPlan| Element::name(plan.target));
                let shape = file.tensors().get(name).map(|info| info.shape.as_slice()).unwrap_or_default();
                let [begin, end] = offsets.get(name.as_str()).copied().unwrap_or_default();
                text.push_str(&format!(
                    "{}:{{\"dtype\":{},\"shape\":{},\"data_offsets\":[{begin},{end}]}}",
                    serde_json::to_string(name)?,
                    serde_json::to_string(dtype)?,
                    serde_json::to_string(shape)?,
                ));
            }
        }
    }
    text.push('}');
    Ok(text)
}

/// The entries of a header in the order in which they stand there.
struct Header(Vec<Entry>);

enum Entry {
    Metadata(Vec<(String, String)>),
    Tensor { name: String, dtype: String },
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Header;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a safetensors header")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    entries.push(if name == "__metadata__" {
                        Entry::Metadata(map.next_value::<Pairs>()?.0)
                    } else {
                        Entry::Tensor { name, dtype: map.next_value::<OnlyDtype>()?.dtype }
                    });
                }
                Ok(Header(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

#[derive(serde::Deserialize)]
struct OnlyDtype {
    dtype: String,
    #[serde(flatten)]
    _rest: HashMap<String, IgnoredAny>,
}

/// String pairs in the order in which they stand there.
struct Pairs(Vec<(String, String)>);

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PairList;
        impl<'de> Visitor<'de> for PairList {
            type Value = Pairs;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of strings")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry::<String, String>()? {
                    pairs.push(pair);
                }
                Ok(Pairs(pairs))
            }
        }
        deserializer.deserialize_map(PairList)
    }
}

/// The index with `metadata.total_size` moved by `growth` bytes and every other byte as it was. An index without that
/// entry comes back unchanged.
pub(crate) fn rewrite_index(file: &str, text: &[u8], growth: i64) -> Result<Vec<u8>> {
    let invalid = |detail: &str| FoldError::Index { file: file.to_owned(), detail: detail.to_owned() };
    let parse = |bytes: &[u8]| serde_json::from_slice::<serde_json::Value>(bytes).ok();
    let mut expected = parse(text).ok_or_else(|| invalid("the index is not JSON"))?;
    let Some(total) = expected.pointer_mut("/metadata/total_size") else { return Ok(text.to_vec()) };
    let old = total.as_u64().ok_or_else(|| invalid("expected a whole number"))?;
    let new = old.checked_add_signed(growth).ok_or_else(|| invalid("it would be negative"))?;
    *total = new.into();
    let (old, new) = (old.to_string(), new.to_string());
    // The key may also occur inside another string: the right place is the one after which the parsed index is right.
    let key = b"\"total_size\"";
    let starts = text.windows(key.len()).enumerate().filter(|(_, window)| window == key).map(|(at, _)| at + key.len());
    for start in starts {
        let digits = start + text[start..].iter().take_while(|c| c.is_ascii_whitespace() || **c == b':').count();
        if text[digits..].starts_with(old.as_bytes()) {
            let changed = [&text[..digits], new.as_bytes(), &text[digits + old.len()..]].concat();
            if parse(&changed).as_ref() == Some(&expected) {
                return Ok(changed);
            }
        }
    }
    Err(invalid("not found where it must be"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_total_changes_in_the_index() {
        let text = b"{ \"weight_map\": {\"a.\\\"total_size\": \"x\"},\n  \"metadata\" : {\"total_size\" :\t100, \"z\": 1.50 } }\n";
        let changed = rewrite_index("index", text, 28).expect("it has a total");
        let expected = String::from_utf8(text.to_vec()).expect("ASCII").replace("100", "128");
        assert_eq!(String::from_utf8(changed).expect("ASCII"), expected);
    }

    #[test]
    fn an_index_without_a_total_stays_and_a_strange_one_is_refused() {
        let text = b"{\"weight_map\": {}}";
        assert_eq!(rewrite_index("index", text, 5).expect("nothing to change"), text);
        assert!(rewrite_index("index", b"{\"metadata\":{\"total_size\":\"12\"}}", 5).is_err());
        assert!(rewrite_index("index", b"{\"metadata\":{\"total_size\":3}}", -5).is_err());
        assert!(rewrite_index("index", b"{\"metadata\":", 5).is_err());
    }
}
