//! Gemma 3, text: norms that multiply by 1 + w around attention and MLP, headwise q/k norms, and two kinds of layers,
//! sliding and full, each with its own RoPE base.

use super::build::{
    AttentionBias, Builder, Defaults, Dims, LayerType, MAX_LAYERS, activation, layer_types, sliding_window,
};
use super::config::ConfigView;
use super::rope::rope_spec;
use super::{Context, Family};
use crate::error::ModelError;
use crate::spec::{Activation, LayerSpec, ModelSpec};

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
    let scalar = config.opt_number("query_pre_attn_scalar", 1e-3..=1e6)?.unwrap_or(256.0);
    let layer = |(i, kind)| {
        let (rope, window) = match kind {
            LayerType::Full => (full.clone(), None),
            LayerType::Sliding => (sliding.clone(), Some(window)),
        };
        let mut attn = builder.with_head_norms(i, builder.attention(i, bias, Some(rope), window));
        attn.scale = (1.0 / scalar.sqrt()) as f32;
        let norm = |module| Some(builder.norm(i, module, dims.hidden));
        LayerSpec {
            attn_pre_norm: norm("input_layernorm"),
            attn,
            attn_post_norm: norm("post_attention_layernorm"),
            mlp_pre_norm: norm("pre_feedforward_layernorm"),
            mlp: builder.mlp(i, false, act),
            mlp_post_norm: norm("post_feedforward_layernorm"),
        }
    };
    let kinds = kinds(config, dims.n_layers)?;
    let mut spec = builder.finish(kinds.into_iter().enumerate().map(layer).collect());
    // The reference rounds this to the dtype it computes in; the forward here computes in f32.
    spec.embedding_scale = (dims.hidden as f64).sqrt() as f32;
    spec.final_logit_softcap = config.opt_number("final_logit_softcapping", 1e-3..=1e6)?.map(|cap| cap as f32);
    Ok(spec)
}

/// `layer_types`, or full attention in every `sliding_window_pattern`-th layer.
fn kinds(config: &ConfigView<'_>, n_layers: usize) -> Result<Vec<LayerType>, ModelError> {
    if let Some(types) = layer_types(config, n_layers)? {
        return Ok(types);
    }
    let pattern = config.opt_count("sliding_window_pattern", 1..=MAX_LAYERS)?.unwrap_or(6);
    let kind = |layer: usize| if (layer + 1).is_multiple_of(pattern) { LayerType::Full } else { LayerType::Sliding };
    Ok((0..n_layers).map(kind).collect())
}
