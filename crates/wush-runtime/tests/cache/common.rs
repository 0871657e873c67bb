//! What the tests share: seeded numbers, and a naive cache in f64 that follows Algorithm 2 as it is written.

use half::bf16;
use wush_quant::{Codec, Feedback, Method, Role, ScaleDtype};
use wush_runtime::{CacheConfig, Chunk, FullDtype, KvCache, LayerConfig, Part, Precision, SequenceId, Windows};

/// Uniform numbers in ±1 from a linear congruential generator, with a few outliers as keys have.
pub struct Numbers(u64);

impl Numbers {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(2).wrapping_add(1))
    }

    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }

    pub fn take(&mut self, n: usize) -> Vec<f32> {
        let mut next = || {
            let x = self.below(1 << 20) as f32 / (1 << 19) as f32 - 1.0;
            if self.below(40) == 0 { 4.0 * x } else { x }
        };
        (0..n).map(|_| next()).collect()
    }
}

/// A precision by bits, QuEST for keys and OSCAR for values.
pub fn precision(bits: u8, role: Role) -> Precision {
    let method: Method = if role == Role::Key { "quest" } else { "oscar" }.parse().expect("a name");
    Precision::new(bits, &method, role, ScaleDtype::Bf16).expect("in range")
}

pub fn layer(n_heads: usize, n_kv_heads: usize, head_dim: usize, bits: [u8; 2]) -> LayerConfig {
    LayerConfig::new(n_heads, n_kv_heads, head_dim)
        .stored(precision(bits[0], Role::Key), precision(bits[1], Role::Value))
}

pub fn config(layer: LayerConfig, windows: Windows, page_tokens: usize) -> CacheConfig {
    CacheConfig { windows, page_tokens, ..CacheConfig::new(vec![layer]) }
}

/// One layer of one sequence, every token in f32, replaced by its reconstruction when Algorithm 2 quantizes it.
#[derive(Clone)]
pub struct Naive {
    layer: LayerConfig,
    windows: Windows,
    full: FullDtype,
    /// `[tokens, n_kv, d]`, keys and values.
    rows: [Vec<Vec<f32>>; 2],
    quant: i64,
    /// L of keys and values, `[n_kv, d, d]`.
    pub feedback: [Option<Vec<f32>>; 2],
}

impl Naive {
    pub fn new(config: &CacheConfig, layer: usize) -> Self {
        let layer = config.layers[layer].clone();
        Self {
            layer,
            windows: config.windows,
            full: config.full,
            rows: [vec![], vec![]],
            quant: 0,
            feedback: [None, None],
        }
    }

    pub fn len(&self) -> usize {
        self.rows[0].len()
    }

    pub fn append(&mut self, keys: &[f32], values: &[f32]) {
        let width = self.layer.n_kv_heads * self.layer.head_dim;
        let stored = |x: &f32| match self.full {
            FullDtype::F32 => *x,
            FullDtype::Bf16 => bf16::from_f32(*x).to_f32(),
        };
        for (rows, x) in self.rows.iter_mut().zip([keys, values]) {
            rows.extend(x.chunks_exact(width).map(|token| token.iter().map(stored).collect::<Vec<_>>()));
        }
    }

    /// Lines 7 to 12 with S_quant as the paper counts it.
    pub fn flush(&mut self) {
        let [sink, keep, flush] = [self.windows.sink, self.windows.keep, self.windows.flush].map(|n| n as i64);
        let start = self.quant.max(sink);
        self.quant = self.quant.max(start + (self.len() as i64 - keep - start).div_euclid(flush) * flush);
        for token in start..self.quant {
            let d = self.layer.head_dim;
            let sides = self.rows.iter_mut().zip([self.layer.keys, self.layer.values]).zip(&self.feedback);
            for ((rows, precision), feedback) in sides {
                if let Precision::Packed(quantizer) = precision {
                    let codec = Codec::new(d, quantizer).expect("in range");
                    for (head, x) in rows[token as usize].chunks_exact_mut(d).enumerate() {
                        let mut packed = vec![0; codec.layout().n_bytes()];
                        match feedback {
                            Some(lower) => {
                                let feedback = Feedback::new(d, &lower[head * d * d..][..d * d]).expect("triangular");
                                codec.pack_with_feedback(x, &feedback, &mut packed).expect("finite");
                            }
                            None => codec.pack(x, &mut packed).expect("finite"),
                        }
                        codec.unpack(&packed, x).expect("whole");
                    }
                }
            }
        }
    }

    pub fn truncate(&mut self, len: usize) {
        self.rows.iter_mut().for_each(|rows| rows.truncate(len));
        self.quant = self.quant.min(self.len() as i64);
    }

    /// Attention of the newest `queries.len() / width` positions, and the size of its rounding error in f32: `[tokens, heads, d]`.
    pub fn attend(&self, queries: &[f32]) -> (Vec<f64>, Vec<f64>) {
        let (d, group) = (self.layer.head_dim, self.layer.group());
        let width = self.layer.n_heads * d;
        let (mut out, mut bounds) = (Vec::new(), Vec::new());
        let first = self.len() - queries.len() / width;
        for (t, token) in queries.chunks_exact(width).enumerate() {
            for (head, query) in token.chunks_exact(d).enumerate() {
                let (o, bound) = self.attend_one(query, head / group, first + t);
                out.extend(o);
                bounds.extend(bound);
            }
        }
        (out, bounds)
    }

    fn attend_one(&self, query: &[f32], head: usize, position: usize) -> (Vec<f64>, Vec<f64>) {
        let d = self.layer.head_dim;
        let first = self.layer.sliding_window.map_or(0, |w| (position + 1).saturating_sub(w));
        let of = |role: usize, t: usize| &self.rows[role][t][head * d..][..d];
        let (mut logits, mut error) = (Vec::new(), 0.0f64);
        for t in first..=position {
            let terms = query.iter().zip(of(0, t)).map(|(q, k)| f64::from(*q) * f64::from(*k));
            let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
            let scale = f64::from(self.layer.scale);
            let logit =
                self.layer.softcap.map_or(sum * scale, |cap| f64::from(cap) * (sum * scale / f64::from(cap)).tanh());
            // Packed products: ε scale (max_code + |zero|) Σ|q| is a few times Σ|q k̂|.
            error = error.max(4.0 * (d as f64 / 4.0 + 8.0) * EPS * size * scale);
            error = error.max(2.0 * EPS * self.layer.softcap.map_or(0.0, f64::from) * 4.0);
            logits.push(logit);
        }
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = logits.iter().map(|x| (x - max).exp()).collect();
        let total: f64 = weights.iter().sum();
        let (mut out, mut size) = (vec![0.0; d], 0.0f64);
        for (weight, t) in weights.iter().zip(first..=position) {
            for (o, v) in out.iter_mut().zip(of(1, t)) {
                *o += weight / total * f64::from(*v);
                size = size.max(f64::from(v.abs()));
            }
        }
        // A weight is off by twice its logit's error and the exponential's; sums of n terms by n ε in the worst case,
        // and packed sums are of (code, zero) up to twice as large as v̂.
        let n = logits.len() as f64;
        let bound = (2.0 * error + 3e-7 + 4.0 * (n.sqrt() * 4.0 + 8.0) * EPS) * size;
        (out, vec![bound; d])
    }
}

/// Spacing of f32 at 1.
const EPS: f64 = f32::EPSILON as f64;

/// Asserts `found` against an expectation in f64, elementwise within `bounds`.
pub fn assert_close(found: &[f32], (expected, bounds): &(Vec<f64>, Vec<f64>), what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}: lengths");
    let mut worst = (0.0, 0);
    for (at, ((x, y), bound)) in found.iter().zip(expected).zip(bounds).enumerate() {
        let ratio = (f64::from(*x) - y).abs() / bound;
        if ratio > worst.0 || ratio.is_nan() {
            worst = (ratio, at);
        }
    }
    let (ratio, at) = worst;
    assert!(ratio <= 1.0, "{what}: element {at}: {} for {}, {ratio} of its bound", found[at], expected[at]);
}

/// A cache of one layer beside naive ones, fed alike.
pub struct Both {
    pub cache: KvCache,
    pub naive: Vec<(SequenceId, Naive)>,
}

impl Both {
    pub fn new(config: &CacheConfig, n_sequences: usize) -> Self {
        let mut cache = KvCache::new(config.clone()).expect("valid");
        let naive = (0..n_sequences).map(|_| (cache.add(), Naive::new(config, 0))).collect();
        Self { cache, naive }
    }

    /// One step with `chunks[s]` tokens for sequence s (none: not in the batch), compared.
    pub fn step(&mut self, chunks: &[usize], numbers: &mut Numbers, what: &str) {
        let layer = self.cache.config().layers[0].clone();
        let (kv, width) = (layer.n_kv_heads * layer.head_dim, layer.n_heads * layer.head_dim);
        let mut parts = Vec::new();
        for ((sequence, _), &n_tokens) in self.naive.iter().zip(chunks).filter(|(_, n)| **n > 0) {
            parts.push(Part { sequence: *sequence, n_tokens });
        }
        let total: usize = chunks.iter().sum();
        let [queries, keys, values] = [width, kv, kv].map(|n| numbers.take(total * n));
        let mut out = vec![f32::NAN; total * width];
        let chunk = Chunk { queries: &queries, keys: &keys, values: &values };
        self.cache.step(0, &parts, chunk, &mut out).expect("valid");
        let mut first = 0;
        for ((sequence, naive), &n) in self.naive.iter_mut().zip(chunks).filter(|(_, n)| **n > 0) {
            naive.append(&keys[first * kv..][..n * kv], &values[first * kv..][..n * kv]);
            let expected = naive.attend(&queries[first * width..][..n * width]);
            naive.flush();
            let what = format!("{what}, sequence {sequence}, length {}", naive.len());
            assert_close(&out[first * width..][..n * width], &expected, &what);
            assert_eq!(self.cache.len(*sequence, 0).expect("there"), naive.len(), "{what}");
            first += n;
        }
    }
}
