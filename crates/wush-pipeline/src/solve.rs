//! Statistics to transforms: every head of every layer, keys and values, on all threads. Each head is solved by one thread
//! from its own statistics alone, so the bytes do not depend on how many there are.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use rayon::prelude::*;
use wush_format::hash::Sha;
use wush_format::manifest::{LayerReport, Solve};
use wush_format::monitor::Monitor;
use wush_format::transforms::{HeadMatrices, LayerTransforms, Transforms};
use wush_inspect::head_report;
use wush_stats::{LayerStats, Statistics};
use wush_transform::{HeadProblem, Role, Settings, Solution, TransformKind};

use crate::calibrate::calibration_of;
use crate::error::{InStage, STATISTICS};
use crate::model::{HeadShape, Model};
use crate::notes::too_little_text;
use crate::paths::{NewFile, require_kind};
use crate::plan::SolvePlan;
use crate::report::{SolveReport, WrittenFile};
use crate::request::{Environment, SolveRequest};
use crate::{PipelineError, Result};

/// `wush solve`: statistics file to transforms file.
///
/// # Errors
/// `OutputExists`, a file that is no statistics file, `Solve` naming layer and head, `Interrupted`.
pub fn solve(request: &SolveRequest, env: &Environment<'_>) -> Result<SolveReport> {
    let out = NewFile::plan_outside_checkpoints(&request.out)?;
    let plan = SolvePlan::new(&request.settings)?;
    let clock = Instant::now();
    require_kind(&request.statistics, STATISTICS)?;
    let statistics = Statistics::load(&request.statistics)?;
    let text = too_little_text(statistics.info.positions, statistics.info.head_dim);
    let notes: Vec<String> = text.into_iter().chain(out.name_note()).collect();
    notes.iter().for_each(|note| env.monitor.note(&format!("note       {note}")));
    let (stats_hash, _) = wush_format::hash::hash_file(&request.statistics)?;
    let transforms = solve_statistics(&statistics, stats_hash, &plan, env.monitor).in_stage("solve")?;
    let written = WrittenFile::new(&out.path, transforms.save(out.staged())?);
    out.commit()?;
    Ok(SolveReport {
        model_id: statistics.info.model_id.clone(),
        solve: solve_record(&transforms),
        calibration: calibration_of(&statistics.info),
        layers: transforms.report,
        notes,
        out: written,
        seconds: clock.elapsed().as_secs_f64(),
    })
}

/// Solves every head on its statistics.
///
/// # Errors
/// `Solve` naming layer, head and role; `Interrupted`.
pub(crate) fn solve_statistics(
    statistics: &Statistics,
    stats_hash: Sha,
    plan: &SolvePlan,
    monitor: &dyn Monitor,
) -> Result<Transforms> {
    let heads = statistics.layers.iter().flat_map(|(&layer, stats)| {
        let shape = HeadShape { n_kv_heads: stats.n_kv_heads(), head_dim: stats.head_dim() };
        heads_of(layer, shape, Some(stats))
    });
    let (layers, report) = solve_heads(heads.collect(), plan, monitor)?;
    Ok(Transforms {
        layers,
        model_hash: statistics.info.model_hash,
        transform: plan.kind.name.to_owned(),
        preset: plan.preset.name().to_owned(),
        damping: plan.damping,
        seed: plan.seed,
        stats_hash: Some(stats_hash),
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
    Ok(Transforms {
        layers,
        model_hash,
        transform: plan.kind.name.to_owned(),
        preset: plan.preset.name().to_owned(),
        damping: plan.damping,
        seed: plan.seed,
        stats_hash: None,
        calibration: None,
        report: Vec::new(),
    })
}

/// Solves one head of each dimension in `model` as if its statistics were the identity: a transform that does not exist at
/// that dimension fails here and not after calibration.
///
/// # Errors
/// `Solve` naming the first layer of that dimension.
pub(crate) fn rehearse(model: &Model, plan: &SolvePlan) -> Result<()> {
    let mut known = BTreeSet::new();
    for layer in 0..model.spec.layers.len() {
        let dim = model.head_shape(layer).head_dim;
        if !known.insert(dim) {
            continue;
        }
        let mut identity = vec![0.0; dim * dim];
        identity.iter_mut().step_by(dim + 1).for_each(|x| *x = 1.0);
        let problem = HeadProblem { gram: &identity, hessian: &identity, dim };
        let settings = Settings { damping: plan.damping, seed: plan.seed, layer, head: 0, role: Role::Key };
        let failed = |source| PipelineError::Solve { layer, head: 0, role: role_name(Role::Key), source };
        wush_transform::solve(plan.kind, &problem, &settings).map_err(failed)?;
    }
    Ok(())
}

/// How the transforms were solved, as the manifest states it.
pub(crate) fn solve_record(transforms: &Transforms) -> Solve {
    Solve {
        transform: transforms.transform.clone(),
        preset: transforms.preset.clone(),
        damping: transforms.damping,
        seed: transforms.seed,
        stats_hash: transforms.stats_hash,
    }
}

/// One transform to solve.
#[derive(Clone, Copy)]
struct Head<'a> {
    layer: usize,
    head: usize,
    role: Role,
    shape: HeadShape,
    stats: Option<&'a LayerStats>,
}

/// Keys first, heads in order: the order of the files.
fn heads_of(layer: usize, shape: HeadShape, stats: Option<&LayerStats>) -> impl Iterator<Item = Head<'_>> {
    let roles = [Role::Key, Role::Value];
    roles
        .into_iter()
        .flat_map(move |role| (0..shape.n_kv_heads).map(move |head| Head { layer, head, role, shape, stats }))
}

type Solved = (BTreeMap<usize, LayerTransforms>, Vec<LayerReport>);

fn solve_heads(heads: Vec<Head<'_>>, plan: &SolvePlan, monitor: &dyn Monitor) -> Result<Solved> {
    monitor.begin("solve", "transforms", heads.len() as u64);
    let solve = |head: &Head<'_>| {
        if monitor.interrupted() {
            return Err(PipelineError::Interrupted { kept: None });
        }
        let solution = solve_head(head, plan)?;
        monitor.advance(1);
        Ok(solution)
    };
    // Collected in order before the first error is taken: which head is named does not depend on the threads.
    let solutions: Vec<Result<Solution>> = heads.par_iter().map(solve).collect();
    monitor.end();
    let mut solved = Solved::default();
    for (head, solution) in heads.iter().zip(solutions) {
        place(&mut solved, head, solution?);
    }
    Ok(solved)
}

fn solve_head(head: &Head<'_>, plan: &SolvePlan) -> Result<Solution> {
    let Head { layer, head: index, role, shape, stats } = *head;
    let (gram, hessian) = match (stats, role) {
        (None, _) => (&[][..], Vec::new()),
        (Some(stats), Role::Key) => (stats.key_gram.head(index), stats.key_hessian(index)),
        (Some(stats), Role::Value) => (stats.value_gram.head(index), stats.value_hessian(index)),
    };
    let problem = HeadProblem { gram, hessian: &hessian, dim: shape.head_dim };
    let settings = Settings { damping: plan.damping, seed: plan.seed, layer, head: index, role };
    let failed = |source| PipelineError::Solve { layer, head: index, role: role_name(role), source };
    wush_transform::solve(plan.kind, &problem, &settings).map_err(failed)
}

fn place((layers, reports): &mut Solved, head: &Head<'_>, solution: Solution) {
    let zeros = || HeadMatrices::zeros(head.shape.n_kv_heads, head.shape.head_dim);
    let layer = layers.entry(head.layer).or_insert_with(|| LayerTransforms { key: zeros(), value: zeros() });
    let matrices = match head.role {
        Role::Key => &mut layer.key,
        Role::Value => &mut layer.value,
    };
    matrices.head_mut(head.head).copy_from_slice(&solution.transform);
    let Some(measures) = solution.info.measures else { return };
    if reports.last().is_none_or(|report| report.layer != head.layer) {
        reports.push(LayerReport { layer: head.layer, key: Vec::new(), value: Vec::new() });
    }
    let report = reports.last_mut().expect("one was pushed for this layer");
    match head.role {
        Role::Key => report.key.push(head_report(&measures)),
        Role::Value => report.value.push(head_report(&measures)),
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
