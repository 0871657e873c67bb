//! faer's products, leaving the processor as scalar code wants it.
//!
//! faer's AVX kernels return with the upper halves of the vector registers in use. Until these are cleared every SSE
//! instruction pays for merging with them, and the C library's `exp` was seen to take 157 ns instead of 6: so each call
//! here ends by clearing them.

use faer::linalg::matmul::triangular::BlockStructure;
use faer::{Accum, MatMut, MatRef, Par};

/// `out = factor · lhs · rhs`, on this thread.
pub(super) fn multiply(out: MatMut<'_, f32>, lhs: MatRef<'_, f32>, rhs: MatRef<'_, f32>, factor: f32) {
    accumulate(out, Accum::Replace, lhs, rhs, factor);
}

/// `out = factor · lhs · rhs` or `out += …`, on this thread.
pub(super) fn accumulate(out: MatMut<'_, f32>, how: Accum, lhs: MatRef<'_, f32>, rhs: MatRef<'_, f32>, factor: f32) {
    faer::linalg::matmul::matmul(out, how, lhs, rhs, factor, Par::Seq);
    clear_upper_halves();
}

/// The lower triangle of `out += xᵀ x`, on this thread.
pub(super) fn add_gram(out: MatMut<'_, f64>, x: MatRef<'_, f64>) {
    let (lower, whole) = (BlockStructure::TriangularLower, BlockStructure::Rectangular);
    let transposed = x.transpose();
    faer::linalg::matmul::triangular::matmul(out, lower, Accum::Add, transposed, whole, x, whole, 1.0, Par::Seq);
    clear_upper_halves();
}

#[inline]
fn clear_upper_halves() {
    #[cfg(target_arch = "x86_64")]
    if let Some(avx) = pulp::core_arch::x86::Avx::try_new() {
        avx._mm256_zeroupper();
    }
}
