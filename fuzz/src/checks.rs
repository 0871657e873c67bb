//! Reads arbitrary bytes as each kind of file; panics when a promise of the reader is broken. Each function returns
//! whether the bytes were accepted.

use std::collections::BTreeMap;
use std::path::Path;

use wush_format::bundle::{KeySidecar, ValueFeedback, ValueSidecar};
use wush_format::index::parse_index;
use wush_format::manifest::{Manifest, is_inside};
use wush_format::seal::seal;
use wush_format::tensor_file::{HeaderEntry, NewTensor, TensorFile, encode_header};
use wush_format::transforms::Transforms;

/// What messages call the bytes.
const NAME: &str = "input";
/// Ends the header's text in the input of [`sidecar`]: a byte that UTF-8 never holds.
const END_OF_HEADER: u8 = 0xff;

/// An accepted file's tensors tile its data section, and the header written for them reads back as the same.
pub fn safetensors_header(bytes: &[u8]) -> bool {
    let Ok(file) = TensorFile::from_bytes(Path::new(NAME), bytes.to_vec()) else { return false };
    let mut placed: Vec<_> = file.tensors().iter().collect();
    placed.sort_by_key(|(_, info)| (info.range.start, info.range.end));
    let mut data = Vec::new();
    for (name, _) in &placed {
        data.extend_from_slice(file.tensor(name).expect("it is listed").bytes);
    }
    assert_eq!(&file.bytes()[file.header_bytes().len()..], data, "the tensors do not tile the data section");

    let entries: Vec<_> =
        placed.iter().map(|(name, info)| HeaderEntry { name, dtype: info.dtype, shape: &info.shape }).collect();
    let mut again = encode_header(Path::new(NAME), &entries, file.metadata()).expect("what was read can be written");
    again.extend(data);
    let again = TensorFile::from_bytes(Path::new(NAME), again).expect("what was written can be read");
    assert_eq!(again.metadata(), file.metadata());
    assert!(again.tensors().keys().eq(file.tensors().keys()));
    for name in file.tensors().keys() {
        let (old, new) = (file.tensor(name).expect("listed"), again.tensor(name).expect("listed"));
        assert_eq!((old.dtype, old.shape, old.bytes), (new.dtype, new.shape, new.bytes), "{name}");
    }
    true
}

/// An accepted index names plain files only.
pub fn index(bytes: &[u8]) -> bool {
    let Ok(map) = parse_index(Path::new(NAME), bytes) else { return false };
    assert!(!map.is_empty());
    for shard in map.values() {
        assert!(is_inside(shard) && !shard.contains('/') && shard.ends_with(".safetensors"), "{shard}");
    }
    true
}

/// The same file with the hash that its content has: a mutated one would be refused for the hash alone.
fn sealed(file: &TensorFile) -> TensorFile {
    let mut metadata = file.metadata().clone();
    let mut placed: Vec<_> = file.tensors().iter().collect();
    placed.sort_by_key(|(_, info)| (info.range.start, info.range.end));
    let tensor = |name: &String| {
        let view = file.tensor(name).expect("it is listed");
        NewTensor { dtype: view.dtype, shape: view.shape.to_vec(), bytes: view.bytes.to_vec() }
    };
    seal(&file.tensors().keys().map(|name| (name.clone(), tensor(name))).collect(), &mut metadata);
    let entries: Vec<_> =
        placed.iter().map(|(name, info)| HeaderEntry { name, dtype: info.dtype, shape: &info.shape }).collect();
    let mut content = encode_header(Path::new(NAME), &entries, &metadata).expect("what was read can be written");
    content.extend_from_slice(&file.bytes()[file.header_bytes().len()..]);
    TensorFile::from_bytes(Path::new(NAME), content).expect("what was written can be read")
}

/// A file of matrices, read as each of the three kinds. The input is the header's text, the byte 0xff, and the data: the
/// header's length is put in here, so that a mutated text still is a header.
pub fn sidecar(bytes: &[u8]) -> bool {
    let end = bytes.iter().position(|&byte| byte == END_OF_HEADER).unwrap_or(bytes.len());
    let mut content = (end as u64).to_le_bytes().to_vec();
    content.extend_from_slice(&bytes[..end]);
    content.extend_from_slice(bytes.get(end + 1..).unwrap_or_default());
    let Ok(file) = TensorFile::from_bytes(Path::new(NAME), content) else { return false };
    let keys = KeySidecar::from_file(&file);
    let values = ValueSidecar::from_file(&file);
    let transforms = Transforms::from_file(&sealed(&file));
    let feedback = ValueFeedback::from_file(&file);
    let accepted = [keys.is_ok(), values.is_ok(), transforms.is_ok(), feedback.is_ok()];
    let accepted = accepted.iter().filter(|ok| **ok).count();
    assert!(accepted <= 1, "one file is two kinds");
    for layer in keys.iter().flat_map(|keys| keys.layers.values()) {
        let n = layer.n_kv_heads * layer.head_dim * layer.head_dim;
        assert!(n > 0 && layer.key.len() == n && layer.query.len() == n);
        assert!(layer.key.iter().chain(&layer.query).all(|x| x.is_finite()));
        let (feedback, mean) = (layer.key_feedback.as_ref(), layer.key_mean.as_ref());
        assert!(feedback.is_none_or(|data| data.len() == n));
        assert!(mean.is_none_or(|data| data.len() == layer.n_kv_heads * layer.head_dim));
        assert!(feedback.into_iter().chain(mean).flatten().all(|x| x.is_finite()));
    }
    for layer in values.iter().flat_map(|values| values.layers.values()) {
        let n = layer.n_kv_heads * layer.head_dim * layer.head_dim;
        assert!(n > 0 && layer.value.len() == n && layer.value.iter().all(|x| x.is_finite()));
    }
    for layer in feedback.iter().flat_map(|feedback| feedback.layers.values()) {
        let n = layer.n_kv_heads * layer.head_dim * layer.head_dim;
        assert!(n > 0 && layer.value_feedback.len() == n && layer.value_feedback.iter().all(|x| x.is_finite()));
    }
    for layer in transforms.iter().flat_map(|transforms| transforms.layers.values()) {
        assert_eq!(layer.key.n_heads, layer.value.n_heads);
        assert!(layer.key_mean.iter().flatten().all(|x| x.is_finite()));
        let feedback = layer.key_feedback.iter().chain(&layer.value_feedback);
        for matrices in [&layer.key, &layer.value].into_iter().chain(feedback) {
            let n = matrices.n_heads * matrices.dim * matrices.dim;
            assert!(n > 0 && matrices.data.len() == n && matrices.data.iter().all(|x| x.is_finite()));
        }
    }
    accepted == 1
}

/// An accepted manifest is written and read back as itself, and its paths stay inside.
pub fn manifest(bytes: &[u8]) -> bool {
    let Ok(manifest) = Manifest::parse(Path::new(NAME), bytes) else { return false };
    let json = serde_json::to_vec(&manifest).expect("what was read can be written");
    let again = Manifest::parse(Path::new(NAME), &json).expect("what was written can be read");
    assert_eq!(manifest, again);
    let by_path: BTreeMap<_, _> = manifest.files.iter().map(|file| (&file.path, file)).collect();
    assert_eq!(by_path.len(), manifest.files.len(), "a path twice");
    assert!(by_path.keys().all(|path| is_inside(path)));
    true
}
