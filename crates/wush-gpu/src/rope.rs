//! Norm of each head and rotary position embedding, in place (`kernels/rope.cu`).

use crate::buffer::View;
use crate::device::Device;
use crate::error::{GpuError, Result};
use crate::kernels::{EVERYWHERE, KernelFile};
use crate::launch::{Arg, Geometry};
use crate::matmul::Matrix;
use crate::norm::Norm;
use crate::operand::{Activation, MatrixMut, aligned, check, long_enough, u32_of};

/// `kernels/rope.cu`.
pub static FILE: KernelFile = KernelFile {
    name: "rope",
    source: include_str!("../../../kernels/rope.cu"),
    runs_on: EVERYWHERE,
    variants: &[
        &[("HEAD_DIM", "64"), ("ROTARY", "64")],
        &[("HEAD_DIM", "80"), ("ROTARY", "40")],
        &[("HEAD_DIM", "128"), ("ROTARY", "96")],
        &[("HEAD_DIM", "128"), ("ROTARY", "128")],
        &[("HEAD_DIM", "256"), ("ROTARY", "0")],
        &[("HEAD_DIM", "64"), ("ROTARY", "64"), ("ACT_F32", "1")],
        &[("HEAD_DIM", "128"), ("ROTARY", "128"), ("ACT_F32", "1")],
    ],
};

/// Heads of a token that a team of threads takes.
const HEADS: usize = 4;
/// Threads of a block.
const BLOCK: u32 = 256;
/// Threads of a warp: the largest team.
const WARP: usize = 32;

/// cos and sin of positions (Eq. 8).
#[derive(Debug, Clone, Copy)]
pub struct Rotation<'a> {
    /// Coordinates that turn, even: pairs (i, i + rotary_dim / 2).
    pub rotary_dim: usize,
    /// `[tokens, rotary_dim / 2]`.
    pub cos: View<'a, f32>,
    /// `[tokens, rotary_dim / 2]`.
    pub sin: View<'a, f32>,
}

/// What is done to the heads of a row: first those of queries, then those of keys.
#[derive(Debug, Clone, Copy)]
pub struct HeadNormRope<'a> {
    /// Coordinates of a head.
    pub head_dim: usize,
    /// Heads of queries.
    pub n_q_heads: usize,
    /// Heads of keys.
    pub n_k_heads: usize,
    /// Norm of each query, `[head_dim]`.
    pub q_norm: Option<Norm<'a>>,
    /// Norm of each key, `[head_dim]`.
    pub k_norm: Option<Norm<'a>>,
    /// Turns both afterwards.
    pub rotation: Option<Rotation<'a>>,
}

impl HeadNormRope<'_> {
    fn n_heads(&self) -> usize {
        self.n_q_heads.saturating_add(self.n_k_heads)
    }

    fn rotary_dim(&self) -> usize {
        self.rotation.map_or(0, |rotation| rotation.rotary_dim)
    }

    fn does_nothing(&self) -> bool {
        self.n_heads() == 0 || (self.q_norm.is_none() && self.k_norm.is_none() && self.rotary_dim() == 0)
    }

    /// Fails unless the kernel can do it to rows like those of `x`.
    fn check<T: Activation>(&self, x: Matrix<'_, T>) -> Result<()> {
        check("queries and keys", x)?;
        long_enough("a row of queries and keys", self.n_heads().saturating_mul(self.head_dim), x.width)?;
        for norm in [self.q_norm, self.k_norm].into_iter().flatten() {
            norm.check(self.head_dim)?;
        }
        let rotary_dim = self.rotary_dim();
        if !rotary_dim.is_multiple_of(2) || rotary_dim > self.head_dim {
            let expected = format!("an even number of turning coordinates up to {}", self.head_dim);
            return Err(GpuError::Layout { what: "a rotation", expected, found: rotary_dim });
        }
        let tables = self.rotation.into_iter().flat_map(|rotation| [rotation.cos, rotation.sin]);
        for table in tables {
            aligned("a rotation's table", table.address())?;
            long_enough("a rotation's table", x.n_rows.saturating_mul(rotary_dim / 2), table.len())?;
        }
        Ok(())
    }

    /// The kernel's arguments, from the counts on.
    fn args(&self, n_tokens: usize) -> [Arg; 9] {
        let [n_tokens, n_q, n_k] = [n_tokens, self.n_q_heads, self.n_k_heads].map(|count| Arg::U32(count as u32));
        let norm = |norm: Option<Norm<'_>>| norm.map_or([Arg::NONE, Arg::F32(0.0)], |norm| norm.args());
        let [[q_weight, q_eps], [k_weight, k_eps]] = [norm(self.q_norm), norm(self.k_norm)];
        let [cos, sin] = self.rotation.map_or([Arg::NONE; 2], |rotation| [rotation.cos.into(), rotation.sin.into()]);
        [n_tokens, n_q, n_k, q_weight, q_eps, k_weight, k_eps, cos, sin]
    }
}

impl Device {
    /// Begins norm and rotation of the first `n_q_heads + n_k_heads` heads of every row of `x`; the rest of a row stays.
    ///
    /// # Errors
    /// `Length`, `Layout`, `TooLarge` for operands that the kernel cannot take; `Library` without the compiler, `Compile`,
    /// `Driver`.
    pub fn head_norm_rope<T: Activation>(&self, x: &mut MatrixMut<'_, T>, what: &HeadNormRope<'_>) -> Result<()> {
        what.check(x.as_matrix())?;
        let team = team::<T>(what.head_dim)?;
        if x.n_rows == 0 || what.does_nothing() {
            return Ok(());
        }
        let n_threads = x.n_rows.saturating_mul(what.n_heads().div_ceil(HEADS)).saturating_mul(team);
        let n_blocks = u32_of("threads for queries and keys", n_threads)?.div_ceil(BLOCK);
        let macros = T::macros(&[("HEAD_DIM", what.head_dim), ("ROTARY", what.rotary_dim())]);
        let kernel = self.kernel(&FILE, "head_norm_rope", &macros)?;
        let mut args = vec![Arg::from(&x.view), Arg::U64(x.stride as u64)];
        args.extend(what.args(x.n_rows));
        // SAFETY: rows hold the heads, weights a head's coordinates and tables a row a token, as checked.
        unsafe { self.launch(&kernel, Geometry::row(n_blocks, BLOCK), &args) }
    }
}

/// Threads that hold a head: two vectors each, a power of two of them.
fn team<T: Activation>(head_dim: usize) -> Result<usize> {
    let n_lanes = head_dim / (2 * T::VECTOR);
    if head_dim == 0 || !head_dim.is_multiple_of(2 * T::VECTOR) || n_lanes > WARP {
        let expected = format!("a multiple of {} up to {}", 2 * T::VECTOR, 2 * T::VECTOR * WARP);
        return Err(GpuError::Layout { what: "head_dim", expected, found: head_dim });
    }
    Ok(n_lanes.next_power_of_two())
}
