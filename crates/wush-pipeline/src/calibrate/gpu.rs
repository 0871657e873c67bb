//! Calibration on a GPU: weights stay on the card and sequences follow each other through it, or layers follow each other and groups of
//! sequences go through them; sums stay there until they are saved.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use wush_format::monitor::Monitor;
use wush_format::text::human_bytes;
use wush_gpu::backend::Gpu;
use wush_gpu::forward::{Forward, GROUP_TOKENS};
use wush_gpu::plan::{GpuMemory, Placement, Work};
use wush_gpu::statistics::RunningSums;
use wush_gpu::weighted::WeightedSums;
use wush_gpu::{Device, DeviceInfo, GpuError};
use wush_model::decoder::Decoder;
use wush_stats::{LayerSums, SecondPass, Statistics, StatsInfo};

use super::{Saver, weigh, with_kept};
use crate::model::Model;
use crate::plan::{CalibrationPlan, longest, n_tokens};
use crate::request::ByteSize;
use crate::{PipelineError, Result};

/// Activations of the forward pass.
type Activations = half::bf16;

/// Where a model's layers were while it ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Layers {
    /// All on the card.
    Resident,
    /// Two on the card at a time.
    Streamed,
}

impl From<Placement> for Layers {
    fn from(placement: Placement) -> Self {
        match placement {
            Placement::Resident => Self::Resident,
            Placement::Streamed => Self::Streamed,
        }
    }
}

/// What a calibration used of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GpuUse {
    /// "cuda:0 (NVIDIA H200)".
    pub device: String,
    /// Where the layers were.
    pub layers: Layers,
    /// Bytes that were planned: weights, activations, statistics and scratch.
    pub planned: u64,
    /// Bytes that were taken from the device at most.
    pub peak: u64,
    /// Bytes of pinned host memory for hidden states, 0 where the layers are resident.
    pub pinned: u64,
}

/// Bytes of a run's memory on the card, and how many it may take: what is free, or less where that was asked for.
///
/// # Errors
/// `Gpu` when the model does not fit, layer by layer either.
pub(crate) fn plan(device: &Device, work: &Work<'_>, most: Option<ByteSize>) -> Result<(GpuMemory, u64)> {
    let free = device.free_memory().map_err(PipelineError::Gpu)?;
    let limit = most.map_or(free, |most| most.0.min(free));
    let memory = GpuMemory::within::<Activations>(work, limit).map_err(PipelineError::Gpu)?;
    Ok((memory, limit))
}

/// A line that states a plan, for sequences of `n_tokens` in all through a model of `width`.
pub(crate) fn describe(ordinal: usize, memory: &GpuMemory, limit: u64, (n_tokens, width): (usize, usize)) -> String {
    // What a group's states take while they wait for the next layer.
    let waiting = (n_tokens.min(GROUP_TOKENS) * width * size_of::<Activations>()) as u64;
    let GpuMemory { placement, weights, activations, statistics, scratch } = *memory;
    let [total, limit, weights, activations, statistics, scratch] =
        [memory.total(), limit, weights, activations, statistics, scratch].map(human_bytes);
    let (layers, host) = match placement {
        Placement::Resident => ("", String::new()),
        Placement::Streamed => (
            " of two layers at a time, each read once a group of sequences,",
            format!("; up to {} of host memory for hidden states", human_bytes(waiting)),
        ),
    };
    format!(
        "GPU        cuda:{ordinal}: about {total} of {limit} (weights{layers} {weights}, activations {activations}, statistics \
         {statistics}, scratch {scratch}){host}"
    )
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
        let card = Card::open(first, model, plan, &plan.sequences, monitor)?;
        weigh(plan, statistics, saver.path, monitor, |pass| card.weigh(plan, pass, monitor))?;
    }
    Ok(uses)
}

/// One GPU with a model on it.
struct Card<'a> {
    info: &'a DeviceInfo,
    model: &'a Model,
    planned: GpuMemory,
    forward: Forward<Activations>,
}

impl<'a> Card<'a> {
    /// Opens the GPU for `sequences`, and says how its memory will be used.
    fn open(
        info: &'a DeviceInfo,
        model: &'a Model,
        plan: &CalibrationPlan,
        sequences: &[Vec<u32>],
        monitor: &dyn Monitor,
    ) -> Result<Self> {
        let device = Device::open(info.ordinal).map_err(PipelineError::Gpu)?;
        let work = Work {
            checkpoint: Some(&model.checkpoint),
            spec: &model.spec,
            n_tokens: longest(sequences),
            hessians: plan.info.attention_hessians,
        };
        let (planned, limit) = self::plan(&device, &work, plan.max_gpu_memory)?;
        let size = (n_tokens(sequences) as usize, model.spec.hidden_size);
        monitor.note(&describe(info.ordinal, &planned, limit, size));
        let forward = Forward::new(Gpu::new(device), Gpu::new, (&work, &planned), limit).map_err(PipelineError::Gpu)?;
        Ok(Self { info, model, planned, forward })
    }

    fn decoder(&self) -> Decoder<'_, Gpu<Activations>> {
        self.forward.decoder(&self.model.checkpoint, &self.model.spec)
    }

    /// Sums that go on from `statistics`.
    fn sums(&self, statistics: &Statistics) -> Result<RunningSums<'a>> {
        let weights = (&self.model.checkpoint, &self.model.spec);
        RunningSums::new(self.forward.gpu().device(), weights, statistics).map_err(PipelineError::Gpu)
    }

    /// Adds one group of sequences to `sums`.
    fn add(
        &self,
        decoder: &Decoder<'_, Gpu<Activations>>,
        sequences: &[Vec<u32>],
        sums: &mut RunningSums<'_>,
        monitor: &dyn Monitor,
    ) -> Result<()> {
        if self.forward.is_streamed() {
            sums.by_layer(sequences.len()).map_err(PipelineError::Gpu)?;
        }
        Ok(self.forward.observe(decoder, sequences, sums, monitor)?)
    }

    /// OSCAR's second pass over all sequences of a plan.
    fn weigh(&self, plan: &CalibrationPlan, pass: SecondPass<'_>, monitor: &dyn Monitor) -> Result<()> {
        let device = self.forward.gpu().device();
        let (decoder, sums) = (self.decoder(), WeightedSums::new(device, pass.means()));
        let mut sums = sums.map_err(PipelineError::Gpu)?;
        for group in self.forward.groups(&plan.sequences) {
            self.forward.observe(&decoder, &plan.sequences[group], &mut sums, monitor)?;
        }
        pass.finish_with(sums.download().map_err(PipelineError::Gpu)?);
        Ok(())
    }

    fn used(&self) -> GpuUse {
        let [peak, pinned] = self.forward.peak();
        GpuUse {
            device: format!("cuda:{} ({})", self.info.ordinal, self.info.name),
            layers: self.planned.placement.into(),
            planned: self.planned.total(),
            peak,
            pinned,
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
    let resumed = statistics.info.sequence_hashes.len();
    let left = &plan.sequences[resumed..];
    let card = Card::open(info, model, plan, left, monitor)?;
    let (decoder, mut sums) = (card.decoder(), card.sums(statistics)?);
    let mut counted = 0;
    for group in card.forward.groups(left) {
        let kept = saver.kept(plan.sequences.len());
        card.add(&decoder, &left[group.clone()], &mut sums, monitor).map_err(|e| with_kept(e, kept))?;
        let is_last = group.end == left.len();
        if is_last || saver.is_due() {
            let downloaded = sums.download().map_err(PipelineError::Gpu)?;
            statistics.take_over(downloaded, &left[counted..group.end])?;
            counted = group.end;
        }
        if !is_last {
            saver.save_if_due(statistics)?;
        }
    }
    Ok(card.used())
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
            scope.spawn(move || share(info, model, (plan, sequences), &start, monitor))
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

/// Sums over `sequences` of a plan, on top of `start`.
fn share(
    info: &DeviceInfo,
    model: &Model,
    (plan, sequences): (&CalibrationPlan, &[Vec<u32>]),
    start: &Statistics,
    monitor: &dyn Monitor,
) -> Result<(Vec<LayerSums>, GpuUse)> {
    let card = Card::open(info, model, plan, sequences, monitor)?;
    let (decoder, mut sums) = (card.decoder(), card.sums(start)?);
    for group in card.forward.groups(sequences) {
        card.add(&decoder, &sequences[group], &mut sums, monitor)?;
    }
    Ok((sums.download().map_err(PipelineError::Gpu)?, card.used()))
}
