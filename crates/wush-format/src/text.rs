//! Text of files on its way to people: the one rule on what may reach a terminal or a page.
//!
//! Names, sources and settings of a file end up in reports. A control character there could draw lines of its own, and a
//! character that reverses the direction of text could make a name read as another. Files of wush are refused for them;
//! whatever else is repeated (file names, tensor names, a parser's message) is escaped. Sizes in bytes read the same everywhere.

use std::borrow::Cow;

use crate::json::shown;
use crate::tensor_file::TensorFile;
use crate::{FormatError, Result};

/// Whether a terminal or a page shows `text` as it is: no control character, line separator or direction override.
pub fn is_plain(text: &str) -> bool {
    !text.contains(is_active)
}

/// `text` with every character that [`is_plain`] refuses written as an escape.
pub fn printable(text: &str) -> Cow<'_, str> {
    if is_plain(text) {
        return Cow::Borrowed(text);
    }
    let escape = |c: char| if is_active(c) { c.escape_default().to_string() } else { c.to_string() };
    Cow::Owned(text.chars().map(escape).collect())
}

/// Refuses JSON with a key or a string that is not plain.
///
/// # Errors
/// What is wrong, as a sentence.
pub fn refuse_active_json(json: &[u8]) -> Result<(), String> {
    let value: serde_json::Value = serde_json::from_slice(json).map_err(|e| e.to_string())?;
    first_active(&value).map_or(Ok(()), |text| Err(refusal(text)))
}

/// Refuses a file whose metadata has a key or a value that is not plain, or JSON with such a string. `kind` names the
/// file in messages.
///
/// # Errors
/// `Invalid`.
pub fn refuse_active_metadata(file: &TensorFile, kind: &'static str) -> Result<()> {
    for (key, value) in file.metadata() {
        let invalid = |detail: String| FormatError::invalid(file.path(), kind, format!("metadata: {detail}"));
        if let Some(text) = [key, value].into_iter().find(|text| !is_plain(text)) {
            return Err(invalid(refusal(text)));
        }
        // What is no JSON is the reader's to refuse.
        if let Some(text) = serde_json::from_str(value).ok().as_ref().and_then(first_active) {
            return Err(invalid(refusal(text)));
        }
    }
    Ok(())
}

fn is_active(c: char) -> bool {
    c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn refusal(text: &str) -> String {
    format!("the string {} holds a control character", shown(text))
}

fn first_active(value: &serde_json::Value) -> Option<&str> {
    match value {
        serde_json::Value::String(text) => (!is_plain(text)).then_some(text),
        serde_json::Value::Array(items) => items.iter().find_map(first_active),
        serde_json::Value::Object(fields) => {
            fields.iter().find_map(|(key, value)| if is_plain(key) { first_active(value) } else { Some(key) })
        }
        _ => None,
    }
}

/// Bytes in powers of ten, as disks count: "1.5 GB".
pub fn human_bytes(n_bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "kB", "MB", "GB", "TB"];
    let mut value = n_bytes as f64;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    match unit {
        0 => format!("{n_bytes} B"),
        1 | 2 => format!("{value:.1} {}", UNITS[unit]),
        _ => format!("{value:.2} {}", UNITS[unit]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_read_well() {
        assert_eq!([0, 999, 1000, 277_049_999].map(human_bytes), ["0 B", "999 B", "1.0 kB", "277.0 MB"]);
        assert_eq!([1_500_000_000, u64::MAX].map(human_bytes), ["1.50 GB", "18446744.07 TB"]);
    }

    #[test]
    fn what_could_draw_is_found_and_escaped() {
        for (text, escaped) in [
            ("\u{1b}[2Jx", "\\u{1b}[2Jx"),
            ("a\nb", "a\\nb"),
            ("\u{9b}31m", "\\u{9b}31m"),
            ("txt\u{202e}gpj", "txt\\u{202e}gpj"),
        ] {
            assert!(!is_plain(text));
            assert_eq!(printable(text), escaped);
            assert!(is_plain(&printable(text)));
        }
        for text in ["", "Modèle–8B → \"x\" \\u{1b}", "模型 שלום"] {
            assert_eq!(printable(text), text);
        }
    }

    #[test]
    fn json_is_searched_at_every_depth() {
        for json in [r#"{"a":["x",{"b":"\u001b"}]}"#, r#"{"a\n":1}"#, r#"["\u202e"]"#] {
            assert!(refuse_active_json(json.as_bytes()).expect_err(json).contains("control character"));
        }
        assert_eq!(refuse_active_json(br#"{"a": [1, "b", null]}"#), Ok(()));
    }
}
