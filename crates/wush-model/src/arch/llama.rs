//! Llama 2 and 3.x, SmolLM2 and the many models under the same type: RMS norms before attention and MLP, optional biases.

use super::build::{AttentionBias, Builder, Defaults, Dims, activation};
use super::{Context, Family};
use crate::error::ModelError;
use crate::spec::{Activation, ModelSpec};

pub(super) const FAMILY: Family = Family {
    name: "llama",
    model_types: &["llama"],
    architectures: &["LlamaForCausalLM", "LLaMAForCausalLM", "LlamaModel"],
    docs: "Llama 2, 3, 3.1, 3.2 (text), 3.3, SmolLM2, Yi, DeepSeek-R1-Distill-Llama and others of this type; \
           `attention_bias`, `mlp_bias`",
    build,
};

fn build(context: &Context<'_>) -> Result<ModelSpec, ModelError> {
    let config = &context.config;
    let defaults = Defaults { max_positions: Some(2048), eps: Some(1e-6), ..Defaults::default() };
    let dims = Dims::read(config, &defaults)?;
    let builder = Builder { context, dims: &dims, norm_plus_one: false };
    let rope = builder.rope(1e4)?;
    let attention_bias = config.flag("attention_bias", false)?;
    let bias = AttentionBias { qkv: attention_bias, output: attention_bias };
    let mlp_bias = config.flag("mlp_bias", false)?;
    let act = activation(config, "hidden_act", Activation::Silu)?;
    let layer = |i| {
        let attn = builder.attention(i, bias, Some(rope.clone()), None);
        builder.pre_norm_layer(i, attn, builder.mlp(i, mlp_bias, act))
    };
    Ok(builder.finish((0..dims.n_layers).map(layer).collect()))
}
