//! One record of a `.jsonl`. Enters: a line and a key. Leaves: the text under that key. Whatever else the record holds is read
//! over and not kept, so that memory is that of the line and its text.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Names that a message repeats when the one asked for is not among them, at most, and characters of each.
const MAX_NAMES: usize = 20;
const MAX_NAME_CHARS: usize = 40;

/// What a record holds under a key; under one that it repeats, the last.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Field {
    Text(String),
    Null,
    /// Something else, in words.
    Other(&'static str),
    /// The key is not there; these are.
    Absent {
        names: String,
    },
}

/// Reads the value of `field` from a JSON object; in words, what is wrong with the line.
pub(crate) fn read(line: &str, field: &str) -> Result<Field, String> {
    let mut json = serde_json::Deserializer::from_str(line);
    let found = Record { field }.deserialize(&mut json).and_then(|found| json.end().map(|()| found));
    match found {
        Ok(Ok(field)) => Ok(field),
        Ok(Err(other)) => Err(format!("expected a JSON object, found {other}")),
        Err(e) => Err(format!("not JSON (column {}): {e}", e.column())),
    }
}

/// An object with the field, or in words what there is instead.
struct Record<'a> {
    field: &'a str,
}

impl<'de> DeserializeSeed<'de> for Record<'_> {
    type Value = Result<Field, &'static str>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(Anything { field: Some(self.field) }).map(|found| match found {
            Found::Record(field) => Ok(field),
            Found::Value(Field::Text(_)) => Err("a string"),
            Found::Value(Field::Null) => Err("null"),
            Found::Value(Field::Other(what)) => Err(what),
            Found::Value(Field::Absent { .. }) => Err("an object"),
        })
    }
}

/// What stands where a value does.
enum Found {
    Record(Field),
    Value(Field),
}

/// Takes any value; of an object, the field when one is asked for.
struct Anything<'a> {
    field: Option<&'a str>,
}

impl<'de> DeserializeSeed<'de> for Anything<'_> {
    type Value = Found;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Found, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Anything<'_> {
    type Value = Found;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_str<E>(self, text: &str) -> Result<Found, E> {
        // A record by itself is no object: what it says is not kept.
        let kept = if self.field.is_none() { text } else { "" };
        Ok(Found::Value(Field::Text(kept.to_owned())))
    }

    fn visit_unit<E>(self) -> Result<Found, E> {
        Ok(Found::Value(Field::Null))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Found, E> {
        Ok(Found::Value(Field::Other("a boolean")))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Found, E> {
        Ok(Found::Value(Field::Other("a number")))
    }

    fn visit_u64<E>(self, _: u64) -> Result<Found, E> {
        Ok(Found::Value(Field::Other("a number")))
    }

    fn visit_f64<E>(self, _: f64) -> Result<Found, E> {
        Ok(Found::Value(Field::Other("a number")))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Found, A::Error> {
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Found::Value(Field::Other("an array")))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Found, A::Error> {
        let (mut found, mut names) = (None, Vec::new());
        while let Some(key) = entries.next_key::<String>()? {
            if self.field == Some(key.as_str()) {
                found = Some(match entries.next_value_seed(Anything { field: None })? {
                    Found::Value(field) | Found::Record(field) => field,
                });
            } else {
                entries.next_value::<IgnoredAny>()?;
                if self.field.is_some() && names.len() < MAX_NAMES {
                    names.push(key.chars().take(MAX_NAME_CHARS).collect::<String>());
                }
            }
        }
        Ok(match self.field {
            None => Found::Value(Field::Other("an object")),
            Some(_) => Found::Record(found.unwrap_or_else(|| Field::Absent { names: names.join(", ") })),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_field_is_read_and_the_others_are_passed_over() {
        let text = |text: &str| Ok(Field::Text(text.to_owned()));
        for (line, expected) in [
            (r#"{"text":"a"}"#, text("a")),
            (r#" {"id":[1,{"text":"no"}],"text":"\u00e4","z":1e400} "#, text("\u{e4}")),
            (r#"{"text":"a","text":"b"}"#, text("b")),
            (r#"{"text":null}"#, Ok(Field::Null)),
            (r#"{"text":[1]}"#, Ok(Field::Other("an array"))),
            (r#"{"text":{"text":"a"}}"#, Ok(Field::Other("an object"))),
            (r#"{"text":-1.5}"#, Ok(Field::Other("a number"))),
            (r#"{"b":1,"a":true}"#, Ok(Field::Absent { names: "b, a".to_owned() })),
            ("[1]", Err("expected a JSON object, found an array".to_owned())),
            ("\"a\"", Err("expected a JSON object, found a string".to_owned())),
        ] {
            assert_eq!(read(line, "text"), expected, "{line}");
        }
        for line in [r#"{"text":"a""#, r#"{"text":"a"} x"#, "{'text':1}", r#"{"a":"\q","text":"a"}"#] {
            assert!(read(line, "text").expect_err(line).starts_with("not JSON (column "), "{line}");
        }
    }
}
