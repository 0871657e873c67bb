//! The model card of a bundle, made from its manifest and a few words on the model: the same input gives the same bytes.

use std::fmt::Write;

use wush_format::manifest::{Equivalence, HeadReport, Manifest, Status};

use crate::human::counted;
use crate::notes::describe_solve;
use crate::plan::VERIFY_TOKENS;

/// [`wush_format::manifest::FoldReport::dtype`] of a fold that keeps the checkpoint's types.
const KEEP: &str = "keep";

/// [`wush_format::manifest::Solve::center_keys`] of transforms without means.
const KEYS_AS_THEY_ARE: &str = "never";

/// What the card is made from.
pub(crate) struct Context<'a> {
    /// The bundle's.
    pub(crate) manifest: &'a Manifest,
    /// Element type of the folded tensors, "bf16".
    pub(crate) folded_dtype: &'a str,
    /// A warning on the amount of calibration text.
    pub(crate) text: Option<String>,
    /// What a server must be told.
    pub(crate) serving: Vec<String>,
}

/// `wush/README.md`.
pub(crate) fn render(context: &Context<'_>) -> String {
    let mut card = String::new();
    // Writing into a String cannot fail.
    let _ = write_card(&mut card, context);
    card
}

fn write_card(card: &mut String, context: &Context<'_>) -> std::fmt::Result {
    let manifest = context.manifest;
    let source = &manifest.source;
    let revision = source.revision.as_ref().map(|r| format!(" at revision `{r}`")).unwrap_or_default();
    writeln!(card, "# {} with folded value transforms\n", source.id)?;
    if manifest.status == Status::Failed {
        writeln!(card, "**The equivalence check failed: this is kept for a look, not for use.**\n")?;
    }
    writeln!(
        card,
        "Made by {} from `{}`{revision} (weights hash `{}`). The directory above is that checkpoint, file for file; only the \
         value and output projections of its attention layers (and value biases) differ. They hold the same function in \
         coordinates in which the value cache quantizes well, so any server that ignores this folder computes what the \
         original does, up to rounding.\n",
        manifest.tool, source.id, source.model_hash
    )?;
    write_serving(card, manifest, &context.serving)?;
    write_basis(card, manifest)?;
    write_numbers(card, context)?;
    writeln!(card, "`manifest.json` lists every input and output with its SHA-256; `wush inspect` checks them.")
}

fn write_serving(card: &mut String, manifest: &Manifest, notes: &[String]) -> std::fmt::Result {
    card.write_str(
        "## Serving\n\n\
         - **Any server, nothing to do:** load the directory as usual. Values are cached in transformed coordinates; a \
         quantized value cache gains from it.\n\
         - **A server that also quantizes keys** applies two matrices a KV head, after RoPE and before the cache write: \
         `layers.{i}.key` to each new key and `layers.{i}.query` to each query, from `key_transforms.safetensors` \
         (f32, `[n_kv_heads, d, d]`, row-major, `y = T x`). Query head `n` uses KV head `n / (n_heads / n_kv_heads)`. \
         Apply both or neither.\n\
         - `value_transforms.safetensors` is for audit and for `wush unfold`; a server does not need it.\n",
    )?;
    if manifest.solve.center_keys != KEYS_AS_THEY_ARE {
        card.write_str(
            "- **Keys are centred:** such a server also subtracts `layers.{i}.key_mean` from each new key first, in every part \
             of the cache alike. The softmax does not notice.\n",
        )?;
    }
    if manifest.solve.feedback {
        card.write_str(
            "- **Needs an encoder with error feedback**, such as wush's own: its matrices are `layers.{i}.key_feedback` and those in \
             `value_feedback.safetensors`; the cache is read as ever. A server whose encoder has none loses more with these transforms \
             than with those of `--preset paper`.\n",
        )?;
    }
    notes.iter().try_for_each(|note| writeln!(card, "- **Must be set:** {note}."))?;
    card.write_str("\n")
}

fn write_basis(card: &mut String, manifest: &Manifest) -> std::fmt::Result {
    writeln!(
        card,
        "## Basis\n\n\
         The weights live in the basis `{}` of `{}`. **Adapters (LoRA) made for the original do not fit it and give wrong \
         text without an error**: merge them into the original first and convert the result. Merging or averaging these weights \
         with others is wrong in the same way.\n",
        manifest.basis.kind, manifest.basis.model_hash
    )
}

fn write_numbers(card: &mut String, context: &Context<'_>) -> std::fmt::Result {
    let manifest = context.manifest;
    card.write_str("## Numbers\n\n| | |\n|---|---|\n")?;
    writeln!(card, "| transform | {} |", describe_solve(&manifest.solve))?;
    match &manifest.calibration {
        Some(calibration) => {
            let (sequences, tokens) =
                (counted(calibration.sequences, "sequence"), counted(calibration.tokens, "token"));
            writeln!(card, "| calibration | {}: {sequences}, {tokens} |", calibration.source)?;
            writeln!(card, "| longest calibrated position | {} |", calibration.max_seq_len)?;
            if let Some(scaling) = &calibration.rope_scaling {
                writeln!(card, "| RoPE scaling asked for | {scaling} |")?;
            }
        }
        None => card.write_str("| calibration | none: this transform needs no statistics |\n")?,
    }
    let gains = |role: fn(&wush_format::manifest::LayerReport) -> &Vec<HeadReport>| {
        geometric_mean(manifest.layers.iter().flat_map(role).map(|head| head.gain()))
    };
    for (name, gain) in [("keys", gains(|layer| &layer.key)), ("values", gains(|layer| &layer.value))] {
        if let Some(gain) = gain {
            writeln!(
                card,
                "| predicted gain over orthogonal transforms on the calibration text itself, {name} (geometric mean) | \
                 {gain:.2} x |"
            )?;
        }
    }
    let stored = if manifest.fold.dtype == KEEP { " (as stored)" } else { "" };
    writeln!(card, "| folded tensors | {}{stored} |", context.folded_dtype)?;
    writeln!(card, "| largest relative fold error | {:.1e} |", manifest.fold.max_rel_error)?;
    match &manifest.equivalence {
        Some(equivalence) => write_equivalence(card, equivalence)?,
        None => card.write_str("| equivalence | not checked |\n")?,
    }
    if let Some(note) = &context.text {
        writeln!(card, "\n**Warning:** {note}.")?;
    }
    card.write_str(
        "\nThe predicted gain is the factor by which rounding loss shrinks at equal bits against the identity, a Hadamard \
         and any other orthogonal transform, on the calibration text itself. Beyond the longest calibrated position the statistics say nothing.\n\n",
    )
}

fn write_equivalence(card: &mut String, equivalence: &Equivalence) -> std::fmt::Result {
    let Equivalence { tokens, nll_source, nll_bundle, mean_kl, max_nll_diff, tolerance, .. } = equivalence;
    writeln!(card, "| equivalence check | {tokens} tokens: the first {VERIFY_TOKENS} of each of a few sequences |")?;
    writeln!(card, "| mean NLL of the original | {nll_source:.6} |")?;
    writeln!(card, "| mean NLL of this bundle, key transforms applied | {nll_bundle:.6} |")?;
    writeln!(card, "| mean KL divergence | {mean_kl:.2e} |")?;
    writeln!(card, "| largest NLL difference of a token | {max_nll_diff:.2e} |")?;
    writeln!(card, "| tolerance on the mean NLL, relative | {tolerance:.2e} |")
}

/// Of positive numbers; none of none.
pub fn geometric_mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (mut sum, mut n) = (0.0, 0usize);
    for value in values {
        sum += value.ln();
        n += 1;
    }
    (n > 0).then(|| (sum / n as f64).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn geometric_means() {
        assert_eq!(geometric_mean([].into_iter()), None);
        let mean = geometric_mean([1.0, 4.0].into_iter()).expect("two values");
        assert!((mean - 2.0).abs() <= 1e-15);
    }
}
