//! `wush/manifest.json`: what was made from what. Every list is sorted; no time stamp, no path of a machine, so the
//! same input gives the same bytes.

use std::collections::BTreeSet;
use std::path::{Component, Path};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::atomic::write_file;
use crate::bundle::{MANIFEST, WUSH_DIR};
use crate::hash::Sha;
use crate::json::{Object, read_bounded, shown};
use crate::text::{is_plain, refuse_active_json};
use crate::{FormatError, Result};

/// Version of the manifest's layout.
pub const MANIFEST_VERSION: u32 = 2;
/// Longest manifest, in bytes: some hundred times that of a model with 100 layers of 8 heads.
pub const MAX_MANIFEST_BYTES: u64 = 64 << 20;
/// [`Basis::kind`] of a bundle: values and output projections are in transformed coordinates.
pub const FOLDED_VALUES: &str = "folded-values";
/// Kinds of devices that statistics are summed on.
pub const DEVICES: [&str; 2] = ["cpu", "cuda"];
/// Arithmetic of the forward pass there.
pub const COMPUTES: [&str; 2] = ["f32", "bf16"];
/// What messages call the file.
const KIND: &str = "manifest";

/// The manifest of a bundle.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Layout version of this file.
    pub format_version: u32,
    /// The tool and its version, "wush 0.1.0".
    pub tool: String,
    /// `complete`, or `failed` when the equivalence check did not pass.
    pub status: Status,
    /// What was converted.
    pub source: Source,
    /// The basis of the folded weights: adapters made for the source do not fit it.
    pub basis: Basis,
    /// The transform and how it was solved.
    pub solve: Solve,
    /// What the statistics came from; none for transforms that need none.
    pub calibration: Option<Calibration>,
    /// One entry a layer, in layer order.
    pub layers: Vec<LayerReport>,
    /// Folding: dtype and error.
    pub fold: FoldReport,
    /// Both checkpoints on the same text; none when it was skipped.
    pub equivalence: Option<Equivalence>,
    /// What quantization does to each attention module; absent when the check was skipped, and in bundles of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sensitivity: Option<Sensitivity>,
    /// Every file of the bundle but this manifest, sorted by path.
    pub files: Vec<FileEntry>,
}

/// Whether a bundle may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// All checks passed.
    Complete,
    /// A check failed; kept for a look, not for use.
    Failed,
}

/// Where the checkpoint came from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// Hub id, or the directory's own name for a local one.
    pub id: String,
    /// Commit of the hub repository; none for a local directory.
    pub revision: Option<String>,
    /// Model family in wush's registry.
    pub family: String,
    /// Hash over the weights (names and hashes of all shards).
    pub model_hash: Sha,
    /// Every file of the source, sorted by path.
    pub files: Vec<FileEntry>,
}

/// A file, its length and its digest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Relative path with forward slashes.
    pub path: String,
    /// Length in bytes.
    pub n_bytes: u64,
    /// SHA-256.
    pub sha256: Sha,
}

/// The hash that identifies a model: SHA-256 over `name NUL hex-digest LF` of every shard, sorted by name. The order of
/// `shards` and their lengths do not matter.
pub fn weights_hash(shards: &[FileEntry]) -> Sha {
    let lines: BTreeSet<String> = shards.iter().map(|file| format!("{}\0{}\n", file.path, file.sha256)).collect();
    Sha::of(lines.into_iter().collect::<String>().as_bytes())
}

/// Identity of the coordinates that the folded weights live in.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Basis {
    /// "folded-values": values and output projections are in transformed coordinates.
    pub kind: String,
    /// Hash over the folded weights: what the sidecars name as their model.
    pub model_hash: Sha,
}

/// How the transforms were solved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Solve {
    /// Registry name of the transform.
    pub transform: String,
    /// Preset: "default" or "paper".
    pub preset: String,
    /// Damping γ of Eq. 1.
    pub damping: f64,
    /// Seed of random matrices.
    pub seed: u64,
    /// Exponent p of Λ in T, 0 to ½; ¼ in Eq. 1.
    pub exponent: f64,
    /// Name of T's last, orthogonal factor; "hadamard" in Eq. 1.
    pub factor: String,
    /// Which heads' keys were to be centred: "never", "always" or "auto".
    pub center_keys: String,
    /// Whether there are feedback matrices for the encoder.
    pub feedback: bool,
    /// SHA-256 of the statistics file.
    pub stats_hash: Option<Sha>,
}

impl Solve {
    /// As published, without statistics: γ = 0.01, p = ¼, the Hadamard factor, keys as they are, no feedback.
    pub fn as_published(transform: &str) -> Self {
        Self {
            transform: transform.to_owned(),
            preset: "paper".to_owned(),
            damping: 0.01,
            seed: 0,
            exponent: 0.25,
            factor: "hadamard".to_owned(),
            center_keys: "never".to_owned(),
            feedback: false,
            stats_hash: None,
        }
    }
}

/// What the statistics were summed over.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// As given: file name or hub id, without directories of this machine.
    pub source: String,
    /// SHA-256 over the digests of all sequences, in order (each over its length and token ids), so that merged statistics
    /// can state it, too.
    pub tokens_hash: Sha,
    /// Number of sequences.
    pub sequences: u64,
    /// Number of token positions summed over.
    pub tokens: u64,
    /// Longest sequence, in tokens: beyond it the statistics say nothing.
    pub max_seq_len: u64,
    /// RoPE scaling asked for, "yarn:4"; none for the checkpoint's own.
    pub rope_scaling: Option<String>,
    /// Device of the forward pass, "cpu".
    pub device: String,
    /// Arithmetic of the forward pass, "f32".
    pub compute: String,
}

impl Calibration {
    /// Whether the counts can be those of one calibration (see [`counts_fit`]), of at least one token.
    pub fn is_consistent(&self) -> bool {
        self.tokens > 0 && counts_fit(self.sequences, self.max_seq_len, self.tokens)
    }
}

/// Whether `sequences`, the longest of `max_seq_len` tokens and none empty, can hold `tokens` together.
pub fn counts_fit(sequences: u64, max_seq_len: u64, tokens: u64) -> bool {
    let least = max_seq_len.saturating_add(sequences.saturating_sub(1));
    (sequences == 0) == (tokens == 0) && least <= tokens && tokens <= sequences.saturating_mul(max_seq_len)
}

/// The solver's report on one layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LayerReport {
    /// Global layer id.
    pub layer: usize,
    /// One entry a KV head.
    pub key: Vec<HeadReport>,
    /// One entry a KV head.
    pub value: Vec<HeadReport>,
    /// KV heads whose keys are centred, rising: those with a mean that is not all zero. Their Gram matrix is a covariance.
    pub centered_keys: Vec<usize>,
}

/// The solver's report on one transform. Traces are of the undamped matrices; ratios have no unit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HeadReport {
    /// Condition number of the damped Gram matrix.
    pub cond_gram: f64,
    /// Condition number of the damped Hessian.
    pub cond_hessian: f64,
    /// Condition number of T itself (2-norm).
    pub cond_transform: f64,
    /// Numerical rank of the undamped Gram matrix.
    pub rank_gram: usize,
    /// Numerical rank of the undamped Hessian.
    pub rank_hessian: usize,
    /// Coordinates whose Gram and Hessian diagonals are both zero.
    pub dead_channels: usize,
    /// tr(T M Tᵀ) tr(T^{-T} H T^{-1}) over Theorem 3's bound: at least 1.
    pub trace_product_over_bound: f64,
    /// tr(M) tr(H) over this transform's trace product: by how much Eq. 16's rounding loss shrinks at equal bits against
    /// the identity, the Hadamard and every other orthogonal transform (they leave both traces, so this loss, unchanged).
    pub predicted_gain: f64,
    /// By how much error feedback shrinks that loss further; absent without feedback matrices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub feedback_gain: Option<f64>,
    /// Largest relative deviation of the diagonal of T^{-T} H T^{-1} from its mean (Eq. 21).
    pub imbalance: f64,
    /// ‖μ‖ of the mean that is taken from the head's keys; absent where it is not centred, and of values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mean_norm: Option<f64>,
}

impl HeadReport {
    /// By how much the rounding loss shrinks at equal bits, with all that the encoder does.
    pub fn gain(&self) -> f64 {
        self.predicted_gain * self.feedback_gain.unwrap_or(1.0)
    }
}

/// Folding's own error.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FoldReport {
    /// "keep" or "f32".
    pub dtype: String,
    /// Largest over heads of ‖W_O'W_V' − W_O W_V‖_F / ‖W_O W_V‖_F after rounding.
    pub max_rel_error: f64,
    /// The layer where it is largest.
    pub worst_layer: usize,
}

/// Both checkpoints run over the same calibration sequences.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Equivalence {
    /// Positions scored.
    pub tokens: u64,
    /// Mean NLL of the source, nats a token.
    pub nll_source: f64,
    /// Mean NLL of the bundle with its key transforms applied.
    pub nll_bundle: f64,
    /// Mean KL(source ‖ bundle), nats a token.
    pub mean_kl: f64,
    /// Largest absolute logit difference.
    pub max_logit_diff: f64,
    /// Largest absolute NLL difference of one token.
    pub max_nll_diff: f64,
    /// Tolerance on |nll_bundle − nll_source| / nll_source, and on mean_kl / nll_source.
    pub tolerance: f64,
    /// Whether it passed.
    pub passed: bool,
}

/// What quantizing the keys or the values of one attention module alone does to its output, on the text of the equivalence
/// check: what bits are allotted by.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Sensitivity {
    /// The quantizer.
    pub quantizer: String,
    /// Bits of a code.
    pub bits: u8,
    /// Positions measured.
    pub tokens: u64,
    /// One entry a layer, in layer order.
    pub layers: Vec<ModuleError>,
}

/// ‖Ô − O‖² / ‖O‖² of one attention module's output O after its projection (Section 5.1), summed over positions.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModuleError {
    /// Keys quantized, values exact.
    pub keys: f64,
    /// Values quantized, keys exact.
    pub values: f64,
}

impl Manifest {
    /// Reads and validates a manifest (known version, sorted lists, paths that stay inside the bundle).
    ///
    /// # Errors
    /// `Io`, `Invalid`, `Version`.
    pub fn load(path: &Path) -> Result<Self> {
        Self::parse(path, &read_bounded(path, KIND, MAX_MANIFEST_BYTES)?)
    }

    /// The same on text that is in memory already; `path` is what messages call it.
    ///
    /// # Errors
    /// `Invalid`, `Version`.
    pub fn parse(path: &Path, json: &[u8]) -> Result<Self> {
        let invalid = |e: serde_json::Error| FormatError::invalid(path, KIND, e.to_string());
        // The version first: another version's fields are not this one's errors.
        let Object(Versioned { format_version }) = serde_json::from_slice(json).map_err(invalid)?;
        if format_version != MANIFEST_VERSION {
            let found = format_version.to_string();
            return Err(FormatError::Version { path: path.to_owned(), kind: KIND, found, expected: MANIFEST_VERSION });
        }
        let Object::<Self>(manifest) = serde_json::from_slice(json).map_err(invalid)?;
        refuse_active_json(json).map_err(|detail| FormatError::invalid(path, KIND, detail))?;
        manifest.check().map_err(|detail| FormatError::invalid(path, KIND, detail))?;
        Ok(manifest)
    }

    /// Writes it as pretty JSON with a final newline, atomically.
    ///
    /// # Errors
    /// `Io`, `Busy`; `Invalid` for a manifest that `load` would refuse (an unsorted list, a number that is not finite).
    pub fn save(&self, path: &Path) -> Result<()> {
        let mut json = serde_json::to_vec_pretty(self).map_err(|e| FormatError::invalid(path, KIND, e.to_string()))?;
        json.push(b'\n');
        // Also finds NaN and infinities: JSON has none, they become null.
        Self::parse(path, &json)?;
        write_file(path, &json)
    }

    fn check(&self) -> Result<(), String> {
        check_files("source.files", &self.source.files)?;
        check_files("files", &self.files)?;
        let own = format!("{WUSH_DIR}/{MANIFEST}");
        if self.files.iter().any(|file| file.path == own) {
            return Err(format!("files: lists {own} itself"));
        }
        self.sensitivity.iter().try_for_each(|sensitivity| check_sensitivity(sensitivity, self.layers.len()))?;
        let ids: Vec<_> = self.layers.iter().map(|layer| layer.layer).collect();
        if let Some(pair) = ids.windows(2).find(|pair| pair[0] >= pair[1]) {
            return Err(format!("layers: expected rising layer ids, found {} before {}", pair[0], pair[1]));
        }
        match self.layers.iter().find(|layer| layer.key.len() != layer.value.len() || layer.key.is_empty()) {
            Some(layer) => Err(format!(
                "layer {}: expected as many value heads as key heads and at least one, found {} and {}",
                layer.layer,
                layer.value.len(),
                layer.key.len()
            )),
            None => self.layers.iter().try_for_each(check_centered),
        }
    }
}

/// The one key that every version has.
#[derive(Deserialize)]
struct Versioned {
    format_version: u32,
}

/// One entry a layer, each a relative squared error; without a solver's report the manifest does not know how many.
fn check_sensitivity(sensitivity: &Sensitivity, n_layers: usize) -> Result<(), String> {
    let Sensitivity { tokens, layers, .. } = sensitivity;
    if (n_layers > 0 && layers.len() != n_layers) || *tokens == 0 {
        let found = layers.len();
        return Err(format!(
            "sensitivity: expected {n_layers} layers and some tokens, found {found} layers, {tokens} tokens"
        ));
    }
    let is_error = |error: f64| error.is_finite() && error >= 0.0;
    match layers.iter().position(|layer| !is_error(layer.keys) || !is_error(layer.values)) {
        Some(at) => Err(format!("sensitivity: entry {at} is no pair of squared errors: {:?}", layers[at])),
        None => Ok(()),
    }
}

/// Rising, and heads of the layer.
fn check_centered(layer: &LayerReport) -> Result<(), String> {
    let LayerReport { layer, key, centered_keys, .. } = layer;
    let rising = centered_keys.is_sorted_by(|a, b| a < b);
    if rising && centered_keys.last().is_none_or(|&head| head < key.len()) {
        return Ok(());
    }
    Err(format!("layer {layer}: expected centered_keys rising and below {}, found {centered_keys:?}", key.len()))
}

fn check_files(list: &str, files: &[FileEntry]) -> Result<(), String> {
    if let Some(file) = files.iter().find(|file| !is_inside(&file.path)) {
        return Err(format!("{list}: {} is not a relative path that stays inside", shown(&file.path)));
    }
    match files.windows(2).find(|pair| pair[0].path >= pair[1].path) {
        Some(pair) => Err(format!(
            "{list}: expected paths sorted and unique, found {} before {}",
            shown(&pair[0].path),
            shown(&pair[1].path)
        )),
        None => Ok(()),
    }
}

/// Whether `path` is relative, has only plain components, forward slashes and no control characters: joined to a
/// directory, it names something below it on every system.
pub fn is_inside(path: &str) -> bool {
    let plain = |part: &str| !matches!(part, "" | "." | "..");
    path.split('/').all(plain)
        && !path.contains('\\')
        && is_plain(path)
        && Path::new(path).components().all(|part| matches!(part, Component::Normal(_)))
}
