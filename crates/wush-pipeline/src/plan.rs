//! Validated plans: what the user asked for, checked once against the model, the text and the disk. Every later step takes its
//! numbers from here and none of them looks at a request again.

mod announce;
mod calibration;
mod options;
mod verification;

use wush_data::{Packed, TextSize};
use wush_fold::FoldDtype;
use wush_format::hash::Sha;
use wush_format::manifest::{Calibration, Solve};
use wush_format::monitor::Monitor;
use wush_transform::{FACTORS, Factor, Role, Settings, TransformKind};

use crate::device::Runs;
use crate::memory::{Lengths, MemoryPlan};
use crate::model::Model;
use crate::notes::{describe_solve, too_little_text, unchecked};
use crate::paths::{NewDir, NewFile, finished_if};
use crate::request::{
    CalibrateRequest, CenterKeys, ConvertRequest, Environment, FoldRequest, Gather, HessianChoice, Preset,
    SecondPassChoice, SolveSettings,
};
use crate::work::WorkDir;
use crate::{PipelineError, Result, solve, verify};
pub(crate) use announce::{
    describe_calibration, describe_device, describe_evaluation_time, describe_model, describe_recon_time, describe_time,
};
use announce::{describe_memory, describe_verification};
pub use calibration::CalibrationPlan;
pub(crate) use calibration::{Purpose, load_sequences, longest, n_tokens};
pub use verification::{Unchecked, VerifyPlan};
pub(crate) use verification::{VERIFY_TOKENS, starts};

/// Calibration text when none is named: the paper's.
pub const DEFAULT_CALIB: &str = "hf:HuggingFaceFW/fineweb-edu:sample/10BT/*";
/// Column or key of the text.
pub const DEFAULT_TEXT_FIELD: &str = "text";
/// Sequences of calibration text: the paper's.
pub const DEFAULT_SEQUENCES: usize = 128;
/// Tokens a sequence, where the model goes that far: the paper's.
pub const DEFAULT_SEQ_LEN: usize = 32_768;
/// Tokens of an evaluation's windows: the paper's.
pub const DEFAULT_EVAL_SEQ_LEN: usize = 2048;
/// Transforms that an evaluation compares.
pub const DEFAULT_EVAL_TRANSFORMS: [&str; 3] = ["identity", "hadamard", "wush"];
/// Damping γ of Eq. 1: the paper's.
pub const DEFAULT_DAMPING: f64 = 0.01;
/// Seed of random matrices.
const DEFAULT_SEED: u64 = 0;
/// The method.
pub const DEFAULT_TRANSFORM: &str = "wush";
/// Sequences that the equivalence check reads.
pub const DEFAULT_VERIFY_SEQUENCES: usize = 2;
/// Largest damping that is taken: far beyond, nothing but a scaled Hadamard matrix is left.
const MAX_DAMPING: f64 = 1e6;
/// Largest exponent of Λ: the cache is white then.
const MAX_EXPONENT: f64 = 0.5;

/// Names of the transform registry, for help texts.
pub fn transform_names() -> Vec<&'static str> {
    solve::registry().iter().map(|kind| kind.name).collect()
}

/// Names of the registry of orthogonal factors, for help texts.
pub fn factor_names() -> Vec<&'static str> {
    FACTORS.iter().map(|factor| factor.name).collect()
}

/// Exponent p of Λ in the default preset: an encoder with error feedback wants the cache whiter than ¼ makes it.
const DEFAULT_EXPONENT: f64 = 0.4;

/// What a preset decides.
struct PresetValues {
    exponent: f64,
    factor: &'static Factor,
    center_keys: CenterKeys,
    feedback: bool,
}

impl PresetValues {
    /// The paper's preset is the method as published, and so are baselines in every preset. The default is what
    /// measurements favour: docs/quality.md.
    fn of(preset: Preset, kind: &TransformKind) -> Self {
        let published = Self {
            exponent: wush_transform::PUBLISHED_EXPONENT,
            factor: Factor::PUBLISHED,
            center_keys: CenterKeys::Never,
            feedback: false,
        };
        match preset {
            Preset::Default if !kind.is_orthogonal => {
                Self { exponent: DEFAULT_EXPONENT, center_keys: CenterKeys::Auto, feedback: true, ..published }
            }
            Preset::Default | Preset::Paper => published,
        }
    }
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
    /// Exponent p of Λ, 0 to ½.
    pub exponent: f64,
    /// The orthogonal factor.
    pub factor: &'static Factor,
    /// Which heads' keys are centred.
    pub center_keys: CenterKeys,
    /// Whether the encoder's feedback matrices are made.
    pub feedback: bool,
    /// Seed of random matrices.
    pub seed: u64,
}

impl SolvePlan {
    /// Checks the settings; what they leave open is the preset's.
    ///
    /// # Errors
    /// `UnknownTransform`; `UnusedOption`; `Option`.
    pub fn new(settings: &SolveSettings) -> Result<Self> {
        let kind = find_transform(&settings.transform)?;
        options::check(kind, settings)?;
        let named = settings.preset.unwrap_or_default();
        let preset = PresetValues::of(named, kind);
        Ok(Self {
            kind,
            preset: named,
            damping: number("--damping", settings.damping.unwrap_or(DEFAULT_DAMPING), MAX_DAMPING)?,
            exponent: number("--exponent", settings.exponent.unwrap_or(preset.exponent), MAX_EXPONENT)?,
            factor: settings.factor.as_deref().map_or(Ok(preset.factor), find_factor)?,
            center_keys: settings.center_keys.unwrap_or(preset.center_keys),
            feedback: settings.feedback.unwrap_or(preset.feedback),
            seed: settings.seed.unwrap_or(DEFAULT_SEED),
        })
    }

    /// One plan for each transform of a list, and notes on options that are for some of them.
    ///
    /// # Errors
    /// As [`SolvePlan::new`]; `UnusedOption` for an option that is for none of them, `Option` for a name that stands twice.
    pub(crate) fn of_list(names: &[String], settings: &SolveSettings) -> Result<(Vec<Self>, Vec<String>)> {
        each_once("--transform", names)?;
        let kinds = names.iter().map(|name| find_transform(name)).collect::<Result<Vec<_>>>()?;
        let (settings, notes) = options::of_list(&kinds, settings)?;
        Ok((settings.iter().map(Self::new).collect::<Result<_>>()?, notes))
    }

    /// As the manifest states it.
    pub(crate) fn record(&self, stats_hash: Option<Sha>) -> Solve {
        Solve {
            transform: self.kind.name.to_owned(),
            preset: self.preset.name().to_owned(),
            damping: self.damping,
            seed: self.seed,
            exponent: self.exponent,
            factor: self.factor.name.to_owned(),
            center_keys: self.center_keys.name().to_owned(),
            feedback: self.feedback,
            stats_hash,
        }
    }

    /// The solver's settings for one head.
    pub(crate) fn settings(&self, layer: usize, head: usize, role: Role) -> Settings {
        let Self { damping, exponent, factor, seed, .. } = *self;
        Settings { damping, exponent, factor, seed, layer, head, role }
    }
}

/// A number from 0 to `largest`.
fn number(option: &'static str, value: f64, largest: f64) -> Result<f64> {
    if (0.0..=largest).contains(&value) {
        return Ok(value);
    }
    let expected =
        if largest < 1.0 { format!("a number from 0 to {largest}") } else { format!("a number from 0 to {largest:e}") };
    Err(PipelineError::Option { option, expected, found: value.to_string() })
}

/// Refuses a list in which something stands twice.
///
/// # Errors
/// `Option`.
pub(crate) fn each_once<T: PartialEq + std::fmt::Display>(option: &'static str, list: &[T]) -> Result<()> {
    let twice = list.iter().enumerate().find(|(at, item)| list[..*at].contains(item));
    match twice {
        Some((_, item)) => {
            let (expected, found) = ("a list of different ones".to_owned(), format!("{item} twice"));
            Err(PipelineError::Option { option, expected, found })
        }
        None => Ok(()),
    }
}

fn find_transform(name: &str) -> Result<&'static TransformKind> {
    solve::registry()
        .iter()
        .find(|kind| kind.name == name)
        .ok_or_else(|| PipelineError::UnknownTransform { name: name.to_owned(), known: transform_names().join(", ") })
}

fn find_factor(name: &str) -> Result<&'static Factor> {
    Factor::find(name).map_err(|_| PipelineError::Option {
        option: "--factor",
        expected: factor_names().join(", "),
        found: name.to_owned(),
    })
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
        let model = Model::resolve(&request.model, Runs::OnGpu, env)?;
        let mut packed = load_sequences(&model, &request.calibration, Purpose::Statistics, env)?;
        if let Some(shard) = request.shard {
            if request.gather.second_pass == SecondPassChoice::Oscar {
                let (expected, found) =
                    ("no --shard: the second pass weighs by all of the text".to_owned(), "oscar".to_owned());
                return Err(PipelineError::Option { option: "--second-pass", expected, found });
            }
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
        let attention = request.gather.hessian == HessianChoice::Attention;
        let lengths = Lengths { text: packed.text, calibrate: longest(&packed.sequences), verify: 0, attention };
        let memory = MemoryPlan::new(&model, lengths, FoldDtype::Keep);
        let calibration =
            CalibrationPlan::new(&model, packed, request.gather)?.within(&model.device, request.max_gpu_memory)?;
        let text = too_little_text(calibration.info.positions, model.head_dim());
        let notes = text.into_iter().chain(out.name_note()).collect();
        let shard = request.shard.map(|shard| shard.to_string());
        Ok(Self { model, calibration, shard, out, notes, memory })
    }

    /// Says what will be done.
    pub fn announce(&self, monitor: &dyn Monitor) {
        monitor.note(&describe_model(&self.model));
        describe_device(&self.model).iter().for_each(|note| monitor.note(note));
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
        let model = Model::resolve(&request.model, Runs::OnCpu, env)?;
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
        let lengths = Lengths { text, calibrate: 0, verify: verified(&verify), attention: false };
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
        let model = Model::resolve(&request.model, Runs::OnGpu, env)?;
        solve::rehearse(&model, &solve)?;
        let gather = Gather::for_transform(solve.kind);
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
        let attention = gather.hessian == HessianChoice::Attention;
        let lengths = Lengths { text, calibrate, verify: verified(&verify), attention };
        let memory = MemoryPlan::new(&model, lengths, request.dtype);
        let calibration = match packed {
            Some(packed) if solve.kind.needs_statistics => {
                Some(CalibrationPlan::new(&model, packed, gather)?.within(&model.device, request.max_gpu_memory)?)
            }
            _ => None,
        };
        let fold = FoldPlan { model, dtype: request.dtype, verify, out, memory };
        Ok(Self { fold, calibration, solve, work })
    }

    /// Says what will be done.
    pub fn announce(&self, monitor: &dyn Monitor) {
        monitor.note(&describe_model(&self.fold.model));
        describe_device(&self.fold.model).iter().for_each(|note| monitor.note(note));
        match &self.calibration {
            Some(calibration) => monitor.note(&describe_calibration(calibration, None)),
            None => monitor.note(&format!("calibrate  not needed for {}", self.solve.kind.name)),
        }
        monitor.note(&format!("solve      {}", describe_solve(&self.solve.record(None))));
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
        SolveSettings { damping: Some(damping), ..SolveSettings::of_preset(transform, Preset::Default) }
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
    fn the_papers_preset_and_baselines_are_as_published() {
        let record = |transform: &str, preset| {
            SolvePlan::new(&SolveSettings::of_preset(transform, preset)).expect("valid").record(None)
        };
        assert_eq!(record("wush", Preset::Paper), Solve::as_published("wush"));
        for transform in ["oscar", "oscar-per-head", "hadamard"] {
            let published = Solve { preset: Preset::Default.name().to_owned(), ..Solve::as_published(transform) };
            assert_eq!(record(transform, Preset::Default), published);
        }
        for transform in ["wush", "wush-a"] {
            let default = record(transform, Preset::Default);
            assert_eq!((default.exponent, default.feedback, default.center_keys.as_str()), (0.4, true, "auto"));
        }
    }

    #[test]
    fn options_override_presets() {
        let asked = SolveSettings {
            exponent: Some(0.4),
            factor: Some("balanced".to_owned()),
            center_keys: Some(CenterKeys::Auto),
            feedback: Some(true),
            ..SolveSettings::of_preset("wush", Preset::Paper)
        };
        let record = SolvePlan::new(&asked).expect("valid").record(None);
        assert_eq!((record.exponent, record.factor.as_str(), record.center_keys.as_str()), (0.4, "balanced", "auto"));
        assert!(record.feedback);
    }

    #[test]
    fn options_that_cannot_be_are_refused() {
        let base = || SolveSettings::of_preset("wush", Preset::Default);
        for exponent in [-0.1, 0.51, f64::NAN] {
            let error = SolvePlan::new(&SolveSettings { exponent: Some(exponent), ..base() }).expect_err("refused");
            assert!(error.to_string().contains("--exponent"), "{error}");
        }
        let error = SolvePlan::new(&SolveSettings { factor: Some("dct".to_owned()), ..base() }).expect_err("refused");
        assert!(error.to_string().contains("hadamard, random, balanced"), "{error}");
        let plain = || SolveSettings::of_preset("hadamard", Preset::Default);
        let centered = SolveSettings { center_keys: Some(CenterKeys::Always), ..plain() };
        let with_feedback = SolveSettings { feedback: Some(true), ..plain() };
        for (option, settings) in [("--center-keys", centered), ("--feedback", with_feedback)] {
            let error = SolvePlan::new(&settings).expect_err("there are no statistics").to_string();
            assert_eq!(error, format!("{option}: hadamard would not look at it"));
        }
        assert!(SolvePlan::new(&plain()).is_ok());
    }

    #[test]
    fn nothing_stands_twice_in_a_list() {
        let list = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
            SolvePlan::of_list(&names, &SolveSettings::of_preset("wush", Preset::Default))
        };
        assert_eq!(list(&["identity", "wush"]).expect("two").0.len(), 2);
        let error = list(&["wush", "identity", "wush"]).expect_err("twice");
        assert_eq!(error.to_string(), "--transform: expected a list of different ones, found wush twice");
    }

    #[test]
    fn unknown_transforms_name_the_known_ones() {
        let error = SolvePlan::new(&settings("magic", 0.01)).expect_err("not in the registry");
        let known = "identity, random, hadamard, oscar, oscar-per-head, wush, wush-a";
        assert_eq!(error.to_string(), format!("transform magic is unknown; known are {known}"));
    }

    #[test]
    fn the_default_source_and_transform_exist() {
        assert_eq!(wush_data::CalibSource::default().to_string(), DEFAULT_CALIB);
        assert!(transform_names().contains(&DEFAULT_TRANSFORM));
    }
}
