//! SmolLM3: Llama with layers that have no positions (`no_rope_layers`: 1 turns, 0 does not).

use super::build::{
    AttentionBias, Builder, Defaults, Dims, LayerType, MAX_LAYERS, activation, layer_types, sliding_window,
};
use super::config::ConfigView;
use super::{Context, Family};
use crate::error::ModelError;
use crate::spec::{Activation, ModelSpec};

pub(super) const FAMILY: Family = Family {
    name: "smollm3",
    model_types: &["smollm3"],
    architectures: &["SmolLM3ForCausalLM", "SmolLM3Model"],
    docs: "SmolLM3; layers without RoPE (`no_rope_layers`, `no_rope_layer_interval`)",
    build,
};

fn build(context: &Context<'_>) -> Result<ModelSpec, ModelError> {
    let config = &context.config;
    let defaults = Defaults {
        n_kv_heads: Some(4),
        max_positions: Some(32768),
        eps: Some(1e-6),
        tied: true,
        ..Defaults::default()
    };
    let dims = Dims::read(config, &defaults)?;
    let builder = Builder { context, dims: &dims, norm_plus_one: false };
    let rope = builder.rope(2e6)?;
    let turns = turning_layers(config, dims.n_layers)?;
    let windows = windows(config, &turns)?;
    let attention_bias = config.flag("attention_bias", false)?;
    let bias = AttentionBias { qkv: attention_bias, output: attention_bias };
    let mlp_bias = config.flag("mlp_bias", false)?;
    let act = activation(config, "hidden_act", Activation::Silu)?;
    let layer = |i: usize| {
        let attn = builder.attention(i, bias, turns[i].then(|| rope.clone()), windows[i]);
        builder.pre_norm_layer(i, attn, builder.mlp(i, mlp_bias, act))
    };
    Ok(builder.finish((0..dims.n_layers).map(layer).collect()))
}

/// Whether each layer has RoPE.
fn turning_layers(config: &ConfigView<'_>, n_layers: usize) -> Result<Vec<bool>, ModelError> {
    let Some(list) = config.opt_list("no_rope_layers")? else {
        let interval = config.opt_count("no_rope_layer_interval", 1..=MAX_LAYERS)?.unwrap_or(4);
        return Ok((0..n_layers).map(|layer| !(layer + 1).is_multiple_of(interval)).collect());
    };
    let turns: Option<Vec<bool>> = list.iter().map(|x| x.as_u64().filter(|n| *n <= 1).map(|n| n == 1)).collect();
    // More entries than layers are allowed, as in the reference.
    let turns = turns.filter(|turns| turns.len() >= n_layers);
    turns.ok_or_else(|| config.error("no_rope_layers", format!("at least {n_layers} entries, each 0 or 1")))
}

fn windows(config: &ConfigView<'_>, turns: &[bool]) -> Result<Vec<Option<usize>>, ModelError> {
    let window = if config.flag("use_sliding_window", false)? { sliding_window(config)? } else { None };
    let types = match layer_types(config, turns.len())? {
        Some(types) => types,
        None => turns.iter().map(|turns| if *turns { LayerType::Full } else { LayerType::Sliding }).collect(),
    };
    if window.is_none() && config.get("layer_types").is_some() && types.contains(&LayerType::Sliding) {
        return Err(config.error("use_sliding_window", "true and a sliding_window, for the layer_types given"));
    }
    Ok(types.into_iter().map(|kind| window.filter(|_| kind == LayerType::Sliding)).collect())
}
