//! What the user asked for, typed but not yet checked against a model or the disk. `plan.rs` makes validated plans of
//! these; nothing downstream of a plan looks at them again.

mod bits;
mod size;

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

pub use wush_checkpoint::hub::HubOptions;
pub use wush_data::CalibSource;
pub use wush_eval::Protocol;
pub use wush_fold::FoldDtype;
use wush_format::monitor::Monitor;
pub use wush_generate::Sampling;
pub use wush_model::arch::RopeScaling;
pub use wush_quant::{Method, ScaleDtype};
pub use wush_runtime::Windows;
pub use wush_serve::Limits;
use wush_transform::Needs;

pub use bits::{CodeBits, KvBits};
pub use size::ByteSize;

/// What every stage is given beside its request.
pub struct Environment<'a> {
    /// Progress and interruption.
    pub monitor: &'a dyn Monitor,
    /// Where models and data sets come from.
    pub hub: HubOptions,
}

/// `--device`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The best device there is for the command; the report says which.
    Auto,
    /// The CPU.
    Cpu,
    /// A GPU: the first that can be used, or this one.
    Cuda(Option<usize>),
    /// Every GPU that can be used.
    AllCuda,
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let ordinal = text.strip_prefix("cuda:").and_then(|n| n.parse::<u16>().ok());
        match (text, ordinal) {
            ("auto", _) => Ok(Self::Auto),
            ("cpu", _) => Ok(Self::Cpu),
            ("cuda", _) => Ok(Self::Cuda(None)),
            ("cuda:all", _) => Ok(Self::AllCuda),
            (_, Some(ordinal)) => Ok(Self::Cuda(Some(ordinal.into()))),
            _ => Err("expected auto, cpu, cuda, cuda:N or cuda:all".to_owned()),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(None) => f.write_str("cuda"),
            Self::Cuda(Some(ordinal)) => write!(f, "cuda:{ordinal}"),
            Self::AllCuda => f.write_str("cuda:all"),
        }
    }
}

/// `--preset`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Preset {
    /// What measurements favour; the paper's method until something beats it.
    #[default]
    Default,
    /// The method exactly as published.
    Paper,
}

impl Preset {
    /// All presets, for help texts.
    pub const ALL: [Self; 2] = [Self::Default, Self::Paper];

    /// As typed.
    pub fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Paper => "paper",
        }
    }
}

impl fmt::Display for Preset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Preset {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|p| p.name() == text).ok_or_else(|| "expected default or paper".to_owned())
    }
}

/// `--center-keys`: which heads' keys are centred before they are transformed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CenterKeys {
    /// None.
    Never,
    /// All.
    Always,
    /// Those whose mean holds much of their energy.
    Auto,
}

impl CenterKeys {
    /// All choices, for help texts.
    pub const ALL: [Self; 3] = [Self::Never, Self::Always, Self::Auto];

    /// As typed.
    pub fn name(self) -> &'static str {
        match self {
            Self::Never => "never",
            Self::Always => "always",
            Self::Auto => "auto",
        }
    }
}

impl FromStr for CenterKeys {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|c| c.name() == text).ok_or_else(|| "expected never, always or auto".to_owned())
    }
}

/// `--hessian`: what calibration gathers for Hessians.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HessianChoice {
    /// Eq. 4's surrogates.
    #[default]
    Surrogate,
    /// Also the exact ones of Appendix C.
    Attention,
}

impl FromStr for HessianChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "surrogate" => Ok(Self::Surrogate),
            "attention" => Ok(Self::Attention),
            _ => Err("expected surrogate or attention".to_owned()),
        }
    }
}

impl fmt::Display for HessianChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Surrogate => "surrogate",
            Self::Attention => "attention",
        })
    }
}

/// `--second-pass`: what calibration reads the text a second time for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SecondPassChoice {
    /// Nothing.
    #[default]
    None,
    /// OSCAR's weighted values.
    Oscar,
}

impl FromStr for SecondPassChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::None),
            "oscar" => Ok(Self::Oscar),
            _ => Err("expected none or oscar".to_owned()),
        }
    }
}

impl fmt::Display for SecondPassChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Oscar => "oscar",
        })
    }
}

/// What calibration gathers beyond Gram matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Gather {
    /// `--hessian`.
    pub hessian: HessianChoice,
    /// `--second-pass`.
    pub second_pass: SecondPassChoice,
}

impl Gather {
    /// What several transforms are made from.
    pub(crate) fn for_transforms<'a>(kinds: impl IntoIterator<Item = &'a wush_transform::TransformKind>) -> Self {
        kinds.into_iter().map(Self::for_transform).fold(Self::default(), |all, one| Self {
            hessian: if one.hessian == HessianChoice::Attention { one.hessian } else { all.hessian },
            second_pass: if one.second_pass == SecondPassChoice::Oscar { one.second_pass } else { all.second_pass },
        })
    }

    /// What a transform is made from.
    pub(crate) fn for_transform(kind: &wush_transform::TransformKind) -> Self {
        match kind.needs {
            Needs::Nothing => Self::default(),
            Needs::AttentionHessians => Self { hessian: HessianChoice::Attention, ..Self::default() },
            Needs::LayerCovariance | Needs::HeadCovariance => {
                Self { second_pass: SecondPassChoice::Oscar, ..Self::default() }
            }
        }
    }
}

/// `--shard K/N`: the K-th of N contiguous shares of the sequences, K from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    index: usize,
    count: usize,
}

impl Shard {
    /// The share's range of `n` items; the shares of one N tile `0..n` in order.
    pub fn range(self, n: usize) -> std::ops::Range<usize> {
        // u128: the product of two usize fits.
        let cut = |i: usize| (i as u128 * n as u128 / self.count as u128) as usize;
        cut(self.index - 1)..cut(self.index)
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index, self.count)
    }
}

impl FromStr for Shard {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = text.split_once('/').and_then(|(k, n)| Some((k.parse().ok()?, n.parse().ok()?)));
        match parsed {
            Some((index, count)) if 1 <= index && index <= count => Ok(Self { index, count }),
            _ => Err("expected K/N with 1 <= K <= N, such as 2/4".to_owned()),
        }
    }
}

/// The model, and how to run it.
#[derive(Debug, Clone)]
pub struct ModelRequest {
    /// A directory, or a hub id `org/name[@revision]`.
    pub model: String,
    /// `--device`.
    pub device: DeviceChoice,
    /// `--rope-scaling`, instead of the configuration's own.
    pub rope_scaling: Option<RopeScaling>,
}

/// The calibration text.
#[derive(Debug, Clone)]
pub struct CalibrationRequest {
    /// `--calib`.
    pub source: CalibSource,
    /// `--text-field`.
    pub text_field: String,
    /// `--sequences`; the source's kind decides when absent.
    pub sequences: Option<usize>,
    /// `--seq-len`, capped by the model when absent.
    pub seq_len: Option<usize>,
}

/// The transform and its constants.
#[derive(Debug, Clone, PartialEq)]
pub struct SolveSettings {
    /// `--transform`, a name of the registry.
    pub transform: String,
    /// `--preset`, where it was given.
    pub preset: Option<Preset>,
    /// `--damping`, γ of Eq. 1, instead of the paper's.
    pub damping: Option<f64>,
    /// `--seed` of random matrices, where it was given.
    pub seed: Option<u64>,
    /// `--exponent`, instead of the preset's.
    pub exponent: Option<f64>,
    /// `--factor`, a name of the registry, instead of the preset's.
    pub factor: Option<String>,
    /// `--center-keys`, instead of the preset's.
    pub center_keys: Option<CenterKeys>,
    /// `--feedback`, instead of the preset's.
    pub feedback: Option<bool>,
}

impl SolveSettings {
    /// A transform as a preset has it.
    pub fn of_preset(transform: &str, preset: Preset) -> Self {
        Self {
            transform: transform.to_owned(),
            preset: Some(preset),
            damping: None,
            seed: None,
            exponent: None,
            factor: None,
            center_keys: None,
            feedback: None,
        }
    }
}

/// The equivalence check.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct VerifySettings {
    /// `--verify-sequences`: how many of the calibration sequences; 0 skips the check.
    pub sequences: usize,
    /// `--tolerance`, instead of the default for the folded element type.
    pub tolerance: Option<f64>,
}

/// `wush calibrate`.
#[derive(Debug, Clone)]
pub struct CalibrateRequest {
    /// The model.
    pub model: ModelRequest,
    /// The text.
    pub calibration: CalibrationRequest,
    /// `--hessian` and `--second-pass`.
    pub gather: Gather,
    /// `--max-gpu-memory`.
    pub max_gpu_memory: Option<ByteSize>,
    /// `--shard`.
    pub shard: Option<Shard>,
    /// `--resume`.
    pub resume: bool,
    /// `--out`, a statistics file.
    pub out: PathBuf,
}

/// `wush merge`.
#[derive(Debug, Clone)]
pub struct MergeRequest {
    /// Statistics files.
    pub inputs: Vec<PathBuf>,
    /// `--out`, a statistics file.
    pub out: PathBuf,
}

/// `wush solve`.
#[derive(Debug, Clone)]
pub struct SolveRequest {
    /// A statistics file.
    pub statistics: PathBuf,
    /// The transform.
    pub settings: SolveSettings,
    /// `--out`, a transforms file.
    pub out: PathBuf,
}

/// `wush fold`.
#[derive(Debug, Clone)]
pub struct FoldRequest {
    /// The model.
    pub model: ModelRequest,
    /// A transforms file.
    pub transforms: PathBuf,
    /// `--fold-dtype`.
    pub dtype: FoldDtype,
    /// Text for the equivalence check; none skips it.
    pub calibration: Option<CalibrationRequest>,
    /// The equivalence check.
    pub verify: VerifySettings,
    /// `--out`, a directory.
    pub out: PathBuf,
}

/// `wush convert`.
#[derive(Debug, Clone)]
pub struct ConvertRequest {
    /// The model.
    pub model: ModelRequest,
    /// The text.
    pub calibration: CalibrationRequest,
    /// `--max-gpu-memory`.
    pub max_gpu_memory: Option<ByteSize>,
    /// The transform.
    pub settings: SolveSettings,
    /// `--fold-dtype`.
    pub dtype: FoldDtype,
    /// The equivalence check.
    pub verify: VerifySettings,
    /// `--resume`.
    pub resume: bool,
    /// `--out`, a directory.
    pub out: PathBuf,
}

/// `wush unfold`.
#[derive(Debug, Clone)]
pub struct UnfoldRequest {
    /// A bundle.
    pub bundle: PathBuf,
    /// `--out`, a directory.
    pub out: PathBuf,
}

/// `wush export`.
#[derive(Debug, Clone)]
pub struct ExportRequest {
    /// A bundle, or a transforms file.
    pub path: PathBuf,
    /// `--to`: a name of `wush_export::FORMATS`.
    pub format: String,
    /// `--out`, a directory.
    pub out: PathBuf,
}

/// `wush inspect`.
#[derive(Debug, Clone)]
pub struct InspectRequest {
    /// A bundle, transforms or statistics file.
    pub path: PathBuf,
    /// `--base`: a directory or hub id.
    pub base: Option<String>,
    /// `--html`: a page to write.
    pub html: Option<PathBuf>,
}

/// `wush demo`.
#[derive(Debug, Clone)]
pub struct DemoRequest {
    /// The bundled model's files: name and content.
    pub files: &'static [(&'static str, &'static [u8])],
    /// `--out`, a directory.
    pub out: PathBuf,
}

/// What every evaluation is told; all of it for `wush eval recon`.
#[derive(Debug, Clone)]
pub struct EvalRequest {
    /// The model, or a bundle.
    pub model: ModelRequest,
    /// The text to evaluate on.
    pub text: CalibrationRequest,
    /// Bits of a code.
    pub bits: Vec<CodeBits>,
    /// Quantizers; where there is none, what suits each transform.
    pub quantizers: Vec<Method>,
    /// How scales and zero points are stored.
    pub scales: ScaleDtype,
    /// What is compared.
    pub transforms: TransformsRequest,
    /// `--html`: a page to write.
    pub html: Option<PathBuf>,
}

/// `wush eval ppl`.
#[derive(Debug, Clone)]
pub struct EvalPplRequest {
    /// What is evaluated.
    pub eval: EvalRequest,
    /// How the text enters the cache.
    pub protocol: Protocol,
}

/// The transforms that an evaluation compares.
#[derive(Debug, Clone)]
pub struct TransformsRequest {
    /// `--transform`: names of the registry; none for a bundle.
    pub names: Option<Vec<String>>,
    /// How they are solved; its own transform is not looked at.
    pub settings: SolveSettings,
    /// What they are solved from.
    pub statistics: StatisticsSource,
}

/// What an evaluation's transforms are solved from.
#[derive(Debug, Clone)]
pub enum StatisticsSource {
    /// Nothing was named.
    None,
    /// `--stats`: a statistics file.
    File(PathBuf),
    /// `--calib`: text; as long as what is evaluated unless another length is asked for.
    Text(CalibrationRequest),
}

/// `--chat`: whether the prompt is a message to the model, through its chat template, or text to continue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Chat {
    /// A message where the checkpoint has a template.
    #[default]
    Auto,
    /// A message; refused without a template.
    Always,
    /// Text to continue.
    Never,
}

impl FromStr for Chat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "always" => Ok(Self::Always),
            "never" => Ok(Self::Never),
            _ => Err("expected auto, always or never".to_owned()),
        }
    }
}

impl fmt::Display for Chat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Always => "always",
            Self::Never => "never",
        })
    }
}

/// Where a prompt comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PromptSource {
    /// `--prompt`.
    Text(String),
    /// `--prompt-file`.
    File(PathBuf),
    /// `--prompt-file -`.
    Stdin,
}

/// The windows of a cache as far as they are given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WindowOptions {
    /// `--sink`.
    pub sink: Option<usize>,
    /// `--keep`.
    pub keep: Option<usize>,
    /// `--flush`.
    pub flush: Option<usize>,
}

impl WindowOptions {
    /// What is not given is `default`'s.
    pub(crate) fn or(self, default: Windows) -> Windows {
        let Self { sink, keep, flush } = self;
        Windows {
            sink: sink.unwrap_or(default.sink),
            keep: keep.unwrap_or(default.keep),
            flush: flush.unwrap_or(default.flush),
        }
    }
}

impl From<Windows> for WindowOptions {
    fn from(Windows { sink, keep, flush }: Windows) -> Self {
        Self { sink: Some(sink), keep: Some(keep), flush: Some(flush) }
    }
}

/// `wush generate`.
#[derive(Debug, Clone)]
pub struct GenerateRequest {
    /// The model, or a bundle.
    pub model: ModelRequest,
    /// The prompt.
    pub prompt: PromptSource,
    /// `--system`: a message before it.
    pub system: Option<String>,
    /// `--chat`.
    pub chat: Chat,
    /// How keys and values are kept.
    pub cache: CacheRequest,
    /// `--max-new-tokens`.
    pub max_new_tokens: usize,
    /// `--temperature`, `--top-k`, `--top-p` and `--seed`.
    pub sampling: Sampling,
}

/// A model's cache.
#[derive(Debug, Clone)]
pub struct CacheRequest {
    /// `--kv-bits`; the model's kind decides when absent.
    pub kv_bits: Option<KvBits>,
    /// `--quantizer`; what suits the bundle where there is none.
    pub quantizer: Option<Method>,
    /// `--sink`, `--keep` and `--flush`.
    pub windows: WindowOptions,
    /// `--chunk`: tokens of the prompt that enter the cache together.
    pub chunk: usize,
}

/// `wush serve`.
#[derive(Debug, Clone)]
pub struct ServeRequest {
    /// The model, or a bundle.
    pub model: ModelRequest,
    /// How keys and values are kept.
    pub cache: CacheRequest,
    /// `--host` and `--port`.
    pub address: SocketAddr,
    /// `--api-key`.
    pub api_key: Option<String>,
    /// `--model-name`; the model's own when absent.
    pub model_name: Option<String>,
    /// The bounds; `chunk` is the cache's.
    pub limits: Limits,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_tile_the_sequences_in_order() {
        for (n, count) in [(0, 1), (1, 3), (7, 3), (16, 4), (128, 7)] {
            let mut next = 0;
            for index in 1..=count {
                let range = Shard { index, count }.range(n);
                assert_eq!(range.start, next);
                next = range.end;
            }
            assert_eq!(next, n);
        }
    }

    #[test]
    fn bad_shards_are_refused() {
        for text in ["", "1", "0/4", "5/4", "a/b", "1/0", "-1/2", "1/2/3"] {
            assert!(text.parse::<Shard>().is_err(), "{text}");
        }
        assert_eq!("2/4".parse::<Shard>().expect("valid").to_string(), "2/4");
    }

    #[test]
    fn devices_read_back_as_they_were_typed() {
        for text in ["auto", "cpu", "cuda", "cuda:1", "cuda:all"] {
            assert_eq!(text.parse::<DeviceChoice>().expect("a known device").to_string(), text);
        }
        for text in ["gpu", "cuda:", "cuda:-1", "cuda:99999"] {
            assert!(text.parse::<DeviceChoice>().is_err(), "{text}");
        }
    }
}
