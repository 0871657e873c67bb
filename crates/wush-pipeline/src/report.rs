//! What each stage reports: the stable keys of `--format json`, with schemas made from these types. Times are in seconds and the
//! only values that differ between two runs on the same input.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize, Serializer};
use wush_eval::Protocol;
use wush_format::hash::Sha;
use wush_format::manifest::{Calibration, Equivalence, FileEntry, FoldReport, HeadReport, LayerReport, Solve};
use wush_quant::LayerBits;

use crate::Result;
pub use crate::calibrate::{GpuUse, Layers};
use crate::card::geometric_mean;
use crate::memory::MemoryPlan;
use crate::model::Model;

/// Whether all checks of a command passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// All passed.
    Ok,
    /// At least one did not.
    Failed,
}

/// The model that a stage worked on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModelInfo {
    /// Hub id, or the directory's own name.
    pub id: String,
    /// The model as it was typed: a directory or a hub id.
    pub argument: String,
    /// Commit of a hub model.
    pub revision: Option<String>,
    /// Family in wush's registry.
    pub family: String,
    /// Number of decoder layers.
    pub n_layers: usize,
    /// Hash over the weights.
    pub model_hash: Sha,
}

impl ModelInfo {
    /// Of an open model whose weights hash to `model_hash`.
    pub(crate) fn new(model: &Model, model_hash: Sha) -> Self {
        Self {
            id: model.id.clone(),
            argument: model.argument.clone(),
            revision: model.revision.clone(),
            family: model.spec.family.to_owned(),
            n_layers: model.spec.layers.len(),
            model_hash,
        }
    }
}

/// A file that a stage wrote.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WrittenFile {
    /// As given.
    pub path: String,
    /// Length in bytes.
    pub n_bytes: u64,
    /// SHA-256.
    pub sha256: Sha,
}

impl WrittenFile {
    /// From what a writer returns.
    pub(crate) fn new(path: &Path, (sha256, n_bytes): (Sha, u64)) -> Self {
        Self { path: path.display().to_string(), n_bytes, sha256 }
    }
}

/// A directory that a stage wrote.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WrittenDir {
    /// Where it is: as given, or with `.failed` after its name.
    pub path: String,
    /// Number of files.
    pub n_files: u64,
    /// Their lengths in bytes, summed.
    pub n_bytes: u64,
}

impl WrittenDir {
    /// Counts what lies in `dir` and says that it is at `path`.
    ///
    /// # Errors
    /// `Io`.
    pub(crate) fn measure(dir: &Path, path: &Path) -> Result<Self> {
        let (n_files, n_bytes) = measure(dir)?;
        Ok(Self { path: path.display().to_string(), n_files, n_bytes })
    }
}

fn measure(dir: &Path) -> Result<(u64, u64)> {
    let io = |e| wush_format::FormatError::io(dir, "list", e);
    let (mut n_files, mut n_bytes) = (0, 0);
    for entry in std::fs::read_dir(dir).map_err(io)? {
        let entry = entry.map_err(io)?;
        let metadata = entry.metadata().map_err(io)?;
        let (files, bytes) = if metadata.is_dir() { measure(&entry.path())? } else { (1, metadata.len()) };
        n_files += files;
        n_bytes += bytes;
    }
    Ok((n_files, n_bytes))
}

/// `wush calibrate --format json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CalibrateReport {
    /// The model.
    pub model: ModelInfo,
    /// What the sums are over.
    pub calibration: Calibration,
    /// `--shard`, as typed.
    pub shard: Option<String>,
    /// Sequences that an earlier run had done already.
    pub resumed_sequences: u64,
    /// What to know before the result is used: too little text, a check that did not run, what a server must be told.
    pub notes: Vec<String>,
    /// Estimated peak memory.
    pub memory: MemoryPlan,
    /// What was used of GPUs; none where the CPU computed.
    pub gpus: Vec<GpuUse>,
    /// The statistics file.
    pub out: WrittenFile,
    /// Wall time, without loading.
    pub seconds: f64,
}

/// `wush merge --format json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MergeReport {
    /// Model id of the statistics.
    pub model_id: String,
    /// What the sums are over now.
    pub calibration: Calibration,
    /// What to know before the result is used: too little text, a check that did not run, what a server must be told.
    pub notes: Vec<String>,
    /// Number of files that went in.
    pub inputs: u64,
    /// The statistics file.
    pub out: WrittenFile,
}

/// `wush solve --format json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SolveReport {
    /// Model id of the statistics.
    pub model_id: String,
    /// The transform and its constants.
    pub solve: Solve,
    /// What the statistics are over.
    pub calibration: Calibration,
    /// The solver's report, one entry a layer.
    pub layers: Vec<LayerReport>,
    /// What to know before the result is used: too little text, a check that did not run, what a server must be told.
    pub notes: Vec<String>,
    /// The transforms file.
    pub out: WrittenFile,
    /// Wall time.
    pub seconds: f64,
}

/// By how much rounding loss shrinks at equal bits against any orthogonal transform, on the calibration text itself: the
/// geometric mean over all heads of all layers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Gain {
    /// Of keys.
    pub key: f64,
    /// Of values.
    pub value: f64,
}

impl Gain {
    /// Of the solver's reports; none of none.
    pub fn of(layers: &[LayerReport]) -> Option<Self> {
        let mean = |role: fn(&LayerReport) -> &Vec<HeadReport>| {
            geometric_mean(layers.iter().flat_map(role).map(|head| head.gain()))
        };
        Some(Self { key: mean(|layer| &layer.key)?, value: mean(|layer| &layer.value)? })
    }
}

/// `wush fold --format json` and `wush convert --format json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ConvertReport {
    /// `failed` when the equivalence check did not pass; where `equivalence` is null it did not run and `ok` says nothing
    /// of it.
    pub verdict: Verdict,
    /// The model.
    pub model: ModelInfo,
    /// Device of the forward passes.
    pub device: String,
    /// What the statistics are over; none for a transform solved without.
    pub calibration: Option<Calibration>,
    /// The transform and its constants.
    pub solve: Solve,
    /// Predicted gain of all heads; none for a transform solved without statistics.
    pub gain: Option<Gain>,
    /// The solver's report, one entry a layer.
    pub layers: Vec<LayerReport>,
    /// Folding: dtype and error.
    pub fold: FoldReport,
    /// Element type of the folded tensors, "bf16".
    pub folded_dtype: String,
    /// Both checkpoints on the same text; none when there was no text to run or no sequence was asked for.
    pub equivalence: Option<Equivalence>,
    /// The text that they ran on.
    pub verify_text: Option<String>,
    /// What to know before the result is used: too little text, a check that did not run, what a server must be told.
    pub notes: Vec<String>,
    /// The bundle.
    pub out: WrittenDir,
    /// Estimated peak memory.
    pub memory: MemoryPlan,
    /// Wall time.
    pub seconds: f64,
}

/// `wush unfold --format json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct UnfoldReport {
    /// Id of the model that the bundle was made from.
    pub source_id: String,
    /// Hash over the source's weights.
    pub source_hash: Sha,
    /// Hash over the weights written: the source's up to rounding, so seldom the same.
    pub unfolded_hash: Sha,
    /// What to know before the checkpoint is used: that the bundle had failed its check.
    pub notes: Vec<String>,
    /// The checkpoint.
    pub out: WrittenDir,
    /// Wall time.
    pub seconds: f64,
}

/// `wush export --format json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ExportReport {
    /// What was exported: also `export.json` beside the files.
    pub export: ExportRecord,
    /// What to know before the files are used: layers without rotations, a RoPE scaling that the server must be told.
    pub notes: Vec<String>,
    /// The directory.
    pub out: WrittenDir,
}

/// What an export is, and what it is for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ExportRecord {
    /// The tool and its version.
    pub tool: String,
    /// Name of the server's format.
    pub format: String,
    /// Its version, as the files state it.
    pub format_version: u32,
    /// The model that the server must load.
    pub serves: Serves,
    /// Hash over that model's weights.
    pub model_hash: Sha,
    /// The transform and its constants.
    pub solve: Solve,
    /// One entry a layer, in layer order.
    pub layers: Vec<ExportedLayer>,
    /// The files, sorted by path.
    pub files: Vec<FileEntry>,
}

/// The model that exported files are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Serves {
    /// The bundle: its weights hold the value transform, and the values' rotation is the identity.
    Bundle,
    /// The checkpoint that the transforms were solved for: the server rotates values, too.
    Source,
}

/// One layer of an export.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ExportedLayer {
    /// Global layer id.
    pub layer: usize,
    /// KV heads.
    pub n_kv_heads: usize,
    /// Head dimension of keys.
    pub head_dim: usize,
    /// Largest |R Rᵀ − I| of the keys' rotations.
    pub key_error: f64,
    /// The same of the values'.
    pub value_error: f64,
}

/// `wush demo --format json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DemoReport {
    /// The conversion.
    pub convert: ConvertReport,
    /// The audit against the model that it was made from.
    pub inspect: wush_inspect::Report,
    /// The calibration text, continued over the bundle's cache.
    pub generate: GenerateReport,
    /// What the conversion was given.
    pub again: Again,
}

/// How a conversion can be repeated.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Again {
    /// `--calib`.
    pub text: String,
    /// `--sequences`.
    pub sequences: usize,
    /// `--seq-len`.
    pub seq_len: usize,
}

impl DemoReport {
    /// Whether conversion and audit both passed.
    pub fn passed(&self) -> bool {
        self.convert.verdict == Verdict::Ok && self.inspect.verdict == wush_inspect::Verdict::Ok
    }
}

/// What `wush eval ppl` found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EvalPplReport {
    /// The model, or the bundle.
    pub model: ModelInfo,
    /// Device of the forward passes, in f32; the cache's codec is the CPU's.
    pub device: String,
    /// The text: file name or hub id.
    pub text: String,
    /// Sequences scored, each from an empty cache.
    pub sequences: u64,
    /// Tokens of the longest.
    pub seq_len: u64,
    /// How they entered the cache.
    pub protocol: Protocol,
    /// How scales and zero points were stored.
    pub scale_dtype: String,
    /// How each transform was made, by its name in the rows.
    pub solves: BTreeMap<String, Solve>,
    /// What the transforms were calibrated on, a bundle's own included; none where no transform needed it.
    pub calibration: Option<Calibration>,
    /// Unquantized first, then transform by transform, quantizer by quantizer, bits by bits.
    pub rows: Vec<PerplexityRow>,
    /// What the reader of the numbers should know.
    pub notes: Vec<String>,
    /// Duration of the whole run.
    pub seconds: f64,
}

/// `wush eval recon`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EvalReconReport {
    /// The model, or the bundle.
    pub model: ModelInfo,
    /// The text: file name or hub id.
    pub text: String,
    /// Sequences measured.
    pub sequences: u64,
    /// Tokens of the longest.
    pub seq_len: u64,
    /// How scales and zero points were stored.
    pub scale_dtype: String,
    /// How each transform was made, by its name in the rows.
    pub solves: BTreeMap<String, Solve>,
    /// What the transforms were calibrated on, a bundle's own included; none where no transform needed it.
    pub calibration: Option<Calibration>,
    /// Transform by transform, quantizer by quantizer, bits by bits.
    pub rows: Vec<ReconRow>,
    /// What the reader of the numbers should know.
    pub notes: Vec<String>,
    /// Duration of the whole run.
    pub seconds: f64,
}

/// One cache and its relative squared errors: geometric means over layers, and each layer's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReconRow {
    /// Name in the transform registry; "bundle" for a bundle's own.
    pub transform: String,
    /// The quantizer.
    pub quantizer: String,
    /// Bits of a code; where they were allotted, their average over coordinates.
    #[serde(serialize_with = "whole_as_integer")]
    pub bits: f64,
    /// The average that was asked for (`auto:AVERAGE`), where bits were allotted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked_bits: Option<f64>,
    /// Bits of each layer, where they were allotted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allotment: Vec<AllottedBits>,
    /// Of query-key products, before scale and mask; keys quantized.
    pub products: f64,
    /// Of softmax probabilities; keys quantized.
    pub probabilities: f64,
    /// Of module outputs, after the output projection; keys quantized.
    pub keys: f64,
    /// The same, values quantized.
    pub values: f64,
    /// The same, both quantized.
    pub both: f64,
    /// Layer by layer.
    pub layers: Vec<ModuleRow>,
}

/// One attention module's relative squared errors, as in [`ReconRow`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModuleRow {
    /// Global layer id.
    pub layer: u64,
    /// Of query-key products.
    pub products: f64,
    /// Of softmax probabilities.
    pub probabilities: f64,
    /// Of module outputs, keys quantized.
    pub keys: f64,
    /// Of module outputs, values quantized.
    pub values: f64,
    /// Of module outputs, both quantized.
    pub both: f64,
}

/// Bits of one layer's keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AllottedBits {
    /// Global layer id.
    pub layer: u64,
    /// Bits of a key's code.
    pub keys: u8,
    /// Bits of a value's code.
    pub values: u8,
}

impl AllottedBits {
    /// Of every layer.
    pub(crate) fn list(bits: &[LayerBits]) -> Vec<Self> {
        let of_layer =
            |(layer, bits): (u64, &LayerBits)| Self { layer, keys: bits.keys.get(), values: bits.values.get() };
        (0..).zip(bits).map(of_layer).collect()
    }
}

/// 2 as `2` and 2.25 as `2.25`.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn whole_as_integer<S: Serializer>(x: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    if x.fract() == 0.0 { serializer.serialize_u64(*x as u64) } else { serializer.serialize_f64(*x) }
}

/// One cache and what it costs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PerplexityRow {
    /// Name in the transform registry; "bundle" for a bundle's own; "none" without quantization.
    pub transform: String,
    /// The quantizer as it was asked for; "none" without quantization.
    pub quantizer: String,
    /// Bits of a code, 16 without quantization; where they were allotted, their average over coordinates.
    #[serde(serialize_with = "whole_as_integer")]
    pub bits: f64,
    /// The average that was asked for (`auto:AVERAGE`), where bits were allotted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked_bits: Option<f64>,
    /// Bits of each layer, where they were allotted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allotment: Vec<AllottedBits>,
    /// e^nll.
    pub ppl: f64,
    /// Mean negative log likelihood, nats a token.
    pub nll: f64,
    /// Tokens scored.
    pub tokens: u64,
}

/// What `wush generate` made, and what it took.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GenerateReport {
    /// The model, or the bundle.
    pub model: ModelInfo,
    /// Whether the prompt went through the chat template.
    pub chat: bool,
    /// The text, without the prompt and without special tokens.
    pub text: String,
    /// Why it ends.
    pub stop: StopReason,
    /// The prompt: its tokens, with those of the chat template or of the tokenizer.
    pub prompt: Rate,
    /// What followed, with the token that ended the text.
    pub generated: Rate,
    /// The cache at the end.
    pub cache: CacheUse,
    /// Estimated memory.
    pub memory: GenerateMemory,
    /// What the reader of the text should know.
    pub notes: Vec<String>,
    /// Duration of the whole run.
    pub seconds: f64,
}

/// What `wush serve` did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ServeReport {
    /// The model, or the bundle.
    pub model: ModelInfo,
    /// HTTP requests.
    pub requests: u64,
    /// Tokens of prompts that were computed.
    pub prompt_tokens: u64,
    /// Tokens of prompts that the cache had from a prompt before.
    pub reused_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Texts that nobody waited for any more.
    pub cancelled: u64,
    /// Bytes that the cache held after the last text ended: 0, or there is a bug.
    pub cache_bytes_left: u64,
    /// Time that it served.
    pub seconds: f64,
}

/// Why a text ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum StopReason {
    /// The model ended it.
    EndOfText,
    /// It has as many tokens as were asked for.
    MaxNewTokens,
    /// The model has no more positions.
    Positions,
    /// Whoever read it stopped reading.
    Reader,
}

impl StopReason {
    /// In words.
    pub fn reason(self) -> &'static str {
        match self {
            Self::EndOfText => "the model ended the text",
            Self::MaxNewTokens => "as many tokens as were asked for",
            Self::Positions => "the model has no more positions",
            Self::Reader => "nobody reads on",
        }
    }
}

/// Tokens and their time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Rate {
    /// Tokens.
    pub tokens: u64,
    /// Time that they took.
    pub seconds: f64,
    /// Their quotient.
    pub tokens_per_second: f64,
}

impl Rate {
    /// Of `n_tokens` since `clock`.
    pub(crate) fn new(n_tokens: usize, clock: Instant) -> Self {
        let seconds = clock.elapsed().as_secs_f64();
        Self { tokens: n_tokens as u64, seconds, tokens_per_second: n_tokens as f64 / seconds.max(1e-9) }
    }
}

/// What a sequence took in the cache.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CacheUse {
    /// Bits of a code, 16 where nothing is quantized; where they were allotted, their average over coordinates.
    #[serde(serialize_with = "whole_as_integer")]
    pub bits: f64,
    /// Bits of each layer, where they were allotted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allotment: Vec<AllottedBits>,
    /// The quantizer; none where nothing is quantized.
    pub quantizer: Option<String>,
    /// Whether keys and queries were transformed by a bundle's sidecar.
    pub transforms: bool,
    /// S_sink: first tokens in full precision.
    pub sink: usize,
    /// S_keep: newest tokens in full precision.
    pub keep: usize,
    /// S_flush: tokens between both are quantized in multiples of this.
    pub flush: usize,
    /// Tokens held at the end.
    pub tokens: u64,
    /// Bytes allocated: codes, scales, windows, page lists.
    pub bytes: u64,
    /// Of these, pages: all that is quantized.
    pub packed_bytes: u64,
    /// What the same tokens take in BF16; of a sliding window, those that a query reads.
    pub bf16_bytes: u64,
    /// bytes / bf16_bytes.
    pub ratio: f64,
}

/// Estimated memory of a generation, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GenerateMemory {
    /// The checkpoint's shards, mapped: embedding and output head are read there.
    pub weights_map: u64,
    /// The layers' weights, kept as they are stored.
    pub weights: u64,
    /// The cache of all tokens, at most.
    pub cache: u64,
    /// Activations of a chunk, and logits.
    pub activations: u64,
    /// Sum without the map.
    pub total: u64,
}
