//! OLMo 2: q/k norms over the whole projection before the head split, norms after attention and MLP and none before.

use super::build::{AttentionBias, Builder, Defaults, Dims, activation};
use super::{Context, Family};
use crate::error::ModelError;
use crate::spec::{Activation, LayerSpec, ModelSpec, QkNorm};

pub(super) const FAMILY: Family = Family {
    name: "olmo2",
    model_types: &["olmo2"],
    architectures: &["Olmo2ForCausalLM", "Olmo2Model"],
    docs: "OLMo 2; q/k norms over the full width, norms after attention and MLP only",
    build,
};

fn build(context: &Context<'_>) -> Result<ModelSpec, ModelError> {
    let config = &context.config;
    let defaults = Defaults { max_positions: Some(2048), eps: Some(1e-5), ..Defaults::default() };
    let dims = Dims::read(config, &defaults)?;
    let builder = Builder { context, dims: &dims, norm_plus_one: false };
    let rope = builder.rope(1e4)?;
    let attention_bias = config.flag("attention_bias", false)?;
    let bias = AttentionBias { qkv: attention_bias, output: attention_bias };
    let act = activation(config, "hidden_act", Activation::Silu)?;
    let layer = |i| {
        let mut attn = builder.attention(i, bias, Some(rope.clone()), None);
        attn.q_norm = QkNorm::FullWidth(builder.norm(i, "self_attn.q_norm", dims.q_width()));
        attn.k_norm = QkNorm::FullWidth(builder.norm(i, "self_attn.k_norm", dims.kv_width()));
        LayerSpec {
            attn_pre_norm: None,
            attn,
            attn_post_norm: Some(builder.norm(i, "post_attention_layernorm", dims.hidden)),
            mlp_pre_norm: None,
            mlp: builder.mlp(i, false, act),
            mlp_post_norm: Some(builder.norm(i, "post_feedforward_layernorm", dims.hidden)),
        }
    };
    Ok(builder.finish((0..dims.n_layers).map(layer).collect()))
}
