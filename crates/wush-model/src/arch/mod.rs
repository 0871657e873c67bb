//! Model families: `config.json` and tensor names → [`ModelSpec`].
//!
//! Enters: an open checkpoint. Leaves: a spec whose every slice is in the checkpoint in the right shape, or a refusal
//! that names the key or tensor and what it does. A family is one file and one entry of [`FAMILIES`]. Nothing here reads
//! weights, and nothing is guessed: what is not known to be exact is refused (see [`refuse`]).

pub mod config;
pub mod refuse;
pub mod rope;
pub mod tensors;

mod build;
mod gemma2;
mod gemma3;
mod llama;
mod mistral;
mod olmo2;
mod phi3;
mod qwen2;
mod qwen3;
mod smollm3;

use wush_checkpoint::Checkpoint;

use crate::error::ModelError;
use crate::spec::ModelSpec;
use config::ConfigView;
pub use rope::RopeScaling;
use tensors::Tensors;

/// One model family.
#[derive(Debug)]
pub struct Family {
    /// Name in reports and manifests.
    pub name: &'static str,
    /// Values of `model_type`.
    pub model_types: &'static [&'static str],
    /// Values of `architectures`.
    pub architectures: &'static [&'static str],
    /// One line for the documentation: models, and what is particular about them.
    pub docs: &'static str,
    /// Makes the spec.
    build: fn(&Context<'_>) -> Result<ModelSpec, ModelError>,
}

/// Every supported family.
pub const FAMILIES: &[Family] = &[
    llama::FAMILY,
    smollm3::FAMILY,
    mistral::FAMILY,
    qwen2::FAMILY,
    qwen3::FAMILY,
    gemma2::FAMILY,
    gemma3::FAMILY,
    phi3::FAMILY,
    olmo2::FAMILY,
];

/// A checkpoint with other towers around a decoder whose configuration is `text_config`.
#[derive(Debug)]
pub struct Wrapper {
    /// Value of the outer `model_type`.
    pub model_type: &'static str,
    /// What it wraps.
    pub docs: &'static str,
}

/// Wrappers whose text-only forward is that of the family in `text_config`.
pub const WRAPPERS: &[Wrapper] = &[
    Wrapper { model_type: "gemma3", docs: "Gemma 3 with its vision tower (4B and up)" },
    Wrapper { model_type: "llava", docs: "LLaVA over Llama, Mistral or Qwen2" },
    Wrapper { model_type: "llava_next", docs: "LLaVA-NeXT over Llama, Mistral or Qwen2" },
    Wrapper { model_type: "mistral3", docs: "Mistral Small 3.1 and later with its vision tower" },
];

/// Prefixes of a decoder's tensors: a causal model's, then a bare model's.
const PREFIXES: &[&str] = &["model.", ""];
/// Prefixes of the decoder inside a wrapper: the old layout, the new one, the bare one.
const WRAPPED_PREFIXES: &[&str] = &["language_model.model.", "model.language_model.", "language_model."];
/// Names of an output head.
const HEADS: &[&str] = &["lm_head.weight", "language_model.lm_head.weight"];

/// What a family's constructor sees.
#[derive(Debug)]
pub struct Context<'a> {
    /// The family's name.
    family: &'static str,
    /// The decoder's configuration: the root, or `text_config`.
    config: ConfigView<'a>,
    /// Prefix of the decoder's tensors, with its final dot.
    prefix: &'static str,
    /// The stored output head, if any.
    lm_head: Option<&'static str>,
    /// `--rope-scaling`.
    rope_scaling: Option<&'a RopeScaling>,
}

/// Finds the family of a checkpoint, makes its spec and checks every slice of it.
///
/// # Errors
/// `UnknownFamily`, `Unsupported` for a hazard of [`refuse::HAZARDS`], `Config` for a key, `MissingTensor`, `Tensor` or
/// `UnknownTensor` for a tensor, `RopeScaling` when the scaling does not fit.
pub fn resolve(ckpt: &Checkpoint, rope_scaling: Option<&RopeScaling>) -> Result<ModelSpec, ModelError> {
    let root = ConfigView::root(ckpt.config())?;
    let tensors = Tensors::of(ckpt);
    let text = root.child("text_config")?;
    refuse::check(&root, text.as_ref(), &tensors)?;
    let (family, config, wrapped) = find_family(&root, text)?;
    let prefix = find_prefix(&tensors, if wrapped { WRAPPED_PREFIXES } else { PREFIXES })?;
    let lm_head = HEADS.iter().copied().find(|name| tensors.has(name));
    let context = Context { family: family.name, config, prefix, lm_head, rope_scaling };
    let spec = (family.build)(&context)?;
    refuse::check_gated_queries(&spec, &tensors)?;
    tensors.check(&spec, &format!("{prefix}layers."))?;
    Ok(spec)
}

/// The family, the configuration of its decoder, and whether it is wrapped.
fn find_family<'a>(
    root: &ConfigView<'a>,
    text: Option<ConfigView<'a>>,
) -> Result<(&'static Family, ConfigView<'a>, bool), ModelError> {
    let outer = root.opt_text("model_type")?.ok_or_else(|| root.error("model_type", "a model type"))?;
    if let Some(family) = by_model_type(outer) {
        check_architectures(root, family)?;
        return Ok((family, root.clone(), false));
    }
    let unknown = |model_type: &str| ModelError::UnknownFamily {
        model_type: model_type.to_owned(),
        supported: supported_model_types().join(", "),
    };
    let text = text.filter(|_| WRAPPERS.iter().any(|wrapper| wrapper.model_type == outer));
    let text = text.ok_or_else(|| unknown(outer))?;
    let inner = text.opt_text("model_type")?.ok_or_else(|| text.error("model_type", "a model type"))?;
    let family = by_model_type(inner).ok_or_else(|| unknown(inner))?;
    Ok((family, text, true))
}

fn by_model_type(model_type: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.model_types.contains(&model_type))
}

/// Every `model_type` that [`resolve`] takes, in the registry's order, wrappers last.
pub fn supported_model_types() -> Vec<&'static str> {
    let families = FAMILIES.iter().flat_map(|family| family.model_types.iter().copied());
    families.chain(WRAPPERS.iter().map(|wrapper| wrapper.model_type)).collect()
}

/// A known `model_type` under a foreign class name is another architecture that borrows the type.
fn check_architectures(root: &ConfigView<'_>, family: &Family) -> Result<(), ModelError> {
    match root.opt_texts("architectures")? {
        Some(found) if !found.is_empty() && !found.iter().any(|name| family.architectures.contains(name)) => {
            Err(root.error("architectures", family.architectures.join(" or ")))
        }
        _ => Ok(()),
    }
}

fn find_prefix(tensors: &Tensors<'_>, prefixes: &[&'static str]) -> Result<&'static str, ModelError> {
    let embedding = |prefix: &str| format!("{prefix}embed_tokens.weight");
    match prefixes.iter().find(|prefix| tensors.has(&embedding(prefix))) {
        Some(prefix) => Ok(prefix),
        None => Err(ModelError::MissingTensor { name: embedding(prefixes[0]) }),
    }
}
