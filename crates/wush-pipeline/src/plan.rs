//! Validated plans: what the user asked for, checked once against the model, the text and the disk. Every later step takes its
//! numbers from here and none of them looks at a request again.

mod announce;
mod calibration;
mod verification;

pub use wush_data::DEFAULT_SEQUENCES;
use wush_data::{Packed, TextSize};
use wush_fold::FoldDtype;
use wush_format::manifest::{Calibration, Solve};
use wush_format::monitor::Monitor;
use wush_transform::TransformKind;

use crate::memory::{Lengths, MemoryPlan};
use crate::model::Model;
use crate::notes::{describe_solve, too_little_text, unchecked};
use crate::paths::{NewDir, NewFile, finished_if};
use crate::request::{CalibrateRequest, ConvertRequest, Environment, FoldRequest, Preset, SolveSettings};
use crate::work::WorkDir;
use crate::{PipelineError, Result, solve, verify};
use announce::{describe_calibration, describe_memory, describe_model, describe_time, describe_verification};
pub use calibration::CalibrationPlan;
pub(crate) use calibration::n_tokens;
use calibration::{Purpose, load_sequences, longest};
pub(crate) use verification::VERIFY_TOKENS;
pub use verification::{Unchecked, VerifyPlan};

/// Calibration text when none is named: the paper's.
pub const DEFAULT_CALIB: &str = "hf:HuggingFaceFW/fineweb-edu:sample/10BT/*";
/// Column or key of the text.
pub const DEFAULT_TEXT_FIELD: &str = "text";
/// Tokens a sequence, where the model goes that far: the paper's.
pub const DEFAULT_SEQ_LEN: usize = 32_768;
/// Damping γ of Eq. 1: the paper's.
pub const DEFAULT_DAMPING: f64 = 0.01;
/// The method.
pub const DEFAULT_TRANSFORM: &str = "wush";
/// Sequences that the equivalence check reads.
pub const DEFAULT_VERIFY_SEQUENCES: usize = 2;
/// Largest damping that is taken: far beyond, nothing but a scaled Hadamard matrix is left.
const MAX_DAMPING: f64 = 1e6;

/// Names of the transform registry, for help texts.
pub fn transform_names() -> Vec<&'static str> {
    solve::registry().iter().map(|kind| kind.name).collect()
}

/// How transforms are solved.
#[derive(Debug, Clone, Copy)]
pub struct SolvePlan {
    /// The registry's entry.
    pub kind: &'static TransformKind,
    /// The preset.
    pub preset: Preset,
    /// γ, finite and at least 0.
    pub damping: f64,
    /// Seed of the random baseline.
    pub seed: u64,
}

impl SolvePlan {
    /// Checks the settings.
    ///
    /// # Errors
    /// `UnknownTransform`, `Option`.
    pub fn new(settings: &SolveSettings) -> Result<Self> {
        let find = || solve::registry().iter().find(|kind| kind.name == settings.transform);
        let kind = find().ok_or_else(|| PipelineError::UnknownTransform {
            name: settings.transform.clone(),
            known: transform_names().join(", "),
        })?;
        if !(0.0..=MAX_DAMPING).contains(&settings.damping) {
            return Err(PipelineError::Option {
                option: "--damping",
                expected: format!("a number from 0 to {MAX_DAMPING:e}"),
                found: settings.damping.to_string(),
            });
        }
        Ok(Self { kind, preset: settings.preset, damping: settings.damping, seed: settings.seed })
    }

    /// As the manifest states it, before there are statistics.
    fn record(&self) -> Solve {
        Solve {
            transform: self.kind.name.to_owned(),
            preset: self.preset.name().to_owned(),
            damping: self.damping,
            seed: self.seed,
            stats_hash: None,
        }
    }
}

/// `wush calibrate`, ready to run.
pub struct CalibratePlan {
    /// The model.
    pub model: Model,
    /// The share of the sequences that this run takes.
    pub calibration: CalibrationPlan,
    /// `--shard`, as typed.
    pub shard: Option<String>,
    /// The statistics file.
    pub out: NewFile,
    /// What to know before the statistics are used.
    pub notes: Vec<String>,
    /// Estimated peak memory.
    pub memory: MemoryPlan,
}

impl CalibratePlan {
    /// Checks the outputs, finds the model, cuts the text, takes the shard.
    ///
    /// # Errors
    /// Whatever cannot be read or would be overwritten; an empty shard; `UnfinishedWork`.
    pub fn new(request: &CalibrateRequest, env: &Environment<'_>) -> Result<Self> {
        let out = NewFile::plan(&request.out).map_err(|e| finished_if(request.resume, e))?;
        refuse_unfinished(&out.partial(), request.resume)?;
        let model = Model::resolve(&request.model, env)?;
        out.require_outside(model.dir())?;
        let mut packed = load_sequences(&model, &request.calibration, Purpose::Statistics, env)?;
        if let Some(shard) = request.shard {
            let range = shard.range(packed.sequences.len());
            if range.is_empty() {
                return Err(PipelineError::Option {
                    option: "--shard",
                    expected: format!("at most as many shares as sequences, {}", packed.sequences.len()),
                    found: shard.to_string(),
                });
            }
            packed.sequences = packed.sequences[range].to_vec();
        }
        let lengths = Lengths { text: packed.text, calibrate: longest(&packed.sequences), verify: 0 };
        let memory = MemoryPlan::new(&model, lengths, FoldDtype::Keep);
        let calibration = CalibrationPlan::new(&model, packed)?;
        let text = too_little_text(calibration.info.positions, model.head_dim());
        let notes = text.into_iter().chain(out.name_note()).collect();
        let shard = request.shard.map(|shard| shard.to_string());
        Ok(Self { model, calibration, shard, out, notes, memory })
    }

    /// Says what will be done.
    pub fn announce(&self, monitor: &dyn Monitor) {
        monitor.note(&describe_model(&self.model));
        monitor.note(&describe_calibration(&self.calibration, self.shard.as_deref()));
        monitor.note(&describe_memory(&self.memory));
        describe_time(&self.model, &self.calibration).iter().for_each(|note| monitor.note(note));
        self.notes.iter().for_each(|note| monitor.note(&format!("note       {note}")));
    }
}

/// `wush fold`, ready to run: what every bundle needs.
pub struct FoldPlan {
    /// The model.
    pub model: Model,
    /// Element type of folded tensors.
    pub dtype: FoldDtype,
    /// The equivalence check, or why there is none.
    pub verify: Result<VerifyPlan, Unchecked>,
    /// The bundle.
    pub out: NewDir,
    /// Estimated peak memory.
    pub memory: MemoryPlan,
}

impl FoldPlan {
    /// Element type of the folded tensors, as reports name it.
    pub(crate) fn folded_dtype(&self) -> String {
        let dtype = verify::folded_dtype(&self.model.checkpoint, &self.model.spec, self.dtype);
        format!("{dtype:?}").to_lowercase()
    }

    /// Checks the output, finds the model, cuts the text of the equivalence check: without `--seq-len` as long as what the
    /// transforms were `calibrated` on, at most as long as what is checked.
    ///
    /// # Errors
    /// Whatever cannot be read or would be overwritten.
    pub fn new(request: &FoldRequest, calibrated: Option<&Calibration>, env: &Environment<'_>) -> Result<Self> {
        let out = NewDir::plan(&request.out)?;
        let model = Model::resolve(&request.model, env)?;
        out.require_outside(model.dir())?;
        wush_fold::check_source(&model.checkpoint, &model.spec, request.dtype)?;
        let calibrated =
            calibrated.map_or(VERIFY_TOKENS, |text| usize::try_from(text.max_seq_len).unwrap_or(usize::MAX));
        let purpose = Purpose::Check { sequences: request.verify.sequences, seq_len: calibrated.min(VERIFY_TOKENS) };
        let packed = match &request.calibration {
            Some(text) if request.verify.sequences > 0 => Some(load_sequences(&model, text, purpose, env)?),
            _ => None,
        };
        let verify = VerifyPlan::new(&model, packed.as_ref(), request.verify, request.dtype)?;
        let (_, text) = sequences_of(packed.as_ref());
        let lengths = Lengths { text, calibrate: 0, verify: verified(&verify) };
        let memory = MemoryPlan::new(&model, lengths, request.dtype);
        Ok(Self { model, dtype: request.dtype, verify, out, memory })
    }

    /// Says what will be done.
    pub fn announce(&self, monitor: &dyn Monitor) {
        monitor.note(&describe_model(&self.model));
        match &self.verify {
            Ok(verify) => monitor.note(&describe_verification(verify)),
            Err(reason) => monitor.note(&format!("note       {}", unchecked(*reason))),
        }
        monitor.note(&describe_memory(&self.memory));
    }
}

/// `wush convert`, ready to run.
pub struct ConvertPlan {
    /// Model, folding, check, output.
    pub fold: FoldPlan,
    /// The sequences; none for a transform that needs no statistics.
    pub calibration: Option<CalibrationPlan>,
    /// The transform.
    pub solve: SolvePlan,
    /// Where the statistics are kept until the bundle stands.
    pub work: WorkDir,
}

impl ConvertPlan {
    /// Checks everything that can be known before the first forward pass.
    ///
    /// # Errors
    /// Whatever cannot be read or would be overwritten; `UnfinishedWork`.
    pub fn new(request: &ConvertRequest, env: &Environment<'_>) -> Result<Self> {
        let out = NewDir::plan(&request.out).map_err(|e| finished_if(request.resume, e))?;
        let work = WorkDir::plan(out.work(), request.resume)?;
        let solve = SolvePlan::new(&request.settings)?;
        let model = Model::resolve(&request.model, env)?;
        out.require_outside(model.dir())?;
        solve::rehearse(&model, &solve)?;
        let purpose = match request.verify.sequences {
            _ if solve.kind.needs_statistics => Some(Purpose::Statistics),
            0 => None,
            sequences => Some(Purpose::Check { sequences, seq_len: VERIFY_TOKENS }),
        };
        let packed = purpose.map(|purpose| load_sequences(&model, &request.calibration, purpose, env)).transpose()?;
        let verify = VerifyPlan::new(&model, packed.as_ref(), request.verify, request.dtype)?;
        let (sequences, text) = sequences_of(packed.as_ref());
        wush_fold::check_source(&model.checkpoint, &model.spec, request.dtype)?;
        let calibrate = if solve.kind.needs_statistics { longest(sequences) } else { 0 };
        let lengths = Lengths { text, calibrate, verify: verified(&verify) };
        let memory = MemoryPlan::new(&model, lengths, request.dtype);
        let calibration = match packed {
            Some(packed) if solve.kind.needs_statistics => Some(CalibrationPlan::new(&model, packed)?),
            _ => None,
        };
        let fold = FoldPlan { model, dtype: request.dtype, verify, out, memory };
        Ok(Self { fold, calibration, solve, work })
    }

    /// Says what will be done.
    pub fn announce(&self, monitor: &dyn Monitor) {
        monitor.note(&describe_model(&self.fold.model));
        match &self.calibration {
            Some(calibration) => monitor.note(&describe_calibration(calibration, None)),
            None => monitor.note(&format!("calibrate  not needed for {}", self.solve.kind.name)),
        }
        monitor.note(&format!("solve      {}", describe_solve(&self.solve.record())));
        monitor.note(&describe_memory(&self.fold.memory));
        let time = self.calibration.as_ref().and_then(|calibration| describe_time(&self.fold.model, calibration));
        time.iter().for_each(|note| monitor.note(note));
        let text = self.calibration.as_ref().map(|calibration| calibration.info.positions);
        let text = text.and_then(|tokens| too_little_text(tokens, self.fold.model.head_dim()));
        // What was asked for needs no telling.
        let unverified = self.fold.verify.as_ref().err().filter(|reason| **reason != Unchecked::Asked);
        for note in text.into_iter().chain(unverified.map(|&reason| unchecked(reason))) {
            monitor.note(&format!("note       {note}"));
        }
    }
}

/// Sums of an earlier run are neither thrown away nor continued unasked.
fn refuse_unfinished(path: &std::path::Path, resume: bool) -> Result<()> {
    if !resume && path.symlink_metadata().is_ok() {
        return Err(PipelineError::UnfinishedWork { path: path.to_owned() });
    }
    Ok(())
}

/// The sequences, if any were read, and how much text they came from at once.
fn sequences_of(packed: Option<&Packed>) -> (&[Vec<u32>], TextSize) {
    packed.map_or((&[], TextSize::default()), |packed| (&packed.sequences, packed.text))
}

/// Longest sequence of the equivalence check.
fn verified(plan: &Result<VerifyPlan, Unchecked>) -> usize {
    plan.as_ref().map_or(0, |plan| longest(&plan.sequences))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(transform: &str, damping: f64) -> SolveSettings {
        SolveSettings { transform: transform.to_owned(), preset: Preset::Default, damping, seed: 0 }
    }

    #[test]
    fn dampings_that_are_no_ratio_are_refused() {
        for damping in [-0.01, f64::NAN, f64::INFINITY, 1e7] {
            assert!(
                matches!(SolvePlan::new(&settings("wush", damping)), Err(PipelineError::Option { .. })),
                "{damping}"
            );
        }
        assert_eq!(SolvePlan::new(&settings("wush", 0.0)).expect("no damping is a choice").damping, 0.0);
    }

    #[test]
    fn unknown_transforms_name_the_known_ones() {
        let error = SolvePlan::new(&settings("magic", 0.01)).expect_err("not in the registry");
        assert_eq!(error.to_string(), "transform magic is unknown; known are identity, random, hadamard, wush");
    }

    #[test]
    fn the_default_source_and_transform_exist() {
        assert_eq!(wush_data::CalibSource::default().to_string(), DEFAULT_CALIB);
        assert!(transform_names().contains(&DEFAULT_TRANSFORM));
    }
}
