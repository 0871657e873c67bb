//! Numbers as people read them, and as JSON can hold them.

use wush_format::hash::Sha;

/// Hex digits of a digest that are shown.
const DIGEST_DIGITS: usize = 12;

/// JSON has no NaN and no infinity: such a number is absent.
pub(crate) fn finite(x: f64) -> Option<f64> {
    x.is_finite().then_some(x)
}

/// Three significant digits; powers of ten outside 0.01 to 10⁵.
pub(crate) fn shown(x: f64) -> String {
    let size = x.abs();
    if x == 0.0 {
        "0".to_owned()
    } else if !(0.01..1e5).contains(&size) {
        format!("{x:.1e}")
    } else if size < 10.0 {
        format!("{x:.2}")
    } else if size < 100.0 {
        format!("{x:.1}")
    } else {
        format!("{x:.0}")
    }
}

/// Enough hex digits of a digest to tell it from others; the JSON fields have it whole.
pub(crate) fn digest(sha: &Sha) -> String {
    sha.to_string().chars().take(DIGEST_DIGITS).collect()
}

/// `1 file`, `2 files`.
pub(crate) fn count(n: usize, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

/// The larger, a NaN counting as larger than everything.
pub(crate) fn worse(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}
