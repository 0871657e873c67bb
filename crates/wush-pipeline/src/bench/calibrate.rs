//! `wush bench calibrate`: a calibration of a model that is only a shape, on one GPU or on several at once.

use std::sync::{Condvar, Mutex, PoisonError};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use wush_format::FormatError;
use wush_gpu::bench::calibrate::{Calibration, Size, StandIn};
use wush_gpu::plan::GpuMemory;
use wush_gpu::{Device as Gpu, DeviceInfo, bench};

use super::{CeilingsReport, at_least_1, describe, gpus, named};
use crate::calibrate::{Layers, describe_gpu};
use crate::device::Device;
use crate::request::{ByteSize, DeviceChoice, Environment};
use crate::{PipelineError, Result};

/// `wush bench calibrate`.
#[derive(Debug, Clone)]
pub struct BenchCalibrateRequest {
    /// `--device`.
    pub device: DeviceChoice,
    /// `--shape`: a name of [`shape_names`](crate::bench::shape_names).
    pub shape: String,
    /// `--seq-len`.
    pub seq_len: usize,
    /// `--sequences`.
    pub sequences: usize,
    /// `--max-gpu-memory`.
    pub max_gpu_memory: Option<ByteSize>,
}

/// `wush bench calibrate --format json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BenchCalibrateReport {
    /// The GPUs, "cuda:0 (NVIDIA H200), cuda:1 (NVIDIA H200)".
    pub device: String,
    /// What the first can do at most, measured in this run.
    pub ceilings: CeilingsReport,
    /// The model's.
    pub shape: String,
    /// Tokens a sequence.
    pub seq_len: u64,
    /// Where its layers were. Streamed ones came from random numbers in host memory, as those of a mapped file do once the system
    /// has read it, and all sequences went through each together.
    pub layers: Layers,
    /// Sequences that were timed.
    pub sequences: u64,
    /// Bytes that were planned on a card.
    pub planned: u64,
    /// Bytes that were taken from one at most.
    pub peak: u64,
    /// Bytes of pinned host memory for hidden states.
    pub pinned: u64,
    /// Median over the sequences; the mean where they went through the layers together, or to several GPUs.
    pub seconds_per_sequence: f64,
    /// Tokens a second at that.
    pub tokens_per_second: f64,
    /// Operations of matrix products a second at that, a multiply-add being two.
    pub operations_per_second: f64,
    /// Time over that of the same operations at the product's short and sustained rates.
    pub over_floor: OverFloor,
    /// One a sequence, or one for all that went through the layers together.
    pub rows: Vec<SequenceRow>,
    /// Seconds of a sequence by stage on the first GPU, largest first: in a run of its own, or in that of streamed layers.
    pub stages: Vec<StageRow>,
}

/// Time over the floors.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OverFloor {
    /// At the rate of a product in a short run.
    pub short: f64,
    /// At its sustained rate.
    pub sustained: f64,
}

/// A sequence of the benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SequenceRow {
    /// From 1.
    pub sequence: u64,
    /// From its token ids to its last sum.
    pub seconds: f64,
}

/// A stage of the forward pass.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StageRow {
    /// Which.
    pub stage: String,
    /// Seconds of a sequence.
    pub seconds: f64,
}

/// `wush bench calibrate`: a calibration of a model of this shape, its weights drawn on the card, its tokens at random. Several GPUs take
/// a share of the sequences each, and begin together.
///
/// # Errors
/// `Option` for an unknown shape, no tokens, fewer sequences than GPUs, or the CPU; `Gpu`; `Model`; `Io` for a stand-in of the
/// checkpoint, which is a temporary file of holes.
pub fn bench_calibrate(request: &BenchCalibrateRequest, env: &Environment<'_>) -> Result<BenchCalibrateReport> {
    let shape = named(&request.shape)?;
    at_least_1("--seq-len", request.seq_len)?;
    let infos = gpus(&request.device, "GPUs: cuda, cuda:N or cuda:all")?;
    if request.sequences < infos.len() {
        let (expected, found) = (format!("at least one a GPU, {}", infos.len()), request.sequences.to_string());
        return Err(PipelineError::Option { option: "--sequences", expected, found });
    }
    let folder = tempfile::tempdir().map_err(|e| FormatError::io(std::env::temp_dir(), "create a folder in", e))?;
    let stand_in = folder.path();
    shape.write(stand_in, request.seq_len).map_err(|e| FormatError::io(stand_in, "write", e))?;
    let model = StandIn::open(shape, stand_in)?;
    // What does not fit is refused before anything is measured.
    for info in &infos {
        Planned::on(info, &model, (request, 1)).map_err(PipelineError::Gpu)?;
    }
    // A handle of its own: what the ceilings take is not the calibration's.
    let ceilings =
        Gpu::open(infos[0].ordinal).and_then(|device| bench::ceilings(&device)).map_err(PipelineError::Gpu)?;
    env.monitor.note(&format!("ceilings   {}", describe(&ceilings)));
    let gate = Gate::new(infos.len());
    let cut = |i: usize| i * request.sequences / infos.len();
    let done: Vec<Result<Share>> = std::thread::scope(|scope| {
        let begin = |(i, info)| {
            let (model, gate, n_sequences) = (&model, &gate, cut(i + 1) - cut(i));
            scope.spawn(move || Share::run(info, model, (request, n_sequences), gate, env))
        };
        let threads: Vec<_> = infos.iter().enumerate().map(begin).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| thread.join();
        threads.into_iter().map(|t| join(t).unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    let shares = done.into_iter().collect::<Result<Vec<_>>>()?;
    Ok(report(request, infos, CeilingsReport::new(&ceilings), &shares))
}

/// A GPU, and what its share of the sequences will take of it.
struct Planned {
    device: Gpu,
    size: Size,
    memory: GpuMemory,
}

impl Planned {
    fn on(
        info: &DeviceInfo,
        model: &StandIn,
        (request, n_sequences): (&BenchCalibrateRequest, usize),
    ) -> wush_gpu::Result<Self> {
        let device = Gpu::open(info.ordinal)?;
        let free = device.free_memory()?;
        let limit = request.max_gpu_memory.map_or(free, |most| most.0.min(free));
        let size = Size { n_sequences, seq_len: request.seq_len, limit };
        let memory = model.memory(&size)?;
        Ok(Self { device, size, memory })
    }
}

/// What one GPU did.
struct Share {
    layers: Layers,
    planned: u64,
    done: Calibration,
}

impl Share {
    fn run(
        info: &DeviceInfo,
        model: &StandIn,
        (request, n_sequences): (&BenchCalibrateRequest, usize),
        gate: &Gate,
        env: &Environment<'_>,
    ) -> Result<Self> {
        let run = || {
            let Planned { device, size, memory } =
                Planned::on(info, model, (request, n_sequences)).map_err(PipelineError::Gpu)?;
            let n_tokens = n_sequences * request.seq_len;
            env.monitor.note(&describe_gpu(info.ordinal, &memory, size.limit, (n_tokens, model.width())));
            let done = model.calibrate(&device, &size, &memory, || gate.wait())?;
            Ok(Self { layers: memory.placement.into(), planned: memory.total(), done })
        };
        run().inspect_err(|_| gate.open())
    }
}

/// Holds the threads of several GPUs until all are ready, or one of them failed.
struct Gate {
    missing: Mutex<usize>,
    changed: Condvar,
}

impl Gate {
    fn new(n_threads: usize) -> Self {
        Self { missing: Mutex::new(n_threads), changed: Condvar::new() }
    }

    /// Waits for the others.
    fn wait(&self) {
        let mut missing = self.missing.lock().unwrap_or_else(PoisonError::into_inner);
        *missing = missing.saturating_sub(1);
        self.changed.notify_all();
        while *missing > 0 {
            missing = self.changed.wait(missing).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits for nobody any more.
    fn open(&self) {
        *self.missing.lock().unwrap_or_else(PoisonError::into_inner) = 0;
        self.changed.notify_all();
    }
}

fn report(
    request: &BenchCalibrateRequest,
    infos: Vec<DeviceInfo>,
    ceilings: CeilingsReport,
    shares: &[Share],
) -> BenchCalibrateReport {
    let (n_gpus, first) = (shares.len() as f64, &shares[0].done);
    let most = |value: &dyn Fn(&Share) -> u64| shares.iter().map(value).max().unwrap_or(0);
    let seconds = match shares {
        [one] => one.done.seconds(),
        _ => shares.iter().map(|share| share.done.total_seconds).fold(0.0, f64::max) / request.sequences as f64,
    };
    let operations: f64 = first.operations.iter().sum();
    let rows = shares.iter().flat_map(|share| &share.done.sequences);
    let mut stages: Vec<StageRow> =
        first.stages.iter().map(|(stage, &seconds)| StageRow { stage: (*stage).to_owned(), seconds }).collect();
    stages.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    BenchCalibrateReport {
        device: Device::Cuda(infos).describe(),
        ceilings,
        shape: request.shape.clone(),
        seq_len: request.seq_len as u64,
        layers: shares[0].layers,
        sequences: request.sequences as u64,
        planned: most(&|share| share.planned),
        peak: most(&|share| share.done.peak[0]),
        pinned: shares.iter().map(|share| share.done.peak[1]).sum(),
        seconds_per_sequence: seconds,
        tokens_per_second: request.seq_len as f64 / seconds,
        operations_per_second: operations / seconds,
        over_floor: OverFloor {
            short: seconds * n_gpus * ceilings.matmul_short / operations,
            sustained: seconds * n_gpus * ceilings.matmul_sustained / operations,
        },
        rows: (1..).zip(rows).map(|(sequence, &seconds)| SequenceRow { sequence, seconds }).collect(),
        stages,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_opens_for_all_or_when_one_has_failed() {
        for n_waiting in [3, 2] {
            let gate = Gate::new(3);
            std::thread::scope(|scope| {
                (0..n_waiting).for_each(|_| drop(scope.spawn(|| gate.wait())));
                if n_waiting < 3 {
                    gate.open();
                }
            });
            assert_eq!(*gate.missing.lock().expect("whole"), 0);
        }
    }
}
