//! What every evaluation begins with: the model, the text, what is compared, and what the reader of the numbers should know.

use std::collections::BTreeMap;

use wush_data::Packed;
use wush_eval::Protocol;
use wush_eval::cache::QuantizedCache;
use wush_format::hash::Sha;
use wush_format::manifest::{Calibration, Solve};
use wush_model::backend::Backend;
use wush_quant::{LayerBits, Method, ScaleDtype};

use crate::candidates::{Candidate, Comparison};
use crate::device::Runs;
use crate::model::Model;
use crate::notes::{of_use, too_little_text};
use crate::paths::require_page;
use crate::plan::{
    Purpose, describe_device, describe_evaluation_time, describe_model, each_once, load_sequences, longest,
};
use crate::report::AllottedBits;
use crate::request::{CodeBits, Environment, EvalRequest};
use crate::sensitivity::{allotted, average_bits, uniform};
use crate::{PipelineError, Result};

/// An evaluation that can run.
pub(crate) struct Evaluation {
    /// The model, or the bundle.
    pub(crate) model: Model,
    /// Of its weights.
    pub(crate) model_hash: Sha,
    /// The text.
    pub(crate) text: Packed,
    /// Tokens of its longest sequence.
    pub(crate) seq_len: usize,
    /// What the reader of the numbers should know.
    pub(crate) notes: Vec<String>,
    candidates: Vec<Candidate>,
}

/// One cache to evaluate.
pub(crate) struct Cell<'a> {
    /// The transforms.
    pub(crate) candidate: &'a Candidate,
    /// The quantizer.
    pub(crate) quantizer: Method,
    /// How its scales are stored.
    scales: ScaleDtype,
    /// Bits of every layer.
    pub(crate) bits: Vec<LayerBits>,
    /// Their average.
    pub(crate) average_bits: f64,
    /// The average that was asked for, where bits are allotted.
    pub(crate) asked: Option<f64>,
}

impl Evaluation {
    /// Checks what can be, reads the text, calibrates if it must, and solves.
    ///
    /// # Errors
    /// What cannot be read; `Option` for a transform that needs statistics without any, a bundle with `--transform`, or
    /// something that stands twice in a list; `UnusedOption`;
    /// `Solve`; `OutputInsideSource` for a page among the model's files; `Interrupted`.
    pub(crate) fn begin(request: &EvalRequest, runs: Runs, env: &Environment<'_>) -> Result<Self> {
        let model = Model::resolve_any(&request.model, runs, env)?;
        if let Some(page) = &request.html {
            require_page(page, &[model.dir()])?;
        }
        each_once("--bits", &request.bits)?;
        each_once("--quantizer", &request.quantizers)?;
        env.monitor.note(&describe_model(&model));
        describe_device(&model).iter().for_each(|note| env.monitor.note(note));
        let text = load_sequences(&model, &request.text, Purpose::Score, env)?;
        let seq_len = longest(&text.sequences);
        let comparison = Comparison::plan(&model, &request.transforms, seq_len, env)?;
        comparison.announce(&model, env);
        let model_hash = model.hash_weights()?;
        let allots = request.bits.iter().any(|bits| matches!(bits, CodeBits::Auto(_)));
        let candidates = comparison.candidates(&model, model_hash, allots, env)?;
        let notes = comparison.notes().iter().cloned().chain(notes(&model, &candidates, seq_len)?).collect();
        Ok(Self { model, model_hash, text, seq_len, notes, candidates })
    }

    /// Says what the reader should know.
    pub(crate) fn tell_notes(&self, env: &Environment<'_>) {
        self.notes.iter().for_each(|note| env.monitor.note(&format!("note       {note}")));
    }

    /// Says how long so many passes over the text take, about.
    pub(crate) fn tell_time(&self, n_passes: usize, env: &Environment<'_>) {
        // The estimate is the CPU's.
        if self.model.device.first().is_some() {
            return;
        }
        let note = describe_evaluation_time(&self.model, &self.text.sequences, n_passes);
        note.iter().for_each(|note| env.monitor.note(note));
    }

    /// Every cache to evaluate: transform by transform, quantizer by quantizer, bits by bits.
    ///
    /// # Errors
    /// `Option` for bits to allot where nothing was measured.
    pub(crate) fn cells(&self, request: &EvalRequest) -> Result<Vec<Cell<'_>>> {
        let of_candidate = |candidate: &'_ Candidate| match request.quantizers.is_empty() {
            true => vec![candidate.quantizer()],
            false => request.quantizers.clone(),
        };
        let mut cells = Vec::new();
        for candidate in &self.candidates {
            for quantizer in of_candidate(candidate) {
                for &bits in &request.bits {
                    cells.push(self.cell(candidate, (quantizer, request.scales), bits)?);
                }
            }
        }
        Ok(cells)
    }

    fn cell<'a>(
        &'a self,
        candidate: &'a Candidate,
        (quantizer, scales): (Method, ScaleDtype),
        asked: CodeBits,
    ) -> Result<Cell<'a>> {
        let spec = &self.model.spec;
        let bits = match (asked, &candidate.sensitivity) {
            (CodeBits::Same(bits), _) => uniform(spec, bits),
            (CodeBits::Auto(average), Some(sensitivity)) => allotted(spec, sensitivity, average)?,
            (CodeBits::Auto(_), None) => return Err(unmeasured(candidate)),
        };
        let average_bits = average_bits(spec, &bits);
        let asked = match asked {
            CodeBits::Same(_) => None,
            CodeBits::Auto(average) => Some(average),
        };
        Ok(Cell { candidate, quantizer, scales, bits, average_bits, asked })
    }

    /// How each transform was made, by its name in the rows.
    pub(crate) fn solves(&self) -> BTreeMap<String, Solve> {
        self.candidates.iter().map(|candidate| (candidate.name.clone(), candidate.solve.clone())).collect()
    }

    /// What the transforms were calibrated on; none where none needed it.
    pub(crate) fn calibration(&self) -> Option<Calibration> {
        self.candidates.iter().find_map(|candidate| candidate.calibration.clone())
    }
}

impl Cell<'_> {
    /// Of every layer of the model.
    ///
    /// # Errors
    /// As `Candidate::layers`; a matrix that is not the model's.
    pub(crate) fn cache<B: Backend>(
        &self,
        model: &Model,
        protocol: Protocol,
        backend: &B,
    ) -> Result<QuantizedCache<B>> {
        let layers = self.candidate.layers(&self.quantizer, self.scales, &self.bits)?;
        Ok(QuantizedCache::new(&model.spec, layers, protocol, backend)?)
    }

    /// Bits layer by layer, where they were allotted.
    pub(crate) fn allotment(&self) -> Vec<AllottedBits> {
        if self.asked.is_some() { AllottedBits::list(&self.bits) } else { Vec::new() }
    }
}

/// Bits cannot be allotted to this candidate.
fn unmeasured(candidate: &Candidate) -> PipelineError {
    PipelineError::Option {
        option: "--bits",
        expected: "auto:AVERAGE with what bits are allotted by: a bundle that `wush convert` measured (not with \
                   --verify-sequences 0), or transforms made from text (--calib)"
            .to_owned(),
        found: format!("auto for {}, of which nothing is measured", candidate.name),
    }
}

/// What the reader of the numbers should know.
///
/// # Errors
/// As [`of_use`], and what is wrong with a bundle's manifest.
fn notes(model: &Model, candidates: &[Candidate], seq_len: usize) -> Result<Vec<String>> {
    let manifest = model.checkpoint.is_bundle().then(|| model.bundle_manifest()).transpose()?;
    // All that needed text were made from the same.
    let calibration = candidates.iter().find_map(|candidate| candidate.calibration.as_ref());
    let few = calibration.and_then(|calibration| too_little_text(calibration.tokens, model.head_dim()));
    Ok(of_use(model, manifest.as_ref(), calibration, seq_len)?.into_iter().chain(few).collect())
}
