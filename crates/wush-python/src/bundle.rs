//! A bundle in Python. Enters: a directory. Leaves: what its manifest says, its matrices, its quantizers; and no bundle at all when
//! anything in it contradicts anything else. Does not read the weights' numbers: `wush inspect` does.

use std::path::{Path, PathBuf};

use pyo3::prelude::*;
use rayon::prelude::*;
use wush_format::FormatError;
use wush_format::bundle::{KeyLayer, KeySidecar, MANIFEST, ValueFeedback, WUSH_DIR};
use wush_format::hash::hash_file;
use wush_format::manifest::{FileEntry, Manifest, Status, weights_hash};
use wush_format::sidecars::Sidecars;
use wush_quant::{Method, Role};
use wush_runtime::{KeyTransforms, RuntimeError};

use crate::buffer::view;
use crate::codec::{Codec, Named, feedback, parse_role};
use crate::error::{BindingError, Result, not_forked};

/// Ends of names, at the top of a bundle, by which loaders decide what to load.
const DECIDES: [&str; 7] = [".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", "adapter_config.json"];

/// A bundle whose parts belong together.
#[pyclass(frozen, module = "wush_kv")]
pub(crate) struct Bundle {
    path: PathBuf,
    manifest: Manifest,
    keys: KeySidecar,
    values: Option<ValueFeedback>,
}

impl Bundle {
    fn load(path: PathBuf, verify: bool) -> Result<Self> {
        not_forked()?;
        if path.is_dir() && !path.join(WUSH_DIR).join(MANIFEST).exists() {
            return Err(BindingError::NoBundle { path });
        }
        let sidecars = Sidecars::load(&path)?;
        let Sidecars { manifest, keys, values, .. } = &sidecars;
        if manifest.status == Status::Failed {
            return Err(BindingError::Failed { path });
        }
        check_basis(&path.join(WUSH_DIR).join(MANIFEST), manifest)?;
        check_no_other_weights(&path, &manifest.files)?;
        // `query = key^{-T}`, mean keys that are keys, feedback that is feedback.
        KeyTransforms::from_sidecar(&sidecars.key_path(), keys)?;
        let of_keys = keys.layers.values().map(|entry| (entry.head_dim, entry.key_feedback.as_deref()));
        let of_values = values.iter().flat_map(|values| values.layers.values());
        let of_values = of_values.map(|entry| (entry.head_dim, Some(entry.value_feedback.as_slice())));
        of_keys
            .chain(of_values)
            .try_for_each(|(d, lower)| lower.map_or(Ok(()), |lower| feedback(d, lower).map(drop)))?;
        if verify {
            manifest.files.par_iter().try_for_each(|file| check_file(&path, file))?;
        }
        let Sidecars { manifest, keys, values, .. } = sidecars;
        Ok(Self { path, manifest, keys, values })
    }

    fn layer(&self, layer: usize) -> Result<&KeyLayer> {
        self.keys.layers.get(&layer).ok_or_else(|| RuntimeError::NoTransforms { layer }.into())
    }

    /// L of a layer's keys or values.
    fn lower(&self, layer: usize, role: Role) -> Result<Option<&[f32]>> {
        let of_keys = self.layer(layer)?.key_feedback.as_deref();
        Ok(match role {
            Role::Key => of_keys,
            Role::Value => {
                self.values.as_ref().and_then(|values| values.layers.get(&layer)).map(|l| &*l.value_feedback)
            }
        })
    }

    /// A matrix of a layer, with its shape; none where the bundle has none.
    fn find(&self, layer: usize, name: &str) -> Result<Option<(&[f32], Vec<usize>)>> {
        let entry = self.layer(layer)?;
        let (heads, d) = (entry.n_kv_heads, entry.head_dim);
        let data = match name {
            "key" => Some(entry.key.as_slice()),
            "query" => Some(entry.query.as_slice()),
            "key_mean" => return Ok(entry.key_mean.as_deref().map(|mean| (mean, vec![heads, d]))),
            "key_feedback" => self.lower(layer, Role::Key)?,
            "value_feedback" => self.lower(layer, Role::Value)?,
            _ => {
                return Err(BindingError::Argument {
                    what: "matrix",
                    expected: "key, query, key_mean, key_feedback or value_feedback".to_owned(),
                    found: format!("{name:?}"),
                });
            }
        };
        Ok(data.map(|data| (data, vec![heads, d, d])))
    }
}

#[pymethods]
impl Bundle {
    /// Reads and checks a bundle; with `verify` also the SHA-256 of every file.
    #[staticmethod]
    #[pyo3(signature = (path, *, verify = true))]
    fn open(py: Python<'_>, path: PathBuf, verify: bool) -> PyResult<Self> {
        Ok(py.detach(|| Self::load(path, verify))?)
    }

    /// The directory.
    #[getter]
    fn path(&self) -> &Path {
        &self.path
    }

    /// The manifest, JSON.
    #[getter]
    fn manifest_json(&self) -> PyResult<String> {
        let invalid = |error: serde_json::Error| FormatError::invalid(&self.path, MANIFEST, error.to_string());
        Ok(serde_json::to_string(&self.manifest).map_err(invalid).map_err(BindingError::from)?)
    }

    /// Hash of the folded weights, hex.
    #[getter]
    fn model_hash(&self) -> String {
        self.manifest.basis.model_hash.to_string()
    }

    /// Name of the quantizer that suits the encoder.
    #[getter]
    fn method(&self) -> String {
        Method::for_encoder(self.values.is_some()).to_string()
    }

    /// Ids of the layers that have transforms, rising.
    #[getter]
    fn layers(&self) -> Vec<usize> {
        self.keys.layers.keys().copied().collect()
    }

    /// `(KV heads, head dimension)` of a layer.
    fn shape(&self, layer: usize) -> PyResult<(usize, usize)> {
        let entry = self.layer(layer)?;
        Ok((entry.n_kv_heads, entry.head_dim))
    }

    /// A matrix of a layer, float32; none where the bundle has none.
    fn matrix<'py>(&self, py: Python<'py>, layer: usize, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
        let found = self.find(layer, name)?;
        found.map(|(data, shape)| view(py, bytemuck::cast_slice(data), "f", &shape)).transpose()
    }

    /// The quantizer of a layer's keys or values, with the bundle's feedback.
    #[pyo3(signature = (layer, role, bits, *, method = None, scales = "bf16"))]
    fn codec(&self, layer: usize, role: &str, bits: u8, method: Option<&str>, scales: &str) -> PyResult<Codec> {
        let own = self.method();
        let named = Named { bits, method: method.unwrap_or(&own), role, scales };
        Ok(Codec::make(self.layer(layer)?.head_dim, named, self.lower(layer, parse_role(role)?)?)?)
    }

    /// What it is, in a few lines.
    fn describe(&self) -> String {
        let Manifest { source, solve, basis, equivalence, calibration, .. } = &self.manifest;
        let shapes = self.keys.layers.values().map(|entry| (entry.n_kv_heads, entry.head_dim));
        let shapes: std::collections::BTreeSet<_> = shapes.collect();
        let shapes = shapes.iter().map(|(heads, d)| format!("{heads} KV heads of {d}")).collect::<Vec<_>>().join(", ");
        let mut lines = vec![
            format!("source       {} ({})", source.id, source.family),
            format!("layers       {}, {shapes}", self.keys.layers.len()),
            format!("transform    {}, preset {}, error feedback {}", solve.transform, solve.preset, solve.feedback),
            format!("weights      {}", basis.model_hash),
        ];
        lines.extend(
            calibration
                .as_ref()
                .map(|text| format!("calibration  {} tokens, up to position {}", text.tokens, text.max_seq_len)),
        );
        lines.extend(equivalence.as_ref().map(|check| {
            format!(
                "equivalence  mean NLL {:.5} of the source, {:.5} of the bundle",
                check.nll_source, check.nll_bundle
            )
        }));
        lines.join("\n")
    }

    fn __repr__(&self) -> String {
        format!("Bundle({:?})", self.path)
    }
}

/// The manifest's shards are the weights that its basis names. At the top of a bundle no safetensors file is anything else.
fn check_basis(path: &Path, manifest: &Manifest) -> Result<()> {
    let is_shard = |file: &&FileEntry| !file.path.contains('/') && file.path.ends_with(".safetensors");
    let shards: Vec<_> = manifest.files.iter().filter(is_shard).cloned().collect();
    let (expected, found) = (manifest.basis.model_hash, weights_hash(&shards));
    if expected == found { Ok(()) } else { Err(BindingError::OtherBasis { path: path.to_owned(), expected, found }) }
}

/// No weights, index or adapter at the top that the manifest does not list: a loader might take them instead.
fn check_no_other_weights(dir: &Path, files: &[FileEntry]) -> Result<()> {
    for entry in std::fs::read_dir(dir).map_err(|e| FormatError::io(dir, "read", e))? {
        let path = entry.map_err(|e| FormatError::io(dir, "read", e))?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        let decides = DECIDES.iter().any(|ending| name.ends_with(ending));
        if decides && files.iter().all(|file| file.path != name) {
            return Err(BindingError::ExtraWeights { path });
        }
    }
    Ok(())
}

fn check_file(dir: &Path, listed: &FileEntry) -> Result<()> {
    let path = dir.join(&listed.path);
    let (sha256, n_bytes) = hash_file(&path)?;
    if (sha256, n_bytes) == (listed.sha256, listed.n_bytes) {
        return Ok(());
    }
    let shown = |sha, n_bytes| format!("{n_bytes} bytes with SHA-256 {sha}");
    Err(BindingError::OtherFile { path, expected: shown(listed.sha256, listed.n_bytes), found: shown(sha256, n_bytes) })
}
