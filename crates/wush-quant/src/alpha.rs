//! The constant α_b of Eq. 5. Enters: a number of bits. Leaves: the end of the grid in units of the group's RMS.

/// α_b for b = 1 … 8, solved with 40 digits and rounded once; the unit tests compute them again, in f64.
pub(crate) const ALPHA: [f64; 8] = [
    0.7978845608028654, // sqrt(2/π)
    1.4935300289152595,
    2.0510680450522045,
    2.5140045914997953,
    2.916151249338733,
    3.2779847974234606,
    3.611097196279767,
    3.922204416746388,
];

/// The constant α_b of Eq. 5: the α that minimizes `E[(ζ − ẑ)²]` for a standard normal ζ and its nearest ẑ among the 2^b
/// levels evenly spaced from −α to α. Accurate to 1e-12; `None` unless 1 ≤ `bits` ≤ 8.
///
/// With D = 2α/(2^b − 1) and n = 2^(b−1) the thresholds are kD and the levels (k + ½)D; the minimum is where
/// `E[ẑ²] = E[ζẑ]` (Eq. 25), which in closed form is
/// `D²/4 + 4D² Σ_{k=1}^{n−1} k·P(ζ > kD) = Dφ(0) + 2D Σ_{k=1}^{n−1} φ(kD)`.
pub fn alpha(bits: u8) -> Option<f64> {
    ALPHA.get(usize::from(bits).checked_sub(1)?).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Accuracy promised for α_b.
    const ALPHA_TOL: f64 = 1e-12;

    /// `E[ẑ (ẑ − ζ)] / 2`, which rises through zero at the optimal spacing D, as a sum over the cells of positive ζ.
    ///
    /// The closed form would subtract two numbers near 1 whose difference changes by 1e-4 a unit of α at 8 bits, and
    /// leave 1e-12; a cell's integral of (level − ζ) φ(ζ) is small where it should be, so that f64 is enough.
    fn excess(spacing: f64, bits: u8) -> f64 {
        let n = 1u32 << (bits - 1);
        let density = |x: f64| (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt();
        let inner = (0..n - 1).map(|k| {
            let (low, level) = (f64::from(k) * spacing, (f64::from(k) + 0.5) * spacing);
            level * integral(low, low + spacing, |z| (level - z) * density(z))
        });
        let (low, level) = (f64::from(n - 1) * spacing, (f64::from(n) - 0.5) * spacing);
        let outer = level * 0.5 * libm::erfc(low / std::f64::consts::SQRT_2) - density(low);
        inner.sum::<f64>() + level * outer
    }

    /// Gauss–Legendre with five points on each of 16 pieces: its error is of order (width/16)^10.
    fn integral(low: f64, high: f64, f: impl Fn(f64) -> f64) -> f64 {
        const POINTS: [(f64, f64); 5] = [
            (0.0, 0.568_888_888_888_888_9),
            (0.538_469_310_105_683_1, 0.478_628_670_499_366_47),
            (-0.538_469_310_105_683_1, 0.478_628_670_499_366_47),
            (0.906_179_845_938_664, 0.236_926_885_056_189_08),
            (-0.906_179_845_938_664, 0.236_926_885_056_189_08),
        ];
        let half = (high - low) / 32.0;
        let piece = |i: i32| {
            let middle = low + f64::from(2 * i + 1) * half;
            POINTS.iter().map(|(at, weight)| weight * f(middle + at * half)).sum::<f64>() * half
        };
        (0..16).map(piece).sum()
    }

    #[test]
    fn the_table_solves_the_stationarity_condition() {
        for bits in 1..=8u8 {
            let (mut low, mut high) = (1e-3, 8.0);
            assert!(excess(low, bits) < 0.0 && excess(high, bits) > 0.0, "b {bits}: no sign change");
            for _ in 0..200 {
                let middle = f64::midpoint(low, high);
                if excess(middle, bits) < 0.0 { low = middle } else { high = middle }
            }
            let found = low * f64::from((1u32 << bits) - 1) / 2.0;
            let expected = alpha(bits).expect("in the table");
            assert!((found - expected).abs() <= ALPHA_TOL, "b {bits}: computed {found}, table {expected}");
        }
    }

    /// The stationary point is the minimum, by the error's definition as an integral.
    #[test]
    fn the_mean_squared_error_is_least_there() {
        let error = |alpha: f64, bits: u8| {
            let spacing = 2.0 * alpha / f64::from((1u32 << bits) - 1);
            let top = f64::from(1u32 << (bits - 1));
            let at = |z: f64| {
                let level = ((z / spacing).floor().clamp(-top, top - 1.0) + 0.5) * spacing;
                (level - z).powi(2) * (-0.5 * z * z).exp()
            };
            (-40_000..40_000).map(|i| at((f64::from(i) + 0.5) * 2e-4)).sum::<f64>()
        };
        for bits in 1..=8u8 {
            let best = alpha(bits).expect("in the table");
            for factor in [0.98, 1.02] {
                assert!(error(best, bits) < error(best * factor, bits), "b {bits}, factor {factor}");
            }
        }
    }

    #[test]
    fn other_bits_have_none() {
        assert_eq!((alpha(0), alpha(9), alpha(255)), (None, None, None));
    }
}
