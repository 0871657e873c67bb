//! One layer's weights on the device, loaded by role.

use wush_checkpoint::Checkpoint;

use crate::backend::{Affine, Backend, RmsNorm};
use crate::error::Result;
use crate::spec::{LayerSpec, NormSpec, Projection, QkNorm};
use crate::weights;

/// The weights of one layer; roles as in [`LayerSpec`].
pub(crate) struct Layer<B: Backend> {
    pub attn_pre_norm: Option<Norm<B>>,
    pub q: Linear<B>,
    pub k: Linear<B>,
    pub v: Linear<B>,
    pub o: Linear<B>,
    pub q_norm: Option<Norm<B>>,
    pub k_norm: Option<Norm<B>>,
    pub attn_post_norm: Option<Norm<B>>,
    pub mlp_pre_norm: Option<Norm<B>>,
    pub gate: Linear<B>,
    pub up: Linear<B>,
    pub down: Linear<B>,
    pub mlp_post_norm: Option<Norm<B>>,
}

/// A norm's multiplier (1 already added where the family has 1 + w) and its epsilon.
pub(crate) struct Norm<B: Backend> {
    pub weight: B::Vector,
    pub eps: f32,
}

/// A projection's weight `[out, in]` and bias `[out]`.
pub(crate) struct Linear<B: Backend> {
    pub weight: B::Matrix,
    pub bias: Option<B::Vector>,
}

impl<B: Backend> Layer<B> {
    /// Widens one layer's tensors, and lets their stored form go.
    ///
    /// # Errors
    /// A tensor that is absent or has another shape.
    pub fn load(checkpoint: &Checkpoint, spec: &LayerSpec, backend: &B) -> Result<Self> {
        let loaded = Self::widen(checkpoint, spec, backend)?;
        spec.slices().for_each(|slice| checkpoint.release(&slice.name));
        Ok(loaded)
    }

    fn widen(checkpoint: &Checkpoint, spec: &LayerSpec, backend: &B) -> Result<Self> {
        let norm = |spec: &Option<NormSpec>| spec.as_ref().map(|s| Norm::load(checkpoint, s, backend)).transpose();
        let head_norm = |spec: &QkNorm| match spec {
            QkNorm::None => Ok(None),
            QkNorm::PerHead(s) | QkNorm::FullWidth(s) => Norm::load(checkpoint, s, backend).map(Some),
        };
        let linear = |spec: &Projection| Linear::load(checkpoint, spec, backend);
        Ok(Self {
            attn_pre_norm: norm(&spec.attn_pre_norm)?,
            q: linear(&spec.attn.q)?,
            k: linear(&spec.attn.k)?,
            v: linear(&spec.attn.v)?,
            o: linear(&spec.attn.o)?,
            q_norm: head_norm(&spec.attn.q_norm)?,
            k_norm: head_norm(&spec.attn.k_norm)?,
            attn_post_norm: norm(&spec.attn_post_norm)?,
            mlp_pre_norm: norm(&spec.mlp_pre_norm)?,
            gate: linear(&spec.mlp.gate)?,
            up: linear(&spec.mlp.up)?,
            down: linear(&spec.mlp.down)?,
            mlp_post_norm: norm(&spec.mlp_post_norm)?,
        })
    }
}

impl<B: Backend> Norm<B> {
    pub fn load(checkpoint: &Checkpoint, spec: &NormSpec, backend: &B) -> Result<Self> {
        let add = if spec.plus_one { 1.0 } else { 0.0 };
        let view = weights::view(checkpoint, &spec.weight)?;
        Ok(Self { weight: backend.vector(view, spec.weight.rows.clone(), add), eps: spec.eps })
    }

    /// As the device's operations take it.
    pub fn as_ref(&self) -> RmsNorm<'_, B> {
        RmsNorm { weight: &self.weight, eps: self.eps }
    }
}

impl<B: Backend> Linear<B> {
    fn load(checkpoint: &Checkpoint, spec: &Projection, backend: &B) -> Result<Self> {
        let weight = backend.matrix(weights::view(checkpoint, &spec.weight)?, spec.weight.rows.clone());
        let bias = spec.bias.as_ref().map(|bias| {
            Ok::<_, crate::ModelError>(backend.vector(weights::view(checkpoint, bias)?, bias.rows.clone(), 0.0))
        });
        Ok(Self { weight, bias: bias.transpose()? })
    }

    /// As the device's operations take it.
    pub fn as_ref(&self) -> Affine<'_, B> {
        Affine { weight: &self.weight, bias: self.bias.as_ref() }
    }
}
