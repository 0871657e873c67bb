//! `wush generate`: text from a model over its quantized cache.

use std::path::PathBuf;

use clap::Args;
use wush_pipeline::request::{
    CacheRequest, Chat, GenerateRequest, KvBits, Method, PromptSource, Sampling, WindowOptions,
};

use super::{ModelArgs, number, seed, whole_number};

/// `wush generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    prompt: PromptArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    cache: CacheArgs,
}

/// The prompt.
#[derive(Debug, Args)]
#[command(next_help_heading = "Prompt")]
struct PromptArgs {
    /// What to continue, or to answer
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, required_unless_present = "prompt_file")]
    prompt: Option<String>,
    /// A file of it, - for the standard input; its last line end is left out
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    prompt_file: Option<PathBuf>,
    /// A message before the prompt that says how to answer, where the checkpoint has a chat template
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    system: Option<String>,
    /// auto: the prompt is a message to the model where the checkpoint has a chat template, and text to continue where not;
    /// always: a message; never: text to continue
    #[arg(long, value_name = "WHEN", default_value_t)]
    chat: Chat,
}

/// How tokens are chosen.
#[derive(Debug, Args)]
#[command(next_help_heading = "Tokens")]
struct SamplingArgs {
    /// Tokens to generate at most; the model's end of text ends it sooner
    #[arg(long, value_name = "N", default_value_t = wush_pipeline::DEFAULT_MAX_NEW_TOKENS)]
    #[arg(allow_negative_numbers = true, value_parser = whole_number)]
    max_new_tokens: usize,
    /// Divides the logits before a token is drawn; 0 takes the most likely token, always
    #[arg(long, value_name = "T", default_value_t = 0.0, allow_hyphen_values = true, value_parser = number)]
    temperature: f64,
    /// Draw from so many of the most likely tokens [default: all]
    #[arg(long, value_name = "K", allow_negative_numbers = true, value_parser = whole_number)]
    top_k: Option<usize>,
    /// Draw from the fewest most likely tokens that have this probability together
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_hyphen_values = true, value_parser = number)]
    top_p: f64,
    /// Of the draws: the same seed gives the same text
    #[arg(long, default_value_t = 0, allow_negative_numbers = true, value_parser = seed)]
    seed: u64,
}

/// The cache.
#[derive(Debug, Args)]
#[command(next_help_heading = "Cache")]
pub(super) struct CacheArgs {
    /// Bits of keys and values in the cache: 2, 3, 4, 8, or auto:AVERAGE, such as auto:2.25, which allots 2, 3 or 4 bits to each
    /// layer's keys and values by what `wush convert` measured; 16 quantizes nothing [default: 2 for a bundle, 16 for a
    /// checkpoint]
    #[arg(long, value_name = "BITS")]
    kv_bits: Option<KvBits>,
    /// The quantizer: quest, quest-wide, oscar or oscar-linear, each also with its parameter, such as oscar:0.97 [default: what
    /// suits the bundle, quest-wide with error feedback and quest without]
    #[arg(long, value_name = "NAME")]
    quantizer: Option<Method>,
    /// First tokens, in full precision for ever [default: 64; this and the next two by default those of the paper's serving runs, where `eval ppl` has its study's]
    #[arg(long, value_name = "N", value_parser = whole_number)]
    sink: Option<usize>,
    /// Newest tokens, in full precision [default: 256]
    #[arg(long, value_name = "N", value_parser = whole_number)]
    keep: Option<usize>,
    /// Tokens between both are quantized in multiples of this [default: 8]
    #[arg(long, value_name = "N", value_parser = whole_number)]
    flush: Option<usize>,
    /// Tokens of the prompt that enter the cache together: they read each other in full precision
    #[arg(long, value_name = "N", default_value_t = wush_pipeline::DEFAULT_CHUNK, value_parser = whole_number)]
    chunk: usize,
}

impl GenerateArgs {
    /// The request that was typed.
    pub fn request(self) -> GenerateRequest {
        let Self { model, prompt, sampling, cache } = self;
        let SamplingArgs { max_new_tokens, temperature, top_k, top_p, seed } = sampling;
        GenerateRequest {
            model: model.request(),
            chat: prompt.chat,
            system: prompt.system.clone(),
            prompt: prompt.source(),
            cache: cache.request(),
            max_new_tokens,
            sampling: Sampling { temperature, top_k, top_p, seed },
        }
    }
}

impl CacheArgs {
    /// The cache that was typed.
    pub(super) fn request(self) -> CacheRequest {
        let Self { kv_bits, quantizer, sink, keep, flush, chunk } = self;
        CacheRequest { kv_bits, quantizer, windows: WindowOptions { sink, keep, flush }, chunk }
    }
}

impl PromptArgs {
    fn source(self) -> PromptSource {
        match self.prompt_file {
            None => PromptSource::Text(self.prompt.unwrap_or_default()),
            Some(path) if path.as_os_str() == "-" => PromptSource::Stdin,
            Some(path) => PromptSource::File(path),
        }
    }
}
