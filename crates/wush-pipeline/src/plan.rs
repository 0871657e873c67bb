//! Validated plans: what the user asked for, checked once against the model, the text and the disk. Every later step takes its
//! numbers from here and none of them looks at a request again.

use wush_checkpoint::tokenizer::{TextTokenizer, eos_token_id};
pub use wush_data::DEFAULT_SEQUENCES;
use wush_data::{PackOptions, Packed};
use wush_fold::FoldDtype;
use wush_format::hash::sequence_hash;
use wush_format::manifest::Solve;
use wush_format::monitor::Monitor;
use wush_stats::StatsInfo;
use wush_transform::TransformKind;

use crate::human::{counted, human_bytes};
use crate::memory::{Lengths, MemoryPlan};
use crate::model::Model;
use crate::notes::{describe_solve, too_little_text};
use crate::paths::{NewDir, NewFile};
use crate::request::{
    CalibrateRequest, CalibrationRequest, ConvertRequest, Environment, FoldRequest, Preset, SolveSettings,
    VerifySettings,
};
use crate::{PipelineError, Result, solve, verify};

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

/// The sequences of a run and what its statistics will say of themselves.
#[derive(Debug, Clone)]
pub struct CalibrationPlan {
    /// Token ids, in order.
    pub sequences: Vec<Vec<u32>>,
    /// The statistics' description once all sequences are in.
    pub info: StatsInfo,
}

impl CalibrationPlan {
    /// Describes the statistics of `sequences` on `model`.
    ///
    /// # Errors
    /// `Io` when the weights cannot be hashed.
    pub fn new(model: &Model, packed: Packed) -> Result<Self> {
        let attn = &model.spec.layers[0].attn;
        let info = StatsInfo {
            format_version: wush_stats::STATS_VERSION,
            tool: crate::TOOL.to_owned(),
            model_id: model.id.clone(),
            model_hash: model.hash_weights()?,
            family: model.spec.family.to_owned(),
            n_heads: attn.n_heads,
            n_kv_heads: attn.n_kv_heads,
            head_dim: attn.head_dim,
            positions: n_tokens(&packed.sequences),
            max_seq_len: longest(&packed.sequences) as u64,
            source: packed.source,
            rope_scaling: model.rope_scaling.map(|scaling| scaling.to_string()),
            device: model.device.name().to_owned(),
            compute: model.device.compute().to_owned(),
            sequence_hashes: packed.sequences.iter().map(|ids| sequence_hash(ids)).collect(),
        };
        Ok(Self { sequences: packed.sequences, info })
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
    /// Whether work of an interrupted run may be continued.
    pub resume: bool,
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
        let out = NewFile::plan(&request.out)?;
        refuse_unfinished(&out.partial(), request.resume)?;
        let model = Model::resolve(&request.model, env)?;
        let mut packed = load_sequences(&model, &request.calibration, None, env)?;
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
        let lengths = Lengths { calibrate: longest(&packed.sequences), verify: 0 };
        let memory = MemoryPlan::new(&model, lengths, FoldDtype::Keep);
        let calibration = CalibrationPlan::new(&model, packed)?;
        let notes = too_little_text(calibration.info.positions, model.head_dim()).into_iter().collect();
        let shard = request.shard.map(|shard| shard.to_string());
        Ok(Self { model, calibration, shard, resume: request.resume, out, notes, memory })
    }

    /// Says what will be done.
    pub fn announce(&self, monitor: &dyn Monitor) {
        monitor.note(&describe_model(&self.model));
        monitor.note(&describe_calibration(&self.calibration, self.shard.as_deref()));
        monitor.note(&describe_memory(&self.memory));
        self.notes.iter().for_each(|note| monitor.note(&format!("note       {note}")));
    }
}

/// Tokens of a sequence that the equivalence check runs: a fold is wrong or right at any length, and two forward passes over
/// the paper's 32,768 would take a CPU hours.
pub(crate) const VERIFY_TOKENS: usize = 1024;

/// Both checkpoints on the start of a few sequences.
#[derive(Debug, Clone)]
pub struct VerifyPlan {
    /// Token ids; never empty.
    pub sequences: Vec<Vec<u32>>,
    /// On the relative change of the mean NLL.
    pub tolerance: f64,
}

impl VerifyPlan {
    /// Takes the first sequences that can be scored; none when the check is to be skipped.
    ///
    /// # Errors
    /// `Option` for a tolerance that is no positive number.
    fn new(model: &Model, sequences: &[Vec<u32>], settings: VerifySettings, dtype: FoldDtype) -> Result<Option<Self>> {
        let tolerance = match settings.tolerance {
            Some(value) if value > 0.0 && value.is_finite() => value,
            Some(value) => {
                let (expected, found) = ("a positive number".to_owned(), value.to_string());
                return Err(PipelineError::Option { option: "--tolerance", expected, found });
            }
            None => verify::tolerance(verify::folded_dtype(&model.checkpoint, &model.spec, dtype)),
        };
        // A single token predicts nothing.
        let scored = sequences.iter().filter(|ids| ids.len() > 1);
        let start_of = |ids: &Vec<u32>| ids[..ids.len().min(VERIFY_TOKENS)].to_vec();
        let sequences: Vec<_> = scored.take(settings.sequences).map(start_of).collect();
        Ok((!sequences.is_empty()).then_some(Self { sequences, tolerance }))
    }
}

/// `wush fold`, ready to run: what every bundle needs.
pub struct FoldPlan {
    /// The model.
    pub model: Model,
    /// Element type of folded tensors.
    pub dtype: FoldDtype,
    /// The equivalence check; none when it is skipped.
    pub verify: Option<VerifyPlan>,
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

    /// Checks the output, finds the model, cuts the text of the equivalence check.
    ///
    /// # Errors
    /// Whatever cannot be read or would be overwritten.
    pub fn new(request: &FoldRequest, env: &Environment<'_>) -> Result<Self> {
        let out = NewDir::plan(&request.out)?;
        let model = Model::resolve(&request.model, env)?;
        out.require_outside(model.dir())?;
        let sequences = match &request.calibration {
            Some(text) if request.verify.sequences > 0 => {
                load_sequences(&model, text, Some(request.verify.sequences), env)?.sequences
            }
            _ => Vec::new(),
        };
        let verify = VerifyPlan::new(&model, &sequences, request.verify, request.dtype)?;
        let lengths = Lengths { calibrate: 0, verify: verified(verify.as_ref()) };
        let memory = MemoryPlan::new(&model, lengths, request.dtype);
        Ok(Self { model, dtype: request.dtype, verify, out, memory })
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
    /// Whether work of an interrupted run may be continued.
    pub resume: bool,
}

impl ConvertPlan {
    /// Checks everything that can be known before the first forward pass.
    ///
    /// # Errors
    /// Whatever cannot be read or would be overwritten; `UnfinishedWork`.
    pub fn new(request: &ConvertRequest, env: &Environment<'_>) -> Result<Self> {
        let out = NewDir::plan(&request.out)?;
        refuse_unfinished(&out.work(), request.resume)?;
        let solve = SolvePlan::new(&request.settings)?;
        let model = Model::resolve(&request.model, env)?;
        out.require_outside(model.dir())?;
        let at_most = (!solve.kind.needs_statistics).then_some(request.verify.sequences);
        let packed = match at_most {
            Some(0) => None,
            _ => Some(load_sequences(&model, &request.calibration, at_most, env)?),
        };
        let sequences = packed.as_ref().map_or(&[][..], |packed| &packed.sequences);
        let verify = VerifyPlan::new(&model, sequences, request.verify, request.dtype)?;
        let calibrate = if solve.kind.needs_statistics { longest(sequences) } else { 0 };
        let lengths = Lengths { calibrate, verify: verified(verify.as_ref()) };
        let memory = MemoryPlan::new(&model, lengths, request.dtype);
        let calibration = match packed {
            Some(packed) if solve.kind.needs_statistics => Some(CalibrationPlan::new(&model, packed)?),
            _ => None,
        };
        let fold = FoldPlan { model, dtype: request.dtype, verify, out, memory };
        Ok(Self { fold, calibration, solve, resume: request.resume })
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
        let text = self.calibration.as_ref().map(|calibration| calibration.info.positions);
        if let Some(note) = text.and_then(|tokens| too_little_text(tokens, self.fold.model.head_dim())) {
            monitor.note(&format!("note       {note}"));
        }
    }
}

/// Reads and cuts the calibration text of `model`; `at_most` caps the number of sequences.
fn load_sequences(
    model: &Model,
    request: &CalibrationRequest,
    at_most: Option<usize>,
    env: &Environment<'_>,
) -> Result<Packed> {
    if request.sequences == Some(0) {
        let (expected, found) = ("at least 1".to_owned(), "0".to_owned());
        return Err(PipelineError::Option { option: "--sequences", expected, found });
    }
    let is_text = !request.source.is_token_ids();
    let tokenizer = if is_text { Some(TextTokenizer::open(model.dir())?) } else { None };
    let options = PackOptions {
        seq_len: if is_text { seq_len(model, request)? } else { model.spec.max_position_embeddings },
        // A file of token ids may hold fewer lists than the cap: it is cut below.
        sequences: if is_text { at_most.or(request.sequences) } else { request.sequences },
        text_field: request.text_field.clone(),
        bos: tokenizer.as_ref().and_then(TextTokenizer::bos),
        eos: eos_token_id(&model.checkpoint)?,
        vocab_size: model.spec.vocab_size,
    };
    let mut packed = wush_data::load(&request.source, tokenizer.as_ref(), &options, &env.hub, env.monitor)?;
    packed.sequences.truncate(at_most.unwrap_or(usize::MAX));
    refuse_too_long(model, &packed.sequences)?;
    Ok(packed)
}

/// Lists of token ids come in any length; beyond its longest position a model computes nonsense.
fn refuse_too_long(model: &Model, sequences: &[Vec<u32>]) -> Result<()> {
    let max = model.spec.max_position_embeddings;
    match sequences.iter().position(|ids| ids.len() > max) {
        None => Ok(()),
        Some(at) => Err(PipelineError::Option {
            option: "--calib",
            expected: format!(
                "sequences of at most {max} tokens, the model's longest position (--rope-scaling extends it)"
            ),
            found: format!("{} in sequence {at}", sequences[at].len()),
        }),
    }
}

/// `--seq-len`, which the model must reach; else the paper's, capped by the model.
fn seq_len(model: &Model, request: &CalibrationRequest) -> Result<usize> {
    let longest = model.spec.max_position_embeddings;
    match request.seq_len {
        None => Ok(DEFAULT_SEQ_LEN.min(longest)),
        Some(n) if (2..=longest).contains(&n) => Ok(n),
        Some(n) => Err(PipelineError::Option {
            option: "--seq-len",
            expected: format!("2 to {longest}, the model's longest position (--rope-scaling extends it)"),
            found: n.to_string(),
        }),
    }
}

/// Work of an earlier run is neither thrown away nor continued unasked.
fn refuse_unfinished(path: &std::path::Path, resume: bool) -> Result<()> {
    if !resume && path.symlink_metadata().is_ok() {
        return Err(PipelineError::UnfinishedWork { path: path.to_owned() });
    }
    Ok(())
}

/// Tokens of all sequences.
pub(crate) fn n_tokens(sequences: &[Vec<u32>]) -> u64 {
    sequences.iter().map(|ids| ids.len() as u64).sum()
}

/// Longest sequence of the equivalence check.
fn verified(plan: Option<&VerifyPlan>) -> usize {
    plan.map_or(0, |plan| longest(&plan.sequences))
}

fn longest(sequences: &[Vec<u32>]) -> usize {
    sequences.iter().map(Vec::len).max().unwrap_or(0)
}

fn describe_model(model: &Model) -> String {
    let Model { id, spec, device, .. } = model;
    let attn = &spec.layers[0].attn;
    format!(
        "model      {id}: {}, {} layers, {} query and {} KV heads of {}, on {}",
        spec.family,
        spec.layers.len(),
        attn.n_heads,
        attn.n_kv_heads,
        attn.head_dim,
        device.name(),
    )
}

fn describe_calibration(plan: &CalibrationPlan, shard: Option<&str>) -> String {
    let shard = shard.map(|shard| format!(" (share {shard})")).unwrap_or_default();
    let StatsInfo { source, positions, max_seq_len, .. } = &plan.info;
    let (n, tokens) = (counted(plan.sequences.len() as u64, "sequence"), counted(*positions, "token"));
    format!("calibrate  {source}: {n}{shard}, {tokens}, the longest {max_seq_len}")
}

fn describe_memory(memory: &MemoryPlan) -> String {
    let MemoryPlan { layer, activations, statistics, logits, mapped, anonymous, .. } = *memory;
    let [layer, activations, statistics, logits, mapped, anonymous] =
        [layer, activations, statistics, logits, mapped, anonymous].map(human_bytes);
    format!(
        "memory     about {anonymous} at most (one layer {layer}, activations {activations}, statistics {statistics}, logits \
         {logits}; not all at once), and {mapped} of mapped files"
    )
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
