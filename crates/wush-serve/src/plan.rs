//! A request's fields become a plan: what is computed, checked against the model and the server's limits. Nothing downstream
//! looks at fields again.

use std::collections::BTreeMap;

use axum::http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};
use wush_checkpoint::chat::Message;
use wush_generate::{GenerateError, Sampler, Sampling};

use crate::error::ApiError;
use crate::fields::Fields;
use crate::limits::{DEFAULT_COMPLETION_TOKENS, MAX_LOGPROBS, MAX_STOP_BYTES, MAX_STOPS};
use crate::prompts::Prompts;

/// Fields that say who asks or how to account, and change no answer.
const WITHOUT_EFFECT: &[&str] =
    &["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"];

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
