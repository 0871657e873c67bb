//! `wush eval`: what a quantized cache costs.

use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};
use wush_pipeline::plan;
use wush_pipeline::request::{
    CalibSource, CalibrationRequest, CodeBits, EvalPplRequest, EvalRequest, Method, Protocol, ScaleDtype,
    StatisticsSource, TransformsRequest,
};

use super::{ModelArgs, SolveOptionsArgs, whole_number};

/// `wush eval`.
#[derive(Debug, Args)]
pub struct EvalArgs {
    /// What to measure.
    #[command(subcommand)]
    pub command: EvalCommand,
}

/// What is measured.
#[derive(Debug, Subcommand)]
pub enum EvalCommand {
    /// Perplexity of a text through the quantized cache
    Ppl(EvalPplArgs),
    /// Errors inside each attention module: products, probabilities, outputs
    Recon(WhatArgs),
}

/// What every evaluation is told.
#[derive(Debug, Args)]
pub struct WhatArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// The text to evaluate on: a file as for --calib, or a .json of token-id lists
    #[arg(long, value_name = "SOURCE")]
    text: CalibSource,
    /// Column or key of the text
    #[arg(long, value_name = "NAME", default_value = plan::DEFAULT_TEXT_FIELD)]
    text_field: String,
    /// Tokens a window [default: 2048; not with token-id lists, which are used as they are]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole_number)]
    seq_len: Option<usize>,
    /// Number of windows [default: all]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole_number)]
    windows: Option<usize>,
    /// Also write the report as one self-contained page with plots, in place of an older one; outside of MODEL
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    #[command(flatten)]
    quantizers: QuantizerArgs,
    #[command(flatten)]
    transforms: TransformListArgs,
}

/// `wush eval ppl`.
#[derive(Debug, Args)]
pub struct EvalPplArgs {
    #[command(flatten)]
    what: WhatArgs,
    #[command(flatten)]
    windows: WindowArgs,
}

/// How coordinates are quantized.
#[derive(Debug, Args)]
#[command(next_help_heading = "Cache")]
struct QuantizerArgs {
    /// Bits of a code, a list: 2, 3, 4, 8, or auto:AVERAGE, such as auto:2.25, which allots 2, 3 or 4 bits to each layer's keys
    /// and values by what 2 bits do to its output on calibration text
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "4,3,2")]
    bits: Vec<CodeBits>,
    /// Quantizers, a list: quest, quest-wide, oscar or oscar-linear, each also with its parameter, such as oscar:0.97 [default:
    /// what suits the transform, quest-wide with error feedback and quest without]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    quantizer: Vec<Method>,
    /// How scales and zero points are stored: bf16, as a server's cache has them, or f32
    #[arg(long, value_name = "DTYPE", default_value_t = ScaleDtype::Bf16)]
    scale_dtype: ScaleDtype,
}

/// Which tokens are quantized when.
#[derive(Debug, Args)]
#[command(next_help_heading = "Cache")]
struct WindowArgs {
    /// Tokens a step
    #[arg(long, value_name = "N", default_value_t = Protocol::PAPER.chunk, value_parser = whole_number)]
    chunk: usize,
    /// First tokens, exact for ever; these windows are the paper's study's, smaller than those of `generate`
    #[arg(long, value_name = "N", default_value_t = Protocol::PAPER.sink, value_parser = whole_number)]
    sink: usize,
    /// Newest tokens, exact
    #[arg(long, value_name = "N", default_value_t = Protocol::PAPER.keep, value_parser = whole_number)]
    keep: usize,
    /// Tokens between both are quantized in multiples of this
    #[arg(long, value_name = "N", default_value_t = Protocol::PAPER.flush, value_parser = whole_number)]
    flush: usize,
}

/// The transforms and what they are solved from.
#[derive(Debug, Args)]
#[command(next_help_heading = "Transform")]
pub struct TransformListArgs {
    /// Transforms, a list [default: identity, hadamard and wush; a bundle is evaluated with its own]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = PossibleValuesParser::new(plan::transform_names()))]
    transform: Option<Vec<String>>,
    #[command(flatten)]
    options: SolveOptionsArgs,
    /// Statistics file to solve from
    #[arg(long, value_name = "FILE", conflicts_with = "calib", help_heading = "Calibration text")]
    stats: Option<PathBuf>,
    /// Text to calibrate on, once for all transforms of the list: a source as for `wush calibrate`. Nothing is kept of it
    #[arg(long, value_name = "SOURCE", help_heading = "Calibration text")]
    calib: Option<CalibSource>,
    /// Number of sequences [default: 128; all of them when the source is token-id lists]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole_number, requires = "calib")]
    #[arg(help_heading = "Calibration text")]
    sequences: Option<usize>,
    /// Tokens a sequence [default: as long as what is evaluated]; not with token-id lists
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole_number, requires = "calib")]
    #[arg(help_heading = "Calibration text")]
    calib_seq_len: Option<usize>,
    /// Column or key of the text
    #[arg(long, value_name = "NAME", default_value = plan::DEFAULT_TEXT_FIELD, requires = "calib")]
    #[arg(help_heading = "Calibration text")]
    calib_text_field: String,
}

impl TransformListArgs {
    /// The request that was typed.
    pub fn request(self) -> TransformsRequest {
        let Self { transform, options, stats, calib, sequences, calib_seq_len, calib_text_field } = self;
        let text =
            |source| CalibrationRequest { source, text_field: calib_text_field, sequences, seq_len: calib_seq_len };
        TransformsRequest {
            names: transform,
            settings: options.request(plan::DEFAULT_TRANSFORM.to_owned()),
            statistics: match (stats, calib) {
                (Some(path), _) => StatisticsSource::File(path),
                (None, Some(source)) => StatisticsSource::Text(text(source)),
                (None, None) => StatisticsSource::None,
            },
        }
    }
}

impl WhatArgs {
    /// The request that was typed.
    pub fn request(self) -> EvalRequest {
        let Self { model, text, text_field, seq_len, windows, html, quantizers, transforms } = self;
        EvalRequest {
            model: model.request(),
            text: CalibrationRequest { source: text, text_field, sequences: windows, seq_len },
            bits: quantizers.bits,
            quantizers: quantizers.quantizer,
            scales: quantizers.scale_dtype,
            transforms: transforms.request(),
            html,
        }
    }
}

impl EvalPplArgs {
    /// The request that was typed.
    pub fn request(self) -> EvalPplRequest {
        let WindowArgs { chunk, sink, keep, flush } = self.windows;
        EvalPplRequest { eval: self.what.request(), protocol: Protocol { chunk, sink, keep, flush } }
    }
}
