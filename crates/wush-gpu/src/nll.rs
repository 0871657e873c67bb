//! Negative log likelihoods from logits (`kernels/nll.cu`).

use crate::buffer::{View, ViewMut};
use crate::device::Device;
use crate::error::Result;
use crate::kernels::{EVERYWHERE, KernelFile};
use crate::launch::{Arg, Geometry};
use crate::matmul::{Matrix, span};
use crate::operand::{long_enough, u32_of};

/// `kernels/nll.cu`.
pub static FILE: KernelFile =
    KernelFile { name: "nll", source: include_str!("../../../kernels/nll.cu"), runs_on: EVERYWHERE, variants: &[&[]] };

/// Threads of a block; a block has a row.
const BLOCK: u32 = 1024;

impl Device {
    /// Begins `out[t] = log Σ_j exp(cap(x[t, j])) - cap(x[t, targets[t]])`, nats, with `cap(x) = softcap tanh(x / softcap)` where there is
    /// a softcap. NaN or infinite where a logit is; NaN where a target is no column.
    ///
    /// # Errors
    /// `Length`, `TooLarge` for operands that the kernel cannot take; `Library` without the compiler, `Compile`, `Driver`.
    pub fn nll(
        &self,
        x: Matrix<'_, f32>,
        softcap: Option<f32>,
        targets: View<'_, u32>,
        out: &mut ViewMut<'_, f64>,
    ) -> Result<()> {
        let width = u32_of("logits of a row", x.width)?;
        let n_rows = u32_of("rows of logits", x.n_rows)?;
        long_enough("logits", span(x.n_rows, x.width, x.stride), x.view.len())?;
        long_enough("targets", x.n_rows, targets.len())?;
        long_enough("log likelihoods", x.n_rows, out.len())?;
        if n_rows == 0 {
            return Ok(());
        }
        let kernel = self.kernel(&FILE, "nll", &[])?;
        let args = [
            x.view.into(),
            Arg::U64(x.stride as u64),
            width.into(),
            softcap.unwrap_or(0.0).into(),
            targets.into(),
            Arg::from(&*out),
        ];
        // SAFETY: a block reads its row of `width` logits and its target and writes its result: all are there, as checked.
        unsafe { self.launch(&kernel, Geometry::row(n_rows, BLOCK), &args) }
    }
}
