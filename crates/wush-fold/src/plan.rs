//! Which elements of which tensor are multiplied by what: everything is checked here, before a byte is written.
//!
//! Enters: the checkpoint's headers, the model's spec and the value transforms. Leaves: a [`FoldPlan`], the edits by
//! tensor. Reads no weights.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use wush_checkpoint::Checkpoint;
use wush_format::transforms::HeadMatrices;
use wush_model::spec::{AttentionSpec, LayerSpec, ModelSpec, TensorSlice};

use crate::dense::transposed;
use crate::invert::{condition_limit, invert};
use crate::number::Element;
use crate::{FoldError, Result};

/// The two matrices of one KV head. Both act from the left on columns of length d.
#[derive(Debug)]
pub(crate) struct HeadPlan {
    pub(crate) layer: usize,
    pub(crate) head: usize,
    pub(crate) dim: usize,
    /// Applied to the head's value rows and to its bias: T to fold, T^{-1} to unfold.
    pub(crate) value: Vec<f64>,
    /// Applied to the transposed output block: T^{-T} to fold, Tᵀ to unfold.
    pub(crate) output: Vec<f64>,
    pub(crate) condition: f64,
    /// Number of edits (value, bias, one a query head) that make up this head.
    pub(crate) n_edits: usize,
}

/// What an edit changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Value,
    ValueBias,
    Output,
}

/// One block X of a tensor, `[d, n]` as the matrix sees it: d rows of the tensor, or d columns of it transposed.
#[derive(Debug, Clone)]
pub(crate) struct Edit {
    pub(crate) role: Role,
    /// Index into [`FoldPlan::heads`].
    pub(crate) head: usize,
    /// Rows of the tensor.
    pub(crate) rows: Range<usize>,
    /// Columns of the tensor.
    pub(crate) cols: Range<usize>,
}

/// A tensor that changes.
#[derive(Debug)]
pub(crate) struct TensorPlan {
    pub(crate) source: Element,
    pub(crate) target: Element,
    /// Columns of the tensor, 1 for a vector.
    pub(crate) n_cols: usize,
    pub(crate) edits: Vec<Edit>,
}

/// The tensors that change, by name.
pub(crate) type Tensors = BTreeMap<String, TensorPlan>;

/// All that a fold changes.
#[derive(Debug, Default)]
pub(crate) struct FoldPlan {
    pub(crate) tensors: Tensors,
    pub(crate) heads: Vec<HeadPlan>,
}

/// Towards the transformed coordinates or back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Fold,
    Unfold,
}

/// Dtype of the tensors that change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    /// As stored.
    Keep,
    /// F32 (an F64 tensor stays as it is).
    F32,
    /// That of the layer's MLP output projection.
    LikeMlp,
}

/// Checks everything that can be known from headers and transforms, and lists the edits.
pub(crate) fn plan(
    checkpoint: &Checkpoint,
    spec: &ModelSpec,
    transforms: &BTreeMap<usize, HeadMatrices>,
    direction: Direction,
    target: Target,
) -> Result<FoldPlan> {
    if let Some((&layer, _)) = transforms.range(spec.layers.len()..).next() {
        return Err(FoldError::UnknownLayer { layer, n_layers: spec.layers.len() });
    }
    let mut heads = Vec::new();
    for (layer, layer_spec) in spec.layers.iter().enumerate() {
        let value = transforms.get(&layer).ok_or(FoldError::MissingLayer { layer })?;
        let attn = &layer_spec.attn;
        check_shape(layer, attn, value)?;
        for head in 0..attn.n_kv_heads {
            heads.push(plan_head(layer, head, attn, value.head(head), direction)?);
        }
    }
    Ok(FoldPlan { tensors: plan_tensors(checkpoint, spec, target)?, heads })
}

/// The part of the plan that needs no transforms: the tensors that change, and their edits.
pub(crate) fn plan_tensors(checkpoint: &Checkpoint, spec: &ModelSpec, target: Target) -> Result<Tensors> {
    let mut tensors = Tensors::new();
    let mut n_heads = 0;
    for layer_spec in &spec.layers {
        plan_layer(&mut tensors, checkpoint, layer_spec, n_heads, target)?;
        n_heads += layer_spec.attn.n_kv_heads;
    }
    check_shared(spec, &tensors)?;
    Ok(tensors)
}

fn check_shape(layer: usize, attn: &AttentionSpec, value: &HeadMatrices) -> Result<()> {
    let expected = [attn.n_kv_heads, attn.head_dim, attn.head_dim];
    let found = [value.n_heads, value.dim, value.dim];
    let n_values = attn.n_kv_heads * attn.head_dim * attn.head_dim;
    if expected == found && value.data.len() == n_values {
        Ok(())
    } else {
        Err(FoldError::WrongShape { layer, expected, found })
    }
}

fn plan_head(
    layer: usize,
    head: usize,
    attn: &AttentionSpec,
    transform: &[f64],
    direction: Direction,
) -> Result<HeadPlan> {
    let dim = attn.head_dim;
    if transform.iter().any(|x| !x.is_finite()) {
        return Err(FoldError::NonFiniteTransform { layer, head });
    }
    let inverse = invert(transform, dim);
    let limit = condition_limit(dim);
    // Written so that a NaN condition is refused too.
    if inverse.condition.is_nan() || inverse.condition > limit {
        return Err(FoldError::Singular { layer, head, condition: inverse.condition, limit });
    }
    let (value, output) = match direction {
        Direction::Fold => (transform.to_vec(), transposed(&inverse.matrix, dim)),
        Direction::Unfold => (inverse.matrix, transposed(transform, dim)),
    };
    let n_edits = 1 + usize::from(attn.v.bias.is_some()) + attn.n_heads / attn.n_kv_heads;
    Ok(HeadPlan { layer, head, dim, value, output, condition: inverse.condition, n_edits })
}

/// Adds the edits of one layer; `first` is the plan's index of its KV head 0.
fn plan_layer(
    tensors: &mut Tensors,
    checkpoint: &Checkpoint,
    layer_spec: &LayerSpec,
    first: usize,
    target: Target,
) -> Result<()> {
    let attn = &layer_spec.attn;
    let (dim, group) = (attn.head_dim, attn.n_heads / attn.n_kv_heads);
    let mlp = locate(checkpoint, &layer_spec.mlp.down.weight)?;
    let slices = [
        (Role::Value, Some(&attn.v.weight)),
        (Role::ValueBias, attn.v.bias.as_ref()),
        (Role::Output, Some(&attn.o.weight)),
    ];
    for (role, slice) in slices.into_iter().filter_map(|(role, slice)| Some((role, slice?))) {
        let source = locate(checkpoint, slice)?;
        let target = match target {
            Target::Keep => source,
            Target::F32 if source == Element::F64 => source,
            Target::F32 => Element::F32,
            Target::LikeMlp => mlp,
        };
        let (n_blocks, length) = match role {
            Role::Output => (attn.n_heads, slice.cols),
            Role::Value | Role::ValueBias => (attn.n_kv_heads, slice.rows.len()),
        };
        if length != n_blocks * dim {
            let found = format!("{length} where {n_blocks} heads of {dim} were expected");
            return Err(FoldError::WrongTensor {
                tensor: slice.name.clone(),
                rows: slice.rows.len(),
                cols: slice.cols,
                found,
            });
        }
        let blocks = (0..n_blocks).map(|block| {
            let along = |start: usize| start + block * dim..start + (block + 1) * dim;
            let (rows, cols) = match role {
                Role::Output => (slice.rows.clone(), along(0)),
                Role::Value | Role::ValueBias => (along(slice.rows.start), 0..slice.cols),
            };
            Edit { role, head: first + if role == Role::Output { block / group } else { block }, rows, cols }
        });
        let n_cols = slice.cols;
        let tensor = tensors.entry(slice.name.clone());
        tensor.or_insert_with(|| TensorPlan { source, target, n_cols, edits: Vec::new() }).edits.extend(blocks);
    }
    Ok(())
}

/// The element type of the tensor that `slice` names, once its shape is found to be the one that the slice states.
fn locate(checkpoint: &Checkpoint, slice: &TensorSlice) -> Result<Element> {
    let wrong = |found: String| FoldError::WrongTensor {
        tensor: slice.name.clone(),
        rows: slice.total_rows,
        cols: slice.cols,
        found,
    };
    let (_, info) = checkpoint.locate(&slice.name).ok_or_else(|| wrong("nothing".to_owned()))?;
    let fits = match info.shape.as_slice() {
        [len] => slice.cols == 1 && *len == slice.total_rows,
        [rows, cols] => *rows == slice.total_rows && *cols == slice.cols,
        _ => false,
    };
    if !fits || slice.rows.end > slice.total_rows {
        return Err(wrong(format!("{:?}", info.shape)));
    }
    Element::of(info.dtype).ok_or_else(|| FoldError::WrongDtype { tensor: slice.name.clone(), dtype: info.dtype })
}

/// A slice of the model, what it is for, and whether folding changes it.
struct Reader<'a> {
    slice: &'a TensorSlice,
    role: String,
    folded: bool,
}

/// Refuses a tensor of which an edited row has a second role (of another layer, or outside attention).
fn check_shared(spec: &ModelSpec, tensors: &Tensors) -> Result<()> {
    let mut by_tensor: BTreeMap<&str, Vec<Reader<'_>>> = BTreeMap::new();
    for reader in readers(spec).into_iter().filter(|reader| tensors.contains_key(&reader.slice.name)) {
        by_tensor.entry(&reader.slice.name).or_default().push(reader);
    }
    for (tensor, mut readers) in by_tensor {
        readers.sort_by_key(|reader| reader.slice.rows.start);
        for (i, first) in readers.iter().enumerate() {
            let mut overlapping =
                readers[i + 1..].iter().take_while(|next| next.slice.rows.start < first.slice.rows.end);
            if let Some(second) = overlapping.find(|second| first.folded || second.folded) {
                let (tensor, first, second) = (tensor.to_owned(), first.role.clone(), second.role.clone());
                return Err(FoldError::SharedTensor { tensor, first, second });
            }
        }
    }
    Ok(())
}

/// Every slice that the forward reads.
fn readers(spec: &ModelSpec) -> Vec<Reader<'_>> {
    let mut out = Vec::new();
    let mut known = HashSet::new();
    for (layer, layer_spec) in spec.layers.iter().enumerate() {
        let attn = &layer_spec.attn;
        let folded = [
            ("values", Some(&attn.v.weight)),
            ("value bias", attn.v.bias.as_ref()),
            ("output projection", Some(&attn.o.weight)),
        ];
        for (name, slice) in folded.into_iter().filter_map(|(name, slice)| Some((name, slice?))) {
            known.insert(std::ptr::from_ref(slice));
            out.push(Reader { slice, role: format!("layer {layer}'s {name}"), folded: true });
        }
    }
    let others = spec.slices().into_iter().filter(|slice| !known.contains(&std::ptr::from_ref(*slice)));
    out.extend(others.map(|slice| Reader { slice, role: "another part of the model".to_owned(), folded: false }));
    out
}
