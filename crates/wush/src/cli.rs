//! The command line: what can be typed, and the request that it becomes. No numbers beyond the defaults that the
//! pipeline names, and no decision: a request is checked by the pipeline's plan.

#![expect(rustdoc::broken_intra_doc_links, reason = "the comments are help texts, printed as they stand")]

mod bench;
mod eval;
mod generate;
mod serve;

use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use wush_pipeline::plan;
use wush_pipeline::request::{
    ByteSize, CalibSource, CalibrateRequest, CalibrationRequest, CenterKeys, ConvertRequest, DeviceChoice,
    ExportRequest, FoldDtype, FoldRequest, Gather, HessianChoice, InspectRequest, MergeRequest, ModelRequest, Preset,
    RopeScaling, SecondPassChoice, Shard, SolveRequest, SolveSettings, UnfoldRequest, VerifySettings,
};

pub use bench::{BenchArgs, BenchCommand};
pub use eval::{EvalArgs, EvalCommand};
pub use generate::GenerateArgs;
pub use serve::ServeArgs;

/// Exit codes, as `--help` and `docs/cli.md` state them.
pub const EXIT_CODES: &str = "Exit codes: 0 done; 1 done, but a check failed; 2 an error; 130 stopped by Ctrl-C, SIGTERM or SIGHUP (`wush serve`: 0).";

/// Data-adaptive transforms that make 2-bit KV caches work.
#[derive(Debug, Parser)]
#[command(name = "wush", version, after_help = EXIT_CODES, max_term_width = 110)]
pub struct Cli {
    /// Options of every command.
    #[command(flatten)]
    pub global: GlobalArgs,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Options of every command.
#[derive(Debug, Args)]
#[command(next_help_heading = "Output and resources")]
pub struct GlobalArgs {
    /// Form of the report on stdout
    #[arg(long, global = true, value_enum, default_value_t = Format::Text)]
    pub format: Format,
    /// No progress and no notes on stderr
    #[arg(long, short, global = true)]
    pub quiet: bool,
    /// Say on stderr what each stage took
    #[arg(long, short, global = true, conflicts_with = "quiet")]
    pub verbose: bool,
    /// Threads of the CPU [default: one a core]; results do not depend on it
    #[arg(long, global = true, value_name = "N", allow_negative_numbers = true, value_parser = whole_number)]
    pub threads: Option<usize>,
}

/// `--format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Tables for people.
    Text,
    /// One JSON object; `wush schema` has its schema.
    Json,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Checkpoint and calibration text to a bundle: calibrate, solve, fold, verify
    Convert(ConvertArgs),
    /// Checkpoint and calibration text to a statistics file
    Calibrate(CalibrateArgs),
    /// Statistics of disjoint sequences to their sum
    Merge(MergeArgs),
    /// Statistics to key and value transforms
    Solve(SolveArgs),
    /// Checkpoint and transforms to a bundle
    Fold(FoldArgs),
    /// Bundle to a checkpoint in the original coordinates, up to rounding
    Unfold(UnfoldArgs),
    /// Orthogonal transforms to the rotations of OSCAR's servers
    Export(ExportArgs),
    /// Say what a bundle, transforms or statistics file is, and whether it can be trusted
    Inspect(InspectArgs),
    /// Measure what a quantized cache costs
    Eval(EvalArgs),
    /// Text from a checkpoint or a bundle, over its quantized cache
    Generate(GenerateArgs),
    /// A checkpoint or a bundle over HTTP, in the form of OpenAI's API
    Serve(ServeArgs),
    /// A tour on the bundled model, offline, in about a minute
    Demo(DemoArgs),
    /// Say what this machine offers: GPUs, CUDA's libraries, and why a GPU is not used
    Doctor,
    /// How fast a GPU is, beside its own limits
    Bench(BenchArgs),
    /// Print the JSON Schema of a report or of the manifest
    Schema(SchemaArgs),
}

/// The model and how to run it.
#[derive(Debug, Args)]
pub struct ModelArgs {
    /// A checkpoint's directory, or a hub id org/name[@revision]
    #[arg(value_name = "MODEL")]
    pub model: String,
    /// auto, cpu, cuda, cuda:N or cuda:all. Statistics, and the forward passes of `eval ppl`, are computed on a GPU where there is
    /// one, everything else on the CPU; `wush doctor` says what is found
    #[arg(long, default_value = "auto")]
    pub device: DeviceChoice,
    /// RoPE scaling instead of the configuration's own, such as yarn:4
    #[arg(long, value_name = "KIND:FACTOR")]
    pub rope_scaling: Option<RopeScaling>,
}

/// How a GPU is used.
#[derive(Debug, Args)]
pub struct GpuArgs {
    /// The most that may be taken of each GPU, such as 24GiB [default: what is free]. A model that does not fit with all its
    /// layers has two on the card at a time, and as many sequences as make a million tokens go through each
    #[arg(long, value_name = "SIZE")]
    pub max_gpu_memory: Option<ByteSize>,
}

/// The calibration text.
#[derive(Debug, Args)]
#[command(next_help_heading = "Calibration text")]
pub struct CalibrationArgs {
    /// A .txt, .jsonl or .parquet file (.gz, .zst too) or a folder of them, a .json of token-id lists, or a hub data set
    /// hf:org/name[@revision][:glob]
    #[arg(long, value_name = "SOURCE", default_value = plan::DEFAULT_CALIB)]
    pub calib: CalibSource,
    #[command(flatten)]
    pub cut: CutArgs,
}

/// How the calibration text is cut into sequences.
#[derive(Debug, Args)]
#[command(next_help_heading = "Calibration text")]
pub struct CutArgs {
    /// Column or key of the text
    #[arg(long, value_name = "NAME", default_value = plan::DEFAULT_TEXT_FIELD)]
    pub text_field: String,
    /// Number of sequences [default: 128; all of them when the source is token-id lists]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole_number)]
    pub sequences: Option<usize>,
    /// Tokens a sequence [default: 32768, or the model's longest position if shorter]; not with token-id lists
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole_number)]
    pub seq_len: Option<usize>,
}

/// The transform and its constants.
#[derive(Debug, Args)]
#[command(next_help_heading = "Transform")]
pub struct SolveSettingsArgs {
    /// Which transform
    #[arg(long, default_value = plan::DEFAULT_TRANSFORM, value_parser = PossibleValuesParser::new(plan::transform_names()))]
    pub transform: String,
    #[command(flatten)]
    pub options: SolveOptionsArgs,
}

/// The constants of a transform.
#[derive(Debug, Args)]
#[command(next_help_heading = "Transform")]
pub struct SolveOptionsArgs {
    /// default: what measurements favour; paper: the method exactly as published [default: default]
    #[arg(long)]
    pub preset: Option<Preset>,
    /// Damping γ of Eq. 1, of a transform with statistics [default: 0.01]
    #[arg(long, value_name = "GAMMA", allow_hyphen_values = true, value_parser = number)]
    pub damping: Option<f64>,
    /// Seed of random matrices [default: 0]
    #[arg(long, allow_negative_numbers = true, value_parser = seed)]
    pub seed: Option<u64>,
    /// Exponent p of Λ in wush and wush-a, 0 to 0.5 [default: the preset's: 0.4; 0.25 in paper]
    #[arg(long, value_name = "P", allow_hyphen_values = true, value_parser = number)]
    pub exponent: Option<f64>,
    /// The last, orthogonal factor of wush and wush-a [default: hadamard]
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(plan::factor_names()))]
    pub factor: Option<String>,
    /// Take each head's mean from its keys before they are cached, which no softmax notices: never, always, or auto, where
    /// the mean holds much of the keys' energy [default: the preset's: auto; never in paper and for baselines]
    #[arg(long, value_name = "WHERE")]
    pub center_keys: Option<CenterKeys>,
    /// Also make the matrices that an encoder with error feedback needs [default: the preset's: true; false in paper and for baselines]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub feedback: Option<bool>,
}

/// Folding and its check.
#[derive(Debug, Args)]
#[command(next_help_heading = "Folding")]
pub struct FoldSettingsArgs {
    /// Element type of folded tensors: the checkpoint's own, or f32. Loaders follow config.json: where it says bfloat16 or
    /// float16, the server must be told float32 (vLLM: --dtype float32), or f32 has no effect
    #[arg(long, value_enum, default_value_t = FoldDtypeArg::Keep)]
    pub fold_dtype: FoldDtypeArg,
    /// Calibration sequences to run through both checkpoints, the first 1024 tokens of each; 0 skips the check
    #[arg(long, value_name = "N", default_value_t = plan::DEFAULT_VERIFY_SEQUENCES)]
    #[arg(allow_negative_numbers = true, value_parser = whole_number)]
    pub verify_sequences: usize,
    /// Largest accepted relative change of the mean NLL [default: by the folded element type]
    #[arg(long, value_name = "REL", allow_hyphen_values = true, value_parser = number)]
    pub tolerance: Option<f64>,
}

/// A count, for options whose range the plan checks.
fn whole_number(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| "expected a whole number, not negative".to_owned())
}

/// A number, for options whose range the plan checks.
fn number(text: &str) -> Result<f64, String> {
    text.parse().map_err(|_| "expected a number, such as 0.01 or 1e-3".to_owned())
}

fn seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("expected a whole number from 0 to {}", u64::MAX))
}

fn export_formats() -> PossibleValuesParser {
    PossibleValuesParser::new(wush_pipeline::export_formats().map(|(name, doc)| PossibleValue::new(name).help(doc)))
}

/// `--fold-dtype`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FoldDtypeArg {
    /// As stored.
    Keep,
    /// 32-bit.
    F32,
}

/// `wush convert`.
#[derive(Debug, Args)]
pub struct ConvertArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Directory of the bundle; must not exist
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Continue an earlier run of the same command, stopped, killed or failed. Sums are saved at the ends of sequences,
    /// about once a minute; --sequences may have grown, and what comes after calibration
    /// (--damping, --fold-dtype, --tolerance, …) may be another
    #[arg(long)]
    resume: bool,
    #[command(flatten)]
    gpu: GpuArgs,
    #[command(flatten)]
    calibration: CalibrationArgs,
    #[command(flatten)]
    settings: SolveSettingsArgs,
    #[command(flatten)]
    fold: FoldSettingsArgs,
}

/// `wush calibrate`.
#[derive(Debug, Args)]
pub struct CalibrateArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Statistics file to write; must not exist
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Continue an earlier run of the same command, stopped or killed. Sums are saved at the ends of sequences,
    /// about once a minute; --sequences may have grown
    #[arg(long)]
    resume: bool,
    /// surrogate: what Eq. 4's Hessians need; attention: also Appendix C's exact ones, for wush-a, in time that grows with the
    /// square of the sequence length
    #[arg(long, value_name = "KIND", default_value_t)]
    hessian: HessianChoice,
    /// oscar: read the text a second time, for the transforms oscar and oscar-per-head; none: do not
    #[arg(long, value_name = "FOR", default_value_t)]
    second_pass: SecondPassChoice,
    /// Only the K-th of N contiguous shares of the sequences
    #[arg(long, value_name = "K/N")]
    shard: Option<Shard>,
    #[command(flatten)]
    gpu: GpuArgs,
    #[command(flatten)]
    calibration: CalibrationArgs,
}

/// `wush merge`.
#[derive(Debug, Args)]
pub struct MergeArgs {
    /// Statistics files of one model, with the same settings and different sequences
    #[arg(required = true, value_name = "STATS")]
    inputs: Vec<PathBuf>,
    /// Statistics file to write; must not exist
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
}

/// `wush solve`.
#[derive(Debug, Args)]
pub struct SolveArgs {
    /// A statistics file
    #[arg(value_name = "STATS")]
    statistics: PathBuf,
    /// Transforms file to write; must not exist
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    #[command(flatten)]
    settings: SolveSettingsArgs,
}

/// `wush fold`.
#[derive(Debug, Args)]
pub struct FoldArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// A transforms file
    #[arg(value_name = "TRANSFORMS")]
    transforms: PathBuf,
    /// Directory of the bundle; must not exist
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    #[command(flatten)]
    fold: FoldSettingsArgs,
    /// Text for the equivalence check; without it the check is skipped
    #[arg(long, value_name = "SOURCE", help_heading = "Calibration text")]
    calib: Option<CalibSource>,
    /// Column or key of the text
    #[arg(long, value_name = "NAME", default_value = plan::DEFAULT_TEXT_FIELD, requires = "calib")]
    #[arg(help_heading = "Calibration text")]
    text_field: String,
    /// Tokens a sequence, of which the first 1024 are read [default: the longest that the transforms were calibrated on, at
    /// most 1024]; not with token-id lists
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole_number, requires = "calib")]
    #[arg(help_heading = "Calibration text")]
    seq_len: Option<usize>,
}

/// `wush unfold`.
#[derive(Debug, Args)]
pub struct UnfoldArgs {
    /// A bundle's directory
    #[arg(value_name = "BUNDLE")]
    bundle: PathBuf,
    /// Directory of the checkpoint; must not exist
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

/// `wush export`.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// A bundle's directory, to serve the bundle, whose weights hold the value transform already; or a transforms file, to serve
    /// the checkpoint that they were solved for
    #[arg(value_name = "PATH")]
    path: PathBuf,
    /// The format
    #[arg(long, value_name = "FORMAT", default_value = wush_pipeline::DEFAULT_EXPORT_FORMAT)]
    #[arg(value_parser = export_formats())]
    to: String,
    /// Directory of the files; must not exist
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

/// `wush inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// A bundle's or a checkpoint's directory, or a file: transforms, statistics or a bundle's sidecar
    #[arg(value_name = "PATH")]
    path: PathBuf,
    /// The checkpoint that it was made from: a directory or hub id. Proves that nothing else was changed
    #[arg(long, value_name = "MODEL")]
    base: Option<String>,
    /// Also write the report as one self-contained page, in place of an older one; outside of PATH and of MODEL
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// `wush demo`.
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Directory to make, for the model with its text (demo-model/) and the bundle (demo-model-wush/); must not exist
    #[arg(long, value_name = "DIR", default_value = "wush-demo")]
    pub out: PathBuf,
}

/// `wush schema`.
#[derive(Debug, Args)]
pub struct SchemaArgs {
    /// Which; all names are listed without it
    #[arg(value_name = "NAME", value_parser = PossibleValuesParser::new(wush_pipeline::schema::names()))]
    pub name: Option<String>,
}

impl ModelArgs {
    fn request(self) -> ModelRequest {
        ModelRequest { model: self.model, device: self.device, rope_scaling: self.rope_scaling }
    }
}

impl CutArgs {
    fn request(self, source: CalibSource) -> CalibrationRequest {
        CalibrationRequest { source, text_field: self.text_field, sequences: self.sequences, seq_len: self.seq_len }
    }
}

impl SolveSettingsArgs {
    fn request(self) -> SolveSettings {
        self.options.request(self.transform)
    }
}

impl SolveOptionsArgs {
    fn request(self, transform: String) -> SolveSettings {
        SolveSettings {
            transform,
            preset: self.preset,
            damping: self.damping,
            seed: self.seed,
            exponent: self.exponent,
            factor: self.factor,
            center_keys: self.center_keys,
            feedback: self.feedback,
        }
    }
}

impl FoldSettingsArgs {
    fn dtype(&self) -> FoldDtype {
        match self.fold_dtype {
            FoldDtypeArg::Keep => FoldDtype::Keep,
            FoldDtypeArg::F32 => FoldDtype::F32,
        }
    }

    fn verify(&self) -> VerifySettings {
        VerifySettings { sequences: self.verify_sequences, tolerance: self.tolerance }
    }
}

impl ConvertArgs {
    /// The request that was typed.
    pub fn request(self) -> ConvertRequest {
        ConvertRequest {
            model: self.model.request(),
            calibration: self.calibration.cut.request(self.calibration.calib),
            max_gpu_memory: self.gpu.max_gpu_memory,
            settings: self.settings.request(),
            dtype: self.fold.dtype(),
            verify: self.fold.verify(),
            resume: self.resume,
            out: self.out,
        }
    }
}

impl CalibrateArgs {
    /// The request that was typed.
    pub fn request(self) -> CalibrateRequest {
        CalibrateRequest {
            model: self.model.request(),
            calibration: self.calibration.cut.request(self.calibration.calib),
            gather: Gather { hessian: self.hessian, second_pass: self.second_pass },
            max_gpu_memory: self.gpu.max_gpu_memory,
            shard: self.shard,
            resume: self.resume,
            out: self.out,
        }
    }
}

impl MergeArgs {
    /// The request that was typed.
    pub fn request(self) -> MergeRequest {
        MergeRequest { inputs: self.inputs, out: self.out }
    }
}

impl SolveArgs {
    /// The request that was typed.
    pub fn request(self) -> SolveRequest {
        SolveRequest { statistics: self.statistics, settings: self.settings.request(), out: self.out }
    }
}

impl FoldArgs {
    /// The request that was typed.
    pub fn request(self) -> FoldRequest {
        FoldRequest {
            model: self.model.request(),
            transforms: self.transforms,
            dtype: self.fold.dtype(),
            verify: self.fold.verify(),
            calibration: self.calib.map(|source| CalibrationRequest {
                source,
                text_field: self.text_field,
                sequences: None,
                seq_len: self.seq_len,
            }),
            out: self.out,
        }
    }
}

impl UnfoldArgs {
    /// The request that was typed.
    pub fn request(self) -> UnfoldRequest {
        UnfoldRequest { bundle: self.bundle, out: self.out }
    }
}

impl ExportArgs {
    /// The request that was typed.
    pub fn request(self) -> ExportRequest {
        ExportRequest { path: self.path, format: self.to, out: self.out }
    }
}

impl InspectArgs {
    /// The request that was typed.
    pub fn request(self) -> InspectRequest {
        InspectRequest { path: self.path, base: self.base, html: self.html }
    }
}
