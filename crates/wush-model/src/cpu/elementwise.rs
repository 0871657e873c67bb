//! The loops between the products: norm, RoPE, gate, softmax, each over whole rows.
//!
//! Every function is compiled for the widest vectors that the machine has and picked at run time. Sums run in
//! [`LANES`] fixed partial sums, so their order does not depend on the vector width.

use crate::rope::RopeTable;
use crate::spec::Activation;

/// Partial sums of a reduction.
const LANES: usize = 16;

/// Runs a loop compiled for the machine's vector extensions.
#[inline]
pub(super) fn vectorized<R>(work: impl FnOnce() -> R) -> R {
    struct Work<F>(F);
    impl<R, F: FnOnce() -> R> pulp::NullaryFnOnce for Work<F> {
        type Output = R;
        #[inline(always)]
        fn call(self) -> R {
            (self.0)()
        }
    }
    pulp::Arch::new().dispatch(Work(work))
}

/// `x += y`.
pub(super) fn add(x: &mut [f32], y: &[f32]) {
    vectorized(
        #[inline(always)]
        || x.iter_mut().zip(y).for_each(|(x, y)| *x += y),
    );
}

/// RMS norm (Eq. 10) of every `weight.len()` values: `x / sqrt(mean(x²) + eps) * weight`.
pub(super) fn rms_norm(x: &mut [f32], weight: &[f32], eps: f32) {
    vectorized(
        #[inline(always)]
        || {
            for row in x.chunks_exact_mut(weight.len()) {
                let mean_square = sum(row, |x| x * x) / weight.len() as f32;
                let scale = 1.0 / (mean_square + eps).sqrt();
                row.iter_mut().zip(weight).for_each(|(x, w)| *x = *x * scale * w);
            }
        },
    );
}

/// RoPE (Eq. 8) of every head in a row at `position`: pairs (i, i + rotary/2).
pub(super) fn rope(row: &mut [f32], head_dim: usize, table: &RopeTable, position: usize) {
    let half = table.rotary_dim / 2;
    let (cos, sin) = (&table.cos[position * half..][..half], &table.sin[position * half..][..half]);
    vectorized(
        #[inline(always)]
        || {
            for head in row.chunks_exact_mut(head_dim) {
                let (first, rest) = head.split_at_mut(half);
                for (((x, y), c), s) in first.iter_mut().zip(&mut rest[..half]).zip(cos).zip(sin) {
                    (*x, *y) = (*x * c - *y * s, *y * c + *x * s);
                }
            }
        },
    );
}

/// `gate = act(gate) * up`.
pub(super) fn gate(gate: &mut [f32], up: &[f32], activation: Activation) {
    match activation {
        Activation::Silu => vectorized(
            #[inline(always)]
            || gate.iter_mut().zip(up).for_each(|(g, u)| *g = *g / (1.0 + exp(-*g)) * u),
        ),
        Activation::GeluTanh => vectorized(
            #[inline(always)]
            || gate.iter_mut().zip(up).for_each(|(g, u)| *g = gelu_tanh(*g) * u),
        ),
        Activation::Gelu => gate.iter_mut().zip(up).for_each(|(g, u)| {
            let x = f64::from(*g);
            *g = (0.5 * x * (1.0 + libm::erf(x / std::f64::consts::SQRT_2))) as f32 * u;
        }),
    }
}

/// `logits = exp(logits - max)` and their sum, after a softcap if asked: a softmax whose division is left to the caller.
pub(super) fn exp_and_sum(logits: &mut [f32], softcap: Option<f32>) -> f32 {
    vectorized(
        #[inline(always)]
        || {
            if let Some(cap) = softcap {
                logits.iter_mut().for_each(|x| *x = cap * tanh(*x / cap));
            }
            let max = max(logits);
            let mut lanes = [0.0f32; LANES];
            let (chunks, rest) = logits.as_chunks_mut::<LANES>();
            for chunk in chunks {
                for (lane, x) in lanes.iter_mut().zip(chunk) {
                    *x = exp(*x - max);
                    *lane += *x;
                }
            }
            for (lane, x) in lanes.iter_mut().zip(rest) {
                *x = exp(*x - max);
                *lane += *x;
            }
            lanes.iter().sum()
        },
    )
}

/// `x *= factor`.
pub(super) fn scale(x: &mut [f32], factor: f32) {
    x.iter_mut().for_each(|x| *x *= factor);
}

#[inline(always)]
fn sum(x: &[f32], term: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += term(x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane += term(x);
    }
    lanes.iter().sum()
}

#[inline(always)]
fn max(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = if x > *lane { x } else { *lane };
        }
    }
    rest.iter().chain(&lanes).fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a })
}

/// e^x: x = n ln 2 + r with |r| ≤ ln 2 / 2, a polynomial for e^r, the exponent put in by its bits. The polynomial is
/// 1 + r + r² q(r) with q of degree 3 fitted for the least largest relative error (1.1e-7). Relative error below 3e-7 on
/// [-87, 88]; smaller x give 0, larger the value at 88.
#[inline(always)]
fn exp(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    /// 1.5 · 2²³: adding and subtracting it rounds to the nearest integer.
    const ROUNDER: f32 = 12_582_912.0;
    let tiny = x < -87.0;
    // Written so that NaN passes through.
    let x = if x > 88.0 { 88.0 } else { x };
    let x = if tiny { -87.0 } else { x };
    let rounded = x * std::f32::consts::LOG2_E + ROUNDER;
    let n = rounded - ROUNDER;
    let r = x - n * LN2_HIGH - n * LN2_LOW;
    let p = 0.041_890_33 + r * 0.008_312_501;
    let p = 0.166_671_16 + r * p;
    let p = 0.499_992_3 + r * p;
    let p = 1.0 + r * (1.0 + r * p);
    // The low bits of `rounded` are n, and shifting drops the others: this is 2^n. For NaN, p is NaN whatever this is.
    let power = f32::from_bits(rounded.to_bits().wrapping_add(127) << 23);
    if tiny { 0.0 } else { p * power }
}

#[inline(always)]
fn tanh(x: f32) -> f32 {
    let e = exp(-2.0 * x.abs());
    ((1.0 - e) / (1.0 + e)).copysign(x)
}

/// GELU's tanh approximation.
#[inline(always)]
fn gelu_tanh(x: f32) -> f32 {
    const SQRT_2_OVER_PI: f32 = 0.797_884_6;
    0.5 * x * (1.0 + tanh(SQRT_2_OVER_PI * (x + 0.044_715 * x * x * x)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of [`exp`]: derived in its doc.
    const EXP_REL_TOL: f64 = 3e-7;

    #[test]
    fn exp_is_accurate_over_its_range_and_safe_outside() {
        let mut worst = 0.0f64;
        for i in -87_000..=88_000 {
            let x = i as f32 / 1000.0;
            worst = worst.max((f64::from(exp(x)) / f64::from(x).exp() - 1.0).abs());
        }
        assert!(worst <= EXP_REL_TOL, "{worst:e}");
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1e30), 0.0);
        assert!(exp(1e30).is_finite());
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn activations_match_their_definitions() {
        for i in -800..=800 {
            let x = i as f32 / 100.0;
            let wide = f64::from(x);
            let cubic = (2.0 / std::f64::consts::PI).sqrt() * (wide + 0.044_715 * wide.powi(3));
            let expected = [
                (Activation::Silu, wide / (1.0 + (-wide).exp())),
                (Activation::GeluTanh, 0.5 * wide * (1.0 + cubic.tanh())),
                (Activation::Gelu, 0.5 * wide * libm::erfc(-wide / std::f64::consts::SQRT_2)),
            ];
            for (activation, expected) in expected {
                let mut out = [x];
                gate(&mut out, &[1.0], activation);
                let diff = (f64::from(out[0]) - expected).abs();
                assert!(diff <= 1e-6 * (1.0 + wide.abs()), "{activation:?} at {x}: {diff:e}");
            }
        }
    }

    #[test]
    fn exponentials_and_their_sum_make_a_softmax_and_pass_nan_on() {
        let mut logits: Vec<f32> = (0..37).map(|i| (i as f32 * 0.7).sin() * 50.0).collect();
        let exact: Vec<f64> = {
            let max = logits.iter().fold(f64::MIN, |a, &b| a.max(f64::from(b)));
            let e: Vec<f64> = logits.iter().map(|&x| (f64::from(x) - max).exp()).collect();
            let total: f64 = e.iter().sum();
            e.iter().map(|e| e / total).collect()
        };
        let total = exp_and_sum(&mut logits, None);
        for (found, exact) in logits.iter().zip(exact) {
            assert!((f64::from(*found / total) - exact).abs() <= 1e-6);
        }
        assert!(exp_and_sum(&mut [1.0, f32::NAN, 0.0], None).is_nan());
    }

    #[test]
    fn rms_norm_of_a_constant_row_is_its_sign_times_the_weight() {
        let weight = [1.0, 2.0, -3.0];
        let mut x = [-4.0f32; 6];
        rms_norm(&mut x, &weight, 0.0);
        assert_eq!(x, [-1.0, -2.0, 3.0, -1.0, -2.0, 3.0]);
    }
}
