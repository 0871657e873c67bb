//! Phi-3, Phi-3.5 mini, Phi-4 and Phi-4 mini: one fused projection for queries, keys and values (in this order), one for
//! gate and up, partial rotary, longrope.

use super::build::{Builder, Defaults, Dims, activation, sliding_window};
use super::rope::rope_spec;
use super::{Context, Family};
use crate::error::ModelError;
use crate::spec::{Activation, AttentionSpec, MlpSpec, ModelSpec, QkNorm};

pub(super) const FAMILY: Family = Family {
    name: "phi3",
    model_types: &["phi3"],
    architectures: &["Phi3ForCausalLM", "Phi3Model"],
    docs: "Phi-3 mini and medium, Phi-3.5 mini, Phi-4, Phi-4 mini; fused `qkv_proj` and `gate_up_proj`, \
           `partial_rotary_factor`, longrope",
    build,
};

/// The reference's length before extension when the key is absent.
const DEFAULT_ORIGINAL_POSITIONS: usize = 4096;

fn build(context: &Context<'_>) -> Result<ModelSpec, ModelError> {
    let config = &context.config;
    let defaults = Defaults { max_positions: Some(4096), eps: Some(1e-5), ..Defaults::default() };
    let dims = Dims::read(config, &defaults)?;
    let builder = Builder { context, dims: &dims, norm_plus_one: false };
    let mut rope = builder.rope_context(None, ("rope_theta", 1e4), true);
    rope.original_positions = Some(DEFAULT_ORIGINAL_POSITIONS);
    rope.legacy_longrope = true;
    let rope = rope_spec(config, &rope)?;
    let window = sliding_window(config)?;
    let act = activation(config, "hidden_act", Activation::Silu)?;
    let layer = |i| {
        let (q_width, kv_width, hidden) = (dims.q_width(), dims.kv_width(), dims.hidden);
        let [q, k, v] = builder.fused(i, "self_attn.qkv_proj", [q_width, kv_width, kv_width], hidden);
        let attn = AttentionSpec {
            n_heads: dims.n_heads,
            n_kv_heads: dims.n_kv_heads,
            head_dim: dims.head_dim,
            q,
            k,
            v,
            o: builder.projection(i, "self_attn.o_proj", (hidden, q_width), false),
            q_norm: QkNorm::None,
            k_norm: QkNorm::None,
            rope: Some(rope.clone()),
            window,
            scale: dims.scale(),
            logit_softcap: None,
        };
        let [gate, up] = builder.fused(i, "mlp.gate_up_proj", [dims.intermediate; 2], hidden);
        let down = builder.projection(i, "mlp.down_proj", (hidden, dims.intermediate), false);
        builder.pre_norm_layer(i, attn, MlpSpec { gate, up, down, activation: act })
    };
    Ok(builder.finish((0..dims.n_layers).map(layer).collect()))
}
