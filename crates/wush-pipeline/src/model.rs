//! A checkpoint that has been found, opened and understood.

use std::path::Path;

use wush_checkpoint::hub::{HubProblem, ResolvedModel, resolve_model};
use wush_checkpoint::{Checkpoint, CheckpointError};
use wush_format::bundle::{MANIFEST, WUSH_DIR};
use wush_format::hash::Sha;
use wush_format::json::shown;
use wush_format::manifest::{FileEntry, Manifest};
use wush_format::text::is_plain;
use wush_model::arch::{self, RopeScaling};
use wush_model::spec::ModelSpec;

use crate::device::{Device, Runs};
use crate::request::{Environment, ModelRequest};
use crate::{PipelineError, Result};

/// An open checkpoint with its specification and where it came from.
pub struct Model {
    /// Hub id, or the directory's own name.
    pub id: String,
    /// As typed: a directory or a hub id.
    pub argument: String,
    /// Commit, for a hub model.
    pub revision: Option<String>,
    /// The weights and the configuration.
    pub checkpoint: Checkpoint,
    /// Shapes and tensor roles.
    pub spec: ModelSpec,
    /// Where the forward pass runs.
    pub device: Device,
    /// RoPE scaling that was asked for, instead of the configuration's own.
    pub rope_scaling: Option<RopeScaling>,
}

/// Number of KV heads and head dimension of one attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadShape {
    /// KV heads.
    pub n_kv_heads: usize,
    /// Head dimension d.
    pub head_dim: usize,
}

impl Model {
    /// Finds, opens and checks an unconverted checkpoint.
    ///
    /// # Errors
    /// `Option` and `Gpu` for its device, `ModelName`, `AlreadyFolded`, whatever hub, checkpoint and family files refuse.
    pub(crate) fn resolve(request: &ModelRequest, runs: Runs, env: &Environment<'_>) -> Result<Self> {
        let model = Self::resolve_any(request, runs, env)?;
        match model.checkpoint.is_bundle() {
            true => Err(PipelineError::AlreadyFolded { path: model.dir().to_owned() }),
            false => Ok(model),
        }
    }

    /// The same for a checkpoint or a bundle.
    ///
    /// # Errors
    /// As [`Model::resolve`], but for `AlreadyFolded`.
    pub(crate) fn resolve_any(request: &ModelRequest, runs: Runs, env: &Environment<'_>) -> Result<Self> {
        let device = Device::pick(&request.device, runs)?;
        let found = find(&request.model, env)?;
        if !is_plain(&found.id) {
            return Err(PipelineError::ModelName { name: shown(&found.id) });
        }
        let checkpoint = Checkpoint::open(&found.dir)?;
        // What cannot be copied is found now, not after hours.
        checkpoint.other_files()?;
        let spec = arch::resolve(&checkpoint, request.rope_scaling.as_ref())?;
        let device = device.suited_to(&spec, &request.device)?;
        Ok(Self {
            id: found.id,
            argument: request.model.clone(),
            revision: found.revision,
            checkpoint,
            spec,
            device,
            rope_scaling: request.rope_scaling,
        })
    }

    /// Shape of the KV heads of layer `layer`.
    pub fn head_shape(&self, layer: usize) -> HeadShape {
        let attn = &self.spec.layers[layer].attn;
        HeadShape { n_kv_heads: attn.n_kv_heads, head_dim: attn.head_dim }
    }

    /// Largest head dimension.
    pub fn head_dim(&self) -> usize {
        self.spec.layers.iter().map(|layer| layer.attn.head_dim).max().unwrap_or(0)
    }

    /// Hashes every shard, in parallel: the model hash of `wush_checkpoint::weights_hash`.
    ///
    /// # Errors
    /// `Io`.
    pub fn hash_weights(&self) -> Result<Sha> {
        use rayon::prelude::*;
        let entries: Vec<FileEntry> =
            self.checkpoint.shards().par_iter().map(hash_shard).collect::<Result<_, PipelineError>>()?;
        Ok(wush_checkpoint::weights_hash(&entries))
    }

    /// A bundle's manifest, once every sidecar that it lists is there and is the listed one.
    ///
    /// # Errors
    /// `ChangedSidecar`; `Io`; whatever is wrong with the manifest.
    pub(crate) fn bundle_manifest(&self) -> Result<Manifest> {
        let manifest = Manifest::load(&self.dir().join(WUSH_DIR).join(MANIFEST))?;
        let is_sidecar = |file: &&FileEntry| {
            Path::new(&file.path).parent() == Some(Path::new(WUSH_DIR)) && file.path.ends_with(".safetensors")
        };
        for file in manifest.files.iter().filter(is_sidecar) {
            let path = self.dir().join(&file.path);
            let (found, _) = wush_format::hash::hash_file(&path)?;
            if found != file.sha256 {
                return Err(PipelineError::ChangedSidecar { path, found, expected: file.sha256 });
            }
        }
        Ok(manifest)
    }

    /// The checkpoint's directory.
    pub fn dir(&self) -> &Path {
        self.checkpoint.dir()
    }
}

/// A directory or a hub id, as [`resolve_model`] finds it.
///
/// # Errors
/// Its own; `NoSuchModel` where a name was no directory and the hub did not give it.
pub(crate) fn find(argument: &str, env: &Environment<'_>) -> Result<ResolvedModel> {
    resolve_model(argument, &env.hub, env.monitor).map_err(|error| match error {
        CheckpointError::Hub { problem: HubProblem::BadId { .. }, .. } => error.into(),
        CheckpointError::Hub { .. } => {
            PipelineError::NoSuchModel { argument: argument.to_owned(), source: Box::new(error) }
        }
        other => other.into(),
    })
}

fn hash_shard(shard: &wush_checkpoint::Shard) -> Result<FileEntry> {
    let (sha256, n_bytes) = wush_format::hash::hash_file(shard.file.path())?;
    Ok(FileEntry { path: shard.file_name.clone(), n_bytes, sha256 })
}
