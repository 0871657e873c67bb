//! Stored elements to f64 and back, with exactly one rounding.
//!
//! Widening is exact. Narrowing rounds to nearest, ties to even, straight from f64: going through a plain f32 would
//! round twice, and the truncating conversions of common libraries drop the bits that decide a tie.

use half::{bf16, f16};
use wush_format::tensor_file::Dtype;

/// The dtypes that can be folded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Element {
    Bf16,
    F16,
    F32,
    F64,
}

impl Element {
    /// The element type of a stored dtype; none for integers and 8-bit floats.
    pub(crate) fn of(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::BF16 => Some(Self::Bf16),
            Dtype::F16 => Some(Self::F16),
            Dtype::F32 => Some(Self::F32),
            Dtype::F64 => Some(Self::F64),
            _ => None,
        }
    }

    /// Its name in a safetensors header.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "BF16",
            Self::F16 => "F16",
            Self::F32 => "F32",
            Self::F64 => "F64",
        }
    }

    pub(crate) fn dtype(self) -> Dtype {
        match self {
            Self::Bf16 => Dtype::BF16,
            Self::F16 => Dtype::F16,
            Self::F32 => Dtype::F32,
            Self::F64 => Dtype::F64,
        }
    }

    /// Bytes an element.
    pub(crate) fn n_bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }

    /// Exponent of the smallest normal number, and bits of the significand after the point.
    fn format(self) -> (i32, i32) {
        match self {
            Self::Bf16 => (-126, 7),
            Self::F16 => (-14, 10),
            Self::F32 => (-126, 23),
            Self::F64 => (-1022, 52),
        }
    }

    /// Half the distance between neighbours around a stored value: how far rounding can have moved it.
    pub(crate) fn half_ulp(self, stored: f64) -> f64 {
        let (min_exponent, fraction_bits) = self.format();
        let exponent = (((stored.to_bits() >> 52) & 0x7ff) as i32 - 1023).max(min_exponent);
        2f64.powi(exponent - fraction_bits - 1)
    }

    /// Widens little-endian elements; `out.len()` elements are read.
    pub(crate) fn widen(self, bytes: &[u8], out: &mut [f64]) {
        match self {
            Self::Bf16 => {
                for (value, &raw) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *value = f64::from(f32::from_bits(u32::from(u16::from_le_bytes(raw)) << 16));
                }
            }
            Self::F16 => {
                for (value, &raw) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *value = f64::from(f16::from_le_bytes(raw));
                }
            }
            Self::F32 => {
                for (value, &raw) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *value = f64::from(f32::from_le_bytes(raw));
                }
            }
            Self::F64 => {
                for (value, &raw) in out.iter_mut().zip(bytes.as_chunks::<8>().0) {
                    *value = f64::from_le_bytes(raw);
                }
            }
        }
    }

    /// Rounds `values` into `bytes` and replaces each value by its rounding error, stored − exact. Returns the first
    /// value that the dtype cannot hold (too large, or not finite); `bytes` is then meaningless.
    pub(crate) fn narrow(self, values: &mut [f64], bytes: &mut [u8]) -> Result<(), f64> {
        match self {
            Self::Bf16 => narrow_with(values, bytes.as_chunks_mut::<2>().0, |x| {
                let stored = bf16::from_f32(to_odd_f32(x));
                (stored.to_le_bytes(), f64::from(stored))
            }),
            Self::F16 => narrow_with(values, bytes.as_chunks_mut::<2>().0, |x| {
                let stored = f16::from_f32(to_odd_f32(x));
                (stored.to_le_bytes(), f64::from(stored))
            }),
            Self::F32 => narrow_with(values, bytes.as_chunks_mut::<4>().0, |x| {
                let stored = x as f32;
                (stored.to_le_bytes(), f64::from(stored))
            }),
            Self::F64 => narrow_with(values, bytes.as_chunks_mut::<8>().0, |x| (x.to_le_bytes(), x)),
        }
    }
}

fn narrow_with<const N: usize>(
    values: &mut [f64],
    bytes: &mut [[u8; N]],
    round: impl Fn(f64) -> ([u8; N], f64),
) -> Result<(), f64> {
    let mut bad = None;
    for (value, raw) in values.iter_mut().zip(bytes) {
        let (stored_raw, stored) = round(*value);
        *raw = stored_raw;
        if !stored.is_finite() {
            bad = bad.or(Some(*value));
        }
        *value = stored - *value;
    }
    bad.map_or(Ok(()), Err)
}

/// x rounded to f32 "to odd": an inexact result always has its last bit set. Because f32 has at least two bits more
/// than bf16 and f16 wherever those are normal or subnormal, rounding the result to nearest-even in one of them equals
/// rounding x itself (the last bit stands for everything that was cut off).
fn to_odd_f32(x: f64) -> f32 {
    let nearest = x as f32;
    let back = f64::from(nearest);
    let bits = nearest.to_bits();
    if back == x || x.is_nan() || bits & 1 == 1 {
        return nearest;
    }
    // The even neighbour was chosen: the odd one lies on x's other side.
    f32::from_bits(if back.abs() > x.abs() { bits - 1 } else { bits + 1 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(element: Element, x: f64) -> f64 {
        let mut bytes = vec![0; element.n_bytes()];
        let mut values = [x];
        element.narrow(&mut values, &mut bytes).expect("representable");
        let mut out = [0.0];
        element.widen(&bytes, &mut out);
        assert_eq!(out[0] - x, values[0], "the error that narrow reports");
        out[0]
    }

    /// Nearest by search over all finite values of a 16-bit format, ties to the even bit pattern.
    fn nearest_by_search(element: Element, x: f64) -> f64 {
        let all = (0..=u16::MAX).map(|bits| {
            let mut out = [0.0];
            element.widen(&bits.to_le_bytes(), &mut out);
            (bits, out[0])
        });
        let finite = all.filter(|(_, value)| value.is_finite() && value.is_sign_negative() == x.is_sign_negative());
        let best = finite.min_by(|a, b| {
            let by_distance = (a.1 - x).abs().total_cmp(&(b.1 - x).abs());
            by_distance.then((a.0 & 1).cmp(&(b.0 & 1)))
        });
        best.expect("there are finite values").1
    }

    #[test]
    fn narrowing_is_nearest_even_also_where_two_roundings_go_wrong() {
        for element in [Element::Bf16, Element::F16] {
            let ulp = 2.0 * element.half_ulp(1.0);
            // Ties, ties broken only beyond f32's last bit, subnormals, and plain values.
            let tiny = 2f64.powi(-45);
            let mut cases = vec![1.0 + ulp / 2.0, 1.0 + 1.5 * ulp, 1.0 / 3.0, 0.1, 3.9999, 1e-6, 7.3e-8, 0.0];
            cases.extend([1.0 + ulp / 2.0 + tiny, 1.0 + ulp / 2.0 - tiny, 1.0 + 1.5 * ulp - tiny]);
            for x in cases.iter().flat_map(|&x| [x, -x]) {
                assert_eq!(stored(element, x), nearest_by_search(element, x), "{element:?} {x:e}");
            }
        }
        assert_eq!(stored(Element::Bf16, 1e-40), nearest_by_search(Element::Bf16, 1e-40));
    }

    #[test]
    fn what_does_not_fit_is_reported() {
        let mut bytes = [0; 4];
        assert_eq!(Element::F16.narrow(&mut [1.0, 65520.0], &mut bytes), Err(65520.0));
        assert_eq!(Element::F16.narrow(&mut [1.0, 65519.99], &mut bytes), Ok(()));
        assert_eq!(Element::Bf16.narrow(&mut [3.4e38, 1.0], &mut bytes), Err(3.4e38));
        assert_eq!(Element::F32.narrow(&mut [1e39], &mut bytes), Err(1e39));
        assert!(Element::F32.narrow(&mut [f64::NAN], &mut bytes).is_err());
    }

    #[test]
    fn half_ulp_bounds_every_rounding() {
        for element in [Element::Bf16, Element::F16, Element::F32] {
            for x in [1.0, 1.999, 0.5001, 3e-5, 6.1e-5, 5.9e-8, -17.3, 1234.5] {
                let near = stored(element, x);
                assert!((near - x).abs() <= element.half_ulp(near), "{element:?} {x}");
                // Not looser than the next binade's spacing.
                assert!(near.abs() < 6.2e-5 || element.half_ulp(near) <= near.abs() * element.half_ulp(1.0));
            }
        }
    }

    #[test]
    fn every_sixteen_bit_value_survives() {
        for element in [Element::Bf16, Element::F16] {
            for bits in 0..=u16::MAX {
                let mut wide = [0.0];
                element.widen(&bits.to_le_bytes(), &mut wide);
                if wide[0].is_finite() {
                    let mut back = [0; 2];
                    element.narrow(&mut wide, &mut back).expect("it came from there");
                    assert_eq!((u16::from_le_bytes(back), wide[0]), (bits, 0.0));
                }
            }
        }
    }
}
