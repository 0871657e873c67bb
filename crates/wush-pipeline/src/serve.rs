//! `wush serve`: a checkpoint or a bundle over HTTP, from the runtime's cache.
//!
//! Enters: a request. Leaves: answers over HTTP until the program is asked to stop, and a report. How it is served is `wush-serve`'s;
//! here the model is found and checked, as for `wush generate`.

use std::net::{IpAddr, Ipv4Addr};

use wush_checkpoint::chat::ChatTemplate;
use wush_checkpoint::tokenizer::{TextTokenizer, eos_token_ids};
use wush_format::text::{human_bytes, is_plain};
use wush_generate::{Batch, activation_bytes};
use wush_model::resident::stored_bytes;
use wush_serve::{ApiKey, Limits, Served, Settings};

use crate::cached::{Cached, load};
use crate::device::Runs;
use crate::model::Model;
use crate::report::{ModelInfo, ServeReport};
use crate::request::{Environment, ServeRequest};
use crate::{PipelineError, Result};

/// Sequences that may be computed, or wait, at most: more than any machine has memory for.
const MOST_SEQUENCES: usize = 1 << 20;

/// `--host`: this machine alone.
pub const DEFAULT_HOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
/// `--port`.
pub const DEFAULT_PORT: u16 = 8000;

/// Serves until interrupted.
///
/// # Errors
/// What cannot be read; `Option` for a setting out of range; `Generate` for a bundle's transforms of other weights; `Serve` for an
/// address that is taken; `Interrupted`, only while the weights are loaded.
pub fn serve(request: &ServeRequest, env: &Environment<'_>) -> Result<ServeReport> {
    let settings = settings(request)?;
    let model = Model::resolve_any(&request.model, Runs::OnCpu, env)?;
    let names = names(&model, request.model_name.as_deref())?;
    let cached = Cached::new(&model, &request.cache)?;
    let tokenizer = TextTokenizer::open(model.dir())?;
    let template = ChatTemplate::open(model.dir())?;
    let ends = eos_token_ids(&model.checkpoint)?;
    tell(&model, &cached, &settings, template.is_some(), env)?;
    let (model_hash, decoder) = load(&model, env.monitor)?;
    let (cache, transforms) = cached.cache(model_hash)?;
    let batch = Batch::new(&decoder, cache, transforms)?;
    let served = Served { names, batch, config: cached.config.clone(), tokenizer, template, ends };
    let summary = wush_serve::serve(served, settings, env.monitor)?;
    Ok(ServeReport {
        model: ModelInfo::new(&model, model_hash),
        requests: summary.requests,
        prompt_tokens: summary.prompt_tokens,
        reused_tokens: summary.reused_tokens,
        generated_tokens: summary.generated_tokens,
        cancelled: summary.cancelled,
        cache_bytes_left: summary.cache_bytes_left,
        seconds: summary.seconds,
    })
}

/// Numbers that must not be 0 or without bound, and the key.
fn settings(request: &ServeRequest) -> Result<Settings> {
    let limits = Limits { chunk: request.cache.chunk, ..request.limits };
    for (option, n) in [
        ("--chunk", limits.chunk),
        ("--max-running", limits.max_running),
        ("--max-len", limits.max_len.unwrap_or(1)),
        ("--max-body", limits.max_body_bytes),
        ("--cache-memory", usize::from(limits.max_cache_bytes > 0)),
    ] {
        if n == 0 {
            return Err(PipelineError::Option { option, expected: "at least 1".to_owned(), found: "0".to_owned() });
        }
    }
    for (option, n) in [("--max-running", limits.max_running), ("--max-waiting", limits.max_waiting)] {
        if n > MOST_SEQUENCES {
            let expected = format!("at most {MOST_SEQUENCES}");
            return Err(PipelineError::Option { option, expected, found: n.to_string() });
        }
    }
    let key = request.api_key.as_deref().map(|key| {
        ApiKey::new(key).ok_or_else(|| PipelineError::Option {
            option: "--api-key",
            expected: "letters, digits and signs of ASCII, without spaces".to_owned(),
            found: if key.is_empty() { "nothing" } else { "other characters" }.to_owned(),
        })
    });
    Ok(Settings { address: request.address, key: key.transpose()?, limits })
}

/// What requests may call the model: its name, and as it was typed.
fn names(model: &Model, asked: Option<&str>) -> Result<Vec<String>> {
    let name = asked.unwrap_or(&model.id);
    if name.is_empty() || !is_plain(name) {
        return Err(PipelineError::Option {
            option: "--model-name",
            expected: "a name of printable characters".to_owned(),
            found: wush_format::json::shown(name),
        });
    }
    Ok(vec![name.to_owned(), model.argument.clone()])
}

/// What the user should know before the weights are read.
fn tell(
    model: &Model,
    cached: &Cached<'_>,
    settings: &Settings,
    has_template: bool,
    env: &Environment<'_>,
) -> Result<()> {
    let Settings { address, key, limits } = settings;
    let note = |line: &str| env.monitor.note(&format!("note       {line}"));
    let n_tokens = model.spec.max_position_embeddings.min(limits.max_len.unwrap_or(usize::MAX));
    cached.notes(n_tokens)?.iter().for_each(|line| note(line));
    if !has_template {
        note("the model has no chat template: /v1/completions serves it, /v1/chat/completions does not");
    }
    if !address.ip().is_loopback() && key.is_none() {
        note("other machines can reach this address, and there is no --api-key: whoever reaches it may use the model");
    }
    let weights = stored_bytes(&model.checkpoint, &model.spec)?;
    let activations = activation_bytes(&model.spec, limits.chunk.max(limits.max_running));
    let logits = (limits.max_running * model.spec.vocab_size * size_of::<f32>()) as u64;
    let total = weights + limits.max_cache_bytes + activations + logits;
    let [total, weights, cache, activations] =
        [total, weights, limits.max_cache_bytes, activations + logits].map(human_bytes);
    env.monitor.note(&format!(
        "memory     about {total} at most (weights as stored {weights}, cache {cache}, activations {activations}), beside bodies of requests"
    ));
    Ok(())
}
