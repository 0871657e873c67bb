//! `wush convert`, the whole way from a checkpoint to a bundle, top to bottom:
//! resolve and plan → calibrate → solve → fold → emit → verify. Each stage is a function of its own module.

use std::time::Instant;

use wush_format::FormatError;
use wush_format::atomic::discard;
use wush_format::hash::{Sha, hash_file};
use wush_format::monitor::Monitor;
use wush_format::transforms::Transforms;
use wush_stats::Statistics;

use crate::calibrate::{NOTHING_TO_RESUME, accumulate, difference, is_prefix, load_saved, with_kept};
use crate::error::{InStage, Kept, TRANSFORMS};
use crate::model::Model;
use crate::notes::try_again;
use crate::paths::require_kind;
use crate::plan::{CalibrationPlan, ConvertPlan, FoldPlan};
use crate::report::{ConvertReport, Verdict};
use crate::request::{ConvertRequest, Environment, FoldRequest};
use crate::solve::{solve_statistics, solve_without_statistics};
use crate::work::WorkDir;
use crate::{PipelineError, Result, bundle};

/// `wush convert`: checkpoint and calibration text to a bundle.
///
/// The bundle appears under its name only when it is whole and passed its check. The statistics are kept beside it until
/// then, and after a failed check, so an interrupted run is continued with `resume` and gives the same bytes.
///
/// # Errors
/// Whatever cannot be read or would be overwritten; what a stage refuses, with its name; `Interrupted`.
pub fn convert(request: &ConvertRequest, env: &Environment<'_>) -> Result<ConvertReport> {
    let plan = ConvertPlan::new(request, env)?;
    plan.announce(env.monitor);
    let clock = Instant::now();
    if request.resume && plan.calibration.is_some() && !plan.work.is_begun() {
        env.monitor.note(NOTHING_TO_RESUME);
    }
    let transforms = solve(&plan, env.monitor)?;
    let ConvertPlan { fold, calibration, work, .. } = plan;
    let mut report =
        bundle::build(fold, &transforms, env).map_err(|e| calibrated_before(e, calibration.as_ref(), &work))?;
    match report.verdict {
        Verdict::Ok => work.discard(env.monitor),
        Verdict::Failed => report.notes.push(try_again(work.is_begun())),
    }
    Ok(ConvertReport { seconds: clock.elapsed().as_secs_f64(), ..report })
}

/// `wush fold`: checkpoint and transforms file to a bundle.
///
/// # Errors
/// As [`convert`]; transforms of another model.
pub fn fold(request: &FoldRequest, env: &Environment<'_>) -> Result<ConvertReport> {
    require_kind(&request.transforms, TRANSFORMS)?;
    let transforms = Transforms::load(&request.transforms)?;
    let plan = FoldPlan::new(request, transforms.calibration.as_ref(), env)?;
    plan.announce(env.monitor);
    let clock = Instant::now();
    let mut report = bundle::build(plan, &transforms, env)?;
    if report.verdict == Verdict::Failed {
        report.notes.push(try_again(false));
    }
    Ok(ConvertReport { seconds: clock.elapsed().as_secs_f64(), ..report })
}

/// Calibrates if the transform needs it, and solves.
fn solve(plan: &ConvertPlan, monitor: &dyn Monitor) -> Result<Transforms> {
    let model = &plan.fold.model;
    let Some(calibration) = &plan.calibration else {
        return solve_without_statistics(model, model.hash_weights()?, &plan.solve, monitor).in_stage("solve");
    };
    let (statistics, stats_hash) = calibrated(model, calibration, &plan.work, monitor).map_err(|e| {
        plan.work.remove_if_empty();
        e.resumable(plan.work.path())
    })?;
    let solved = solve_statistics(&statistics, Some(stats_hash), &plan.solve, monitor).in_stage("solve");
    solved.map_err(|e| calibrated_before(e, Some(calibration), &plan.work))
}

/// A stop or a failure after calibration: all sequences are kept.
fn calibrated_before(error: PipelineError, calibration: Option<&CalibrationPlan>, work: &WorkDir) -> PipelineError {
    let Some(calibration) = calibration else { return error };
    let total = calibration.sequences.len();
    with_kept(error, Some(Kept { done: total, total })).resumable(work.path())
}

/// The statistics and their file's digest: those of an interrupted run that finished this stage, else new ones.
fn calibrated(
    model: &Model,
    plan: &CalibrationPlan,
    work: &WorkDir,
    monitor: &dyn Monitor,
) -> Result<(Statistics, Sha)> {
    let (path, partial) = (work.statistics(), work.partial());
    if path.symlink_metadata().is_ok() {
        let statistics = load_saved(&path)?;
        if statistics.info == plan.finished_info() {
            monitor.note("resume     all sequences are done");
            return Ok((statistics, hash_file(&path)?.0));
        }
        if !is_prefix(&statistics.info, plan) {
            return Err(PipelineError::OtherPlan {
                path: work.path().to_owned(),
                difference: difference(&statistics.info, plan),
            });
        }
        // More sequences than last time: what was whole is a part now.
        std::fs::rename(&path, &partial).map_err(|e| FormatError::io(&path, "rename", e))?;
    }
    work.create()?;
    let done = accumulate(model, plan, Some(&partial), monitor).in_stage("calibrate")?;
    let (stats_hash, _) = done.statistics.save(&path)?;
    discard(&partial)?;
    Ok((done.statistics, stats_hash))
}
