//! QuEST's projection, Eq. 5: from a group to its affine map. Enters: one token-head. Leaves: scale, zero point, rounding.

use crate::Bits;
use crate::affine::Affine;

/// Eq. 5: `Δ = 2α (2^b − 1)⁻¹ d^{-1/2} ‖x‖₂`, `Q(x) = Δ (⌊x/Δ⌋ + ½)` with the floor clamped to `[−2^(b−1), 2^(b−1) − 1]`, and
/// `Q(0) = 0`. `x`: `[d]`, finite; α = `alpha`, b = `bits`.
///
/// As an affine map the code is `⌊x/Δ⌋ + 2^(b−1)` and the zero point `2^(b−1) − ½`, which bf16 holds exactly at every b.
/// The sum of squares is taken in f64, where no f32 under- or overflows, in 16 partial sums. A group of zeros (of either
/// sign) has scale 0 and the code of zero.
#[inline(always)]
pub(crate) fn affine(x: &[f32], bits: Bits, alpha: f64) -> Affine {
    let half_range = f64::from(1u32 << (bits.get() - 1));
    let mean_square = sum_of_squares(x) / x.len() as f64;
    let scale = 2.0 * alpha / f64::from(bits.max_code()) * mean_square.sqrt();
    let zero = half_range - 0.5;
    if scale > 0.0 {
        Affine::Steps { scale, zero, shift: 0.0, half: 0.0, base: half_range }
    } else {
        Affine::Constant { scale: 0.0, zero, code: half_range as u8 }
    }
}

/// Σ x² in f64, in an order that does not depend on the width of vectors.
#[inline(always)]
fn sum_of_squares(x: &[f32]) -> f64 {
    const PARTIAL: usize = 16;
    let mut sums = [0.0f64; PARTIAL];
    let (chunks, tail) = x.as_chunks::<PARTIAL>();
    for chunk in chunks {
        for (sum, &x) in sums.iter_mut().zip(chunk) {
            *sum += f64::from(x) * f64::from(x);
        }
    }
    for (sum, &x) in sums.iter_mut().zip(tail) {
        *sum += f64::from(x) * f64::from(x);
    }
    sums.iter().sum()
}
