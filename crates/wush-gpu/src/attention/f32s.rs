//! The wrapper of `kernels/attention_f32.cu`: attention in f32 throughout.

use super::{Attention, Shape};
use crate::buffer::ViewMut;
use crate::device::Device;
use crate::error::{GpuError, Result};
use crate::kernels::{EVERYWHERE, KernelFile};
use crate::launch::{Arg, Geometry};

/// The kernel's file.
pub static FILE: KernelFile = KernelFile {
    name: "attention_f32",
    source: include_str!("../../../../kernels/attention_f32.cu"),
    runs_on: EVERYWHERE,
    variants: &[&[("HEAD_DIM", "40")], &[("HEAD_DIM", "128")], &[("HEAD_DIM", "256")]],
};

/// Threads of a block.
const THREADS: u32 = 256;

/// Rows, and keys of a step, of a block: `BLOCK` in the kernel.
fn block(head_dim: u32) -> u32 {
    if head_dim <= 128 { 64 } else { 32 }
}

/// Queries, keys or values, and scores, at the kernel's pitches.
fn shared_bytes(head_dim: u32) -> u32 {
    let block = block(head_dim);
    4 * block * (2 * (head_dim + 4) + block + 4)
}

/// Begins the kernel.
///
/// # Errors
/// `HeadDim`, `TooLarge`, `Library`, `Compile`, `Driver`.
pub(super) fn launch(
    device: &Device,
    attention: &Attention<'_, f32>,
    shape: &Shape,
    out: &mut ViewMut<'_, f32>,
) -> Result<()> {
    let head_dim = shape.head_dim;
    if !head_dim.is_multiple_of(8) || head_dim > 256 {
        return Err(GpuError::HeadDim { kernel: FILE.name, served: "multiples of 8 up to 256", found: head_dim });
    }
    let kernel = device.kernel(&FILE, FILE.name, &[("HEAD_DIM", head_dim.to_string())])?;
    let geometry =
        Geometry { grid: shape.grid(block(head_dim))?, block: [THREADS, 1, 1], shared_bytes: shared_bytes(head_dim) };
    let args = [&attention.operands()[..], &[Arg::from(&*out)], &shape.args(attention, 0.0)].concat();
    // SAFETY: every row of the operands holds its heads' width, and rows beyond the last are neither read nor written:
    // `Attention::shape` checked lengths, strides and alignment.
    unsafe { device.launch(&kernel, geometry, &args) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_head_dim_fits_the_shared_memory_of_every_device() {
        assert!((8..=256).step_by(8).all(|head_dim| shared_bytes(head_dim) <= 99 << 10));
    }
}
