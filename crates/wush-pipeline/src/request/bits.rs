//! `--bits` and `--kv-bits`: how many bits a cached coordinate gets, the same everywhere or by what a layer needs.

use std::fmt;
use std::str::FromStr;

use wush_eval::allot::AVERAGES;
use wush_quant::Bits;

/// What an average begins with.
const AUTO: &str = "auto:";
/// Bits of what is not quantized.
const FULL: &str = "16";

/// Bits of a quantized cache.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum CodeBits {
    /// The same in every layer.
    Same(Bits),
    /// `auto:AVERAGE`: 2, 3 or 4 for each layer's keys and values, by measured errors of the modules.
    Auto(f64),
}

impl FromStr for CodeBits {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let [least, most] = AVERAGES;
        let Some(average) = text.strip_prefix(AUTO) else {
            return text.parse().map(Self::Same).map_err(|_| "expected 2, 3, 4, 8 or auto:AVERAGE".to_owned());
        };
        match average.parse() {
            Ok(average) if (least..=most).contains(&average) => Ok(Self::Auto(average)),
            _ => Err(format!("expected an average from {least} to {most}, such as auto:2.25")),
        }
    }
}

impl fmt::Display for CodeBits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Same(bits) => write!(f, "{}", bits.get()),
            Self::Auto(average) => write!(f, "{AUTO}{average}"),
        }
    }
}

/// Bits of a cache that may also stay as it is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum KvBits {
    /// 16: nothing is quantized.
    Full,
    /// Codes.
    Codes(CodeBits),
}

impl KvBits {
    /// `--kv-bits` of a bundle where none is given.
    pub const OF_BUNDLE: Self = Self::Codes(CodeBits::Same(Bits::Two));
}

impl FromStr for KvBits {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            FULL => Ok(Self::Full),
            _ => text.parse().map(Self::Codes).map_err(|e: String| format!("{e}, or {FULL} to quantize nothing")),
        }
    }
}

impl fmt::Display for KvBits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str(FULL),
            Self::Codes(bits) => bits.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_typed_is_what_is_shown() {
        for text in ["2", "3", "4", "8", "auto:2", "auto:2.25", "auto:4"] {
            assert_eq!(text.parse::<CodeBits>().expect("known").to_string(), text);
            assert_eq!(text.parse::<KvBits>().expect("known").to_string(), text);
        }
        assert_eq!("16".parse::<KvBits>(), Ok(KvBits::Full));
        for text in ["", "5", "16", "auto", "auto:", "auto:1.9", "auto:4.5", "auto:nan", "auto:-2", "2.25", "auto:inf"]
        {
            assert!(text.parse::<CodeBits>().is_err(), "{text}");
        }
    }
}
