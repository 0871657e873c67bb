//! The transforms file: `layers.{i}.key` and `layers.{i}.value`, f64 `[n_kv, d, d]`, column convention (the cache holds
//! `T_K k` and `T_V v`); where they were asked for, `layers.{i}.key_mean` `[n_kv, d]` (then `T_K (k − μ)`) and the encoder's
//! `layers.{i}.key_feedback`, `layers.{i}.value_feedback` `[n_kv, d, d]`.

use std::collections::BTreeMap;
use std::path::Path;

use crate::hash::Sha;
use crate::layers::{
    Roles, check_finite, check_finite_rows, check_format, check_same_heads, format_metadata, has, head_shape,
    layer_ids, parse_meta, tensor_name,
};
use crate::manifest::{Calibration, LayerReport, Solve};
use crate::seal::{CONTENT_HASH, check_seal, seal};
use crate::sidecars::NEVER;
use crate::tensor_file::{NewTensor, TensorFile, write_tensor_file};
use crate::text::printable;
use crate::{FormatError, Result};

/// Version of the transforms file's layout.
pub const TRANSFORMS_VERSION: u32 = 3;
/// `format` in its metadata.
const FORMAT: &str = "wush-transforms";
/// Metadata entries besides format and version.
const METADATA: [&str; 5] = ["calibration", CONTENT_HASH, "model_hash", "report", "solve"];
/// What a layer has.
const ROLES: Roles = Roles { required: &["key", "value"], optional: &["key_mean", "key_feedback", "value_feedback"] };

/// Largest element of a feedback matrix: L_ij² is at most the condition number of the metric, and beyond a condition of 2⁵² f64
/// factors nothing.
const MAX_FEEDBACK: f64 = (1u64 << 26) as f64;

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
    /// μ `[n_kv, d]`, what is subtracted from every key first; zeros where a head's keys are not centred, and none where no
    /// key is ever to be.
    pub key_mean: Option<Vec<f64>>,
    /// Unit lower triangular factor L of the metric T_K^{-T} H_K T_K^{-1} = L D Lᵀ; none where it was not asked for.
    pub key_feedback: Option<HeadMatrices>,
    /// The same of the values.
    pub value_feedback: Option<HeadMatrices>,
}

impl LayerTransforms {
    /// Transforms alone: keys as they are, no feedback.
    pub fn new(key: HeadMatrices, value: HeadMatrices) -> Self {
        Self { key, value, key_mean: None, key_feedback: None, value_feedback: None }
    }

    /// KV heads whose mean key is not all zero, rising.
    pub fn centered_keys(&self) -> Vec<usize> {
        let Some(means) = &self.key_mean else { return Vec::new() };
        let is_centered = |head: &usize| means.iter().skip(head * self.key.dim).take(self.key.dim).any(|&x| x != 0.0);
        (0..self.key.n_heads).filter(is_centered).collect()
    }

    /// The stacks of matrices by role.
    fn matrices(&self) -> impl Iterator<Item = (&'static str, &HeadMatrices)> {
        let optional = [("key_feedback", &self.key_feedback), ("value_feedback", &self.value_feedback)];
        let optional = optional.into_iter().filter_map(|(role, matrices)| Some((role, matrices.as_ref()?)));
        [("key", &self.key), ("value", &self.value)].into_iter().chain(optional)
    }
}

/// All transforms of a model, by global layer id, with what they were made from.
#[derive(Debug, Clone, PartialEq)]
pub struct Transforms {
    /// Layer id to transforms.
    pub layers: BTreeMap<usize, LayerTransforms>,
    /// SHA-256 of the model's shards (see `wush_format::manifest::weights_hash`).
    pub model_hash: Sha,
    /// How they were solved, as the manifest states it.
    pub solve: Solve,
    /// What the statistics came from (calibration source, tokens, longest sequence), as the manifest states it.
    pub calibration: Option<Calibration>,
    /// The solver's report, one entry a layer, as the manifest states it.
    pub report: Vec<LayerReport>,
}

impl Transforms {
    /// Reads and checks a transforms file: format version, content, shapes, finiteness, feedback that is unit lower triangular, and
    /// that there is what `solve` and `report` say.
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
        check_seal(file, FORMAT)?;
        let mut layers = BTreeMap::new();
        for layer in layer_ids(file, FORMAT, &ROLES)? {
            let transforms = read_layer(file, layer)?;
            check_layer(file.path(), layer, &transforms)?;
            layers.insert(layer, transforms);
        }
        let read = Self {
            layers,
            model_hash: parse_meta(file, FORMAT, "model_hash")?,
            solve: json_meta(file, "solve")?,
            calibration: file
                .metadata()
                .contains_key("calibration")
                .then(|| json_meta(file, "calibration"))
                .transpose()?,
            report: json_meta(file, "report")?,
        };
        read.check_claims(file.path())?;
        Ok(read)
    }

    /// Writes it, atomically and with the same bytes for the same content.
    ///
    /// # Errors
    /// `Io`, `Busy`; `Invalid` for a number that is not finite or a record of something else, `WrongTensor` for data that is not
    /// `[n_heads, dim, dim]` and for feedback that is none, `MissingTensor` for a layer without what others have: what `load` would
    /// refuse is not written.
    pub fn save(&self, path: &Path) -> Result<(Sha, u64)> {
        let mut tensors = BTreeMap::new();
        for (&layer, transforms) in &self.layers {
            check_layer(path, layer, transforms)?;
            for (role, matrices) in transforms.matrices() {
                let shape = [matrices.n_heads, matrices.dim, matrices.dim];
                tensors.insert(tensor_name(layer, role), NewTensor::f64(&shape, &matrices.data));
            }
            if let Some(means) = &transforms.key_mean {
                let shape = [transforms.key.n_heads, transforms.key.dim];
                tensors.insert(tensor_name(layer, "key_mean"), NewTensor::f64(&shape, means));
            }
        }
        for role in ROLES.optional {
            let is_missing = |layer: &&usize| !tensors.contains_key(&tensor_name(**layer, role));
            let missing: Vec<&usize> = self.layers.keys().filter(is_missing).collect();
            if let Some(&&layer) = missing.first().filter(|_| missing.len() < self.layers.len()) {
                return Err(FormatError::MissingTensor { path: path.to_owned(), name: tensor_name(layer, role) });
            }
        }
        self.check_claims(path)?;
        let mut metadata = self.metadata(path)?;
        seal(&tensors, &mut metadata);
        write_tensor_file(path, &tensors, &metadata)
    }

    /// There is what the record says, and no more: a fold copies the record into the manifest, whose readers go by it.
    fn check_claims(&self, path: &Path) -> Result<()> {
        let Solve { damping, center_keys, feedback, .. } = &self.solve;
        check_damping(path, *damping)?;
        let claims = [
            ("key_mean", center_keys != NEVER, format!("center_keys {center_keys}")),
            ("key_feedback", *feedback, format!("feedback {feedback}")),
            ("value_feedback", *feedback, format!("feedback {feedback}")),
        ];
        for (role, claimed, claim) in claims {
            let has = |layer: &LayerTransforms| match role {
                "key_mean" => layer.key_mean.is_some(),
                "key_feedback" => layer.key_feedback.is_some(),
                _ => layer.value_feedback.is_some(),
            };
            if let Some(layer) = self.layers.iter().find_map(|(layer, entry)| (has(entry) != claimed).then_some(layer))
            {
                let found = if claimed { "has none" } else { "has some" };
                let detail = format!("solve says {}, and layer {layer} {found}: {role}", printable(&claim));
                return Err(FormatError::invalid(path, FORMAT, detail));
            }
        }
        self.check_report(path)
    }

    /// The report has one entry a head of every layer, or none at all, and names the heads that have a mean.
    fn check_report(&self, path: &Path) -> Result<()> {
        if self.report.is_empty() {
            return Ok(());
        }
        let stated = self
            .report
            .iter()
            .map(|report| (report.layer, report.key.len(), report.value.len(), report.centered_keys.clone()));
        let found = self
            .layers
            .iter()
            .map(|(&layer, entry)| (layer, entry.key.n_heads, entry.value.n_heads, entry.centered_keys()));
        let (stated, found): (Vec<_>, Vec<_>) = (stated.collect(), found.collect());
        if stated == found {
            return Ok(());
        }
        let at = stated.iter().zip(&found).take_while(|(a, b)| a == b).count();
        let in_words = |entry: Option<&(usize, usize, usize, Vec<usize>)>| {
            entry.map_or_else(
                || "nothing".to_owned(),
                |(layer, key, value, centered)| {
                    format!("layer {layer} with {key} key and {value} value heads, of which {centered:?} are centred")
                },
            )
        };
        let detail = format!(
            "the report is not of these transforms: it has {}, they have {}",
            in_words(stated.get(at)),
            in_words(found.get(at))
        );
        Err(FormatError::invalid(path, FORMAT, detail))
    }

    fn metadata(&self, path: &Path) -> Result<BTreeMap<String, String>> {
        let mut metadata = format_metadata(FORMAT, TRANSFORMS_VERSION);
        let mut put = |key: &str, value: String| metadata.insert(key.to_owned(), value);
        put("model_hash", self.model_hash.to_string());
        put("solve", to_json(path, &self.solve)?);
        put("report", to_json(path, &self.report)?);
        if let Some(calibration) = &self.calibration {
            put("calibration", to_json(path, calibration)?);
        }
        Ok(metadata)
    }
}

/// Finite numbers, and as many heads of everything as there are of keys.
fn check_layer(path: &Path, layer: usize, transforms: &LayerTransforms) -> Result<()> {
    let n_heads = transforms.key.n_heads;
    for (role, matrices) in transforms.matrices() {
        check_same_heads(path, layer, role, n_heads, matrices.n_heads)?;
        check_finite(path, &tensor_name(layer, role), matrices.dim, matrices.data.iter().copied())?;
    }
    for (role, matrices) in transforms.matrices().filter(|(role, _)| role.ends_with("_feedback")) {
        check_unit_lower(path, &tensor_name(layer, role), matrices)?;
    }
    let means = transforms.key_mean.iter().flatten().copied();
    check_finite_rows(path, &tensor_name(layer, "key_mean"), transforms.key.dim, means)
}

/// Refuses a matrix that is no factor L of a metric: an encoder would.
fn check_unit_lower(path: &Path, name: &str, matrices: &HeadMatrices) -> Result<()> {
    let dim = matrices.dim;
    let fits = |at: usize, x: f64| match (at / dim % dim).cmp(&(at % dim)) {
        std::cmp::Ordering::Greater => x.abs() <= MAX_FEEDBACK,
        std::cmp::Ordering::Equal => x == 1.0,
        std::cmp::Ordering::Less => x == 0.0,
    };
    let Some(at) = matrices.data.iter().enumerate().position(|(at, &x)| !fits(at, x)) else { return Ok(()) };
    let (head, row, column) = (at / dim / dim, at / dim % dim, at % dim);
    Err(FormatError::WrongTensor {
        path: path.to_owned(),
        name: name.to_owned(),
        expected: "a unit lower triangular matrix of elements up to 2^26".to_owned(),
        found: format!("{:e} in head {head}, row {row}, column {column}", matrices.data[at]),
    })
}

fn check_damping(path: &Path, damping: f64) -> Result<()> {
    if damping.is_finite() && damping >= 0.0 {
        return Ok(());
    }
    Err(FormatError::invalid(path, FORMAT, format!("damping {damping}, expected a finite number of at least 0")))
}

fn read_layer(file: &TensorFile, layer: usize) -> Result<LayerTransforms> {
    let (key, value) = (read(file, layer, "key")?, read(file, layer, "value")?);
    check_same_heads(file.path(), layer, "value", key.n_heads, value.n_heads)?;
    let optional = |role: &str, dim: usize| -> Result<Option<HeadMatrices>> {
        if !has(file, layer, role) {
            return Ok(None);
        }
        let shape = [key.n_heads, dim, dim];
        Ok(Some(HeadMatrices { n_heads: key.n_heads, dim, data: file.f64(&tensor_name(layer, role), &shape)? }))
    };
    let (key_feedback, value_feedback) = (optional("key_feedback", key.dim)?, optional("value_feedback", value.dim)?);
    let means = tensor_name(layer, "key_mean");
    let key_mean = has(file, layer, "key_mean").then(|| file.f64(&means, &[key.n_heads, key.dim])).transpose()?;
    Ok(LayerTransforms { key, value, key_mean, key_feedback, value_feedback })
}

fn read(file: &TensorFile, layer: usize, role: &str) -> Result<HeadMatrices> {
    let name = tensor_name(layer, role);
    let [n_heads, dim] = head_shape(file, &name)?;
    Ok(HeadMatrices { n_heads, dim, data: file.f64(&name, &[n_heads, dim, dim])? })
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
