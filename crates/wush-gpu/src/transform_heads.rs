//! Each head times its group's matrix (`kernels/transform_heads.cu`, `kernels/transform_heads_f32.cu`).

use crate::buffer::{View, ViewMut};
use crate::device::Device;
use crate::error::{GpuError, Result};
use crate::kernels::{EVERYWHERE, KernelFile};
use crate::launch::{Arg, Geometry};
use crate::matmul::Matrix;
use crate::operand::{Activation, aligned, check, u32_of};

/// `kernels/transform_heads.cu`.
pub static FILE: KernelFile = KernelFile {
    name: "transform_heads",
    source: include_str!("../../../kernels/transform_heads.cu"),
    runs_on: EVERYWHERE,
    variants: &[&[("HEAD_DIM", "80")], &[("HEAD_DIM", "128")], &[("HEAD_DIM", "256")]],
};

/// `kernels/transform_heads_f32.cu`.
pub static F32_FILE: KernelFile = KernelFile {
    name: "transform_heads_f32",
    source: include_str!("../../../kernels/transform_heads_f32.cu"),
    runs_on: EVERYWHERE,
    variants: &[&[("HEAD_DIM", "80"), ("ACT_F32", "1")], &[("HEAD_DIM", "128"), ("ACT_F32", "1")]],
};

/// Head dim up to which a block computes all of a head; beyond it, [`SLAB`] of its coordinates.
const WHOLE: usize = 128;
/// Coordinates of a head that a block computes beyond.
const SLAB: usize = 64;
/// Positions of a block, and of a tile of them.
const POSITIONS: [usize; 2] = [512, 64];
/// Tensor cores take so many coordinates at once.
const STEP: usize = 16;
/// Elements that pad a position in shared memory.
const PADDING: usize = 8;
/// Side of a block's square in f32.
const SQUARE: usize = 64;

impl Device {
    /// Begins `out[t, n] = matrices[n / G] x[t, n]` of every token and head: `x` and `out` are `[tokens, n_heads d]`, `out`'s
    /// rows one after the other, `matrices` `[n_matrices, d, d]` with G = n_heads / n_matrices. bf16 activations meet matrices
    /// of 16 bits, f32 ones of 24; sums are f32.
    ///
    /// # Errors
    /// `Length`, `Layout`, `TooLarge` for operands that the kernel cannot take; `Library` without the compiler, `Compile`,
    /// `Driver`.
    pub fn transform_heads<T: Activation>(
        &self,
        x: Matrix<'_, T>,
        matrices: View<'_, f32>,
        head_dim: usize,
        out: &mut ViewMut<'_, T>,
    ) -> Result<()> {
        let what = "heads to transform";
        check(what, x)?;
        check("transformed heads", Matrix::packed(out.as_view(), x.n_rows, x.width))?;
        aligned("transforms", matrices.address())?;
        let (file, geometry) = if T::IS_F32 { f32_geometry(&x, head_dim)? } else { geometry(&x, head_dim)? };
        let (n_heads, n_matrices) = (x.width / head_dim, matrices.len() / (head_dim * head_dim));
        if !x.width.is_multiple_of(head_dim) || n_matrices == 0 || !n_heads.is_multiple_of(n_matrices) {
            let expected = format!("rows of {n_matrices} or a multiple of heads of {head_dim}");
            return Err(GpuError::Layout { what, expected, found: x.width });
        }
        if x.n_rows == 0 || n_heads == 0 {
            return Ok(());
        }
        let kernel = self.kernel(file, "transform_heads", &T::macros(&[("HEAD_DIM", head_dim)]))?;
        let strides = [x.stride, x.width].map(|stride| Arg::U64(stride as u64));
        let [group, n_tokens] = [n_heads / n_matrices, x.n_rows].map(|count| Arg::U32(count as u32));
        let args = [x.view.into(), strides[0], matrices.into(), group, Arg::from(&*out), strides[1], n_tokens];
        // SAFETY: x and out have the heads and tokens that the kernel visits, and there is a matrix a group, as checked.
        unsafe { self.launch(&kernel, geometry, &args) }
    }
}

/// On tensor cores.
fn geometry<T: Activation>(x: &Matrix<'_, T>, head_dim: usize) -> Result<(&'static KernelFile, Geometry)> {
    let slab = if head_dim <= WHOLE { head_dim } else { SLAB };
    let n_warps = if head_dim <= WHOLE { head_dim / STEP } else { SLAB / 8 };
    let whole = head_dim.is_multiple_of(STEP) && head_dim.is_multiple_of(slab.max(1));
    if head_dim == 0 || !whole || head_dim > 2 * WHOLE {
        let expected = format!("a multiple of {STEP} up to {WHOLE}, or of {SLAB} up to {}", 2 * WHOLE);
        return Err(GpuError::Layout { what: "head_dim", expected, found: head_dim });
    }
    let [positions, rows] = POSITIONS;
    let n_elements = rows * (2 * (head_dim + PADDING) + slab + PADDING);
    let grid = [blocks(x.width / head_dim)?, blocks(x.n_rows.div_ceil(positions))?, blocks(head_dim / slab)?];
    let shared_bytes = (n_elements * size_of::<T>()) as u32;
    Ok((&FILE, Geometry { grid, block: [32 * n_warps as u32, 1, 1], shared_bytes }))
}

/// In f32.
fn f32_geometry<T: Activation>(x: &Matrix<'_, T>, head_dim: usize) -> Result<(&'static KernelFile, Geometry)> {
    if head_dim == 0 {
        return Err(GpuError::Layout { what: "head_dim", expected: "at least 1".to_owned(), found: 0 });
    }
    let squares = |count: usize| blocks(count.div_ceil(SQUARE));
    let grid = [blocks(x.width / head_dim)?, squares(x.n_rows)?, squares(head_dim)?];
    Ok((&F32_FILE, Geometry { grid, block: [256, 1, 1], shared_bytes: 0 }))
}

/// Blocks along an axis: as many as the shorter axes of a grid have.
fn blocks(count: usize) -> Result<u32> {
    let short = u16::try_from(count).map_err(|_| GpuError::TooLarge { what: "tokens or heads to transform", count })?;
    u32_of("blocks", short.into())
}
