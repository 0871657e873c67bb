//! `wush generate`: text from a checkpoint or a bundle, over the packed, windowed cache of the runtime.
//!
//! Enters: a request. Leaves: text, piece by piece while it comes, and a report of what it took. What is computed is
//! `wush-generate`'s; here are the prompt, the order of things, and the notes.

mod prompt;

use std::ops::ControlFlow;
use std::time::Instant;

use wush_checkpoint::stream::TextStream;
use wush_checkpoint::tokenizer::{TextTokenizer, eos_token_ids};
use wush_format::text::human_bytes;
use wush_generate::{Sampler, Session, bf16_bytes, most_bytes};
use wush_model::resident::stored_bytes;
use wush_runtime::CacheConfig;

use crate::cached::{Cached, load};
use crate::device::Runs;
use crate::error::InStage;
use crate::eval::UNQUANTIZED_BITS;
use crate::human::counted;
use crate::model::Model;
use crate::report::{AllottedBits, CacheUse, GenerateMemory, GenerateReport, ModelInfo, Rate, StopReason};
use crate::request::{CodeBits, Environment, GenerateRequest, KvBits};
use crate::sensitivity::average_bits;
use crate::{PipelineError, Result};
use prompt::Prompt;

/// Where the pieces of the text go; `Break` ends the generation.
pub type TextSink<'a> = dyn FnMut(&str) -> ControlFlow<()> + 'a;

/// Continues a prompt. `told` gets the text as it becomes known, in whole characters.
///
/// # Errors
/// What cannot be read; `Option` for a setting out of range; `EmptyPrompt`, `LongPrompt`, `NoChatTemplate`; `Generate`
/// for a bundle's transforms of other weights, numbers that are not finite; `Interrupted`.
pub fn generate(request: &GenerateRequest, env: &Environment<'_>, told: &mut TextSink<'_>) -> Result<GenerateReport> {
    let clock = Instant::now();
    let model = Model::resolve_any(&request.model, Runs::OnCpu, env)?;
    let plan = Plan::new(&model, request)?;
    plan.notes.iter().for_each(|note| env.monitor.note(&format!("note       {note}")));
    env.monitor.note(&plan.memory.describe());
    let (model_hash, decoder) = load(&model, env.monitor)?;
    let (cache, transforms) = plan.cached.cache(model_hash)?;
    let session = Session::new(&decoder, cache, transforms, plan.prompt.ids.len())?;
    let done = plan.run(session, request, env, told).in_stage("generate")?;
    Ok(GenerateReport {
        model: ModelInfo::new(&model, model_hash),
        chat: plan.prompt.chat,
        text: done.text,
        stop: done.stop,
        prompt: done.prompt,
        generated: done.generated,
        cache: done.cache,
        memory: plan.memory,
        notes: plan.notes,
        seconds: clock.elapsed().as_secs_f64(),
    })
}

/// A request that can run.
struct Plan<'a> {
    model: &'a Model,
    tokenizer: TextTokenizer,
    prompt: Prompt,
    /// Most tokens to generate.
    max_new: usize,
    cached: Cached<'a>,
    sampler: Sampler,
    memory: GenerateMemory,
    notes: Vec<String>,
}

/// What a run gave.
struct Done {
    text: String,
    stop: StopReason,
    prompt: Rate,
    generated: Rate,
    cache: CacheUse,
}

impl<'a> Plan<'a> {
    /// All that can fail before weights are read fails here.
    fn new(model: &'a Model, request: &GenerateRequest) -> Result<Self> {
        let sampler = Sampler::new(request.sampling)?;
        check_options(request)?;
        let cached = Cached::new(model, &request.cache)?;
        let tokenizer = TextTokenizer::open(model.dir())?;
        let prompt = Prompt::new(model, &tokenizer, request)?;
        let longest = wush_generate::longest(&model.spec, prompt.ids.len());
        let Some(room) = longest.checked_sub(prompt.ids.len()) else {
            return Err(PipelineError::LongPrompt { found: prompt.ids.len(), longest });
        };
        // The last token is never fed back.
        let max_new = request.max_new_tokens.min(room + 1);
        let n_tokens = prompt.ids.len() + max_new - 1;
        let memory = GenerateMemory::new(model, &cached.config, n_tokens, request.cache.chunk)?;
        let mut plan = Self { model, tokenizer, prompt, max_new, cached, sampler, memory, notes: Vec::new() };
        plan.notes = plan.notes(request.max_new_tokens, n_tokens)?;
        Ok(plan)
    }

    /// What the reader of the text should know.
    fn notes(&self, asked: usize, n_tokens: usize) -> Result<Vec<String>> {
        let mut notes = Vec::new();
        if self.prompt.chat {
            notes.push("the prompt goes through the chat template; --chat never continues it as it is".to_owned());
        }
        if self.max_new < asked {
            notes.push(format!(
                "at most {} can follow, not {asked}: the model reaches {} positions after this prompt",
                counted(self.max_new as u64, "token"),
                n_tokens
            ));
        }
        notes.extend(self.cached.notes(n_tokens)?);
        Ok(notes)
    }

    /// The prompt, then token after token.
    fn run(
        &self,
        mut session: Session<'_>,
        request: &GenerateRequest,
        env: &Environment<'_>,
        told: &mut TextSink<'_>,
    ) -> Result<Done> {
        let ids = &self.prompt.ids;
        env.monitor.begin("prompt", "tokens", ids.len() as u64);
        let clock = Instant::now();
        let logits = session.feed(ids, request.cache.chunk, env.monitor)?;
        let prompt = Rate::new(ids.len(), clock);
        env.monitor.end();
        let mut text = String::new();
        let mut tell = |piece: &str| {
            text.push_str(piece);
            if piece.is_empty() { ControlFlow::Continue(()) } else { told(piece) }
        };
        let clock = Instant::now();
        let (n_new, stop) = self.go_on(&mut session, logits, env, &mut tell)?;
        let generated = Rate::new(n_new, clock);
        let stop = match stop {
            StopReason::MaxNewTokens if n_new < request.max_new_tokens => StopReason::Positions,
            other => other,
        };
        Ok(Done { text, stop, prompt, generated, cache: self.cache_use(&session) })
    }

    /// Tokens after the one that `logits` are of; how many, and why they end.
    fn go_on(
        &self,
        session: &mut Session<'_>,
        mut logits: Vec<f32>,
        env: &Environment<'_>,
        tell: &mut TextSink<'_>,
    ) -> Result<(usize, StopReason)> {
        let ends = eos_token_ids(&self.model.checkpoint)?;
        let mut sampler = self.sampler.clone();
        let mut stream = TextStream::after(&self.tokenizer, &self.prompt.ids);
        let mut n_new = 0;
        let stop = loop {
            let id = sampler.pick(&logits);
            n_new += 1;
            if ends.contains(&id) {
                break StopReason::EndOfText;
            }
            if tell(&stream.push(id)?).is_break() {
                return Ok((n_new, StopReason::Reader));
            }
            if n_new == self.max_new {
                break StopReason::MaxNewTokens;
            }
            logits = session.feed(&[id], 1, env.monitor)?;
        };
        // The text ends here, whoever reads it.
        let _ = tell(&stream.finish()?);
        Ok((n_new, stop))
    }

    fn cache_use(&self, session: &Session<'_>) -> CacheUse {
        let Cached { settings, config, asked, .. } = &self.cached;
        let (memory, windows) = (session.memory(), config.windows);
        let bf16_bytes = bf16_bytes(config, session.n_tokens());
        let bits = settings.bits.as_deref();
        let is_allotted = matches!(asked, KvBits::Codes(CodeBits::Auto(_)));
        CacheUse {
            bits: bits.map_or(UNQUANTIZED_BITS, |bits| average_bits(&self.model.spec, bits)),
            allotment: bits.filter(|_| is_allotted).map_or_else(Vec::new, AllottedBits::list),
            quantizer: settings.quantizes().then(|| settings.quantizer.to_string()),
            transforms: session.is_transformed(),
            sink: windows.sink,
            keep: windows.keep,
            flush: windows.flush,
            tokens: session.n_tokens() as u64,
            bytes: memory.total() as u64,
            packed_bytes: (memory.page_keys + memory.page_values) as u64,
            bf16_bytes,
            ratio: memory.total() as f64 / (bf16_bytes as f64).max(1.0),
        }
    }
}

/// `--max-new-tokens`.
pub const DEFAULT_MAX_NEW_TOKENS: usize = 256;
/// `--chunk`: long enough that widening the weights for it costs little, short enough for progress.
pub const DEFAULT_CHUNK: usize = 256;

/// Counts that must not be 0, and options that would do nothing.
fn check_options(request: &GenerateRequest) -> Result<()> {
    let at_least_1 = |option, n: usize| match n {
        0 => Err(PipelineError::Option { option, expected: "at least 1".to_owned(), found: "0".to_owned() }),
        _ => Ok(()),
    };
    at_least_1("--max-new-tokens", request.max_new_tokens)?;
    at_least_1("--chunk", request.cache.chunk)?;
    let sampling = &request.sampling;
    if sampling.is_greedy() && (sampling.top_k.is_some() || sampling.top_p < 1.0) {
        return Err(PipelineError::Option {
            option: "--temperature",
            expected: "a number above 0 with --top-k or --top-p".to_owned(),
            found: "0, which takes the most likely token".to_owned(),
        });
    }
    Ok(())
}

impl GenerateMemory {
    fn new(model: &Model, config: &CacheConfig, n_tokens: usize, chunk: usize) -> Result<Self> {
        let weights = stored_bytes(&model.checkpoint, &model.spec)?;
        let cache = most_bytes(config, n_tokens, chunk)?;
        let activations = wush_generate::activation_bytes(&model.spec, chunk.min(n_tokens));
        let parts = [weights, cache, activations];
        Ok(Self {
            weights_map: model.checkpoint.n_weight_bytes(),
            weights,
            cache,
            activations,
            total: parts.iter().sum(),
        })
    }

    fn describe(&self) -> String {
        let Self { weights_map, weights, cache, activations, total } = *self;
        let [map, weights, cache, activations, total] =
            [weights_map, weights, cache, activations, total].map(human_bytes);
        format!(
            "memory     about {total} at most (weights as stored {weights}, cache {cache}, activations {activations}), and {map} \
             of mapped files"
        )
    }
}
