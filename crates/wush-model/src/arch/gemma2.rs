//! Gemma 2: norms that multiply by 1 + w around attention and MLP, sliding and full layers in turn under one RoPE base, and
//! softcaps of the attention logits and of the final ones.

use super::build::{
    AttentionBias, Builder, Defaults, Dims, LayerType, activation, layer_types_or_pattern, query_scale, sliding_window,
};
use super::config::ConfigView;
use super::{Context, Family};
use crate::error::ModelError;
use crate::spec::{Activation, ModelSpec};

pub(super) const FAMILY: Family = Family {
    name: "gemma2",
    model_types: &["gemma2"],
    architectures: &["Gemma2ForCausalLM", "Gemma2Model"],
    docs: "Gemma 2; softcaps of attention and final logits, norms by 1 + w, every other layer sliding",
    build,
};

/// The reference's values for keys that Gemma's own files leave out.
const DEFAULTS: Defaults = Defaults {
    vocab_size: Some(256_000),
    n_heads: Some(8),
    n_kv_heads: Some(4),
    head_dim: Some(256),
    max_positions: Some(8192),
    eps: Some(1e-6),
    tied: true,
};
/// The reference's window when the key is absent.
const DEFAULT_WINDOW: usize = 4096;

fn build(context: &Context<'_>) -> Result<ModelSpec, ModelError> {
    let config = &context.config;
    let dims = Dims::read(config, &DEFAULTS)?;
    let builder = Builder { context, dims: &dims, norm_plus_one: true };
    let rope = builder.rope(1e4)?;
    let window = sliding_window(config)?.unwrap_or(DEFAULT_WINDOW);
    let act = activation(config, "hidden_activation", Activation::GeluTanh)?;
    let attention_bias = config.flag("attention_bias", false)?;
    let bias = AttentionBias { qkv: attention_bias, output: attention_bias };
    let scale = query_scale(config, 256.0)?;
    let attention_cap = softcap(config, "attn_logit_softcapping", 50.0)?;
    let layer = |(i, kind)| {
        let window = (kind == LayerType::Sliding).then_some(window);
        let mut attn = builder.attention(i, bias, Some(rope.clone()), window);
        attn.scale = scale;
        attn.logit_softcap = attention_cap;
        builder.sandwich_norm_layer(i, attn, builder.mlp(i, false, act))
    };
    let kinds = layer_types_or_pattern(config, dims.n_layers, 2)?;
    let mut spec = builder.finish(kinds.into_iter().enumerate().map(layer).collect());
    // The reference rounds this to the dtype it computes in; the forward here computes in f32.
    spec.embedding_scale = (dims.hidden as f64).sqrt() as f32;
    spec.final_logit_softcap = softcap(config, "final_logit_softcapping", 30.0)?;
    Ok(spec)
}

/// A softcap: `default` when the key is absent, none when it is `null`.
fn softcap(config: &ConfigView<'_>, key: &str, default: f32) -> Result<Option<f32>, ModelError> {
    if config.is_written(key) { super::build::softcap(config, key) } else { Ok(Some(default)) }
}
