//! `model.safetensors.index.json`: which shard holds which tensor, read as hostile input.
//!
//! Leaves a map whose every shard is the plain name of a `.safetensors` file. Whether the shards exist and hold what the
//! index says is `wush_checkpoint`'s check.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use crate::json::{Object, UniqueMap, read_bounded, shown};
use crate::manifest::is_inside;
use crate::{FormatError, Result};

/// Longest index, in bytes: as long as a safetensors header may be.
pub const MAX_INDEX_BYTES: u64 = 100_000_000;
/// What messages call the file.
pub(crate) const KIND: &str = "index";

/// Tensor name to the file name of its shard.
pub type WeightMap = BTreeMap<String, String>;

/// The key that is read; others, such as `metadata.total_size`, decide nothing.
#[derive(Deserialize)]
struct Index {
    weight_map: UniqueMap<String>,
}

/// Reads and checks an index.
///
/// # Errors
/// `Io`; `Invalid` when it is too long, not an index, names a tensor twice, names none, or names a shard that is not a
/// plain `.safetensors` file name (a path that leaves the directory, for one).
pub fn load_index(path: &Path) -> Result<WeightMap> {
    parse_index(path, &read_bounded(path, KIND, MAX_INDEX_BYTES)?)
}

/// The same on text that is in memory already; `path` is what messages call it.
///
/// # Errors
/// `Invalid`.
pub fn parse_index(path: &Path, json: &[u8]) -> Result<WeightMap> {
    let Object::<Index>(index) =
        serde_json::from_slice(json).map_err(|e| FormatError::invalid(path, KIND, e.to_string()))?;
    let map = index.weight_map.0;
    if map.is_empty() {
        return Err(FormatError::invalid(path, KIND, "weight_map names no tensor"));
    }
    for (tensor, shard) in &map {
        if !is_shard_name(shard) {
            let reason = if is_inside(shard) { "" } else { ", which leads out of the directory" };
            let expected = "expected the plain name of a .safetensors file";
            let detail = format!("tensor {}: {expected}, found {}{reason}", shown(tensor), shown(shard));
            return Err(FormatError::invalid(path, KIND, detail));
        }
    }
    Ok(map)
}

fn is_shard_name(name: &str) -> bool {
    is_inside(name) && !name.contains('/') && name.ends_with(".safetensors")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<WeightMap> {
        parse_index(Path::new("index.json"), json.as_bytes())
    }

    #[test]
    fn an_index_of_the_usual_kind_is_read() {
        let map =
            parse(r#"{"metadata":{"total_size":9e9},"weight_map":{"b":"m-2.safetensors","a":"m-1.safetensors"}}"#);
        let expected = [("a", "m-1.safetensors"), ("b", "m-2.safetensors")];
        assert_eq!(map.expect("valid"), expected.map(|(k, v)| (k.to_owned(), v.to_owned())).into());
    }

    #[test]
    fn every_defect_is_refused_with_its_reason() {
        let cases = [
            ("", "EOF"),
            (r#"[{"a":"x.safetensors"}]"#, "expected an object"),
            ("{}", "missing field `weight_map`"),
            (r#"{"weight_map":{}}"#, "names no tensor"),
            (r#"{"weight_map":{"a":1}}"#, "expected a string"),
            (r#"{"weight_map":{"a":"x.safetensors","a":"x.safetensors"}}"#, "key \"a\" appears twice"),
            (r#"{"weight_map":{},"weight_map":{}}"#, "duplicate field `weight_map`"),
            (r#"{"weight_map":{"a":"../x.safetensors"}}"#, "which leads out of the directory"),
            (r#"{"weight_map":{"a":"/etc/x.safetensors"}}"#, "which leads out of the directory"),
            (r#"{"weight_map":{"a":"..\\x.safetensors"}}"#, "which leads out of the directory"),
            (r#"{"weight_map":{"a":"b/../../x.safetensors"}}"#, "which leads out of the directory"),
            (
                r#"{"weight_map":{"a":"b/x.safetensors"}}"#,
                "expected the plain name of a .safetensors file, found \"b/x",
            ),
            (r#"{"weight_map":{"a":"x.bin"}}"#, "expected the plain name of a .safetensors file, found \"x.bin\""),
            (r#"{"weight_map":{"a":""}}"#, "expected the plain name"),
        ];
        for (json, expected) in cases {
            let error = parse(json).expect_err(json);
            assert!(error.to_string().contains(expected), "{json}\n expected: {expected}\n found: {error}");
            assert!(error.hint().expect("a remedy").contains("download it again"));
        }
    }
}
