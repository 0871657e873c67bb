//! Gram matrices of heads in f64 (`kernels/gram.cu`, `kernels/gram_wide.cu`): partial sums of positions, added group by group.

use std::ops::Range;

use crate::buffer::{Buffer, View, ViewMut};
use crate::device::Device;
use crate::error::{GpuError, Result};
use crate::kernels::{EVERYWHERE, KernelFile};
use crate::launch::{Arg, Geometry};
use crate::matmul::Matrix;
use crate::operand::{Activation, check, long_enough, u32_of};

/// `kernels/gram.cu`.
pub static FILE: KernelFile = KernelFile {
    name: "gram",
    source: include_str!("../../../kernels/gram.cu"),
    runs_on: EVERYWHERE,
    variants: &[
        &[("HEAD_DIM", "64")],
        &[("HEAD_DIM", "80")],
        &[("HEAD_DIM", "96")],
        &[("HEAD_DIM", "112")],
        &[("HEAD_DIM", "128")],
        &[("HEAD_DIM", "256")],
    ],
};

/// `kernels/gram_wide.cu`.
pub static WIDE_FILE: KernelFile = KernelFile {
    name: "gram_wide",
    source: include_str!("../../../kernels/gram_wide.cu"),
    runs_on: EVERYWHERE,
    variants: &[
        &[("HEAD_DIM", "80")],
        &[("HEAD_DIM", "128")],
        &[("HEAD_DIM", "256")],
        &[("HEAD_DIM", "128"), ("ACT_F32", "1")],
    ],
};

/// Side of the squares that a Gram matrix is computed in.
const TILE: usize = 32;
/// Positions of a part on tensor cores.
const PART: usize = 4096;
/// Positions of a part in f64.
const WIDE_PART: usize = 1024;
/// Warps of a block of `gram_parts` at most.
const MOST_WARPS: usize = 12;
/// Tiles of positions that its pipeline holds.
const STAGES: usize = 4;
/// Positions of such a tile, up to a head dim of [`SHORT_ABOVE`] and beyond.
const ROWS: [usize; 2] = [64, 32];
/// Padded head dim beyond which tiles are shorter.
const SHORT_ABOVE: usize = 128;
/// Bytes of shared memory that pad a position.
const PADDING_BYTES: usize = 16;
/// Threads of a block in the other kernels.
const BLOCK: usize = 256;
/// Positions of a block of `quadratic_forms`.
const FORMS: usize = 32;
/// What a head dim is a multiple of, and its bound.
const HEAD_DIM: [usize; 2] = [8, 256];

/// Sums over parts of the positions, `[n_parts, n_heads, d, d]`; blocks above the diagonal hold nothing.
#[derive(Debug)]
pub struct GramParts {
    sums: Buffer<f64>,
    n_parts: usize,
    n_heads: usize,
    head_dim: usize,
}

impl GramParts {
    /// Heads of each part.
    pub fn n_heads(&self) -> usize {
        self.n_heads
    }

    /// Bytes that Gram matrices of so many heads and tokens take meanwhile.
    pub fn n_bytes<T: Activation>(n_tokens: usize, n_heads: usize, head_dim: usize) -> u64 {
        let n_parts = n_tokens.div_ceil(if T::IS_F32 { WIDE_PART } else { PART });
        (n_parts * n_heads * head_dim * head_dim * size_of::<f64>()) as u64
    }

    fn new(device: &Device, [n_parts, n_heads, head_dim]: [usize; 3]) -> Result<Self> {
        let len = [n_heads, head_dim, head_dim].into_iter().try_fold(n_parts, usize::checked_mul);
        let len = len.ok_or(GpuError::TooLarge { what: "Gram matrices", count: n_parts })?;
        Ok(Self { sums: device.uninit(len)?, n_parts, n_heads, head_dim })
    }
}

impl Device {
    /// Begins the Gram matrices of every head of `x`, `[tokens, n_heads d]`, a part of the positions at a time: bf16 on tensor
    /// cores, within 5e-6 of f64 in the Frobenius norm (derived in the kernel's file), f32 in f64 throughout. The order of sums
    /// depends on shapes alone.
    ///
    /// # Errors
    /// `Length`, `Layout`, `TooLarge` for operands that the kernel cannot take; `OutOfMemory`; `Library` without the compiler,
    /// `Compile`, `Driver`.
    pub fn gram_parts<T: Activation>(&self, x: Matrix<'_, T>, head_dim: usize) -> Result<GramParts> {
        if T::IS_F32 {
            return self.weighted_gram_parts(x, None, head_dim);
        }
        let n_heads = heads("x of a Gram matrix", x, head_dim)?;
        let parts = GramParts::new(self, [x.n_rows.div_ceil(PART), n_heads, head_dim])?;
        if x.n_rows == 0 || n_heads == 0 {
            return Ok(parts);
        }
        let padded = head_dim.next_multiple_of(TILE);
        let n_blocks = triangle(padded / TILE);
        let n_warps = n_blocks.min(MOST_WARPS);
        let rows = ROWS[usize::from(padded > SHORT_ABOVE)];
        let geometry = Geometry {
            grid: grid(n_heads, parts.n_parts, n_blocks.div_ceil(n_warps))?,
            block: [32 * n_warps as u32, 1, 1],
            shared_bytes: (STAGES * rows * (padded * size_of::<T>() + PADDING_BYTES)) as u32,
        };
        let kernel = self.kernel(&FILE, "gram_parts", &T::macros(&[("HEAD_DIM", head_dim)]))?;
        let args = [x.view.into(), Arg::U64(x.stride as u64), Arg::U32(x.n_rows as u32), Arg::from(&parts.sums)];
        // SAFETY: x has the heads and tokens that the kernel visits, as checked; the sums have room for every part.
        unsafe { self.launch(&kernel, geometry, &args) }?;
        Ok(parts)
    }

    /// The same in f64 throughout, a position's share times its weight: `weights` is `[n_heads, tokens]`, ones when none.
    ///
    /// # Errors
    /// As [`Device::gram_parts`].
    pub fn weighted_gram_parts<T: Activation>(
        &self,
        x: Matrix<'_, T>,
        weights: Option<View<'_, f64>>,
        head_dim: usize,
    ) -> Result<GramParts> {
        let n_heads = heads("x of a Gram matrix", x, head_dim)?;
        if let Some(weights) = weights {
            long_enough("weights of positions", n_heads * x.n_rows, weights.len())?;
        }
        let parts = GramParts::new(self, [x.n_rows.div_ceil(WIDE_PART), n_heads, head_dim])?;
        if x.n_rows == 0 || n_heads == 0 {
            return Ok(parts);
        }
        let grid = grid(n_heads, parts.n_parts, triangle(head_dim.div_ceil(TILE)))?;
        let geometry = Geometry { grid, block: [BLOCK as u32, 1, 1], shared_bytes: 0 };
        let kernel = self.kernel(&WIDE_FILE, "gram_wide_parts", &T::macros(&[("HEAD_DIM", head_dim)]))?;
        let weights = weights.map_or(Arg::NONE, Arg::from);
        let sizes = (Arg::U64(x.stride as u64), Arg::U32(x.n_rows as u32));
        // SAFETY: as above, and a weight a head and token.
        unsafe { self.launch(&kernel, geometry, &[x.view.into(), sizes.0, sizes.1, weights, Arg::from(&parts.sums)]) }?;
        Ok(parts)
    }

    /// Begins `into[h] += Σ_g Σ_t x xᵀ` over the heads `heads` of `parts`, as many in a row a group as there are groups in
    /// `into`, `[n_groups, d, d]` full symmetric.
    ///
    /// # Errors
    /// `Length`; `Library` without the compiler, `Compile`, `Driver`.
    ///
    /// # Panics
    /// When `heads` are not those of `parts` or no whole number a group: the caller's invariant.
    pub fn add_gram(&self, parts: &GramParts, heads: Range<usize>, into: &mut ViewMut<'_, f64>) -> Result<()> {
        let square = parts.head_dim * parts.head_dim;
        let n_groups = into.len() / square;
        assert!(heads.end <= parts.n_heads && n_groups > 0, "{heads:?} of {} heads", parts.n_heads);
        assert!(heads.len().is_multiple_of(n_groups), "{} heads in {n_groups} groups", heads.len());
        long_enough("sums of Gram matrices", n_groups * square, into.len())?;
        if parts.n_parts == 0 || heads.is_empty() {
            return Ok(());
        }
        let group = heads.len() / n_groups;
        let kernel = self.kernel(&FILE, "add_gram", &[("HEAD_DIM", parts.head_dim.to_string())])?;
        let [n_parts, n_heads, first, group] =
            [parts.n_parts, parts.n_heads, heads.start, group].map(|count| Arg::U32(count as u32));
        let grid = grid(square.div_ceil(BLOCK), n_groups, 1)?;
        let geometry = Geometry { grid, block: [BLOCK as u32, 1, 1], shared_bytes: 0 };
        // SAFETY: the parts hold the heads, and `into` the groups, that the kernel is told.
        unsafe {
            let args = [Arg::from(&parts.sums), n_parts, n_heads, first, group, Arg::from(&*into)];
            self.launch(&kernel, geometry, &args)
        }
    }

    /// Begins `max(0, kᵀ A_h k)` of every head h and token, `[n_heads, tokens]`, in f64: `k` is `[tokens, n_heads d]`, `a`
    /// `[n_heads, d, d]`, positive semidefinite.
    ///
    /// # Errors
    /// As [`Device::gram_parts`].
    pub fn quadratic_forms<T: Activation>(
        &self,
        k: Matrix<'_, T>,
        a: View<'_, f64>,
        head_dim: usize,
    ) -> Result<Buffer<f64>> {
        let n_heads = heads("keys", k, head_dim)?;
        long_enough("the matrices of quadratic forms", n_heads * head_dim * head_dim, a.len())?;
        crate::operand::aligned("the matrices of quadratic forms", a.address())?;
        let forms = self.uninit(n_heads * k.n_rows)?;
        if forms.len() == 0 {
            return Ok(forms);
        }
        let geometry = Geometry {
            grid: grid(n_heads, k.n_rows.div_ceil(FORMS), 1)?,
            block: [BLOCK as u32, 1, 1],
            shared_bytes: (FORMS * (head_dim + 1) * size_of::<f64>()) as u32,
        };
        let kernel = self.kernel(&WIDE_FILE, "quadratic_forms", &T::macros(&[("HEAD_DIM", head_dim)]))?;
        let args = [k.view.into(), Arg::U64(k.stride as u64), Arg::U32(k.n_rows as u32), a.into(), Arg::from(&forms)];
        // SAFETY: k has the heads and tokens that the kernel visits, as checked, a has a matrix a head, and there is a form each.
        unsafe { self.launch(&kernel, geometry, &args) }?;
        Ok(forms)
    }
}

/// Heads of a matrix whose rows are whole heads that the kernels take.
fn heads<T: Activation>(what: &'static str, x: Matrix<'_, T>, head_dim: usize) -> Result<usize> {
    check(what, x)?;
    let [step, most] = HEAD_DIM;
    if head_dim == 0 || !head_dim.is_multiple_of(step) || head_dim > most {
        let expected = format!("a multiple of {step} up to {most}");
        return Err(GpuError::Layout { what: "head_dim", expected, found: head_dim });
    }
    if !x.width.is_multiple_of(head_dim) {
        let expected = format!("rows of whole heads of {head_dim}");
        return Err(GpuError::Layout { what, expected, found: x.width });
    }
    Ok(x.width / head_dim)
}

/// Squares of a lower triangle of so many rows of them.
fn triangle(side: usize) -> usize {
    side * (side + 1) / 2
}

/// Blocks; the second and third axes of a grid are shorter than the first.
fn grid(x: usize, y: usize, z: usize) -> Result<[u32; 3]> {
    let short = |count| u16::try_from(count).map(u32::from).map_err(|_| GpuError::TooLarge { what: "blocks", count });
    Ok([u32_of("blocks", x)?, short(y)?, short(z)?])
}
