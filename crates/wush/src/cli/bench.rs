//! `wush bench`: how fast a GPU is, beside its own limits.

use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};
use wush_pipeline::request::DeviceChoice;
use wush_pipeline::{BenchCalibrateRequest, BenchKernelsRequest, shape_names};

use super::{GpuArgs, whole_number};

/// `wush bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// What to measure.
    #[command(subcommand)]
    pub command: BenchCommand,
}

/// What is measured.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Each kernel on one layer's activations, beside the least that it could take
    Kernels(BenchKernelsArgs),
    /// A calibration of a model of a given shape, with random weights made on the card
    Calibrate(BenchCalibrateArgs),
}

/// `wush bench kernels`.
#[derive(Debug, Args)]
pub struct BenchKernelsArgs {
    /// auto, cuda or cuda:N; for a calibration also cuda:all
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// Whose layers
    #[arg(long, default_value = "qwen3-8b", value_parser = PossibleValuesParser::new(shape_names()))]
    shape: String,
    /// Tokens of the sequence
    #[arg(long, value_name = "N", default_value_t = 32_768, allow_negative_numbers = true, value_parser = whole_number)]
    seq_len: usize,
}

/// `wush bench calibrate`.
#[derive(Debug, Args)]
pub struct BenchCalibrateArgs {
    #[command(flatten)]
    layer: BenchKernelsArgs,
    /// Sequences to time, after one that warms up
    #[arg(long, value_name = "N", default_value_t = 5, allow_negative_numbers = true, value_parser = whole_number)]
    sequences: usize,
    #[command(flatten)]
    gpu: GpuArgs,
}

impl BenchCalibrateArgs {
    /// The request that was typed.
    pub fn request(self) -> BenchCalibrateRequest {
        let BenchKernelsArgs { device, shape, seq_len } = self.layer;
        let max_gpu_memory = self.gpu.max_gpu_memory;
        BenchCalibrateRequest { device, shape, seq_len, sequences: self.sequences, max_gpu_memory }
    }
}

impl BenchKernelsArgs {
    /// The request that was typed.
    pub fn request(self) -> BenchKernelsRequest {
        BenchKernelsRequest { device: self.device, shape: self.shape, seq_len: self.seq_len }
    }
}
