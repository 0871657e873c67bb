//! Prompts of a request: texts, token ids or messages become tokens that the model and the cache have room for. Enters: what was
//! sent. Leaves: tokens, and for an echo their text; an error that names the field. Memory is bounded before anything is encoded.

use serde_json::Value;
use wush_checkpoint::CheckpointError;
use wush_checkpoint::chat::{ChatTemplate, Message};
use wush_checkpoint::tokenizer::TextTokenizer;
use wush_generate::{longest, most_bytes};
use wush_model::spec::ModelSpec;
use wush_runtime::CacheConfig;

use crate::error::ApiError;
use crate::limits::{DEFAULT_CHAT_TOKENS, Limits, MAX_PROMPTS, MAX_SCORES};
use crate::plan::Options;

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

/// Prompts as they are sent.
#[derive(Debug, PartialEq)]
pub(crate) enum Prompts {
    Texts(Vec<String>),
    IdLists(Vec<Vec<u32>>),
}

impl Prompts {
    /// One text or list of ids, or several, at least one.
    ///
    /// # Errors
    /// 400.
    pub(crate) fn of(value: Value) -> Result<Self, ApiError> {
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

/// An answer holds what is said of its tokens until it is sent, so that is bounded, too.
///
/// # Errors
/// 400.
pub(crate) fn check_scores(prompts: &[Prompt], options: &Options) -> Result<(), ApiError> {
    let Some(n_top) = options.n_top else { return Ok(()) };
    let n_told = |prompt: &Prompt| prompt.max_new + if options.echoes { prompt.ids.len() } else { 0 };
    let n_scores = prompts.iter().map(n_told).sum::<usize>().saturating_mul(n_top + 1);
    if n_scores > MAX_SCORES {
        let message = format!("logprobs: {n_scores} numbers of all tokens and alternatives, at most {MAX_SCORES}");
        return Err(ApiError::invalid("logprobs", message));
    }
    Ok(())
}

fn too_long(field: &'static str, message: String) -> ApiError {
    ApiError { code: "context_length_exceeded", ..ApiError::invalid(field, message) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan;

    #[test]
    fn what_is_told_of_tokens_is_bounded() {
        let prompt = |n: usize| Prompt { ids: vec![1; n], text: String::new(), n_added: 0, max_new: 24, n_bytes: 0 };
        let options = |more: &str| {
            let body = format!("{{\"prompt\": \"a\"{more}}}");
            plan::completion(body.as_bytes(), &["m".to_owned()]).expect("valid").1
        };
        let prompts = vec![prompt(1000); 1 + MAX_SCORES / 1024 / 21];
        assert!(check_scores(&prompts, &options(r#", "logprobs": 20, "echo": true"#)).is_err());
        assert!(check_scores(&prompts[1..], &options(r#", "logprobs": 20, "echo": true"#)).is_ok());
        for more in [r#", "echo": true"#, r#", "logprobs": 20"#, r#", "logprobs": 19, "echo": true"#] {
            assert!(check_scores(&prompts, &options(more)).is_ok(), "{more}");
        }
    }
}
