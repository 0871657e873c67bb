//! Transforms as rotations of row vectors, R = Tᵀ in f32: from a bundle's sidecars or a transforms file, once it is certain
//! that a format of rotations holds them exactly.

use std::collections::BTreeMap;
use std::fmt;

use wush_format::bundle::KeySidecar;
use wush_format::transforms::{HeadMatrices, LayerTransforms, Transforms};

use crate::{ExportError, Result};

/// Largest |R Rᵀ − I| of a matrix that is orthogonal but for rounding: rows of length 1, each element rounded to f32 once with
/// a relative error of at most u = 2⁻²⁴, change a product of two rows by at most 2u + u² (Cauchy-Schwarz); as much again
/// is left to what the solver's f64 left, which for any head dimension is far less.
pub const ORTHOGONALITY_TOL: f64 = 1.0 / (1 << 22) as f64;

/// The `objective` of values that a bundle's weights hold.
const IDENTITY: &str = "identity";

/// What a rotation turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Keys, and queries with them.
    Key,
    /// Values, and attention's output back.
    Value,
}

impl Role {
    /// What a format of rotations cannot do without orthogonality.
    pub(crate) fn reason(self) -> &'static str {
        match self {
            Self::Key => "has one matrix for keys and queries",
            Self::Value => "takes attention's output back by the transpose",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Key => "key",
            Self::Value => "value",
        })
    }
}

/// Rotations of row vectors, one a KV head: `[n_heads, d, d]`, row-major f32; the cache holds x R.
#[derive(Debug, Clone, PartialEq)]
pub struct HeadRotations {
    /// Number of KV heads.
    pub n_heads: usize,
    /// Head dimension d.
    pub dim: usize,
    /// `n_heads * dim * dim` values.
    pub data: Vec<f32>,
    /// The head that is least orthogonal, and its largest |R Rᵀ − I|, in f64: NaN where there is one.
    pub worst: (usize, f64),
}

impl HeadRotations {
    /// R = Tᵀ of transforms `[n_heads, dim, dim]` in the column convention.
    fn of_columns(n_heads: usize, dim: usize, transforms: impl Fn(usize) -> f32) -> Self {
        let square = dim * dim;
        let element = |at: usize| transforms(at / square * square + at % dim * dim + at % square / dim);
        Self::new(n_heads, dim, (0..n_heads * square).map(element).collect())
    }

    fn new(n_heads: usize, dim: usize, data: Vec<f32>) -> Self {
        let errors = data.chunks_exact((dim * dim).max(1)).map(|r| orthogonality_error(r, dim)).enumerate();
        let worst = errors.fold((0, 0.0), |worst, next| if is_worse(next.1, worst.1) { next } else { worst });
        Self { n_heads, dim, data, worst }
    }

    /// The identity, for every head.
    fn identity(n_heads: usize, dim: usize) -> Self {
        Self::of_columns(n_heads, dim, |at| if at / dim % dim == at % dim { 1.0 } else { 0.0 })
    }

    /// One head's R, row-major `[dim, dim]`.
    pub fn head(&self, head: usize) -> &[f32] {
        &self.data[head * self.dim * self.dim..][..self.dim * self.dim]
    }

    /// The first KV head whose rotation is not head 0's.
    pub fn other_head(&self) -> Option<usize> {
        (1..self.n_heads).find(|&head| self.head(head) != self.head(0))
    }
}

/// Largest element of |R Rᵀ − I| for R row-major `[dim, dim]`, summed in f64.
fn orthogonality_error(r: &[f32], dim: usize) -> f64 {
    let rows: Vec<&[f32]> = r.chunks_exact(dim.max(1)).collect();
    let mut worst = 0.0;
    for (i, a) in rows.iter().enumerate() {
        for (j, b) in rows.iter().enumerate().skip(i) {
            let product: f64 = a.iter().zip(*b).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum();
            let error = (product - if i == j { 1.0 } else { 0.0 }).abs();
            worst = if is_worse(error, worst) { error } else { worst };
        }
    }
    worst
}

/// Whether an error is larger; a NaN is, and nothing is larger than one.
fn is_worse(error: f64, than: f64) -> bool {
    error > than || error.is_nan()
}

/// Rotations of one attention layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerRotations {
    /// Of keys and queries, after RoPE.
    pub key: HeadRotations,
    /// Of values; attention's output is turned back by the transpose.
    pub value: HeadRotations,
}

impl LayerRotations {
    /// Both, keys first.
    pub fn roles(&self) -> [(Role, &HeadRotations); 2] {
        [(Role::Key, &self.key), (Role::Value, &self.value)]
    }
}

/// Rotations of a model, by global layer id. Each is orthogonal within [`ORTHOGONALITY_TOL`].
#[derive(Debug, Clone, PartialEq)]
pub struct Rotations {
    layers: BTreeMap<usize, LayerRotations>,
    /// What the rotations of keys are, a transform's name.
    key_objective: String,
    /// The same of values.
    value_objective: String,
}

impl Rotations {
    /// For a server of the bundle itself: keys as the sidecar says, values by the identity, since the weights hold theirs.
    /// `transform`: registry name.
    ///
    /// # Errors
    /// `NotOrthogonal`, `CenteredKeys`, `Feedback`.
    pub fn of_bundle(keys: &KeySidecar, transform: &str) -> Result<Self> {
        let layers = keys.layers.iter().map(|(&layer, of)| {
            let key = HeadRotations::of_columns(of.n_kv_heads, of.head_dim, |at| of.key[at]);
            (layer, LayerRotations { key, value: HeadRotations::identity(of.n_kv_heads, of.head_dim) })
        });
        let rotations = Self::checked(layers.collect(), transform, IDENTITY)?;
        keys.layers.iter().try_for_each(|(&layer, of)| refuse_means(layer, &of.centered_keys()))?;
        refuse_feedback(keys.layers.values().any(|of| of.key_feedback.is_some()))?;
        Ok(rotations)
    }

    /// For a server of the model that the transforms were solved for: it rotates keys and values.
    ///
    /// # Errors
    /// `NotOrthogonal`, `CenteredKeys`, `Feedback`.
    pub fn of_transforms(transforms: &Transforms) -> Result<Self> {
        // f32 as in a bundle's sidecars; beyond its range comes infinity, which is not orthogonal.
        let rotations = |of: &HeadMatrices| HeadRotations::of_columns(of.n_heads, of.dim, |at| of.data[at] as f32);
        let layers = transforms.layers.iter();
        let layers =
            layers.map(|(&layer, of)| (layer, LayerRotations { key: rotations(&of.key), value: rotations(&of.value) }));
        let name = &transforms.solve.transform;
        let rotations = Self::checked(layers.collect(), name, name)?;
        transforms.layers.iter().try_for_each(|(&layer, of)| refuse_means(layer, &of.centered_keys()))?;
        let has_feedback = |of: &LayerTransforms| of.key_feedback.is_some() || of.value_feedback.is_some();
        refuse_feedback(transforms.layers.values().any(has_feedback))?;
        Ok(rotations)
    }

    fn checked(layers: BTreeMap<usize, LayerRotations>, key_objective: &str, value_objective: &str) -> Result<Self> {
        for (&layer, rotations) in &layers {
            for (role, of) in rotations.roles() {
                let (head, found) = of.worst;
                let is_rounding = found <= ORTHOGONALITY_TOL;
                if !is_rounding {
                    return Err(ExportError::NotOrthogonal { layer, head, role, found, limit: ORTHOGONALITY_TOL });
                }
            }
        }
        Ok(Self { layers, key_objective: key_objective.to_owned(), value_objective: value_objective.to_owned() })
    }

    /// The layers, by global id.
    pub fn layers(&self) -> &BTreeMap<usize, LayerRotations> {
        &self.layers
    }

    /// What a role's rotations are: a transform's name.
    pub(crate) fn objective(&self, role: Role) -> &str {
        match role {
            Role::Key => &self.key_objective,
            Role::Value => &self.value_objective,
        }
    }
}

/// `heads`: those whose mean is not all zero.
fn refuse_means(layer: usize, heads: &[usize]) -> Result<()> {
    match heads.first() {
        Some(&head) => Err(ExportError::CenteredKeys { layer, head }),
        None => Ok(()),
    }
}

fn refuse_feedback(is_there: bool) -> Result<()> {
    if is_there { Err(ExportError::Feedback) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_become_rows_head_by_head() {
        let t = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];
        let found = HeadRotations::of_columns(2, 2, |at| t[at]);
        assert_eq!(found.data, [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
        assert_eq!(found.head(1), [4.0, 6.0, 5.0, 7.0]);
        assert_eq!(HeadRotations::identity(2, 2).data, [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0]);
    }

    #[test]
    fn the_worst_head_is_found_and_a_nan_is_worse_than_all() {
        let worst = |data: [f32; 3]| HeadRotations::new(3, 1, data.to_vec()).worst;
        assert_eq!(worst([1.0, -1.0, 1.0]), (0, 0.0));
        assert_eq!(worst([1.0, 2.0, 1.5]), (1, 3.0));
        let (head, error) = worst([2.0, f32::NAN, 1.0]);
        assert!(head == 1 && error.is_nan(), "{head}: {error}");
        let (head, error) = worst([1.0, 1.0, f32::INFINITY]);
        assert!(head == 2 && error == f64::INFINITY, "{head}: {error}");
    }

    #[test]
    fn rounding_a_rotation_to_f32_stays_within_the_tolerance() {
        for step in 0..1000 {
            let (sin, cos) = (f64::from(step) * 0.01).sin_cos();
            let rounded: Vec<f32> = [cos, -sin, sin, cos].map(|x| x as f32).to_vec();
            let error = orthogonality_error(&rounded, 2);
            assert!(error <= ORTHOGONALITY_TOL, "{step}: {error:e}");
        }
        assert!(orthogonality_error(&[1.0, 1e-6, 0.0, 1.0], 2) > ORTHOGONALITY_TOL);
    }
}
