//! Attention on a GPU against Eq. 2 in f64 on the host: head dims, groups, tails, windows, softcap, slices of fused rows. Skipped,
//! loudly, without a GPU. Every kernel that runs on it is put through all of it.

mod common;

use std::ops::Range;

use common::{random, random_bf16, relative_error};
use half::bf16;
use rayon::prelude::*;
use wush_gpu::attention::f32s::{self, Quantized};
use wush_gpu::attention::{Attention, AttentionElement, hopper, mma};
use wush_gpu::matmul::Matrix;
use wush_gpu::{Buffer, Device, Result, ViewMut};
use wush_model::attention::Chunk;

/// Probabilities and outputs are rounded to bf16, whose numbers in 1..2 lie 2⁻⁷ apart: an error of 2⁻⁷ / √12 over numbers of root mean
/// square √(7/3), 1.5e-3 each and 2.1e-3 together. Where few keys have the weight, p's errors are not averaged over many: a margin
/// of two.
const BF16_REL_TOL: f64 = 4e-3;

/// Scores up to 300 in f32, whose rounding (2⁻²⁴ of them, and of each of up to 256 partial sums, which average out) is the exponent's
/// error: 300 · 2⁻²⁴ · 2 = 3.6e-5. With the scores of the other cases, up to 30, a tenth of it is seen.
const F32_REL_TOL: f64 = 4e-5;

/// Numbers of tokens that are no multiple of any tile, on both sides of one, and alone.
const TAILS: [usize; 9] = [1, 2, 63, 64, 65, 129, 191, 320, 517];

/// Begins attention into rows so many elements apart.
type Begin<T> = fn(&Device, &Attention<'_, T>, &mut ViewMut<'_, T>, usize) -> Result<()>;

/// What is put to the test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kernel {
    Hopper,
    Mma,
    F32,
}

impl Kernel {
    fn head_dims(self) -> &'static [usize] {
        match self {
            Self::Hopper => &[64, 128, 256],
            Self::Mma => &[16, 48, 64, 80, 96, 112, 128, 192, 256],
            Self::F32 => &[8, 40, 64, 80, 128, 136, 256],
        }
    }

    fn tolerance(self) -> f64 {
        match self {
            Self::Hopper | Self::Mma => BF16_REL_TOL,
            Self::F32 => F32_REL_TOL,
        }
    }
}

/// One sequence of random numbers, fused rows of queries, keys, values and padding.
struct Case {
    n_tokens: usize,
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    window: Option<usize>,
    softcap: Option<f32>,
    /// Factor of the usual scale: large ones make one key's weight stand out and the maximum move.
    sharpness: f32,
}

/// Elements between the parts of a fused row and after an output row, which nothing may write.
const PADDING: usize = 8;

impl Case {
    fn plain(n_tokens: usize, n_heads: usize, n_kv_heads: usize, head_dim: usize) -> Self {
        Self { n_tokens, n_heads, n_kv_heads, head_dim, window: None, softcap: None, sharpness: 4.0 }
    }

    fn scale(&self) -> f32 {
        self.sharpness / (self.head_dim as f32).sqrt()
    }

    /// Where queries, keys and values begin in a row, and its length.
    fn columns(&self) -> [usize; 4] {
        let (q, kv) = (self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim);
        [0, q + PADDING, q + kv + PADDING, q + 2 * kv + 2 * PADDING]
    }

    /// Outputs `[tokens, n_heads head_dim + PADDING]` of a buffer of NaNs.
    fn run<T: AttentionElement>(&self, device: &Device, begin: Begin<T>, rows: &[T]) -> Vec<T> {
        let fused = device.upload(rows).expect("uploaded");
        let stride = self.n_heads * self.head_dim + PADDING;
        let mut out = device.filled(self.n_tokens * stride, 0xff).expect("room");
        begin(device, &self.attention(&fused), &mut out.view_mut(), stride).expect("begun");
        out.to_host().expect("done")
    }

    fn attention<'a, T: AttentionElement>(&self, fused: &'a Buffer<T>) -> Attention<'a, T> {
        let [q, k, v, row] = self.columns();
        let part = |from: usize, n_heads: usize| Matrix {
            view: fused.view().slice(from..fused.len()),
            n_rows: self.n_tokens,
            width: n_heads * self.head_dim,
            stride: row,
        };
        Attention {
            q: part(q, self.n_heads),
            k: part(k, self.n_kv_heads),
            v: part(v, self.n_kv_heads),
            head_dim: self.head_dim,
            window: self.window,
            scale: self.scale(),
            softcap: self.softcap,
        }
    }

    /// Eq. 2 in f64 for one token and head.
    fn expected<T: Copy + Into<f64>>(&self, rows: &[T], token: usize, head: usize) -> Vec<f64> {
        let [q, k, v, row] = self.columns();
        let d = self.head_dim;
        let kv_head = head / (self.n_heads / self.n_kv_heads);
        let vector = |token: usize, from: usize| rows[token * row + from..][..d].iter().map(|&x| x.into());
        let first = self.window.map_or(0, |window| (token + 1).saturating_sub(window));
        let score = |key: usize| {
            let product: f64 = vector(token, q + head * d).zip(vector(key, k + kv_head * d)).map(|(x, y)| x * y).sum();
            let score = product * f64::from(self.scale());
            self.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
        };
        let scores: Vec<f64> = (first..=token).map(score).collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - top).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let mut out = vec![0.0; d];
        for (key, weight) in (first..=token).zip(&weights) {
            out.iter_mut().zip(vector(key, v + kv_head * d)).for_each(|(out, value)| *out += weight / sum * value);
        }
        out
    }

    /// Error over some tokens, all heads together; padding untouched; the same bits again.
    fn check(&self, device: &Device, kernel: Kernel, tokens: &[usize]) {
        let n = self.n_tokens * self.columns()[3];
        match kernel {
            Kernel::Hopper => {
                self.check_as(device, Device::attention::<bf16>, &random_bf16(n as u64, n), tokens, kernel)
            }
            Kernel::Mma => self.check_as(device, mma::attention, &random_bf16(n as u64, n), tokens, kernel),
            Kernel::F32 => self.check_as(device, Device::attention::<f32>, &random(n as u64, n), tokens, kernel),
        }
    }

    fn check_as<T>(&self, device: &Device, begin: Begin<T>, rows: &[T], tokens: &[usize], kernel: Kernel)
    where
        T: AttentionElement + Into<f64>,
    {
        let out = self.run(device, begin, rows);
        let width = self.n_heads * self.head_dim;
        let of_token = |&token: &usize| -> Vec<f64> {
            (0..self.n_heads).flat_map(|head| self.expected(rows, token, head)).collect()
        };
        let exact = tokens.par_iter().map(of_token).collect::<Vec<_>>().concat();
        let found = tokens.iter().flat_map(|token| out[token * (width + PADDING)..][..width].iter().map(|&x| x.into()));
        let error = relative_error(found, &exact);
        let name = format!("{kernel:?}: {}", self.name());
        assert!(error <= kernel.tolerance(), "{name}: {error:.2e}");
        let bytes = |values: &[T]| bytemuck::cast_slice::<T, u8>(values).to_vec();
        let untouched = out.chunks(width + PADDING).all(|row| bytes(&row[width..]).iter().all(|&byte| byte == 0xff));
        assert!(untouched, "{name}: wrote beyond a row");
        assert_eq!(bytes(&out), bytes(&self.run(device, begin, rows)), "{name}: another result on the second run");
    }

    /// `rows` with the keys and values of `other` at some positions.
    fn mixed(&self, rows: &[f32], other: &[f32], positions: Range<usize>) -> Vec<f32> {
        let [_, keys, _, row] = self.columns();
        let mut mixed = rows.to_vec();
        for token in positions {
            let part = token * row + keys..(token + 1) * row;
            mixed[part.clone()].copy_from_slice(&other[part]);
        }
        mixed
    }

    /// Attention over a cache whose tokens are quantized `sink` from the start and up to `keep` before a chunk's first query.
    fn check_windowed(&self, device: &Device, chunk: usize, [sink, keep]: [usize; 2]) {
        let n = self.n_tokens * self.columns()[3];
        let [rows, other] = [random(n as u64, n), random(n as u64 + 1, n)];
        let quantized = |first: usize| if first > sink + keep { sink..first - keep } else { 0..0 };
        let of_chunk =
            |first| Chunk { queries: first..(first + chunk).min(self.n_tokens), quantized: quantized(first) };
        let chunks: Vec<Chunk> = (0..self.n_tokens).step_by(chunk).map(of_chunk).collect();
        let [exact, quantized] = [&rows, &other].map(|rows| device.upload(rows).expect("uploaded"));
        let (attention, other_side) = (self.attention(&exact), self.attention(&quantized));
        let quantized = Quantized { k: other_side.k, v: other_side.v, chunks: &chunks };
        let width = self.n_heads * self.head_dim;
        let mut out = device.filled(self.n_tokens * width, 0xff).expect("room");
        f32s::windowed(device, &attention, quantized, &mut out.view_mut(), width).expect("begun");
        let mut expected = Vec::new();
        for chunk in &chunks {
            let mixed = self.mixed(&rows, &other, chunk.quantized.clone());
            let tokens = chunk.queries.clone();
            expected.extend(tokens.flat_map(|t| {
                (0..self.n_heads).flat_map({
                    let mixed = &mixed;
                    move |head| self.expected(mixed, t, head)
                })
            }));
        }
        let error = relative_error(out.to_host().expect("done").into_iter().map(f64::from), &expected);
        assert!(error <= F32_REL_TOL, "{}, chunks of {chunk}, windows {sink} and {keep}: {error:.2e}", self.name());
    }

    fn check_all(&self, device: &Device, kernel: Kernel) {
        self.check(device, kernel, &(0..self.n_tokens).collect::<Vec<_>>());
    }

    fn name(&self) -> String {
        let Self { n_tokens, n_heads, n_kv_heads, head_dim, window, softcap, .. } = self;
        format!("{n_tokens} tokens, {n_heads}/{n_kv_heads} heads of {head_dim}, window {window:?}, softcap {softcap:?}")
    }
}

/// Runs a check for every kernel of this device and every head dim that the kernel has tiles for.
fn on_every_kernel(test: &str, check: impl Fn(&Device, Kernel, usize)) {
    let Some(device) = common::device(test) else { return };
    for kernel in [Kernel::Hopper, Kernel::Mma, Kernel::F32] {
        let file = match kernel {
            Kernel::Hopper => &hopper::FILE,
            Kernel::Mma => &mma::FILE,
            Kernel::F32 => &f32s::FILE,
        };
        if !file.serves(device.info().capability) {
            common::skipped(test, &format!("{} does not run on {}", file.name, device.info().name));
            continue;
        }
        kernel.head_dims().iter().for_each(|&head_dim| check(&device, kernel, head_dim));
    }
}

#[test]
fn every_tail_agrees_with_f64() {
    on_every_kernel("every_tail_agrees_with_f64", |device, kernel, head_dim| {
        for n_tokens in TAILS {
            Case::plain(n_tokens, 2, 1, head_dim).check_all(device, kernel);
        }
    });
}

#[test]
fn every_group_agrees_with_f64() {
    on_every_kernel("every_group_agrees_with_f64", |device, kernel, head_dim| {
        for group in 1..=8 {
            Case::plain(200, 2 * group, 2, head_dim).check_all(device, kernel);
        }
    });
}

#[test]
fn every_window_agrees_with_f64() {
    on_every_kernel("every_window_agrees_with_f64", |device, kernel, head_dim| {
        for window in [1, 2, 37, 63, 64, 128, 129, 300, 516, 517, 600] {
            Case { window: Some(window), ..Case::plain(517, 2, 1, head_dim) }.check_all(device, kernel);
        }
    });
}

#[test]
fn the_softcap_agrees_with_f64() {
    on_every_kernel("the_softcap_agrees_with_f64", |device, kernel, head_dim| {
        for (softcap, window) in [(50.0, None), (2.0, None), (5.0, Some(100))] {
            let case = Case { softcap: Some(softcap), window, sharpness: 30.0, ..Case::plain(400, 4, 2, head_dim) };
            case.check_all(device, kernel);
        }
    });
}

#[test]
fn scores_far_apart_move_the_reference_of_the_exponent() {
    on_every_kernel("scores_far_apart_move_the_reference_of_the_exponent", |device, kernel, head_dim| {
        Case { sharpness: 300.0, ..Case::plain(517, 2, 1, head_dim) }.check_all(device, kernel);
    });
}

#[test]
fn a_long_sequence_agrees_with_f64_at_some_tokens() {
    on_every_kernel("a_long_sequence_agrees_with_f64_at_some_tokens", |device, kernel, head_dim| {
        if ![64, 128, 256].contains(&head_dim) {
            return;
        }
        // More heads than run at once on Hopper: 4 · n_tokens · head_dim bytes a group are beyond the kernel's share of L2.
        let n_tokens = 20_011;
        let tokens = [0, 1, 127, 128, 9_999, 19_967, 19_968, n_tokens - 1];
        Case::plain(n_tokens, 10, 5, head_dim).check(device, kernel, &tokens);
        Case { window: Some(4096), ..Case::plain(n_tokens, 4, 1, head_dim) }.check(device, kernel, &tokens);
    });
}

#[test]
fn what_a_cache_holds_quantized_is_read_from_there() {
    let Some(device) = common::device("what_a_cache_holds_quantized_is_read_from_there") else { return };
    for (n_tokens, head_dim, chunk, windows) in [
        (517, 64, 16, [16, 128]),
        (300, 128, 1, [4, 0]),
        (259, 256, 100, [70, 5]),
        (200, 40, 7, [0, 64]),
        (5, 8, 16, [1, 1]),
    ] {
        let plain = Case::plain(n_tokens, 6, 2, head_dim);
        plain.check_windowed(&device, chunk, windows);
        Case { window: Some(90), softcap: Some(5.0), ..plain }.check_windowed(&device, chunk, windows);
    }
}

#[test]
fn a_head_dim_without_tiles_is_an_error() {
    let Some(device) = common::device("a_head_dim_without_tiles_is_an_error") else { return };
    let case = Case::plain(3, 1, 1, 24);
    let fused = device.upload(&random_bf16(1, 3 * case.columns()[3])).expect("uploaded");
    let part = Matrix { view: fused.view(), n_rows: 3, width: 24, stride: case.columns()[3] };
    let attention = Attention { q: part, k: part, v: part, head_dim: 24, window: None, scale: 1.0, softcap: None };
    let mut out = device.filled(3 * 24, 0).expect("room");
    let message = device.attention(&attention, &mut out.view_mut(), 24).expect_err("no tiles").to_string();
    assert_eq!(message, "kernels/attention_mma.cu takes head dims of multiples of 16 up to 256, found 24");
}
