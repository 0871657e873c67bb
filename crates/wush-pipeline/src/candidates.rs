//! What an evaluation compares: transforms solved from the same statistics (calibrated once, or a file's), or a bundle's own;
//! each becomes every layer's cache with a quantizer.

use std::path::{Path, PathBuf};

use wush_eval::cache::{LayerCache, Side};
use wush_format::bundle::{FeedbackLayer, KeyLayer, KeySidecar, ValueFeedback};
use wush_format::hash::{Sha, hash_file};
use wush_format::manifest::{Calibration, Manifest, Sensitivity, Solve};
use wush_format::sidecars::Sidecars;
use wush_format::transforms::{HeadMatrices, LayerTransforms, Transforms};
use wush_quant::{Codec, Feedback, LayerBits, Method, Role, ScaleDtype};
use wush_runtime::KeyTransforms;
use wush_stats::Statistics;

use crate::calibrate::accumulate;
use crate::error::{InStage, STATISTICS};
use crate::model::Model;
use crate::paths::require_kind;
use crate::plan::{
    CalibrationPlan, DEFAULT_EVAL_TRANSFORMS, DEFAULT_VERIFY_SEQUENCES, Purpose, SolvePlan, describe_calibration,
    describe_time, load_sequences, starts,
};
use crate::request::{Environment, Gather, SolveSettings, StatisticsSource, TransformsRequest};
use crate::sensitivity::measure;
use crate::solve::{rehearse, solve_statistics, solve_without_statistics};
use crate::{PipelineError, Result};

/// Name of a bundle's own transforms.
const OWN: &str = "bundle";

/// What will be compared, checked before anything runs.
pub(crate) enum Comparison {
    /// A bundle with its own transforms.
    Bundle,
    /// Transforms to solve.
    Solve {
        /// One a transform of the list.
        plans: Vec<SolvePlan>,
        /// What they are solved from.
        from: Basis,
        /// Options that are for some of them, or for none.
        notes: Vec<String>,
    },
}

/// Where statistics come from.
pub(crate) enum Basis {
    /// No transform needs any.
    Nothing,
    /// A file.
    File(PathBuf),
    /// Text.
    Text(Box<CalibrationPlan>),
}

impl Comparison {
    /// Reads the list and, if a transform needs statistics, cuts the calibration text; without a length of its own it is cut
    /// into sequences of `seq_len` tokens, the length of what is evaluated.
    ///
    /// # Errors
    /// `Option` for a bundle with a list or statistics, and for a transform that needs statistics without any; whatever
    /// cannot be read.
    pub(crate) fn plan(
        model: &Model,
        request: &TransformsRequest,
        seq_len: usize,
        env: &Environment<'_>,
    ) -> Result<Self> {
        if model.checkpoint.is_bundle() {
            return of_bundle(request);
        }
        let default = || DEFAULT_EVAL_TRANSFORMS.map(str::to_owned).to_vec();
        let names = request.names.clone().unwrap_or_else(default);
        let (plans, mut notes) = SolvePlan::of_list(&names, &request.settings)?;
        plans.iter().try_for_each(|plan| rehearse(model, plan))?;
        let Some(needing) = plans.iter().find(|plan| plan.kind.needs_statistics) else {
            let given = given_statistics(&request.statistics);
            notes.extend(
                given.map(|given| format!("{given} is not read: no statistics are needed for {}", names.join(", "))),
            );
            return Ok(Self::Solve { plans, from: Basis::Nothing, notes });
        };
        let from = match &request.statistics {
            StatisticsSource::File(path) => Basis::File(path.clone()),
            StatisticsSource::Text(text) => {
                let packed = load_sequences(model, text, Purpose::Comparison { seq_len }, env)?;
                let gather = Gather::for_transforms(plans.iter().map(|plan| plan.kind));
                Basis::Text(Box::new(CalibrationPlan::new(model, packed, gather)?))
            }
            StatisticsSource::None => {
                return Err(PipelineError::Option {
                    option: "--calib",
                    expected: format!(
                        "text to make {} from, or statistics of it (--stats FILE, as `wush calibrate` writes it), or \
                         transforms that need none (--transform identity,hadamard)",
                        needing.kind.name
                    ),
                    found: "neither".to_owned(),
                });
            }
        };
        Ok(Self::Solve { plans, from, notes })
    }

    /// What the reader of the numbers should know of the list.
    pub(crate) fn notes(&self) -> &[String] {
        match self {
            Self::Bundle => &[],
            Self::Solve { notes, .. } => notes,
        }
    }

    /// Says what will be done.
    pub(crate) fn announce(&self, model: &Model, env: &Environment<'_>) {
        if let Self::Solve { from: Basis::Text(calibration), .. } = self {
            env.monitor.note(&describe_calibration(calibration, None));
            describe_time(model, calibration).iter().for_each(|note| env.monitor.note(note));
        }
    }

    /// Calibrates, once, if it must, and solves; `model_hash` is that of the model's weights. Where bits are to be allotted, also
    /// measures the modules on the calibration text.
    ///
    /// # Errors
    /// `OtherWeights` for statistics or a sidecar of another model; `NotGathered`; `Solve`; `Interrupted`, and nothing is kept.
    pub(crate) fn candidates(
        &self,
        model: &Model,
        model_hash: Sha,
        allots: bool,
        env: &Environment<'_>,
    ) -> Result<Vec<Candidate>> {
        let (plans, from) = match self {
            Self::Bundle => return Ok(vec![own(model, model_hash)?]),
            Self::Solve { plans, from, .. } => (plans, from),
        };
        let statistics = match from {
            Basis::Nothing => None,
            Basis::File(path) => Some(read(path, model_hash)?),
            Basis::Text(plan) => {
                let done = accumulate(model, plan, None, env.monitor).in_stage("calibrate")?;
                Some((done.statistics, None))
            }
        };
        let candidate = |plan: &SolvePlan| {
            let transforms = match &statistics {
                Some((statistics, hash)) if plan.kind.needs_statistics => {
                    solve_statistics(statistics, *hash, plan, env.monitor)
                }
                _ => solve_without_statistics(model, model_hash, plan, env.monitor),
            };
            let transforms = transforms.in_stage("solve")?;
            let calibration = transforms.calibration.clone();
            let sensitivity = match from {
                Basis::Text(text) if allots => {
                    let starts = starts(&text.sequences, DEFAULT_VERIFY_SEQUENCES);
                    Some(measure(model, &transforms, &starts, env.monitor).in_stage("measure")?)
                }
                _ => None,
            };
            let name = plan.kind.name.to_owned();
            let solve = transforms.solve.clone();
            Ok(Candidate { name, solve, calibration, sensitivity, source: Source::Solved(Box::new(transforms)) })
        };
        plans.iter().map(candidate).collect()
    }
}

/// A bundle takes nothing beside itself.
fn of_bundle(request: &TransformsRequest) -> Result<Comparison> {
    let SolveSettings { preset, damping, seed, exponent, factor, center_keys, feedback, .. } = &request.settings;
    let options = [
        ("--transform", request.names.is_some()),
        ("--preset", preset.is_some()),
        ("--seed", seed.is_some()),
        ("--damping", damping.is_some()),
        ("--exponent", exponent.is_some()),
        ("--factor", factor.is_some()),
        ("--center-keys", center_keys.is_some()),
        ("--feedback", feedback.is_some()),
    ];
    let option = options.into_iter().find_map(|(option, given)| given.then_some(option));
    let given = option.or_else(|| given_statistics(&request.statistics));
    match given {
        Some(option) => Err(PipelineError::Option {
            option,
            expected: "none: a bundle is evaluated with its own transforms".to_owned(),
            found: "one".to_owned(),
        }),
        None => Ok(Comparison::Bundle),
    }
}

/// The option that names what transforms are solved from.
fn given_statistics(statistics: &StatisticsSource) -> Option<&'static str> {
    match statistics {
        StatisticsSource::None => None,
        StatisticsSource::File(_) => Some("--stats"),
        StatisticsSource::Text(_) => Some("--calib"),
    }
}

/// A statistics file of this model, and its hash.
fn read(path: &Path, expected: Sha) -> Result<(Statistics, Option<Sha>)> {
    require_kind(path, STATISTICS)?;
    let statistics = Statistics::load(path)?;
    let found = statistics.info.model_hash;
    if found != expected {
        return Err(PipelineError::OtherWeights { path: path.to_owned(), found, expected });
    }
    Ok((statistics, Some(hash_file(path)?.0)))
}

/// One way to transform a cache.
pub(crate) struct Candidate {
    /// In the registry; "bundle" for a bundle's own.
    pub(crate) name: String,
    /// How it was made.
    pub(crate) solve: Solve,
    /// What its statistics are over; none where it needed none.
    pub(crate) calibration: Option<Calibration>,
    /// What bits are allotted by; none where nothing was measured.
    pub(crate) sensitivity: Option<Sensitivity>,
    source: Source,
}

/// Where a candidate's matrices come from.
enum Source {
    /// Solved, f64; values are transformed by the cache.
    Solved(Box<Transforms>),
    /// A bundle's: its values are in transformed coordinates already.
    Bundle { keys: KeySidecar, values: Option<ValueFeedback> },
}

impl Candidate {
    /// The quantizer that suits it, where none is asked for.
    pub(crate) fn quantizer(&self) -> Method {
        let has_feedback = match &self.source {
            Source::Solved(transforms) => transforms.solve.feedback,
            Source::Bundle { values, .. } => values.is_some(),
        };
        Method::for_encoder(has_feedback)
    }

    /// Every layer's cache with this quantizer; `bits` has one entry a layer.
    ///
    /// # Errors
    /// `Quant` for a parameter out of range or a matrix that is no feedback's.
    pub(crate) fn layers(&self, quantizer: &Method, scales: ScaleDtype, bits: &[LayerBits]) -> Result<Vec<LayerCache>> {
        match &self.source {
            Source::Solved(transforms) => solved_layers(transforms, quantizer, scales, bits),
            Source::Bundle { keys, values } => {
                let feedback = |id: &usize| values.as_ref().and_then(|values| values.layers.get(id));
                let layers = keys.layers.iter().zip(bits);
                layers
                    .map(|((id, layer), bits)| bundled(layer, feedback(id), &codecs(quantizer, scales, bits)))
                    .collect()
            }
        }
    }
}

/// Every layer's cache with solved transforms, which transform values, too; `bits` has one entry a layer.
///
/// # Errors
/// As [`Candidate::layers`].
pub(crate) fn solved_layers(
    transforms: &Transforms,
    quantizer: &Method,
    scales: ScaleDtype,
    bits: &[LayerBits],
) -> Result<Vec<LayerCache>> {
    transforms.layers.values().zip(bits).map(|(layer, bits)| solved(layer, &codecs(quantizer, scales, bits))).collect()
}

fn codecs<'a>(
    quantizer: &'a Method,
    scales: ScaleDtype,
    bits: &'a LayerBits,
) -> impl Fn(Role, usize) -> Result<Codec> + 'a {
    move |role, dim| Ok(Codec::new(dim, quantizer.quantizer(bits.of(role), role, scales)?)?)
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

/// A bundle's own key transforms, mean keys and feedback.
fn own(model: &Model, model_hash: Sha) -> Result<Candidate> {
    model.bundle_manifest()?;
    let sidecars = Sidecars::load(model.dir())?;
    let heads: Vec<_> = model.spec.layers.iter().map(|layer| (layer.attn.n_kv_heads, layer.attn.head_dim)).collect();
    sidecars.check_model(model_hash, &heads)?;
    // As a server takes them: only if query is key^{-T}.
    KeyTransforms::from_sidecar(&sidecars.key_path(), &sidecars.keys).map_err(wush_generate::GenerateError::from)?;
    let Sidecars { manifest: Manifest { solve, calibration, sensitivity, .. }, keys, values, .. } = sidecars;
    Ok(Candidate { name: OWN.to_owned(), solve, calibration, sensitivity, source: Source::Bundle { keys, values } })
}
