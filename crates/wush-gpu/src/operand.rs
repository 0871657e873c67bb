//! What the kernels between the products share: the types of activations, matrices that are written, and the checks of both.

use half::bf16;

use crate::buffer::{Element, ViewMut};
use crate::error::{GpuError, Result};
use crate::launch::Geometry;
pub(crate) use crate::matmul::long_enough;
use crate::matmul::{MatmulElement, Matrix, span};

/// Bytes that a thread reads or writes at once: rows and addresses are multiples of so many.
const VECTOR_BYTES: usize = 16;

/// What activations are made of: bf16, or f32 for the kernels' f32 build.
pub trait Activation: MatmulElement {
    /// Elements that a thread reads or writes at once; rows begin at multiples of it.
    const VECTOR: usize = VECTOR_BYTES / size_of::<Self>();
    /// Whether it is f32.
    const IS_F32: bool;

    /// The macros of a kernel for these activations.
    #[doc(hidden)]
    fn macros(values: &[(&'static str, usize)]) -> Vec<(&'static str, String)> {
        let f32s = Self::IS_F32.then(|| ("ACT_F32", "1".to_owned()));
        values.iter().map(|(name, value)| (*name, value.to_string())).chain(f32s).collect()
    }
}

impl Activation for bf16 {
    const IS_F32: bool = false;
}

impl Activation for f32 {
    const IS_F32: bool = true;
}

/// A row-major matrix in a buffer that is written, whose rows may lie further apart than they are long.
#[derive(Debug)]
pub struct MatrixMut<'a, T: Element> {
    /// From its first element on.
    pub view: ViewMut<'a, T>,
    /// Rows.
    pub n_rows: usize,
    /// Elements of a row.
    pub width: usize,
    /// Elements from a row to the next.
    pub stride: usize,
}

impl<'a, T: Element> MatrixMut<'a, T> {
    /// Rows one after the other.
    pub fn packed(view: ViewMut<'a, T>, n_rows: usize, width: usize) -> Self {
        Self { view, n_rows, width, stride: width }
    }

    /// As it is, to be read.
    pub fn as_matrix(&self) -> Matrix<'_, T> {
        Matrix { view: self.view.as_view(), n_rows: self.n_rows, width: self.width, stride: self.stride }
    }
}

/// Fails unless a kernel can take `matrix` in whole vectors: its rows are and begin at multiples of them, it is as long as it
/// says, and its sizes are 32-bit numbers.
pub(crate) fn check<T: Activation>(what: &'static str, matrix: Matrix<'_, T>) -> Result<()> {
    let Matrix { view, n_rows, width, stride } = matrix;
    let vectors = [("a width", width), ("a distance of rows", stride)];
    for (size, found) in vectors {
        if !found.is_multiple_of(T::VECTOR) {
            let expected = format!("{size} that is a multiple of {}", T::VECTOR);
            return Err(GpuError::Layout { what, expected, found });
        }
    }
    if stride < width && n_rows > 1 {
        return Err(GpuError::Layout {
            what,
            expected: format!("rows at least {width} elements apart"),
            found: stride,
        });
    }
    aligned(what, view.address())?;
    for size in [n_rows, width] {
        u32_of(what, size)?;
    }
    long_enough(what, span(n_rows, width, stride), view.len())
}

/// Fails unless an address is one of whole vectors.
pub(crate) fn aligned(what: &'static str, address: u64) -> Result<()> {
    if address.is_multiple_of(VECTOR_BYTES as u64) {
        return Ok(());
    }
    let found = (address % VECTOR_BYTES as u64) as usize;
    Err(GpuError::Layout { what, expected: format!("an address that is a multiple of {VECTOR_BYTES}"), found })
}

/// A size as kernels take it; a grid's first axis reaches as far.
pub(crate) fn u32_of(what: &'static str, count: usize) -> Result<u32> {
    i32::try_from(count).map(i32::unsigned_abs).map_err(|_| GpuError::TooLarge { what, count })
}

/// Threads of a block where a grid covers the vectors of rows.
const BLOCK: usize = 256;

/// A block's threads as columns and rows: as many columns as a row of `n_vectors` needs, a power of two.
fn block(n_vectors: usize) -> [usize; 2] {
    let columns = n_vectors.next_power_of_two().min(BLOCK);
    [columns, BLOCK / columns]
}

/// Covers the vectors of a matrix `[n_rows, width]`; a thread has `rows` of them, a block's height apart.
pub(crate) fn over_vectors<T: Activation>(n_rows: usize, width: usize, rows: usize) -> Result<Geometry> {
    let n_vectors = width / T::VECTOR;
    let [columns, height] = block(n_vectors);
    let grid_rows = u32_of("rows", n_rows.div_ceil(height * rows))?;
    let grid_columns = n_vectors.div_ceil(columns);
    // The second axis of a grid is shorter.
    let grid_columns = u16::try_from(grid_columns).map_err(|_| GpuError::TooLarge { what: "columns", count: width })?;
    let block = [columns as u32, height as u32, 1];
    Ok(Geometry { grid: [grid_rows, grid_columns.into(), 1], block, shared_bytes: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_as_wide_as_a_row_needs() {
        assert_eq!([1, 9, 72, 256, 1536].map(block), [[1, 256], [16, 16], [128, 2], [256, 1], [256, 1]]);
        let geometry = over_vectors::<bf16>(1000, 576, 8).expect("it fits");
        assert_eq!((geometry.grid, geometry.block), ([63, 1, 1], [128, 2, 1]));
    }

    #[test]
    fn sizes_beyond_a_grid_are_errors() {
        assert!(u32_of("rows", 1 << 31).is_err() && u32_of("rows", (1 << 31) - 1).is_ok());
        assert!(over_vectors::<f32>(1, 1 << 30, 1).is_err());
    }
}
