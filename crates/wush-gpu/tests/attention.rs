//! Attention on a GPU against Eq. 2 in f64 on the host: head dims, groups, tails, windows, softcap, slices of fused rows. Skipped,
//! loudly, without a GPU that has the kernel.

mod common;

use common::{random_bf16, relative_error};
use half::bf16;
use wush_gpu::Device;
use wush_gpu::attention::{Attention, hopper};
use wush_gpu::matmul::Matrix;

/// Probabilities and outputs are rounded to bf16, whose numbers in 1..2 lie 2⁻⁷ apart: an error of 2⁻⁷ / √12 over numbers of root mean
/// square √(7/3), 1.5e-3 each and 2.1e-3 together. Where few keys have the weight, p's errors are not averaged over many: a margin
/// of two.
const REL_TOL: f64 = 4e-3;

/// Numbers of tokens that are no multiple of any tile, on both sides of one, and alone.
const TAILS: [usize; 9] = [1, 2, 63, 64, 65, 129, 191, 320, 517];

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

    fn rows(&self) -> Vec<bf16> {
        random_bf16(self.n_tokens as u64, self.n_tokens * self.columns()[3])
    }

    /// Outputs `[tokens, n_heads head_dim + PADDING]` of a buffer of NaNs.
    fn run(&self, device: &Device, rows: &[bf16]) -> Vec<bf16> {
        let fused = device.upload(rows).expect("uploaded");
        let [q, k, v, row] = self.columns();
        let part = |from: usize, n_heads: usize| Matrix {
            view: fused.view().slice(from..fused.len()),
            n_rows: self.n_tokens,
            width: n_heads * self.head_dim,
            stride: row,
        };
        let attention = Attention {
            q: part(q, self.n_heads),
            k: part(k, self.n_kv_heads),
            v: part(v, self.n_kv_heads),
            head_dim: self.head_dim,
            window: self.window,
            scale: self.scale(),
            softcap: self.softcap,
        };
        let stride = self.n_heads * self.head_dim + PADDING;
        let mut out = device.filled(self.n_tokens * stride, 0xff).expect("room");
        device.attention(&attention, &mut out.view_mut(), stride).expect("begun");
        out.to_host().expect("done")
    }

    /// Eq. 2 in f64 for one token and head.
    fn expected(&self, rows: &[bf16], token: usize, head: usize) -> Vec<f64> {
        let [q, k, v, row] = self.columns();
        let d = self.head_dim;
        let kv_head = head / (self.n_heads / self.n_kv_heads);
        let vector = |token: usize, from: usize| rows[token * row + from..][..d].iter().map(|x| x.to_f64());
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
    fn check(&self, device: &Device, tokens: impl Iterator<Item = usize>) {
        let rows = self.rows();
        let out = self.run(device, &rows);
        let width = self.n_heads * self.head_dim;
        let (mut found, mut exact) = (Vec::new(), Vec::new());
        for token in tokens {
            found.extend(out[token * (width + PADDING)..][..width].iter().map(|x| x.to_f64()));
            exact.extend((0..self.n_heads).flat_map(|head| self.expected(&rows, token, head)));
        }
        let error = relative_error(found, &exact);
        let name = self.name();
        assert!(error <= REL_TOL, "{name}: {error:.2e}");
        let untouched = out.chunks(width + PADDING).all(|row| row[width..].iter().all(|x| x.to_bits() == 0xffff));
        assert!(untouched, "{name}: wrote beyond a row");
        let bits = |values: &[bf16]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&out), bits(&self.run(device, &rows)), "{name}: another result on the second run");
    }

    fn check_all(&self, device: &Device) {
        self.check(device, 0..self.n_tokens);
    }

    fn name(&self) -> String {
        let Self { n_tokens, n_heads, n_kv_heads, head_dim, window, softcap, .. } = self;
        format!("{n_tokens} tokens, {n_heads}/{n_kv_heads} heads of {head_dim}, window {window:?}, softcap {softcap:?}")
    }
}

/// A GPU, and the head dims that have a kernel on it.
fn device(test: &str) -> Option<(Device, Vec<usize>)> {
    let device = common::device(test)?;
    let served = |&head_dim: &usize| hopper::serves(device.info().capability, head_dim as u32);
    let head_dims: Vec<usize> = [64, 128, 256].into_iter().filter(served).collect();
    if head_dims.is_empty() {
        common::skipped(test, &format!("no attention kernel for {}", device.info().name));
        return None;
    }
    Some((device, head_dims))
}

#[test]
fn every_tail_agrees_with_f64() {
    let Some((device, head_dims)) = device("every_tail_agrees_with_f64") else { return };
    for head_dim in head_dims {
        for n_tokens in TAILS {
            Case::plain(n_tokens, 2, 1, head_dim).check_all(&device);
        }
    }
}

#[test]
fn every_group_agrees_with_f64() {
    let Some((device, head_dims)) = device("every_group_agrees_with_f64") else { return };
    for head_dim in head_dims {
        for group in 1..=8 {
            Case::plain(200, 2 * group, 2, head_dim).check_all(&device);
        }
    }
}

#[test]
fn every_window_agrees_with_f64() {
    let Some((device, head_dims)) = device("every_window_agrees_with_f64") else { return };
    for head_dim in head_dims {
        for window in [1, 2, 37, 63, 64, 128, 129, 300, 516, 517, 600] {
            Case { window: Some(window), ..Case::plain(517, 2, 1, head_dim) }.check_all(&device);
        }
    }
}

#[test]
fn the_softcap_agrees_with_f64() {
    let Some((device, head_dims)) = device("the_softcap_agrees_with_f64") else { return };
    for head_dim in head_dims {
        for (softcap, window) in [(50.0, None), (2.0, None), (5.0, Some(100))] {
            let case = Case { softcap: Some(softcap), window, sharpness: 30.0, ..Case::plain(400, 4, 2, head_dim) };
            case.check_all(&device);
        }
    }
}

#[test]
fn scores_far_apart_move_the_reference_of_the_exponent() {
    let Some((device, head_dims)) = device("scores_far_apart_move_the_reference_of_the_exponent") else { return };
    for head_dim in head_dims {
        Case { sharpness: 300.0, ..Case::plain(517, 2, 1, head_dim) }.check_all(&device);
    }
}

#[test]
fn a_long_sequence_agrees_with_f64_at_some_tokens() {
    let Some((device, head_dims)) = device("a_long_sequence_agrees_with_f64_at_some_tokens") else { return };
    for head_dim in head_dims {
        // More heads than run at once: 4 · n_tokens · head_dim bytes a group are beyond the kernel's share of L2.
        let n_tokens = 20_011;
        let tokens = [0, 1, 127, 128, 9_999, 19_967, 19_968, n_tokens - 1];
        Case::plain(n_tokens, 10, 5, head_dim).check(&device, tokens.into_iter());
        Case { window: Some(4096), ..Case::plain(n_tokens, 4, 1, head_dim) }.check(&device, tokens.into_iter());
    }
}
