//! The transforms file: `layers.{i}.key` and `layers.{i}.value`, f64 `[n_kv, d, d]`, column convention
//! (the cache holds `T_K k` and `T_V v`).

use std::collections::BTreeMap;
use std::path::Path;

use crate::hash::Sha;
use crate::layers::{
    check_finite, check_format, check_same_heads, format_metadata, head_shape, layer_ids, parse_meta, tensor_name,
};
use crate::tensor_file::{NewTensor, TensorFile, write_tensor_file};
use crate::{FormatError, Result};

/// Version of the transforms file's layout.
pub const TRANSFORMS_VERSION: u32 = 1;
/// `format` in its metadata.
const FORMAT: &str = "wush-transforms";
/// Metadata entries besides format and version.
const METADATA: [&str; 8] =
    ["calibration", "damping", "model_hash", "preset", "report", "seed", "stats_hash", "transform"];
/// What a layer has.
const ROLES: [&str; 2] = ["key", "value"];

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
    /// Preset that chose the method: "default" or "paper".
    pub preset: String,
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
    /// `Io`, `Invalid`, `Version`, `MissingTensor`, `WrongTensor`.
    pub fn load(path: &Path) -> Result<Self> {
        Self::from_file(&TensorFile::open(path)?)
    }

    /// The same on an open file.
    ///
    /// # Errors
    /// `Invalid`, `Version`, `MissingTensor`, `WrongTensor`.
    pub fn from_file(file: &TensorFile) -> Result<Self> {
        check_format(file, FORMAT, TRANSFORMS_VERSION, &METADATA)?;
        let mut layers = BTreeMap::new();
        for layer in layer_ids(file, FORMAT, &ROLES)? {
            let transforms = LayerTransforms { key: read(file, layer, "key")?, value: read(file, layer, "value")? };
            check_same_heads(file.path(), layer, transforms.key.n_heads, transforms.value.n_heads)?;
            layers.insert(layer, transforms);
        }
        Ok(Self {
            layers,
            model_hash: parse_meta(file, FORMAT, "model_hash")?,
            transform: file.meta("transform")?.to_owned(),
            preset: file.meta("preset")?.to_owned(),
            damping: check_damping(file.path(), parse_meta(file, FORMAT, "damping")?)?,
            seed: parse_meta(file, FORMAT, "seed")?,
            stats_hash: optional(file, "stats_hash", |key| parse_meta(file, FORMAT, key))?,
            calibration: optional(file, "calibration", |key| json_meta(file, key))?,
            report: json_meta(file, "report")?,
        })
    }

    /// Writes it, atomically and with the same bytes for the same content.
    ///
    /// # Errors
    /// `Io`, `Busy`; `Invalid` for a number that is not finite, `WrongTensor` for data that is not `[n_heads, dim, dim]`:
    /// what `load` would refuse is not written.
    pub fn save(&self, path: &Path) -> Result<(Sha, u64)> {
        let mut tensors = BTreeMap::new();
        for (&layer, transforms) in &self.layers {
            check_same_heads(path, layer, transforms.key.n_heads, transforms.value.n_heads)?;
            for (role, matrices) in [("key", &transforms.key), ("value", &transforms.value)] {
                let name = tensor_name(layer, role);
                check_finite(path, &name, matrices.dim, matrices.data.iter().copied())?;
                tensors.insert(name, NewTensor::f64(&[matrices.n_heads, matrices.dim, matrices.dim], &matrices.data));
            }
        }
        write_tensor_file(path, &tensors, &self.metadata(path)?)
    }

    fn metadata(&self, path: &Path) -> Result<BTreeMap<String, String>> {
        let mut metadata = format_metadata(FORMAT, TRANSFORMS_VERSION);
        let mut put = |key: &str, value: String| metadata.insert(key.to_owned(), value);
        put("model_hash", self.model_hash.to_string());
        put("transform", self.transform.clone());
        put("preset", self.preset.clone());
        // `{}` of a float is the shortest text that reads back to the same bits.
        put("damping", check_damping(path, self.damping)?.to_string());
        put("seed", self.seed.to_string());
        put("report", to_json(path, &self.report)?);
        if let Some(hash) = &self.stats_hash {
            put("stats_hash", hash.to_string());
        }
        if let Some(calibration) = &self.calibration {
            put("calibration", to_json(path, calibration)?);
        }
        Ok(metadata)
    }
}

fn check_damping(path: &Path, damping: f64) -> Result<f64> {
    if damping.is_finite() && damping >= 0.0 {
        return Ok(damping);
    }
    Err(FormatError::invalid(path, FORMAT, format!("damping {damping}, expected a finite number of at least 0")))
}

fn read(file: &TensorFile, layer: usize, role: &str) -> Result<HeadMatrices> {
    let name = tensor_name(layer, role);
    let [n_heads, dim] = head_shape(file, &name)?;
    let data = file.f64(&name, &[n_heads, dim, dim])?;
    check_finite(file.path(), &name, dim, data.iter().copied())?;
    Ok(HeadMatrices { n_heads, dim, data })
}

fn optional<T>(file: &TensorFile, key: &str, read: impl FnOnce(&str) -> Result<T>) -> Result<Option<T>> {
    file.metadata().contains_key(key).then(|| read(key)).transpose()
}

fn json_meta<T: serde::de::DeserializeOwned>(file: &TensorFile, key: &str) -> Result<T> {
    serde_json::from_str(file.meta(key)?)
        .map_err(|e| FormatError::invalid(file.path(), FORMAT, format!("metadata entry {key}: {e}")))
}

/// JSON that reads back: JSON has no NaN, and `serde_json` would write it as null.
fn to_json<T: serde::Serialize + serde::de::DeserializeOwned>(path: &Path, value: &T) -> Result<String> {
    let invalid = |e: serde_json::Error| FormatError::invalid(path, FORMAT, format!("a number is not finite: {e}"));
    let text = serde_json::to_string(value).map_err(invalid)?;
    serde_json::from_str::<T>(&text).map_err(invalid)?;
    Ok(text)
}
