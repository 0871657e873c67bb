//! Eq. 56, 60 and 61: against the oracle's modules, and against finite differences of the module output, also with a window
//! and a softcap, which the oracle does not have.

mod common;

use common::{Module, Shape, Source, info, sequences, spec, write_checkpoint};
use wush_checkpoint::Checkpoint;
use wush_format::transforms::HeadMatrices;
use wush_model::cpu::{Cpu, Rows};
use wush_model::observer::Observer;
use wush_model::spec::AttentionSpec;
use wush_stats::{Accumulator, AttentionHessians, Couplings, Statistics, attention_hessians, couplings};

/// The oracle's own limits, relative in the Frobenius norm: f64, and f32 inputs.
const F64_TOL: f64 = 1e-10;
const F32_TOL: f64 = 1e-4;

fn attention(shape: Shape) -> AttentionSpec {
    spec(&[shape], 8).layers.remove(0).attn
}

/// W_O W_O'ᵀ of all pairs, from `[n_q, d, d_model]`.
fn couplings_of(output: &[f64], shape: Shape, hidden: usize) -> Couplings {
    let width = shape.n_heads / shape.n_kv_heads * shape.head_dim;
    let row = |head: usize, i: usize| &output[(head * width + i) * hidden..][..hidden];
    let mut out = HeadMatrices::zeros(shape.n_kv_heads, width);
    for head in 0..shape.n_kv_heads {
        let data = out.head_mut(head);
        for (at, into) in data.iter_mut().enumerate() {
            *into = row(head, at / width).iter().zip(row(head, at % width)).map(|(x, y)| x * y).sum();
        }
    }
    out
}

/// `[heads, d, S]` to rows `[S, heads d]`.
fn rows(columns: &[f64], len: usize) -> Vec<f64> {
    let width = columns.len() / len;
    (0..columns.len()).map(|at| columns[(at % width) * len + at / width]).collect()
}

#[track_caller]
fn assert_close(what: &str, found: &[f64], expected: &[f64], tol: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let error = norm(&mut found.iter().zip(expected).map(|(x, y)| x - y)) / norm(&mut expected.iter().copied());
    assert!(error <= tol, "{what}: relative error {error:e}, tolerance {tol:e}");
}

impl Module {
    fn qkv(&self, sequence: usize) -> [Vec<f64>; 3] {
        let Shape { n_heads, n_kv_heads, head_dim } = self.shape;
        [("Q", n_heads), ("K", n_kv_heads), ("V", n_kv_heads)].map(|(key, n)| {
            rows(&self.tensor(&format!("seq{sequence}.{key}"), &[n, head_dim, self.seq_len]), self.seq_len)
        })
    }

    fn output(&self) -> Vec<f64> {
        self.tensor("Wo", &[self.shape.n_heads, self.shape.head_dim, self.hidden])
    }

    fn spec(&self) -> AttentionSpec {
        AttentionSpec { scale: (1.0 / self.tau) as f32, ..attention(self.shape) }
    }

    fn expected(&self, key: &str) -> Vec<f64> {
        let Shape { n_kv_heads, head_dim, .. } = self.shape;
        self.tensor(key, &[n_kv_heads, head_dim, head_dim])
    }
}

/// In f64, with the oracle's scale: a spec's is f32, so queries carry what its rounding leaves.
#[test]
fn the_oracles_hessians_are_met_in_f64() {
    for module in Module::all() {
        let spec = module.spec();
        let couplings = couplings_of(&module.output(), module.shape, module.hidden);
        let mut sum = AttentionHessians::zeros(module.shape.n_kv_heads, module.shape.head_dim);
        let rest = 1.0 / module.tau / f64::from(spec.scale);
        for sequence in 0..module.n_sequences {
            let [mut q, k, v] = module.qkv(sequence);
            q.iter_mut().for_each(|x| *x *= rest);
            sum.add(&attention_hessians([&q, &k, &v], &spec, &couplings));
        }
        assert_close(&module.name, &sum.key.data, &module.expected("HK_wusha"), F64_TOL);
        assert_close(&module.name, &sum.value.data, &module.expected("HV_wusha"), F64_TOL);
    }
}

/// As calibration does it: f32 activations and weights, through the accumulator and a file.
#[test]
fn the_accumulator_meets_the_oracle_and_the_file_keeps_it() {
    for module in Module::all() {
        let Shape { n_heads, n_kv_heads, head_dim } = module.shape;
        let mut spec = spec(&[module.shape], module.hidden);
        spec.layers[0].attn.scale = module.spec().scale;
        let dir = tempfile::tempdir().expect("a temporary directory");
        let width = n_heads * head_dim;
        let blocks = module.output();
        let stored = (0..module.hidden * width).map(|at| blocks[(at % width) * module.hidden + at / width] as f32);
        write_checkpoint(dir.path(), &spec, &[stored.collect()]);
        let checkpoint = Checkpoint::open(dir.path()).expect("valid");
        let info = wush_stats::StatsInfo { attention_hessians: true, n_heads, n_kv_heads, head_dim, ..info() };
        let mut statistics = Statistics::new(&spec, info);
        let ids: Vec<Vec<u32>> = (0..module.n_sequences).map(|i| vec![i as u32; module.seq_len]).collect();
        let mut accumulator = Accumulator::new(&mut statistics, &ids).with_weights(&checkpoint, &spec);
        Observer::<Cpu>::begin(&mut accumulator, 0).expect("readable");
        for sequence in 0..module.n_sequences {
            let [q, k, v] = module.qkv(sequence).map(|x| Rows {
                n_rows: module.seq_len,
                width: x.len() / module.seq_len,
                data: x.iter().map(|&x| x as f32).collect(),
            });
            common::show(&mut accumulator, 0, [&q, &k, &v]).expect("finite");
        }
        accumulator.finish().expect("complete");
        let found = statistics.layers[&0].attention.as_ref().expect("asked for");
        assert_close(&module.name, &found.key.data, &module.expected("HK_wusha"), F32_TOL);
        assert_close(&module.name, &found.value.data, &module.expected("HV_wusha"), F32_TOL);
        let path = dir.path().join("s.safetensors");
        statistics.save(&path).expect("saved");
        assert_eq!(Statistics::load(&path).expect("valid"), statistics);
    }
}

/// Without the weights nothing is counted quietly.
#[test]
fn hessians_without_weights_are_refused() {
    let shape = Shape { n_heads: 2, n_kv_heads: 1, head_dim: 4 };
    let info = wush_stats::StatsInfo { attention_hessians: true, ..info() };
    let mut statistics = Statistics::new(&spec(&[shape], 8), info);
    let ids = sequences(1, 1);
    let mut accumulator = Accumulator::new(&mut statistics, &ids);
    let mut source = Source(3);
    let [q, k, v] = [8, 4, 4].map(|width| source.rows(ids[0].len(), width));
    let error = common::show(&mut accumulator, 0, [&q, &k, &v]).expect_err("refused").to_string();
    assert!(error.contains("output projection was not read"), "{error}");
}

/// A module of random numbers, with its output written out from the definition.
struct Small {
    spec: AttentionSpec,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    /// `[n_q, d, d_model]`.
    output: Vec<f64>,
}

const HIDDEN: usize = 7;
const LEN: usize = 9;

impl Small {
    fn new(window: Option<usize>, logit_softcap: Option<f32>) -> Self {
        let shape = Shape { n_heads: 6, n_kv_heads: 2, head_dim: 4 };
        let mut source = Source(17);
        let mut numbers = |n: usize| (0..n).map(|_| f64::from(source.number())).collect::<Vec<_>>();
        let spec = AttentionSpec { scale: 1.25, window, logit_softcap, ..attention(shape) };
        Self { spec, q: numbers(LEN * 24), k: numbers(LEN * 8), v: numbers(LEN * 8), output: numbers(24 * HIDDEN) }
    }

    /// Y, `[S, d_model]`.
    fn run(&self, k: &[f64], v: &[f64]) -> Vec<f64> {
        let dim = self.spec.head_dim;
        let mut out = vec![0.0; LEN * HIDDEN];
        for (t, n) in (0..LEN).flat_map(|t| (0..6).map(move |n| (t, n))) {
            let h = n / 3;
            let first = self.spec.window.map_or(0, |window| (t + 1).saturating_sub(window));
            let weight = |s: usize| {
                let q = &self.q[t * 24 + n * dim..][..dim];
                let dot: f64 = q.iter().zip(&k[s * 8 + h * dim..][..dim]).map(|(x, y)| x * y).sum();
                let logit = dot * f64::from(self.spec.scale);
                self.spec.logit_softcap.map_or(logit, |cap| f64::from(cap) * (logit / f64::from(cap)).tanh()).exp()
            };
            let weights: Vec<f64> = (first..=t).map(weight).collect();
            let total: f64 = weights.iter().sum();
            for (s, weight) in (first..=t).zip(&weights) {
                for (i, j) in (0..dim).flat_map(|i| (0..HIDDEN).map(move |j| (i, j))) {
                    let w = self.output[(n * dim + i) * HIDDEN + j];
                    out[t * HIDDEN + j] += weight / total * v[s * 8 + h * dim + i] * w;
                }
            }
        }
        out
    }

    /// Σ_s 2 JᵀJ of KV head `h`, J the derivative of Y by the key (or value) at s, by central differences.
    fn by_differences(&self, of_keys: bool, h: usize) -> Vec<f64> {
        const STEP: f64 = 1e-5;
        let dim = self.spec.head_dim;
        let mut sum = vec![0.0; dim * dim];
        for s in 0..LEN {
            let slope = |i: usize| {
                let moved = |by: f64| {
                    let (mut k, mut v) = (self.k.clone(), self.v.clone());
                    (if of_keys { &mut k } else { &mut v })[s * 8 + h * dim + i] += by;
                    self.run(&k, &v)
                };
                let (up, down) = (moved(STEP), moved(-STEP));
                up.iter().zip(down).map(|(x, y)| (x - y) / (2.0 * STEP)).collect::<Vec<f64>>()
            };
            let slopes: Vec<Vec<f64>> = (0..dim).map(slope).collect();
            for at in 0..dim * dim {
                sum[at] += 2.0 * slopes[at / dim].iter().zip(&slopes[at % dim]).map(|(x, y)| x * y).sum::<f64>();
            }
        }
        sum
    }
}

#[test]
fn hessians_are_those_of_finite_differences() {
    for (window, softcap) in [(None, None), (Some(4), None), (None, Some(1.5)), (Some(3), Some(0.8))] {
        let small = Small::new(window, softcap);
        let shape = Shape { n_heads: 6, n_kv_heads: 2, head_dim: 4 };
        let couplings = couplings_of(&small.output, shape, HIDDEN);
        let found = attention_hessians([&small.q, &small.k, &small.v], &small.spec, &couplings);
        for h in 0..2 {
            // Central differences of step 1e-5: 1e-10 of the third derivative, and rounding of 1e-16 / 1e-5.
            let what = format!("window {window:?}, softcap {softcap:?}, head {h}");
            assert_close(&what, found.key.head(h), &small.by_differences(true, h), 1e-7);
            assert_close(&what, found.value.head(h), &small.by_differences(false, h), 1e-7);
        }
    }
}

/// Sequences longer than a block of queries, with tails: the blocks add up to what one query at a time gives.
#[test]
fn blocks_add_up() {
    let shape = Shape { n_heads: 4, n_kv_heads: 2, head_dim: 3 };
    let mut source = Source(5);
    let mut numbers = |n: usize| (0..n).map(|_| f64::from(source.number())).collect::<Vec<_>>();
    let (q, k, v, output) = (numbers(70 * 12), numbers(70 * 6), numbers(70 * 6), numbers(12 * HIDDEN));
    let couplings = couplings_of(&output, shape, HIDDEN);
    for window in [None, Some(1), Some(20), Some(33)] {
        let spec = AttentionSpec { window, ..attention(shape) };
        let of = |len: usize| attention_hessians([&q[..len * 12], &k[..len * 6], &v[..len * 6]], &spec, &couplings);
        // Everything is a sum over queries: a longer sequence adds one positive semidefinite term a query.
        let sums: Vec<f64> = (0..=70).map(|len| of(len).value.data.iter().step_by(4).sum()).collect();
        assert!(sums.windows(2).all(|pair| pair[1] > pair[0]), "window {window:?}: {sums:?}");
        // A window of one key leaves nothing for a key to change.
        let largest = of(70).key.data.iter().fold(0.0f64, |max, x| max.max(x.abs()));
        assert!(if window == Some(1) { largest <= 1e-12 } else { largest > 1e-3 }, "window {window:?}: {largest:e}");
    }
}

#[test]
fn couplings_are_those_of_the_weights() {
    let shape = Shape { n_heads: 4, n_kv_heads: 2, head_dim: 3 };
    let spec = spec(&[shape], HIDDEN);
    let mut source = Source(9);
    let stored: Vec<f32> = (0..HIDDEN * 12).map(|_| source.number()).collect();
    let dir = tempfile::tempdir().expect("a temporary directory");
    write_checkpoint(dir.path(), &spec, std::slice::from_ref(&stored));
    let checkpoint = Checkpoint::open(dir.path()).expect("valid");
    let found = couplings(&checkpoint, 0, &spec.layers[0].attn).expect("readable");
    let blocks: Vec<f64> = (0..12 * HIDDEN).map(|at| f64::from(stored[(at % HIDDEN) * 12 + at / HIDDEN])).collect();
    assert_close("couplings", &found.data, &couplings_of(&blocks, shape, HIDDEN).data, 1e-14);
}
