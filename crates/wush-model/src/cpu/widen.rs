//! Stored BF16, F16, F32 and F64 values to f32.

use std::ops::Range;

use half::{bf16, f16};
use rayon::prelude::*;
use wush_format::tensor_file::{Dtype, TensorView};

/// Elements that one task widens.
const PER_TASK: usize = 1 << 16;

/// Rows `range` of a `[_, width]` tensor.
pub(super) fn rows(view: TensorView<'_>, width: usize, range: Range<usize>) -> Vec<f32> {
    let mut out = vec![0.0; range.len() * width];
    let first = range.start * width;
    out.par_chunks_mut(PER_TASK).enumerate().for_each(|(task, out)| into(view, first + task * PER_TASK, out));
    out
}

/// Fills `out` with the elements from `first` on.
///
/// # Panics
/// On a dtype that `Checkpoint::open` refuses, or past the tensor's end.
pub(super) fn into(view: TensorView<'_>, first: usize, out: &mut [f32]) {
    let size = view.dtype.bitsize() / 8;
    let bytes = &view.bytes[first * size..(first + out.len()) * size];
    match view.dtype {
        Dtype::BF16 => each(bytes, out, |b: [u8; 2]| bf16::from_le_bytes(b).to_f32()),
        Dtype::F16 => each(bytes, out, |b: [u8; 2]| f16::from_le_bytes(b).to_f32()),
        Dtype::F32 => each(bytes, out, f32::from_le_bytes),
        Dtype::F64 => each(bytes, out, |b: [u8; 8]| f64::from_le_bytes(b) as f32),
        other => unreachable!("weights of dtype {other:?} are refused when the checkpoint is opened"),
    }
}

fn each<const N: usize>(bytes: &[u8], out: &mut [f32], value: impl Fn([u8; N]) -> f32) {
    for (out, bytes) in out.iter_mut().zip(bytes.chunks_exact(N)) {
        *out = value(bytes.try_into().expect("chunks_exact gives N bytes"));
    }
}
