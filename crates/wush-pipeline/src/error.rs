//! The one error type of this crate: a room's own error, or what only the order of the stages can see. Every message
//! says what failed and where; the remedy is [`PipelineError::hint`], a separate line.

use std::path::{Path, PathBuf};

use wush_checkpoint::CheckpointError;
use wush_data::{DataError, TextOptions};
use wush_eval::EvalError;
use wush_export::ExportError;
use wush_fold::FoldError;
use wush_format::FormatError;
use wush_format::hash::Sha;
use wush_generate::GenerateError;
use wush_gpu::GpuError;
use wush_inspect::InspectError;
use wush_model::ModelError;
use wush_quant::QuantError;
use wush_serve::ServeError;
use wush_stats::StatsError;
use wush_transform::TransformError;

use crate::human::counted;
use crate::plan::DEFAULT_DAMPING;

/// Result of this crate.
pub type Result<T, E = PipelineError> = std::result::Result<T, E>;

/// What messages call a statistics file.
pub(crate) const STATISTICS: &str = "statistics file";
/// What messages call a transforms file.
pub(crate) const TRANSFORMS: &str = "transforms file";
/// What messages call a model's or a bundle's directory where a file is needed.
pub(crate) const CHECKPOINT: &str = "checkpoint";
/// What messages call any other directory where a file is needed.
pub(crate) const DIRECTORY: &str = "directory";

/// Work that an interrupted run saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kept {
    /// Sequences whose sums are saved.
    pub done: usize,
    /// Sequences of the run.
    pub total: usize,
}

impl std::fmt::Display for Kept {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "kept {} of {}", self.done, counted(self.total as u64, "sequence"))
    }
}

/// Why a stage did not finish.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PipelineError {
    /// A file of wush.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The checkpoint, the hub or the tokenizer.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The text that is calibrated on, checked or scored.
    #[error("{source}")]
    Data {
        /// What is wrong with it.
        source: DataError,
        /// What its options are called here.
        options: &'static TextOptions,
    },
    /// The forward pass.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The statistics.
    #[error(transparent)]
    Stats(#[from] StatsError),
    /// Folding.
    #[error(transparent)]
    Fold(#[from] FoldError),
    /// The audit.
    #[error(transparent)]
    Inspect(#[from] InspectError),
    /// A format of another server.
    #[error(transparent)]
    Export(#[from] ExportError),
    /// An evaluation.
    #[error(transparent)]
    Eval(#[from] EvalError),
    /// The decoder over its cache.
    #[error(transparent)]
    Generate(#[from] GenerateError),
    /// The server.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// A prompt of no tokens.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// A prompt beyond the model's positions.
    #[error("the prompt has {found} tokens, the model reaches {longest} positions")]
    LongPrompt {
        /// Its tokens, with those that the tokenizer or the chat template adds.
        found: usize,
        /// The most that there can be.
        longest: usize,
    },
    /// A chat without a template.
    #[error("{dir}: has no chat template")]
    NoChatTemplate {
        /// The checkpoint.
        dir: PathBuf,
    },
    /// A quantizer.
    #[error(transparent)]
    Quant(#[from] QuantError),
    /// The solver, with the head that it failed on.
    #[error("layer {layer}, KV head {head}, {role} transform: {source}")]
    Solve {
        /// Global layer id.
        layer: usize,
        /// KV head.
        head: usize,
        /// "key" or "value".
        role: &'static str,
        /// The solver's own error.
        source: TransformError,
    },
    /// Statistics without what the transform is made from.
    #[error("transform {transform} is made from more than these statistics hold")]
    NotGathered {
        /// Registry name.
        transform: &'static str,
        /// The option of `calibrate` that gathers it.
        option: &'static str,
    },
    /// Key centring where the softmax is not that of the logits alone.
    #[error(
        "--center-keys always: {family} caps its attention logits, so a mean that is taken from the keys changes the softmax"
    )]
    NotShiftInvariant {
        /// Model family.
        family: String,
    },
    /// An option's value cannot be used.
    #[error("{option}: expected {expected}, found {found}")]
    Option {
        /// The option as it is typed, "--damping".
        option: &'static str,
        /// What it must be.
        expected: String,
        /// What it was.
        found: String,
    },
    /// An option that none of the transforms takes.
    #[error("{option}: {transforms} would not look at it")]
    UnusedOption {
        /// As it is typed, "--exponent".
        option: &'static str,
        /// The transform, or those of a list.
        transforms: String,
        /// Transforms that take it.
        takers: String,
    },
    /// Calibration text that repeats itself.
    #[error("{source_name}: sequences {first} and {second} are the same, and would count twice")]
    SameSequence {
        /// The file, folder or data set.
        source_name: String,
        /// A sequence, from 0.
        first: usize,
        /// A later one.
        second: usize,
    },
    /// The GPU that was asked for cannot be used, or failed.
    #[error("GPU: {0}")]
    Gpu(GpuError),
    /// An output that would be overwritten.
    #[error("{path}: exists already")]
    OutputExists {
        /// The output.
        path: PathBuf,
    },
    /// An output inside the checkpoint that is read.
    #[error("{path}: the output lies inside the checkpoint directory {source_dir}")]
    OutputInsideSource {
        /// The output.
        path: PathBuf,
        /// The checkpoint.
        source_dir: PathBuf,
    },
    /// Work of an earlier run, interrupted or failed, that `--resume` was not asked to continue.
    #[error("{path}: holds the work of an earlier run")]
    UnfinishedWork {
        /// The partial file or work directory.
        path: PathBuf,
    },
    /// A run to be resumed whose output is there, whole.
    #[error("{path}: exists already: that run is finished, and nothing is left to resume")]
    Finished {
        /// The output.
        path: PathBuf,
    },
    /// Work of an earlier run that was planned differently.
    #[error("{path}: was begun with another {difference}")]
    OtherPlan {
        /// The partial file or work directory.
        path: PathBuf,
        /// What differs, "--seq-len: 1024 there, 512 here".
        difference: String,
    },
    /// Something at the work directory's place that no run of wush put there.
    #[error("{path}: expected nothing or the work of an earlier run, found {found}")]
    ForeignWork {
        /// The work directory.
        path: PathBuf,
        /// What is there.
        found: String,
    },
    /// Saved work that cannot be read.
    #[error("{source}")]
    DamagedWork {
        /// The saved statistics.
        path: PathBuf,
        /// What is wrong with them.
        source: Box<StatsError>,
    },
    /// The name of the model's directory would draw on a terminal, and no manifest may state it.
    #[error("the model directory's name {name} has a control character")]
    ModelName {
        /// The name, escaped.
        name: String,
    },
    /// A failure after which there is work to continue.
    #[error("{source}")]
    Resumable {
        /// What happened.
        source: Box<PipelineError>,
        /// The partial file or work directory.
        kept: PathBuf,
    },
    /// Something else than the file of wush that the command takes.
    #[error("{path}: is a {found}, not a {expected}")]
    OtherKind {
        /// The file or directory.
        path: PathBuf,
        /// "statistics file" or "transforms file".
        expected: &'static str,
        /// One of these, "checkpoint" or "directory".
        found: &'static str,
    },
    /// A model that is no directory, and that the hub did not give either.
    #[error("there is no directory {argument}; taken as a hub id: {source}")]
    NoSuchModel {
        /// As typed.
        argument: String,
        /// The hub's answer.
        source: Box<CheckpointError>,
    },
    /// A bundle that must lie on this machine, and does not.
    #[error("{path}: there is no such directory")]
    NoDirectory {
        /// As typed.
        path: PathBuf,
    },
    /// A bundle where an unconverted checkpoint is needed.
    #[error("{path}: is a bundle already: its values are in transformed coordinates")]
    AlreadyFolded {
        /// The bundle.
        path: PathBuf,
    },
    /// A checkpoint where a bundle is needed.
    #[error("{path}: is not a bundle: it has no wush/manifest.json")]
    NotABundle {
        /// The directory.
        path: PathBuf,
    },
    /// A transform that this build does not have.
    #[error("transform {name} is unknown; known are {known}")]
    UnknownTransform {
        /// As asked for.
        name: String,
        /// The registry's names.
        known: String,
    },
    /// Transforms of another size than the model's heads.
    #[error(
        "the transforms were made from another model: layer {layer}, {role} transforms: expected shape {expected:?}, found \
         {found:?}"
    )]
    OtherModel {
        /// Global layer id.
        layer: usize,
        /// "key" or "value".
        role: &'static str,
        /// `[n_kv_heads, head_dim, head_dim]` of the model.
        expected: [usize; 3],
        /// The transforms' own.
        found: [usize; 3],
    },
    /// Transforms calibrated beyond the model's positions.
    #[error("the transforms were calibrated on sequences of {found} tokens, the model reaches {longest} positions")]
    LongCalibration {
        /// Longest sequence that they name.
        found: u64,
        /// Longest position of the model, with the scaling that they name.
        longest: u64,
    },
    /// A key transform that cannot be inverted in f64 well enough to be used.
    #[error(
        "layer {layer}, KV head {head}: the key transform cannot be inverted: condition number {condition:.3e}, \
         at most {limit:.3e} can be used"
    )]
    SingularKey {
        /// Global layer id.
        layer: usize,
        /// KV head.
        head: usize,
        /// 1-norm condition number; infinite when a pivot is zero.
        condition: f64,
        /// [`wush_fold::condition_limit`] of the head dimension.
        limit: f64,
    },
    /// The user asked to stop.
    #[error("interrupted{}", .kept.map(|kept| format!(": {kept}")).unwrap_or_default())]
    Interrupted {
        /// What `--resume` continues from; none where the command has no such option.
        kept: Option<Kept>,
    },
    /// Statistics or sidecars that belong to other weights.
    #[error("{path}: belongs to weights with hash {found}, and the model's is {expected}")]
    OtherWeights {
        /// The file.
        path: PathBuf,
        /// The hash that it states.
        found: Sha,
        /// The model's.
        expected: Sha,
    },
    /// A bundle's sidecar that is not the one of its manifest.
    #[error("{path}: is not the file that the bundle's manifest lists: its bytes have SHA-256 {found}, not {expected}")]
    ChangedSidecar {
        /// The file.
        path: PathBuf,
        /// Of its bytes.
        found: Sha,
        /// The manifest's.
        expected: Sha,
    },
    /// The stage in which one of the above happened.
    #[error("{stage}: {source}")]
    Stage {
        /// The stage's name.
        stage: &'static str,
        /// What happened.
        source: Box<PipelineError>,
    },
}

impl From<DataError> for PipelineError {
    /// Of calibration text.
    fn from(source: DataError) -> Self {
        Self::Data { source, options: &TextOptions::CALIBRATION }
    }
}

impl PipelineError {
    /// A report or text that could not be written to the standard output.
    pub fn stdout(error: std::io::Error) -> Self {
        FormatError::io("stdout", "write", error).into()
    }

    /// The remedy, where one is known: one line, without "hint:".
    pub fn hint(&self) -> Option<String> {
        let own = |text: &str| Some(text.to_owned());
        match self {
            Self::Format(e) => e.hint(),
            Self::Checkpoint(e) => e.hint(),
            Self::Data { source, options } => source.hint(options),
            Self::Model(e) => e.hint(),
            Self::Stats(e) => e.hint(),
            Self::Fold(e) => e.hint(),
            Self::Inspect(e) => e.hint(),
            Self::Export(e) => e.hint(),
            Self::Eval(e) => e.hint(),
            Self::Generate(e) => e.hint(),
            Self::Serve(e) => e.hint(),
            Self::EmptyPrompt => {
                own("pass text with --prompt, or a file with --prompt-file (- for the standard input)")
            }
            Self::LongPrompt { .. } => {
                own("pass a shorter prompt, or another --rope-scaling, such as yarn:4, if the model is made for it")
            }
            Self::NoChatTemplate { .. } => own("pass --chat never, without --system, to continue the prompt as it is"),
            Self::Quant(e) => e.hint().map(str::to_owned),
            Self::Solve { source, .. } => source.hint(),
            Self::NotGathered { option, .. } => {
                Some(format!("calibrate with {option}; `wush convert` does so by itself"))
            }
            Self::NotShiftInvariant { .. } => {
                own("use --center-keys auto or never: they leave such a model's keys as they are")
            }
            Self::Option { option, .. } => Some(format!("see --help for what {option} takes")),
            Self::UnusedOption { takers, .. } => Some(format!("leave it out: it is for {takers}")),
            Self::SameSequence { .. } => {
                own("leave the repeated text out; longer sequences (--seq-len) also differ sooner")
            }
            Self::Gpu(e) => e.hint(),
            Self::OutputExists { path } if is_failed_bundle(path) => {
                own("it is a bundle that failed its check: remove it, or choose another --out")
            }
            Self::OutputExists { .. } => own("remove it, or choose another --out"),
            Self::Finished { .. } => own("use it as it is; to make it anew, remove it or choose another --out"),
            Self::OutputInsideSource { .. } => {
                own("choose a path outside: a checkpoint's files are read and copied together")
            }
            Self::UnfinishedWork { path } => {
                Some(format!("add --resume to continue it, or remove {} to start over", path.display()))
            }
            Self::OtherPlan { path, .. } => Some(format!(
                "repeat the first run's options (--sequences may grow), or remove {} to start over",
                path.display()
            )),
            Self::ForeignWork { .. } => own("move it away, or choose another output path"),
            Self::DamagedWork { path, .. } => Some(format!("remove {} to start over", path.display())),
            Self::ModelName { .. } => own("rename the directory"),
            Self::Resumable { source, kept } => Some(resumable_hint(source, kept)),
            Self::OtherKind { found, expected, .. } => own(way_to(expected, found)),
            Self::NoSuchModel { source, .. } => source.hint(),
            Self::NoDirectory { .. } => own(
                "pass a bundle's directory on this machine; one on the hub is fetched with `hf download ID --local-dir DIR`",
            ),
            Self::AlreadyFolded { .. } => own("pass the original checkpoint, or get it back with `wush unfold`"),
            Self::NotABundle { .. } => own("pass a directory that `wush convert` or `wush fold` wrote"),
            Self::UnknownTransform { .. } => None,
            Self::OtherModel { .. } | Self::LongCalibration { .. } => {
                own("pass the checkpoint that the transforms were made from")
            }
            Self::ChangedSidecar { .. } => {
                own("`wush inspect` says what else changed; take the bundle from where it was made")
            }
            Self::OtherWeights { .. } => own("pass the file that was made from this model"),
            Self::SingularKey { .. } => own("solve again with a larger --damping"),
            Self::Interrupted { kept } => kept.as_ref().and_then(|kept| match kept.done {
                0 => own(NOTHING_SAVED),
                _ => own("run the same command again with --resume to continue"),
            }),
            Self::Stage { source, .. } => source.hint(),
        }
    }

    /// Says that what was saved in `kept`, if anything, can be continued. A stop says so itself, and so does an error of the
    /// saved work.
    pub(crate) fn resumable(self, kept: &Path) -> Self {
        let says_so =
            self.is_interruption() || matches!(self.root(), Self::OtherPlan { .. } | Self::DamagedWork { .. });
        if says_so || kept.symlink_metadata().is_err() {
            return self;
        }
        Self::Resumable { source: Box::new(self), kept: kept.to_owned() }
    }

    /// The same with files below `from` named below `to`: see [`FormatError::moved`].
    pub(crate) fn moved(self, from: &Path, to: &Path) -> Self {
        let moved = |error: FormatError| error.moved(from, to);
        let inner = |source: Box<Self>| Box::new(source.moved(from, to));
        match self {
            Self::Format(error) => Self::Format(moved(error)),
            Self::Checkpoint(CheckpointError::Format(error)) => Self::Checkpoint(CheckpointError::Format(moved(error))),
            Self::Fold(FoldError::Format(error)) => Self::Fold(FoldError::Format(moved(error))),
            Self::Export(ExportError::Format(error)) => Self::Export(ExportError::Format(moved(error))),
            Self::Stats(StatsError::Format(error)) => Self::Stats(StatsError::Format(moved(error))),
            Self::Stage { stage, source } => Self::Stage { stage, source: inner(source) },
            Self::Resumable { source, kept } => Self::Resumable { source: inner(source), kept },
            other => other,
        }
    }

    /// The error without the stages that it passed.
    fn root(&self) -> &Self {
        match self {
            Self::Stage { source, .. } | Self::Resumable { source, .. } => source.root(),
            other => other,
        }
    }

    /// Whether this is the user's own stop and not a failure.
    pub fn is_interruption(&self) -> bool {
        match self {
            Self::Interrupted { .. }
            | Self::Checkpoint(CheckpointError::Interrupted)
            | Self::Data { source: DataError::Interrupted, .. }
            | Self::Model(ModelError::Interrupted)
            | Self::Eval(EvalError::Model(ModelError::Interrupted))
            | Self::Generate(GenerateError::Model(ModelError::Interrupted))
            | Self::Stats(StatsError::Interrupted)
            | Self::Fold(FoldError::Interrupted)
            | Self::Inspect(InspectError::Interrupted) => true,
            Self::Stage { source, .. } | Self::Resumable { source, .. } => source.is_interruption(),
            _ => false,
        }
    }
}

/// Why a stop has nothing to continue from.
const NOTHING_SAVED: &str = "sums are saved between groups of sequences, about once a minute: nothing was yet";

/// Whether `path` bears the name of a bundle that failed its check.
pub(crate) fn is_failed_bundle(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "failed")
}

/// How to get what was expected from what was found.
fn way_to(expected: &str, found: &str) -> &'static str {
    match (expected, found) {
        (_, STATISTICS) => "`wush solve` makes transforms of it",
        (_, TRANSFORMS) => "`wush fold` puts transforms into a checkpoint; `wush calibrate` makes statistics",
        (STATISTICS, CHECKPOINT) => "`wush calibrate` makes statistics of a checkpoint; `wush convert` does all stages",
        (_, CHECKPOINT) => "`wush calibrate`, then `wush solve`, make transforms of a checkpoint",
        (STATISTICS, _) => "pass a file that `wush calibrate` or `wush merge` wrote",
        _ => "pass a file that `wush solve` wrote",
    }
}

/// The remedy of `error`, and how to go on from the work in `kept`.
fn resumable_hint(error: &PipelineError, kept: &Path) -> String {
    if let PipelineError::Solve { source: TransformError::Singular { damping, .. }, .. } = error.root() {
        let larger = if *damping < DEFAULT_DAMPING { DEFAULT_DAMPING } else { damping * 10.0 };
        return format!("the statistics are kept: run the same command again with --resume --damping {larger}");
    }
    let remedy = error.hint().map(|hint| format!("{hint}; ")).unwrap_or_default();
    format!("{remedy}the sums so far are kept in {}: --resume continues from them", kept.display())
}

/// Names the stage of an error.
pub(crate) trait InStage<T> {
    /// Wraps the error, if any, as one of stage `stage`.
    fn in_stage(self, stage: &'static str) -> Result<T>;
}

impl<T, E: Into<PipelineError>> InStage<T> for std::result::Result<T, E> {
    fn in_stage(self, stage: &'static str) -> Result<T> {
        self.map_err(|e| PipelineError::Stage { stage, source: Box::new(e.into()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_says_what_was_kept() {
        let stop = PipelineError::Interrupted { kept: Some(Kept { done: 16, total: 24 }) };
        assert_eq!(stop.to_string(), "interrupted: kept 16 of 24 sequences");
        assert!(stop.hint().expect("a way on").contains("--resume"));
        let stop = PipelineError::Interrupted { kept: Some(Kept { done: 0, total: 24 }) };
        assert!(stop.hint().expect("why").contains("nothing was yet"), "there is nothing to continue");
        let stop = PipelineError::Interrupted { kept: None };
        assert_eq!((stop.to_string().as_str(), stop.hint()), ("interrupted", None));
    }
}
