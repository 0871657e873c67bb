//! The exact Hessians of attention's output error (Appendix C: Eq. 56, 60, 61), by `kernels/hessian.cu`.
//!
//! Enters: one layer's queries, keys and values of one sequence, bf16, and the products of its output projections. Leaves: f64 sums
//! a KV head, added to what was there. Memory is linear in the tokens: KV heads are taken so many at a time that scratch stays
//! within [`SCRATCH_BYTES`], or one at a time.

use half::bf16;

use crate::attention::{Attention, mma};
use crate::buffer::{Buffer, View, ViewMut};
use crate::device::Device;
use crate::error::{GpuError, Result};
use crate::kernels::{EVERYWHERE, Kernel, KernelFile};
use crate::launch::{Arg, Geometry};
use crate::matmul::Matrix;

/// The kernels' file.
pub static FILE: KernelFile = KernelFile {
    name: "hessian",
    source: include_str!("../../../kernels/hessian.cu"),
    runs_on: EVERYWHERE,
    variants: &[
        &[("HEAD_DIM", "128"), ("GROUP", "4"), ("COLUMNS", "16"), ("SOFTCAP", "0")],
        &[("HEAD_DIM", "80"), ("GROUP", "8"), ("COLUMNS", "8"), ("SOFTCAP", "0")],
        &[("HEAD_DIM", "256"), ("GROUP", "2"), ("COLUMNS", "16"), ("SOFTCAP", "1")],
    ],
};

/// Scratch of one call beyond which KV heads are taken one at a time: enough for all heads at 4096 tokens.
pub const SCRATCH_BYTES: u64 = 512 << 20;

/// Tokens are rounded up to so many in scratch.
const PADDING: usize = 32;
/// Rows of values or outputs that a block takes: `IMAGE_ROWS`.
const IMAGE_ROWS: u32 = 32;
/// Threads of the sums over positions: `GRAM_THREADS`.
const GRAM_THREADS: u32 = 1024;
/// Side of a block's part of a Hessian, and positions at once: `GRAM_SIDE`, `GRAM_COLUMNS`.
const GRAM: [u32; 2] = [32, 64];
/// `WARPS` of the pairs' kernel.
const WARPS: u32 = 8;
/// What the kernels take.
const SERVED: &str = "up to 8 heads a KV head, of multiples of 16 up to 256, as far as shared memory reaches";
/// Most heads of a group.
const MOST_HEADS: usize = 8;

/// Sizes of one layer, and how the pairs' kernel is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Plan {
    n_tokens: usize,
    n_kv_heads: usize,
    head_dim: usize,
    group: usize,
    /// Queries of a block.
    columns: u32,
}

impl Plan {
    fn of(n_tokens: usize, [n_heads, n_kv_heads]: [usize; 2], head_dim: usize, shared_bytes: u32) -> Result<Self> {
        let group = n_heads / n_kv_heads.max(1);
        let unserved = || GpuError::Group { kernel: FILE.name, served: SERVED, group, head_dim };
        if head_dim == 0 || !head_dim.is_multiple_of(16) || head_dim > 256 || !(1..=MOST_HEADS).contains(&group) {
            return Err(unserved());
        }
        let plan = |columns| Self { n_tokens, n_kv_heads, head_dim, group, columns };
        let fits = |plan: &Self| plan.pairs_shared_bytes() <= shared_bytes;
        [16, 8].map(plan).into_iter().find(fits).ok_or_else(unserved)
    }

    fn n_pairs(&self) -> usize {
        self.group * (self.group + 1) / 2
    }

    fn padded(&self) -> usize {
        self.n_tokens.next_multiple_of(PADDING)
    }

    /// Head dim and so on, of at most 256.
    fn small(&self) -> [u32; 3] {
        [self.head_dim, self.group, self.n_pairs()].map(|size| size as u32)
    }

    /// Bytes of scratch a KV head. Saturates.
    fn head_bytes(&self) -> u64 {
        let [tokens, padded] = [self.n_tokens, self.padded()].map(|n| n as u64);
        let [dim, group, pairs] = self.small().map(u64::from);
        // Outputs and sums of attention; slopes in two parts; energies, offsets and c; overlaps and the mean are little.
        let per_token = 4 * group * (dim + 1);
        let per_padded = pairs * (4 * dim + 4 * 3 + 1);
        tokens.saturating_mul(per_token).saturating_add(padded.saturating_mul(per_padded)).saturating_add(4 * dim)
    }

    /// KV heads whose scratch is there at once.
    fn heads_at_once(&self) -> usize {
        usize::try_from(SCRATCH_BYTES / self.head_bytes().max(1))
            .map_or(1, |heads| heads.clamp(1, self.n_kv_heads.max(1)))
    }

    fn macros(&self) -> [(&'static str, String); 4] {
        [
            ("HEAD_DIM", self.head_dim.to_string()),
            ("GROUP", self.group.to_string()),
            ("COLUMNS", self.columns.to_string()),
            ("SOFTCAP", "0".to_owned()),
        ]
    }

    /// As the kernel's head says.
    fn pairs_shared_bytes(&self) -> u32 {
        let [dim, group, pairs] = self.small();
        let pitch = 2 * dim + if dim % 32 == 0 { 32 } else { 0 };
        let key_rows = if dim <= 128 { 32 } else { 16 };
        let operands = self.columns * (group + 2 * pairs) * pitch;
        let rest = 4 * self.columns * (group + pairs) + 4 * WARPS * pairs * key_rows;
        (operands + rest).max(4 * WARPS * pairs * (self.columns + 1))
    }

    /// Threads of the images' kernels: `IMAGE_THREADS`.
    fn image_threads(&self) -> u32 {
        self.small()[0].next_multiple_of(32)
    }

    /// Blocks of rows, pairs and heads.
    fn images(&self, n_heads: u32, shared_bytes: u32) -> Geometry {
        let grid = [self.padded() as u32 / IMAGE_ROWS, self.small()[2], n_heads];
        Geometry { grid, block: [self.image_threads(), 1, 1], shared_bytes }
    }
}

/// Elements of one layer's sums, and of the products of its output projections.
pub fn elements([n_heads, n_kv_heads]: [usize; 2], head_dim: usize) -> [u64; 2] {
    let (square, wide) = ((head_dim * head_dim) as u64, (n_heads * head_dim) as u64);
    [2 * n_kv_heads as u64 * square, wide * wide / n_kv_heads.max(1) as u64]
}

/// Scratch of some KV heads.
struct Scratch {
    mean: Buffer<f32>,
    outputs: Buffer<f32>,
    lse: Buffer<f32>,
    energies: Buffer<f32>,
    slopes: Buffer<bf16>,
    offsets: Buffer<f32>,
    c: Buffer<f32>,
    overlaps: Buffer<f32>,
}

impl Scratch {
    fn new(device: &Device, plan: &Plan, n_heads: usize) -> Result<Self> {
        let (rows, of_pairs) = (n_heads * plan.group * plan.n_tokens, n_heads * plan.n_pairs() * plan.padded());
        Ok(Self {
            mean: device.uninit(n_heads * plan.head_dim)?,
            outputs: device.uninit(rows * plan.head_dim)?,
            lse: device.uninit(rows)?,
            energies: device.uninit(of_pairs)?,
            slopes: device.uninit(2 * of_pairs * plan.head_dim)?,
            offsets: device.uninit(of_pairs)?,
            c: device.uninit(of_pairs)?,
            overlaps: device.uninit(of_pairs / plan.columns as usize)?,
        })
    }
}

/// What the exact Hessians of one layer are made of.
#[derive(Debug, Clone, Copy)]
pub struct HessianInputs<'a> {
    /// Queries, keys, values, and how they become probabilities.
    pub attention: Attention<'a, bf16>,
    /// Γ_{h,a,b} = W_O(h,a) W_O(h,b)ᵀ: `[n_kv_heads, G head_dim, G head_dim]`.
    pub couplings: View<'a, f32>,
}

/// Where they go, each `[n_kv_heads, head_dim, head_dim]`.
#[derive(Debug)]
pub struct Hessians<'a, 'b> {
    /// Σ_s H_K(h,s), Eq. 56.
    pub key: &'a mut ViewMut<'b, f64>,
    /// Σ_s H_V(h,s), Eq. 60.
    pub value: &'a mut ViewMut<'b, f64>,
}

/// Bytes of device memory that [`Device::add_hessians`] needs beside its operands.
///
/// # Errors
/// `Group` where no kernel serves the heads.
pub fn scratch_bytes(n_tokens: usize, n_heads: [usize; 2], head_dim: usize, shared_bytes: u32) -> Result<u64> {
    let plan = Plan::of(n_tokens, n_heads, head_dim, shared_bytes)?;
    Ok(plan.head_bytes().saturating_mul(plan.heads_at_once() as u64))
}

impl Device {
    /// Begins to add the sums of Eq. 56 and Eq. 60 over the positions of one sequence, as Eq. 61 takes them, to `to`. The formulas and
    /// the error are with the kernels; relative error below 5e-5 where values are at most some hundred times as large as their
    /// distances from the outputs.
    ///
    /// # Errors
    /// `Group` where no kernel serves the heads, `Length` when an operand is too short, `TooLarge`, `OutOfMemory`, `Library`
    /// without the compiler, `Compile`, `Driver`.
    ///
    /// # Panics
    /// As [`Device::attention`].
    pub fn add_hessians(&self, inputs: &HessianInputs<'_>, to: &mut Hessians<'_, '_>) -> Result<()> {
        let attention = &inputs.attention;
        let dim = attention.head_dim.max(1);
        let (n_heads, n_kv_heads) = (attention.q.width / dim, attention.k.width / dim);
        let n_tokens = attention.q.n_rows;
        let plan = Plan::of(n_tokens, [n_heads, n_kv_heads], dim, self.info().block_shared_bytes)?;
        let (square, wide) = (dim * dim, (plan.group * dim).pow(2));
        for (what, expected, found) in [
            ("couplings", n_kv_heads * wide, inputs.couplings.len()),
            ("key Hessians", n_kv_heads * square, to.key.len()),
            ("value Hessians", n_kv_heads * square, to.value.len()),
        ] {
            if found < expected {
                return Err(GpuError::Length { what, expected, found });
            }
        }
        if n_tokens == 0 {
            return Ok(());
        }
        let at_once = plan.heads_at_once();
        for first in (0..n_kv_heads).step_by(at_once) {
            let n = at_once.min(n_kv_heads - first);
            let part = HessianInputs {
                attention: heads(attention, plan.group, first, n),
                couplings: inputs.couplings.slice(first * wide..(first + n) * wide),
            };
            let squares = first * square..(first + n) * square;
            let mut to = [to.key.slice(squares.clone()), to.value.slice(squares)];
            Run { device: self, plan: &plan, inputs: &part, n_heads: n }.begin(&mut to)?;
        }
        Ok(())
    }
}

/// Attention of `n` KV heads from `first` on.
fn heads<'a>(whole: &Attention<'a, bf16>, group: usize, first: usize, n: usize) -> Attention<'a, bf16> {
    let part = |matrix: Matrix<'a, bf16>, dim: usize| {
        let view = matrix.view.slice((first * dim).min(matrix.view.len())..matrix.view.len());
        Matrix { view, width: n * dim, ..matrix }
    };
    let dim = whole.head_dim;
    Attention { q: part(whole.q, group * dim), k: part(whole.k, dim), v: part(whole.v, dim), ..*whole }
}

/// The kernels over some KV heads.
struct Run<'a> {
    device: &'a Device,
    plan: &'a Plan,
    inputs: &'a HessianInputs<'a>,
    n_heads: usize,
}

impl Run<'_> {
    fn begin(&self, [key, value]: &mut [ViewMut<'_, f64>; 2]) -> Result<()> {
        let mut scratch = Scratch::new(self.device, self.plan, self.n_heads)?;
        // Operands are checked here, before any kernel of this file reads them.
        let (outputs, lse) = (&mut scratch.outputs.view_mut(), &mut scratch.lse.view_mut());
        mma::exact(self.device, &self.inputs.attention, outputs, lse)?;
        self.images(&mut scratch)?;
        self.pairs(&mut scratch)?;
        self.sums(&scratch, [key, value])
    }

    /// An entry point of the file.
    fn kernel(&self, entry: &str) -> Result<std::sync::Arc<Kernel>> {
        let mut macros = self.plan.macros();
        macros[3].1 = u32::from(self.inputs.attention.softcap.is_some()).to_string();
        self.device.kernel(&FILE, entry, &macros)
    }

    /// Tokens and padded tokens. Operands were checked: they are below 2^31.
    fn tokens(&self) -> [Arg; 2] {
        [self.plan.n_tokens, self.plan.padded()].map(|n| Arg::U32(n as u32))
    }

    /// Rows of queries, keys and values, in elements: checked like the tokens.
    fn strides(&self) -> [Arg; 3] {
        let Attention { q, k, v, .. } = self.inputs.attention;
        [q.stride, k.stride, v.stride].map(|stride| Arg::U32(stride as u32))
    }

    /// μ, f, -g and e.
    fn images(&self, scratch: &mut Scratch) -> Result<()> {
        let (plan, n_heads) = (self.plan, self.n_heads as u32);
        let (values, couplings) = (Arg::from(self.inputs.attention.v.view), Arg::from(self.inputs.couplings));
        let ([n_tokens, padded], [.., v_stride]) = (self.tokens(), self.strides());
        let mean = Geometry { grid: [1, n_heads, 1], block: [plan.image_threads(), 1, 1], shared_bytes: 0 };
        let args = [values, Arg::from(&mut scratch.mean), n_tokens, v_stride];
        // SAFETY: the values are as long as attention checked; scratch has the shapes that the kernels' head gives, as in what follows.
        unsafe { self.device.launch(&*self.kernel("hessian_mean")?, mean, &args) }?;
        let mean = Arg::from(&scratch.mean);
        let args = [values, mean, couplings, Arg::from(&mut scratch.energies), n_tokens, padded, v_stride];
        // SAFETY: as above; the couplings' length was checked.
        unsafe { self.device.launch(&*self.kernel("hessian_energies")?, plan.images(n_heads, 0), &args) }?;
        let (outputs, slopes) = (Arg::from(&scratch.outputs), Arg::from(&mut scratch.slopes));
        let stride = Arg::U32((self.n_heads * plan.group * plan.head_dim) as u32);
        let args = [outputs, mean, couplings, slopes, Arg::from(&mut scratch.offsets), n_tokens, padded, stride];
        let geometry = plan.images(n_heads, 8 * IMAGE_ROWS * plan.image_threads());
        // SAFETY: as above.
        unsafe { self.device.launch(&*self.kernel("hessian_slopes")?, geometry, &args) }
    }

    /// c and the sums of w.
    fn pairs(&self, scratch: &mut Scratch) -> Result<()> {
        let (plan, attention) = (self.plan, &self.inputs.attention);
        let ([n_tokens, padded], [q_stride, k_stride, v_stride]) = (self.tokens(), self.strides());
        let geometry = Geometry {
            grid: [plan.padded() as u32 / plan.columns, self.n_heads as u32, 1],
            block: [32 * WARPS, 1, 1],
            shared_bytes: plan.pairs_shared_bytes(),
        };
        // A window beyond the sequence is none.
        let window = attention.window.filter(|&window| window < plan.n_tokens).unwrap_or(0);
        let args = [
            Arg::from(attention.q.view),
            Arg::from(attention.k.view),
            Arg::from(attention.v.view),
            Arg::from(&scratch.lse),
            Arg::from(&scratch.energies),
            Arg::from(&scratch.slopes),
            Arg::from(&scratch.offsets),
            Arg::from(&mut scratch.c),
            Arg::from(&mut scratch.overlaps),
            n_tokens,
            padded,
            q_stride,
            k_stride,
            v_stride,
            Arg::from(attention.scale),
            Arg::from(attention.softcap.unwrap_or(1.0)),
            Arg::U32(window as u32),
        ];
        // SAFETY: attention checked queries, keys and values; scratch has the shapes that the kernels' head gives.
        unsafe { self.device.launch(&*self.kernel("hessian_pairs")?, geometry, &args) }
    }

    /// The sums over positions.
    fn sums(&self, scratch: &Scratch, [key, value]: [&mut ViewMut<'_, f64>; 2]) -> Result<()> {
        let (plan, attention) = (self.plan, &self.inputs.attention);
        let ([n_tokens, padded], [q_stride, ..]) = (self.tokens(), self.strides());
        let ([dim, group, pairs], n_heads, [side, columns]) = (plan.small(), self.n_heads as u32, GRAM);
        let rows = columns * (side + 1);
        let geometry = Geometry {
            grid: [dim.div_ceil(side).pow(2), n_heads, 1],
            block: [GRAM_THREADS, 1, 1],
            shared_bytes: 4 * (rows * (group + 2) + columns * pairs),
        };
        let (queries, c) = (Arg::from(attention.q.view), Arg::from(&scratch.c));
        let args = [queries, c, Arg::from(&*key), n_tokens, padded, q_stride, Arg::from(attention.scale)];
        // SAFETY: attention checked the queries; the Hessians' lengths were checked.
        unsafe { self.device.launch(&*self.kernel("hessian_key")?, geometry, &args) }?;
        let n_parts = (dim * dim).div_ceil(GRAM_THREADS);
        let geometry = Geometry { grid: [n_heads, n_parts, 1], block: [GRAM_THREADS, 1, 1], shared_bytes: 0 };
        let (overlaps, couplings) = (Arg::from(&scratch.overlaps), Arg::from(self.inputs.couplings));
        // SAFETY: as above, with the couplings.
        unsafe {
            self.device.launch(
                &*self.kernel("hessian_value")?,
                geometry,
                &[overlaps, couplings, Arg::from(&*value), padded],
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shared memory of a block on compute capability 9.0, 8.0 and 8.9.
    const SHARED: [u32; 3] = [227 << 10, 163 << 10, 99 << 10];

    #[test]
    fn the_heads_of_every_family_fit() {
        // Heads, KV heads, head dim: Qwen3, SmolLM2, Qwen2.5, Llama 3, Gemma 3 (4B, 1B).
        for (n_heads, dim) in
            [([32, 8], 128), ([9, 3], 64), ([14, 2], 64), ([28, 4], 128), ([8, 4], 256), ([4, 1], 256)]
        {
            let columns = SHARED.map(|shared| Plan::of(4096, n_heads, dim, shared).map_or(0, |plan| plan.columns));
            assert!(columns[0] >= 8, "{n_heads:?} heads of {dim}: {columns:?}");
        }
        let columns = SHARED.map(|shared| Plan::of(4096, [32, 8], 128, shared).map_or(0, |plan| plan.columns));
        assert_eq!(columns, [16, 16, 8]);
        assert!(Plan::of(4096, [64, 8], 128, SHARED[0]).is_ok(), "Llama 3's 70B");
        assert!(Plan::of(4096, [9, 1], 64, SHARED[0]).is_err() && Plan::of(4096, [8, 8], 72, SHARED[0]).is_err());
    }

    #[test]
    fn scratch_is_bounded_until_one_head_is_more() {
        let bytes = |n_tokens| scratch_bytes(n_tokens, [32, 8], 128, SHARED[0]).expect("served");
        let at_once = |n_tokens| Plan::of(n_tokens, [32, 8], 128, SHARED[0]).expect("served").heads_at_once();
        assert_eq!([1, 4096, 32_768, 1 << 20].map(at_once), [8, 8, 2, 1]);
        assert!(bytes(32_768) <= SCRATCH_BYTES && bytes(1 << 20) > SCRATCH_BYTES);
    }
}
