//! What an inspection found: plain data, the same for text, JSON and HTML.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use wush_format::hash::Sha;
use wush_format::manifest::HeadReport;
use wush_format::text::printable;

/// The report of `wush inspect`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Report {
    /// What was inspected, as it was named.
    pub path: String,
    /// What it was compared with.
    pub base: Option<String>,
    /// What it is.
    pub kind: Kind,
    /// `failed` when any check failed.
    pub verdict: Verdict,
    /// In the order in which they were made.
    pub checks: Vec<Check>,
    /// Checks that passed and yet leave something to know, each as "name: detail".
    pub notes: Vec<String>,
    /// Name and value, in an order for reading.
    pub facts: Vec<Fact>,
    /// Hash over the weights that it is, or belongs to.
    pub model_hash: Option<Sha>,
    /// Longest calibrated sequence in tokens: beyond it the transforms were never measured.
    pub calibrated_length: Option<u64>,
    /// One entry a layer, in layer order.
    pub layers: Vec<LayerAudit>,
}

/// What kind of thing was inspected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A folded checkpoint with its `wush/` folder.
    Bundle,
    /// A checkpoint without `wush/`.
    Checkpoint,
    /// Transforms, from `wush solve`.
    Transforms,
    /// Statistics, from `wush calibrate`.
    Statistics,
    /// A bundle's key sidecar, alone.
    KeySidecar,
    /// A bundle's value sidecar, alone.
    ValueSidecar,
    /// A bundle's feedback for values, alone.
    ValueFeedback,
}

impl Kind {
    /// For a sentence.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bundle => "bundle",
            Self::Checkpoint => "checkpoint",
            Self::Transforms => "transforms file",
            Self::Statistics => "statistics file",
            Self::KeySidecar => "key sidecar",
            Self::ValueSidecar => "value sidecar",
            Self::ValueFeedback => "values' feedback",
        }
    }
}

/// Whether what was inspected can be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Every check passed.
    Ok,
    /// A check failed.
    Failed,
}

/// One check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Check {
    /// A fixed name, in words.
    pub name: String,
    /// Whether it passed.
    pub ok: bool,
    /// What was expected and what was found.
    pub detail: String,
}

impl Check {
    /// As [`Report::notes`] repeats it.
    fn note(&self) -> String {
        format!("{}: {}", self.name, self.detail)
    }
}

/// How a check ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Ok,
    /// Passed, with something to know.
    Noted,
    Failed,
}

/// One fact about what was inspected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Fact {
    /// Name.
    pub name: String,
    /// Value.
    pub value: String,
}

/// One layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LayerAudit {
    /// Global layer id.
    pub layer: usize,
    /// One entry a KV head.
    pub heads: Vec<HeadAudit>,
}

/// One KV head. What could not be known from the files at hand is absent.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HeadAudit {
    /// KV head.
    pub head: usize,
    /// The solver's report on the key transform (of a statistics file: of the transform it would give).
    pub key: Option<HeadReport>,
    /// The solver's report on the value transform.
    pub value: Option<HeadReport>,
    /// Condition number (2-norm) of the stored key transform; 1 for an orthogonal one.
    pub key_condition: Option<f64>,
    /// Condition number (2-norm) of the stored value transform.
    pub value_condition: Option<f64>,
    /// Whether the head's keys are centred; none where that is not known.
    pub key_centered: Option<bool>,
    /// Largest |key · queryᵀ − I| over its bound; at most 1 passes.
    pub key_query_excess: Option<f64>,
    /// ‖Σk‖² / (n Σ‖k‖²): the share of the keys' energy that their mean holds, 0 to 1.
    pub mean_key_energy: Option<f64>,
    /// The fold, against the base.
    pub fold: Option<FoldAudit>,
}

/// One head's fold. An excess is the largest difference over what rounding explains; at most 1 passes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FoldAudit {
    /// ‖W_O'W_V' − W_O W_V‖_F / ‖W_O W_V‖_F; none when a number was not finite.
    pub rel_error: Option<f64>,
    /// Largest excess of the checks that need the two checkpoints alone, over what one rounding explains (of a plain
    /// checkpoint: two, of a fold and its undoing); none when a number was not finite.
    pub weights_excess: Option<f64>,
    /// Largest excess of the check that the value sidecar's transform is the one folded; none without a usable sidecar.
    pub sidecar_excess: Option<f64>,
    /// Whether all passed.
    pub ok: bool,
}

impl Report {
    /// A report without checks.
    pub(crate) fn new(path: &std::path::Path, kind: Kind) -> Self {
        Self {
            path: printable(&path.display().to_string()).into_owned(),
            base: None,
            kind,
            verdict: Verdict::Ok,
            checks: Vec::new(),
            notes: Vec::new(),
            facts: Vec::new(),
            model_hash: None,
            calibrated_length: None,
            layers: Vec::new(),
        }
    }

    /// Adds a check and lowers the verdict when it failed. Details repeat names of files and tensors: what could draw on a
    /// terminal is escaped here, for all reports.
    pub(crate) fn check(&mut self, name: &str, ok: bool, detail: impl Into<String>) {
        if !ok {
            self.verdict = Verdict::Failed;
        }
        let detail = printable(&detail.into()).into_owned();
        self.checks.push(Check { name: name.to_owned(), ok, detail });
    }

    /// Adds a check that passed and leaves something to know.
    pub(crate) fn warn(&mut self, name: &str, detail: impl Into<String>) {
        self.check(name, true, detail);
        self.notes.extend(self.checks.last().map(Check::note));
    }

    /// What a check says in a word: "ok", "note" or "FAILED".
    pub(crate) fn state(&self, check: &Check) -> State {
        match check.ok {
            false => State::Failed,
            true if self.notes.contains(&check.note()) => State::Noted,
            true => State::Ok,
        }
    }

    /// Adds a check that passes with one text or fails with another.
    pub(crate) fn check_result(&mut self, name: &str, result: Result<String, String>) {
        let ok = result.is_ok();
        self.check(name, ok, result.unwrap_or_else(|detail| detail));
    }

    pub(crate) fn fact(&mut self, name: &str, value: impl Into<String>) {
        let value = printable(&value.into()).into_owned();
        self.facts.push(Fact { name: name.to_owned(), value });
    }

    /// The entry of a head, made when absent; layers and heads stay in order.
    pub(crate) fn head(&mut self, layer: usize, head: usize) -> &mut HeadAudit {
        let at = self.layers.partition_point(|entry| entry.layer < layer);
        if self.layers.get(at).is_none_or(|entry| entry.layer != layer) {
            self.layers.insert(at, LayerAudit { layer, heads: Vec::new() });
        }
        let heads = &mut self.layers[at].heads;
        let at = heads.partition_point(|entry| entry.head < head);
        if heads.get(at).is_none_or(|entry| entry.head != head) {
            heads.insert(at, HeadAudit { head, ..HeadAudit::default() });
        }
        &mut heads[at]
    }
}
