//! The shards' index: of what it says beside the map, `metadata.total_size`, which loaders show and some trust.

use std::path::Path;

use serde_json::Value;
use wush_checkpoint::Checkpoint;
use wush_format::index::MAX_INDEX_BYTES;
use wush_format::json::read_bounded;
use wush_format::manifest::Manifest;

/// The index's file name.
const INDEX: &str = "model.safetensors.index.json";

/// Whether a file is the shards' index.
pub(crate) fn is_index(path: &str) -> bool {
    path == INDEX
}

/// `metadata.total_size` against the shards. A wrong number may be the source's own: of an unchanged copy it passes, and of one
/// that a wider fold moved only the base can tell.
pub(crate) fn check_total(checkpoint: &Checkpoint, manifest: Option<&Manifest>) -> Option<Result<String, String>> {
    let index = parse(&checkpoint.dir().join(INDEX))?;
    let (stated, found) = (total_size(&index)?, checkpoint.n_weight_bytes());
    if stated == found {
        return Some(Ok(format!("total_size {stated}, as the shards")));
    }
    let detail = format!("total_size {stated}, the tensors have {found} bytes");
    let entry = |files: &[wush_format::manifest::FileEntry]| files.iter().find(|file| is_index(&file.path)).cloned();
    let entries = manifest.and_then(|manifest| Some((entry(&manifest.source.files)?, entry(&manifest.files)?)));
    match entries {
        Some((old, new)) if old == new => Some(Ok(format!("{detail}, as in the source"))),
        Some((_, _)) if manifest.is_some_and(|manifest| manifest.fold.dtype == "f32") => {
            Some(Ok(format!("{detail}; the base tells whether the source's was wrong")))
        }
        _ => Some(Err(detail)),
    }
}

/// Whether two indexes say the same, the first one's `total_size` being larger by `growth` bytes.
pub(crate) fn same_but_grown(new: &Path, old: &Path, growth: i128) -> bool {
    let (Some(mut new), Some(mut old)) = (parse(new), parse(old)) else { return false };
    let total = |index: &Value| total_size(index).map(i128::from);
    let grown = match (total(&new), total(&old)) {
        (Some(new), Some(old)) => new - old == growth,
        _ => false,
    };
    for index in [&mut new, &mut old] {
        if let Some(metadata) = index.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.remove("total_size");
        }
    }
    grown && new == old
}

fn parse(path: &Path) -> Option<Value> {
    serde_json::from_slice(&read_bounded(path, "index", MAX_INDEX_BYTES).ok()?).ok()
}

fn total_size(index: &Value) -> Option<u64> {
    index.pointer("/metadata/total_size")?.as_u64()
}
