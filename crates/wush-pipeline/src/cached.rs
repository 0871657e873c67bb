//! A model's quantized cache, as `wush generate` and `wush serve` have it: what was asked for, held against the model and a
//! bundle's manifest, and the cache that comes of it.

use wush_format::hash::Sha;
use wush_format::manifest::Manifest;
use wush_format::monitor::Monitor;
use wush_generate::{CacheSettings, GenerateError};
use wush_model::cpu::Stored;
use wush_model::resident::Resident;
use wush_quant::{LayerBits, Method};
use wush_runtime::{CacheConfig, KeyTransforms, KvCache, RuntimeError, Windows};

use crate::error::InStage;
use crate::eval::UNQUANTIZED_BITS;
use crate::model::Model;
use crate::notes::of_use;
use crate::request::{CacheRequest, CodeBits, KvBits, WindowOptions};
use crate::sensitivity::{allotted, uniform};
use crate::{PipelineError, Result};

/// How a model's keys and values are kept.
pub(crate) struct Cached<'a> {
    model: &'a Model,
    /// Of a bundle.
    manifest: Option<Manifest>,
    /// `--kv-bits`, or what stands for it.
    pub(crate) asked: KvBits,
    pub(crate) settings: CacheSettings,
    pub(crate) config: CacheConfig,
}

impl<'a> Cached<'a> {
    /// # Errors
    /// `Option` for bits that cannot be allotted, or options that would do nothing; whatever is wrong with the manifest;
    /// `Generate` for a quantizer's parameter or a window out of range.
    pub(crate) fn new(model: &'a Model, request: &CacheRequest) -> Result<Self> {
        let manifest = model.checkpoint.is_bundle().then(|| model.bundle_manifest()).transpose()?;
        let default_bits = if manifest.is_some() { KvBits::OF_BUNDLE } else { KvBits::Full };
        let asked = request.kv_bits.unwrap_or(default_bits);
        let bits = bits_of(model, manifest.as_ref(), asked)?;
        let has_feedback = manifest.as_ref().is_some_and(|manifest| manifest.solve.feedback);
        let quantizer = request.quantizer.unwrap_or(Method::for_encoder(has_feedback));
        let settings = CacheSettings { bits, quantizer, windows: request.windows.or(Windows::SERVING) };
        check_unquantized(request, &settings)?;
        let config = settings.config(&model.spec).map_err(in_options)?;
        Ok(Self { model, manifest, asked, settings, config })
    }

    /// What users should know of sequences of up to `n_tokens`.
    ///
    /// # Errors
    /// `Io`.
    pub(crate) fn notes(&self, n_tokens: usize) -> Result<Vec<String>> {
        match &self.manifest {
            Some(manifest) => {
                // Of what is quantized only the transforms tell.
                let calibration = manifest.calibration.as_ref().filter(|_| self.settings.quantizes());
                of_use(self.model, Some(manifest), calibration, n_tokens)
            }
            None if self.settings.quantizes() => Ok(vec![format!(
                "a plain checkpoint has no key and value transforms: its cache is quantized to {} bits as it is. `wush convert` \
                 makes a bundle that has them",
                self.asked
            )]),
            None => Ok(Vec::new()),
        }
    }

    /// An empty cache with what a bundle has for it; nothing of it where nothing is quantized. Hashes are held against those of
    /// the weights themselves.
    pub(crate) fn cache(&self, model_hash: Sha) -> Result<(KvCache, Option<KeyTransforms>)> {
        let config = CacheConfig { model_hash: Some(model_hash), ..self.config.clone() };
        let made = if self.model.checkpoint.is_bundle() && self.settings.quantizes() {
            KvCache::of_bundle(config, self.model.dir()).map(|(cache, transforms)| (cache, Some(transforms)))
        } else {
            KvCache::new(config).map(|cache| (cache, None))
        };
        made.map_err(|e| PipelineError::Generate(e.into()))
    }
}

/// The decoder with its weights in memory, and their hash.
///
/// # Errors
/// What cannot be read; `Interrupted`.
pub(crate) fn load<'a>(model: &'a Model, monitor: &dyn Monitor) -> Result<(Sha, Resident<'a, Stored>)> {
    monitor.begin("load", "layers", model.spec.layers.len() as u64);
    // Both read the weights once, one thread each.
    let (model_hash, decoder) = rayon::join(
        || model.hash_weights(),
        || Resident::load(&model.checkpoint, &model.spec, &Stored::BY_SHAPE, monitor).in_stage("load"),
    );
    monitor.end();
    Ok((model_hash?, decoder?))
}

/// Bits of every layer, of none where nothing is quantized.
fn bits_of(model: &Model, manifest: Option<&Manifest>, asked: KvBits) -> Result<Option<Vec<LayerBits>>> {
    let sensitivity = manifest.and_then(|manifest| manifest.sensitivity.as_ref());
    match (asked, sensitivity) {
        (KvBits::Full, _) => Ok(None),
        (KvBits::Codes(CodeBits::Same(bits)), _) => Ok(Some(uniform(&model.spec, bits))),
        (KvBits::Codes(CodeBits::Auto(average)), Some(sensitivity)) => {
            allotted(&model.spec, sensitivity, average).map(Some)
        }
        (KvBits::Codes(CodeBits::Auto(_)), None) => Err(PipelineError::Option {
            option: "--kv-bits",
            expected:
                "a number of bits, or a bundle for auto: `wush convert` measures what bits are allotted by (not with \
                       --verify-sequences 0)"
                    .to_owned(),
            found: "auto for a model of which nothing is measured".to_owned(),
        }),
    }
}

/// A window out of range, named as the option that it came from.
fn in_options(error: GenerateError) -> PipelineError {
    let options = [("windows.sink", "--sink"), ("windows.keep", "--keep"), ("windows.flush", "--flush")];
    match error {
        GenerateError::Cache(RuntimeError::Config { place, expected, found }) => {
            match options.into_iter().find(|(field, _)| *field == place) {
                Some((_, option)) => PipelineError::Option { option, expected, found },
                None => GenerateError::Cache(RuntimeError::Config { place, expected, found }).into(),
            }
        }
        other => other.into(),
    }
}

/// Options of a quantized cache where nothing is quantized.
fn check_unquantized(request: &CacheRequest, settings: &CacheSettings) -> Result<()> {
    let WindowOptions { sink, keep, flush } = request.windows;
    let options = [
        ("--quantizer", request.quantizer.map(|quantizer| quantizer.to_string())),
        ("--sink", sink.map(|n| n.to_string())),
        ("--keep", keep.map(|n| n.to_string())),
        ("--flush", flush.map(|n| n.to_string())),
    ];
    match options.into_iter().find_map(|(option, found)| Some((option, found?))) {
        Some((option, found)) if !settings.quantizes() => {
            let expected = format!("none at {UNQUANTIZED_BITS} bits, which quantize nothing (--kv-bits 2 does)");
            Err(PipelineError::Option { option, expected, found })
        }
        _ => Ok(()),
    }
}
