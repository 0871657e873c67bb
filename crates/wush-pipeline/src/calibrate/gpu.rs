//! Calibration on a GPU: weights stay on the card, sequences follow each other through it, and their sums stay there until they
//! are saved.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use wush_format::monitor::Monitor;
use wush_gpu::backend::Gpu;
use wush_gpu::plan::GpuMemory;
use wush_gpu::statistics::RunningSums;
use wush_gpu::{Device, DeviceInfo, GpuError};
use wush_model::decoder::Decoder;
use wush_model::spec::ModelSpec;
use wush_stats::{LayerSums, Statistics, StatsInfo};

use super::{Saver, weigh, with_kept};
use crate::human::human_bytes;
use crate::model::Model;
use crate::plan::{CalibrationPlan, longest};
use crate::{PipelineError, Result};

/// Activations of the forward pass.
type Activations = half::bf16;

/// What a calibration used of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GpuUse {
    /// "cuda:0 (NVIDIA H200)".
    pub device: String,
    /// Bytes that were planned: weights, activations, statistics and scratch.
    pub planned: u64,
    /// Bytes that were taken from the device at most.
    pub peak: u64,
}

/// Bytes of a run's memory on the card, and a line that says so.
///
/// # Errors
/// `Gpu` when the card has not so much free.
pub(crate) fn plan(device: &DeviceInfo, spec: &ModelSpec, n_tokens: usize) -> Result<(GpuMemory, String)> {
    let memory = GpuMemory::of::<Activations>(spec, n_tokens);
    let free = Device::open(device.ordinal).and_then(|device| device.free_memory()).map_err(PipelineError::Gpu)?;
    if memory.total() > free {
        let error = GpuError::OutOfMemory { wanted: memory.total(), in_use: device.memory - free, limit: free };
        return Err(PipelineError::Gpu(error));
    }
    let GpuMemory { weights, activations, statistics, scratch } = memory;
    let [total, free, weights, activations, statistics, scratch] =
        [memory.total(), free, weights, activations, statistics, scratch].map(human_bytes);
    let line = format!(
        "GPU        cuda:{}: about {total} of {free} free (weights {weights}, activations {activations}, statistics {statistics}, \
         scratch {scratch})",
        device.ordinal
    );
    Ok((memory, line))
}

/// Sums over the sequences of a plan that `statistics` do not hold yet; sequences in order. Several GPUs take a share each: their
/// sums meet at the end, in the order of the devices, and differ from one GPU's by the rounding of that.
///
/// # Errors
/// As [`super::accumulate`]; `Gpu`.
pub(super) fn accumulate(
    devices: &[DeviceInfo],
    model: &Model,
    plan: &CalibrationPlan,
    statistics: &mut Statistics,
    saver: &mut Saver<'_>,
    monitor: &dyn Monitor,
) -> Result<Vec<GpuUse>> {
    let Some(first) = devices.first() else { return Err(PipelineError::Gpu(GpuError::NoDevice)) };
    let kept = saver.kept(plan.sequences.len());
    let uses = match devices.len() {
        1 => vec![on_one(first, model, plan, statistics, saver, monitor)?],
        _ => on_several(devices, model, plan, statistics, monitor).map_err(|e| with_kept(e, kept))?,
    };
    monitor.end();
    if plan.second_pass {
        let card = Card::open(first, model)?;
        weigh(&card.decoder(), plan, statistics, saver.path, monitor)?;
    }
    Ok(uses)
}

/// One GPU with a model on it.
struct Card<'a> {
    info: &'a DeviceInfo,
    model: &'a Model,
    gpu: Gpu<Activations>,
}

impl<'a> Card<'a> {
    fn open(info: &'a DeviceInfo, model: &'a Model) -> Result<Self> {
        let device = Device::open(info.ordinal).map_err(PipelineError::Gpu)?;
        Ok(Self { info, model, gpu: Gpu::new(device) })
    }

    fn decoder(&self) -> Decoder<'_, Gpu<Activations>> {
        Decoder::new(&self.model.checkpoint, &self.model.spec, &self.gpu).keeping_weights()
    }

    /// Sums that go on from `statistics`.
    fn sums(&self, statistics: &Statistics) -> Result<RunningSums<'a>> {
        let weights = (&self.model.checkpoint, &self.model.spec);
        RunningSums::new(self.gpu.device(), weights, statistics).map_err(PipelineError::Gpu)
    }

    fn used(&self, planned: &GpuMemory) -> GpuUse {
        GpuUse {
            device: format!("cuda:{} ({})", self.info.ordinal, self.info.name),
            planned: planned.total(),
            peak: self.gpu.device().memory().peak_reserved,
        }
    }
}

fn on_one(
    info: &DeviceInfo,
    model: &Model,
    plan: &CalibrationPlan,
    statistics: &mut Statistics,
    saver: &mut Saver<'_>,
    monitor: &dyn Monitor,
) -> Result<GpuUse> {
    let (memory, line) = self::plan(info, &model.spec, longest(&plan.sequences))?;
    monitor.note(&line);
    let card = Card::open(info, model)?;
    let (decoder, mut sums) = (card.decoder(), card.sums(statistics)?);
    let resumed = statistics.info.sequence_hashes.len();
    let mut counted = resumed;
    for done in resumed..plan.sequences.len() {
        let kept = saver.kept(plan.sequences.len());
        let sequence = std::slice::from_ref(&plan.sequences[done]);
        decoder.observe(sequence, &mut sums, monitor).map_err(|e| with_kept(e.into(), kept))?;
        let is_last = done + 1 == plan.sequences.len();
        if is_last || saver.is_due() {
            let downloaded = sums.download().map_err(PipelineError::Gpu)?;
            statistics.take_over(downloaded, &plan.sequences[counted..=done])?;
            counted = done + 1;
        }
        if !is_last {
            saver.save_if_due(statistics)?;
        }
    }
    Ok(card.used(&memory))
}

/// A thread a GPU; nothing is saved before the end.
fn on_several(
    devices: &[DeviceInfo],
    model: &Model,
    plan: &CalibrationPlan,
    statistics: &mut Statistics,
    monitor: &dyn Monitor,
) -> Result<Vec<GpuUse>> {
    let resumed = statistics.info.sequence_hashes.len();
    let cut = |i: usize| resumed + i * (plan.sequences.len() - resumed) / devices.len();
    // What earlier runs summed goes on on the first.
    let start = |i: usize| {
        let sequence_hashes = plan.info.sequence_hashes[..cut(i)].to_vec();
        let zeros = || Statistics::new(&model.spec, StatsInfo { sequence_hashes, ..plan.info.clone() });
        if i == 0 { statistics.clone() } else { zeros() }
    };
    let shares: Vec<Result<(Vec<LayerSums>, GpuUse)>> = std::thread::scope(|scope| {
        let begin = |(i, info)| {
            let (start, sequences) = (start(i), &plan.sequences[cut(i)..cut(i + 1)]);
            scope.spawn(move || share(info, model, sequences, &start, monitor))
        };
        let threads: Vec<_> = devices.iter().enumerate().map(begin).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| thread.join();
        threads
            .into_iter()
            .map(|thread| join(thread).unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    let (mut total, mut uses): (Option<Vec<LayerSums>>, _) = (None, Vec::new());
    for share in shares {
        let (sums, used) = share?;
        uses.push(used);
        match &mut total {
            Some(total) => total.iter_mut().zip(&sums).for_each(|(total, part)| total.add(part)),
            None => total = Some(sums),
        }
    }
    statistics.take_over(total.unwrap_or_default(), &plan.sequences[resumed..])?;
    Ok(uses)
}

/// Sums over `sequences`, on top of `start`.
fn share(
    info: &DeviceInfo,
    model: &Model,
    sequences: &[Vec<u32>],
    start: &Statistics,
    monitor: &dyn Monitor,
) -> Result<(Vec<LayerSums>, GpuUse)> {
    let (memory, line) = plan(info, &model.spec, longest(sequences))?;
    monitor.note(&line);
    let card = Card::open(info, model)?;
    let (decoder, mut sums) = (card.decoder(), card.sums(start)?);
    for sequence in sequences {
        decoder.observe(std::slice::from_ref(sequence), &mut sums, monitor)?;
    }
    Ok((sums.download().map_err(PipelineError::Gpu)?, card.used(&memory)))
}
