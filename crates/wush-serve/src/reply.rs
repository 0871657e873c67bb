//! Answers as JSON, in OpenAI's two forms. Enters: what became known of a text. Leaves: whole answers, or the pieces of a stream.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use crate::engine::Finish;
use crate::text::{Entry, EntryScores};
use crate::vocabulary::TokenText;

/// Which of the two forms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    Completion,
    Chat,
}

/// What stands in every piece of an answer.
#[derive(Debug, Clone)]
pub(crate) struct Heading {
    pub(crate) form: Form,
    pub(crate) id: String,
    pub(crate) model: String,
    created: u64,
}

/// Counts of tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) n_prompt: usize,
    pub(crate) n_reused: usize,
    pub(crate) n_new: usize,
}

/// One text of an answer, or a piece of it.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Piece {
    pub(crate) index: usize,
    pub(crate) text: String,
    /// None where no log probabilities were asked for.
    pub(crate) entries: Option<Vec<Entry>>,
    pub(crate) finish: Option<Finish>,
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl Piece {
    /// Whether it says nothing.
    pub(crate) fn is_empty(&self) -> bool {
        self.finish.is_none() && self.text.is_empty() && self.entries.as_ref().is_none_or(Vec::is_empty)
    }
}

impl Usage {
    fn json(self) -> Value {
        let Self { n_prompt, n_reused, n_new } = self;
        json!({
            "prompt_tokens": n_prompt,
            "completion_tokens": n_new,
            "total_tokens": n_prompt + n_new,
            "prompt_tokens_details": { "cached_tokens": n_reused },
        })
    }
}

impl Heading {
    pub(crate) fn new(form: Form, number: u64, model: &str) -> Self {
        let prefix = match form {
            Form::Completion => "cmpl",
            Form::Chat => "chatcmpl",
        };
        Self { form, id: format!("{prefix}-{number:016x}"), model: model.to_owned(), created: now() }
    }

    /// A whole answer.
    pub(crate) fn whole(&self, pieces: Vec<Piece>, usage: Usage) -> Value {
        let choices = pieces.into_iter().map(|piece| self.choice(piece)).collect();
        let object = match self.form {
            Form::Completion => "text_completion",
            Form::Chat => "chat.completion",
        };
        self.body(object, choices, Some(usage))
    }

    /// A piece of a stream.
    pub(crate) fn piece(&self, piece: Piece) -> Value {
        let choice = match self.form {
            Form::Completion => self.choice(piece),
            Form::Chat => {
                let mut delta = Map::new();
                if !piece.text.is_empty() {
                    delta.insert("content".to_owned(), piece.text.into());
                }
                with_scores(piece.index, "delta", delta.into(), chat_scores(piece.entries), piece.finish)
            }
        };
        self.body(self.piece_object(), vec![choice], None)
    }

    /// The piece with which a chat's stream begins.
    pub(crate) fn opening(&self) -> Option<Value> {
        let delta = json!({ "role": "assistant", "content": "" });
        let choice = || with_scores(0, "delta", delta, Value::Null, None);
        (self.form == Form::Chat).then(|| self.body(self.piece_object(), vec![choice()], None))
    }

    /// The piece that tells the counts of tokens.
    pub(crate) fn usage_piece(&self, usage: Usage) -> Value {
        self.body(self.piece_object(), Vec::new(), Some(usage))
    }

    fn piece_object(&self) -> &'static str {
        match self.form {
            Form::Completion => "text_completion",
            Form::Chat => "chat.completion.chunk",
        }
    }

    fn body(&self, object: &str, choices: Vec<Value>, usage: Option<Usage>) -> Value {
        let Self { id, model, created, .. } = self;
        let mut body = json!({ "id": id, "object": object, "created": created, "model": model, "choices": choices });
        if let Some(usage) = usage {
            body["usage"] = usage.json();
        }
        body
    }

    fn choice(&self, piece: Piece) -> Value {
        let Piece { index, text, entries, finish } = piece;
        match self.form {
            Form::Completion => with_scores(index, "text", text.into(), completion_scores(entries), finish),
            Form::Chat => {
                let message = json!({ "role": "assistant", "content": text });
                with_scores(index, "message", message, chat_scores(entries), finish)
            }
        }
    }
}

fn with_scores(index: usize, what: &str, content: Value, logprobs: Value, finish: Option<Finish>) -> Value {
    let finish = finish.map(|finish| match finish {
        Finish::Stop => "stop",
        Finish::Length => "length",
    });
    let mut choice = json!({ "index": index, "logprobs": logprobs, "finish_reason": finish });
    choice[what] = content;
    choice
}

/// `logprobs` of a completion: lists over tokens. The alternatives of a token always have the token itself.
fn completion_scores(entries: Option<Vec<Entry>>) -> Value {
    let Some(entries) = entries else { return Value::Null };
    let (mut tokens, mut logprobs, mut tops, mut offsets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for Entry { token, scored, offset } in entries {
        logprobs.push(scored.as_ref().map_or(Value::Null, |scored| scored.logprob.into()));
        tops.push(scored.map_or(Value::Null, |scored| alternatives(&token, scored)));
        tokens.push(token.shown().into_owned());
        offsets.push(offset);
    }
    json!({ "tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets })
}

/// By text. Of tokens with the same text the most likely counts.
fn alternatives(token: &TokenText, EntryScores { logprob, top }: EntryScores) -> Value {
    let mut by_text = Map::new();
    for (text, logprob) in &top {
        by_text.entry(text.shown()).or_insert_with(|| (*logprob).into());
    }
    by_text.entry(token.shown()).or_insert_with(|| logprob.into());
    by_text.into()
}

/// `logprobs` of a chat's answer.
fn chat_scores(entries: Option<Vec<Entry>>) -> Value {
    let Some(entries) = entries else { return Value::Null };
    let one =
        |token: &TokenText, logprob: f64| json!({ "token": token.shown(), "logprob": logprob, "bytes": token.bytes() });
    let content = entries.into_iter().filter_map(|Entry { token, scored, .. }| {
        let EntryScores { logprob, top } = scored?;
        let mut of_token = one(&token, logprob);
        of_token["top_logprobs"] = top.iter().map(|(token, logprob)| one(token, *logprob)).collect();
        Some(of_token)
    });
    json!({ "content": content.collect::<Vec<_>>() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece() -> Piece {
        let text = |text: &str| TokenText::Text(text.to_owned());
        let scored = EntryScores {
            logprob: -2.0,
            top: vec![(text("b"), -0.5), (text("b"), -0.7), (TokenText::Number(9), -3.0)],
        };
        let entries = vec![
            Entry { token: text("x"), scored: None, offset: 0 },
            Entry { token: text("a"), scored: Some(scored), offset: 1 },
        ];
        Piece { index: 0, text: "xa".to_owned(), entries: Some(entries), finish: Some(Finish::Length) }
    }

    #[test]
    fn completions_have_lists_over_tokens() {
        let heading = Heading::new(Form::Completion, 7, "m");
        let found = heading.whole(vec![piece()], Usage { n_prompt: 3, n_reused: 2, n_new: 1 });
        assert_eq!((&found["id"], &found["object"]), (&json!("cmpl-0000000000000007"), &json!("text_completion")));
        assert_eq!(found["usage"]["total_tokens"], 4);
        let choice = &found["choices"][0];
        assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("xa"), &json!("length")));
        let expected = json!({ "tokens": ["x", "a"], "token_logprobs": [null, -2.0], "text_offset": [0, 1],
            "top_logprobs": [null, { "a": -2.0, "b": -0.5, "token_id:9": -3.0 }] });
        assert_eq!(choice["logprobs"], expected);
        assert!(heading.opening().is_none());
    }

    #[test]
    fn chats_have_messages_and_their_streams_deltas() {
        let heading = Heading::new(Form::Chat, 1, "m");
        let whole = heading.whole(vec![piece()], Usage::default());
        assert_eq!(whole["choices"][0]["message"], json!({ "role": "assistant", "content": "xa" }));
        let content = &whole["choices"][0]["logprobs"]["content"];
        assert_eq!((content[0]["bytes"].clone(), content.as_array().map(Vec::len)), (json!([97]), Some(1)));
        assert_eq!(content[0]["top_logprobs"][2], json!({ "token": "token_id:9", "logprob": -3.0, "bytes": null }));
        let piece = heading.piece(Piece { text: "y".to_owned(), ..Piece::default() });
        assert_eq!(piece["object"], "chat.completion.chunk");
        assert_eq!(piece["choices"][0]["delta"], json!({ "content": "y" }));
        assert_eq!(piece["choices"][0]["finish_reason"], Value::Null);
        assert_eq!(heading.opening().expect("a chat")["choices"][0]["delta"]["role"], "assistant");
    }
}
