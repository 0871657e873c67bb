//! What the GPU tests share: a device or a loud skip, reproducible random data, and the error measure of every oracle.

#![allow(
    dead_code,
    clippy::allow_attributes,
    reason = "each test binary uses a part of it, and none the same: an expectation would fail in one of them"
)]

use std::io::Write;

use half::bf16;
use wush_gpu::operand::Activation;
use wush_gpu::{Buffer, Device, Element};

/// The first GPU; without one, a line on stderr that the harness does not swallow, and none.
pub fn device(test: &str) -> Option<Device> {
    match Device::open(0) {
        Ok(device) => Some(device),
        Err(why) => {
            skipped(test, &why.to_string());
            None
        }
    }
}

/// Says that a test did not run.
pub fn skipped(test: &str, why: &str) {
    // A closed stderr is no reason to fail.
    let _ = std::io::stderr().write_all(format!("SKIPPED {test}: {why}\n").as_bytes());
}

/// Numbers in -1..1 with 24 random bits, the same for a seed everywhere (splitmix64).
pub fn random(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    (0..len).map(|_| (next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0).collect()
}

/// The same, rounded to bf16.
pub fn random_bf16(seed: u64, len: usize) -> Vec<bf16> {
    random(seed, len).into_iter().map(bf16::from_f32).collect()
}

/// Exactly widened.
pub fn widened(values: &[bf16]) -> Vec<f64> {
    values.iter().map(|x| x.to_f64()).collect()
}

/// ‖found − exact‖ / ‖exact‖. NaN where something is NaN, which no comparison `<=` accepts.
pub fn relative_error(found: impl IntoIterator<Item = f64>, exact: &[f64]) -> f64 {
    let mut n = 0;
    let (mut difference, mut norm) = (0.0, 0.0);
    for (found, exact) in found.into_iter().zip(exact) {
        difference += (found - exact).powi(2);
        norm += exact.powi(2);
        n += 1;
    }
    assert_eq!(n, exact.len(), "as many results as the reference has");
    (difference / norm).sqrt()
}

/// Activations that a test body runs on.
pub trait Real: Activation + PartialEq {
    /// The largest relative error of one rounding to it.
    const ROUNDING: f64;
    /// ‖found − exact‖ / ‖exact‖ of results that are rounded once. bf16 numbers in 1..2 lie 2⁻⁷ apart: an error of 2⁻⁷ / √12 over
    /// numbers of root mean square √(7/3) is 1.5e-3; rows of a few numbers have a margin of two. f32 adds sums of squares of up
    /// to 32 terms a thread and 12 more across threads, halved by the root, and a root and a quotient: 26 · 2⁻²⁴.
    const REL_TOL: f64;

    /// Rounded.
    fn narrow(value: f32) -> Self;

    /// Exactly.
    fn wide(self) -> f64;

    /// Asserts that results agree.
    fn close(what: &str, found: Vec<f64>, exact: &[f64]) {
        let error = relative_error(found, exact);
        assert!(error <= Self::REL_TOL, "{what} of {}: {error:e}", std::any::type_name::<Self>());
    }
}

impl Real for bf16 {
    const ROUNDING: f64 = 1.0 / (1 << 8) as f64;
    const REL_TOL: f64 = 3e-3;

    fn narrow(value: f32) -> Self {
        bf16::from_f32(value)
    }

    fn wide(self) -> f64 {
        self.to_f64()
    }
}

impl Real for f32 {
    const ROUNDING: f64 = 1.0 / (1 << 24) as f64;
    const REL_TOL: f64 = 26.0 / (1 << 24) as f64;

    fn narrow(value: f32) -> Self {
        value
    }

    fn wide(self) -> f64 {
        self.into()
    }
}

/// As [`random`], rounded to the type.
pub fn real<T: Real>(seed: u64, len: usize) -> Vec<T> {
    random(seed, len).into_iter().map(T::narrow).collect()
}

/// Exactly widened.
pub fn wide<T: Real>(x: &[T]) -> Vec<f64> {
    x.iter().map(|x| x.wide()).collect()
}

/// Columns `range` of rows that are `stride` long.
pub fn columns<T: Copy>(x: &[T], stride: usize, range: std::ops::Range<usize>) -> Vec<T> {
    x.chunks(stride).flat_map(|row| row[range.clone()].to_vec()).collect()
}

/// On the device.
pub fn uploaded<T: Element>(device: &Device, data: &[T]) -> Buffer<T> {
    device.upload(data).expect("uploaded")
}

/// A buffer of NaN: what a kernel leaves out shows.
pub fn poisoned<T: Element>(device: &Device, len: usize) -> Buffer<T> {
    device.filled(len, 0xff).expect("filled")
}
