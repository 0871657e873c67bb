//! A request's fields become a plan: what is computed, checked against the model and the server's limits. Nothing downstream
//! looks at fields again.

use std::collections::BTreeMap;

use axum::http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};
use wush_checkpoint::CheckpointError;
use wush_checkpoint::chat::{ChatTemplate, Message};
use wush_checkpoint::tokenizer::TextTokenizer;
use wush_generate::{GenerateError, Sampler, Sampling, longest, most_bytes};
use wush_model::spec::ModelSpec;
use wush_runtime::CacheConfig;

use crate::error::ApiError;
use crate::fields::Fields;
use crate::limits::{
    DEFAULT_CHAT_TOKENS, DEFAULT_COMPLETION_TOKENS, Limits, MAX_LOGPROBS, MAX_PROMPTS, MAX_STOP_BYTES, MAX_STOPS,
};

/// Fields that say who asks or how to account, and change no answer.
const WITHOUT_EFFECT: &[&str] =
    &["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"];

/// The model, as far as requests are checked against it.
pub(crate) struct Shape {
    pub(crate) spec: ModelSpec,
    pub(crate) config: CacheConfig,
    pub(crate) limits: Limits,
}

/// A prompt's tokens and, for an echo, its text.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Encoded {
    pub(crate) ids: Vec<u32>,
    /// As it was sent; that of the tokens where they are told, too.
    pub(crate) text: String,
    /// Tokens before those of the text.
    pub(crate) n_added: usize,
}

/// A prompt that can be computed.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Prompt {
    pub(crate) ids: Vec<u32>,
    pub(crate) text: String,
    pub(crate) n_added: usize,
    /// Tokens to add at most.
    pub(crate) max_new: usize,
    /// Bytes that the sequence may take in the cache.
    pub(crate) n_bytes: u64,
}

/// What both endpoints take.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) max_new: Option<usize>,
    sampler: Sampler,
    /// Whether a seed was asked for.
    is_seeded: bool,
    pub(crate) stops: Vec<String>,
    pub(crate) streams: bool,
    /// Whether a stream ends with the counts of tokens.
    pub(crate) tells_usage: bool,
    pub(crate) ignores_end: bool,
    /// Alternatives to list of every token; none for no log probabilities.
    pub(crate) n_top: Option<usize>,
    /// Whether the prompt stands before the answer.
    pub(crate) echoes: bool,
}

impl Options {
    /// Of a request's text `index`: the same for all where a seed was asked for.
    pub(crate) fn sampler_of(&self, index: usize) -> Sampler {
        if self.is_seeded { self.sampler.clone() } else { self.sampler.another(index as u64) }
    }
}

/// Prompts as they are sent.
#[derive(Debug, PartialEq)]
pub(crate) enum Prompts {
    Texts(Vec<String>),
    IdLists(Vec<Vec<u32>>),
}

/// A chat's message as it is sent.
#[derive(Debug, Deserialize)]
struct MessageField {
    role: String,
    content: ContentField,
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum ContentField {
    Text(String),
    Parts(Vec<PartField>),
}

#[derive(Debug, Deserialize)]
struct PartField {
    r#type: String,
    text: Option<String>,
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct StreamOptions {
    include_usage: Option<bool>,
}

/// `/v1/completions`: the prompts, still as they were sent, and how to go on.
///
/// # Errors
/// 400, with the field at fault; 404 for another model than `names`.
pub(crate) fn completion(body: &[u8], names: &[String]) -> Result<(Prompts, Options), ApiError> {
    let mut fields = Fields::parse(body)?;
    check_model(&mut fields, names)?;
    let prompt = fields.take("prompt", "")?.ok_or_else(|| missing("prompt"))?;
    let prompts = Prompts::of(prompt)?;
    let max_new = fields.count("max_tokens", usize::MAX)?.or(Some(DEFAULT_COMPLETION_TOKENS));
    let n_top = fields.count("logprobs", MAX_LOGPROBS)?;
    let echoes = fields.flag("echo")?;
    fields.neutral(&[("best_of", &[json!(1)]), ("suffix", &[json!("")])])?;
    let options = Options { max_new, n_top, echoes, ..common(&mut fields)? };
    fields.finish()?;
    Ok((prompts, options))
}

/// `/v1/chat/completions`: the messages and how to go on.
///
/// # Errors
/// As [`completion`].
pub(crate) fn chat(body: &[u8], names: &[String]) -> Result<(Vec<Message>, Options), ApiError> {
    let mut fields = Fields::parse(body)?;
    check_model(&mut fields, names)?;
    let expected = "a list of objects with role and content, text or a list of text parts";
    let messages: Vec<MessageField> = fields.take("messages", expected)?.ok_or_else(|| missing("messages"))?;
    let messages = messages.into_iter().map(message).collect::<Result<Vec<_>, _>>()?;
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "messages: expected at least one"));
    }
    let older = fields.count("max_tokens", usize::MAX)?;
    let newer = fields.count("max_completion_tokens", usize::MAX)?;
    let max_new = match (older, newer) {
        (Some(a), Some(b)) if a != b => {
            return Err(ApiError::invalid("max_tokens", format!("max_tokens: {a}, but max_completion_tokens is {b}")));
        }
        (older, newer) => newer.or(older),
    };
    let n_top = fields.count("top_logprobs", MAX_LOGPROBS)?;
    let n_top = match (fields.flag("logprobs")?, n_top) {
        (true, n_top) => Some(n_top.unwrap_or(0)),
        (false, None) => None,
        (false, Some(_)) => return Err(ApiError::invalid("top_logprobs", "top_logprobs: only with logprobs true")),
    };
    let text = json!({ "type": "text" });
    fields.neutral(&[
        ("response_format", &[text]),
        ("tools", &[]),
        ("tool_choice", &[json!("none"), json!("auto")]),
        ("functions", &[]),
        ("modalities", &[json!(["text"])]),
    ])?;
    fields.ignore(&["parallel_tool_calls"]);
    let options = Options { max_new, n_top, ..common(&mut fields)? };
    fields.finish()?;
    Ok((messages, options))
}

/// What both endpoints know under the same name.
fn common(fields: &mut Fields) -> Result<Options, ApiError> {
    fields.ignore(WITHOUT_EFFECT);
    fields.neutral(&[
        ("n", &[json!(1)]),
        ("presence_penalty", &[json!(0)]),
        ("frequency_penalty", &[json!(0)]),
        ("logit_bias", &[]),
    ])?;
    let streams = fields.flag("stream")?;
    let (sampler, is_seeded) = sampler(fields)?;
    let stream_options: Option<StreamOptions> =
        fields.take("stream_options", "an object with include_usage, and nothing else")?;
    Ok(Options {
        max_new: None,
        sampler,
        is_seeded,
        stops: stops(fields)?,
        streams,
        tells_usage: stream_options.unwrap_or_default().include_usage.unwrap_or(false),
        ignores_end: fields.flag("ignore_eos")?,
        n_top: None,
        echoes: false,
    })
}

/// The sampler, and whether a seed was asked for.
fn sampler(fields: &mut Fields) -> Result<(Sampler, bool), ApiError> {
    let temperature = fields.take("temperature", "a number, 0 or above")?.unwrap_or(1.0);
    let top_p = fields.take("top_p", "a number above 0 and at most 1")?.unwrap_or(1.0);
    // vLLM's way to say all.
    let top_k: Option<i64> = fields.take("top_k", "a whole number, at least 1, or -1 or 0 for all")?;
    let top_k = top_k.filter(|&k| k != -1 && k != 0);
    let top_k =
        top_k.map(|k| usize::try_from(k).map_err(|_| ApiError::invalid("top_k", "top_k: at least 1"))).transpose()?;
    let seed: Option<i64> = fields.take("seed", "a whole number of 64 bits")?;
    let is_seeded = seed.is_some();
    let seed = seed.map_or_else(fresh_seed, i64::cast_unsigned);
    let sampling = Sampling { temperature, top_k, top_p, seed };
    // A temperature of 0 looks at nothing else; clients send top_p beside it all the same.
    let sampler = Sampler::new(sampling).map_err(|error| {
        let field = match error {
            GenerateError::Setting { setting: "top-p", .. } => "top_p",
            GenerateError::Setting { setting: "top-k", .. } => "top_k",
            _ => "temperature",
        };
        ApiError::invalid(field, error.to_string().replace("top-p", "top_p").replace("top-k", "top_k"))
    })?;
    Ok((sampler, is_seeded))
}

/// Another number every time.
pub(crate) fn fresh_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish()
}

fn stops(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Field {
        One(String),
        Many(Vec<String>),
    }
    let expected = format!("text or a list of at most {MAX_STOPS} texts");
    let stops = match fields.take("stop", &expected)? {
        None => Vec::new(),
        Some(Field::One(stop)) => vec![stop],
        Some(Field::Many(stops)) => stops,
    };
    let fits = |stop: &String| !stop.is_empty() && stop.len() <= MAX_STOP_BYTES;
    if stops.len() > MAX_STOPS || !stops.iter().all(fits) {
        let message = format!("stop: expected {expected}, of 1 to {MAX_STOP_BYTES} bytes each");
        return Err(ApiError::invalid("stop", message));
    }
    Ok(stops)
}

fn check_model(fields: &mut Fields, names: &[String]) -> Result<(), ApiError> {
    let model: Option<String> = fields.take("model", "text")?;
    match model {
        Some(model) if !names.contains(&model) => Err(no_model(names)),
        _ => Ok(()),
    }
}

/// 404 for a model that is not served.
pub(crate) fn no_model(names: &[String]) -> ApiError {
    let name = names.first().map_or("", String::as_str);
    let message = format!("no such model: this server has {name}");
    ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message).at(Some("model".to_owned()))
}

fn missing(name: &'static str) -> ApiError {
    ApiError { code: "missing_required_parameter", ..ApiError::invalid(name, format!("{name}: is missing")) }
}

/// A template could read any of them: none is left out, unless it says nothing.
fn refuse_others(others: &BTreeMap<String, Value>) -> Result<(), ApiError> {
    let says_nothing = |value: &Value| value.is_null() || value.as_array().is_some_and(Vec::is_empty);
    match others.iter().find(|(_, value)| !says_nothing(value)) {
        Some((name, _)) => {
            let name: String = name.chars().take(64).collect();
            Err(ApiError::invalid("messages", format!("messages: this server does not take {name}")))
        }
        None => Ok(()),
    }
}

fn message(field: MessageField) -> Result<Message, ApiError> {
    refuse_others(&field.others)?;
    let role = match field.role.as_str() {
        "system" | "developer" => "system",
        "user" => "user",
        "assistant" => "assistant",
        _ => return Err(ApiError::invalid("messages", "messages: role: expected system, user or assistant")),
    };
    let content = match field.content {
        ContentField::Text(text) => text,
        ContentField::Parts(parts) => {
            parts.iter().try_for_each(|part| refuse_others(&part.others))?;
            let text = |part: PartField| (part.r#type == "text").then_some(part.text).flatten();
            let texts: Option<Vec<String>> = parts.into_iter().map(text).collect();
            texts.ok_or_else(|| ApiError::invalid("messages", "messages: content: this server has only text"))?.concat()
        }
    };
    Ok(Message { role, content })
}

impl Prompts {
    /// One text or list of ids, or several, at least one.
    ///
    /// # Errors
    /// 400.
    fn of(value: Value) -> Result<Self, ApiError> {
        let expected = "prompt: expected text, a list of texts, a list of token ids, or a list of such lists";
        let wrong = || ApiError::invalid("prompt", expected);
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids = |list: &Vec<Value>| list.iter().map(id).collect::<Option<Vec<u32>>>();
        let found = match value {
            Value::String(text) => Some(Self::Texts(vec![text])),
            Value::Array(list) if list.first().is_some_and(Value::is_number) => {
                ids(&list).map(|ids| Self::IdLists(vec![ids]))
            }
            Value::Array(list) if !(1..=MAX_PROMPTS).contains(&list.len()) => {
                let message = format!("prompt: expected 1 to {MAX_PROMPTS} prompts, found {}", list.len());
                return Err(ApiError::invalid("prompt", message));
            }
            Value::Array(list) if list[0].is_array() => {
                let lists = list.iter().map(|value| value.as_array().and_then(ids)).collect::<Option<_>>();
                lists.map(Self::IdLists)
            }
            Value::Array(list) => {
                let text = |value| if let Value::String(text) = value { Some(text) } else { None };
                list.into_iter().map(text).collect::<Option<_>>().map(Self::Texts)
            }
            _ => None,
        };
        found.ok_or_else(wrong)
    }

    /// Prompts of tokens: text is encoded as `wush generate` does it, and token ids are taken as they are.
    ///
    /// # Errors
    /// 400.
    pub(crate) fn encode(
        self,
        tokenizer: &TextTokenizer,
        shape: &Shape,
        options: &Options,
    ) -> Result<Vec<Encoded>, ApiError> {
        // Tokens say where in the text they begin: it must be their own, whatever the tokenizer makes of what was sent.
        let decodes = options.echoes && options.n_top.is_some();
        let of_text = |text: String| {
            let tokens = shape.encode(tokenizer, &text, "prompt")?;
            let text = if decodes { decode(tokenizer, &tokens)? } else { text };
            let added = tokenizer.bos();
            let ids = added.into_iter().chain(tokens).collect();
            Ok(Encoded { ids, text, n_added: added.iter().count() })
        };
        let of_ids = |ids: Vec<u32>| {
            let text = if options.echoes { decode(tokenizer, &ids)? } else { String::new() };
            Ok(Encoded { ids, text, n_added: 0 })
        };
        match self {
            Self::Texts(texts) => texts.into_iter().map(of_text).collect(),
            Self::IdLists(lists) => lists.into_iter().map(of_ids).collect(),
        }
    }
}

fn decode(tokenizer: &TextTokenizer, ids: &[u32]) -> Result<String, ApiError> {
    tokenizer.decode(ids).map_err(|error| refused("prompt", error))
}

/// What the tokenizer or the template says of a field; the client is not told where on the server they lie.
fn refused(field: &'static str, error: CheckpointError) -> ApiError {
    let detail = match error {
        CheckpointError::Tokenizer { detail, .. } => format!("the tokenizer: {detail}"),
        CheckpointError::ChatTemplate { detail, .. } => format!("the chat template: {detail}"),
        error => error.to_string(),
    };
    ApiError::invalid(field, format!("{field}: {detail}"))
}

/// A chat's tokens.
///
/// # Errors
/// 400 for messages that the template refuses, and far too long ones.
pub(crate) fn encode_chat(
    template: &ChatTemplate,
    tokenizer: &TextTokenizer,
    shape: &Shape,
    messages: &[Message],
) -> Result<Encoded, ApiError> {
    let text = template.render(messages, std::time::SystemTime::now());
    let ids = shape.encode(tokenizer, &text.map_err(|error| refused("messages", error))?, "messages")?;
    Ok(Encoded { ids, ..Encoded::default() })
}

impl Shape {
    /// Most tokens that a sequence can have, whatever its prompt.
    pub(crate) fn longest(&self) -> usize {
        self.spec.max_position_embeddings.min(self.limits.max_len.unwrap_or(usize::MAX))
    }

    /// A text's tokens, at most as many as fit: one that is far too long is refused before it is encoded, and of several texts
    /// the first that is too long before the next.
    fn encode(&self, tokenizer: &TextTokenizer, text: &str, field: &'static str) -> Result<Vec<u32>, ApiError> {
        let most = self.longest();
        let failed = |error| refused(field, error);
        let over = |found: String| too_long(field, format!("{found} tokens of {field}, at most {most} fit"));
        if tokenizer.is_far_over(text, most).map_err(failed)? {
            return Err(over(format!("more than {most}")));
        }
        let ids = tokenizer.encode(text).map_err(failed)?;
        if ids.len() > most { Err(over(ids.len().to_string())) } else { Ok(ids) }
    }

    /// A prompt that the model and the cache have room for, sent as `field`. `max_new` is what was asked for; without it a chat's
    /// answer has what is left, up to a bound.
    ///
    /// # Errors
    /// 400: no tokens, ids that the model does not have, more tokens than it reaches or the cache holds.
    pub(crate) fn prompt(
        &self,
        prompt: Encoded,
        max_new: Option<usize>,
        field: &'static str,
    ) -> Result<Prompt, ApiError> {
        let Encoded { ids, text, n_added } = prompt;
        let n_prompt = ids.len();
        if n_prompt == 0 {
            return Err(ApiError::invalid(field, format!("{field}: no tokens")));
        }
        if let Some(id) = ids.iter().find(|&&id| id as usize >= self.spec.vocab_size) {
            let message = format!("{field}: token id {id} is not below the vocabulary size {}", self.spec.vocab_size);
            return Err(ApiError::invalid(field, message));
        }
        let longest = longest(&self.spec, n_prompt).min(self.longest());
        let room = longest.checked_sub(n_prompt);
        // What was not asked for is a token at least: an answer without any is none.
        let max_new = max_new.unwrap_or_else(|| room.map_or(1, |room| room.clamp(1, DEFAULT_CHAT_TOKENS)));
        if room.is_none_or(|room| max_new > room) {
            let message = format!("{n_prompt} tokens of {field} and {max_new} to come, at most {longest} fit");
            return Err(too_long(field, message));
        }
        // The last token is never fed back.
        let n_tokens = n_prompt + max_new.saturating_sub(1);
        let n_bytes = most_bytes(&self.config, n_tokens, self.limits.chunk);
        let n_bytes = n_bytes.map_err(|error| ApiError::internal(error.to_string()))?;
        let budget = self.limits.max_cache_bytes;
        if n_bytes > budget {
            let message = format!("{n_tokens} tokens may take {n_bytes} bytes of the cache, which has {budget}");
            return Err(ApiError { code: "cache_exceeded", ..ApiError::invalid(field, message) });
        }
        Ok(Prompt { ids, text, n_added, max_new, n_bytes })
    }
}

fn too_long(field: &'static str, message: String) -> ApiError {
    ApiError { code: "context_length_exceeded", ..ApiError::invalid(field, message) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> Vec<String> {
        vec!["m".to_owned()]
    }

    #[test]
    fn what_lm_eval_sends_is_understood() {
        let body = br#"{"prompt": [[1, 2], [3]], "model": "m", "max_tokens": 1, "temperature": 0, "logprobs": 1,
            "seed": 1234, "echo": true}"#;
        let (prompts, options) = completion(body, &names()).expect("valid");
        assert_eq!(prompts, Prompts::IdLists(vec![vec![1, 2], vec![3]]));
        assert_eq!((options.max_new, options.n_top, options.echoes, options.streams), (Some(1), Some(1), true, false));
    }

    #[test]
    fn every_field_is_checked_and_named() {
        for (body, param) in [
            (r#"{}"#, "prompt"),
            (r#"{"prompt": 3}"#, "prompt"),
            (r#"{"prompt": [1, -2]}"#, "prompt"),
            (r#"{"prompt": []}"#, "prompt"),
            (r#"{"prompt": ["a", 1]}"#, "prompt"),
            (r#"{"prompt": [[1], "a"]}"#, "prompt"),
            (r#"{"prompt": [1, [1]]}"#, "prompt"),
            (r#"{"prompt": [4294967296]}"#, "prompt"),
            (r#"{"prompt": "a", "max_tokens": -1}"#, "max_tokens"),
            (r#"{"prompt": "a", "max_tokens": 1.5}"#, "max_tokens"),
            (r#"{"prompt": "a", "logprobs": 21}"#, "logprobs"),
            (r#"{"prompt": "a", "n": 2}"#, "n"),
            (r#"{"prompt": "a", "best_of": 2}"#, "best_of"),
            (r#"{"prompt": "a", "presence_penalty": 0.5}"#, "presence_penalty"),
            (r#"{"prompt": "a", "logit_bias": {"5": 1}}"#, "logit_bias"),
            (r#"{"prompt": "a", "stop": ["a", 1]}"#, "stop"),
            (r#"{"prompt": "a", "stop": ""}"#, "stop"),
            (r#"{"prompt": "a", "top_k": -2}"#, "top_k"),
            (r#"{"prompt": "a", "seed": "x"}"#, "seed"),
            (r#"{"prompt": "a", "stream": 1}"#, "stream"),
            (r#"{"prompt": "a", "stream_options": {"x": 1}}"#, "stream_options"),
            (r#"{"prompt": "a", "colour": "red"}"#, "colour"),
            (r#"{"prompt": "a", "temperature": -1}"#, "temperature"),
            (r#"{"prompt": "a", "top_p": 0}"#, "top_p"),
        ] {
            let error = completion(body.as_bytes(), &names()).expect_err(body);
            assert_eq!((error.status, error.param.as_deref()), (StatusCode::BAD_REQUEST, Some(param)), "{error:?}");
        }
        let other = completion(br#"{"prompt": "a", "model": "other"}"#, &names()).expect_err("another model");
        assert_eq!((other.status, other.param.as_deref()), (StatusCode::NOT_FOUND, Some("model")));
    }

    /// Without a seed the texts of a request are samples; with one, each is the text that it is alone.
    #[test]
    fn texts_of_a_request_draw_on_their_own_unless_a_seed_was_asked_for() {
        let picks = |body: &str, index: usize| {
            let (_, options) = completion(body.as_bytes(), &names()).expect("valid");
            let mut sampler = options.sampler_of(index);
            (0..8).map(|_| sampler.pick(&[0.0; 1000])).collect::<Vec<_>>()
        };
        let (_, options) = completion(br#"{"prompt": ["a", "a"]}"#, &names()).expect("valid");
        let [mut first, mut second] = [0, 1].map(|index| options.sampler_of(index));
        let [first, second] =
            [&mut first, &mut second].map(|s| (0..8).map(|_| s.pick(&[0.0; 1000])).collect::<Vec<_>>());
        assert_ne!(first, second);
        let seeded = r#"{"prompt": ["a", "a"], "seed": 7}"#;
        assert_eq!(picks(seeded, 0), picks(seeded, 1));
    }

    #[test]
    fn chats_have_text_of_known_roles() {
        let body = r#"{"messages": [{"role": "developer", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]}],
            "max_completion_tokens": 5, "logprobs": true}"#;
        let (messages, options) = chat(body.as_bytes(), &names()).expect("valid");
        let texts: Vec<_> = messages.iter().map(|m| (m.role, m.content.as_str())).collect();
        assert_eq!(texts, [("system", "a"), ("user", "bc")]);
        assert_eq!((options.max_new, options.n_top), (Some(5), Some(0)));
        for (body, param) in [
            (r#"{"messages": []}"#, "messages"),
            (r#"{"messages": [{"role": "tool", "content": "a"}]}"#, "messages"),
            (r#"{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}"#, "messages"),
            (r#"{"messages": [{"role": "user", "content": "a"}], "top_logprobs": 1}"#, "top_logprobs"),
            (r#"{"messages": [{"role": "user", "content": "a", "name": "b"}]}"#, "messages"),
            (r#"{"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}"#, "messages"),
            (r#"{"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]}"#, "messages"),
            (
                r#"{"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "max_completion_tokens": 5}"#,
                "max_tokens",
            ),
            (r#"{"messages": [{"role": "user", "content": "a"}], "tools": [{}]}"#, "tools"),
            (r#"{"messages": [{"role": "user", "content": "a"}], "echo": true}"#, "echo"),
        ] {
            let error = chat(body.as_bytes(), &names()).expect_err(body);
            assert_eq!(error.param.as_deref(), Some(param), "{body}: {error:?}");
        }
    }
}
