//! The wrapper of `kernels/attention_sm90.cu`: tiles by head dim, tensor maps, launch.

use half::bf16;

use super::{Attention, Shape};
use crate::buffer::ViewMut;
use crate::device::Device;
use crate::error::{GpuError, Result};
use crate::kernels::{Architecture, KernelFile};
use crate::launch::{Arg, Geometry, Swizzle, TensorMap};
use crate::matmul::Matrix;

/// The kernel's file.
pub static FILE: KernelFile = KernelFile {
    name: "attention_sm90",
    source: include_str!("../../../../kernels/attention_sm90.cu"),
    runs_on: &[Architecture::Sm90a],
    variants: &[
        &[("HEAD_DIM", "64"), ("BLOCK_M", "192"), ("BLOCK_N", "128"), ("STAGES", "3"), ("SOFTCAP", "0")],
        &[("HEAD_DIM", "64"), ("BLOCK_M", "128"), ("BLOCK_N", "128"), ("STAGES", "3"), ("SOFTCAP", "1")],
        &[("HEAD_DIM", "128"), ("BLOCK_M", "128"), ("BLOCK_N", "128"), ("STAGES", "2"), ("SOFTCAP", "0")],
        &[("HEAD_DIM", "128"), ("BLOCK_M", "128"), ("BLOCK_N", "128"), ("STAGES", "2"), ("SOFTCAP", "1")],
        &[("HEAD_DIM", "256"), ("BLOCK_M", "128"), ("BLOCK_N", "80"), ("STAGES", "2"), ("SOFTCAP", "0")],
        &[("HEAD_DIM", "256"), ("BLOCK_M", "128"), ("BLOCK_N", "80"), ("STAGES", "2"), ("SOFTCAP", "1")],
    ],
};

/// Columns of a row that is swizzled within 128 bytes.
const CHUNK: u32 = 64;

/// Bytes of keys and values of the heads that run at once: half of an H100's L2, so that they stay there.
const L2_SHARE: u64 = 24 << 20;

/// How the work is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tiling {
    head_dim: u32,
    /// Queries of a block, 64 a warpgroup.
    block_m: u32,
    /// Keys of a step.
    block_n: u32,
    /// Tiles of keys, and of values, in flight.
    stages: u32,
    softcap: bool,
}

/// Whether the kernel has tiles for a head dim on such a device.
pub fn serves(capability: (u32, u32), head_dim: u32) -> bool {
    FILE.serves(capability) && Tiling::of(head_dim, false).is_some()
}

impl Tiling {
    /// The fastest on an H200 of those measured: see `docs/gpu-kernels.md`.
    fn of(head_dim: u32, softcap: bool) -> Option<Self> {
        let (block_m, block_n, stages) = match (head_dim, softcap) {
            (64, false) => (192, 128, 3),
            // A third consumer leaves too few registers for the cap.
            (64, true) => (128, 128, 3),
            (128, _) => (128, 128, 2),
            (256, _) => (128, 80, 2),
            _ => return None,
        };
        Some(Self { head_dim, block_m, block_n, stages, softcap })
    }

    fn macros(&self) -> [(&'static str, String); 5] {
        [
            ("HEAD_DIM", self.head_dim.to_string()),
            ("BLOCK_M", self.block_m.to_string()),
            ("BLOCK_N", self.block_n.to_string()),
            ("STAGES", self.stages.to_string()),
            ("SOFTCAP", u32::from(self.softcap).to_string()),
        ]
    }

    fn shared_bytes(&self) -> u32 {
        2 * self.head_dim * (self.block_m + 2 * self.stages * self.block_n) + 8 * (1 + 4 * self.stages)
    }

    fn geometry(&self, shape: &Shape) -> Result<Geometry> {
        let n_blocks = u64::from(shape.n_tokens.div_ceil(self.block_m)) * u64::from(shape.n_heads);
        // The largest grid of any device.
        let grid = i32::try_from(n_blocks).ok().map(i32::unsigned_abs);
        let grid = grid.ok_or(GpuError::TooLarge { what: "blocks of attention", count: n_blocks as usize })?;
        let shared_bytes = self.shared_bytes();
        Ok(Geometry { grid: [grid, 1, 1], block: [2 * self.block_m + 128, 1, 1], shared_bytes })
    }

    /// Tiles of `n_rows` rows of one head.
    fn map(&self, operand: &Matrix<'_, bf16>, n_rows: u32) -> Result<TensorMap> {
        let dims = [u64::from(CHUNK), operand.n_rows as u64, operand.width as u64 / u64::from(CHUNK)];
        let strides = [operand.stride as u64, u64::from(CHUNK)];
        TensorMap::bf16(operand.view, dims, &strides, [CHUNK, n_rows, self.head_dim / CHUNK], Swizzle::Bytes128)
    }
}

impl Shape {
    /// Heads whose keys and values stay in L2 together: whole groups, at least one.
    fn heads_at_once(&self) -> u32 {
        // Keys and values of one head, two bytes an element.
        let n_bytes = 4 * u64::from(self.n_tokens) * u64::from(self.head_dim);
        let n_groups = u64::from(self.n_heads / self.group);
        let at_once = (L2_SHARE / n_bytes).clamp(1, n_groups);
        u32::try_from(at_once).map_or(self.n_heads, |groups| groups * self.group)
    }
}

/// Begins the kernel.
///
/// # Errors
/// `HeadDim`, `NotForDevice`, `TooLarge`, `Library`, `Compile`, `Driver`.
pub(super) fn launch(
    device: &Device,
    attention: &Attention<'_, bf16>,
    shape: &Shape,
    out: &mut ViewMut<'_, bf16>,
) -> Result<()> {
    let tiling = Tiling::of(shape.head_dim, attention.softcap.is_some()).ok_or(GpuError::HeadDim {
        kernel: FILE.name,
        served: "64, 128 or 256",
        found: shape.head_dim,
    })?;
    let kernel = device.kernel(&FILE, FILE.name, &tiling.macros())?;
    let args = [
        Arg::from(tiling.map(&attention.q, tiling.block_m)?),
        Arg::from(tiling.map(&attention.k, tiling.block_n)?),
        Arg::from(tiling.map(&attention.v, tiling.block_n)?),
        Arg::from(&*out),
        Arg::from(shape.out_stride),
        Arg::from(shape.n_tokens),
        Arg::from(shape.n_heads),
        Arg::from(shape.group),
        Arg::from(shape.window),
        Arg::from(shape.heads_at_once()),
        Arg::from(attention.scale),
        Arg::from(attention.softcap.unwrap_or(1.0)),
    ];
    // SAFETY: tensor maps bound what is read; every row of `out` holds the heads' width, and rows beyond the last are not written:
    // `Attention::shape` checked lengths, strides and alignment.
    unsafe { device.launch(&kernel, tiling.geometry(shape)?, &args) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shared memory that a block can have on compute capability 9.0.
    const MOST_SHARED: u32 = 227 << 10;

    fn tilings() -> impl Iterator<Item = Tiling> {
        let pairs = (1..=512).flat_map(|head_dim| [(head_dim, false), (head_dim, true)]);
        pairs.filter_map(|(head_dim, softcap)| Tiling::of(head_dim, softcap))
    }

    #[test]
    fn every_tiling_is_a_variant_that_the_check_compiles_and_fits_shared_memory() {
        assert_eq!(tilings().count(), FILE.variants.len());
        for tiling in tilings() {
            let macros = tiling.macros();
            let macros = macros.each_ref().map(|(name, value)| (*name, value.as_str()));
            assert!(FILE.variants.contains(&macros.as_slice()), "{tiling:?}");
            assert!(tiling.shared_bytes() <= MOST_SHARED, "{tiling:?}: {}", tiling.shared_bytes());
        }
    }

    #[test]
    fn heads_run_together_by_groups_while_their_keys_fit_the_cache() {
        let shape = |n_tokens| Shape {
            n_tokens,
            n_heads: 32,
            group: 4,
            head_dim: 128,
            window: 0,
            strides: [4096, 1024, 1024],
            out_stride: 4096,
        };
        assert_eq!([1, 4096, 16_384, 1 << 30].map(|n_tokens| shape(n_tokens).heads_at_once()), [32, 32, 12, 4]);
    }
}
