//! The exact Hessians on a GPU against Eq. 56 and Eq. 60 as written, in f64 on the host: residuals of every key, query and pair of
//! heads. Skipped, loudly, without a GPU.

mod common;

use common::{random_bf16, relative_error, widened};
use half::bf16;
use rayon::prelude::*;
use wush_gpu::attention::Attention;
use wush_gpu::hessian::{HessianInputs, Hessians};
use wush_gpu::matmul::Matrix;
use wush_gpu::{Buffer, Device, GpuError};

/// `kernels/hessian.cu` derives 2⁻¹⁷ κ + 2⁻²² max|score| with κ = |v| / |v - o|: with κ up to 6 (values around a common vector as long
/// as four of their deviations) and scores up to 60, 6e-5 at worst and, because the errors of different positions and
/// coordinates average out, far less; 5e-6 was seen.
const REL_TOL: f64 = 5e-5;

/// One sequence of random numbers.
struct Case {
    n_tokens: usize,
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    window: Option<usize>,
    softcap: Option<f32>,
    /// What every value has in common, in every coordinate.
    offset: f32,
}

impl Case {
    fn plain(n_tokens: usize, n_heads: usize, n_kv_heads: usize, head_dim: usize) -> Self {
        Self { n_tokens, n_heads, n_kv_heads, head_dim, window: None, softcap: None, offset: 0.0 }
    }

    fn group(&self) -> usize {
        self.n_heads / self.n_kv_heads
    }

    fn scale(&self) -> f32 {
        4.0 / (self.head_dim as f32).sqrt()
    }

    /// Queries, keys, values, each `[tokens, heads head_dim]`.
    fn rows(&self) -> [Vec<bf16>; 3] {
        let rows = |seed, n_heads: usize| random_bf16(seed, self.n_tokens * n_heads * self.head_dim);
        let [q, k, mut v] = [rows(1, self.n_heads), rows(2, self.n_kv_heads), rows(3, self.n_kv_heads)];
        v.iter_mut().for_each(|v| *v = bf16::from_f32(v.to_f32() + self.offset));
        [q, k, v]
    }

    /// W Wᵀ of random projections `[G head_dim, 48]` a KV head.
    fn couplings(&self) -> Vec<f32> {
        const HIDDEN: usize = 48;
        let rows = self.group() * self.head_dim;
        let weights = common::random(4, self.n_kv_heads * rows * HIDDEN);
        let of_head = |weights: &[f32]| {
            let row = |i: usize| &weights[i * HIDDEN..][..HIDDEN];
            let dot = |i: usize, j: usize| row(i).iter().zip(row(j)).map(|(x, y)| x * y).sum::<f32>();
            (0..rows * rows).map(|at| dot((at / rows).min(at % rows), (at / rows).max(at % rows))).collect::<Vec<_>>()
        };
        weights.chunks(rows * HIDDEN).flat_map(of_head).collect()
    }

    fn matrix<'a>(&self, rows: &'a Buffer<bf16>, n_heads: usize) -> Matrix<'a, bf16> {
        Matrix::packed(rows.view(), self.n_tokens, n_heads * self.head_dim)
    }

    /// Key and value Hessians, added to `start` everywhere.
    fn run(&self, device: &Device, start: f64) -> [Vec<f64>; 2] {
        let [q, k, v] = self.rows().map(|rows| device.upload(&rows).expect("uploaded"));
        let attention = Attention {
            q: self.matrix(&q, self.n_heads),
            k: self.matrix(&k, self.n_kv_heads),
            v: self.matrix(&v, self.n_kv_heads),
            head_dim: self.head_dim,
            window: self.window,
            scale: self.scale(),
            softcap: self.softcap,
        };
        let couplings = device.upload(&self.couplings()).expect("uploaded");
        let inputs = HessianInputs { attention, couplings: couplings.view() };
        let start = vec![start; self.n_kv_heads * self.head_dim * self.head_dim];
        let [mut key, mut value] = [0, 1].map(|_| device.upload(&start).expect("uploaded"));
        let (key_view, value_view) = (&mut key.view_mut(), &mut value.view_mut());
        device.add_hessians(&inputs, &mut Hessians { key: key_view, value: value_view }).expect("begun");
        [key, value].map(|sums| sums.to_host().expect("done"))
    }

    fn check(&self, device: &Device) {
        let [key, value] = self.run(device, 0.0);
        let [expected_key, expected_value] = Reference::new(self).hessians();
        for (what, found, expected) in [("key", &key, &expected_key), ("value", &value, &expected_value)] {
            let error = relative_error(found.iter().copied(), expected);
            assert!(error <= REL_TOL, "{what} of {}: {error:.2e}", self.name());
        }
        let bits = |sums: &[Vec<f64>; 2]| sums.concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&[key, value]), bits(&self.run(device, 0.0)), "{}: another result", self.name());
    }

    fn name(&self) -> String {
        let Self { n_tokens, n_heads, n_kv_heads, head_dim, window, softcap, offset } = self;
        format!(
            "{n_tokens} tokens, {n_heads}/{n_kv_heads} heads of {head_dim}, {window:?}, {softcap:?}, offset {offset}"
        )
    }
}

/// Appendix C in f64.
struct Reference<'a> {
    case: &'a Case,
    q: Vec<f64>,
    v: Vec<f64>,
    couplings: Vec<f32>,
    /// Probabilities, the same times the softcap's slope: `[n_heads, tokens, tokens]`.
    p: [Vec<f64>; 2],
    /// `[n_heads, tokens, head_dim]`.
    o: Vec<f64>,
}

impl<'a> Reference<'a> {
    fn new(case: &'a Case) -> Self {
        let [q, k, v] = case.rows().map(|rows| widened(&rows));
        let (n, d) = (case.n_tokens, case.head_dim);
        let mut reference = Self { case, q, v, couplings: case.couplings(), p: [vec![], vec![]], o: vec![] };
        for head in 0..case.n_heads {
            for t in 0..n {
                let [p, bent] = reference.probabilities(&k, head, t);
                let v = |s: usize, i: usize| reference.v[s * case.n_kv_heads * d + head / case.group() * d + i];
                let output: Vec<f64> = (0..d).map(|i| (0..=t).map(|s| p[s] * v(s, i)).sum()).collect();
                reference.o.extend(output);
                reference.p[0].extend(p);
                reference.p[1].extend(bent);
            }
        }
        reference
    }

    fn probabilities(&self, k: &[f64], head: usize, t: usize) -> [Vec<f64>; 2] {
        let Case { n_tokens, n_heads, n_kv_heads, head_dim: d, .. } = *self.case;
        let first = self.case.window.map_or(0, |window| (t + 1).saturating_sub(window));
        let (mut p, mut slopes) = (vec![0.0; n_tokens], vec![1.0; n_tokens]);
        for s in first..=t {
            let (q, k) =
                (&self.q[(t * n_heads + head) * d..][..d], &k[(s * n_kv_heads + head / self.case.group()) * d..][..d]);
            p[s] = f64::from(self.case.scale()) * q.iter().zip(k).map(|(x, y)| x * y).sum::<f64>();
            if let Some(cap) = self.case.softcap.map(f64::from) {
                let bent = (p[s] / cap).tanh();
                (p[s], slopes[s]) = (cap * bent, 1.0 - bent * bent);
            }
        }
        let top = p[first..=t].iter().copied().fold(f64::NEG_INFINITY, f64::max);
        p[first..=t].iter_mut().for_each(|p| *p = (*p - top).exp());
        let sum: f64 = p[first..=t].iter().sum();
        p.iter_mut().for_each(|p| *p /= sum);
        let bent = p.iter().zip(&slopes).map(|(p, slope)| p * slope).collect();
        [p, bent]
    }

    fn residual(&self, head: usize, s: usize, t: usize) -> Vec<f64> {
        let Case { n_tokens, n_kv_heads, head_dim: d, .. } = *self.case;
        let v = &self.v[(s * n_kv_heads + head / self.case.group()) * d..][..d];
        v.iter().zip(&self.o[(head * n_tokens + t) * d..][..d]).map(|(v, o)| v - o).collect()
    }

    /// Γ_{a,b} of a KV head, row-major.
    fn coupling(&self, kv_head: usize, a: usize, b: usize, i: usize, j: usize) -> f64 {
        let side = self.case.group() * self.case.head_dim;
        let d = self.case.head_dim;
        f64::from(self.couplings[(kv_head * side + a * d + i) * side + b * d + j])
    }

    fn hessians(&self) -> [Vec<f64>; 2] {
        let Case { n_kv_heads, head_dim: d, .. } = *self.case;
        let (square, group) = (d * d, self.case.group());
        let term = |i: usize| self.pair(i / (group * group), [i / group % group, i % group]);
        let terms: Vec<_> = (0..n_kv_heads * group * group).into_par_iter().map(term).collect();
        let mut sums = [0, 1].map(|_| vec![0.0; n_kv_heads * square]);
        for (i, term) in terms.iter().enumerate() {
            for (sum, term) in sums.iter_mut().zip(term) {
                let into = &mut sum[i / (group * group) * square..][..square];
                into.iter_mut().zip(term).for_each(|(sum, x)| *sum += x);
            }
        }
        sums
    }

    /// One term of the sums over g and g' of Eq. 56 and Eq. 60, for all s and t.
    fn pair(&self, kv_head: usize, [a, b]: [usize; 2]) -> [Vec<f64>; 2] {
        let Case { n_tokens: n, n_heads, head_dim: d, .. } = *self.case;
        let [mut key, mut value] = [0, 1].map(|_| vec![0.0; d * d]);
        let gamma: Vec<f64> = (0..d * d).map(|at| self.coupling(kv_head, a, b, at / d, at % d)).collect();
        let heads = [a, b].map(|g| kv_head * self.case.group() + g);
        let factor = 2.0 * f64::from(self.case.scale()).powi(2);
        let mut overlap = 0.0;
        for t in 0..n {
            let mut c = 0.0;
            for s in 0..=t {
                let both = |p: &[f64]| heads.iter().map(|head| p[(head * n + t) * n + s]).product::<f64>();
                overlap += both(&self.p[0]);
                let weight = both(&self.p[1]);
                if weight == 0.0 {
                    continue;
                }
                let [left, right] = heads.map(|head| self.residual(head, s, t));
                let image = |i: usize| gamma[i * d..][..d].iter().zip(&right).map(|(g, r)| g * r).sum::<f64>();
                c += weight * left.iter().enumerate().map(|(i, x)| x * image(i)).sum::<f64>();
            }
            let [qa, qb] = heads.map(|head| &self.q[(t * n_heads + head) * d..][..d]);
            for (at, sum) in key.iter_mut().enumerate() {
                *sum += factor * c * qa[at / d] * qb[at % d];
            }
        }
        for (at, sum) in value.iter_mut().enumerate() {
            *sum += 2.0 * overlap * gamma[at];
        }
        [key, value]
    }
}

#[test]
fn every_group_agrees_with_f64() {
    let Some(device) = common::device("every_group_agrees_with_f64") else { return };
    for group in 1..=8 {
        Case::plain(70, 2 * group, 2, 64).check(&device);
    }
}

#[test]
fn every_head_dim_and_tail_agrees_with_f64() {
    let Some(device) = common::device("every_head_dim_and_tail_agrees_with_f64") else { return };
    for (n_tokens, head_dim) in [(2, 16), (15, 48), (16, 80), (17, 96), (33, 112), (65, 128), (40, 256)] {
        Case::plain(n_tokens, 4, 2, head_dim).check(&device);
    }
    Case::plain(300, 2, 1, 64).check(&device);
}

#[test]
fn windows_and_the_softcap_agree_with_f64() {
    let Some(device) = common::device("windows_and_the_softcap_agree_with_f64") else { return };
    // With a window of 1 every output is its value, and no key matters.
    for window in [2, 31, 32, 90, 200] {
        Case { window: Some(window), ..Case::plain(100, 2, 1, 64) }.check(&device);
    }
    Case { softcap: Some(3.0), ..Case::plain(100, 2, 1, 64) }.check(&device);
    Case { softcap: Some(20.0), window: Some(40), ..Case::plain(100, 4, 2, 128) }.check(&device);
}

#[test]
fn values_with_much_in_common_agree_with_f64() {
    let Some(device) = common::device("values_with_much_in_common_agree_with_f64") else { return };
    Case { offset: 4.0, ..Case::plain(120, 3, 1, 64) }.check(&device);
}

#[test]
fn sums_are_added_to_what_was_there() {
    let Some(device) = common::device("sums_are_added_to_what_was_there") else { return };
    let case = Case::plain(50, 4, 2, 64);
    let ([from_zero, _], [from_one, _]) = (case.run(&device, 0.0), case.run(&device, 1.0));
    assert!(from_zero.iter().zip(&from_one).all(|(zero, one)| (zero + 1.0).to_bits() == one.to_bits()));
}

#[test]
fn what_no_kernel_serves_is_an_error() {
    let Some(device) = common::device("what_no_kernel_serves_is_an_error") else { return };
    let rows = device.upload(&random_bf16(1, 9 * 16)).expect("uploaded");
    let matrix = |n_heads: usize| Matrix { stride: 144, ..Matrix::packed(rows.view(), 1, n_heads * 16) };
    let (q, k) = (matrix(9), matrix(1));
    let attention = Attention { q, k, v: k, head_dim: 16, window: None, scale: 1.0, softcap: None };
    let couplings = device.upload(&[0.0f32]).expect("uploaded");
    let (mut key, mut value) = (device.filled(1, 0).expect("room"), device.filled(1, 0).expect("room"));
    let to = &mut Hessians { key: &mut key.view_mut(), value: &mut value.view_mut() };
    let error =
        device.add_hessians(&HessianInputs { attention, couplings: couplings.view() }, to).expect_err("9 heads");
    assert!(matches!(error, GpuError::Group { group: 9, .. }), "{error}");
}
