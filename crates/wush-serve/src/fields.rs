//! A request's JSON, field by field. Enters: the body's bytes. Leaves: typed values; an error that names the field at fault. A
//! field that nobody took is refused, as OpenAI does: what is not understood is not quietly left out.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::error::ApiError;

/// The fields of a body that were not taken yet.
#[derive(Debug)]
pub(crate) struct Fields(Map<String, Value>);

impl Fields {
    /// # Errors
    /// 400 for anything but a JSON object.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(fields)) => Ok(Self(fields)),
            Ok(_) => Err(ApiError::invalid(None, "the body must be a JSON object")),
            Err(error) => Err(ApiError::invalid(None, format!("the body is not valid JSON: {error}"))),
        }
    }

    /// A field's value; none where it is absent or null.
    ///
    /// # Errors
    /// 400 for another type than `expected` says.
    pub(crate) fn take<T: DeserializeOwned>(
        &mut self,
        name: &'static str,
        expected: &str,
    ) -> Result<Option<T>, ApiError> {
        match self.0.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match serde_json::from_value(value) {
                Ok(value) => Ok(Some(value)),
                Err(_) => Err(ApiError::invalid(name, format!("{name}: expected {expected}"))),
            },
        }
    }

    /// The same, in a range.
    ///
    /// # Errors
    /// 400 for another type, or out of range.
    pub(crate) fn count(&mut self, name: &'static str, most: usize) -> Result<Option<usize>, ApiError> {
        let expected = format!("a whole number from 0 to {most}");
        let found: Option<usize> = self.take(name, &expected)?;
        match found {
            Some(n) if n > most => Err(ApiError::invalid(name, format!("{name}: expected {expected}, found {n}"))),
            found => Ok(found),
        }
    }

    /// A switch, false where it is absent.
    ///
    /// # Errors
    /// 400 for another type.
    pub(crate) fn flag(&mut self, name: &'static str) -> Result<bool, ApiError> {
        Ok(self.take(name, "true or false")?.unwrap_or(false))
    }

    /// Takes fields that would change the answer and are not known here, as long as they ask for nothing.
    ///
    /// # Errors
    /// 400 for any other value.
    pub(crate) fn neutral(&mut self, fields: &[(&'static str, &[Value])]) -> Result<(), ApiError> {
        for &(name, neutral) in fields {
            let found = self.0.remove(name).unwrap_or(Value::Null);
            let is_empty = found.as_array().is_some_and(Vec::is_empty) || found.as_object().is_some_and(Map::is_empty);
            let is_neutral = found.is_null() || is_empty || neutral.iter().any(|value| same(value, &found));
            if !is_neutral {
                let expected: Vec<String> = neutral.iter().map(Value::to_string).collect();
                let message = match expected.as_slice() {
                    [] => format!("{name}: this server does not have it"),
                    _ => format!("{name}: this server has only {}", expected.join(" or ")),
                };
                return Err(ApiError { code: "unsupported_value", ..ApiError::invalid(name, message) });
            }
        }
        Ok(())
    }

    /// Takes fields that change no answer.
    pub(crate) fn ignore(&mut self, names: &[&str]) {
        names.iter().for_each(|&name| drop(self.0.remove(name)));
    }

    /// # Errors
    /// 400 with the first field that was not taken.
    pub(crate) fn finish(self) -> Result<(), ApiError> {
        match self.0.into_iter().next() {
            None => Ok(()),
            Some((name, _)) => {
                let name: String = name.chars().take(64).collect();
                let message = format!("unrecognized field: {name}");
                Err(ApiError { code: "unknown_parameter", ..ApiError::invalid(None, message) }.at(Some(name)))
            }
        }
    }
}

/// Equal; of numbers, in value.
fn same(a: &Value, b: &Value) -> bool {
    a == b || (a.is_number() && a.as_f64() == b.as_f64())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(text: &str) -> Fields {
        Fields::parse(text.as_bytes()).expect("an object")
    }

    #[test]
    fn errors_name_the_field() {
        let mut all = fields(r#"{"a": -1, "b": 9, "c": "yes", "d": [1]}"#);
        for (error, param) in [
            (all.count("a", 5).expect_err("negative"), "a"),
            (all.count("b", 5).expect_err("too large"), "b"),
            (all.flag("c").expect_err("text"), "c"),
            (all.neutral(&[("d", &[])]).expect_err("not empty"), "d"),
        ] {
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(param)), "{error:?}");
            assert!(error.message.starts_with(param), "{error:?}");
        }
        assert!(all.finish().is_ok());
        assert!(fields(r#"{"x": null}"#).finish().is_err_and(|error| error.param.as_deref() == Some("x")));
        for body in ["", "[]", "{", "\"text\""] {
            assert!(Fields::parse(body.as_bytes()).is_err(), "{body}");
        }
    }

    #[test]
    fn what_asks_for_nothing_is_taken() {
        let mut all = fields(r#"{"n": 1, "p": 0.0, "bias": {}, "user": "me", "none": null}"#);
        all.neutral(&[("n", &[json!(1)]), ("p", &[json!(0)]), ("bias", &[]), ("absent", &[])]).expect("neutral");
        all.ignore(&["user"]);
        assert_eq!(all.take::<String>("none", "text").expect("null"), None);
        all.finish().expect("all taken");
    }
}
