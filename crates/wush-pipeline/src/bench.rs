//! `wush bench`: how fast a GPU is, beside its own limits.
//!
//! Enters: the shape of a model. Leaves: the card's ceilings, measured in the same run, and what each kernel took beside the least that it
//! could. No checkpoint is read.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use wush_format::FormatError;
use wush_gpu::bench::calibrate::{self, ModelShape, SHAPES};
use wush_gpu::bench::{self, Ceilings, Timing};
use wush_gpu::{Device as Gpu, DeviceInfo};

use crate::device::{Device, Runs};
use crate::request::{DeviceChoice, Environment};
use crate::{PipelineError, Result};

/// `wush bench kernels`.
#[derive(Debug, Clone)]
pub struct BenchKernelsRequest {
    /// `--device`.
    pub device: DeviceChoice,
    /// `--shape`: a name of [`shape_names`].
    pub shape: String,
    /// `--seq-len`.
    pub seq_len: usize,
}

/// `wush bench calibrate`.
#[derive(Debug, Clone)]
pub struct BenchCalibrateRequest {
    /// `--device`.
    pub device: DeviceChoice,
    /// `--shape`: a name of [`shape_names`].
    pub shape: String,
    /// `--seq-len`.
    pub seq_len: usize,
    /// `--sequences`.
    pub sequences: usize,
}

/// `wush bench calibrate --format json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BenchCalibrateReport {
    /// The GPU, "cuda:0 (NVIDIA H200)".
    pub device: String,
    /// What it can do at most, measured in this run.
    pub ceilings: CeilingsReport,
    /// The model's.
    pub shape: String,
    /// Tokens a sequence.
    pub seq_len: u64,
    /// Bytes that were planned on the card.
    pub planned: u64,
    /// Bytes that were taken from it at most.
    pub peak: u64,
    /// Median over the sequences.
    pub seconds_per_sequence: f64,
    /// Tokens a second at that.
    pub tokens_per_second: f64,
    /// Operations of matrix products a second at that, a multiply-add being two.
    pub operations_per_second: f64,
    /// Time over that of the same operations at the product's short and sustained rates.
    pub over_floor: OverFloor,
    /// One a sequence.
    pub rows: Vec<SequenceRow>,
    /// Seconds of a sequence by stage, largest first, in a run of its own.
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

/// `wush bench kernels --format json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BenchKernelsReport {
    /// The GPU, "cuda:0 (NVIDIA H200)".
    pub device: String,
    /// What it can do at most, measured in this run.
    pub ceilings: CeilingsReport,
    /// Whose layer it is.
    pub shape: String,
    /// Tokens.
    pub seq_len: u64,
    /// One a kernel.
    pub rows: Vec<KernelRow>,
}

/// A device's own limits.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CeilingsReport {
    /// Operations a second of an 8192³ bf16 product, median of single launches.
    pub matmul_short: f64,
    /// The same on end: what a card that is limited by power keeps up.
    pub matmul_sustained: f64,
    /// Bytes a second, read and written, of a copy.
    pub copy: f64,
}

/// A kernel's time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct KernelRow {
    /// Which.
    pub kernel: String,
    /// Median of its launches.
    pub seconds: f64,
    /// Operations a second, a multiply-add being two; 0 where bytes are all that counts.
    pub operations_per_second: f64,
    /// Bytes a second that had to move, each once.
    pub bytes_per_second: f64,
    /// The least that it could take: operations at the sustained rate of the product, or bytes at that of the copy.
    pub floor_seconds: f64,
    /// Time over floor.
    pub ratio: f64,
}

impl CeilingsReport {
    fn new(ceilings: &Ceilings) -> Self {
        let Ceilings { matmul_short, matmul_sustained, copy } = *ceilings;
        Self { matmul_short, matmul_sustained, copy }
    }
}

impl KernelRow {
    fn new(timing: &Timing, ceilings: &Ceilings) -> Self {
        let floor_seconds = timing.floor(ceilings);
        Self {
            kernel: timing.name.to_owned(),
            seconds: timing.seconds,
            operations_per_second: timing.operations / timing.seconds,
            bytes_per_second: timing.bytes / timing.seconds,
            floor_seconds,
            ratio: timing.seconds / floor_seconds,
        }
    }
}

/// `wush bench kernels`: every kernel of a forward pass and its statistics on one layer of a shape.
///
/// # Errors
/// `Option` for an unknown shape, no tokens, or the CPU; `Gpu`.
pub fn bench_kernels(request: &BenchKernelsRequest, env: &Environment<'_>) -> Result<BenchKernelsReport> {
    let shape = named(&request.shape)?;
    at_least_1("--seq-len", request.seq_len)?;
    let (info, device) = gpu(&request.device)?;
    let run = || -> wush_gpu::Result<_> {
        let ceilings = bench::ceilings(&device)?;
        env.monitor.note(&format!("ceilings   {}", describe(&ceilings)));
        Ok((ceilings, bench::kernels(&device, &shape.layer(), request.seq_len)?))
    };
    let (ceilings, timings) = run().map_err(PipelineError::Gpu)?;
    Ok(BenchKernelsReport {
        device: Device::Cuda(vec![info]).describe(),
        ceilings: CeilingsReport::new(&ceilings),
        shape: shape.name.to_owned(),
        seq_len: request.seq_len as u64,
        rows: timings.iter().map(|timing| KernelRow::new(timing, &ceilings)).collect(),
    })
}

/// `wush bench calibrate`: a calibration of a model of this shape, its weights drawn on the card, its tokens at random.
///
/// # Errors
/// `Option` for an unknown shape, no tokens or sequences, or the CPU; `Gpu`; `Model`; `Io` for a stand-in of the checkpoint, which is
/// a temporary file of holes.
pub fn bench_calibrate(request: &BenchCalibrateRequest, env: &Environment<'_>) -> Result<BenchCalibrateReport> {
    let shape = named(&request.shape)?;
    at_least_1("--seq-len", request.seq_len)?;
    at_least_1("--sequences", request.sequences)?;
    let (info, device) = gpu(&request.device)?;
    let ceilings = bench::ceilings(&device).map_err(PipelineError::Gpu)?;
    env.monitor.note(&format!("ceilings   {}", describe(&ceilings)));
    let folder = tempfile::tempdir().map_err(|e| FormatError::io(std::env::temp_dir(), "create a folder in", e))?;
    let stand_in = folder.path();
    shape.write(stand_in, request.seq_len).map_err(|e| FormatError::io(stand_in, "write", e))?;
    let done = calibrate::calibrate(&device, shape, (request.sequences, request.seq_len), stand_in)?;
    let seconds = done.seconds();
    let operations: f64 = done.operations.iter().sum();
    let mut stages: Vec<StageRow> =
        done.stages.iter().map(|(stage, &seconds)| StageRow { stage: (*stage).to_owned(), seconds }).collect();
    stages.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    Ok(BenchCalibrateReport {
        device: Device::Cuda(vec![info]).describe(),
        ceilings: CeilingsReport::new(&ceilings),
        shape: shape.name.to_owned(),
        seq_len: request.seq_len as u64,
        planned: done.planned,
        peak: done.peak,
        seconds_per_sequence: seconds,
        tokens_per_second: request.seq_len as f64 / seconds,
        operations_per_second: operations / seconds,
        over_floor: OverFloor {
            short: seconds * ceilings.matmul_short / operations,
            sustained: seconds * ceilings.matmul_sustained / operations,
        },
        rows: (1..).zip(&done.sequences).map(|(sequence, &seconds)| SequenceRow { sequence, seconds }).collect(),
        stages,
    })
}

fn at_least_1(option: &'static str, n: usize) -> Result<()> {
    match n {
        0 => Err(PipelineError::Option { option, expected: "at least 1".to_owned(), found: "0".to_owned() }),
        _ => Ok(()),
    }
}

/// Names of all shapes.
pub fn shape_names() -> Vec<&'static str> {
    SHAPES.iter().map(|shape| shape.name).collect()
}

fn named(name: &str) -> Result<&'static ModelShape> {
    ModelShape::named(name).ok_or_else(|| PipelineError::Option {
        option: "--shape",
        expected: shape_names().join(", "),
        found: name.to_owned(),
    })
}

/// The GPU to measure: there is no sense in measuring the CPU in its place.
///
/// # Errors
/// `Option` for the CPU; `Gpu` where there is none.
fn gpu(choice: &DeviceChoice) -> Result<(DeviceInfo, Gpu)> {
    let choice = if *choice == DeviceChoice::Auto { &DeviceChoice::Cuda(None) } else { choice };
    match Device::pick(choice, Runs::OnGpu)? {
        Device::Cuda(devices) if devices.len() == 1 => {
            let info = devices.into_iter().next().expect("one");
            let device = Gpu::open(info.ordinal).map_err(PipelineError::Gpu)?;
            Ok((info, device))
        }
        other => Err(PipelineError::Option {
            option: "--device",
            expected: "one GPU: cuda or cuda:N".to_owned(),
            found: other.describe(),
        }),
    }
}

/// "a bf16 product of 8192³ 760 TFLOP/s, sustained 670; a copy 4.20 TB/s".
fn describe(ceilings: &Ceilings) -> String {
    format!(
        "a bf16 product of 8192³ {:.0} TFLOP/s, sustained {:.0}; a copy {:.2} TB/s, read and written",
        ceilings.matmul_short / 1e12,
        ceilings.matmul_sustained / 1e12,
        ceilings.copy / 1e12
    )
}
