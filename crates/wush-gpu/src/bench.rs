//! Times of the device's own ceilings and of each kernel, by its clock.
//!
//! Enters: a device, and the sizes of one layer. Leaves: seconds, with the operations and bytes that must be done. Judges nothing.
//! Random numbers are on the device: products of zeros are faster than those of data.

pub mod calibrate;
pub mod ceilings;
pub mod kernels;

use half::bf16;

use crate::buffer::{Buffer, Element};
use crate::device::{Device, Queue};
use crate::error::Result;

pub use ceilings::{Ceilings, ceilings};
pub use kernels::{LayerShape, kernels};

/// Launches before the clock runs: the first compiles, the next fill the caches.
const WARM_UP: usize = 2;
/// Random numbers that are drawn; longer buffers repeat them.
const DRAWN: usize = 1 << 20;

/// What a kernel took, and the least that it had to do.
#[derive(Debug, Clone, PartialEq)]
pub struct Timing {
    /// Which, "attention".
    pub name: &'static str,
    /// Median of the launches, by the device's clock.
    pub seconds: f64,
    /// Operations, a multiply-add being two.
    pub operations: f64,
    /// Bytes read and written, each once.
    pub bytes: f64,
}

impl Timing {
    /// The least that it could take: at the rate of a large product, or of a copy.
    pub fn floor(&self, ceilings: &Ceilings) -> f64 {
        (self.operations / ceilings.matmul_sustained).max(self.bytes / ceilings.copy)
    }
}

/// Median over `launches` of the seconds that `work` keeps the compute queue busy.
///
/// # Errors
/// Those of `work`; `Driver`.
pub fn median(device: &Device, launches: usize, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    for _ in 0..WARM_UP {
        work()?;
    }
    let mut seconds = Vec::with_capacity(launches);
    for _ in 0..launches {
        let start = device.mark(Queue::Compute)?;
        work()?;
        seconds.push(device.mark(Queue::Compute)?.seconds_since(&start)?);
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds.get(launches / 2).copied().unwrap_or(0.0))
}

/// `len` numbers of about unit variance: sums of four uniform ones, as bf16 has them.
///
/// # Errors
/// `OutOfMemory`, `Driver`.
pub fn random<T: Element + From<bf16>>(device: &Device, seed: u64, len: usize) -> Result<Buffer<T>> {
    random_scaled(device, seed, len, 1.0)
}

/// The same times `factor`.
///
/// # Errors
/// `OutOfMemory`, `Driver`.
pub(crate) fn random_scaled<T: Element + From<bf16>>(
    device: &Device,
    seed: u64,
    len: usize,
    factor: f32,
) -> Result<Buffer<T>> {
    tiled(device, &drawn(seed, len, factor), len)
}

/// The same on the host.
pub(crate) fn pattern<T: Element + From<bf16>>(seed: u64, len: usize, factor: f32) -> Vec<T> {
    let drawn = drawn(seed, len, factor);
    drawn[..piece(drawn.len())].iter().copied().cycle().take(len).collect()
}

fn drawn<T: Element + From<bf16>>(seed: u64, len: usize, factor: f32) -> Vec<T> {
    draw(seed, len.min(DRAWN)).map(|x| T::from(bf16::from_f32(factor * x))).collect()
}

/// How much of what was drawn is repeated: rows of a power of two would all be alike, were it not for an odd length.
fn piece(len: usize) -> usize {
    len - usize::from(len == DRAWN)
}

/// `pattern` again and again.
fn tiled<T: Element>(device: &Device, pattern: &[T], len: usize) -> Result<Buffer<T>> {
    let piece = device.upload(&pattern[..piece(pattern.len())])?;
    let mut buffer = device.uninit(len)?;
    let mut done = 0;
    while done < len {
        let n = (len - done).min(piece.len());
        device.copy(piece.view().slice(0..n), &mut buffer.view_mut().slice(done..done + n))?;
        done += n;
    }
    Ok(buffer)
}

fn draw(seed: u64, n: usize) -> impl Iterator<Item = f32> {
    // Four uniform numbers of [-1, 1) have a variance of 4/3 together: √¾ makes it 1.
    (0..n as u64).map(move |index| {
        let bits = splitmix64(seed.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        let uniform = |part: u32| f32::from((bits >> (16 * part)) as u16) / 32_768.0 - 1.0;
        (0..4).map(uniform).sum::<f32>() * 0.75f32.sqrt()
    })
}

/// Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014: the finalizer.
fn splitmix64(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_drawn_has_mean_zero_and_unit_variance() {
        let drawn: Vec<f64> = draw(7, 1 << 16).map(f64::from).collect();
        let n = drawn.len() as f64;
        let mean = drawn.iter().sum::<f64>() / n;
        let variance = drawn.iter().map(|x| x * x).sum::<f64>() / n - mean * mean;
        // Five standard errors of 65,536 numbers.
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.03, "{mean} {variance}");
        assert_ne!(draw(7, 8).collect::<Vec<_>>(), draw(8, 8).collect::<Vec<_>>());
    }

    #[test]
    fn the_slower_of_products_and_copies_is_the_floor() {
        let ceilings = Ceilings { matmul_short: 8e14, matmul_sustained: 5e14, copy: 4e12 };
        let timing = |operations, bytes| Timing { name: "x", seconds: 1.0, operations, bytes };
        assert_eq!(timing(5e14, 1e12).floor(&ceilings), 1.0);
        assert_eq!(timing(5e13, 8e12).floor(&ceilings), 2.0);
    }
}
