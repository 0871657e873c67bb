//! A group's affine map, and the pass over the group that checks it. Enters: a token-head. Leaves: its extent, and codes.

use crate::{Bits, MAX_MAGNITUDE};

/// How the coordinates of one group become codes, and what is stored beside them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Affine {
    /// Code `⌊(x/scale + shift) + half⌋ + base`, clamped to `[0, 2^b − 1]`, evaluated in f64 in this order.
    Steps { scale: f64, zero: f64, shift: f64, half: f64, base: f64 },
    /// Every coordinate has this code.
    Constant { scale: f64, zero: f64, code: u8 },
}

impl Affine {
    /// Scale and zero point to store: `x̂ = scale (code − zero)`.
    pub(crate) const fn stored(&self) -> (f64, f64) {
        match *self {
            Self::Steps { scale, zero, .. } | Self::Constant { scale, zero, .. } => (scale, zero),
        }
    }

    /// The codes of `x`, `[d]` both.
    #[inline(always)]
    pub(crate) fn codes(&self, x: &[f32], bits: Bits, codes: &mut [u8]) {
        match *self {
            Self::Constant { code, .. } => codes.fill(code),
            Self::Steps { scale, shift, half, base, .. } => {
                let top = f64::from(bits.max_code());
                for (code, &x) in codes.iter_mut().zip(x) {
                    let steps = ((f64::from(x) / scale + shift) + half).floor() + base;
                    *code = small_integer(if steps < 0.0 {
                        0.0
                    } else if steps > top {
                        top
                    } else {
                        steps
                    });
                }
            }
        }
    }
}

/// An integer from 0 to 255, from f64: adding 2^52 leaves it in the low bits of the mantissa. Unlike `as`, this is one
/// vector instruction everywhere.
#[inline(always)]
pub(crate) fn small_integer(x: f64) -> u8 {
    const TWO_52: f64 = 4_503_599_627_370_496.0;
    (x + TWO_52).to_bits() as u8
}

/// The extremes of a group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Extent {
    pub(crate) min: f32,
    pub(crate) max: f32,
    /// Bit pattern of the largest magnitude; NaN's is above every number's.
    pub(crate) magnitude_bits: u32,
}

impl Extent {
    /// Of `x`, not empty.
    #[inline(always)]
    pub(crate) fn of(x: &[f32]) -> Self {
        let (mut min, mut max, mut magnitude_bits) = (i32::MAX, i32::MIN, 0);
        for &x in x {
            let key = ordered(x.to_bits().cast_signed());
            min = min.min(key);
            max = max.max(key);
            magnitude_bits = magnitude_bits.max(x.to_bits() & 0x7fff_ffff);
        }
        let float = |key: i32| f32::from_bits(ordered(key).cast_unsigned());
        Self { min: float(min), max: float(max), magnitude_bits }
    }

    /// Whether every coordinate is a number up to [`MAX_MAGNITUDE`].
    #[inline(always)]
    pub(crate) fn fits(&self) -> bool {
        self.magnitude_bits <= MAX_MAGNITUDE.to_bits()
    }
}

/// Bits of a float to an integer in the floats' order (−0 before 0), and back: integers have vector minima and maxima.
#[inline(always)]
const fn ordered(bits: i32) -> i32 {
    bits ^ (((bits >> 31).cast_unsigned()) >> 1).cast_signed()
}
