//! The OSCAR-style quantizer, Eq. 7: from a group to its affine map. Enters: one token-head. Leaves: scale, zero point,
//! rounding. Exact order statistics, without sorting.

use crate::affine::{Affine, Extent};
use crate::{Bits, Quantile};

/// Eq. 7: `x_min = max{min xᵢ, −q}`, `x_max = min{max xᵢ, q}` with q the κ-quantile of `|xᵢ|`,
/// `Δ = (2^b − 1)⁻¹ (x_max − x_min)`, `z = −x_min/Δ`, `Q(x) = Δ (⌊x/Δ + z + ½⌋ − z)` with the code clamped to `[0, 2^b − 1]`.
/// `x`: `[d]`, finite; κ = `kappa`, b = `bits`. All in f64; z is not rounded, halves go up.
///
/// Where the clipped range is one point the equation is 0/0; its limit is `Q(x) = x_min`, kept as scale `x_min`, zero point
/// −1 and code 0.
#[inline(always)]
pub(crate) fn affine(x: &[f32], extent: &Extent, bits: Bits, kappa: f64, rule: Quantile) -> Affine {
    let quantile = match rule {
        Quantile::Index => by_index(x, extent.magnitude_bits, kappa),
        Quantile::Linear => interpolated(x, extent.magnitude_bits, kappa),
    };
    let low = f64::from(extent.min).max(-quantile);
    let high = f64::from(extent.max).min(quantile);
    let scale = (high - low) / f64::from(bits.max_code());
    if scale > 0.0 {
        let zero = -low / scale;
        Affine::Steps { scale, zero, shift: zero, half: 0.5, base: 0.0 }
    } else {
        Affine::Constant { scale: low, zero: -1.0, code: 0 }
    }
}

/// The magnitude at `min(⌊κ·d⌋, d − 1)` of the sorted ones.
#[inline(always)]
fn by_index(x: &[f32], max_bits: u32, kappa: f64) -> f64 {
    let rank = ((kappa * x.len() as f64) as usize).min(x.len() - 1);
    f64::from(f32::from_bits(order_statistic(x, max_bits, rank)))
}

/// The quantile interpolated at rank κ (d − 1).
#[inline(always)]
fn interpolated(x: &[f32], max_bits: u32, kappa: f64) -> f64 {
    let rank = kappa * (x.len() - 1) as f64;
    let below = order_statistic(x, max_bits, rank as usize);
    let next = if count_up_to(x, below) as usize > rank as usize + 1 {
        below
    } else {
        x.iter().map(|&x| magnitude_bits(x)).filter(|&bits| bits > below).min().unwrap_or(below)
    };
    let (low, high) = (f64::from(f32::from_bits(below)), f64::from(f32::from_bits(next)));
    low + rank.fract() * (high - low)
}

/// Bit pattern of the magnitude at `rank` (from 0) of the sorted ones: patterns of non-negative floats are ordered as the
/// floats are, so bisection on them ends after at most 31 counts, and with distinct magnitudes after about 15.
#[inline(always)]
fn order_statistic(x: &[f32], max_bits: u32, rank: usize) -> u32 {
    let (mut low, mut high) = (0, max_bits);
    while low < high {
        let middle = low + (high - low) / 2;
        let count = count_up_to(x, middle) as usize;
        if count == rank + 1 {
            return x
                .iter()
                .map(|&x| magnitude_bits(x))
                .map(|bits| if bits <= middle { bits } else { 0 })
                .max()
                .unwrap_or(0);
        }
        if count > rank {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    low
}

/// How many magnitudes are at most the one with these bits.
#[inline(always)]
fn count_up_to(x: &[f32], bits: u32) -> u32 {
    x.iter().map(|&x| u32::from(magnitude_bits(x) <= bits)).sum()
}

#[inline(always)]
fn magnitude_bits(x: f32) -> u32 {
    x.to_bits() & 0x7fff_ffff
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Against sorting, on magnitudes with ties, zeros, denormals and a spike.
    #[test]
    fn quantiles_are_those_of_the_sorted_magnitudes() {
        let pool = [0.0f32, -0.0, 1.0, -1.0, 1.0, 2.5, -300.0, 1e-40, -1e-45, 7.25, 3.0, -3.0, 0.1];
        for d in 1..=40 {
            let x: Vec<f32> = (0..d).map(|i| pool[(i * i + 3 * d) % pool.len()] * (1.0 + (i % 3) as f32)).collect();
            let mut sorted: Vec<f64> = x.iter().map(|x| f64::from(x.abs())).collect();
            sorted.sort_by(f64::total_cmp);
            let max_bits = sorted.last().map_or(0, |&x| (x as f32).to_bits());
            for kappa in [0.0, 0.3, 0.5, 0.92, 0.96, 0.999, 1.0] {
                let at = ((kappa * d as f64) as usize).min(d - 1);
                assert_eq!(by_index(&x, max_bits, kappa), sorted[at], "index, d {d}, kappa {kappa}");
                let rank = kappa * (d - 1) as f64;
                let (below, above) = (sorted[rank as usize], sorted[(rank as usize + 1).min(d - 1)]);
                let expected = below + rank.fract() * (above - below);
                assert_eq!(interpolated(&x, max_bits, kappa), expected, "linear, d {d}, kappa {kappa}");
            }
        }
    }
}
