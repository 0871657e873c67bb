//! The wrapper of `kernels/attention_f32.cu`: attention in f32 throughout, also over a cache that holds some tokens quantized.

use std::ops::Range;

use wush_model::attention::{Chunk, assert_covers};

use super::{Attention, Shape};
use crate::buffer::ViewMut;
use crate::device::Device;
use crate::error::{GpuError, Result};
use crate::kernels::{EVERYWHERE, KernelFile};
use crate::launch::{Arg, Geometry};
use crate::matmul::Matrix;

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
    // SAFETY: every row of the operands holds its heads' width, and rows beyond the last are neither read nor written:
    // `Attention::shape` checked lengths, strides and alignment.
    unsafe {
        begin(device, "attention_f32", shape, &[&attention.operands()[..], &[Arg::from(&*out)]].concat(), attention)
    }
}

/// What a cache holds quantized, beside the exact keys and values of an [`Attention`].
#[derive(Debug, Clone, Copy)]
pub struct Quantized<'a> {
    /// As the exact keys, stride included.
    pub k: Matrix<'a, f32>,
    /// As the exact values.
    pub v: Matrix<'a, f32>,
    /// Which of them each token reads: chunks that cover the tokens in order.
    pub chunks: &'a [Chunk],
}

/// Attention over a cache that holds some tokens quantized (Algorithm 2): `out`, `[tokens, n_heads head_dim]`, whose rows lie
/// `stride` elements apart.
///
/// # Errors
/// As [`Device::attention`].
///
/// # Panics
/// As [`Device::attention`]; when chunks do not cover the tokens in order, or the positions that one reads quantized begin or end
/// before an earlier one's: the caller's invariants.
pub fn windowed(
    device: &Device,
    attention: &Attention<'_, f32>,
    quantized: Quantized<'_>,
    out: &mut ViewMut<'_, f32>,
    stride: usize,
) -> Result<()> {
    let shape = attention.shape(out, stride)?;
    let other = Attention { k: quantized.k, v: quantized.v, ..*attention };
    assert!(other.shape(out, stride)? == shape, "quantized keys and values lie as the exact ones");
    assert_covers(quantized.chunks, attention.q.n_rows);
    if shape.n_tokens == 0 {
        return Ok(());
    }
    let ranges = device.upload(&ranges(quantized.chunks))?;
    let operands =
        [&attention.operands()[..], &other.operands()[1..], &[Arg::from(&ranges), Arg::from(&*out)]].concat();
    // SAFETY: as above, for both; there is a range for every token, and it lies before it.
    unsafe { begin(device, "attention_f32_windowed", &shape, &operands, attention) }
}

/// Start and end of what every token reads quantized, token after token.
fn ranges(chunks: &[Chunk]) -> Vec<u32> {
    let mut last = 0..0;
    let of_chunk = |chunk: &Chunk| {
        let Range { start, end } = chunk.quantized.clone();
        assert!(start >= last.start && end >= last.end, "what is quantized stays so, or leaves from the start");
        last = start..end;
        std::iter::repeat_n([start as u32, end as u32], chunk.queries.len()).flatten()
    };
    chunks.iter().flat_map(of_chunk).collect()
}

/// # Safety
/// `operands` are those of the entry point, whose rows are as `shape` says and inside their buffers.
unsafe fn begin(
    device: &Device,
    entry: &'static str,
    shape: &Shape,
    operands: &[Arg],
    attention: &Attention<'_, f32>,
) -> Result<()> {
    let head_dim = shape.head_dim;
    if !head_dim.is_multiple_of(8) || head_dim > 256 {
        return Err(GpuError::HeadDim { kernel: FILE.name, served: "multiples of 8 up to 256", found: head_dim });
    }
    let kernel = device.kernel(&FILE, entry, &[("HEAD_DIM", head_dim.to_string())])?;
    let geometry =
        Geometry { grid: shape.grid(block(head_dim))?, block: [THREADS, 1, 1], shared_bytes: shared_bytes(head_dim) };
    // SAFETY: the caller's promise.
    unsafe { device.launch(&kernel, geometry, &[operands, &shape.args(attention, 0.0)].concat()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_head_dim_fits_the_shared_memory_of_every_device() {
        assert!((8..=256).step_by(8).all(|head_dim| shared_bytes(head_dim) <= 99 << 10));
    }
}
