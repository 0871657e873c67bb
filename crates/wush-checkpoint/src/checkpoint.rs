//! A checkpoint directory: `config.json`, the shards and their index, checked against each other before anything is used.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;
use wush_format::hash::Sha;
use wush_format::manifest::FileEntry;
use wush_format::tensor_file::{TensorFile, TensorInfo, TensorView};

use crate::Result;

/// One weight file of a checkpoint.
#[derive(Debug)]
pub struct Shard {
    /// Its name in the checkpoint's directory.
    pub file_name: String,
    /// The open file.
    pub file: TensorFile,
}

/// An open checkpoint. Shards are memory-mapped: nothing is read before it is asked for.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    config: Value,
    shards: Vec<Shard>,
    /// Tensor name to shard number.
    tensors: BTreeMap<String, usize>,
}

impl Checkpoint {
    /// Opens and checks a checkpoint.
    pub fn open(dir: &Path) -> Result<Self> {
        todo!("{}", dir.display())
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// `config.json`, always an object.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// The shards, by name.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// A tensor by name.
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>> {
        todo!("{name}")
    }

    /// The shard number and place of a tensor.
    pub fn locate(&self, name: &str) -> Option<(usize, &TensorInfo)> {
        let shard = *self.tensors.get(name)?;
        Some((shard, self.shards[shard].file.tensors().get(name)?))
    }

    /// All tensor names, sorted.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Bytes of all tensors together.
    pub fn n_weight_bytes(&self) -> u64 {
        todo!()
    }

    /// Relative paths of everything that is not a shard.
    pub fn other_files(&self) -> Result<Vec<String>> {
        todo!()
    }

    /// Whether the directory is a bundle of wush.
    pub fn is_bundle(&self) -> bool {
        todo!()
    }
}

/// The model hash.
pub fn weights_hash(shards: &[FileEntry]) -> Sha {
    todo!("{}", shards.len())
}
