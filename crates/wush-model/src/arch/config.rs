//! Typed, bounded access to a `config.json`.
//!
//! Enters: the JSON object. Leaves: numbers inside stated bounds, flags, names; or an error that names the key (dotted
//! when nested), what was expected and what was found. A key that holds `null` counts as absent. Knows no family.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use crate::error::ModelError;

/// Longest rendering of a found value in a message, in characters.
const MAX_FOUND_CHARS: usize = 60;

/// A JSON object of the configuration and where it stands.
#[derive(Debug, Clone)]
pub struct ConfigView<'a> {
    object: &'a Map<String, Value>,
    /// Dotted path with a final dot; empty at the root.
    path: String,
}

impl<'a> ConfigView<'a> {
    /// The root of a `config.json`.
    ///
    /// # Errors
    /// `Config` when it is not an object.
    pub fn root(config: &'a Value) -> Result<Self, ModelError> {
        match config {
            Value::Object(object) => Ok(Self { object, path: String::new() }),
            other => Err(ModelError::Config {
                key: "(root)".to_owned(),
                expected: "an object".to_owned(),
                found: render(Some(other)),
            }),
        }
    }

    /// The object under `key`, if any.
    ///
    /// # Errors
    /// `Config` when the value is not an object.
    pub fn child(&self, key: &str) -> Result<Option<ConfigView<'a>>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(object)) => Ok(Some(Self { object, path: format!("{}{key}.", self.path) })),
            Some(_) => Err(self.error(key, "an object")),
        }
    }

    /// The value under `key`; `null` counts as absent.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    /// Whether the key is written down at all, `null` included.
    pub fn is_written(&self, key: &str) -> bool {
        self.object.contains_key(key)
    }

    /// Whether the object has no keys.
    pub fn is_empty(&self) -> bool {
        self.object.is_empty()
    }

    /// The dotted name of a key, for messages.
    pub fn name(&self, key: &str) -> String {
        format!("{}{key}", self.path)
    }

    /// A `Config` error about `key`, with the value found there.
    pub fn error(&self, key: &str, expected: impl Into<String>) -> ModelError {
        ModelError::Config { key: self.name(key), expected: expected.into(), found: render(self.object.get(key)) }
    }

    /// An integer in `range`, if present.
    ///
    /// # Errors
    /// `Config` when it is no integer or outside.
    pub fn opt_count(&self, key: &str, range: RangeInclusive<usize>) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let found = value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| range.contains(n));
        found.map(Some).ok_or_else(|| self.error(key, expected_count(&range)))
    }

    /// An integer in `range`.
    ///
    /// # Errors
    /// `Config` when it is absent, no integer or outside.
    pub fn count(&self, key: &str, range: RangeInclusive<usize>) -> Result<usize, ModelError> {
        let expected = expected_count(&range);
        self.opt_count(key, range)?.ok_or_else(|| self.error(key, expected))
    }

    /// A finite number in `range`, if present.
    ///
    /// # Errors
    /// `Config` when it is no number or outside.
    pub fn opt_number(&self, key: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let found = value.as_f64().filter(|x| range.contains(x));
        found.map(Some).ok_or_else(|| self.error(key, expected_number(&range)))
    }

    /// A finite number in `range`.
    ///
    /// # Errors
    /// `Config` when it is absent, no number or outside.
    pub fn number(&self, key: &str, range: RangeInclusive<f64>) -> Result<f64, ModelError> {
        let expected = expected_number(&range);
        self.opt_number(key, range)?.ok_or_else(|| self.error(key, expected))
    }

    /// `true` or `false`; `default` when absent.
    ///
    /// # Errors
    /// `Config` when it is neither.
    pub fn flag(&self, key: &str, default: bool) -> Result<bool, ModelError> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value.as_bool().ok_or_else(|| self.error(key, "true or false")),
        }
    }

    /// A string, if present.
    ///
    /// # Errors
    /// `Config` when it is no string.
    pub fn opt_text(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => value.as_str().map(Some).ok_or_else(|| self.error(key, "a string")),
        }
    }

    /// A list, if present.
    ///
    /// # Errors
    /// `Config` when it is no list.
    pub fn opt_list(&self, key: &str) -> Result<Option<&'a [Value]>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => value.as_array().map(|list| Some(list.as_slice())).ok_or_else(|| self.error(key, "a list")),
        }
    }

    /// A list of strings, if present.
    ///
    /// # Errors
    /// `Config` when it is no list, or has an element that is no string.
    pub fn opt_texts(&self, key: &str) -> Result<Option<Vec<&'a str>>, ModelError> {
        let Some(list) = self.opt_list(key)? else { return Ok(None) };
        let texts: Option<Vec<_>> = list.iter().map(Value::as_str).collect();
        texts.map(Some).ok_or_else(|| self.error(key, "a list of strings"))
    }

    /// A list of exactly `len` finite numbers in `range`.
    ///
    /// # Errors
    /// `Config` when it is absent, of another length, or has another element.
    pub fn numbers(&self, key: &str, len: usize, range: RangeInclusive<f64>) -> Result<Vec<f64>, ModelError> {
        let expected = || format!("a list of {len} numbers, each {}", expected_number(&range));
        let list = self.opt_list(key)?.ok_or_else(|| self.error(key, expected()))?;
        if list.len() != len {
            let found = format!("{} elements", list.len());
            return Err(ModelError::Config { key: self.name(key), expected: expected(), found });
        }
        let numbers: Option<Vec<_>> = list.iter().map(|x| x.as_f64().filter(|x| range.contains(x))).collect();
        numbers.ok_or_else(|| self.error(key, expected()))
    }
}

fn expected_count(range: &RangeInclusive<usize>) -> String {
    format!("an integer from {} to {}", range.start(), range.end())
}

fn expected_number(range: &RangeInclusive<f64>) -> String {
    format!("a number from {} to {}", range.start(), range.end())
}

fn render(value: Option<&Value>) -> String {
    let Some(value) = value else { return "nothing (the key is absent)".to_owned() };
    let text = value.to_string();
    match text.char_indices().nth(MAX_FOUND_CHARS) {
        None => text,
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn messages_name_key_expected_and_found() {
        let config = json!({ "text_config": { "num_hidden_layers": -3 } });
        let view = ConfigView::root(&config).expect("an object").child("text_config").expect("an object");
        let error = view.expect("present").count("num_hidden_layers", 1..=10).expect_err("negative");
        let text = "config.json: text_config.num_hidden_layers: expected an integer from 1 to 10, found -3";
        assert_eq!(error.to_string(), text);
    }

    #[test]
    fn null_is_absent_and_other_types_are_refused() {
        let config = json!({ "a": null, "b": 1.5, "c": "x", "d": [1, "y"], "e": f64::MAX, "f": "é".repeat(99) });
        let view = ConfigView::root(&config).expect("an object");
        assert_eq!(view.opt_count("a", 1..=9).expect("absent"), None);
        assert!(view.is_written("a") && view.get("a").is_none());
        assert!(view.count("b", 1..=9).is_err(), "1.5 is no count");
        assert!(view.flag("c", false).is_err() && view.opt_list("c").is_err());
        assert!(view.opt_texts("d").is_err() && view.numbers("d", 2, 0.0..=9.0).is_err());
        assert!(view.number("e", 0.0..=1e9).is_err());
        assert!(view.child("f").expect_err("a string").to_string().ends_with('…'));
        assert!(ConfigView::root(&json!([])).is_err());
    }
}
