//! Statistics to transforms: every head of every layer, keys and values, on all threads. Each head is solved by one thread
//! from its own statistics alone, so the bytes do not depend on how many there are.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use rayon::prelude::*;
use wush_format::hash::Sha;
use wush_format::manifest::{HeadReport, LayerReport};
use wush_format::monitor::Monitor;
use wush_format::transforms::{HeadMatrices, LayerTransforms, Transforms};
use wush_inspect::head_report;
use wush_stats::{LayerStats, Statistics, StatsInfo};
use wush_transform::{ErrorFeedback, HeadProblem, Needs, Role, Solution, TransformKind};

use crate::calibrate::calibration_of;
use crate::error::{InStage, STATISTICS};
use crate::model::{HeadShape, Model};
use crate::notes::too_little_text;
use crate::paths::{NewFile, require_kind};
use crate::plan::SolvePlan;
use crate::report::{SolveReport, WrittenFile};
use crate::request::{CenterKeys, Environment, SolveRequest};
use crate::{PipelineError, Result};

/// `--center-keys auto`: a head is centred when its mean holds at least this share of its keys' energy, ‖Σk‖² / (n Σ‖k‖²). From
/// statistics alone this is what tells best whether a common direction eats the quantizer's range; what it does to the
/// output takes activations to see. It centres 82 of smollm2-135m's 90 heads and 44 of qwen2.5-0.5b's 48; measured head
/// by head on the output of four sequences, about 71 and 48 gain.
const CENTER_MIN_ENERGY: f64 = 0.4;

/// `wush solve`: statistics file to transforms file.
///
/// # Errors
/// `OutputExists`, a file that is no statistics file, `Solve` naming layer and head, `Interrupted`.
pub fn solve(request: &SolveRequest, env: &Environment<'_>) -> Result<SolveReport> {
    let out = NewFile::plan(&request.out)?;
    let plan = SolvePlan::new(&request.settings)?;
    let clock = Instant::now();
    require_kind(&request.statistics, STATISTICS)?;
    let statistics = Statistics::load(&request.statistics)?;
    let text = too_little_text(statistics.info.positions, statistics.info.head_dim);
    let notes: Vec<String> = text.into_iter().chain(out.name_note()).collect();
    notes.iter().for_each(|note| env.monitor.note(&format!("note       {note}")));
    let (stats_hash, _) = wush_format::hash::hash_file(&request.statistics)?;
    let transforms = solve_statistics(&statistics, Some(stats_hash), &plan, env.monitor).in_stage("solve")?;
    let written = WrittenFile::new(&out.path, transforms.save(out.staged()).map_err(|e| out.named(e))?);
    out.commit()?;
    Ok(SolveReport {
        model_id: statistics.info.model_id.clone(),
        solve: transforms.solve.clone(),
        calibration: calibration_of(&statistics.info),
        layers: transforms.report,
        notes,
        out: written,
        seconds: clock.elapsed().as_secs_f64(),
    })
}

/// Solves every head on its statistics, those of the file with `stats_hash` if they are in one.
///
/// # Errors
/// `Solve` naming layer, head and role; `Interrupted`.
pub(crate) fn solve_statistics(
    statistics: &Statistics,
    stats_hash: Option<Sha>,
    plan: &SolvePlan,
    monitor: &dyn Monitor,
) -> Result<Transforms> {
    check_centering(statistics.info.shift_invariant, &statistics.info.family, plan)?;
    check_gathered(&statistics.info, plan)?;
    let heads = statistics.layers.iter().flat_map(|(&layer, stats)| {
        let shape = HeadShape { n_kv_heads: stats.n_kv_heads(), head_dim: stats.head_dim() };
        heads_of(layer, shape, Some(Sums { stats, info: &statistics.info }))
    });
    let (layers, report) = solve_heads(heads.collect(), plan, monitor)?;
    Ok(Transforms {
        layers,
        model_hash: statistics.info.model_hash,
        solve: plan.record(stats_hash),
        calibration: Some(calibration_of(&statistics.info)),
        report,
    })
}

/// Builds transforms that need no statistics, for a model of hash `model_hash`. There is nothing to measure them on, so the
/// report is empty.
///
/// # Errors
/// `Solve` when the transform needs statistics or does not exist at this dimension; `Interrupted`.
pub(crate) fn solve_without_statistics(
    model: &Model,
    model_hash: Sha,
    plan: &SolvePlan,
    monitor: &dyn Monitor,
) -> Result<Transforms> {
    let heads = (0..model.spec.layers.len()).flat_map(|layer| heads_of(layer, model.head_shape(layer), None));
    let (layers, _) = solve_heads(heads.collect(), plan, monitor)?;
    Ok(Transforms { layers, model_hash, solve: plan.record(None), calibration: None, report: Vec::new() })
}

/// Solves one head of each dimension in `model` as if its statistics were the identity: a transform that does not exist at
/// that dimension, or would not be exact in this family, fails here and not after calibration.
///
/// # Errors
/// `Solve` naming the first layer of that dimension; `NotShiftInvariant`.
pub(crate) fn rehearse(model: &Model, plan: &SolvePlan) -> Result<()> {
    check_centering(model.spec.is_shift_invariant(), model.spec.family, plan)?;
    let mut known = BTreeSet::new();
    for layer in 0..model.spec.layers.len() {
        let dim = model.head_shape(layer).head_dim;
        if !known.insert(dim) {
            continue;
        }
        let mut identity = vec![0.0; dim * dim];
        identity.iter_mut().step_by(dim + 1).for_each(|x| *x = 1.0);
        let problem = HeadProblem { covariance: &identity, ..HeadProblem::new(&identity, &identity, dim) };
        let settings = plan.settings(layer, 0, Role::Key);
        let failed = |source| PipelineError::Solve { layer, head: 0, role: role_name(Role::Key), source };
        wush_transform::solve(plan.kind, &problem, &settings).map_err(failed)?;
    }
    Ok(())
}

/// One transform to solve.
#[derive(Clone, Copy)]
struct Head<'a> {
    layer: usize,
    head: usize,
    role: Role,
    shape: HeadShape,
    sums: Option<Sums<'a>>,
}

/// A layer's sums, and what they were summed over.
#[derive(Clone, Copy)]
struct Sums<'a> {
    stats: &'a LayerStats,
    info: &'a StatsInfo,
}

/// What one head came to.
struct Solved {
    solution: Solution,
    /// The mean that was taken from the head's keys.
    mean: Option<Vec<f64>>,
    feedback: Option<ErrorFeedback>,
}

/// Keys first, heads in order: the order of the files.
fn heads_of(layer: usize, shape: HeadShape, sums: Option<Sums<'_>>) -> impl Iterator<Item = Head<'_>> {
    let roles = [Role::Key, Role::Value];
    roles
        .into_iter()
        .flat_map(move |role| (0..shape.n_kv_heads).map(move |head| Head { layer, head, role, shape, sums }))
}

type Layers = (BTreeMap<usize, LayerTransforms>, Vec<LayerReport>);

fn solve_heads(heads: Vec<Head<'_>>, plan: &SolvePlan, monitor: &dyn Monitor) -> Result<Layers> {
    monitor.begin("solve", "transforms", heads.len() as u64);
    let solve = |head: &Head<'_>| {
        if monitor.interrupted() {
            return Err(PipelineError::Interrupted { kept: None });
        }
        let solved = solve_head(head, plan)?;
        monitor.advance(1);
        Ok(solved)
    };
    // Collected in order before the first error is taken: which head is named does not depend on the threads.
    let solved: Vec<Result<Solved>> = heads.par_iter().map(solve).collect();
    monitor.end();
    let mut layers = Layers::default();
    for (head, solved) in heads.iter().zip(solved) {
        place(&mut layers, head, solved?, plan);
    }
    Ok(layers)
}

fn solve_head(head: &Head<'_>, plan: &SolvePlan) -> Result<Solved> {
    let Head { layer, head: index, role, shape, sums } = *head;
    let mut mean = None;
    let (gram, hessian) = match (sums, role) {
        (None, _) => (Cow::Borrowed(&[][..]), Vec::new()),
        (Some(Sums { stats, info }), Role::Key) => {
            let gram = if centers(stats, info, index, plan) {
                mean = Some(stats.key_mean(index, info.positions));
                Cow::Owned(stats.key_covariance(index, info.positions))
            } else {
                Cow::Borrowed(stats.key_gram.head(index))
            };
            (gram, hessian(stats, index, role, plan.kind.needs))
        }
        (Some(Sums { stats, .. }), Role::Value) => {
            (Cow::Borrowed(stats.value_gram.head(index)), hessian(stats, index, role, plan.kind.needs))
        }
    };
    let covariance = sums.map(|sums| covariance(sums, index, role, plan.kind.needs)).unwrap_or_default();
    let problem = HeadProblem { covariance: &covariance, ..HeadProblem::new(&gram, &hessian, shape.head_dim) };
    let failed = |source| PipelineError::Solve { layer, head: index, role: role_name(role), source };
    let solution = wush_transform::solve(plan.kind, &problem, &plan.settings(layer, index, role)).map_err(failed)?;
    let feedback = || wush_transform::error_feedback(&solution.inverse, &hessian, shape.head_dim, plan.damping);
    let feedback = plan.feedback.then(feedback).transpose().map_err(failed)?;
    Ok(Solved { solution, mean, feedback })
}

/// The Hessian of one head: Eq. 61's for a transform that asks for it, else Eq. 4's.
fn hessian(stats: &LayerStats, head: usize, role: Role, needs: Needs) -> Vec<f64> {
    match (&stats.attention, needs, role) {
        (Some(attention), Needs::AttentionHessians, Role::Key) => attention.key.head(head).to_vec(),
        (Some(attention), Needs::AttentionHessians, Role::Value) => attention.value.head(head).to_vec(),
        (_, _, Role::Key) => stats.key_hessian(head),
        (_, _, Role::Value) => stats.value_hessian(head),
    }
}

/// OSCAR's covariance of one head, or the mean over the layer's; empty for other transforms.
fn covariance(sums: Sums<'_>, head: usize, role: Role, needs: Needs) -> Vec<f64> {
    let Sums { stats, info } = sums;
    let of_head = |head: usize| match role {
        Role::Key => stats.oscar_key(head),
        Role::Value => stats.oscar_value(head, info.positions).unwrap_or_default(),
    };
    match needs {
        Needs::Nothing | Needs::AttentionHessians => Vec::new(),
        Needs::HeadCovariance => of_head(head),
        Needs::LayerCovariance => {
            let mut mean = of_head(0);
            for other in 1..stats.n_kv_heads() {
                mean.iter_mut().zip(of_head(other)).for_each(|(sum, x)| *sum += x);
            }
            let n_heads = stats.n_kv_heads() as f64;
            mean.iter_mut().for_each(|x| *x /= n_heads);
            mean
        }
    }
}

/// The statistics must hold what the transform is made from.
fn check_gathered(info: &StatsInfo, plan: &SolvePlan) -> Result<()> {
    let missing = match plan.kind.needs {
        Needs::AttentionHessians if !info.attention_hessians => "--hessian attention",
        Needs::LayerCovariance | Needs::HeadCovariance if !info.second_pass => "--second-pass oscar",
        _ => return Ok(()),
    };
    Err(PipelineError::NotGathered { transform: plan.kind.name, option: missing })
}

/// Whether a head's keys are centred.
fn centers(stats: &LayerStats, info: &StatsInfo, head: usize, plan: &SolvePlan) -> bool {
    let has_mean = stats.mean_key_energy(head, info.positions).unwrap_or(0.0);
    match plan.center_keys {
        CenterKeys::Never => false,
        CenterKeys::Always => true,
        CenterKeys::Auto => info.shift_invariant && has_mean >= CENTER_MIN_ENERGY,
    }
}

/// Centring must be exact.
fn check_centering(is_shift_invariant: bool, family: &str, plan: &SolvePlan) -> Result<()> {
    if plan.center_keys == CenterKeys::Always && !is_shift_invariant {
        return Err(PipelineError::NotShiftInvariant { family: family.to_owned() });
    }
    Ok(())
}

fn place((layers, reports): &mut Layers, head: &Head<'_>, solved: Solved, plan: &SolvePlan) {
    let Solved { solution, mean, feedback } = solved;
    let feedback_gain = feedback.as_ref().map(|feedback| feedback.gain);
    let norm = |mean: &Vec<f64>| mean.iter().map(|x| x * x).sum::<f64>().sqrt();
    // An all-zero mean takes nothing from the keys.
    let mean_norm = mean.as_ref().map(norm).filter(|&norm| norm > 0.0);
    let HeadShape { n_kv_heads, head_dim } = head.shape;
    let layer = layers.entry(head.layer).or_insert_with(|| empty_layer(head.shape, plan));
    let (matrices, factors) = match head.role {
        Role::Key => (&mut layer.key, &mut layer.key_feedback),
        Role::Value => (&mut layer.value, &mut layer.value_feedback),
    };
    matrices.head_mut(head.head).copy_from_slice(&solution.transform);
    if let (Some(factors), Some(feedback)) = (factors, feedback) {
        factors.head_mut(head.head).copy_from_slice(&feedback.lower);
    }
    if let (Some(means), Some(mean)) = (&mut layer.key_mean, mean) {
        means[head.head * head_dim..][..head_dim].copy_from_slice(&mean);
    }
    let Some(measures) = solution.info.measures else { return };
    if reports.last().is_none_or(|report| report.layer != head.layer) {
        reports.push(LayerReport { layer: head.layer, key: Vec::new(), value: Vec::new(), centered_keys: Vec::new() });
    }
    let report = reports.last_mut().expect("one was pushed for this layer");
    let of_head = HeadReport { feedback_gain, mean_norm, ..head_report(&measures) };
    match head.role {
        Role::Key => report.key.push(of_head),
        Role::Value => report.value.push(of_head),
    }
    if report.value.len() == n_kv_heads {
        report.centered_keys = layer.centered_keys();
    }
}

/// A layer in which every head is still to be filled in.
fn empty_layer(shape: HeadShape, plan: &SolvePlan) -> LayerTransforms {
    let zeros = || HeadMatrices::zeros(shape.n_kv_heads, shape.head_dim);
    let means = plan.center_keys != CenterKeys::Never;
    LayerTransforms {
        key: zeros(),
        value: zeros(),
        key_mean: means.then(|| vec![0.0; shape.n_kv_heads * shape.head_dim]),
        key_feedback: plan.feedback.then(zeros),
        value_feedback: plan.feedback.then(zeros),
    }
}

fn role_name(role: Role) -> &'static str {
    match role {
        Role::Key => "key",
        Role::Value => "value",
    }
}

/// The registry, for help texts and plans.
pub(crate) fn registry() -> &'static [TransformKind] {
    wush_transform::TRANSFORMS
}
