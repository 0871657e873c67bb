//! The bundle's layout and its sidecars: `wush/manifest.json`, `wush/key_transforms.safetensors` (f32
//! `layers.{i}.key` = T_K and `layers.{i}.query` = T_K^{-T}), `wush/value_transforms.safetensors` (f32
//! `layers.{i}.value` = T_V).

use std::collections::BTreeMap;
use std::path::Path;

use crate::hash::Sha;
use crate::Result;

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
    /// `Io`, `Invalid`, `MissingTensor`, `WrongTensor`.
    pub fn load(path: &Path) -> Result<Self> {
        todo!("{}", path.display())
    }
    /// Writes it.
    ///
    /// # Errors
    /// `Io`.
    pub fn save(&self, path: &Path) -> Result<(Sha, u64)> {
        todo!("{}", path.display())
    }
}

impl ValueSidecar {
    /// Reads a value sidecar: version, shapes, finiteness.
    ///
    /// # Errors
    /// `Io`, `Invalid`, `MissingTensor`, `WrongTensor`.
    pub fn load(path: &Path) -> Result<Self> {
        todo!("{}", path.display())
    }
    /// Writes it.
    ///
    /// # Errors
    /// `Io`.
    pub fn save(&self, path: &Path) -> Result<(Sha, u64)> {
        todo!("{}", path.display())
    }
}
