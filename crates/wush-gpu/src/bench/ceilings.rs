//! What the device can do at most: a large product, for a moment and for seconds on end, and a copy.

use half::bf16;

use crate::bench::{median, random};
use crate::device::{Device, Queue};
use crate::error::Result;
use crate::matmul::{Matmul, Matrix};

/// Side of the product's matrices.
const SIDE: usize = 8192;
/// Bytes that are copied.
const COPY_BYTES: usize = 2 << 30;
/// Launches of a short measurement.
const LAUNCHES: usize = 10;
/// Seconds of the product on end: a card that is limited by power settles within one.
const SUSTAINED_SECONDS: f64 = 3.0;

/// The device's own limits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ceilings {
    /// Operations a second of an 8192³ bf16 product, median of ten.
    pub matmul_short: f64,
    /// The same over the last two of three seconds on end.
    pub matmul_sustained: f64,
    /// Bytes a second, read and written, of a copy of 2 GiB.
    pub copy: f64,
}

/// Measures them: about four seconds.
///
/// # Errors
/// `OutOfMemory` below 5 GB, `Library` without cuBLASLt, `Blas`, `Driver`.
pub fn ceilings(device: &Device) -> Result<Ceilings> {
    let copy = copy(device)?;
    let [x, weight] = [1, 2].map(|seed| random::<bf16>(device, seed, SIDE * SIDE));
    let (x, weight, mut y) = (x?, weight?, device.uninit::<bf16>(SIDE * SIDE)?);
    let square = |view| Matrix::packed(view, SIDE, SIDE);
    let product = Matmul { x: square(x.view()), weight: square(weight.view()), bias: None, alpha: 1.0, beta: 0.0 };
    let mut once = || device.matmul(&product, &mut y.view_mut(), SIDE);
    let operations = 2.0 * (SIDE as f64).powi(3);
    let short = median(device, LAUNCHES, &mut once)?;
    let launches = (SUSTAINED_SECONDS / short / 3.0).ceil() as usize;
    let mut third = || -> Result<f64> {
        let start = device.mark(Queue::Compute)?;
        (0..launches).try_for_each(|_| once())?;
        device.mark(Queue::Compute)?.seconds_since(&start)
    };
    third()?;
    let seconds = third()? + third()?;
    let sustained = operations * 2.0 * launches as f64 / seconds;
    Ok(Ceilings { matmul_short: operations / short, matmul_sustained: sustained, copy })
}

fn copy(device: &Device) -> Result<f64> {
    let from = random::<bf16>(device, 3, COPY_BYTES / size_of::<bf16>())?;
    let mut to = device.uninit::<bf16>(from.len())?;
    let seconds = median(device, LAUNCHES, || device.copy(from.view(), &mut to.view_mut()))?;
    Ok(2.0 * COPY_BYTES as f64 / seconds)
}
