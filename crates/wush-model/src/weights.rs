//! Weights of a checkpoint by role: widened to f64 for the solver and the fold.

use wush_checkpoint::Checkpoint;
use wush_format::tensor_file::{Dtype, TensorView};

use crate::error::{ModelError, Result};
use crate::spec::TensorSlice;

/// The stored tensor that `slice` lies in, with its shape checked against the role.
///
/// # Errors
/// `MissingTensor`, or `Tensor` when the stored shape is not `[total_rows, cols]` (`[total_rows]` for a vector).
pub fn view<'a>(checkpoint: &'a Checkpoint, slice: &TensorSlice) -> Result<TensorView<'a>> {
    if checkpoint.locate(&slice.name).is_none() {
        return Err(ModelError::MissingTensor { name: slice.name.clone() });
    }
    let view = checkpoint.tensor(&slice.name)?;
    let matrix = [slice.total_rows, slice.cols];
    let fits = view.shape == matrix || (slice.cols == 1 && view.shape == &matrix[..1]);
    if !fits || slice.rows.end > slice.total_rows {
        return Err(ModelError::Tensor {
            name: slice.name.clone(),
            expected: format!("shape {matrix:?}"),
            found: format!("shape {:?}", view.shape),
        });
    }
    Ok(view)
}

/// Rows `slice.rows`, `[rows, cols]` row-major, widened exactly to f64.
///
/// # Errors
/// As [`view`].
pub fn read_f64(checkpoint: &Checkpoint, slice: &TensorSlice) -> Result<Vec<f64>> {
    let view = view(checkpoint, slice)?;
    let size = view.dtype.bitsize() / 8;
    let row = slice.cols * size;
    let bytes = &view.bytes[slice.rows.start * row..slice.rows.end * row];
    fn each<const N: usize>(bytes: &[u8], value: impl Fn([u8; N]) -> f64) -> Vec<f64> {
        bytes.chunks_exact(N).map(|b| value(b.try_into().expect("chunks_exact gives N bytes"))).collect()
    }
    Ok(match view.dtype {
        Dtype::BF16 => each(bytes, |b| half::bf16::from_le_bytes(b).to_f64()),
        Dtype::F16 => each(bytes, |b| half::f16::from_le_bytes(b).to_f64()),
        Dtype::F32 => each(bytes, |b| f32::from_le_bytes(b).into()),
        Dtype::F64 => each(bytes, f64::from_le_bytes),
        other => {
            return Err(ModelError::Tensor {
                name: slice.name.clone(),
                expected: "BF16, F16, F32 or F64".into(),
                found: format!("{other:?}"),
            });
        }
    })
}
