//! Perplexity through a quantized cache, over lists of transforms, quantizers and bits.

use std::time::Instant;

use wush_eval::Protocol;
use wush_eval::cache::QuantizedCache;
use wush_eval::perplexity::{Score, perplexity};
use wush_model::attention::{AttentionProduct, Exact};
use wush_model::cpu::Cpu;
use wush_model::decoder::Decoder;

use crate::candidates::{Candidate, Comparison};
use crate::error::InStage;
use crate::model::Model;
use crate::notes::too_little_text;
use crate::page::{perplexity_page, write_page};
use crate::paths::require_page;
use crate::plan::{Purpose, describe_model, load_sequences, longest, n_tokens};
use crate::report::{EvalPplReport, ModelInfo, PerplexityRow};
use crate::request::{Environment, EvalPplRequest};
use crate::{PipelineError, Result};

/// Name of the row without quantization.
const UNQUANTIZED: &str = "none";
/// Its bits.
pub(crate) const UNQUANTIZED_BITS: u8 = 16;

/// `wush eval ppl`: a text's perplexity without and with each cache.
///
/// # Errors
/// What cannot be read; `Option` for a transform that needs statistics without any, or a bundle with `--transform`;
/// `Solve`; `OutputInsideSource` for a page among the model's files; `Interrupted`.
pub fn eval_ppl(request: &EvalPplRequest, env: &Environment<'_>) -> Result<EvalPplReport> {
    let clock = Instant::now();
    check_protocol(request.protocol)?;
    let model = Model::resolve_any(&request.model, env)?;
    if let Some(page) = &request.html {
        require_page(page, &[model.dir()])?;
    }
    env.monitor.note(&describe_model(&model));
    let text = load_sequences(&model, &request.text, Purpose::Score, env)?;
    let seq_len = longest(&text.sequences);
    let comparison = Comparison::plan(&model, &request.transforms, seq_len, env)?;
    comparison.announce(&model, env);
    let model_hash = model.hash_weights()?;
    let candidates = comparison.candidates(&model, model_hash, env)?;
    let notes = notes(&model, &candidates, seq_len)
        .into_iter()
        .chain(little_quantized(request.protocol, seq_len))
        .collect::<Vec<_>>();
    notes.iter().for_each(|note| env.monitor.note(&format!("note       {note}")));
    let rows = rows(&model, &text.sequences, &candidates, request, env)?;
    let report = EvalPplReport {
        model: ModelInfo::new(&model, model_hash),
        text: text.source,
        sequences: text.sequences.len() as u64,
        seq_len: seq_len as u64,
        protocol: request.protocol,
        calibration: candidates.into_iter().find_map(|candidate| candidate.calibration),
        rows,
        notes,
        seconds: clock.elapsed().as_secs_f64(),
    };
    if let Some(path) = &request.html {
        write_page(&perplexity_page(&report)?, path, env.monitor)?;
    }
    Ok(report)
}

/// Scores the text without quantization and through every cache, telling each row when it is done.
fn rows(
    model: &Model,
    sequences: &[Vec<u32>],
    candidates: &[Candidate],
    request: &EvalPplRequest,
    env: &Environment<'_>,
) -> Result<Vec<PerplexityRow>> {
    let n_rows = 1 + candidates.len() * request.quantizers.len().max(1) * request.bits.len();
    env.monitor.begin("evaluate", "tokens", n_rows as u64 * n_tokens(sequences));
    let decoder = Decoder::new(&model.checkpoint, &model.spec, &Cpu);
    let score = |attention: &dyn AttentionProduct<Cpu>| {
        perplexity(&decoder, sequences, attention, env.monitor).map_err(PipelineError::from).in_stage("evaluate")
    };
    let mut rows = Vec::with_capacity(n_rows);
    let mut add = |row: PerplexityRow| {
        env.monitor.note(&format!("row        {}", describe(&row)));
        rows.push(row);
    };
    add(row(UNQUANTIZED, UNQUANTIZED, UNQUANTIZED_BITS, score(&Exact)?));
    for candidate in candidates {
        let own = [candidate.quantizer()];
        let quantizers = if request.quantizers.is_empty() { &own[..] } else { &request.quantizers };
        for quantizer in quantizers {
            for &bits in &request.bits {
                let layers = candidate.layers(quantizer, bits)?;
                let cache = QuantizedCache::new(&model.spec, layers, request.protocol)?;
                add(row(&candidate.name, &quantizer.to_string(), bits.get(), score(&cache)?));
            }
        }
    }
    env.monitor.end();
    Ok(rows)
}

fn row(transform: &str, quantizer: &str, bits: u8, score: Score) -> PerplexityRow {
    PerplexityRow {
        transform: transform.to_owned(),
        quantizer: quantizer.to_owned(),
        bits,
        ppl: score.perplexity(),
        nll: score.nll,
        tokens: score.tokens,
    }
}

/// As a long run tells it when it is done: a run that is stopped has said what it found.
fn describe(row: &PerplexityRow) -> String {
    let PerplexityRow { transform, quantizer, bits, ppl, .. } = row;
    format!("{transform}, {quantizer}, {bits} bits: perplexity {ppl:.4}")
}

/// What the reader of the numbers should know.
pub(crate) fn notes(model: &Model, candidates: &[Candidate], seq_len: usize) -> Vec<String> {
    let lengths = candidates.iter().filter_map(|candidate| candidate.calibration.as_ref()).map(|c| c.max_seq_len);
    let short = lengths.min().filter(|&calibrated| calibrated < seq_len as u64).map(|calibrated| {
        format!(
            "calibrated on sequences of {calibrated} tokens, evaluated on {seq_len}: keys beyond position {calibrated} have \
             statistics that calibration never saw"
        )
    });
    let tokens = candidates.iter().filter_map(|candidate| candidate.calibration.as_ref()).map(|c| c.tokens).min();
    let few = tokens.and_then(|tokens| too_little_text(tokens, model.head_dim()));
    short.into_iter().chain(few).collect()
}

/// Where most of a window, or all of it, stays in full precision.
fn little_quantized(protocol: Protocol, seq_len: usize) -> Option<String> {
    let quantized = protocol.chunks(seq_len).last().map_or(0, |chunk| chunk.quantized.len());
    let Protocol { sink, keep, .. } = protocol;
    match quantized {
        0 => Some(format!(
            "nothing was quantized: the first {sink} and the newest {keep} tokens stay exact, which is all of a window of {seq_len}"
        )),
        _ if 2 * quantized < seq_len => Some(format!(
            "at the end of a window of {seq_len} tokens {quantized} are quantized: longer windows (--seq-len) show what a long \
             context costs"
        )),
        _ => None,
    }
}

/// The cache can be simulated.
fn check_protocol(protocol: Protocol) -> Result<()> {
    let counts = [("--chunk", protocol.chunk), ("--flush", protocol.flush)];
    match counts.into_iter().find(|(_, n_tokens)| *n_tokens == 0) {
        Some((option, _)) => {
            Err(PipelineError::Option { option, expected: "at least 1".to_owned(), found: "0".to_owned() })
        }
        None => Ok(()),
    }
}
