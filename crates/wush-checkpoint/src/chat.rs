//! A checkpoint's chat template: messages to the text that the model was trained to continue.
//!
//! Enters: the template of `chat_template.jinja` or `tokenizer_config.json` and messages. Leaves: the text that transformers'
//! `apply_chat_template` gives, special tokens spelled out. A template is a program of the checkpoint's: it runs in minijinja,
//! which reaches no files, and for a bounded number of steps.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value};
use serde::Serialize;

use crate::tokenizer::{MAX_CONFIG_BYTES, read_bounded};
use crate::{CheckpointError, Result};

/// Where newer checkpoints have their template.
const TEMPLATE_FILE: &str = "chat_template.jinja";
/// Where all others have it, and the special tokens.
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// The one of several templates that is for plain chats.
const DEFAULT_NAME: &str = "default";
/// Steps that a template may take. Real ones take a few hundred for a message.
const MAX_STEPS: u64 = 1_000_000;

/// One message of a chat.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Message {
    /// "system", "user" or "assistant".
    pub role: &'static str,
    /// What is said.
    pub content: String,
}

/// A checkpoint's chat template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatTemplate {
    path: PathBuf,
    source: String,
    /// `bos_token`, `eos_token`, … as the template may name them.
    tokens: BTreeMap<String, String>,
}

/// The variables of a template. It runs without tools and documents, which are none.
#[derive(Serialize)]
struct Given<'a> {
    messages: &'a [Message],
    add_generation_prompt: bool,
    tools: Option<()>,
    documents: Option<()>,
    #[serde(flatten)]
    tokens: &'a BTreeMap<String, String>,
}

impl ChatTemplate {
    /// The template of a checkpoint's directory, if it has one.
    ///
    /// # Errors
    /// `Format` when a file cannot be read; `ChatTemplate` for a configuration that is no JSON.
    pub fn open(dir: &Path) -> Result<Option<Self>> {
        let (file, path) = (dir.join(TEMPLATE_FILE), dir.join(TOKENIZER_CONFIG));
        let config: serde_json::Value = match path.exists() {
            true => serde_json::from_slice(&read_bounded(&path, MAX_CONFIG_BYTES)?).map_err(|e| failed(&path, &e))?,
            false => serde_json::Value::Null,
        };
        let tokens = special_tokens(&config);
        if file.exists() {
            let bytes = read_bounded(&file, MAX_CONFIG_BYTES)?;
            let source = String::from_utf8(bytes).map_err(|e| failed(&file, &e))?;
            return Ok(Some(Self { path: file, source, tokens }));
        }
        Ok(template_of(&config).map(|source| Self { path, source, tokens }))
    }

    /// The text of `messages` up to where the assistant's answer begins. `now` is for templates that state the date.
    ///
    /// # Errors
    /// `ChatTemplate` for a template that is not valid, that refuses the messages, or that does not end.
    pub fn render(&self, messages: &[Message], now: SystemTime) -> Result<String> {
        let source = without_generation_marks(&self.source);
        let environment = environment(now);
        let failed = |e: Error| failed(&self.path, &explained(&e));
        let template = environment.template_from_str(&source).map_err(failed)?;
        let given = Given { messages, add_generation_prompt: true, tools: None, documents: None, tokens: &self.tokens };
        template.render(Value::from(Serde(given))).map_err(failed)
    }
}

/// What templates are written for: the settings and functions that transformers gives them.
fn environment(now: SystemTime) -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_syntax(
        SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().expect("delimiters as they are"),
    );
    environment.set_fuel(Some(MAX_STEPS));
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", |text: String| -> std::result::Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, text))
    });
    environment.add_function("strftime_now", move |format: &str| strftime(format, now));
    environment
}

/// A template's error in one line; without the name that it has only here.
fn explained(error: &Error) -> String {
    let place = error.line().map(|line| format!(" (line {line})")).unwrap_or_default();
    format!("{}{place}", error.detail().map_or_else(|| error.kind().to_string(), str::to_owned))
}

fn failed(path: &Path, detail: &dyn ToString) -> CheckpointError {
    CheckpointError::ChatTemplate { path: path.to_owned(), detail: detail.to_string() }
}

/// `chat_template`: the template itself, or a list of named ones.
fn template_of(config: &serde_json::Value) -> Option<String> {
    let template = config.get("chat_template")?;
    if let Some(named) = template.as_array() {
        let default = named.iter().find(|entry| entry["name"] == DEFAULT_NAME)?;
        return default["template"].as_str().map(str::to_owned);
    }
    template.as_str().map(str::to_owned)
}

/// `bos_token` and its like: text, or an object with the text inside.
fn special_tokens(config: &serde_json::Value) -> BTreeMap<String, String> {
    let entries = config.as_object().into_iter().flatten().filter(|(key, _)| key.ends_with("_token"));
    let text = |value: &serde_json::Value| value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned);
    entries.filter_map(|(key, value)| Some((key.clone(), text(value)?))).collect()
}

/// `{% generation %}` and `{% endgeneration %}` mark answers for training and change no text; minijinja does not know them.
fn without_generation_marks(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else { break };
        let (before, tag) = (&rest[..start], &rest[start..start + length]);
        let word = tag["{%".len()..].trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim();
        text += before;
        text += &match word {
            "generation" => tag.replace(word, "if true"),
            "endgeneration" => tag.replace(word, "endif"),
            _ => tag.to_owned(),
        };
        rest = &rest[start + length..];
    }
    text + rest
}

/// A date as templates ask for it, in UTC.
fn strftime(format: &str, now: SystemTime) -> std::result::Result<String, Error> {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[(days % 7) as usize]);
    let mut text = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        text += &match chars.next() {
            Some('Y') => year.to_string(),
            Some('m') => format!("{month:02}"),
            Some('d') => format!("{day:02}"),
            Some('B') => month_name.to_owned(),
            Some('b') => month_name[..3].to_owned(),
            Some('A') => day_name.to_owned(),
            Some('a') => day_name[..3].to_owned(),
            Some('H') => format!("{:02}", of_day / 3600),
            Some('M') => format!("{:02}", of_day / 60 % 60),
            Some('S') => format!("{:02}", of_day % 60),
            Some('%') => "%".to_owned(),
            other => {
                let directive = other.map(String::from).unwrap_or_default();
                let detail = format!("strftime_now: %{directive} is not known here");
                return Err(Error::new(ErrorKind::InvalidOperation, detail));
            }
        };
    }
    Ok(text)
}

/// Year, month and day of the Gregorian calendar, from days since 1970-01-01 (Howard Hinnant's `civil_from_days`).
fn civil(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    (year_of_era + era * 400 + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn user(content: &str) -> Vec<Message> {
        vec![Message { role: "user", content: content.to_owned() }]
    }

    fn template(source: &str) -> ChatTemplate {
        let tokens = BTreeMap::from([("bos_token".to_owned(), "<s>".to_owned())]);
        ChatTemplate { path: PathBuf::from("chat_template.jinja"), source: source.to_owned(), tokens }
    }

    fn render(source: &str) -> Result<String> {
        template(source).render(&user(" Hi "), UNIX_EPOCH)
    }

    #[test]
    fn templates_see_what_transformers_gives_them() {
        let chat = "{{ bos_token }}{% for message in messages %}\n  {% if message['role'] == 'user' %}\n\
                    <u>{{ message['content'].strip() }}\n  {% endif %}\n{% endfor %}\n\
                    {% if tools is not none %}tools{% endif %}{% if add_generation_prompt %}<a>{% endif %}\n";
        // The first newline after each tag goes, and so does what is indented before it; the last line's end goes too.
        assert_eq!(render(chat).expect("valid"), "<s><u>Hi\n<a>");
        assert_eq!(render("{% for m in messages %}{% break %}{% endfor %}x").expect("valid"), "x");
    }

    #[test]
    fn marks_for_training_change_nothing() {
        let marked = "a {%- generation -%} {{ messages[0].content }} {%- endgeneration %} b{% set generation = 1 %}";
        assert_eq!(render(marked).expect("valid"), "a Hi  b");
    }

    #[test]
    fn what_goes_wrong_is_told_with_its_place() {
        for (source, expected) in [
            ("{% if %}", "line 1"),
            ("\n{{ raise_exception('roles must alternate') }}", "roles must alternate (line 2)"),
            ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "fuel"),
            ("{{ strftime_now('%Q') }}", "%Q is not known"),
        ] {
            let message = render(source).expect_err(source).to_string();
            assert!(message.starts_with("chat_template.jinja: chat template: "), "{message}");
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        let at = |days: u64| UNIX_EPOCH + Duration::from_secs(days * 86_400 + 3_661);
        for (days, expected) in [
            (0, "1970-01-01 Thursday 01 Jan 01:01:01"),
            (11_016, "2000-02-29 Tuesday 29 Feb 01:01:01"),
            (19_723, "2024-01-01 Monday 01 Jan 01:01:01"),
            (20_453, "2025-12-31 Wednesday 31 Dec 01:01:01"),
        ] {
            assert_eq!(strftime("%Y-%m-%d %A %d %b %H:%M:%S", at(days)).expect("known"), expected);
        }
    }

    #[test]
    fn templates_are_found_where_checkpoints_have_them() {
        let dir = tempfile::tempdir().expect("temporary directory");
        assert_eq!(ChatTemplate::open(dir.path()).expect("readable"), None);
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).expect("writable");
        let rendered = || {
            let template = ChatTemplate::open(dir.path()).expect("readable").expect("there");
            template.render(&user("x"), UNIX_EPOCH).expect("valid")
        };
        write(TOKENIZER_CONFIG, r#"{"bos_token":{"content":"<b>"},"chat_template":"{{ bos_token }}1"}"#);
        assert_eq!(rendered(), "<b>1");
        let list = r#"{"chat_template":[{"name":"tool_use","template":"t"},{"name":"default","template":"2"}]}"#;
        write(TOKENIZER_CONFIG, list);
        assert_eq!(rendered(), "2");
        write(TEMPLATE_FILE, "3");
        assert_eq!(rendered(), "3");
        write(TOKENIZER_CONFIG, "{");
        let error = ChatTemplate::open(dir.path()).expect_err("no JSON");
        assert!(error.to_string().contains(TOKENIZER_CONFIG), "{error}");
    }
}
