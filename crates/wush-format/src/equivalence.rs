//! How strictly a bundle and its source are compared when both run over the same text. Enters: the type that folded tensors are
//! stored in, and how many tokens are scored. Leaves: the tolerance that is used where none is asked for.

use crate::tensor_file::Dtype;

/// Part of the tolerance that stands for the arithmetic of the two forward passes, 2^-14: f32 sums over up to a few
/// thousand products err by some 2^-24 · √n each, the two passes sum in other bases, and their difference grows
/// through the layers. Folds in f32 were seen to move the mean NLL by 1e-7 to 1e-6, relatively.
const ARITHMETIC: f64 = 1.0 / 16_384.0;

/// Largest change of one token's NLL, in parts of the mean NLL and of the unit roundoff u: 4 was seen (0.015 in bf16).
const TOKEN_CHANGE: f64 = 4.0;

/// Largest accepted relative change of the mean NLL, and largest mean KL in parts of the mean NLL, for folded tensors of
/// type `stored` and a mean over `n_tokens`.
///
/// Each folded element is rounded once, by at most the unit roundoff u of its type (bf16: 2^-8, f16: 2^-11,
/// f32: 2^-24). By the rounding errors' spread the product `W_O' W_V'` is off by about 0.6 u (Frobenius norm), without a
/// direction; a trained model's mean loss is nearly flat along such a perturbation (folds in bf16 were seen to move it by
/// 1e-5 to 5e-4, relatively). A mean that moves by more than u/2 was not moved by rounding. A mean over fewer than 64 tokens
/// has not settled: single tokens change by up to 4 u, without a direction either, so their mean by up to 4 u / √n.
pub fn tolerance(stored: Dtype, n_tokens: u64) -> f64 {
    let unsettled = TOKEN_CHANGE / (n_tokens.max(1) as f64).sqrt();
    unit_roundoff(stored) * unsettled.max(0.5) + ARITHMETIC
}

/// Largest relative error of one rounding to a normal number of type `stored`.
pub fn unit_roundoff(stored: Dtype) -> f64 {
    match stored {
        Dtype::BF16 => 1.0 / 256.0,
        Dtype::F16 => 1.0 / 2048.0,
        _ => f64::from(f32::EPSILON) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coarser_types_and_fewer_tokens_are_given_more() {
        let settled = |stored| tolerance(stored, 64);
        assert!(settled(Dtype::BF16) > settled(Dtype::F16));
        assert!(settled(Dtype::F16) > settled(Dtype::F32));
        assert!(settled(Dtype::F32) < 1e-4);
        assert_eq!(settled(Dtype::BF16), tolerance(Dtype::BF16, u64::MAX));
        assert!(tolerance(Dtype::BF16, 1) > 0.015 && tolerance(Dtype::BF16, 0) < 0.016);
    }
}
