//! The cache of a model: every layer's attention as the runtime is told of it, and what a sequence takes in it.

use wush_format::hash::Sha;
use wush_model::rope::Frequencies;
use wush_model::spec::{AttentionSpec, LayerSpec, ModelSpec};
use wush_quant::{Codec, LayerBits, Method, Role, ScaleDtype};
use wush_runtime::{CacheConfig, FullDtype, LayerConfig, Precision, RuntimeError, Windows};

use crate::{GenerateError, Result};

/// Tokens of a page: the least that attention reads fast. One sequence shares nothing, and its last page is half empty.
const PAGE_TOKENS: usize = 64;

/// How keys and values are kept.
#[derive(Debug, Clone, PartialEq)]
pub struct CacheSettings {
    /// One entry a layer; none where nothing is quantized.
    pub bits: Option<Vec<LayerBits>>,
    /// The quantizer.
    pub quantizer: Method,
    /// Tokens in full precision.
    pub windows: Windows,
}

impl CacheSettings {
    /// Whether anything is quantized.
    pub fn quantizes(&self) -> bool {
        self.bits.is_some()
    }

    /// The cache of a model. Full precision is f32, the type of the arithmetic, where nothing is quantized, so that nothing
    /// is rounded, and BF16 in the windows of a quantized cache, as a server has them.
    ///
    /// # Errors
    /// `Cache` for a quantizer's parameter out of range, or bits of another number of layers.
    pub fn config(&self, spec: &ModelSpec) -> Result<CacheConfig> {
        let layers: Result<Vec<LayerConfig>> = match &self.bits {
            None => Ok(spec
                .layers
                .iter()
                .map(|layer| layer_config(&layer.attn, Precision::Full, Precision::Full))
                .collect()),
            Some(bits) if bits.len() == spec.layers.len() => {
                spec.layers.iter().zip(bits).map(|(layer, &bits)| self.packed(&layer.attn, bits)).collect()
            }
            Some(bits) => Err(GenerateError::Setting {
                setting: "bits",
                expected: "one entry a layer",
                found: format!("{} for {} layers", bits.len(), spec.layers.len()),
            }),
        };
        let full = if self.quantizes() { FullDtype::Bf16 } else { FullDtype::F32 };
        let config = CacheConfig::new(layers?);
        let rope = Some(describe_rope(spec));
        let config = CacheConfig { windows: self.windows, full, page_tokens: PAGE_TOKENS, rewind: 0, rope, ..config };
        config.check()?;
        Ok(config)
    }

    fn packed(&self, attn: &AttentionSpec, bits: LayerBits) -> Result<LayerConfig> {
        let stored = |role| Precision::new(bits.of(role).get(), &self.quantizer, role, ScaleDtype::Bf16);
        Ok(layer_config(attn, stored(Role::Key)?, stored(Role::Value)?))
    }
}

/// How positions enter keys: what people would name of the first layer's embedding, and a digest over all layers'.
fn describe_rope(spec: &ModelSpec) -> String {
    /// Hex digits of the digest that are shown: 64 bits tell the embeddings of one model apart.
    const N_DIGITS: usize = 16;
    let ropes: Vec<_> = spec.layers.iter().map(|layer| &layer.attn.rope).collect();
    // The shortest text of a number that reads back as it: different numbers, different text.
    let digest = Sha::of(format!("{ropes:?}").as_bytes()).to_string();
    let first = spec.layers.iter().find_map(|layer| layer.attn.rope.as_ref());
    let kind = first.map_or("none".to_owned(), |rope| {
        let kind = match rope.frequencies {
            Frequencies::Fixed(_) => "fixed",
            Frequencies::ByLength { .. } => "by length",
            Frequencies::Dynamic { .. } => "dynamic",
        };
        format!("{kind}, attention factor {}", rope.attention_factor)
    });
    format!("{kind}, {}", &digest[..N_DIGITS])
}

fn layer_config(attn: &AttentionSpec, keys: Precision, values: Precision) -> LayerConfig {
    LayerConfig {
        n_heads: attn.n_heads,
        n_kv_heads: attn.n_kv_heads,
        head_dim: attn.head_dim,
        sliding_window: attn.window,
        scale: attn.scale,
        softcap: attn.logit_softcap,
        keys,
        values,
    }
}

/// Bytes of `n_tokens` keys and values in BF16: of a sliding window, those that a query reads.
pub fn bf16_bytes(config: &CacheConfig, n_tokens: usize) -> u64 {
    let of_layer = |layer: &LayerConfig| {
        let held = layer.sliding_window.map_or(n_tokens, |window| window.min(n_tokens));
        2 * 2 * (held * layer.n_kv_heads * layer.head_dim) as u64
    };
    config.layers.iter().map(of_layer).sum()
}

/// Bytes that a sequence of `n_tokens` takes at most, appended in chunks of at most `chunk`: windows with room to grow, and
/// whole pages.
///
/// # Errors
/// `Cache` for a head dimension that is not packed.
pub fn most_bytes(config: &CacheConfig, n_tokens: usize, chunk: usize) -> Result<u64> {
    let full = if config.full == FullDtype::Bf16 { 2 } else { 4 };
    let chunk = chunk.min(n_tokens);
    let in_windows = (config.windows.sink + 2 * (config.windows.keep + config.windows.flush + chunk)).min(2 * n_tokens);
    let in_pages = n_tokens + config.page_tokens;
    let mut sum = 0u64;
    for (id, layer) in config.layers.iter().enumerate() {
        for precision in [layer.keys, layer.values] {
            let row = match precision {
                Precision::Full => full * layer.head_dim,
                Precision::Packed(quantizer) => {
                    let codec = Codec::new(layer.head_dim, quantizer);
                    codec.map_err(|source| RuntimeError::Quant { layer: id, source })?.layout().n_bytes()
                }
            };
            sum += (layer.n_kv_heads * (in_windows * full * layer.head_dim + in_pages * row)) as u64;
        }
    }
    Ok(sum)
}

/// Bytes of the activations of a chunk of `n_tokens`, and of the logits after it: an upper bound.
pub fn activation_bytes(spec: &ModelSpec, n_tokens: usize) -> u64 {
    let of_layer = |layer: &LayerSpec| {
        let attn = &layer.attn;
        // Queries and outputs, keys and values, each also transformed; gate and up.
        4 * attn.head_dim * (attn.n_heads + attn.n_kv_heads) + 2 * layer.mlp.gate.weight.rows.len()
    };
    let widest = spec.layers.iter().map(of_layer).max().unwrap_or(0);
    let elements = n_tokens * (widest + 4 * spec.hidden_size) + 2 * spec.vocab_size;
    (elements * size_of::<f32>()) as u64
}
