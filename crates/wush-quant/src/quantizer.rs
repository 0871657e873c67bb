//! Which quantizer: the types that name one, their text form, and the registry.
//!
//! Enters: text from a command line, or numbers. Leaves: a [`Quantizer`] whose parameters are in range. Quantizes nothing.

use std::fmt;
use std::str::FromStr;

use crate::alpha::ALPHA;
use crate::{QuantError, Result};

/// Bits a code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(try_from = "u8", into = "u8"))]
#[repr(u8)]
pub enum Bits {
    /// 4 levels.
    Two = 2,
    /// 8 levels.
    Three = 3,
    /// 16 levels.
    Four = 4,
    /// 256 levels.
    Eight = 8,
}

impl Bits {
    /// Every width that has a packed form, rising.
    pub const ALL: [Self; 4] = [Self::Two, Self::Three, Self::Four, Self::Eight];

    /// The number.
    pub const fn get(self) -> u8 {
        self as u8
    }

    /// The largest code, 2^b − 1.
    pub const fn max_code(self) -> u8 {
        u8::MAX >> (8 - self.get())
    }

    /// α_b of Eq. 5, see [`alpha`](crate::alpha()).
    pub const fn alpha(self) -> f64 {
        ALPHA[self.get() as usize - 1]
    }
}

impl TryFrom<u8> for Bits {
    type Error = QuantError;

    fn try_from(bits: u8) -> Result<Self> {
        Self::ALL.into_iter().find(|known| known.get() == bits).ok_or(QuantError::Bits { found: bits.into() })
    }
}

impl From<Bits> for u8 {
    fn from(bits: Bits) -> Self {
        bits.get()
    }
}

impl FromStr for Bits {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = |bits: &Self| text.parse() == Ok(bits.get());
        Self::ALL.into_iter().find(known).ok_or_else(|| "expected 2, 3, 4 or 8".to_owned())
    }
}

/// Bits of one layer's keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerBits {
    /// Of keys.
    pub keys: Bits,
    /// Of values.
    pub values: Bits,
}

impl LayerBits {
    /// The same of both.
    pub const fn both(bits: Bits) -> Self {
        Self { keys: bits, values: bits }
    }

    /// Of one side.
    pub const fn of(&self, role: Role) -> Bits {
        match role {
            Role::Key => self.keys,
            Role::Value => self.values,
        }
    }
}

/// How scale and zero point are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "lowercase"))]
pub enum ScaleDtype {
    /// bfloat16, 4 bytes for both.
    #[default]
    Bf16,
    /// Single precision, 8 bytes for both.
    F32,
}

impl FromStr for ScaleDtype {
    type Err = QuantError;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "bf16" => Ok(Self::Bf16),
            "f32" => Ok(Self::F32),
            _ => Err(QuantError::UnknownScaleDtype { text: text.to_owned() }),
        }
    }
}

impl fmt::Display for ScaleDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        })
    }
}

/// Keys or values: they have different default clip ratios.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Keys, after RoPE and the key transform.
    Key,
    /// Values, in the coordinates of the value transform.
    Value,
}

/// How Eq. 7's quantile of the d magnitudes is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "lowercase"))]
pub enum Quantile {
    /// The element at `min(⌊κ·d⌋, d − 1)` of the sorted magnitudes.
    #[default]
    Index,
    /// Interpolated linearly at rank `κ (d − 1)`: the default of numpy and torch.
    Linear,
}

/// A quantizer's rule and parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(tag = "method", rename_all = "lowercase", deny_unknown_fields))]
pub enum Kind {
    /// Eq. 5: symmetric, the step from the group's RMS.
    Quest {
        /// End of the grid in units of the RMS, in (0, 64].
        alpha: f64,
    },
    /// Eq. 7: affine, the range clipped at a quantile of the magnitudes.
    Oscar {
        /// Clip ratio, in [0, 1].
        kappa: f64,
        /// The quantile's rule.
        quantile: Quantile,
    },
}

impl Kind {
    /// The name in [`QUANTIZERS`].
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Quest { .. } => "quest",
            Self::Oscar { quantile: Quantile::Index, .. } => "oscar",
            Self::Oscar { quantile: Quantile::Linear, .. } => "oscar-linear",
        }
    }
}

/// A quantizer of token-heads: rule, parameter, bits and how scales are stored.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(try_from = "Unchecked"))]
pub struct Quantizer {
    kind: Kind,
    bits: Bits,
    scale_dtype: ScaleDtype,
}

impl Quantizer {
    /// Checks the parameter.
    ///
    /// # Errors
    /// `Parameter` when alpha is not in [1/64, 64] or kappa not in [0, 1].
    pub fn new(kind: Kind, bits: Bits, scale_dtype: ScaleDtype) -> Result<Self> {
        let (parameter, expected, found, fits) = match kind {
            Kind::Quest { alpha } => ("alpha", "1/64 to 64", alpha, (1.0 / MAX_ALPHA..=MAX_ALPHA).contains(&alpha)),
            Kind::Oscar { kappa, .. } => ("kappa", "0 to 1", kappa, (0.0..=1.0).contains(&kappa)),
        };
        if fits {
            Ok(Self { kind, bits, scale_dtype })
        } else {
            Err(QuantError::Parameter { parameter, expected, found })
        }
    }

    /// Rule and parameter.
    pub const fn kind(&self) -> Kind {
        self.kind
    }

    /// Bits a code.
    pub const fn bits(&self) -> Bits {
        self.bits
    }

    /// How scale and zero point are stored.
    pub const fn scale_dtype(&self) -> ScaleDtype {
        self.scale_dtype
    }
}

impl fmt::Display for Quantizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (parameter, value) = match self.kind {
            Kind::Quest { alpha } => ("alpha", alpha),
            Kind::Oscar { kappa, .. } => ("kappa", kappa),
        };
        write!(f, "{}, {} bits, {parameter} {value}, {} scales", self.kind.name(), self.bits.get(), self.scale_dtype)
    }
}

/// Largest α accepted: with [`MAX_MAGNITUDE`](crate::MAX_MAGNITUDE) it keeps every reconstruction finite.
const MAX_ALPHA: f64 = 64.0;

/// κ of keys unless told otherwise: OSCAR's, as in Section 5.3.
const KAPPA_KEYS: f64 = 0.96;
/// κ of values unless told otherwise.
const KAPPA_VALUES: f64 = 0.92;

/// One entry of the registry.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    /// Name on the command line and in files.
    pub name: &'static str,
    /// One line for help and docs.
    pub doc: &'static str,
    /// The parameter's name.
    pub parameter: &'static str,
    default: fn(Bits, Role) -> f64,
    kind: fn(f64) -> Kind,
}

/// Every quantizer.
pub const QUANTIZERS: &[Entry] = &[
    Entry {
        name: "quest",
        doc: "Symmetric, the step from the group's RMS (Eq. 5).",
        parameter: "alpha",
        default: |bits, _| bits.alpha(),
        kind: |alpha| Kind::Quest { alpha },
    },
    Entry {
        name: "quest-wide",
        doc: "The same on a wider grid, for encoders with error feedback.",
        parameter: "alpha",
        default: wide_alpha,
        kind: |alpha| Kind::Quest { alpha },
    },
    Entry {
        name: "oscar",
        doc: "Affine, clipped at a quantile of the magnitudes (Eq. 7), taken by index.",
        parameter: "kappa",
        default: kappa,
        kind: |kappa| Kind::Oscar { kappa, quantile: Quantile::Index },
    },
    Entry {
        name: "oscar-linear",
        doc: "The same with an interpolated quantile.",
        parameter: "kappa",
        default: kappa,
        kind: |kappa| Kind::Oscar { kappa, quantile: Quantile::Linear },
    },
];

/// α for error feedback. The targets of later coordinates carry the errors of earlier ones, so they spread wider than the
/// group that α_b is best for. The multiples are measured: docs/quality.md.
fn wide_alpha(bits: Bits, role: Role) -> f64 {
    let multiple = match (bits, role) {
        (Bits::Two, Role::Key) => 1.25,
        (Bits::Two, Role::Value) => 1.2,
        (Bits::Three | Bits::Four, _) => 1.1,
        (Bits::Eight, _) => 1.0,
    };
    multiple * bits.alpha()
}

fn kappa(_: Bits, role: Role) -> f64 {
    match role {
        Role::Key => KAPPA_KEYS,
        Role::Value => KAPPA_VALUES,
    }
}

/// A quantizer as a user names it: `quest`, `quest-wide`, `oscar`, `oscar-linear`, or with another parameter `quest:1.6`, `oscar:0.97`.
#[derive(Debug, Clone, Copy)]
pub struct Method {
    entry: &'static Entry,
    parameter: Option<f64>,
}

impl Method {
    /// What suits an encoder: `quest-wide` with error feedback, else `quest`.
    pub const fn for_encoder(feedback: bool) -> Self {
        Self { entry: &QUANTIZERS[feedback as usize], parameter: None }
    }

    /// The quantizer; where the text gave no parameter, the default of these bits (α_b) or of this role (κ).
    ///
    /// # Errors
    /// `Parameter`, see [`Quantizer::new`].
    pub fn quantizer(&self, bits: Bits, role: Role, scale_dtype: ScaleDtype) -> Result<Quantizer> {
        let parameter = self.parameter.unwrap_or_else(|| (self.entry.default)(bits, role));
        Quantizer::new((self.entry.kind)(parameter), bits, scale_dtype)
    }
}

impl PartialEq for Method {
    fn eq(&self, other: &Self) -> bool {
        (self.entry.name, self.parameter) == (other.entry.name, other.parameter)
    }
}

impl FromStr for Method {
    type Err = QuantError;

    fn from_str(text: &str) -> Result<Self> {
        let unknown = || QuantError::UnknownMethod {
            text: text.to_owned(),
            known: QUANTIZERS.iter().map(|entry| entry.name).collect::<Vec<_>>().join(", "),
        };
        let (name, parameter) = match text.split_once(':') {
            Some((name, number)) => (name, Some(number.parse().map_err(|_| unknown())?)),
            None => (text, None),
        };
        let entry = QUANTIZERS.iter().find(|entry| entry.name == name).ok_or_else(unknown)?;
        let method = Self { entry, parameter };
        if let Some(value) = parameter {
            Quantizer::new((entry.kind)(value), Bits::Two, ScaleDtype::Bf16)?;
        }
        Ok(method)
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.parameter {
            Some(value) => f.pad(&format!("{}:{value}", self.entry.name)),
            None => f.pad(self.entry.name),
        }
    }
}

/// What a file says, before the parameter is checked.
#[cfg(feature = "serde")]
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Unchecked {
    kind: Kind,
    bits: Bits,
    scale_dtype: ScaleDtype,
}

#[cfg(feature = "serde")]
impl TryFrom<Unchecked> for Quantizer {
    type Error = QuantError;

    fn try_from(read: Unchecked) -> Result<Self> {
        Self::new(read.kind, read.bits, read.scale_dtype)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_makes_the_kind_of_its_name() {
        for entry in QUANTIZERS {
            // The wide grid is QuEST's with another α.
            assert_eq!((entry.kind)(0.5).name(), entry.name.trim_end_matches("-wide"));
            let method: Method = entry.name.parse().expect("a name");
            assert_eq!(method.to_string(), entry.name);
            let with: Method = format!("{}:0.75", entry.name).parse().expect("a name and a parameter");
            assert_eq!(with.to_string(), format!("{}:0.75", entry.name));
            let made = with.quantizer(Bits::Three, Role::Key, ScaleDtype::F32).expect("in range");
            assert_eq!(made.kind(), (entry.kind)(0.75));
        }
    }

    #[test]
    fn defaults_are_those_of_the_paper() {
        let made = |text: &str, bits, role| {
            let method: Method = text.parse().expect("a name");
            method.quantizer(bits, role, ScaleDtype::Bf16).expect("in range").to_string()
        };
        assert_eq!(made("quest", Bits::Two, Role::Key), "quest, 2 bits, alpha 1.4935300289152595, bf16 scales");
        assert_eq!(made("quest-wide", Bits::Eight, Role::Key), made("quest", Bits::Eight, Role::Key));
        for (feedback, name) in [(false, "quest"), (true, "quest-wide")] {
            assert_eq!(Method::for_encoder(feedback).to_string(), name);
        }
        assert_eq!(made("oscar", Bits::Four, Role::Key), "oscar, 4 bits, kappa 0.96, bf16 scales");
        assert_eq!(made("oscar-linear", Bits::Two, Role::Value), "oscar-linear, 2 bits, kappa 0.92, bf16 scales");
    }

    #[test]
    fn wrong_text_and_numbers_are_refused() {
        for text in ["", "Quest", "oscar:", "oscar:x", "quest:1.5:2", "kivi"] {
            let error = text.parse::<Method>().expect_err(text).to_string();
            assert!(error.contains("quest, quest-wide, oscar, oscar-linear"), "{error}");
        }
        for text in
            ["oscar:1.01", "oscar:-0.1", "oscar:NaN", "quest:0", "quest:1e-300", "quest:-1", "quest:inf", "quest:65"]
        {
            assert!(matches!(text.parse::<Method>(), Err(QuantError::Parameter { .. })), "{text}");
        }
        for bits in [0u8, 1, 5, 6, 7, 9, 16, 255] {
            assert_eq!(Bits::try_from(bits), Err(QuantError::Bits { found: bits.into() }));
        }
        assert!("f16".parse::<ScaleDtype>().is_err());
    }
}
