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
use wush_stats::Statistics;

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
        "GPU        about {total} of {free} free (weights {weights}, activations {activations}, statistics {statistics}, \
         scratch {scratch})"
    );
    Ok((memory, line))
}

/// Sums over the sequences of a plan from `resumed` on, as the CPU's loop makes them; sequences in order.
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
) -> Result<GpuUse> {
    let Some(info) = devices.first() else { return Err(PipelineError::Gpu(GpuError::NoDevice)) };
    let (memory, line) = self::plan(info, &model.spec, longest(&plan.sequences))?;
    monitor.note(&line);
    let device = Device::open(info.ordinal).map_err(PipelineError::Gpu)?;
    let gpu = Gpu::<Activations>::new(device.clone());
    let decoder = Decoder::new(&model.checkpoint, &model.spec, &gpu).keeping_weights();
    let weights = (&model.checkpoint, &model.spec);
    let mut sums = RunningSums::new(&device, weights, statistics).map_err(PipelineError::Gpu)?;
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
    monitor.end();
    if plan.second_pass {
        weigh(&decoder, plan, statistics, saver.path, monitor)?;
    }
    let device_name = format!("cuda:{} ({})", info.ordinal, info.name);
    Ok(GpuUse { device: device_name, planned: memory.total(), peak: device.memory().peak_reserved })
}
