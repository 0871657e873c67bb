//! One layer: its weights on the device, loaded by role, and what they do before and after the attention product.

use wush_checkpoint::Checkpoint;

use crate::backend::{Affine, Backend, Mlp, RmsNorm};
use crate::error::Result;
use crate::spec::{AttentionSpec, LayerSpec, NormSpec, Projection, QkNorm};
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

/// Queries, keys and values of some tokens in one layer, as the attention product gets them: after bias, norm and RoPE.
pub(crate) struct Qkv<T> {
    pub q: T,
    pub k: T,
    pub v: T,
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

    /// What goes into the attention product, from the residual stream `x` `[tokens, hidden]`.
    pub fn qkv(
        &self,
        backend: &B,
        spec: &AttentionSpec,
        x: &B::Tensor,
        table: Option<&B::Rope>,
    ) -> Result<Qkv<B::Tensor>> {
        let projections = [&self.q, &self.k, &self.v].map(Linear::as_ref);
        let [mut q, mut k, v] = backend.project(x, self.attn_pre_norm.as_ref().map(Norm::as_ref), projections)?;
        norm_and_rotate(backend, &mut q, spec.head_dim, (&spec.q_norm, self.q_norm.as_ref()), table)?;
        norm_and_rotate(backend, &mut k, spec.head_dim, (&spec.k_norm, self.k_norm.as_ref()), table)?;
        Ok(Qkv { q, k, v })
    }

    /// The rest of the layer after the attention product, whose result is `attended`: output projection, MLP, residuals.
    pub fn finish(&self, backend: &B, spec: &LayerSpec, x: &mut B::Tensor, attended: &B::Tensor) -> Result<()> {
        backend.add_projected(x, attended, self.o.as_ref(), self.attn_post_norm.as_ref().map(Norm::as_ref))?;
        let mlp = Mlp {
            before: self.mlp_pre_norm.as_ref().map(Norm::as_ref),
            gate: self.gate.as_ref(),
            up: self.up.as_ref(),
            down: self.down.as_ref(),
            activation: spec.mlp.activation,
            after: self.mlp_post_norm.as_ref().map(Norm::as_ref),
        };
        backend.add_mlp(x, &mlp)
    }
}

fn norm_and_rotate<B: Backend>(
    backend: &B,
    x: &mut B::Tensor,
    head_dim: usize,
    (kind, norm): (&QkNorm, Option<&Norm<B>>),
    table: Option<&B::Rope>,
) -> Result<()> {
    let per_head = match kind {
        QkNorm::PerHead(_) => norm.map(|norm| (&norm.weight, norm.eps)),
        QkNorm::FullWidth(_) => {
            if let Some(norm) = norm {
                *x = backend.norm(x, norm.as_ref())?;
            }
            None
        }
        QkNorm::None => None,
    };
    backend.head_norm_rope(x, head_dim, per_head, table)
}

impl<B: Backend> Norm<B> {
    pub fn load(checkpoint: &Checkpoint, spec: &NormSpec, backend: &B) -> Result<Self> {
        let add = if spec.plus_one { 1.0 } else { 0.0 };
        let view = weights::view(checkpoint, &spec.weight)?;
        Ok(Self { weight: backend.vector(view, spec.weight.rows.clone(), add)?, eps: spec.eps })
    }

    /// As the device's operations take it.
    pub fn as_ref(&self) -> RmsNorm<'_, B> {
        RmsNorm { weight: &self.weight, eps: self.eps }
    }
}

impl<B: Backend> Linear<B> {
    fn load(checkpoint: &Checkpoint, spec: &Projection, backend: &B) -> Result<Self> {
        let weight = backend.matrix(weights::view(checkpoint, &spec.weight)?, spec.weight.rows.clone())?;
        let bias =
            spec.bias.as_ref().map(|bias| backend.vector(weights::view(checkpoint, bias)?, bias.rows.clone(), 0.0));
        Ok(Self { weight, bias: bias.transpose()? })
    }

    /// As the device's operations take it.
    pub fn as_ref(&self) -> Affine<'_, B> {
        Affine { weight: &self.weight, bias: self.bias.as_ref() }
    }
}
