//! Perplexity through a quantized cache, over lists of transforms, quantizers and bits.

use std::time::Instant;

use wush_eval::Protocol;
use wush_eval::perplexity::{Score, perplexity};
use wush_gpu::backend::Gpu;
use wush_model::attention::{AttentionProduct, Exact, Windowed};
use wush_model::cpu::Cpu;
use wush_model::decoder::Decoder;

use crate::device::Runs;
use crate::error::InStage;
use crate::evaluation::{Cell, Evaluation};
use crate::human::human_bits;
use crate::plan::n_tokens;
use crate::report::{EvalPplReport, ModelInfo, PerplexityRow};
use crate::request::{DeviceChoice, Environment, EvalPplRequest};
use crate::{PipelineError, Result};

/// Name of the row without quantization.
const UNQUANTIZED: &str = "none";
/// Its bits.
pub(crate) const UNQUANTIZED_BITS: f64 = 16.0;

/// `wush eval ppl`: a text's perplexity without and with each cache.
///
/// # Errors
/// As `Evaluation::begin`; `Option` for chunks or flushes of no tokens.
pub fn eval_ppl(request: &EvalPplRequest, env: &Environment<'_>) -> Result<EvalPplReport> {
    let clock = Instant::now();
    check_protocol(request.protocol)?;
    if request.eval.model.device == DeviceChoice::AllCuda {
        let (expected, found) = ("auto, cpu, cuda or cuda:N: one GPU scores".to_owned(), "cuda:all".to_owned());
        return Err(PipelineError::Option { option: "--device", expected, found });
    }
    let mut evaluation = Evaluation::begin(&request.eval, Runs::OnGpu, env)?;
    evaluation.notes.extend(little_quantized(request.protocol, evaluation.seq_len));
    evaluation.tell_notes(env);
    let cells = evaluation.cells(&request.eval)?;
    let rows = rows(&evaluation, &cells, request.protocol, env)?;
    Ok(EvalPplReport {
        model: ModelInfo::new(&evaluation.model, evaluation.model_hash),
        device: evaluation.model.device.name().to_owned(),
        text: evaluation.text.source.clone(),
        sequences: evaluation.text.sequences.len() as u64,
        seq_len: evaluation.seq_len as u64,
        protocol: request.protocol,
        scale_dtype: request.eval.scales.to_string(),
        solves: evaluation.solves(),
        calibration: evaluation.calibration(),
        rows,
        notes: evaluation.notes.clone(),
        seconds: clock.elapsed().as_secs_f64(),
    })
}

/// Scores the text without quantization and through every cache, telling each row when it is done.
fn rows(
    evaluation: &Evaluation,
    cells: &[Cell<'_>],
    protocol: Protocol,
    env: &Environment<'_>,
) -> Result<Vec<PerplexityRow>> {
    evaluation.tell_time(1 + cells.len(), env);
    env.monitor.begin("evaluate", "tokens", (1 + cells.len() as u64) * n_tokens(&evaluation.text.sequences));
    let mut rows = Vec::with_capacity(1 + cells.len());
    let mut add = |row: PerplexityRow| {
        env.monitor.note(&format!("row        {}", describe(&row)));
        rows.push(row);
    };
    match evaluation.model.device.first() {
        None => scored(evaluation, cells, protocol, (&Cpu, env), &mut add)?,
        Some(info) => {
            let gpu = Gpu::<f32>::new(wush_gpu::Device::open(info.ordinal).map_err(PipelineError::Gpu)?);
            scored(evaluation, cells, protocol, (&gpu, env), &mut add)?;
        }
    }
    env.monitor.end();
    Ok(rows)
}

/// The rows by a device that computes in f32: the same numbers up to the order of sums.
fn scored<B: Windowed>(
    evaluation: &Evaluation,
    cells: &[Cell<'_>],
    protocol: Protocol,
    (backend, env): (&B, &Environment<'_>),
    add: &mut dyn FnMut(PerplexityRow),
) -> Result<()> {
    let Evaluation { model, text, .. } = evaluation;
    let decoder = Decoder::new(&model.checkpoint, &model.spec, backend);
    // A device of its own keeps the weights; the CPU would hold them twice.
    let decoder = if B::SIDE_BY_SIDE { decoder } else { decoder.keeping_weights() };
    let score = |attention: &dyn AttentionProduct<B>| {
        perplexity(&decoder, &text.sequences, attention, env.monitor).map_err(PipelineError::from).in_stage("evaluate")
    };
    add(unquantized(score(&Exact)?));
    for cell in cells {
        let score = score(&cell.cache(model, protocol, backend)?)?;
        add(PerplexityRow {
            transform: cell.candidate.name.clone(),
            quantizer: cell.quantizer.to_string(),
            bits: cell.average_bits,
            asked_bits: cell.asked,
            allotment: cell.allotment(),
            ..unquantized(score)
        });
    }
    Ok(())
}

fn unquantized(score: Score) -> PerplexityRow {
    PerplexityRow {
        transform: UNQUANTIZED.to_owned(),
        quantizer: UNQUANTIZED.to_owned(),
        bits: UNQUANTIZED_BITS,
        asked_bits: None,
        allotment: Vec::new(),
        ppl: score.perplexity(),
        nll: score.nll,
        tokens: score.tokens,
    }
}

/// As a long run tells it when it is done: a run that is stopped has said what it found.
fn describe(row: &PerplexityRow) -> String {
    let PerplexityRow { transform, quantizer, bits, ppl, .. } = row;
    let bits = human_bits(*bits);
    format!("{transform}, {quantizer}, {bits} bits: perplexity {ppl:.4}")
}

/// Where most of a window, or all of it, stays in full precision.
fn little_quantized(protocol: Protocol, seq_len: usize) -> Option<String> {
    let quantized = protocol.chunks(seq_len).last().map_or(0, |chunk| chunk.quantized.len());
    let Protocol { chunk, sink, keep, flush } = protocol;
    match quantized {
        0 if sink.saturating_add(keep) >= seq_len => Some(format!(
            "nothing was quantized: the first {sink} and the newest {keep} tokens stay exact, which is all of a window of {seq_len}"
        )),
        0 => Some(format!(
            "nothing was quantized: in a window of {seq_len} tokens, {chunk} a step, no {flush} are older than the newest {keep} before the \
             last step"
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
