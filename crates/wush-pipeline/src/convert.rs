//! `wush convert`, the whole way from a checkpoint to a bundle, top to bottom:
//! resolve and plan → calibrate → solve → fold → emit → verify. Each stage is a function of its own module.

use std::path::Path;
use std::time::Instant;

use wush_format::FormatError;
use wush_format::atomic::discard;
use wush_format::hash::{Sha, hash_file};
use wush_format::monitor::Monitor;
use wush_format::transforms::Transforms;
use wush_stats::Statistics;

use crate::calibrate::{accumulate, is_prefix, with_kept};
use crate::error::{InStage, Kept, TRANSFORMS};
use crate::model::Model;
use crate::paths::require_kind;
use crate::plan::{CalibrationPlan, ConvertPlan, FoldPlan};
use crate::report::ConvertReport;
use crate::request::{ConvertRequest, Environment, FoldRequest};
use crate::solve::{solve_statistics, solve_without_statistics};
use crate::{PipelineError, Result, bundle};

/// The finished statistics inside the work directory.
const STATISTICS: &str = "statistics.safetensors";
/// The statistics of the sequences done so far, inside the work directory.
const PARTIAL: &str = "partial.safetensors";

/// `wush convert`: checkpoint and calibration text to a bundle.
///
/// The bundle appears under its name only when it is whole and passed its check. The statistics are kept beside it until
/// then, so an interrupted run is continued with `resume` and gives the same bytes.
///
/// # Errors
/// Whatever cannot be read or would be overwritten; what a stage refuses, with its name; `Interrupted`.
pub fn convert(request: &ConvertRequest, env: &Environment<'_>) -> Result<ConvertReport> {
    let plan = ConvertPlan::new(request, env)?;
    plan.announce(env.monitor);
    let clock = Instant::now();
    let transforms = solve(&plan, env.monitor)?;
    let report = bundle::build(&plan.fold, &transforms, env).map_err(|e| resumable(e, &plan))?;
    remove_work(&plan.fold.out.work())?;
    Ok(ConvertReport { seconds: clock.elapsed().as_secs_f64(), ..report })
}

/// `wush fold`: checkpoint and transforms file to a bundle.
///
/// # Errors
/// As [`convert`]; transforms of another model.
pub fn fold(request: &FoldRequest, env: &Environment<'_>) -> Result<ConvertReport> {
    require_kind(&request.transforms, TRANSFORMS)?;
    let plan = FoldPlan::new(request, env)?;
    let clock = Instant::now();
    let transforms = Transforms::load(&request.transforms)?;
    let report = bundle::build(&plan, &transforms, env)?;
    Ok(ConvertReport { seconds: clock.elapsed().as_secs_f64(), ..report })
}

/// Calibrates if the transform needs it, and solves.
fn solve(plan: &ConvertPlan, monitor: &dyn Monitor) -> Result<Transforms> {
    let model = &plan.fold.model;
    let Some(calibration) = &plan.calibration else {
        return solve_without_statistics(model, model.hash_weights()?, &plan.solve, monitor).in_stage("solve");
    };
    let (statistics, stats_hash) = calibrated(model, calibration, &plan.fold.out.work(), monitor)?;
    solve_statistics(&statistics, stats_hash, &plan.solve, monitor).in_stage("solve").map_err(|e| resumable(e, plan))
}

/// A stop or a failure after calibration: all sequences are kept.
fn resumable(error: PipelineError, plan: &ConvertPlan) -> PipelineError {
    let Some(calibration) = &plan.calibration else { return error };
    let total = calibration.sequences.len();
    with_kept(error, Kept { done: total, total }).with_statistics_kept()
}

/// The statistics and their file's digest: those of an interrupted run that finished this stage, else new ones.
fn calibrated(model: &Model, plan: &CalibrationPlan, work: &Path, monitor: &dyn Monitor) -> Result<(Statistics, Sha)> {
    let path = work.join(STATISTICS);
    if path.symlink_metadata().is_ok() {
        let statistics = Statistics::load(&path)?;
        if statistics.info == plan.info {
            monitor.note("resume     all sequences are done");
            return Ok((statistics, hash_file(&path)?.0));
        }
        if !is_prefix(&statistics.info, plan) {
            return Err(PipelineError::OtherPlan { path });
        }
        // More sequences than last time: what was whole is a part now.
        let partial = work.join(PARTIAL);
        std::fs::rename(&path, &partial).map_err(|e| FormatError::io(&path, "rename", e))?;
    }
    std::fs::create_dir_all(work).map_err(|e| FormatError::io(work, "create", e))?;
    let partial = work.join(PARTIAL);
    let done = accumulate(model, plan, &partial, monitor).in_stage("calibrate")?;
    let (stats_hash, _) = done.statistics.save(&path)?;
    discard(&partial)?;
    Ok((done.statistics, stats_hash))
}

/// Removes the work directory, and only what this tool put there.
fn remove_work(work: &Path) -> Result<()> {
    if work.symlink_metadata().is_err() {
        return Ok(());
    }
    discard(&work.join(STATISTICS))?;
    discard(&work.join(PARTIAL))?;
    std::fs::remove_dir(work).map_err(|e| FormatError::io(work, "remove", e))?;
    Ok(())
}
