//! What the families share: the common dimensions, and a builder of layers from names.
//!
//! Enters: a configuration, bounded here before any number is used. Leaves: [`ModelSpec`] parts. A family file says
//! only what is its own: norms, biases, windows, fused projections.

use super::Context;
use super::config::ConfigView;
use super::rope::{MAX_POSITIONS, RopeContext, rope_spec};
use crate::error::ModelError;
use crate::rope::RopeSpec;
use crate::spec::{
    Activation, AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec, Projection, QkNorm, TensorSlice,
};

/// Most decoder layers that a configuration may claim (the deepest public models have some 130).
pub const MAX_LAYERS: usize = 1024;
/// Most query heads.
const MAX_HEADS: usize = 1024;
/// Largest head dimension; the Grams of one head are d² f64.
const MAX_HEAD_DIM: usize = 1024;
/// Widest residual stream.
const MAX_HIDDEN: usize = 1 << 17;
/// Widest MLP.
const MAX_INTERMEDIATE: usize = 1 << 20;
/// Largest vocabulary.
const MAX_VOCAB: usize = 1 << 24;

/// Values that a family's reference class takes when the configuration is silent; none: the key must be there.
#[derive(Debug, Clone, Copy, Default)]
pub struct Defaults {
    /// `vocab_size`.
    pub vocab_size: Option<usize>,
    /// `num_attention_heads`.
    pub n_heads: Option<usize>,
    /// `num_key_value_heads`; none: as many as query heads.
    pub n_kv_heads: Option<usize>,
    /// `head_dim`; none: hidden_size / num_attention_heads.
    pub head_dim: Option<usize>,
    /// `max_position_embeddings`.
    pub max_positions: Option<usize>,
    /// `rms_norm_eps`.
    pub eps: Option<f64>,
    /// `tie_word_embeddings`.
    pub tied: bool,
}

/// Dimensions common to every family, bounded.
#[derive(Debug, Clone, PartialEq)]
pub struct Dims {
    /// d_model.
    pub hidden: usize,
    /// Width of the MLP.
    pub intermediate: usize,
    /// Decoder layers.
    pub n_layers: usize,
    /// Query heads.
    pub n_heads: usize,
    /// KV heads; divides the query heads.
    pub n_kv_heads: usize,
    /// Head dimension d, even.
    pub head_dim: usize,
    /// Rows of the embedding.
    pub vocab: usize,
    /// Longest position.
    pub max_positions: usize,
    /// RMS norm's epsilon.
    pub eps: f32,
    /// Whether the configuration ties the output head to the embedding.
    pub tied: bool,
}

impl Dims {
    /// Reads and bounds the dimensions.
    ///
    /// # Errors
    /// `Config`, naming the key.
    pub fn read(view: &ConfigView<'_>, defaults: &Defaults) -> Result<Self, ModelError> {
        let count = |key: &str, max: usize, default: Option<usize>| match (view.get(key), default) {
            (None, Some(default)) => Ok(default),
            _ => view.count(key, 1..=max),
        };
        let hidden = view.count("hidden_size", 2..=MAX_HIDDEN)?;
        let n_heads = count("num_attention_heads", MAX_HEADS, defaults.n_heads)?;
        let n_kv_heads = count("num_key_value_heads", MAX_HEADS, defaults.n_kv_heads.or(Some(n_heads)))?;
        if !n_heads.is_multiple_of(n_kv_heads) {
            return Err(view.error("num_key_value_heads", format!("a divisor of num_attention_heads ({n_heads})")));
        }
        let eps = view.opt_number("rms_norm_eps", 1e-30..=1.0)?.or(defaults.eps);
        Ok(Self {
            hidden,
            intermediate: view.count("intermediate_size", 2..=MAX_INTERMEDIATE)?,
            n_layers: view.count("num_hidden_layers", 1..=MAX_LAYERS)?,
            n_heads,
            n_kv_heads,
            head_dim: head_dim(view, hidden, n_heads, defaults.head_dim)?,
            vocab: count("vocab_size", MAX_VOCAB, defaults.vocab_size)?,
            max_positions: count("max_position_embeddings", MAX_POSITIONS, defaults.max_positions)?,
            eps: eps.ok_or_else(|| view.error("rms_norm_eps", "a number from 0 to 1"))? as f32,
            tied: view.flag("tie_word_embeddings", defaults.tied)?,
        })
    }

    /// d^-1/2.
    pub fn scale(&self) -> f32 {
        (1.0 / (self.head_dim as f64).sqrt()) as f32
    }

    /// Columns of all query heads.
    pub fn q_width(&self) -> usize {
        self.n_heads * self.head_dim
    }

    /// Columns of all KV heads.
    pub fn kv_width(&self) -> usize {
        self.n_kv_heads * self.head_dim
    }
}

fn head_dim(view: &ConfigView<'_>, hidden: usize, n_heads: usize, default: Option<usize>) -> Result<usize, ModelError> {
    let even = format!("an even integer from 2 to {MAX_HEAD_DIM}");
    let dim = match view.opt_count("head_dim", 1..=MAX_HEAD_DIM)?.or(default) {
        Some(dim) => dim,
        None if hidden.is_multiple_of(n_heads) => hidden / n_heads,
        None => return Err(view.error("head_dim", format!("{even} (hidden_size {hidden} / {n_heads} heads is none)"))),
    };
    if dim.is_multiple_of(2) && (2..=MAX_HEAD_DIM).contains(&dim) {
        return Ok(dim);
    }
    Err(ModelError::Config { key: view.name("head_dim"), expected: even, found: dim.to_string() })
}

/// Which tokens each layer's queries read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerType {
    /// All before.
    Full,
    /// The last `sliding_window`.
    Sliding,
}

/// `layer_types`, one entry a layer, if the configuration has it.
///
/// # Errors
/// `Config` for a wrong length or a type that is not known here.
pub fn layer_types(view: &ConfigView<'_>, n_layers: usize) -> Result<Option<Vec<LayerType>>, ModelError> {
    let Some(texts) = view.opt_texts("layer_types")? else { return Ok(None) };
    if texts.len() != n_layers {
        return Err(ModelError::Config {
            key: view.name("layer_types"),
            expected: format!("{n_layers} entries, one a layer"),
            found: format!("{} entries", texts.len()),
        });
    }
    let parse = |text: &&str| match *text {
        "full_attention" => Ok(LayerType::Full),
        "sliding_attention" => Ok(LayerType::Sliding),
        other => Err(ModelError::Config {
            key: view.name("layer_types"),
            expected: "full_attention or sliding_attention".to_owned(),
            found: format!("{other:?}"),
        }),
    };
    texts.iter().map(parse).collect::<Result<_, _>>().map(Some)
}

/// [`layer_types`], or full attention in every `pattern`-th layer and a sliding window in the others.
///
/// # Errors
/// `Config`.
pub fn layer_types_or_pattern(
    view: &ConfigView<'_>,
    n_layers: usize,
    pattern: usize,
) -> Result<Vec<LayerType>, ModelError> {
    let kind = |layer: usize| if (layer + 1).is_multiple_of(pattern) { LayerType::Full } else { LayerType::Sliding };
    Ok(layer_types(view, n_layers)?.unwrap_or_else(|| (0..n_layers).map(kind).collect()))
}

/// A softcap; none when the key is absent or `null`.
///
/// # Errors
/// `Config`.
pub fn softcap(view: &ConfigView<'_>, key: &str) -> Result<Option<f32>, ModelError> {
    Ok(view.opt_number(key, 1e-3..=1e6)?.map(|cap| cap as f32))
}

/// The factor on q·k where `query_pre_attn_scalar` sets it.
///
/// # Errors
/// `Config`.
pub fn query_scale(view: &ConfigView<'_>, default: f64) -> Result<f32, ModelError> {
    let scalar = view.opt_number("query_pre_attn_scalar", 1e-3..=1e6)?.unwrap_or(default);
    Ok((1.0 / scalar.sqrt()) as f32)
}

/// `sliding_window` in keys, at least 1.
///
/// # Errors
/// `Config`.
pub fn sliding_window(view: &ConfigView<'_>) -> Result<Option<usize>, ModelError> {
    view.opt_count("sliding_window", 1..=MAX_POSITIONS)
}

/// The window of every layer for the Qwens: `use_sliding_window` with `layer_types`, or from `max_window_layers` on.
///
/// # Errors
/// `Config`.
pub fn qwen_windows(view: &ConfigView<'_>, n_layers: usize) -> Result<Vec<Option<usize>>, ModelError> {
    let window = if view.flag("use_sliding_window", false)? { sliding_window(view)? } else { None };
    if let Some(types) = layer_types(view, n_layers)? {
        if window.is_none() && types.contains(&LayerType::Sliding) {
            return Err(view.error("use_sliding_window", "true and a sliding_window, for the layer_types given"));
        }
        return Ok(types.into_iter().map(|kind| window.filter(|_| kind == LayerType::Sliding)).collect());
    }
    let first = view.opt_count("max_window_layers", 0..=MAX_LAYERS)?.unwrap_or(28);
    Ok((0..n_layers).map(|layer| window.filter(|_| layer >= first)).collect())
}

/// Gate activation by its configured name; SiLU when absent.
///
/// # Errors
/// `Config` for one that the forward does not have.
pub fn activation(view: &ConfigView<'_>, key: &str, default: Activation) -> Result<Activation, ModelError> {
    match view.opt_text(key)? {
        None => Ok(default),
        Some("silu" | "swish") => Ok(Activation::Silu),
        Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Activation::GeluTanh),
        Some("gelu") => Ok(Activation::Gelu),
        Some(_) => Err(view.error(key, "silu, gelu, gelu_pytorch_tanh or gelu_new")),
    }
}

/// Which projections of attention have biases.
#[derive(Debug, Clone, Copy, Default)]
pub struct AttentionBias {
    /// Queries, keys and values.
    pub qkv: bool,
    /// The output projection.
    pub output: bool,
}

/// Makes the parts of one model from names.
#[derive(Debug)]
pub struct Builder<'a> {
    /// What the family was called with.
    pub context: &'a Context<'a>,
    /// The dimensions.
    pub dims: &'a Dims,
    /// Whether norms multiply by `1 + w`.
    pub norm_plus_one: bool,
}

impl Builder<'_> {
    /// Name of a tensor of layer `layer`.
    pub fn name(&self, layer: usize, suffix: &str) -> String {
        format!("{}layers.{layer}.{suffix}", self.context.prefix)
    }

    /// A norm of layer `layer`.
    pub fn norm(&self, layer: usize, module: &str, width: usize) -> NormSpec {
        self.norm_named(self.name(layer, &format!("{module}.weight")), width)
    }

    fn norm_named(&self, name: String, width: usize) -> NormSpec {
        NormSpec { weight: TensorSlice::vector(name, width), eps: self.dims.eps, plus_one: self.norm_plus_one }
    }

    /// A whole projection `[rows, cols]` of layer `layer`.
    pub fn projection(&self, layer: usize, module: &str, (rows, cols): (usize, usize), bias: bool) -> Projection {
        let name = |kind: &str| self.name(layer, &format!("{module}.{kind}"));
        Projection {
            weight: TensorSlice::matrix(name("weight"), rows, cols),
            bias: bias.then(|| TensorSlice::vector(name("bias"), rows)),
        }
    }

    /// Consecutive row blocks of a fused projection, in order.
    pub fn fused<const N: usize>(
        &self,
        layer: usize,
        module: &str,
        block_rows: [usize; N],
        cols: usize,
    ) -> [Projection; N] {
        let whole = self.projection(layer, module, (block_rows.iter().sum(), cols), false);
        let mut start = 0;
        block_rows.map(|rows| {
            let block = start..start + rows;
            start = block.end;
            Projection { weight: whole.weight.clone().rows(block), bias: None }
        })
    }

    /// Attention over `self_attn.{q,k,v,o}_proj` without q/k norms, scaled by d^-1/2.
    pub fn attention(
        &self,
        layer: usize,
        bias: AttentionBias,
        rope: Option<RopeSpec>,
        window: Option<usize>,
    ) -> AttentionSpec {
        let dims = self.dims;
        let (q_width, kv_width) = (dims.q_width(), dims.kv_width());
        AttentionSpec {
            n_heads: dims.n_heads,
            n_kv_heads: dims.n_kv_heads,
            head_dim: dims.head_dim,
            q: self.projection(layer, "self_attn.q_proj", (q_width, dims.hidden), bias.qkv),
            k: self.projection(layer, "self_attn.k_proj", (kv_width, dims.hidden), bias.qkv),
            v: self.projection(layer, "self_attn.v_proj", (kv_width, dims.hidden), bias.qkv),
            o: self.projection(layer, "self_attn.o_proj", (dims.hidden, q_width), bias.output),
            q_norm: QkNorm::None,
            k_norm: QkNorm::None,
            rope,
            window,
            scale: dims.scale(),
            logit_softcap: None,
        }
    }

    /// [`Builder::attention`] with headwise q/k norms.
    pub fn with_head_norms(&self, layer: usize, mut attn: AttentionSpec) -> AttentionSpec {
        attn.q_norm = QkNorm::PerHead(self.norm(layer, "self_attn.q_norm", self.dims.head_dim));
        attn.k_norm = QkNorm::PerHead(self.norm(layer, "self_attn.k_norm", self.dims.head_dim));
        attn
    }

    /// MLP over `mlp.{gate,up,down}_proj`.
    pub fn mlp(&self, layer: usize, bias: bool, activation: Activation) -> MlpSpec {
        let (hidden, wide) = (self.dims.hidden, self.dims.intermediate);
        MlpSpec {
            gate: self.projection(layer, "mlp.gate_proj", (wide, hidden), bias),
            up: self.projection(layer, "mlp.up_proj", (wide, hidden), bias),
            down: self.projection(layer, "mlp.down_proj", (hidden, wide), bias),
            activation,
        }
    }

    /// A layer with a norm before attention and one before the MLP, under Llama's names.
    pub fn pre_norm_layer(&self, layer: usize, attn: AttentionSpec, mlp: MlpSpec) -> LayerSpec {
        LayerSpec {
            attn_pre_norm: Some(self.norm(layer, "input_layernorm", self.dims.hidden)),
            attn,
            attn_post_norm: None,
            mlp_pre_norm: Some(self.norm(layer, "post_attention_layernorm", self.dims.hidden)),
            mlp,
            mlp_post_norm: None,
        }
    }

    /// A layer with norms before and after attention and MLP, under Gemma's names.
    pub fn sandwich_norm_layer(&self, layer: usize, attn: AttentionSpec, mlp: MlpSpec) -> LayerSpec {
        let norm = |module| Some(self.norm(layer, module, self.dims.hidden));
        LayerSpec {
            attn_pre_norm: norm("input_layernorm"),
            attn,
            attn_post_norm: norm("post_attention_layernorm"),
            mlp_pre_norm: norm("pre_feedforward_layernorm"),
            mlp,
            mlp_post_norm: norm("post_feedforward_layernorm"),
        }
    }

    /// RoPE of a family whose layers all turn alike; `default_theta` when the configuration has no base.
    ///
    /// # Errors
    /// Those of [`rope_spec`].
    pub fn rope(&self, default_theta: f64) -> Result<RopeSpec, ModelError> {
        let rope = self.rope_context(None, ("rope_theta", default_theta), true);
        rope_spec(&self.context.config, &rope)
    }

    /// The context of one layer type.
    pub fn rope_context<'c>(
        &'c self,
        layer_type: Option<&'c str>,
        theta: (&'c str, f64),
        scaled: bool,
    ) -> RopeContext<'c> {
        RopeContext {
            head_dim: self.dims.head_dim,
            max_positions: self.dims.max_positions,
            layer_type,
            theta,
            original_positions: None,
            legacy_longrope: false,
            scaled,
            override_scaling: self.context.rope_scaling,
        }
    }

    /// The whole model.
    pub fn finish(&self, layers: Vec<LayerSpec>) -> ModelSpec {
        let (context, dims) = (self.context, self.dims);
        let embedding = TensorSlice::matrix(format!("{}embed_tokens.weight", context.prefix), dims.vocab, dims.hidden);
        let lm_head = match &context.lm_head {
            Some(name) if !dims.tied => TensorSlice::matrix(*name, dims.vocab, dims.hidden),
            _ => embedding.clone(),
        };
        let scaled = |scaling: &super::RopeScaling| scaling.scaled_positions(dims.max_positions);
        ModelSpec {
            family: context.family,
            hidden_size: dims.hidden,
            vocab_size: dims.vocab,
            max_position_embeddings: context.rope_scaling.map_or(dims.max_positions, scaled),
            embedding,
            embedding_scale: 1.0,
            final_norm: self.norm_named(format!("{}norm.weight", context.prefix), dims.hidden),
            lm_head,
            final_logit_softcap: None,
            layers,
        }
    }
}
