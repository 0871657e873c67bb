//! The bundle's layout and its sidecars: `wush/manifest.json`, `wush/key_transforms.safetensors` (f32 `layers.{i}.key` = T_K
//! and `layers.{i}.query` = T_K^{-T}; where the keys are centred `layers.{i}.key_mean`; where there is feedback
//! `layers.{i}.key_feedback`), `wush/value_transforms.safetensors` (f32 `layers.{i}.value` = T_V) and, where there is
//! feedback, `wush/value_feedback.safetensors` (f32 `layers.{i}.value_feedback`).

use std::collections::BTreeMap;
use std::path::Path;

use crate::hash::Sha;
use crate::layers::{
    Roles, check_finite, check_finite_rows, check_format, format_metadata, has, head_shape, layer_ids, parse_meta,
    tensor_name,
};
use crate::seal::content_hash;
use crate::tensor_file::{NewTensor, TensorFile, write_tensor_file};
use crate::{FormatError, Result};

/// The folder inside a bundle.
pub const WUSH_DIR: &str = "wush";
/// The manifest's file name inside [`WUSH_DIR`].
pub const MANIFEST: &str = "manifest.json";
/// The key sidecar's file name inside [`WUSH_DIR`].
pub const KEY_TRANSFORMS: &str = "key_transforms.safetensors";
/// The value sidecar's file name inside [`WUSH_DIR`].
pub const VALUE_TRANSFORMS: &str = "value_transforms.safetensors";
/// The file name, inside [`WUSH_DIR`], of the encoder's feedback for values; only where there is feedback.
pub const VALUE_FEEDBACK: &str = "value_feedback.safetensors";
/// The model card's file name inside [`WUSH_DIR`].
pub const CARD: &str = "README.md";
/// Version of the sidecars' layout.
pub const SIDECAR_VERSION: u32 = 2;
/// `format` in the key sidecar's metadata.
const KEY_FORMAT: &str = "wush-key-transforms";
/// `format` in the value sidecar's metadata.
const VALUE_FORMAT: &str = "wush-value-transforms";
/// `format` in the metadata of the values' feedback.
const FEEDBACK_FORMAT: &str = "wush-value-feedback";
/// What a layer of the key sidecar has.
const KEY_ROLES: Roles = Roles { required: &["key", "query"], optional: &["key_mean", "key_feedback"] };
/// What a layer of the value sidecar has.
const VALUE_ROLES: Roles = Roles { required: &["value"], optional: &[] };
/// What a layer of the values' feedback has.
const FEEDBACK_ROLES: Roles = Roles { required: &["value_feedback"], optional: &[] };

/// One layer of the key sidecar: `[n_kv, d, d]`, row-major f32, where nothing else is said.
#[derive(Debug, Clone, PartialEq)]
pub struct KeyLayer {
    /// Number of KV heads.
    pub n_kv_heads: usize,
    /// Head dimension d.
    pub head_dim: usize,
    /// T_K: a new key k is cached as T_K k, after RoPE; as T_K (k − μ) where there is a mean μ.
    pub key: Vec<f32>,
    /// T_K^{-T}: a query q becomes T_K^{-T} q, after RoPE.
    pub query: Vec<f32>,
    /// μ `[n_kv, d]`: subtracted from every key, in all windows alike. It moves all logits of a query by the same qᵀμ, so
    /// the softmax does not change. Zeros where a head is not centred; none where no key is ever to be.
    pub key_mean: Option<Vec<f32>>,
    /// L of the metric of errors in T_K k, unit lower triangular: for an encoder with error feedback.
    pub key_feedback: Option<Vec<f32>>,
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

/// One layer of the values' feedback.
#[derive(Debug, Clone, PartialEq)]
pub struct FeedbackLayer {
    /// Number of KV heads.
    pub n_kv_heads: usize,
    /// Head dimension d.
    pub head_dim: usize,
    /// L of the metric of errors in T_V v, `[n_kv, d, d]` row-major f32, unit lower triangular.
    pub value_feedback: Vec<f32>,
}

/// The values' feedback, by global layer id: for an encoder. Values lie in transformed coordinates already, so a server
/// that quantizes them needs this and not the value sidecar.
#[derive(Debug, Clone, PartialEq)]
pub struct ValueFeedback {
    /// The layers.
    pub layers: BTreeMap<usize, FeedbackLayer>,
    /// Hash of the folded model's weights that it belongs to.
    pub model_hash: Sha,
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
    /// Hash over what keys and queries go through: every tensor, by [`content_hash`], whatever the weights are and however the
    /// file was written. A cache of keys says by it what they went through.
    pub fn content_hash(&self) -> Sha {
        let tensors = self.layers.iter().flat_map(|(&layer, entry)| {
            entry.tensors().map(move |(role, _, data)| (tensor_name(layer, role), to_le_bytes(data)))
        });
        let tensors: BTreeMap<String, Vec<u8>> = tensors.collect();
        content_hash(tensors.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice())))
    }

    /// Reads a key sidecar: version, shapes, finiteness. Whether `query = key^{-T}`, and whether the feedback is unit lower
    /// triangular, is `inspect`'s and the runtime's check.
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
            let optional = |role: &str, shape: &[usize]| -> Result<Option<Vec<f32>>> {
                has(file, layer, role).then(|| file.f32(&tensor_name(layer, role), shape)).transpose()
            };
            let query = file.f32(&tensor_name(layer, "query"), &[n_kv_heads, head_dim, head_dim])?;
            let key_mean = optional("key_mean", &[n_kv_heads, head_dim])?;
            let key_feedback = optional("key_feedback", &[n_kv_heads, head_dim, head_dim])?;
            let read = KeyLayer { n_kv_heads, head_dim, key, query, key_mean, key_feedback };
            for (role, shape, data) in read.tensors() {
                check_tensor(file.path(), &tensor_name(layer, role), &shape, data)?;
            }
            Ok(read)
        };
        let (layers, model_hash) = read_sidecar(file, KEY_FORMAT, &KEY_ROLES, read_layer)?;
        Ok(Self { layers, model_hash })
    }

    /// Writes it, atomically and with the same bytes for the same content.
    ///
    /// # Errors
    /// `Io`, `Busy`; `Invalid` for a number that is not finite, `WrongTensor` for data of another shape, `MissingTensor` for
    /// a layer without what others have.
    pub fn save(&self, path: &Path) -> Result<(Sha, u64)> {
        let tensors = self.layers.iter().flat_map(|(&layer, entry)| {
            entry.tensors().map(move |(role, shape, data)| (tensor_name(layer, role), shape, data))
        });
        let tensors: Vec<_> = tensors.collect();
        for role in KEY_ROLES.optional {
            let is_there = |layer: &usize| tensors.iter().any(|(name, ..)| *name == tensor_name(*layer, role));
            let (there, missing): (Vec<usize>, Vec<usize>) = self.layers.keys().partition(|layer| is_there(layer));
            if let Some(&layer) = missing.first().filter(|_| !there.is_empty()) {
                return Err(FormatError::MissingTensor { path: path.to_owned(), name: tensor_name(layer, role) });
            }
        }
        write_sidecar(path, KEY_FORMAT, self.model_hash, tensors.into_iter())
    }
}

impl KeyLayer {
    /// Transforms alone: keys as they are, no feedback. `key` and `query`: `[n_kv, d, d]`.
    pub fn new(n_kv_heads: usize, head_dim: usize, key: Vec<f32>, query: Vec<f32>) -> Self {
        Self { n_kv_heads, head_dim, key, query, key_mean: None, key_feedback: None }
    }

    /// KV heads whose mean key is not all zero, rising.
    pub fn centered_keys(&self) -> Vec<usize> {
        let means = self.key_mean.iter().flat_map(|means| means.chunks(self.head_dim.max(1))).enumerate();
        means.filter(|(_, mean)| mean.iter().any(|&x| x != 0.0)).map(|(head, _)| head).collect()
    }

    /// Role, shape and data of what there is.
    fn tensors(&self) -> impl Iterator<Item = (&'static str, Vec<usize>, &Vec<f32>)> {
        let (heads, dim) = (self.n_kv_heads, self.head_dim);
        let square =
            [("key", Some(&self.key)), ("query", Some(&self.query)), ("key_feedback", self.key_feedback.as_ref())];
        let square = square.into_iter().filter_map(move |(role, data)| Some((role, vec![heads, dim, dim], data?)));
        square.chain(self.key_mean.as_ref().map(|data| ("key_mean", vec![heads, dim], data)))
    }
}

impl ValueFeedback {
    /// Reads the values' feedback: version, shapes, finiteness.
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
            let ([n_kv_heads, head_dim], value_feedback) = read(file, layer, "value_feedback")?;
            Ok(FeedbackLayer { n_kv_heads, head_dim, value_feedback })
        };
        let (layers, model_hash) = read_sidecar(file, FEEDBACK_FORMAT, &FEEDBACK_ROLES, read_layer)?;
        Ok(Self { layers, model_hash })
    }

    /// Writes it, atomically and with the same bytes for the same content.
    ///
    /// # Errors
    /// `Io`, `Busy`; `Invalid` for a number that is not finite, `WrongTensor` for data that is not `[n_kv, d, d]`.
    pub fn save(&self, path: &Path) -> Result<(Sha, u64)> {
        let tensors = self.layers.iter().map(|(&layer, l)| {
            (tensor_name(layer, "value_feedback"), vec![l.n_kv_heads, l.head_dim, l.head_dim], &l.value_feedback)
        });
        write_sidecar(path, FEEDBACK_FORMAT, self.model_hash, tensors)
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
        let (layers, model_hash) = read_sidecar(file, VALUE_FORMAT, &VALUE_ROLES, read_layer)?;
        Ok(Self { layers, model_hash })
    }

    /// Writes it, atomically and with the same bytes for the same content.
    ///
    /// # Errors
    /// `Io`, `Busy`; `Invalid` for a number that is not finite, `WrongTensor` for data that is not `[n_kv, d, d]`.
    pub fn save(&self, path: &Path) -> Result<(Sha, u64)> {
        let tensors = self
            .layers
            .iter()
            .map(|(&layer, l)| (tensor_name(layer, "value"), vec![l.n_kv_heads, l.head_dim, l.head_dim], &l.value));
        write_sidecar(path, VALUE_FORMAT, self.model_hash, tensors)
    }
}

fn read_sidecar<L>(
    file: &TensorFile,
    format: &'static str,
    roles: &Roles,
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
    tensors: impl Iterator<Item = (String, Vec<usize>, &'a Vec<f32>)>,
) -> Result<(Sha, u64)> {
    let mut written = BTreeMap::new();
    for (name, shape, data) in tensors {
        check_tensor(path, &name, &shape, data)?;
        written.insert(name, NewTensor::f32(&shape, data));
    }
    let mut metadata = format_metadata(format, SIDECAR_VERSION);
    metadata.insert("model_hash".to_owned(), model_hash.to_string());
    write_tensor_file(path, &written, &metadata)
}

fn to_le_bytes(data: &[f32]) -> Vec<u8> {
    data.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// Refuses a NaN or an infinity in a tensor `[n_kv, d]` or `[n_kv, d, d]`.
fn check_tensor(path: &Path, name: &str, shape: &[usize], data: &[f32]) -> Result<()> {
    let values = data.iter().map(|&x| f64::from(x));
    match *shape {
        [_, dim] => check_finite_rows(path, name, dim, values),
        _ => check_finite(path, name, shape.last().copied().unwrap_or(1), values),
    }
}
