//! What is refused, and why: one const registry of hazards, each with the signs that show it.
//!
//! Enters: the configuration and the tensor names, before any family is looked up, so that a known hazard is named even
//! in an unknown family. Leaves: a refusal that says what the part does, why folding or the key transform would not be
//! exact or why the model cannot be run, and the way out. `docs/families.md` is made from this registry.

use super::config::ConfigView;
use super::tensors::Tensors;
use crate::error::ModelError;
use crate::spec::ModelSpec;

/// Why a hazard is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ground {
    /// A folded or key-transformed model would not compute the original function.
    NotExact,
    /// It would be exact, but the forward pass for it is not built.
    NotBuilt,
    /// The checkpoint is not in a form that can be converted.
    Form,
}

/// A part of a model that is refused.
#[derive(Debug)]
pub struct Hazard {
    /// What it is.
    pub name: &'static str,
    /// What shows it; any one suffices.
    pub signs: &'static [Sign],
    /// On what ground.
    pub ground: Ground,
    /// What it does, and what follows.
    pub why: &'static str,
    /// What to do instead.
    pub way_out: &'static str,
}

/// What shows a hazard.
#[derive(Debug)]
pub enum Sign {
    /// A key that is neither absent, `null`, `false`, zero nor empty.
    On(&'static str),
    /// [`Sign::On`], in every `model_type` but these: their families run it.
    OnOutside(&'static str, &'static [&'static str]),
    /// A key that holds at least this number.
    AtLeast(&'static str, u64),
    /// A key with a number other than that of a second key (which must be there).
    Differs(&'static str, &'static str),
    /// A key that holds one of these strings, or a list with one of them.
    Holds(&'static str, &'static [&'static str]),
    /// `model_type` is one of these.
    ModelType(&'static [&'static str]),
    /// A tensor outside vision and audio towers whose name has this part.
    Tensor(&'static str),
}

const NO_WAY_YET: &str = "there is no way to convert this model yet; docs/families.md lists the supported families";
const NEVER: &str = "use a model without this part; docs/families.md says which parts are exact and which are not";

/// Every hazard, the most telling first.
pub const HAZARDS: &[Hazard] = &[
    Hazard {
        name: "Quantized weights",
        signs: &[Sign::On("quantization_config"), Sign::Tensor(".weight_scale"), Sign::Tensor(".qweight")],
        ground: Ground::Form,
        why: "the weights are packed with scales of their own; a transform cannot be folded into codes",
        way_out: "dequantize the checkpoint to BF16 first, convert that, and quantize the result again if you must",
    },
    Hazard {
        name: "Stored scales of a quantized KV cache",
        signs: &[Sign::Tensor(".k_scale"), Sign::Tensor(".v_scale"), Sign::Tensor(".kv_scale")],
        ground: Ground::Form,
        why: "these scales were measured on untransformed keys and values and would be wrong after folding",
        way_out: "take the checkpoint without KV-cache scales",
    },
    Hazard {
        name: "LoRA adapter",
        signs: &[Sign::Tensor(".lora_A"), Sign::Tensor(".lora_B")],
        ground: Ground::Form,
        why: "an adapter is added to the weights at run time, in the original basis",
        way_out: "merge the adapter into the model first (merge_and_unload in peft), then convert",
    },
    Hazard {
        name: "Multi-head latent attention",
        signs: &[Sign::On("kv_lora_rank"), Sign::Tensor(".kv_a_proj_with_mqa")],
        ground: Ground::NotExact,
        why: "the cache holds a latent vector shared by all heads, not keys and values",
        way_out: NEVER,
    },
    Hazard {
        name: "Elementwise output gate",
        signs: &[
            Sign::On("attn_output_gate"),
            Sign::ModelType(&["qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "afmoe"]),
            Sign::Tensor(".self_attn.gate_proj"),
        ],
        ground: Ground::NotExact,
        why: "a gate multiplies every coordinate between attention and the output projection, so a value transform cannot \
              pass through to W_O",
        way_out: NEVER,
    },
    Hazard {
        name: "K = V",
        signs: &[Sign::On("attention_k_eq_v")],
        ground: Ground::NotExact,
        why: "keys are used as values: there is no value projection to fold a transform into",
        way_out: NEVER,
    },
    Hazard {
        name: "KV shared across layers",
        signs: &[Sign::On("num_kv_shared_layers"), Sign::On("use_cla")],
        ground: Ground::NotBuilt,
        why: "several layers read one cache, so one transform would have to be folded into the output projections of all",
        way_out: NO_WAY_YET,
    },
    Hazard {
        name: "Value norm",
        signs: &[
            Sign::Tensor(".v_norm"),
            Sign::ModelType(&["gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified"]),
        ],
        ground: Ground::NotExact,
        why: "values are normalized after their projection; only an orthogonal transform passes through a norm",
        way_out: NEVER,
    },
    Hazard {
        name: "Clamp after the projection",
        signs: &[Sign::On("clip_qkv")],
        ground: Ground::NotExact,
        why: "queries, keys and values are clamped coordinate by coordinate after their projection; a folded transform would \
              be clamped in other coordinates",
        way_out: NEVER,
    },
    Hazard {
        name: "Norm between attention and W_O",
        signs: &[Sign::Tensor(".attn_sub_norm"), Sign::Tensor(".inner_attn_ln"), Sign::ModelType(&["bitnet"])],
        ground: Ground::NotExact,
        why: "the attention output is normalized before the output projection; the inverse transform in W_O comes too late",
        way_out: NEVER,
    },
    Hazard {
        name: "Linear or state-space layers in a hybrid",
        signs: &[
            Sign::Holds("layer_types", &["linear_attention", "mamba", "mamba2", "recurrent", "conv", "hybrid"]),
            Sign::Holds("layers_block_type", &["mamba", "mamba2", "recurrent"]),
            Sign::On("hybrid_override_pattern"),
            Sign::On("attn_layer_period"),
            Sign::Tensor(".linear_attn."),
            Sign::Tensor(".mamba."),
        ],
        ground: Ground::NotBuilt,
        why: "some layers keep a recurrent state instead of a KV cache; the forward pass has no such layers",
        way_out: NO_WAY_YET,
    },
    Hazard {
        name: "Mixture of experts",
        signs: &[
            Sign::AtLeast("num_experts", 2),
            Sign::AtLeast("num_local_experts", 2),
            Sign::AtLeast("n_routed_experts", 2),
            Sign::Tensor(".block_sparse_moe."),
            Sign::Tensor(".mlp.experts."),
        ],
        ground: Ground::NotBuilt,
        why: "attention would fold as usual, but calibration runs the model, and the forward pass has no experts",
        way_out: NO_WAY_YET,
    },
    Hazard {
        name: "Learned attention sinks",
        signs: &[Sign::Tensor(".self_attn.sinks"), Sign::ModelType(&["gpt_oss"])],
        ground: Ground::NotBuilt,
        why: "a learned logit a head takes part in every softmax; values would fold exactly, but the forward pass has no sinks",
        way_out: NO_WAY_YET,
    },
    Hazard {
        name: "Head-wise scalar gate",
        signs: &[Sign::On("use_head_wise_attn_gate")],
        ground: Ground::NotBuilt,
        why: "one gate a head scales its output; folding would be exact, but the forward pass has no such gate",
        way_out: NO_WAY_YET,
    },
    Hazard {
        name: "d_k ≠ d_v",
        signs: &[Sign::Differs("v_head_dim", "head_dim")],
        ground: Ground::NotBuilt,
        why: "values have another head dimension than keys; the forward pass has one for both",
        way_out: NO_WAY_YET,
    },
    Hazard {
        name: "Scaled values",
        signs: &[Sign::On("attention_value_scale")],
        ground: Ground::NotBuilt,
        why: "values are multiplied by a constant that the forward pass does not apply",
        way_out: NO_WAY_YET,
    },
    Hazard {
        name: "q/k norm after RoPE",
        signs: &[
            Sign::Tensor(".query_layernorm"),
            Sign::Tensor(".key_layernorm"),
            Sign::ModelType(&["hunyuan_v1_dense", "hunyuan_v1_moe"]),
        ],
        ground: Ground::NotBuilt,
        why: "keys are normalized after they are turned; the forward pass normalizes before",
        way_out: NO_WAY_YET,
    },
    Hazard {
        name: "Attention logit softcapping",
        signs: &[Sign::OnOutside("attn_logit_softcapping", &["gemma2"])],
        ground: Ground::NotBuilt,
        why: "attention logits pass through a tanh; folding would be exact, but this family's forward pass has none",
        way_out: NO_WAY_YET,
    },
    Hazard {
        name: "Chunked attention",
        signs: &[Sign::On("attention_chunk_size"), Sign::Holds("layer_types", &["chunked_attention"])],
        ground: Ground::NotBuilt,
        why: "queries read only their own chunk; folding would be exact, but the forward pass has no such mask",
        way_out: NO_WAY_YET,
    },
    Hazard {
        name: "Other fused projections",
        signs: &[Sign::Tensor(".query_key_value."), Sign::Tensor(".W_pack."), Sign::Tensor(".wqkv.")],
        ground: Ground::NotBuilt,
        why: "queries, keys and values are fused, some interleaved by head; only Phi-3's plain order is built",
        way_out: NO_WAY_YET,
    },
    Hazard {
        name: "Attention that looks ahead",
        signs: &[Sign::On("use_bidirectional_attention"), Sign::On("is_encoder_decoder")],
        ground: Ground::NotBuilt,
        why: "the model reads tokens to the right, so it has no growing KV cache and no next-token loss",
        way_out: "use a causal language model",
    },
    Hazard {
        name: "Cross-attention layers",
        signs: &[Sign::On("cross_attention_layers"), Sign::ModelType(&["mllama", "mllama_text_model"])],
        ground: Ground::NotBuilt,
        why: "some layers read an image instead of the text; the forward pass has no such layers",
        way_out: NO_WAY_YET,
    },
    Hazard {
        name: "Interleaved rotary pairs",
        signs: &[Sign::On("rope_interleaved")],
        ground: Ground::NotBuilt,
        why: "neighbouring coordinates turn together; the forward pass turns coordinate i with i + d/2",
        way_out: "convert the checkpoint to the rotate-half order of transformers",
    },
    Hazard {
        name: "Positions other than rotary",
        signs: &[Sign::On("alibi"), Sign::Holds("position_embedding_type", &["alibi", "absolute", "learned"])],
        ground: Ground::NotBuilt,
        why: "positions enter as a bias or an embedding; the forward pass has rotary positions only",
        way_out: NO_WAY_YET,
    },
];

/// Checks every hazard against the root and, if there is one, the text configuration.
///
/// # Errors
/// `Unsupported`, with the key or tensor that shows the hazard.
pub fn check(root: &ConfigView<'_>, text: Option<&ConfigView<'_>>, tensors: &Tensors<'_>) -> Result<(), ModelError> {
    for hazard in HAZARDS {
        for sign in hazard.signs {
            let shown = match sign {
                Sign::Tensor(part) => shown_by_tensor(tensors, part),
                _ => text.and_then(|text| shown_by_config(text, sign)).or_else(|| shown_by_config(root, sign)),
            };
            if let Some(what) = shown {
                return Err(hazard.refusal(what));
            }
        }
    }
    Ok(())
}

/// Refuses query projections with twice the rows: their second half is an output gate under a known name.
///
/// # Errors
/// `Unsupported`.
pub fn check_gated_queries(spec: &ModelSpec, tensors: &Tensors<'_>) -> Result<(), ModelError> {
    for layer in &spec.layers {
        let (slice, attn) = (&layer.attn.q.weight, &layer.attn);
        let n_rows = attn.n_heads * attn.head_dim;
        let gated = slice.total_rows == n_rows && tensors.n_rows(&slice.name) == Some(2 * n_rows);
        if let Some(hazard) = HAZARDS.iter().find(|hazard| gated && hazard.name == "Elementwise output gate") {
            return Err(hazard.refusal(format!("tensor {} has {} rows, twice {n_rows}", slice.name, 2 * n_rows)));
        }
    }
    Ok(())
}

impl Hazard {
    fn refusal(&self, shown_by: String) -> ModelError {
        ModelError::Unsupported {
            what: format!("{} ({shown_by})", self.name),
            why: format!("{}: {}", self.ground.verdict(), self.why),
            way_out: self.way_out.to_owned(),
        }
    }
}

impl Ground {
    /// In words, for messages and the documentation.
    pub fn verdict(self) -> &'static str {
        match self {
            Self::NotExact => "not exact",
            Self::NotBuilt => "not supported yet",
            Self::Form => "not convertible in this form",
        }
    }
}

impl Sign {
    /// In words, for the documentation.
    pub fn describe(&self) -> String {
        match self {
            Self::On(key) => format!("`{key}`"),
            Self::OnOutside(key, except) => format!("`{key}` (but for {})", except.join(", ")),
            Self::AtLeast(key, least) => format!("`{key}` ≥ {least}"),
            Self::Differs(key, other) => format!("`{key}` ≠ `{other}`"),
            Self::Holds(key, values) => format!("`{key}`: {}", values.join(", ")),
            Self::ModelType(values) => format!("`model_type`: {}", values.join(", ")),
            Self::Tensor(part) => format!("tensor `*{part}*`"),
        }
    }
}

fn shown_by_config(view: &ConfigView<'_>, sign: &Sign) -> Option<String> {
    let (key, is_shown) = match sign {
        Sign::On(key) => (*key, view.get(key).is_some_and(is_on)),
        Sign::OnOutside(key, except) => {
            let runs = view.get("model_type").is_some_and(|model_type| holds(model_type, except));
            (*key, !runs && view.get(key).is_some_and(is_on))
        }
        Sign::AtLeast(key, least) => (*key, view.get(key)?.as_u64().is_some_and(|n| n >= *least)),
        Sign::Differs(key, other) => (*key, view.get(key)?.as_u64()? != view.get(other)?.as_u64()?),
        Sign::Holds(key, values) => (*key, holds(view.get(key)?, values)),
        Sign::ModelType(values) => ("model_type", holds(view.get("model_type")?, values)),
        Sign::Tensor(_) => return None,
    };
    is_shown.then(|| format!("config.json: {}", view.name(key)))
}

fn is_on(value: &serde_json::Value) -> bool {
    match value {
        serde_json::Value::Null => false,
        serde_json::Value::Bool(on) => *on,
        serde_json::Value::Number(number) => number.as_f64() != Some(0.0),
        serde_json::Value::String(text) => !text.is_empty(),
        serde_json::Value::Array(list) => !list.is_empty(),
        serde_json::Value::Object(object) => !object.is_empty(),
    }
}

fn holds(value: &serde_json::Value, wanted: &[&str]) -> bool {
    let is_wanted = |value: &serde_json::Value| value.as_str().is_some_and(|text| wanted.contains(&text));
    is_wanted(value) || value.as_array().is_some_and(|list| list.iter().any(is_wanted))
}

/// Towers that are left alone: what they hold does not enter a text-only forward.
const OTHER_TOWERS: &[&str] = &["vision", "visual", "audio", "multi_modal_projector"];

fn shown_by_tensor(tensors: &Tensors<'_>, part: &str) -> Option<String> {
    let is_shown = |name: &&str| name.contains(part) && !OTHER_TOWERS.iter().any(|tower| name.contains(tower));
    tensors.names().find(is_shown).map(|name| format!("tensor {name}"))
}
