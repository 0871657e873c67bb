//! Errors inside each attention module, over lists of transforms, quantizers and bits.

use std::collections::BTreeSet;
use std::time::Instant;

use wush_eval::Protocol;
use wush_eval::recon::{ModuleErrors, reconstruct};
use wush_model::cpu::Cpu;
use wush_model::decoder::Decoder;

use crate::card::geometric_mean;
use crate::device::Runs;
use crate::error::InStage;
use crate::evaluation::{Cell, Evaluation};
use crate::plan::{describe_recon_time, n_tokens};
use crate::report::{EvalReconReport, ModelInfo, ModuleRow, ReconRow};
use crate::request::{Environment, EvalRequest};
use crate::{PipelineError, Result};

/// `wush eval recon`: relative squared errors of every attention module with each cache, on the unquantized model's activations.
///
/// # Errors
/// As `Evaluation::begin`.
pub fn eval_recon(request: &EvalRequest, env: &Environment<'_>) -> Result<EvalReconReport> {
    let clock = Instant::now();
    let evaluation = Evaluation::begin(request, Runs::OnCpu, env)?;
    evaluation.tell_notes(env);
    let rows = rows(&evaluation, &evaluation.cells(request)?, env)?;
    let without_error = without_error(&rows);
    without_error.iter().for_each(|note| env.monitor.note(&format!("note       {note}")));
    Ok(EvalReconReport {
        model: ModelInfo::new(&evaluation.model, evaluation.model_hash),
        text: evaluation.text.source.clone(),
        sequences: evaluation.text.sequences.len() as u64,
        seq_len: evaluation.seq_len as u64,
        scale_dtype: request.scales.to_string(),
        solves: evaluation.solves(),
        calibration: evaluation.calibration(),
        rows,
        notes: evaluation.notes.iter().cloned().chain(without_error).collect(),
        seconds: clock.elapsed().as_secs_f64(),
    })
}

/// Measures every cache in one pass over the text.
fn rows(evaluation: &Evaluation, cells: &[Cell<'_>], env: &Environment<'_>) -> Result<Vec<ReconRow>> {
    let Evaluation { model, text, .. } = evaluation;
    // No window is looked at here.
    let caches = cells.iter().map(|cell| cell.cache(model, Protocol::PAPER, &Cpu)).collect::<Result<Vec<_>>>()?;
    describe_recon_time(model, &text.sequences, caches.len()).iter().for_each(|note| env.monitor.note(note));
    env.monitor.begin("evaluate", "tokens", n_tokens(&text.sequences));
    let decoder = Decoder::new(&model.checkpoint, &model.spec, &Cpu);
    let measured = reconstruct(&decoder, &text.sequences, &caches, env.monitor);
    let measured = measured.map_err(PipelineError::from).in_stage("evaluate")?;
    env.monitor.end();
    Ok(cells.iter().zip(&measured).map(|(cell, modules)| row(cell, modules)).collect())
}

fn row(cell: &Cell<'_>, modules: &[ModuleErrors]) -> ReconRow {
    let layers: Vec<ModuleRow> = modules.iter().enumerate().map(|(layer, errors)| module_row(layer, errors)).collect();
    // Modules without an error (of a projection that is zero) would make every mean 0.
    let mean = |of: fn(&ModuleRow) -> f64| geometric_mean(layers.iter().map(of).filter(|&x| x > 0.0)).unwrap_or(0.0);
    ReconRow {
        transform: cell.candidate.name.clone(),
        quantizer: cell.quantizer.to_string(),
        bits: cell.average_bits,
        asked_bits: cell.asked,
        allotment: cell.allotment(),
        products: mean(|row| row.products),
        probabilities: mean(|row| row.probabilities),
        keys: mean(|row| row.keys),
        values: mean(|row| row.values),
        both: mean(|row| row.both),
        layers,
    }
}

/// Modules whose errors are zero wherever the means are taken: they are left out of those.
fn without_error(rows: &[ReconRow]) -> Option<String> {
    let is_zero = |row: &ModuleRow| [row.products, row.probabilities, row.keys, row.values, row.both].contains(&0.0);
    let layers: BTreeSet<u64> =
        rows.iter().flat_map(|row| &row.layers).filter(|row| is_zero(row)).map(|row| row.layer).collect();
    let list: Vec<String> = layers.iter().map(u64::to_string).collect();
    (!list.is_empty()).then(|| {
        format!(
            "an error of layer {} is zero (a projection that is zero, or a cache that loses nothing): where it is, the layer is not in the mean",
            list.join(", ")
        )
    })
}

fn module_row(layer: usize, errors: &ModuleErrors) -> ModuleRow {
    let ModuleErrors { products, probabilities, keys, values, both } = errors;
    ModuleRow {
        layer: layer as u64,
        products: products.relative(),
        probabilities: probabilities.relative(),
        keys: keys.relative(),
        values: values.relative(),
        both: both.relative(),
    }
}
