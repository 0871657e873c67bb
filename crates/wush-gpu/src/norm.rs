//! RMS norms of rows, alone and fused with the residual stream (`kernels/norm.cu`).

use crate::buffer::{View, ViewMut};
use crate::device::Device;
use crate::error::Result;
use crate::kernels::{EVERYWHERE, KernelFile};
use crate::launch::{Arg, Geometry};
use crate::matmul::Matrix;
use crate::operand::{Activation, MatrixMut, aligned, check, long_enough, u32_of};

/// `kernels/norm.cu`.
pub static FILE: KernelFile = KernelFile {
    name: "norm",
    source: include_str!("../../../kernels/norm.cu"),
    runs_on: EVERYWHERE,
    variants: &[
        &[("WIDTH", "576"), ("THREADS", "32")],
        &[("WIDTH", "4096"), ("THREADS", "128")],
        &[("WIDTH", "65536"), ("THREADS", "1024")],
        &[("WIDTH", "576"), ("THREADS", "64"), ("ACT_F32", "1")],
        &[("WIDTH", "4096"), ("THREADS", "256"), ("ACT_F32", "1")],
    ],
};

/// Vectors of a row that a thread holds where there are threads enough.
const VECTORS_PER_THREAD: usize = 4;
/// Vectors of a row that a thread can hold.
const MOST_VECTORS_PER_THREAD: usize = 8;
/// Threads of a warp.
const WARP: usize = 32;
/// Threads of a block at most.
const MOST_THREADS: usize = 1024;

/// An RMS norm (Eq. 10): `x / sqrt(mean(x²) + eps) * weight`.
#[derive(Debug, Clone, Copy)]
pub struct Norm<'a> {
    /// `[width]`, 1 already added where the family multiplies by 1 + w.
    pub weight: View<'a, f32>,
    /// Added to the mean square.
    pub eps: f32,
}

impl Norm<'_> {
    pub(crate) fn check(&self, width: usize) -> Result<()> {
        aligned("a norm's weight", self.weight.address())?;
        long_enough("a norm's weight", width, self.weight.len())
    }

    pub(crate) fn args(&self) -> [Arg; 2] {
        [self.weight.into(), self.eps.into()]
    }
}

impl Device {
    /// Begins `out = norm(x)` of every row, where `out` has the rows of `x`, `out_stride` elements apart.
    ///
    /// # Errors
    /// `Length`, `Layout`, `TooLarge` for operands that the kernel cannot take; `Library` without the compiler, `Compile`,
    /// `Driver`.
    pub fn rms_norm<T: Activation>(
        &self,
        x: Matrix<'_, T>,
        norm: Norm<'_>,
        out: &mut ViewMut<'_, T>,
        out_stride: usize,
    ) -> Result<()> {
        check("x of a norm", x)?;
        check("the result of a norm", Matrix { view: out.as_view(), stride: out_stride, ..x })?;
        let [from, to] = [Arg::from(x.view), Arg::from(&*out)];
        self.norm_rows::<T>([x.n_rows, x.width], norm, [(from, x.stride), (to, out_stride)])
    }

    /// Begins `x = norm(x)` of every row.
    ///
    /// # Errors
    /// As [`Device::rms_norm`].
    pub fn rms_norm_in_place<T: Activation>(&self, x: &mut MatrixMut<'_, T>, norm: Norm<'_>) -> Result<()> {
        check("x of a norm", x.as_matrix())?;
        let rows = (Arg::from(&x.view), x.stride);
        self.norm_rows::<T>([x.n_rows, x.width], norm, [rows, rows])
    }

    /// The operands are checked.
    fn norm_rows<T: Activation>(
        &self,
        [n_rows, width]: [usize; 2],
        norm: Norm<'_>,
        [(from, from_stride), (to, to_stride)]: [(Arg, usize); 2],
    ) -> Result<()> {
        norm.check(width)?;
        let [weight, eps] = norm.args();
        let args = [from, Arg::U64(from_stride as u64), weight, eps, to, Arg::U64(to_stride as u64)];
        self.begin_norm::<T>("rms_norm", [n_rows, width], &args)
    }

    /// Begins `x += y`, or `x += post(y)`; and `z = norm(x)` of the sums as they are rounded, where `then` is `(norm, z)`. All
    /// are `[tokens, width]`, rows one after the other.
    ///
    /// # Errors
    /// As [`Device::rms_norm`].
    pub fn add_residual<T: Activation>(
        &self,
        x: &mut ViewMut<'_, T>,
        y: Matrix<'_, T>,
        post: Option<Norm<'_>>,
        then: Option<(Norm<'_>, &mut ViewMut<'_, T>)>,
    ) -> Result<()> {
        let dense = |view| Matrix::packed(view, y.n_rows, y.width);
        check("what is added to the residual", dense(y.view))?;
        check("the residual", dense(x.as_view()))?;
        let entry = match (post.is_some(), then.is_some()) {
            (false, false) => "add",
            (false, true) => "add_norm",
            (true, false) => "add_post",
            (true, true) => "add_post_norm",
        };
        let mut args = vec![Arg::from(&*x), Arg::from(y.view)];
        if let Some(post) = post {
            post.check(y.width)?;
            args.extend(post.args());
        }
        if let Some((norm, z)) = then {
            norm.check(y.width)?;
            check("the residual's norm", dense(z.as_view()))?;
            args.extend(norm.args());
            args.push(Arg::from(&*z));
        }
        self.begin_norm::<T>(entry, [y.n_rows, y.width], &args)
    }

    fn begin_norm<T: Activation>(&self, entry: &str, [n_rows, width]: [usize; 2], args: &[Arg]) -> Result<()> {
        if n_rows == 0 || width == 0 {
            return Ok(());
        }
        let n_threads = threads(width / T::VECTOR)?;
        let kernel = self.kernel(&FILE, entry, &T::macros(&[("WIDTH", width), ("THREADS", n_threads)]))?;
        let geometry = Geometry::row(u32_of("rows", n_rows)?, n_threads as u32);
        // SAFETY: every operand has the rows that the kernel visits: the callers checked them, and the weights' lengths.
        unsafe { self.launch(&kernel, geometry, args) }
    }
}

/// Threads for a row of so many vectors: whole warps, each thread with a few vectors.
fn threads(n_vectors: usize) -> Result<usize> {
    let n_threads = n_vectors.div_ceil(VECTORS_PER_THREAD).next_multiple_of(WARP).min(MOST_THREADS);
    if n_vectors > n_threads * MOST_VECTORS_PER_THREAD {
        return Err(crate::GpuError::TooLarge { what: "vectors of a row that is normed", count: n_vectors });
    }
    Ok(n_threads)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_whole_warps_that_hold_a_row() {
        let found: Vec<usize> = [1, 72, 512, 1024, 8192].map(|n| threads(n).expect("it fits")).into();
        assert_eq!(found, [32, 32, 128, 256, 1024]);
        assert!(threads(8193).is_err());
    }
}
