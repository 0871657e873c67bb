//! The transforms file: `layers.{i}.key` and `layers.{i}.value`, f64 `[n_kv, d, d]`, column convention
//! (the cache holds `T_K k` and `T_V v`).

use std::collections::BTreeMap;
use std::path::Path;

use crate::hash::Sha;
use crate::Result;

/// Square matrices, one a head: `[n_heads, dim, dim]`, row-major f64.
#[derive(Debug, Clone, PartialEq)]
pub struct HeadMatrices {
    /// Number of heads.
    pub n_heads: usize,
    /// Head dimension d.
    pub dim: usize,
    /// `n_heads * dim * dim` values.
    pub data: Vec<f64>,
}

impl HeadMatrices {
    /// All zeros.
    pub fn zeros(n_heads: usize, dim: usize) -> Self {
        Self { n_heads, dim, data: vec![0.0; n_heads * dim * dim] }
    }

    /// One head's matrix, row-major `[dim, dim]`.
    pub fn head(&self, head: usize) -> &[f64] {
        &self.data[head * self.dim * self.dim..][..self.dim * self.dim]
    }

    /// One head's matrix, to be written.
    pub fn head_mut(&mut self, head: usize) -> &mut [f64] {
        &mut self.data[head * self.dim * self.dim..][..self.dim * self.dim]
    }
}

/// Transforms of one attention layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerTransforms {
    /// `T_K`, one a KV head.
    pub key: HeadMatrices,
    /// `T_V`, one a KV head.
    pub value: HeadMatrices,
}

/// All transforms of a model, by global layer id, with what they were made from.
#[derive(Debug, Clone, PartialEq)]
pub struct Transforms {
    /// Layer id to transforms.
    pub layers: BTreeMap<usize, LayerTransforms>,
    /// SHA-256 of the model's shards (see `wush_checkpoint::Checkpoint::weights_hash`).
    pub model_hash: Sha,
    /// Name in the transform registry: "wush", "identity", "hadamard", "random".
    pub transform: String,
    /// Damping γ.
    pub damping: f64,
    /// Seed of the random baseline.
    pub seed: u64,
    /// SHA-256 of the statistics file they were solved from; none for transforms that need no statistics.
    pub stats_hash: Option<Sha>,
    /// What the statistics came from (calibration source, tokens, longest sequence), as the manifest states it.
    pub calibration: Option<crate::manifest::Calibration>,
    /// The solver's report, one entry a layer, as the manifest states it.
    pub report: Vec<crate::manifest::LayerReport>,
}

impl Transforms {
    /// Reads and checks a transforms file: shapes, finiteness, format version.
    ///
    /// # Errors
    /// `Io`, `Invalid`, `MissingTensor`, `WrongTensor`.
    pub fn load(path: &Path) -> Result<Self> {
        todo!("{}", path.display())
    }

    /// Writes it, atomically and with the same bytes for the same content.
    ///
    /// # Errors
    /// `Io`.
    pub fn save(&self, path: &Path) -> Result<(Sha, u64)> {
        todo!("{}", path.display())
    }
}
