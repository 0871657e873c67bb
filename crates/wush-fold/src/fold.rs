//! `fold` and `unfold`: a checkpoint and transforms in, a checkpoint in other value coordinates out.

use std::collections::BTreeMap;
use std::path::Path;

use wush_checkpoint::{Checkpoint, weights_hash};
use wush_format::bundle::ValueSidecar;
use wush_format::hash::Sha;
use wush_format::manifest::FileEntry;
use wush_format::monitor::Monitor;
use wush_format::transforms::{HeadMatrices, Transforms};
use wush_model::spec::ModelSpec;

use crate::plan::{Direction, Target, plan};
use crate::report::FoldReport;
use crate::write::write;
use crate::{FoldError, Result};

/// Dtype of the tensors that a fold changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FoldDtype {
    /// As stored: one rounding to it. Headers and offsets stay byte for byte.
    #[default]
    Keep,
    /// F32, so that nothing visible is rounded. The shards keep their names, tensors and order; the changed tensors'
    /// `dtype`, the offsets behind them and the index's `metadata.total_size` follow, nothing else. (F64 stays F64.)
    F32,
}

impl FoldDtype {
    /// Its name in the manifest and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Keep => "keep",
            Self::F32 => "f32",
        }
    }
}

impl From<FoldDtype> for Target {
    fn from(dtype: FoldDtype) -> Self {
        match dtype {
            FoldDtype::Keep => Self::Keep,
            FoldDtype::F32 => Self::F32,
        }
    }
}

/// Dtype of the tensors that an unfold changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum UnfoldDtype {
    /// As stored in the bundle.
    Keep,
    /// The dtype of the same layer's MLP output projection, which no fold touches: the original's, in every checkpoint
    /// whose layers have one dtype.
    #[default]
    Original,
}

/// What was read and what was written. Lists are sorted by path.
#[derive(Debug, Clone, PartialEq)]
pub struct FoldOutcome {
    /// Every file of the source: shards, index, configuration, tokenizer and the rest.
    pub source_files: Vec<FileEntry>,
    /// Every file written.
    pub files: Vec<FileEntry>,
    /// Folding's own error, head by head.
    pub report: FoldReport,
    /// Hash over the source's weights.
    pub model_hash: Sha,
    /// Hash over the written weights.
    pub folded_hash: Sha,
}

/// Folds the value transforms of `transforms` into `checkpoint` (Section 4.2; Algorithm 1, line 9) and writes the result
/// into the empty directory `out`.
///
/// Per KV head, rows of an `nn.Linear` weight `[n_kv·d, hidden]`: `W_V ← T_V W_V`, `b_V ← T_V b_V`; and for every query
/// head that reads it, the d columns of the output projection `[hidden, n_q·d]`: `W_O ← W_O T_V^{-1}` (Eq. 3). Products
/// are f64 and rounded once, to nearest even. All else, the output bias and tied embeddings among it, is copied byte for
/// byte. The output's bytes do not depend on the number of threads.
///
/// Memory: the map of the shards, and a few of the largest changed tensor.
///
/// # Errors
/// Before anything is written: a layer without transform or the reverse, wrong shapes, a transform that is not finite or
/// not invertible ([`FoldError::Singular`]), a tensor with two roles, a source that is a bundle already. After the pass,
/// in which the weights are hashed: [`FoldError::WrongModel`]. `out` then holds files that the caller drops, as with
/// [`FoldError::Overflow`], [`FoldError::NonFiniteWeight`], I/O errors and [`FoldError::Interrupted`].
pub fn fold(
    checkpoint: &Checkpoint,
    spec: &ModelSpec,
    transforms: &Transforms,
    out: &Path,
    dtype: FoldDtype,
    monitor: &dyn Monitor,
) -> Result<FoldOutcome> {
    if checkpoint.is_bundle() {
        return Err(FoldError::AlreadyFolded { dir: checkpoint.dir().to_owned() });
    }
    let values = transforms.layers.iter().map(|(&layer, transforms)| (layer, transforms.value.clone())).collect();
    run(checkpoint, spec, &values, (Direction::Fold, dtype.into()), transforms.model_hash, out, monitor)
}

/// Undoes [`fold`] with the value sidecar of the bundle: `W_V = T^{-1} W_V'`, `b_V = T^{-1} b_V'`, `W_O = W_O' T`. Gives
/// the original within the rounding of both folds and of the sidecar's f32; `wush/` is left out.
///
/// # Errors
/// As [`fold`]; [`FoldError::WrongModel`] when the sidecar belongs to other weights.
pub fn unfold(
    bundle: &Checkpoint,
    spec: &ModelSpec,
    sidecar: &ValueSidecar,
    out: &Path,
    dtype: UnfoldDtype,
    monitor: &dyn Monitor,
) -> Result<FoldOutcome> {
    let widen = |layer: &wush_format::bundle::ValueLayer| HeadMatrices {
        n_heads: layer.n_kv_heads,
        dim: layer.head_dim,
        data: layer.value.iter().map(|&x| f64::from(x)).collect(),
    };
    let values = sidecar.layers.iter().map(|(&layer, value)| (layer, widen(value))).collect();
    let target = match dtype {
        UnfoldDtype::Keep => Target::Keep,
        UnfoldDtype::Original => Target::LikeMlp,
    };
    run(bundle, spec, &values, (Direction::Unfold, target), sidecar.model_hash, out, monitor)
}

fn run(
    checkpoint: &Checkpoint,
    spec: &ModelSpec,
    values: &BTreeMap<usize, HeadMatrices>,
    (direction, target): (Direction, Target),
    expected: Sha,
    out: &Path,
    monitor: &dyn Monitor,
) -> Result<FoldOutcome> {
    let plan = plan(checkpoint, spec, values, direction, target)?;
    let written = write(checkpoint, &plan, out, monitor)?;
    let found = weights_hash(&written.source_shards);
    if found != expected {
        return Err(FoldError::WrongModel { expected, found });
    }
    Ok(FoldOutcome {
        model_hash: found,
        folded_hash: weights_hash(&written.shards),
        source_files: written.source_files,
        files: written.files,
        report: written.report,
    })
}
