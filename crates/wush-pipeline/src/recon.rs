//! Errors inside each attention module, over lists of transforms, quantizers and bits.

use std::time::Instant;

use wush_eval::cache::QuantizedCache;
use wush_eval::recon::{Measures, ModuleErrors, reconstruct};
use wush_eval::{EvalError, Protocol};
use wush_model::cpu::Cpu;
use wush_model::decoder::Decoder;

use crate::candidates::{Candidate, Comparison};
use crate::card::geometric_mean;
use crate::error::InStage;
use crate::eval::notes;
use crate::model::Model;
use crate::page::{recon_page, write_page};
use crate::paths::require_page;
use crate::plan::{Purpose, describe_model, load_sequences, longest, n_tokens};
use crate::report::{EvalReconReport, ModelInfo, ModuleRow, ReconRow};
use crate::request::{Environment, EvalReconRequest};
use crate::{PipelineError, Result};

/// `wush eval recon`: relative squared errors of every attention module with each cache, on the unquantized model's activations.
///
/// # Errors
/// As `eval_ppl`.
pub fn eval_recon(request: &EvalReconRequest, env: &Environment<'_>) -> Result<EvalReconReport> {
    let clock = Instant::now();
    let model = Model::resolve_any(&request.model, env)?;
    if let Some(page) = &request.html {
        require_page(page, &[model.dir()])?;
    }
    env.monitor.note(&describe_model(&model));
    let text = load_sequences(&model, &request.text, Purpose::Score, env)?;
    let seq_len = longest(&text.sequences);
    if seq_len < 2 {
        return Err(EvalError::NothingToScore.into());
    }
    let comparison = Comparison::plan(&model, &request.transforms, seq_len, env)?;
    comparison.announce(&model, env);
    let model_hash = model.hash_weights()?;
    let candidates = comparison.candidates(&model, model_hash, env)?;
    let notes = notes(&model, &candidates, seq_len);
    notes.iter().for_each(|note| env.monitor.note(&format!("note       {note}")));
    let rows = rows(&model, &text.sequences, &candidates, request, env)?;
    let report = EvalReconReport {
        model: ModelInfo::new(&model, model_hash),
        text: text.source,
        sequences: text.sequences.len() as u64,
        seq_len: seq_len as u64,
        calibration: candidates.into_iter().find_map(|candidate| candidate.calibration),
        rows,
        notes,
        seconds: clock.elapsed().as_secs_f64(),
    };
    if let Some(path) = &request.html {
        write_page(&recon_page(&report)?, path, env.monitor)?;
    }
    Ok(report)
}

/// Measures every cache in one pass over the text.
fn rows(
    model: &Model,
    sequences: &[Vec<u32>],
    candidates: &[Candidate],
    request: &EvalReconRequest,
    env: &Environment<'_>,
) -> Result<Vec<ReconRow>> {
    let (mut names, mut caches) = (Vec::new(), Vec::new());
    for candidate in candidates {
        let own = [candidate.quantizer()];
        let quantizers = if request.quantizers.is_empty() { &own[..] } else { &request.quantizers };
        for quantizer in quantizers {
            for &bits in &request.bits {
                names.push((candidate.name.clone(), quantizer.to_string(), bits.get()));
                let layers = candidate.layers(quantizer, bits)?;
                caches.push(QuantizedCache::new(&model.spec, layers, Protocol::PAPER)?);
            }
        }
    }
    env.monitor.begin("evaluate", "tokens", n_tokens(sequences));
    let decoder = Decoder::new(&model.checkpoint, &model.spec, &Cpu);
    let measured = reconstruct(&decoder, sequences, &caches, Measures::All, env.monitor);
    let measured = measured.map_err(PipelineError::from).in_stage("evaluate")?;
    env.monitor.end();
    let row = |((transform, quantizer, bits), modules): (_, Vec<ModuleErrors>)| {
        let layers: Vec<ModuleRow> =
            modules.iter().enumerate().map(|(layer, errors)| module_row(layer, errors)).collect();
        let mean = |of: fn(&ModuleRow) -> f64| geometric_mean(layers.iter().map(of)).unwrap_or(0.0);
        ReconRow {
            transform,
            quantizer,
            bits,
            products: mean(|row| row.products),
            probabilities: mean(|row| row.probabilities),
            keys: mean(|row| row.keys),
            values: mean(|row| row.values),
            both: mean(|row| row.both),
            layers,
        }
    };
    Ok(names.into_iter().zip(measured).map(row).collect())
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
