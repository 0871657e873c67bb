//! Sizes of memory, as typed: "24GiB", "20 GB", "512MiB" or a number of bytes.

use std::fmt;
use std::str::FromStr;

/// Units, the longest names first, so that none is taken for the end of another.
const UNITS: [(&str, u64); 7] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
];

/// A number of bytes, at least one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (number, unit) =
            UNITS.iter().find_map(|(name, unit)| Some((text.strip_suffix(name)?, *unit))).unwrap_or((text, 1));
        let expected = || "expected a size such as 24GiB, 20GB or 25769803776".to_owned();
        let number = number.trim_end();
        if number.is_empty() || !number.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') {
            return Err(expected());
        }
        let bytes = match number.parse::<u64>() {
            Ok(whole) => whole.checked_mul(unit),
            // Beyond the largest integer the cast saturates, and is refused.
            Err(_) => number.parse::<f64>().ok().map(|number| (number * unit as f64) as u64).filter(|&n| n < u64::MAX),
        };
        bytes.filter(|&bytes| bytes > 0).map(Self).ok_or_else(expected)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_both_kinds_of_units() {
        for (text, bytes) in [
            ("24GiB", 24 << 30),
            ("20 GB", 20_000_000_000),
            ("1.5MiB", 3 << 19),
            ("4096", 4096),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for text in ["", "GiB", "-1GiB", "0", "24 gigs", "1e9", "NaN", "1.2.3GB", "99999999999TiB", "99999999999.5TiB"]
        {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
    }
}
