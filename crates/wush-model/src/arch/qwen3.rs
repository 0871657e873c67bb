//! Qwen3: headwise RMS norms of queries and keys before RoPE, head_dim apart from hidden_size, optional biases.

use super::build::{AttentionBias, Builder, Defaults, Dims, activation, qwen_windows};
use super::{Context, Family};
use crate::error::ModelError;
use crate::spec::{Activation, ModelSpec};

pub(super) const FAMILY: Family = Family {
    name: "qwen3",
    model_types: &["qwen3"],
    architectures: &["Qwen3ForCausalLM", "Qwen3Model"],
    docs: "Qwen3 (dense); headwise q/k norms, `attention_bias`, `use_sliding_window`",
    build,
};

fn build(context: &Context<'_>) -> Result<ModelSpec, ModelError> {
    let config = &context.config;
    let defaults = Defaults { head_dim: Some(128), max_positions: Some(32768), eps: Some(1e-6), ..Defaults::default() };
    let dims = Dims::read(config, &defaults)?;
    let builder = Builder { context, dims: &dims, norm_plus_one: false };
    let rope = builder.rope(1e4)?;
    let windows = qwen_windows(config, dims.n_layers)?;
    let act = activation(config, "hidden_act", Activation::Silu)?;
    let attention_bias = config.flag("attention_bias", false)?;
    let bias = AttentionBias { qkv: attention_bias, output: attention_bias };
    let layer = |(i, window)| {
        let attn = builder.with_head_norms(i, builder.attention(i, bias, Some(rope.clone()), window));
        builder.pre_norm_layer(i, attn, builder.mlp(i, false, act))
    };
    Ok(builder.finish(windows.into_iter().enumerate().map(layer).collect()))
}
