//! `wush bench`: how fast a GPU is, beside its own limits.
//!
//! Enters: the shape of a model. Leaves: the card's ceilings, measured in the same run, and what each kernel took beside the least that it
//! could. No checkpoint is read.

mod calibrate;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use wush_gpu::bench::calibrate::{ModelShape, SHAPES};
use wush_gpu::bench::{self, Ceilings, Timing};
use wush_gpu::{Device as Gpu, DeviceInfo};

use crate::device::{Device, Runs};
use crate::request::{DeviceChoice, Environment};
use crate::{PipelineError, Result};

pub use calibrate::{BenchCalibrateReport, BenchCalibrateRequest, SequenceRow, StageRow, bench_calibrate};

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

/// The GPUs to measure: there is no sense in measuring the CPU in their place.
///
/// # Errors
/// `Option` for the CPU, in place of what is `expected`; `Gpu` where there is none.
fn gpus(choice: &DeviceChoice, expected: &str) -> Result<Vec<DeviceInfo>> {
    let choice = if *choice == DeviceChoice::Auto { &DeviceChoice::Cuda(None) } else { choice };
    match Device::pick(choice, Runs::OnGpu)? {
        Device::Cuda(infos) => Ok(infos),
        cpu @ Device::Cpu { .. } => Err(not_measured(expected, &cpu)),
    }
}

/// The one GPU to measure.
///
/// # Errors
/// As [`gpus`]; `Option` for several.
fn gpu(choice: &DeviceChoice) -> Result<(DeviceInfo, Gpu)> {
    let expected = "one GPU: cuda or cuda:N";
    match <[DeviceInfo; 1]>::try_from(gpus(choice, expected)?) {
        Ok([info]) => {
            let device = Gpu::open(info.ordinal).map_err(PipelineError::Gpu)?;
            Ok((info, device))
        }
        Err(infos) => Err(not_measured(expected, &Device::Cuda(infos))),
    }
}

fn not_measured(expected: &str, found: &Device) -> PipelineError {
    PipelineError::Option { option: "--device", expected: expected.to_owned(), found: found.describe() }
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
