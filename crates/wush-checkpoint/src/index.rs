//! `model.safetensors.index.json`: which shard holds which tensor, read as hostile input.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use wush_format::json::{UniqueMap, read_bounded, shown};

use crate::{CheckpointError, Result};

/// Longest index, in bytes: as long as a safetensors header may be.
pub const MAX_INDEX_BYTES: u64 = 100_000_000;
/// What messages call the file.
const KIND: &str = "index";

/// Tensor name to the file name of its shard.
pub type WeightMap = BTreeMap<String, String>;

/// The keys that are read; others, such as `metadata.total_size`, decide nothing.
#[derive(Deserialize)]
struct Index {
    weight_map: UniqueMap<String>,
}

/// Reads and checks an index.
///
/// # Errors
/// `Format` when it cannot be read or is not an index; `Escapes` and `Index` for a shard that is not a plain
/// `.safetensors` file name.
pub fn load_index(path: &Path) -> Result<WeightMap> {
    parse_index(path, &read_bounded(path, KIND, MAX_INDEX_BYTES)?)
}

/// The same on text that is in memory already; `path` is what messages call it.
///
/// # Errors
/// As [`load_index`].
pub fn parse_index(path: &Path, json: &[u8]) -> Result<WeightMap> {
    let index: Index = serde_json::from_slice(json).map_err(|e| wush_format::FormatError::Invalid {
        path: path.to_owned(),
        kind: KIND,
        detail: e.to_string(),
    })?;
    let map = index.weight_map.0;
    let refuse = |detail: String| CheckpointError::Index { path: path.to_owned(), detail };
    if map.is_empty() {
        return Err(refuse("weight_map names no tensor".to_owned()));
    }
    for (tensor, shard) in &map {
        if !stays_inside(shard) {
            return Err(CheckpointError::Escapes { path: path.to_owned(), entry: shown(shard) });
        }
        if shard.contains('/') || !shard.ends_with(".safetensors") {
            let expected = "expected the plain name of a .safetensors file";
            return Err(refuse(format!("tensor {}: {expected}, found {}", shown(tensor), shown(shard))));
        }
    }
    Ok(map)
}

/// Backslashes count as separators: the name must mean the same on every system.
fn stays_inside(name: &str) -> bool {
    wush_format::manifest::is_inside(name)
}
