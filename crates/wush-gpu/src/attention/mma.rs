//! The wrapper of `kernels/attention_mma.cu`: the bf16 kernel for every device and head dim, and its exact build, which the Hessians
//! read.

use half::bf16;

use super::{Attention, Shape};
use crate::buffer::ViewMut;
use crate::device::Device;
use crate::driver::DeviceInfo;
use crate::error::{GpuError, Result};
use crate::kernels::{EVERYWHERE, KernelFile};
use crate::launch::{Arg, Geometry};

/// The kernel's file.
pub static FILE: KernelFile = KernelFile {
    name: "attention_mma",
    source: include_str!("../../../../kernels/attention_mma.cu"),
    runs_on: EVERYWHERE,
    variants: &[
        &[("HEAD_DIM", "16"), ("BLOCK_KEYS", "64"), ("STAGES", "3"), ("SOFTCAP", "0"), ("EXACT", "0")],
        &[("HEAD_DIM", "64"), ("BLOCK_KEYS", "64"), ("STAGES", "3"), ("SOFTCAP", "0"), ("EXACT", "1")],
        &[("HEAD_DIM", "80"), ("BLOCK_KEYS", "48"), ("STAGES", "3"), ("SOFTCAP", "0"), ("EXACT", "0")],
        &[("HEAD_DIM", "96"), ("BLOCK_KEYS", "32"), ("STAGES", "3"), ("SOFTCAP", "0"), ("EXACT", "0")],
        &[("HEAD_DIM", "112"), ("BLOCK_KEYS", "64"), ("STAGES", "3"), ("SOFTCAP", "0"), ("EXACT", "0")],
        &[("HEAD_DIM", "128"), ("BLOCK_KEYS", "48"), ("STAGES", "2"), ("SOFTCAP", "1"), ("EXACT", "1")],
        &[("HEAD_DIM", "256"), ("BLOCK_KEYS", "32"), ("STAGES", "3"), ("SOFTCAP", "1"), ("EXACT", "0")],
    ],
};

/// Head dims that it has tiles for.
const SERVED: &str = "multiples of 16 up to 256";
/// `WARPS` in the kernel.
const WARPS: u32 = 4;
/// Blocks that share a multiprocessor where registers allow: `BLOCKS_PER_SM`.
const BLOCKS: u32 = 2;
/// Shared memory that the hardware takes of each block.
const RESERVED: u32 = 1 << 10;

/// How the work is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tiling {
    head_dim: u32,
    block_keys: u32,
    stages: u32,
}

impl Tiling {
    /// The fastest on an H200 of those measured (`docs/gpu-kernels.md`), with as many stages as leave room for a second block.
    fn of(head_dim: u32, device: &DeviceInfo) -> Option<Self> {
        if head_dim == 0 || !head_dim.is_multiple_of(16) || head_dim > 256 {
            return None;
        }
        let block_keys = match head_dim {
            80 | 128 => 48,
            0..80 | 112 => 64,
            _ => 32,
        };
        let [two, three] = [2, 3].map(|stages| Self { head_dim, block_keys, stages });
        let fit = |tiling: &Self, n_blocks| n_blocks * (tiling.shared_bytes() + RESERVED) <= device.sm_shared_bytes;
        let second_block_only_with_two = fit(&two, BLOCKS) && !fit(&three, BLOCKS);
        Some(if second_block_only_with_two || !fit(&three, 1) { two } else { three })
    }

    /// Rows of a block.
    fn rows(&self) -> u32 {
        WARPS * if self.head_dim <= 128 { 32 } else { 16 }
    }

    fn shared_bytes(&self) -> u32 {
        (self.rows() + self.stages * self.block_keys) * (2 * self.head_dim + 16)
    }

    fn macros(&self, softcap: bool, exact: bool) -> [(&'static str, String); 5] {
        [
            ("HEAD_DIM", self.head_dim.to_string()),
            ("BLOCK_KEYS", self.block_keys.to_string()),
            ("STAGES", self.stages.to_string()),
            ("SOFTCAP", u32::from(softcap).to_string()),
            ("EXACT", u32::from(exact).to_string()),
        ]
    }
}

/// As [`Device::attention`], by this kernel on any device.
///
/// # Errors
/// As [`Device::attention`].
///
/// # Panics
/// As [`Device::attention`].
pub fn attention(
    device: &Device,
    attention: &Attention<'_, bf16>,
    out: &mut ViewMut<'_, bf16>,
    stride: usize,
) -> Result<()> {
    let shape = attention.shape(out, stride)?;
    if shape.n_tokens == 0 { Ok(()) } else { launch(device, attention, &shape, out) }
}

/// Begins the kernel.
///
/// # Errors
/// `HeadDim`, `TooLarge`, `Library`, `Compile`, `Driver`.
pub(super) fn launch(
    device: &Device,
    attention: &Attention<'_, bf16>,
    shape: &Shape,
    out: &mut ViewMut<'_, bf16>,
) -> Result<()> {
    begin(device, attention, shape, [Arg::from(&*out), Arg::NONE], false)
}

/// Begins attention in the compute queue, with probabilities in two bf16: `out` f32 `[tokens, n_heads head_dim]`, packed, and `lse`
/// f32 `[n_heads, tokens]`, log2 of the sums of 2^score over the keys.
///
/// # Errors
/// As [`Device::attention`].
///
/// # Panics
/// As [`Device::attention`].
pub(crate) fn exact(
    device: &Device,
    attention: &Attention<'_, bf16>,
    out: &mut ViewMut<'_, f32>,
    lse: &mut ViewMut<'_, f32>,
) -> Result<()> {
    let shape = attention.shape(out, attention.q.width)?;
    let n_sums = shape.n_heads as usize * attention.q.n_rows;
    if lse.len() < n_sums {
        return Err(GpuError::Length { what: "sums of attention", expected: n_sums, found: lse.len() });
    }
    if shape.n_tokens == 0 {
        return Ok(());
    }
    begin(device, attention, &shape, [Arg::from(&*out), Arg::from(&*lse)], true)
}

fn begin(
    device: &Device,
    attention: &Attention<'_, bf16>,
    shape: &Shape,
    results: [Arg; 2],
    exact: bool,
) -> Result<()> {
    let head_dim = shape.head_dim;
    let tiling = Tiling::of(head_dim, device.info());
    let tiling = tiling.ok_or(GpuError::HeadDim { kernel: FILE.name, served: SERVED, found: head_dim })?;
    let kernel = device.kernel(&FILE, FILE.name, &tiling.macros(attention.softcap.is_some(), exact))?;
    let geometry =
        Geometry { grid: shape.grid(tiling.rows())?, block: [32 * WARPS, 1, 1], shared_bytes: tiling.shared_bytes() };
    let args = [&attention.operands()[..], &results, &shape.args(attention, 1.0)].concat();
    // SAFETY: every row of the operands holds its heads' width, and rows beyond the last are neither read nor written: `Attention::shape`
    // checked lengths, strides and alignment; the exact build's sums are as many as there are heads and tokens.
    unsafe { device.launch(&kernel, geometry, &args) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(sm_shared_bytes: u32) -> DeviceInfo {
        DeviceInfo {
            ordinal: 0,
            name: String::new(),
            capability: (8, 0),
            memory: 0,
            n_sms: 1,
            block_shared_bytes: sm_shared_bytes - RESERVED,
            sm_shared_bytes,
        }
    }

    #[test]
    fn every_head_dim_fits_every_device_and_two_blocks_fit_the_large_ones() {
        for (sm_kib, n_blocks) in [(100, 1), (164, 2), (228, 2)] {
            let device = device(sm_kib << 10);
            for head_dim in (16..=256).step_by(16) {
                let tiling = Tiling::of(head_dim, &device).expect("tiles");
                assert!(n_blocks * (tiling.shared_bytes() + RESERVED) <= sm_kib << 10, "{sm_kib} KiB: {tiling:?}");
            }
        }
        assert_eq!([8, 72, 272].map(|head_dim| Tiling::of(head_dim, &device(228 << 10))), [None; 3]);
    }
}
