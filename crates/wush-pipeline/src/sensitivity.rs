//! Bits where they matter: what 2 bits do to each attention module, and the bits that follow from it.
//!
//! Enters: a model, transforms, and a few sequences of the calibration text. Leaves: each module's errors, as the manifest
//! keeps them, and bits of every layer under an average.

use wush_eval::allot::{MEASURED, Measured, allot, average};
use wush_eval::cache::QuantizedCache;
use wush_eval::recon::{ModuleErrors, reconstruct};
use wush_eval::{EvalError, Protocol};
use wush_format::manifest::{ModuleError, Sensitivity};
use wush_format::monitor::Monitor;
use wush_format::transforms::Transforms;
use wush_model::cpu::Cpu;
use wush_model::decoder::Decoder;
use wush_model::spec::ModelSpec;
use wush_quant::{Bits, LayerBits, Method, ScaleDtype};

use crate::Result;
use crate::candidates::solved_layers;
use crate::model::Model;
use crate::plan::n_tokens;

/// Quantizes every token of `sequences`, keys alone and values alone, module by module, with the quantizer that suits the
/// transforms.
///
/// # Errors
/// Whatever the forward pass refuses; `Interrupted`.
pub(crate) fn measure(
    model: &Model,
    transforms: &Transforms,
    sequences: &[Vec<u32>],
    monitor: &dyn Monitor,
) -> Result<Sensitivity> {
    let quantizer = Method::for_encoder(transforms.solve.feedback);
    let bits = vec![LayerBits::both(MEASURED); model.spec.layers.len()];
    let layers = solved_layers(transforms, &quantizer, ScaleDtype::Bf16, &bits)?;
    let cache = QuantizedCache::new(&model.spec, layers, Protocol::PAPER, &Cpu)?;
    let tokens = n_tokens(sequences);
    monitor.begin("measure", "tokens", tokens);
    let decoder = Decoder::new(&model.checkpoint, &model.spec, &Cpu);
    let measured = reconstruct(&decoder, sequences, &[cache], monitor)?;
    monitor.end();
    let of_module =
        |errors: &ModuleErrors| ModuleError { keys: errors.keys.relative(), values: errors.values.relative() };
    let layers = measured.iter().flatten().map(of_module).collect();
    Ok(Sensitivity { quantizer: quantizer.to_string(), bits: MEASURED.get(), tokens, layers })
}

/// Bits of every layer under an average over all coordinates.
///
/// # Errors
/// `Eval` for an average out of range, or errors of another number of layers.
pub(crate) fn allotted(spec: &ModelSpec, sensitivity: &Sensitivity, average: f64) -> Result<Vec<LayerBits>> {
    let (expected, found) = (spec.layers.len(), sensitivity.layers.len());
    if found != expected {
        return Err(EvalError::Shape { layer: found, what: "the list of module errors", expected, found }.into());
    }
    let measured = |(error, n_coordinates): (&ModuleError, usize)| {
        let ModuleError { keys, values } = *error;
        Measured { keys, values, n_coordinates }
    };
    let layers: Vec<Measured> = sensitivity.layers.iter().zip(coordinates(spec)).map(measured).collect();
    Ok(allot(&layers, average)?)
}

/// The same bits in every layer.
pub(crate) fn uniform(spec: &ModelSpec, bits: Bits) -> Vec<LayerBits> {
    vec![LayerBits::both(bits); spec.layers.len()]
}

/// Average over all coordinates, as reports state it.
pub(crate) fn average_bits(spec: &ModelSpec, bits: &[LayerBits]) -> f64 {
    average(bits, coordinates(spec))
}

/// Coordinates of a token's keys, and so of its values, layer by layer.
fn coordinates(spec: &ModelSpec) -> impl Iterator<Item = usize> {
    spec.layers.iter().map(|layer| layer.attn.n_kv_heads * layer.attn.head_dim)
}
