//! What wush does not convert, seen from the outside: quantized weights, adapters, other containers. What a model's
//! architecture forbids is `wush-model`'s to refuse.

use std::path::Path;

use serde_json::Value;
use wush_format::tensor_file::{Dtype, TensorFile, TensorInfo};

use crate::{CheckpointError, Result};

const DEQUANTIZE: &str = "dequantize the checkpoint to bf16 or f32 first, or start from the original one";
const CONVERT_PICKLE: &str = "convert it to safetensors first: load it with transformers and save_pretrained()";
const NO_GGUF: &str = "pass the original checkpoint, with config.json and .safetensors files";
const PASS_A_DIRECTORY: &str = "pass a checkpoint's directory, or a hub id such as Qwen/Qwen3-8B";
const MERGE: &str = "merge the adapter into its base model first (peft: merge_and_unload()), then convert the result";

/// Configuration keys that announce quantized weights.
const QUANTIZATION_KEYS: [&str; 2] = ["quantization_config", "compression_config"];
/// Objects of a configuration that describe a decoder of their own.
const NESTED_CONFIGS: [&str; 3] = ["text_config", "language_config", "llm_config"];
/// Last part of the names of tensors that belong to packed or scaled weights (FP8, compressed-tensors, GPTQ, AWQ,
/// bitsandbytes, MXFP4).
const QUANTIZATION_SUFFIXES: [&str; 18] = [
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
    "weight_packed",
    "weight_shape",
    "weight_zero_point",
    "input_scale",
    "input_global_scale",
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "SCB",
    "absmax",
    "quant_map",
    "gate_up_proj_scales",
    "down_proj_scales",
];

/// Refuses a configuration whose weights are quantized.
pub(crate) fn refuse_quantized_config(path: &Path, config: &Value) -> Result<()> {
    let places = std::iter::once(("", config))
        .chain(NESTED_CONFIGS.iter().filter_map(|&name| config.get(name).map(|nested| (name, nested))));
    for (place, object) in places {
        for key in QUANTIZATION_KEYS {
            let Some(found) = object.get(key).filter(|value| !value.is_null()) else { continue };
            let method = found.get("quant_method").and_then(Value::as_str).unwrap_or("unknown");
            let what = if place.is_empty() { key.to_owned() } else { format!("{place}.{key}") };
            return Err(CheckpointError::Unsupported {
                path: path.to_owned(),
                what,
                detail: format!(
                    "its weights are quantized (quant_method {}) and cannot be folded as plain numbers",
                    wush_format::json::shown(method)
                ),
                hint: DEQUANTIZE,
            });
        }
    }
    Ok(())
}

/// Refuses a shard that holds a quantized weight or the scales of one.
pub(crate) fn refuse_quantized_tensors(file: &TensorFile) -> Result<()> {
    for (name, info) in file.tensors() {
        let detail = if QUANTIZATION_SUFFIXES.contains(&name.rsplit('.').next().unwrap_or(name)) {
            "it belongs to quantized weights, which cannot be folded as plain numbers".to_owned()
        } else if is_plain(name, info) {
            continue;
        } else {
            format!("dtype {}, expected BF16, F16, F32 or F64", info.dtype)
        };
        let what = format!("tensor {}", wush_format::json::shown(name));
        return Err(CheckpointError::Unsupported { path: file.path().to_owned(), what, detail, hint: DEQUANTIZE });
    }
    Ok(())
}

/// Floats are weights. Integers wider than a byte and booleans are buffers (position ids, masks): no quantization
/// scheme leaves them without one of the suffixes above. A byte may be a packed weight, unless it is a causal mask
/// `[1, 1, n, n]` as old GPT-2 and GPT-NeoX checkpoints store it.
fn is_plain(name: &str, info: &TensorInfo) -> bool {
    match info.dtype {
        Dtype::BF16 | Dtype::F16 | Dtype::F32 | Dtype::F64 => true,
        Dtype::BOOL | Dtype::I16 | Dtype::U16 | Dtype::I32 | Dtype::U32 | Dtype::I64 | Dtype::U64 => true,
        Dtype::U8 => name.ends_with(".bias") && matches!(info.shape[..], [1, 1, rows, columns] if rows == columns),
        _ => false,
    }
}

/// Refuses an adapter: with weights beside it a loader would add it to them, which wush does not.
pub(crate) fn refuse_adapter(dir: &Path, names: &[String]) -> Result<()> {
    if !names.iter().any(|name| name == "adapter_config.json") {
        return Ok(());
    }
    Err(CheckpointError::Unsupported {
        path: dir.to_owned(),
        what: "adapter_config.json".to_owned(),
        detail: "a LoRA adapter; what is folded must be the model as it is served".to_owned(),
        hint: MERGE,
    })
}

/// The error for a directory without safetensors weights: names the container that is there instead.
pub(crate) fn no_weights(dir: &Path, names: &[String]) -> CheckpointError {
    let unsupported = |name: &str, detail: &str, hint| CheckpointError::Unsupported {
        path: dir.to_owned(),
        what: name.to_owned(),
        detail: detail.to_owned(),
        hint,
    };
    let with = |suffixes: &[&str]| names.iter().find(|name| suffixes.iter().any(|suffix| name.ends_with(suffix)));
    if let Some(name) = with(&[".gguf"]) {
        return unsupported(name, "a GGUF file, not safetensors", NO_GGUF);
    }
    if let Some(name) = with(&[".bin", ".pt", ".pth", ".ckpt", ".bin.index.json"]) {
        return unsupported(name, "pickled weights can run code when they are read", CONVERT_PICKLE);
    }
    CheckpointError::NotACheckpoint {
        dir: dir.to_owned(),
        detail: "it has no model.safetensors.index.json and no model*.safetensors".to_owned(),
        hint: "pass the directory that holds config.json and the .safetensors files",
    }
}

/// The error for a path that is no directory.
pub(crate) fn not_a_directory(path: &Path) -> CheckpointError {
    let is_gguf = path.extension().is_some_and(|extension| extension == "gguf");
    let (detail, hint) = match path.exists() {
        true if is_gguf => ("it is a file", NO_GGUF),
        true => ("it is a file", PASS_A_DIRECTORY),
        false if path.is_symlink() => ("it is a link to nothing", "set the link right, or pass the directory itself"),
        false => ("there is nothing at this path", PASS_A_DIRECTORY),
    };
    CheckpointError::NotACheckpoint { dir: path.to_owned(), detail: detail.to_owned(), hint }
}
