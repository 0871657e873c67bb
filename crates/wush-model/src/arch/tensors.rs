//! The checkpoint's tensors by name, and the check of a whole spec against them.
//!
//! Enters: names, shapes, dtypes. Leaves: nothing but the certainty that every slice of the spec is there in the shape
//! and a dtype that the forward reads, and that no tensor of a decoder layer was overlooked. Reads no weights.

use std::collections::{BTreeMap, BTreeSet};

use wush_checkpoint::Checkpoint;
use wush_format::tensor_file::{Dtype, TensorInfo};

use crate::error::ModelError;
use crate::spec::{ModelSpec, TensorSlice};

/// Dtypes that the forward widens.
const FLOATS: &[Dtype] = &[Dtype::F32, Dtype::F16, Dtype::BF16];

/// Buffers that some exporters store in a layer and that the configuration already determines.
const HARMLESS: &[&str] = &["rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "masked_bias"];

/// Name to place of every tensor.
#[derive(Debug)]
pub struct Tensors<'a>(BTreeMap<&'a str, &'a TensorInfo>);

impl<'a> Tensors<'a> {
    /// All tensors of a checkpoint.
    pub fn of(checkpoint: &'a Checkpoint) -> Self {
        let entry = |name: &'a str| checkpoint.locate(name).map(|(_, info)| (name, info));
        Self(checkpoint.tensor_names().filter_map(entry).collect())
    }

    /// Whether a tensor is there.
    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// Rows of a tensor, if it is there and has any.
    pub fn n_rows(&self, name: &str) -> Option<usize> {
        self.0.get(name)?.shape.first().copied()
    }

    /// Every name, sorted.
    pub fn names(&self) -> impl Iterator<Item = &'a str> + '_ {
        self.0.keys().copied()
    }

    /// Checks presence, shape and dtype of every slice, then that no tensor of a layer of the spec is left over.
    ///
    /// # Errors
    /// `MissingTensor`, `Tensor`, `UnknownTensor`.
    pub fn check(&self, spec: &ModelSpec, layer_prefix: &str) -> Result<(), ModelError> {
        for slice in spec.slices() {
            self.check_slice(slice)?;
        }
        let used: BTreeSet<&str> = spec.slices().into_iter().map(|slice| slice.name.as_str()).collect();
        let overlooked = |name: &&str| {
            layer_of(name, layer_prefix).is_some_and(|(layer, _)| layer < spec.layers.len())
                && !used.contains(name)
                && !HARMLESS.iter().any(|suffix| name.ends_with(suffix))
        };
        match self.names().find(overlooked) {
            Some(name) => Err(ModelError::UnknownTensor { name: name.to_owned() }),
            None => Ok(()),
        }
    }

    fn check_slice(&self, slice: &TensorSlice) -> Result<(), ModelError> {
        let name = &slice.name;
        let info = self.0.get(name.as_str()).ok_or_else(|| ModelError::MissingTensor { name: name.clone() })?;
        let shape = if slice.cols == 1 { vec![slice.total_rows] } else { vec![slice.total_rows, slice.cols] };
        let error = |expected, found| ModelError::Tensor { name: name.clone(), expected, found };
        if info.shape != shape {
            return Err(error(format!("shape {shape:?}"), format!("{:?}", info.shape)));
        }
        if !FLOATS.contains(&info.dtype) {
            return Err(error("dtype F32, F16 or BF16".to_owned(), format!("{:?}", info.dtype)));
        }
        Ok(())
    }
}

/// Layer number and the rest of the name, for `{prefix}{number}.{rest}`.
pub fn layer_of<'n>(name: &'n str, prefix: &str) -> Option<(usize, &'n str)> {
    let (number, rest) = name.strip_prefix(prefix)?.split_once('.')?;
    Some((number.parse().ok()?, rest))
}
