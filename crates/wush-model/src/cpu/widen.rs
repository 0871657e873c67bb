//! Stored BF16, F16, F32 and F64 values to f32.

use std::ops::Range;

use half::{bf16, f16};
use rayon::prelude::*;
use wush_format::tensor_file::{Dtype, TensorView};

/// Elements that one task widens.
const PER_TASK: usize = 1 << 16;
/// Side of the square tiles that are transposed in the cache.
const TILE: usize = 32;

/// Rows `range` of a `[_, width]` tensor.
pub(super) fn rows(view: TensorView<'_>, width: usize, range: Range<usize>) -> Vec<f32> {
    let mut out = vec![0.0; range.len() * width];
    let first = range.start * width;
    out.par_chunks_mut(PER_TASK).enumerate().for_each(|(task, out)| into(view, first + task * PER_TASK, out));
    out
}

/// Rows `range` of a `[_, width]` tensor as the columns of `[width, range.len()]`.
pub(super) fn transposed(view: TensorView<'_>, width: usize, range: Range<usize>) -> Vec<f32> {
    let n_cols = range.len();
    let mut out = vec![0.0; n_cols * width];
    out.par_chunks_mut(TILE * n_cols).enumerate().for_each(|(task, out)| {
        let n_rows = out.len() / n_cols;
        let mut tile = [0.0; TILE * TILE];
        for first in (0..n_cols).step_by(TILE) {
            let n = TILE.min(n_cols - first);
            for (i, row) in tile.chunks_exact_mut(TILE).take(n).enumerate() {
                into(view, (range.start + first + i) * width + task * TILE, &mut row[..n_rows]);
            }
            for (j, out) in out.chunks_exact_mut(n_cols).enumerate() {
                out[first..first + n].iter_mut().enumerate().for_each(|(i, out)| *out = tile[i * TILE + j]);
            }
        }
    });
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_transpose_any_rows_of_any_shape() {
        for (n_rows, width, range) in
            [(1, 1, 0..1), (5, 3, 1..4), (TILE, TILE, 0..TILE), (70, 65, 33..70), (40, 100, 0..33)]
        {
            let stored: Vec<u8> = (0..n_rows * width).flat_map(|i| (i as f32).to_le_bytes()).collect();
            let view = TensorView { dtype: Dtype::F32, shape: &[n_rows, width], bytes: &stored };
            let found = transposed(view, width, range.clone());
            assert_eq!(found.len(), width * range.len());
            for (at, &x) in found.iter().enumerate() {
                let (column, row) = (at / range.len(), range.start + at % range.len());
                assert_eq!(x, (row * width + column) as f32, "{n_rows} x {width}, rows {range:?}");
            }
        }
    }
}
