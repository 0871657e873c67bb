//! `wush eval`: what a quantized cache costs.

use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};
use wush_pipeline::plan;
use wush_pipeline::request::{
    Bits, CalibSource, CalibrationRequest, CenterKeys, EvalPplRequest, Method, Preset, Protocol, SolveSettings,
};

use super::{ModelArgs, whole_number};

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
}

/// `wush eval ppl`.
#[derive(Debug, Args)]
pub struct EvalPplArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// The text to score: a file as for --calib, or a .json of token-id lists
    #[arg(long, value_name = "SOURCE")]
    text: CalibSource,
    /// Column or key of the text
    #[arg(long, value_name = "NAME", default_value = plan::DEFAULT_TEXT_FIELD)]
    text_field: String,
    /// Tokens a window [default: 2048; not with token-id lists, which are used as they are]
    #[arg(long, value_name = "N", value_parser = whole_number)]
    seq_len: Option<usize>,
    /// Number of windows [default: all]
    #[arg(long, value_name = "N", value_parser = whole_number)]
    windows: Option<usize>,
    #[command(flatten)]
    cache: CacheArgs,
    #[command(flatten)]
    transforms: TransformListArgs,
}

/// The cache.
#[derive(Debug, Args)]
#[command(next_help_heading = "Cache")]
struct CacheArgs {
    /// Bits of a code, a list: 2, 3, 4 or 8
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "4,3,2")]
    bits: Vec<Bits>,
    /// Quantizers, a list: quest, oscar or oscar-linear, each also with its parameter, such as oscar:0.97
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "quest")]
    quantizer: Vec<Method>,
    /// Tokens a step
    #[arg(long, value_name = "N", default_value_t = Protocol::PAPER.chunk, value_parser = whole_number)]
    chunk: usize,
    /// First tokens, exact for ever
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
#[command(next_help_heading = "Transforms")]
struct TransformListArgs {
    /// Transforms, a list [default: identity, hadamard and wush; a bundle is evaluated with its own]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = PossibleValuesParser::new(plan::transform_names()))]
    transform: Option<Vec<String>>,
    /// Statistics file to solve from
    #[arg(long, value_name = "FILE")]
    stats: Option<PathBuf>,
    /// default: what measurements favour; paper: the method exactly as published
    #[arg(long, default_value_t = Preset::Default)]
    preset: Preset,
    /// Exponent p of Λ in T, instead of the preset's
    #[arg(long, value_name = "P", allow_hyphen_values = true)]
    exponent: Option<f64>,
    /// The transform's last, orthogonal factor, instead of the preset's
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(plan::factor_names()))]
    factor: Option<String>,
    /// Which heads' keys are centred, instead of the preset's
    #[arg(long, value_name = "WHICH")]
    center_keys: Option<CenterKeys>,
    /// Encode with error feedback
    #[arg(long)]
    feedback: bool,
}

impl EvalPplArgs {
    /// The request that was typed.
    pub fn request(self) -> EvalPplRequest {
        let Self { model, text, text_field, seq_len, windows, cache, transforms } = self;
        let CacheArgs { bits, quantizer, chunk, sink, keep, flush } = cache;
        let TransformListArgs { transform, stats, preset, exponent, factor, center_keys, feedback } = transforms;
        EvalPplRequest {
            model: model.request(),
            text: CalibrationRequest { source: text, text_field, sequences: windows, seq_len },
            protocol: Protocol { chunk, sink, keep, flush },
            bits,
            quantizers: quantizer,
            transforms: transform,
            settings: SolveSettings {
                exponent,
                factor,
                center_keys,
                feedback: feedback.then_some(true),
                ..SolveSettings::of_preset(plan::DEFAULT_TRANSFORM, preset)
            },
            statistics: stats,
        }
    }
}
