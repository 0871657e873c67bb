//! Mistral: Llama without biases, and one sliding window for all layers.

use super::build::{AttentionBias, Builder, Defaults, Dims, activation, sliding_window};
use super::{Context, Family};
use crate::error::ModelError;
use crate::spec::{Activation, ModelSpec};

pub(super) const FAMILY: Family = Family {
    name: "mistral",
    model_types: &["mistral"],
    architectures: &["MistralForCausalLM", "MistralModel"],
    docs: "Mistral 7B, Nemo, Small; `sliding_window`",
    build,
};

/// The reference's window when the key is absent; `null` means none.
const DEFAULT_WINDOW: usize = 4096;

fn build(context: &Context<'_>) -> Result<ModelSpec, ModelError> {
    let config = &context.config;
    let defaults =
        Defaults { n_kv_heads: Some(8), max_positions: Some(4096 * 32), eps: Some(1e-6), ..Defaults::default() };
    let dims = Dims::read(config, &defaults)?;
    if config.get("layer_types").is_some() {
        // The reference's Mistral has one window for all layers and ignores the key; servers do not.
        return Err(config.error("layer_types", "nothing: this family has one sliding_window for all layers"));
    }
    let builder = Builder { context, dims: &dims, norm_plus_one: false };
    let rope = builder.rope(1e4)?;
    let window = if config.is_written("sliding_window") { sliding_window(config)? } else { Some(DEFAULT_WINDOW) };
    let act = activation(config, "hidden_act", Activation::Silu)?;
    let layer = |i| {
        let attn = builder.attention(i, AttentionBias::default(), Some(rope.clone()), window);
        builder.pre_norm_layer(i, attn, builder.mlp(i, false, act))
    };
    Ok(builder.finish((0..dims.n_layers).map(layer).collect()))
}
