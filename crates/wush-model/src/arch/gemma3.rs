//! Gemma 3, text: norms that multiply by 1 + w around attention and MLP, headwise q/k norms, and two kinds of layers,
//! sliding and full, each with its own RoPE base.

use super::build::{
    AttentionBias, Builder, Defaults, Dims, LayerType, MAX_LAYERS, activation, layer_types_or_pattern, query_scale,
    sliding_window, softcap,
};
use super::rope::rope_spec;
use super::{Context, Family};
use crate::error::ModelError;
use crate::spec::{Activation, ModelSpec};

pub(super) const FAMILY: Family = Family {
    name: "gemma3",
    model_types: &["gemma3_text"],
    architectures: &["Gemma3ForCausalLM", "Gemma3TextModel"],
    docs: "Gemma 3 (270M, 1B; the text decoder of 4B and up); headwise q/k norms, norms by 1 + w, sliding and full \
           layers with a RoPE base each",
    build,
};

/// The reference's values for keys that Gemma's own files leave out.
const DEFAULTS: Defaults = Defaults {
    vocab_size: Some(262_208),
    n_heads: Some(8),
    n_kv_heads: Some(4),
    head_dim: Some(256),
    max_positions: Some(131_072),
    eps: Some(1e-6),
    tied: true,
};
/// The reference's window when the key is absent.
const DEFAULT_WINDOW: usize = 4096;

fn build(context: &Context<'_>) -> Result<ModelSpec, ModelError> {
    let config = &context.config;
    let dims = Dims::read(config, &DEFAULTS)?;
    let builder = Builder { context, dims: &dims, norm_plus_one: true };
    let full = rope_spec(config, &builder.rope_context(Some("full_attention"), ("rope_theta", 1e6), true))?;
    let local = ("rope_local_base_freq", 1e4);
    let sliding = rope_spec(config, &builder.rope_context(Some("sliding_attention"), local, false))?;
    let window = sliding_window(config)?.unwrap_or(DEFAULT_WINDOW);
    let act = activation(config, "hidden_activation", Activation::GeluTanh)?;
    let attention_bias = config.flag("attention_bias", false)?;
    let bias = AttentionBias { qkv: attention_bias, output: attention_bias };
    let scale = query_scale(config, 256.0)?;
    let pattern = config.opt_count("sliding_window_pattern", 1..=MAX_LAYERS)?.unwrap_or(6);
    let kinds = layer_types_or_pattern(config, dims.n_layers, pattern)?;
    let layer = |(i, kind)| {
        let (rope, window) = match kind {
            LayerType::Full => (full.clone(), None),
            LayerType::Sliding => (sliding.clone(), Some(window)),
        };
        let mut attn = builder.with_head_norms(i, builder.attention(i, bias, Some(rope), window));
        attn.scale = scale;
        builder.sandwich_norm_layer(i, attn, builder.mlp(i, false, act))
    };
    let mut spec = builder.finish(kinds.into_iter().enumerate().map(layer).collect());
    // The reference rounds this to the dtype it computes in; the forward here computes in f32.
    spec.embedding_scale = (dims.hidden as f64).sqrt() as f32;
    spec.final_logit_softcap = softcap(config, "final_logit_softcapping")?;
    Ok(spec)
}
