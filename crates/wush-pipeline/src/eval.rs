//! Perplexity through a quantized cache, over lists of transforms, quantizers and bits: calibrated once, or from a
//! statistics file, or a bundle with its own transforms.

use std::path::Path;
use std::time::Instant;

use wush_eval::cache::{LayerCache, QuantizedCache, Side};
use wush_eval::perplexity::{Score, perplexity};
use wush_format::bundle::{
    FeedbackLayer, KEY_TRANSFORMS, KeyLayer, KeySidecar, VALUE_FEEDBACK, ValueFeedback, WUSH_DIR,
};
use wush_format::hash::Sha;
use wush_format::manifest::Calibration;
use wush_format::transforms::{HeadMatrices, LayerTransforms, Transforms};
use wush_model::attention::{AttentionProduct, Exact};
use wush_model::cpu::Cpu;
use wush_model::decoder::Decoder;
use wush_quant::{Bits, Codec, Feedback, Method, Role, ScaleDtype};
use wush_stats::Statistics;

use crate::error::{InStage, STATISTICS};
use crate::model::Model;
use crate::paths::require_kind;
use crate::plan::{DEFAULT_EVAL_TRANSFORMS, Purpose, SolvePlan, load_sequences, longest, n_tokens};
use crate::report::{EvalPplReport, ModelInfo, PerplexityRow};
use crate::request::{Environment, EvalPplRequest, SolveSettings};
use crate::solve::{solve_statistics, solve_without_statistics};
use crate::{PipelineError, Result};

/// Name of the row without quantization.
const UNQUANTIZED: &str = "none";
/// Its bits.
const UNQUANTIZED_BITS: u8 = 16;
/// Name of a bundle's own transforms.
const OWN: &str = "bundle";

/// `wush eval ppl`: a text's perplexity without and with each cache.
///
/// # Errors
/// What cannot be read; `Option` for a transform that needs statistics without any, or a bundle with `--transform`;
/// `Solve`; `Interrupted`.
pub fn eval_ppl(request: &EvalPplRequest, env: &Environment<'_>) -> Result<EvalPplReport> {
    let clock = Instant::now();
    let model = Model::resolve_any(&request.model, env)?;
    let plans = plans(&model, request)?;
    let text = load_sequences(&model, &request.text, Purpose::Score, env)?;
    let candidates = candidates(&model, request, &plans, env)?;
    let n_rows = 1 + candidates.len() * request.quantizers.len() * request.bits.len();
    env.monitor.begin("evaluate", "tokens", n_rows as u64 * n_tokens(&text.sequences));
    let decoder = Decoder::new(&model.checkpoint, &model.spec, &Cpu);
    let score = |attention: &dyn AttentionProduct<Cpu>| {
        perplexity(&decoder, &text.sequences, attention, env.monitor).map_err(PipelineError::from).in_stage("evaluate")
    };
    let mut rows = Vec::new();
    let mut add = |row: PerplexityRow| {
        env.monitor.note(&format!("row        {}", describe(&row)));
        rows.push(row);
    };
    add(row(UNQUANTIZED, UNQUANTIZED, UNQUANTIZED_BITS, score(&Exact)?));
    for candidate in &candidates {
        for quantizer in &request.quantizers {
            for &bits in &request.bits {
                let layers = candidate.layers(quantizer, bits)?;
                let cache = QuantizedCache::new(&model.spec, layers, request.protocol)?;
                add(row(&candidate.name, &quantizer.to_string(), bits.get(), score(&cache)?));
            }
        }
    }
    env.monitor.end();
    let calibration = candidates.iter().find_map(|candidate| candidate.calibration().cloned());
    let notes = notes(&candidates, longest(&text.sequences));
    notes.iter().for_each(|note| env.monitor.note(&format!("note       {note}")));
    Ok(EvalPplReport {
        model: ModelInfo::new(&model, model.hash_weights()?),
        text: text.source,
        sequences: text.sequences.len() as u64,
        seq_len: longest(&text.sequences) as u64,
        protocol: request.protocol,
        calibration,
        rows,
        notes,
        seconds: clock.elapsed().as_secs_f64(),
    })
}

fn row(transform: &str, quantizer: &str, bits: u8, score: Score) -> PerplexityRow {
    PerplexityRow {
        transform: transform.to_owned(),
        quantizer: quantizer.to_owned(),
        bits,
        ppl: score.perplexity(),
        nll: score.nll,
        tokens: score.tokens,
    }
}

/// As a long run tells it when it is done: a run that is stopped has said what it found.
fn describe(row: &PerplexityRow) -> String {
    let PerplexityRow { transform, quantizer, bits, ppl, .. } = row;
    format!("{transform}, {quantizer}, {bits} bits: perplexity {ppl:.4}")
}

/// One way to transform a cache.
struct Candidate {
    name: String,
    source: Source,
}

/// Where a candidate's matrices come from.
enum Source {
    /// Solved, f64; values are transformed by the cache.
    Solved(Transforms),
    /// A bundle's: its values are in transformed coordinates already.
    Bundle { keys: KeySidecar, values: Option<ValueFeedback> },
}

impl Candidate {
    /// Every layer's cache with this quantizer.
    fn layers(&self, quantizer: &Method, bits: Bits) -> Result<Vec<LayerCache>> {
        let codec = |role: Role, dim: usize| -> Result<Codec> {
            Ok(Codec::new(dim, quantizer.quantizer(bits, role, ScaleDtype::Bf16)?)?)
        };
        let layers: Vec<Result<LayerCache>> = match &self.source {
            Source::Solved(transforms) => transforms.layers.values().map(|layer| solved(layer, &codec)).collect(),
            Source::Bundle { keys, values } => {
                let feedback = |id: &usize| values.as_ref().and_then(|values| values.layers.get(id));
                keys.layers.iter().map(|(id, layer)| bundled(layer, feedback(id), &codec)).collect()
            }
        };
        layers.into_iter().collect()
    }

    fn calibration(&self) -> Option<&Calibration> {
        match &self.source {
            Source::Solved(transforms) => transforms.calibration.as_ref(),
            Source::Bundle { .. } => None,
        }
    }
}

/// A codec for keys or values of a head dimension.
type MakeCodec<'a> = &'a dyn Fn(Role, usize) -> Result<Codec>;

fn solved(layer: &LayerTransforms, codec: MakeCodec<'_>) -> Result<LayerCache> {
    let keys = Side {
        reader: readers(&layer.key, true),
        transform: narrow(&layer.key.data),
        mean: layer.key_mean.as_deref().map(narrow),
        codec: codec(Role::Key, layer.key.dim)?,
        feedback: layer.key_feedback.as_ref().map(|l| feedback(&narrow(&l.data), l.dim)).transpose()?,
    };
    let values = Side {
        reader: readers(&layer.value, false),
        transform: narrow(&layer.value.data),
        mean: None,
        codec: codec(Role::Value, layer.value.dim)?,
        feedback: layer.value_feedback.as_ref().map(|l| feedback(&narrow(&l.data), l.dim)).transpose()?,
    };
    Ok(LayerCache { keys: Some(keys), values: Some(values) })
}

fn bundled(layer: &KeyLayer, values: Option<&FeedbackLayer>, codec: MakeCodec<'_>) -> Result<LayerCache> {
    let dim = layer.head_dim;
    let identity: Vec<f32> =
        (0..layer.n_kv_heads * dim * dim).map(|at| if at / dim % dim == at % dim { 1.0 } else { 0.0 }).collect();
    let keys = Side {
        transform: layer.key.clone(),
        reader: layer.query.clone(),
        mean: layer.key_mean.clone(),
        codec: codec(Role::Key, dim)?,
        feedback: layer.key_feedback.as_ref().map(|l| feedback(l, dim)).transpose()?,
    };
    let values = Side {
        transform: identity.clone(),
        reader: identity,
        mean: None,
        codec: codec(Role::Value, dim)?,
        feedback: values.map(|l| feedback(&l.value_feedback, dim)).transpose()?,
    };
    Ok(LayerCache { keys: Some(keys), values: Some(values) })
}

/// T^{-1} of every head, transposed for queries.
fn readers(transforms: &HeadMatrices, transposed: bool) -> Vec<f32> {
    let dim = transforms.dim;
    let of_head = |head| {
        let inverse = wush_fold::invert(transforms.head(head), dim).matrix;
        let at = move |at: usize| if transposed { (at % dim) * dim + at / dim } else { at };
        (0..dim * dim).map(move |index| inverse[at(index)] as f32)
    };
    (0..transforms.n_heads).flat_map(of_head).collect()
}

/// One encoder a head, from `[n_kv, d, d]`.
fn feedback(matrices: &[f32], dim: usize) -> Result<Vec<Feedback>> {
    Ok(matrices.chunks_exact(dim * dim).map(|l| Feedback::new(dim, l)).collect::<Result<_, _>>()?)
}

fn narrow(data: &[f64]) -> Vec<f32> {
    data.iter().map(|&x| x as f32).collect()
}

/// A bundle's own key transforms and feedback.
fn own_transforms(model: &Model) -> Result<Source> {
    let folder = model.dir().join(WUSH_DIR);
    let keys = KeySidecar::load(&folder.join(KEY_TRANSFORMS))?;
    let feedback = folder.join(VALUE_FEEDBACK);
    let values = if feedback.exists() { Some(ValueFeedback::load(&feedback)?) } else { None };
    let expected = model.hash_weights()?;
    let belongs = |name: &str, found: Sha| match found == expected {
        true => Ok(()),
        false => Err(PipelineError::OtherWeights { path: folder.join(name), found, expected }),
    };
    belongs(KEY_TRANSFORMS, keys.model_hash)?;
    values.iter().try_for_each(|values| belongs(VALUE_FEEDBACK, values.model_hash))?;
    Ok(Source::Bundle { keys, values })
}

/// What the reader of the numbers should know.
fn notes(candidates: &[Candidate], seq_len: usize) -> Vec<String> {
    let calibrated = candidates.iter().filter_map(Candidate::calibration).map(|c| c.max_seq_len).min();
    let short = calibrated.filter(|&calibrated| calibrated < seq_len as u64).map(|calibrated| {
        format!(
            "calibrated on sequences of {calibrated} tokens, evaluated on {seq_len}: keys beyond position {calibrated} have \
             statistics that calibration never saw"
        )
    });
    short.into_iter().collect()
}

/// One plan a transform of the list; none for a bundle, which has its own.
fn plans(model: &Model, request: &EvalPplRequest) -> Result<Vec<SolvePlan>> {
    if model.checkpoint.is_bundle() {
        let (expected, found) = ("no list: a bundle is evaluated with its own transforms".to_owned(), "one".to_owned());
        return match request.transforms.is_some() {
            true => Err(PipelineError::Option { option: "--transform", expected, found }),
            false => Ok(Vec::new()),
        };
    }
    let default = || DEFAULT_EVAL_TRANSFORMS.map(str::to_owned).to_vec();
    let names = request.transforms.clone().unwrap_or_else(default);
    let plan = |transform| SolvePlan::new(&SolveSettings { transform, ..request.settings.clone() });
    let plans: Vec<SolvePlan> = names.into_iter().map(plan).collect::<Result<_>>()?;
    match plans.iter().find(|plan| plan.kind.needs_statistics) {
        Some(plan) if request.statistics.is_none() => Err(PipelineError::Option {
            option: "--transform",
            expected: "statistics for it: --stats FILE, as `wush calibrate` writes them".to_owned(),
            found: plan.kind.name.to_owned(),
        }),
        _ => Ok(plans),
    }
}

fn candidates(
    model: &Model,
    request: &EvalPplRequest,
    plans: &[SolvePlan],
    env: &Environment<'_>,
) -> Result<Vec<Candidate>> {
    if model.checkpoint.is_bundle() {
        return Ok(vec![Candidate { name: OWN.to_owned(), source: own_transforms(model)? }]);
    }
    let model_hash = model.hash_weights()?;
    let statistics = request.statistics.as_deref().map(read).transpose()?;
    if let (Some((statistics, _)), Some(path)) = (&statistics, &request.statistics)
        && statistics.info.model_hash != model_hash
    {
        let (found, expected) = (statistics.info.model_hash, model_hash);
        return Err(PipelineError::OtherWeights { path: path.clone(), found, expected });
    }
    let candidate = |plan: &SolvePlan| {
        let transforms = match &statistics {
            Some((statistics, hash)) if plan.kind.needs_statistics => {
                solve_statistics(statistics, *hash, plan, env.monitor)
            }
            _ => solve_without_statistics(model, model_hash, plan, env.monitor),
        };
        Ok(Candidate { name: plan.kind.name.to_owned(), source: Source::Solved(transforms.in_stage("solve")?) })
    };
    plans.iter().map(candidate).collect()
}

/// A statistics file and its hash.
fn read(path: &Path) -> Result<(Statistics, Sha)> {
    require_kind(path, STATISTICS)?;
    Ok((Statistics::load(path)?, wush_format::hash::hash_file(path)?.0))
}
