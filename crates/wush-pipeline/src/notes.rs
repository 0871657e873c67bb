//! What the user of a result must know beyond its numbers, said in the same words on stderr, in the reports and on the model
//! card: too little text, a server that must be told something, a check that did not run.

use std::collections::BTreeMap;

use serde_json::Value;
use wush_fold::FoldDtype;
use wush_format::equivalence::unit_roundoff;
use wush_format::hash::hash_file;
use wush_format::manifest::{Calibration, FoldReport, Manifest, Solve, Status};
use wush_format::tensor_file::Dtype;

use crate::Result;
use crate::human::{counted, human_bits};
use crate::model::Model;
use crate::plan::{FoldPlan, Unchecked, VerifyPlan};
use crate::report::AllottedBits;
use crate::solve::registry;
use crate::verify::folded_dtype;

/// Tokens a head dimension below which statistics are called too few: the sample covariance of n positions in d dimensions
/// has relative eigenvalue errors of about 2 √(d / n), here 0.6.
const TOKENS_PER_DIMENSION: u64 = 10;

/// Relative fold errors beyond this many unit roundoffs u are no longer rounding: the rounding errors of W_O' and W_V' are
/// spread evenly and move their product by about 0.6 u (Frobenius norm), a badly conditioned transform by a small multiple.
const FOLD_ERROR_ROUNDOFFS: f64 = 4.0;

/// Names of a 16-bit type in `config.json`.
const NARROW: [&str; 2] = ["bfloat16", "float16"];

/// A warning when `tokens` are too few for heads of dimension `head_dim`.
pub(crate) fn too_little_text(tokens: u64, head_dim: usize) -> Option<String> {
    let least = TOKENS_PER_DIMENSION.saturating_mul(head_dim as u64);
    (tokens < least).then(|| {
        format!(
            "too little text: {} for heads of dimension {head_dim}; below {least} the transforms fit this text and not the \
             model, and the predicted gains are too good. Use more or longer sequences",
            counted(tokens, "token")
        )
    })
}

/// What a bundle's user must know.
pub(crate) fn of_bundle(plan: &FoldPlan, manifest: &Manifest) -> Vec<String> {
    let Manifest { calibration, fold, solve, .. } = manifest;
    let (model, calibration) = (&plan.model, calibration.as_ref());
    let encoder = solve.feedback.then(|| {
        "the transforms are made for an encoder with error feedback, as wush's own is; for a server without one convert with \
         --preset paper"
            .to_owned()
    });
    let text = calibration.and_then(|calibration| too_little_text(calibration.tokens, model.head_dim()));
    let unchecked = plan.verify.as_ref().err().map(|&reason| unchecked(reason));
    let lossy = lossy_fold(fold, folded_dtype(&model.checkpoint, &model.spec, plan.dtype));
    let left_out = left_out(&model.checkpoint.other_weights().unwrap_or_default());
    let fewer = plan.verify.as_ref().ok().and_then(fewer_checked);
    [encoder, text, unchecked, fewer, lossy, left_out]
        .into_iter()
        .flatten()
        .chain(serving(model, plan.dtype, calibration))
        .collect()
}

/// The verdict of a bundle that did not run beside its source.
pub(crate) fn unchecked(reason: Unchecked) -> String {
    format!(
        "equivalence not checked: {}, so the verdict does not cover it; `wush inspect BUNDLE --base MODEL` compares the \
         weights",
        reason.reason()
    )
}

/// An equivalence check on fewer sequences than were asked for.
fn fewer_checked(plan: &VerifyPlan) -> Option<String> {
    let (n, asked) = (plan.sequences.len(), plan.asked);
    (n < asked).then(|| {
        format!("equivalence was checked on {}, all that there are, and not on {asked}", counted(n as u64, "sequence"))
    })
}

/// What to do after a failed equivalence check.
pub(crate) fn try_again(keeps_statistics: bool) -> String {
    let (resume, kept) =
        if keeps_statistics { (" --resume and", ", from the statistics, which are kept") } else { ("", "") };
    format!(
        "the equivalence check failed: to fold again{kept}, remove the .failed directory and run the same command \
         with{resume} --fold-dtype f32 or a larger --tolerance"
    )
}

/// Of a checkpoint that was unfolded from a bundle which had failed its check.
pub(crate) fn failed_source() -> String {
    "the bundle's equivalence check had failed: compare this checkpoint with the original before it is used".to_owned()
}

/// Of files that are exported from a bundle which had failed its check.
pub(crate) fn failed_bundle() -> String {
    "the bundle's equivalence check had failed: compare it with the original before it is served".to_owned()
}

/// Folded numbers that their type cannot hold well: below its smallest normal number it has fewer digits, and in the end none.
fn lossy_fold(fold: &FoldReport, stored: Dtype) -> Option<String> {
    let expected = unit_roundoff(stored);
    let is_rounding = fold.max_rel_error <= FOLD_ERROR_ROUNDOFFS * expected;
    (!is_rounding).then(|| {
        format!(
            "folding lost precision: the largest relative error, {:.1e} in layer {}, is far more than the {expected:.1e} of \
             {} numbers in their normal range. Fold with --fold-dtype f32",
            fold.max_rel_error,
            fold.worst_layer,
            format!("{stored:?}").to_lowercase()
        )
    })
}

/// Copies of the weights that are not in the bundle, since the fold does not reach them.
fn left_out(copies: &[String]) -> Option<String> {
    (!copies.is_empty()).then(|| {
        let (first, n) = (&copies[0], counted(copies.len() as u64, "file"));
        format!("{n} with another copy of the weights left out ({first}): not folded, a loader that takes it would mix the two")
    })
}

/// What a server of the bundle must be told.
pub(crate) fn serving(model: &Model, dtype: FoldDtype, calibration: Option<&Calibration>) -> Vec<String> {
    let config = model.checkpoint.config();
    let scaling = calibration.and_then(|calibration| calibration.rope_scaling.clone());
    let scaling = scaling.or_else(|| model.rope_scaling.map(|scaling| scaling.to_string()));
    [wide_dtype(config, dtype), scaling.and_then(|scaling| rope_scaling(config, &scaling))]
        .into_iter()
        .flatten()
        .collect()
}

/// Folded tensors are f32, and `config.json` makes loaders narrow them again.
fn wide_dtype(config: &Value, dtype: FoldDtype) -> Option<String> {
    let named = configured(config, "dtype").or_else(|| configured(config, "torch_dtype"))?.as_str()?;
    (dtype == FoldDtype::F32 && NARROW.contains(&named)).then(|| {
        format!(
            "the folded tensors are f32, but config.json says dtype {named} and loaders follow it: tell the server float32 \
             (vLLM: --dtype float32; transformers: dtype=\"float32\"), or they are narrowed again"
        )
    })
}

/// What the user of a bundle or of transforms must know before it is run: that it failed its check, that files beside the weights are
/// not those that were written, that it runs under another RoPE scaling than it was calibrated under, or over longer sequences.
///
/// # Errors
/// `Io`.
pub(crate) fn of_use(
    model: &Model,
    manifest: Option<&Manifest>,
    calibration: Option<&Calibration>,
    n_tokens: usize,
) -> Result<Vec<String>> {
    let failed = manifest
        .is_some_and(|manifest| manifest.status == Status::Failed)
        .then(|| "the bundle's equivalence check had failed: it does not compute what its source does".to_owned());
    let changed = manifest.map(|manifest| changed_files(model, manifest)).transpose()?.unwrap_or_default();
    let scaling = calibration.and_then(|calibration| other_scaling(model, calibration));
    let short = calibration.filter(|calibration| calibration.max_seq_len < n_tokens as u64).map(|calibration| {
        let calibrated = calibration.max_seq_len;
        format!(
            "calibrated on sequences of {calibrated} tokens, this run may reach {n_tokens}: keys beyond position {calibrated} have \
             statistics that calibration never saw"
        )
    });
    Ok(failed.into_iter().chain(changed).chain(scaling).chain(short).collect())
}

/// Files that decide what a model computes or reads, beside the weights and the sidecars, which are held to their hashes.
const SETTINGS_FILES: [&str; 2] = ["config.json", "tokenizer.json"];

/// Such files of a bundle that are not as they were written.
fn changed_files(model: &Model, manifest: &Manifest) -> Result<Vec<String>> {
    let mut notes = Vec::new();
    for file in manifest.files.iter().filter(|file| SETTINGS_FILES.contains(&file.path.as_str())) {
        if hash_file(&model.dir().join(&file.path))?.0 != file.sha256 {
            notes.push(format!(
                "{} is not the file that the bundle was written with: the transforms were made for what it said then",
                file.path
            ));
        }
    }
    Ok(notes)
}

/// The RoPE scaling of this run is not that of the calibration. A configuration that was given the calibration's is as good.
fn other_scaling(model: &Model, calibration: &Calibration) -> Option<String> {
    let stated = configured(model.checkpoint.config(), "rope_scaling").is_some();
    let name = |scaling: Option<String>| scaling.unwrap_or_else(|| "the configuration's own".to_owned());
    let (then, now) = (calibration.rope_scaling.clone(), model.rope_scaling.map(|scaling| scaling.to_string()));
    let differs = then != now && !(now.is_none() && stated);
    differs.then(|| {
        format!("calibrated under RoPE scaling {}, run under {}: keys have other statistics", name(then), name(now))
    })
}

/// The statistics were made under a RoPE scaling that `config.json` does not state.
pub(crate) fn rope_scaling(config: &Value, scaling: &str) -> Option<String> {
    let (kind, factor) = scaling.split_once(':')?;
    let factor: f64 = factor.parse().ok()?;
    let original = "original_max_position_embeddings";
    let positions = configured(config, original).or_else(|| configured(config, "max_position_embeddings"));
    let of_kind = match positions.and_then(Value::as_u64) {
        Some(positions) if kind == "yarn" => format!(", \"{original}\": {positions}"),
        _ => String::new(),
    };
    Some(format!(
        "the transforms were made with RoPE scaling {scaling}, which config.json does not state: the server must run with the \
         same, `\"rope_scaling\": {{\"rope_type\": \"{kind}\", \"factor\": {factor:?}{of_kind}}}`"
    ))
}

/// A key of the configuration, or of the text model inside it.
fn configured<'a>(config: &'a Value, key: &str) -> Option<&'a Value> {
    let inner = || config.get("text_config").and_then(|text| text.get(key));
    config.get(key).or_else(inner).filter(|value| !value.is_null())
}

/// A transform with the settings that went into it, and no others: "wush, preset default, damping 0.01", "random, seed 0".
pub fn describe_solve(solve: &Solve) -> String {
    let Solve { transform, preset, damping, seed, .. } = solve;
    let kind = registry().iter().find(|kind| kind.name == *transform);
    if kind.is_some_and(|kind| kind.needs_statistics) {
        format!("{transform}, preset {preset}, damping {damping}{}", beyond_the_paper(solve))
    } else if transform == "random" {
        format!("{transform}, seed {seed}")
    } else {
        transform.clone()
    }
}

/// Which layers have more than two bits, where bits were allotted: a line a number of bits and side, "keys 3 bits in layers 0, 4, 5".
pub fn describe_allotment(allotment: &[AllottedBits]) -> Vec<String> {
    let mut lines = Vec::new();
    let narrow = allotment.iter().flat_map(|a| [a.keys, a.values]).filter(|&bits| bits == 2).count();
    for bits in [3, 4] {
        for (side, of) in [("keys", (|a| a.keys) as fn(&AllottedBits) -> u8), ("values", |a| a.values)] {
            let layers: Vec<String> = allotment.iter().filter(|a| of(a) == bits).map(|a| a.layer.to_string()).collect();
            if !layers.is_empty() {
                lines.push(format!("{side} {bits} bits in layers {}", layers.join(", ")));
            }
        }
    }
    if narrow > 0 {
        lines.push(format!("2 bits in the other {narrow} of {}", 2 * allotment.len()));
    }
    lines
}

/// "2.25 bits", or "2.24 of at most 2.25 bits" where another average was asked for.
pub fn describe_bits(bits: f64, asked: Option<f64>) -> String {
    match asked {
        Some(asked) if human_bits(asked) != human_bits(bits) => {
            format!("{} of at most {} bits", human_bits(bits), human_bits(asked))
        }
        _ => format!("{} bits", human_bits(bits)),
    }
}

/// How each of several transforms was made, by its name in a report's rows: those that have settings, or another name than their own.
pub fn describe_solves(solves: &BTreeMap<String, Solve>) -> Vec<String> {
    let of = |(name, solve): (&String, &Solve)| match describe_solve(solve) {
        how if how == *name => None,
        how if solve.transform == *name => Some(how),
        how => Some(format!("{name}: {how}")),
    };
    solves.iter().filter_map(of).collect()
}

/// The settings that are not as published.
fn beyond_the_paper(solve: &Solve) -> String {
    let published = Solve::as_published(&solve.transform);
    let Solve { exponent, factor, center_keys, seed, .. } = solve;
    let settings = [
        (*exponent != published.exponent).then(|| format!("exponent {exponent}")),
        (*factor != published.factor).then(|| format!("factor {factor}, seed {seed}")),
        (*center_keys != published.center_keys).then(|| format!("keys centred: {center_keys}")),
        solve.feedback.then(|| "with feedback".to_owned()),
    ];
    settings.into_iter().flatten().map(|setting| format!(", {setting}")).collect()
}

/// What the predicted gain is measured against and on.
pub fn describe_gain() -> &'static str {
    "on the calibration text itself; against any orthogonal transform at equal bits"
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn few_tokens_are_called_few() {
        let note = too_little_text(32, 64).expect("32 tokens say nothing about 64 dimensions");
        assert!(note.starts_with("too little text: 32 tokens for heads of dimension 64; below 640"), "{note}");
        assert_eq!(too_little_text(640, 64), None);
    }

    #[test]
    fn only_what_rounding_cannot_explain_is_called_lost() {
        let fold = |max_rel_error| FoldReport { dtype: "keep".to_owned(), max_rel_error, worst_layer: 3 };
        assert_eq!(lossy_fold(&fold(2.3e-3), Dtype::BF16), None);
        let note = lossy_fold(&fold(0.79), Dtype::F16).expect("lost");
        assert!(note.contains("7.9e-1 in layer 3") && note.contains("4.9e-4 of f16"), "{note}");
        assert!(lossy_fold(&fold(f64::NAN), Dtype::F16).is_some());
    }

    #[test]
    fn wide_folds_say_what_a_loader_must_be_told() {
        let bf16 = json!({ "text_config": { "dtype": "bfloat16" } });
        assert!(wide_dtype(&bf16, FoldDtype::F32).expect("narrower").contains("dtype bfloat16"));
        assert_eq!(wide_dtype(&bf16, FoldDtype::Keep), None);
        assert_eq!(wide_dtype(&json!({ "torch_dtype": "float32" }), FoldDtype::F32), None);
    }

    #[test]
    fn scalings_come_with_their_configuration() {
        let note = rope_scaling(&json!({ "max_position_embeddings": 4096 }), "yarn:4").expect("known");
        let snippet = r#"{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}"#;
        assert!(note.contains(snippet), "{note}");
    }

    #[test]
    fn only_settings_that_were_used_are_told() {
        let solve = |transform: &str| Solve { seed: 7, ..Solve::as_published(transform) };
        let texts = ["wush", "random", "hadamard"].map(|name| describe_solve(&solve(name)));
        assert_eq!(texts, ["wush, preset paper, damping 0.01", "random, seed 7", "hadamard"]);
        let other = Solve { exponent: 0.4, factor: "balanced".to_owned(), feedback: true, ..solve("wush") };
        let text = describe_solve(&Solve { center_keys: "auto".to_owned(), ..other });
        assert_eq!(
            text,
            "wush, preset paper, damping 0.01, exponent 0.4, factor balanced, seed 7, keys centred: auto, with feedback"
        );
    }
}
