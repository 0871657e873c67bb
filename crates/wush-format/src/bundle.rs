//! The bundle's layout and its sidecars: `wush/manifest.json`, `wush/key_transforms.safetensors` (f32
//! `layers.{i}.key` = T_K and `layers.{i}.query` = T_K^{-T}), `wush/value_transforms.safetensors` (f32
//! `layers.{i}.value` = T_V).

use std::collections::BTreeMap;
use std::path::Path;

use crate::Result;
use crate::hash::Sha;
use crate::layers::{check_finite, check_format, format_metadata, head_shape, layer_ids, parse_meta, tensor_name};
use crate::tensor_file::{NewTensor, TensorFile, write_tensor_file};

/// The folder inside a bundle.
pub const WUSH_DIR: &str = "wush";
/// The manifest's file name inside [`WUSH_DIR`].
pub const MANIFEST: &str = "manifest.json";
/// The key sidecar's file name inside [`WUSH_DIR`].
pub const KEY_TRANSFORMS: &str = "key_transforms.safetensors";
/// The value sidecar's file name inside [`WUSH_DIR`].
pub const VALUE_TRANSFORMS: &str = "value_transforms.safetensors";
/// The model card's file name inside [`WUSH_DIR`].
pub const CARD: &str = "README.md";
/// Version of the sidecars' layout.
pub const SIDECAR_VERSION: u32 = 1;
/// `format` in the key sidecar's metadata.
const KEY_FORMAT: &str = "wush-key-transforms";
/// `format` in the value sidecar's metadata.
const VALUE_FORMAT: &str = "wush-value-transforms";

/// One layer of the key sidecar: `[n_kv, d, d]`, row-major f32.
#[derive(Debug, Clone, PartialEq)]
pub struct KeyLayer {
    /// Number of KV heads.
    pub n_kv_heads: usize,
    /// Head dimension d.
    pub head_dim: usize,
    /// T_K: a new key k is cached as T_K k, after RoPE.
    pub key: Vec<f32>,
    /// T_K^{-T}: a query q becomes T_K^{-T} q, after RoPE.
    pub query: Vec<f32>,
}

/// The key sidecar, by global layer id.
#[derive(Debug, Clone, PartialEq)]
pub struct KeySidecar {
    /// The layers.
    pub layers: BTreeMap<usize, KeyLayer>,
    /// Hash of the folded model's weights that it belongs to.
    pub model_hash: Sha,
}

/// One layer of the value sidecar: `[n_kv, d, d]`, row-major f32.
#[derive(Debug, Clone, PartialEq)]
pub struct ValueLayer {
    /// Number of KV heads.
    pub n_kv_heads: usize,
    /// Head dimension d.
    pub head_dim: usize,
    /// T_V, already folded into the weights; kept for audit and unfolding.
    pub value: Vec<f32>,
}

/// The value sidecar, by global layer id.
#[derive(Debug, Clone, PartialEq)]
pub struct ValueSidecar {
    /// The layers.
    pub layers: BTreeMap<usize, ValueLayer>,
    /// Hash of the folded model's weights that it belongs to.
    pub model_hash: Sha,
}

impl KeySidecar {
    /// Reads a key sidecar: version, shapes, finiteness. Whether `query = key^{-T}` is `inspect`'s and the runtime's check.
    ///
    /// # Errors
    /// `Io`, `Invalid`, `Version`, `MissingTensor`, `WrongTensor`.
    pub fn load(path: &Path) -> Result<Self> {
        Self::from_file(&TensorFile::open(path)?)
    }

    /// The same on an open file.
    ///
    /// # Errors
    /// `Invalid`, `Version`, `MissingTensor`, `WrongTensor`.
    pub fn from_file(file: &TensorFile) -> Result<Self> {
        let read_layer = |layer| {
            let ([n_kv_heads, head_dim], key) = read(file, layer, "key")?;
            let query = file.f32(&tensor_name(layer, "query"), &[n_kv_heads, head_dim, head_dim])?;
            check_finite(file.path(), &tensor_name(layer, "query"), head_dim, query.iter().map(|&x| x.into()))?;
            Ok(KeyLayer { n_kv_heads, head_dim, key, query })
        };
        let (layers, model_hash) = read_sidecar(file, KEY_FORMAT, &["key", "query"], read_layer)?;
        Ok(Self { layers, model_hash })
    }

    /// Writes it, atomically and with the same bytes for the same content.
    ///
    /// # Errors
    /// `Io`, `Busy`; `Invalid` for a number that is not finite, `WrongTensor` for data that is not `[n_kv, d, d]`.
    pub fn save(&self, path: &Path) -> Result<(Sha, u64)> {
        let tensors = self.layers.iter().flat_map(|(&layer, l)| {
            [("key", &l.key), ("query", &l.query)].map(|(role, data)| (layer, role, [l.n_kv_heads, l.head_dim], data))
        });
        write_sidecar(path, KEY_FORMAT, self.model_hash, tensors)
    }
}

impl ValueSidecar {
    /// Reads a value sidecar: version, shapes, finiteness.
    ///
    /// # Errors
    /// `Io`, `Invalid`, `Version`, `MissingTensor`, `WrongTensor`.
    pub fn load(path: &Path) -> Result<Self> {
        Self::from_file(&TensorFile::open(path)?)
    }

    /// The same on an open file.
    ///
    /// # Errors
    /// `Invalid`, `Version`, `MissingTensor`, `WrongTensor`.
    pub fn from_file(file: &TensorFile) -> Result<Self> {
        let read_layer = |layer| {
            let ([n_kv_heads, head_dim], value) = read(file, layer, "value")?;
            Ok(ValueLayer { n_kv_heads, head_dim, value })
        };
        let (layers, model_hash) = read_sidecar(file, VALUE_FORMAT, &["value"], read_layer)?;
        Ok(Self { layers, model_hash })
    }

    /// Writes it, atomically and with the same bytes for the same content.
    ///
    /// # Errors
    /// `Io`, `Busy`; `Invalid` for a number that is not finite, `WrongTensor` for data that is not `[n_kv, d, d]`.
    pub fn save(&self, path: &Path) -> Result<(Sha, u64)> {
        let tensors = self.layers.iter().map(|(&layer, l)| (layer, "value", [l.n_kv_heads, l.head_dim], &l.value));
        write_sidecar(path, VALUE_FORMAT, self.model_hash, tensors)
    }
}

fn read_sidecar<L>(
    file: &TensorFile,
    format: &'static str,
    roles: &[&str],
    read_layer: impl Fn(usize) -> Result<L>,
) -> Result<(BTreeMap<usize, L>, Sha)> {
    check_format(file, format, SIDECAR_VERSION, &["model_hash"])?;
    let model_hash = parse_meta(file, format, "model_hash")?;
    let layers = layer_ids(file, format, roles)?.into_iter().map(|layer| Ok((layer, read_layer(layer)?)));
    Ok((layers.collect::<Result<_>>()?, model_hash))
}

/// A finite f32 tensor `[n_kv, d, d]`, with `[n_kv, d]`.
fn read(file: &TensorFile, layer: usize, role: &str) -> Result<([usize; 2], Vec<f32>)> {
    let name = tensor_name(layer, role);
    let [n_kv_heads, head_dim] = head_shape(file, &name)?;
    let data = file.f32(&name, &[n_kv_heads, head_dim, head_dim])?;
    check_finite(file.path(), &name, head_dim, data.iter().map(|&x| x.into()))?;
    Ok(([n_kv_heads, head_dim], data))
}

fn write_sidecar<'a>(
    path: &Path,
    format: &'static str,
    model_hash: Sha,
    layers: impl Iterator<Item = (usize, &'a str, [usize; 2], &'a Vec<f32>)>,
) -> Result<(Sha, u64)> {
    let mut tensors = BTreeMap::new();
    for (layer, role, [n_kv_heads, head_dim], data) in layers {
        let name = tensor_name(layer, role);
        check_finite(path, &name, head_dim, data.iter().map(|&x| x.into()))?;
        tensors.insert(name, NewTensor::f32(&[n_kv_heads, head_dim, head_dim], data));
    }
    let mut metadata = format_metadata(format, SIDECAR_VERSION);
    metadata.insert("model_hash".to_owned(), model_hash.to_string());
    write_tensor_file(path, &tensors, &metadata)
}
