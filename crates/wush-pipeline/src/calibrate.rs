//! Token sequences to statistics: Algorithm 1's forward pass, a group of sequences at a time, saved as it goes.
//!
//! Sums are added in sequence order within each layer and one group ends before the next begins, so the grouping, a kill
//! between groups and the number of threads leave no trace in the bytes.

mod gpu;

use std::path::Path;
use std::time::{Duration, Instant};

use wush_format::atomic::discard;
use wush_format::hash::tokens_hash;
use wush_format::manifest::Calibration;
use wush_format::monitor::Monitor;
use wush_model::cpu::Cpu;
use wush_model::decoder::{Decoder, GROUP_TOKENS, groups};
use wush_stats::{Accumulator, SecondPass, Statistics, StatsInfo};

use crate::device::Device;
use crate::error::{InStage, Kept};
use crate::model::Model;
use crate::plan::{CalibratePlan, CalibrationPlan, n_tokens};
use crate::report::{CalibrateReport, ModelInfo, WrittenFile};
use crate::request::{CalibrateRequest, Environment};
use crate::{PipelineError, Result};

pub(crate) use gpu::describe as describe_gpu;
pub use gpu::{GpuUse, Layers};

/// How long a group of sequences should run, where they are short enough: a stop or a kill loses no more than that.
const GROUP_TIME: Duration = Duration::from_secs(60);

/// Tokens of the smallest group. Each group reads all weights once, which is little beside a pass of so many tokens.
const LEAST_GROUP_TOKENS: usize = 2048;

/// What a slow machine computes, in multiply-adds a second, for the size of the first group: later ones are sized by the
/// time that one took.
const SLOW_PACE: f64 = 2.5e10;

/// A save is worth while once the work since the last one took this many times as long as a save does: saving then costs
/// at most a twentieth of the time, and a killed run loses seconds and the group that it was in.
const WORK_PER_SAVE: u32 = 20;

/// `wush calibrate`: checkpoint and text to a statistics file.
///
/// # Errors
/// Whatever cannot be read or would be overwritten; `Interrupted`, with the sums so far kept beside the output.
pub fn calibrate(request: &CalibrateRequest, env: &Environment<'_>) -> Result<CalibrateReport> {
    let plan = CalibratePlan::new(request, env)?;
    plan.announce(env.monitor);
    let clock = Instant::now();
    let partial = plan.out.partial();
    if request.resume && partial.symlink_metadata().is_err() {
        env.monitor.note(NOTHING_TO_RESUME);
    }
    let done = accumulate(&plan.model, &plan.calibration, Some(&partial), env.monitor);
    let done = done.in_stage("calibrate").map_err(|e| e.resumable(&partial))?;
    let written = done.statistics.save(plan.out.staged()).map_err(|e| plan.out.named(e).resumable(&partial))?;
    let out = WrittenFile::new(&plan.out.path, written);
    plan.out.commit()?;
    discard(&partial)?;
    Ok(CalibrateReport {
        model: ModelInfo::new(&plan.model, done.statistics.info.model_hash),
        calibration: calibration_of(&done.statistics.info),
        shard: plan.shard,
        resumed_sequences: done.resumed_sequences as u64,
        notes: plan.notes,
        memory: plan.memory,
        gpus: done.gpus,
        out,
        seconds: clock.elapsed().as_secs_f64(),
    })
}

/// Said when a run is to be resumed that was never begun, or that saved nothing.
pub(crate) const NOTHING_TO_RESUME: &str = "resume     nothing is saved here: this run begins with the first sequence";

/// Statistics over all sequences of a plan.
pub(crate) struct Accumulated {
    /// The sums.
    pub(crate) statistics: Statistics,
    /// Sequences that an interrupted run had done.
    pub(crate) resumed_sequences: usize,
    /// What was used of GPUs.
    pub(crate) gpus: Vec<GpuUse>,
}

/// Runs the forward pass over every sequence that the partial file, if any, does not hold yet; without one nothing is saved.
///
/// # Errors
/// `OtherPlan` when the partial file is another run's; NaN or infinity, naming the layer; `Interrupted`.
pub(crate) fn accumulate(
    model: &Model,
    plan: &CalibrationPlan,
    partial: Option<&Path>,
    monitor: &dyn Monitor,
) -> Result<Accumulated> {
    let mut statistics = begin(model, plan, partial)?;
    let resumed_sequences = statistics.info.sequence_hashes.len();
    if resumed_sequences > 0 {
        monitor.note(&format!("resume     {resumed_sequences} of {} sequences are done", plan.sequences.len()));
    }
    monitor.begin("calibrate", "tokens", n_tokens(&plan.sequences[resumed_sequences..]));
    let mut saver = Saver::new(partial, resumed_sequences, plan.sequences.len());
    let gpus = match &model.device {
        Device::Cpu { .. } => {
            on_cpu(model, plan, &mut statistics, &mut saver, monitor)?;
            Vec::new()
        }
        Device::Cuda(devices) => gpu::accumulate(devices, model, plan, &mut statistics, &mut saver, monitor)?,
    };
    Ok(Accumulated { statistics, resumed_sequences, gpus })
}

/// Sums over the sequences of a plan that `statistics` do not hold yet, groups of them in order.
fn on_cpu(
    model: &Model,
    plan: &CalibrationPlan,
    statistics: &mut Statistics,
    saver: &mut Saver<'_>,
    monitor: &dyn Monitor,
) -> Result<()> {
    let left = &plan.sequences[statistics.info.sequence_hashes.len()..];
    let decoder = Decoder::new(&model.checkpoint, &model.spec, &Cpu);
    let work_per_token = decoder.memory(1).layer as f64 / size_of::<f32>() as f64 * model.spec.layers.len() as f64;
    let (mut at, mut n_group_tokens) = (0, tokens_in_time(1, Duration::from_secs_f64(work_per_token / SLOW_PACE)));
    while let Some(group) = groups(&left[at..], n_group_tokens).next() {
        let sequences = &left[at..][group];
        let start = Instant::now();
        let mut accumulator = Accumulator::new(statistics, sequences).with_weights(&model.checkpoint, &model.spec);
        let kept = saver.kept(plan.sequences.len());
        decoder.observe(sequences, &mut accumulator, monitor).map_err(|e| with_kept(e.into(), kept))?;
        accumulator.finish()?;
        n_group_tokens = tokens_in_time(n_tokens(sequences), start.elapsed());
        at += sequences.len();
        if at < left.len() {
            saver.save_if_due(statistics)?;
        }
    }
    monitor.end();
    if plan.second_pass {
        weigh(plan, statistics, saver.path, monitor, |mut pass| {
            decoder.observe(&plan.sequences, &mut pass, monitor)?;
            pass.finish();
            Ok(())
        })?;
    }
    Ok(())
}

/// Tokens of a group that runs for [`GROUP_TIME`], after `n_tokens` took `elapsed`.
fn tokens_in_time(n_tokens: u64, elapsed: Duration) -> usize {
    let ratio = GROUP_TIME.as_secs_f64() / elapsed.as_secs_f64().max(f64::MIN_POSITIVE);
    // Beyond the largest integer the cast saturates.
    ((n_tokens as f64 * ratio) as usize).clamp(LEAST_GROUP_TOKENS, GROUP_TOKENS)
}

/// The second pass, from its start: it is not saved in between, the first pass is. `run` shows it every sequence, and ends it.
fn weigh(
    plan: &CalibrationPlan,
    statistics: &mut Statistics,
    partial: Option<&Path>,
    monitor: &dyn Monitor,
    run: impl FnOnce(SecondPass<'_>) -> Result<()>,
) -> Result<()> {
    let total = plan.sequences.len();
    partial.map(|path| statistics.save_unfinished(path, total)).transpose()?;
    let kept = partial.map(|_| Kept { done: total, total });
    monitor.begin("weigh", "tokens", n_tokens(&plan.sequences));
    run(SecondPass::new(statistics)?).map_err(|e| with_kept(e, kept))?;
    monitor.end();
    Ok(())
}

/// The statistics to go on from: those of the partial file, else empty ones with the part that needs no text.
fn begin(model: &Model, plan: &CalibrationPlan, partial: Option<&Path>) -> Result<Statistics> {
    if let Some(partial) = partial.filter(|path| path.symlink_metadata().is_ok()) {
        let mut statistics = load_saved(partial)?;
        if !is_prefix(&statistics.info, plan) {
            let difference = difference(&statistics.info, plan);
            return Err(PipelineError::OtherPlan { path: partial.to_owned(), difference });
        }
        statistics.drop_second_pass();
        return Ok(statistics);
    }
    let info = StatsInfo { positions: 0, max_seq_len: 0, sequence_hashes: Vec::new(), ..plan.info.clone() };
    let mut statistics = Statistics::new(&model.spec, info);
    wush_stats::output_gram(&model.checkpoint, &model.spec, &mut statistics)?;
    Ok(statistics)
}

/// Statistics that an earlier run saved.
///
/// # Errors
/// `DamagedWork`.
pub(crate) fn load_saved(path: &Path) -> Result<Statistics> {
    Statistics::load_saved(path)
        .map_err(|source| PipelineError::DamagedWork { path: path.to_owned(), source: Box::new(source) })
}

/// Whether `found` describes all or the first sequences of `plan`, with the same settings.
pub(crate) fn is_prefix(found: &StatsInfo, plan: &CalibrationPlan) -> bool {
    let done = found.sequence_hashes.len();
    let Some(hashes) = plan.info.sequence_hashes.get(..done) else { return false };
    let sequences = &plan.sequences[..done];
    let expected = StatsInfo {
        positions: n_tokens(sequences),
        max_seq_len: sequences.iter().map(|ids| ids.len() as u64).max().unwrap_or(0),
        sequence_hashes: hashes.to_vec(),
        ..plan.info.clone()
    };
    // A second pass is done again, or dropped.
    StatsInfo { second_pass: false, ..found.clone() } == expected
}

/// What keeps `found` from being the start of `plan`, as "--seq-len: 1024 there, 512 here".
pub(crate) fn difference(found: &StatsInfo, plan: &CalibrationPlan) -> String {
    let done = found.sequence_hashes.len();
    let here = &plan.info;
    let longest = plan.sequences.iter().take(done).map(|ids| ids.len() as u64).max().unwrap_or(0);
    let differs =
        |what: &str, there: &str, here: &str| (there != here).then(|| format!("{what}: {there} there, {here} here"));
    let scaling = |info: &StatsInfo| info.rope_scaling.clone().unwrap_or_else(|| "none".to_owned());
    let model = |info: &StatsInfo| format!("{} ({}…)", info.model_id, &info.model_hash.to_string()[..8]);
    let yes = |there: bool| if there { "yes" } else { "no" };
    let at_least = format!("at least {done}");
    let sequences = (done > plan.sequences.len())
        .then(|| format!("number of --sequences: {at_least} there, {} here", plan.sequences.len()));
    differs("model", &model(found), &model(here))
        .or_else(|| differs("--rope-scaling", &scaling(found), &scaling(here)))
        .or_else(|| differs("version of wush", &found.tool, &here.tool))
        .or_else(|| differs("--hessian attention", yes(found.attention_hessians), yes(here.attention_hessians)))
        .or_else(|| differs("device", &found.device, &here.device))
        .or_else(|| differs("text", &found.source, &here.source))
        .or(sequences)
        .or_else(|| differs("--seq-len", &found.max_seq_len.to_string(), &longest.to_string()))
        .unwrap_or_else(|| format!("text: the sequences of {} are not the same, or in another order", here.source))
}

/// Saves partial sums often enough, and not more.
struct Saver<'a> {
    /// None where nothing is to be kept.
    path: Option<&'a Path>,
    /// Sequences in the file.
    n_saved: usize,
    /// Sequences of the run.
    n_planned: usize,
    last: Instant,
    cost: Duration,
}

impl<'a> Saver<'a> {
    fn new(path: Option<&'a Path>, n_saved: usize, n_planned: usize) -> Self {
        Self { path, n_saved, n_planned, last: Instant::now(), cost: Duration::ZERO }
    }

    /// What an interruption leaves of `total` sequences.
    fn kept(&self, total: usize) -> Option<Kept> {
        self.path.map(|_| Kept { done: self.n_saved, total })
    }

    /// Whether enough was done since the last save.
    fn is_due(&self) -> bool {
        self.path.is_some() && self.last.elapsed() >= self.cost.saturating_mul(WORK_PER_SAVE)
    }

    fn save_if_due(&mut self, statistics: &Statistics) -> Result<()> {
        let Some(path) = self.path.filter(|_| self.is_due()) else { return Ok(()) };
        let start = Instant::now();
        statistics.save_unfinished(path, self.n_planned)?;
        self.n_saved = statistics.info.sequence_hashes.len();
        self.last = Instant::now();
        self.cost = self.last - start;
        Ok(())
    }
}

/// An interruption here leaves work that can be continued, if any is kept.
pub(crate) fn with_kept(error: PipelineError, kept: Option<Kept>) -> PipelineError {
    if error.is_interruption() { PipelineError::Interrupted { kept } } else { error }
}

/// What statistics are over, as the manifest states it.
pub(crate) fn calibration_of(info: &StatsInfo) -> Calibration {
    Calibration {
        source: info.source.clone(),
        tokens_hash: tokens_hash(&info.sequence_hashes),
        sequences: info.sequence_hashes.len() as u64,
        tokens: info.positions,
        max_seq_len: info.max_seq_len,
        rope_scaling: info.rope_scaling.clone(),
        device: info.device.clone(),
        compute: info.compute.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_run_for_a_minute_within_their_bounds() {
        assert_eq!(tokens_in_time(2048, Duration::from_secs(30)), 4096);
        assert_eq!(tokens_in_time(2048, Duration::ZERO), GROUP_TOKENS);
        assert_eq!(tokens_in_time(32_768, Duration::from_secs(3600)), LEAST_GROUP_TOKENS);
    }
}
