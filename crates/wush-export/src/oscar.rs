//! Rotation checkpoints of OSCAR's 2-bit KV cache, one of keys and one of values, in both of its layouts.
//!
//! Source: <https://github.com/FutureMLS-Lab/OSCAR>. Format 1 is what `rotation/compute_kv_rotation.py` saves (commit 473ff3f),
//! format 2 what `rotation/fit_perhead_rotation.py` does (commit 4bcec6b); both are read by `load_oscar_rotations` of the
//! project's SGLang (commit 8dbf789), format 1 also by sgl-project/sglang#32129 and vllm-project/vllm#46774. All of them take
//! `layers[id]["rotation"]` and nothing else. Format 1's `eigenvalues`, which none of them reads, are not written: a bundle does
//! not have them.

use std::path::Path;

use crate::torch::{Tensor, Value, write_torch_file};
use crate::{ExportError, HeadRotations, Result, Role, Rotations};

/// The file of keys' rotations.
pub const KEY_FILE: &str = "k_rotation.pt";
/// The file of values' rotations.
pub const VALUE_FILE: &str = "v_rotation.pt";

/// The family of all formats here.
const OSCAR: &str = "oscar";

/// How a file holds a layer's rotations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Layout {
    /// `[d, d]`, for all heads.
    Layer,
    /// `[n_kv, d, d]`, one a KV head of the whole model; a rank of a tensor parallel group takes its own.
    Head,
}

impl Layout {
    /// `format_version`.
    fn version(self) -> u32 {
        match self {
            Self::Layer => 1,
            Self::Head => 2,
        }
    }

    /// `source_grouping`.
    fn grouping(self) -> &'static str {
        match self {
            Self::Layer => "layer",
            Self::Head => "per_kv_head",
        }
    }
}

/// A format of another server.
#[derive(Debug, Clone, Copy)]
pub struct Format {
    /// Name on the command line.
    pub name: &'static str,
    /// One line for help and docs.
    pub doc: &'static str,
    /// Whose format it is, in whatever version.
    pub family: &'static str,
    /// None: the first that holds the rotations.
    layout: Option<Layout>,
}

/// Every format.
pub const FORMATS: &[Format] = &[
    Format {
        name: "oscar",
        doc: "Rotation checkpoints of OSCAR's KV cache: format 1 where the heads of each layer share a rotation, 2 where not",
        family: OSCAR,
        layout: None,
    },
    Format { name: "oscar-1", doc: "Their format 1, one rotation a layer", family: OSCAR, layout: Some(Layout::Layer) },
    Format {
        name: "oscar-2",
        doc: "Their format 2, one rotation a KV head",
        family: OSCAR,
        layout: Some(Layout::Head),
    },
];

impl Format {
    /// The format of this name.
    pub fn find(name: &str) -> Option<&'static Self> {
        FORMATS.iter().find(|format| format.name == name)
    }

    /// Writes [`KEY_FILE`] and [`VALUE_FILE`] into `dir`, and says which `format_version` both have.
    ///
    /// # Errors
    /// `HeadsDiffer` where a layer has more rotations than the format holds; `Io`; `TooLarge`.
    pub fn write(&self, rotations: &Rotations, dir: &Path) -> Result<u32> {
        let differing = first_difference(rotations);
        let layout = match (self.layout, differing) {
            (Some(Layout::Layer), Some((layer, head, role))) => {
                return Err(ExportError::HeadsDiffer { layer, head, role, format: self.name });
            }
            (Some(layout), _) => layout,
            (None, None) => Layout::Layer,
            (None, Some(_)) => Layout::Head,
        };
        for (role, name) in [(Role::Key, KEY_FILE), (Role::Value, VALUE_FILE)] {
            write_torch_file(&dir.join(name), &checkpoint(rotations, role, layout))?;
        }
        Ok(layout.version())
    }
}

/// The first head whose rotation is not that of its layer's first head.
fn first_difference(rotations: &Rotations) -> Option<(usize, usize, Role)> {
    rotations.layers().iter().find_map(|(&layer, of)| {
        of.roles().into_iter().find_map(|(role, heads)| Some((layer, heads.other_head()?, role)))
    })
}

/// `{"format_version", "objective", "source_grouping", "layers": {id: {"layer_id", "rotation"}}}`.
fn checkpoint(rotations: &Rotations, role: Role, layout: Layout) -> Value {
    let layers = rotations.layers().iter().map(|(&id, of)| {
        let [(_, key), (_, value)] = of.roles();
        let rotation = Value::Tensor(tensor(if role == Role::Key { key } else { value }, layout));
        (Value::Int(id), Value::Dict(vec![("layer_id".into(), Value::Int(id)), ("rotation".into(), rotation)]))
    });
    Value::Dict(vec![
        ("format_version".into(), Value::Int(layout.version() as usize)),
        ("objective".into(), rotations.objective(role).into()),
        ("source_grouping".into(), layout.grouping().into()),
        ("layers".into(), Value::Dict(layers.collect())),
    ])
}

fn tensor(rotations: &HeadRotations, layout: Layout) -> Tensor {
    let HeadRotations { n_heads, dim, data, .. } = rotations;
    let (shape, data) = match layout {
        Layout::Layer => (vec![*dim, *dim], rotations.head(0).to_vec()),
        Layout::Head => (vec![*n_heads, *dim, *dim], data.clone()),
    };
    Tensor::new(shape, data).expect("rotations are [n_heads, dim, dim]")
}
