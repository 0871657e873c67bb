//! Conversions between stored and computed types on the device (`kernels/convert.cu`).

use half::{bf16, f16};

use crate::buffer::{Element, View, ViewMut};
use crate::device::Device;
use crate::error::{GpuError, Result};
use crate::kernels::{EVERYWHERE, KernelFile};
use crate::launch::{Arg, Geometry};
use crate::operand::{aligned, u32_of};

/// `kernels/convert.cu`.
pub static FILE: KernelFile = KernelFile {
    name: "convert",
    source: include_str!("../../../kernels/convert.cu"),
    runs_on: EVERYWHERE,
    variants: &[&[]],
};

/// Threads of a block, and elements that each converts.
const BLOCK: [usize; 2] = [256, 8];

/// A type whose elements become `T`s.
pub trait Convert<T: Element>: Element {
    /// Of the kernel.
    #[doc(hidden)]
    const ENTRY: &'static str;
}

impl Convert<f32> for bf16 {
    const ENTRY: &'static str = "bf16_to_f32s";
}

impl Convert<f32> for f16 {
    const ENTRY: &'static str = "f16_to_f32s";
}

impl Convert<bf16> for f32 {
    const ENTRY: &'static str = "f32_to_bf16s";
}

impl Convert<bf16> for f16 {
    const ENTRY: &'static str = "f16_to_bf16s";
}

impl Device {
    /// Begins `to[i] = from[i]`: exact where `to` is wider, to nearest and ties to even where it is not.
    ///
    /// # Errors
    /// `Length` when they differ; `Layout`, `TooLarge`; `Library` without the compiler, `Compile`, `Driver`.
    pub fn convert<F: Convert<T>, T: Element>(&self, from: View<'_, F>, to: &mut ViewMut<'_, T>) -> Result<()> {
        if from.len() != to.len() {
            return Err(GpuError::Length { what: "what is converted", expected: to.len(), found: from.len() });
        }
        aligned("what is converted", from.address())?;
        aligned("the converted", to.address())?;
        if from.len() == 0 {
            return Ok(());
        }
        let [n_threads, per_thread] = BLOCK;
        let n_blocks = u32_of("elements to convert", from.len().div_ceil(n_threads * per_thread))?;
        let kernel = self.kernel(&FILE, F::ENTRY, &[])?;
        let args = [from.into(), Arg::from(&*to), Arg::U64(from.len() as u64)];
        // SAFETY: both hold as many elements as the kernel is told.
        unsafe { self.launch(&kernel, Geometry::row(n_blocks, n_threads as u32), &args) }
    }
}
