//! Qwen2 and Qwen2.5: biases on queries, keys and values; a sliding window in the upper layers when it is switched on.

use super::build::{AttentionBias, Builder, Defaults, Dims, activation, qwen_windows};
use super::{Context, Family};
use crate::error::ModelError;
use crate::spec::{Activation, ModelSpec};

pub(super) const FAMILY: Family = Family {
    name: "qwen2",
    model_types: &["qwen2"],
    architectures: &["Qwen2ForCausalLM", "Qwen2Model"],
    docs: "Qwen2, Qwen2.5, QwQ, DeepSeek-R1-Distill-Qwen; q/k/v biases, `use_sliding_window`",
    build,
};

fn build(context: &Context<'_>) -> Result<ModelSpec, ModelError> {
    let config = &context.config;
    let defaults = Defaults { max_positions: Some(32768), eps: Some(1e-6), ..Defaults::default() };
    let dims = Dims::read(config, &defaults)?;
    let builder = Builder { context, dims: &dims, norm_plus_one: false };
    let rope = builder.rope(1e4)?;
    let windows = qwen_windows(config, dims.n_layers)?;
    let act = activation(config, "hidden_act", Activation::Silu)?;
    let bias = AttentionBias { qkv: true, output: false };
    let layer = |(i, window)| {
        let attn = builder.attention(i, bias, Some(rope.clone()), window);
        builder.pre_norm_layer(i, attn, builder.mlp(i, false, act))
    };
    Ok(builder.finish(windows.into_iter().enumerate().map(layer).collect()))
}
