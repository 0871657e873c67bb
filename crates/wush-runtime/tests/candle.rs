//! The adapter for candle models against attention written with candle's own operations.
#![cfg(feature = "candle")]

use candle_core::{D, DType, Device, Result, Tensor};
use wush_quant::{Method, Role, ScaleDtype};
use wush_runtime::candle::BatchCache;
use wush_runtime::{CacheConfig, KvCache, LayerConfig, Precision, RuntimeError, Windows};

const BATCH: usize = 3;
const HEADS: usize = 6;
const KV_HEADS: usize = 2;
const DIM: usize = 32;

/// An attention layer as candle's models have it: keys and values concatenated, keys repeated, a causal mask.
#[derive(Default)]
struct Plain {
    cached: Option<(Tensor, Tensor)>,
}

impl Plain {
    fn attend(&mut self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let (k, v) = match &self.cached {
            Some((keys, values)) => (Tensor::cat(&[keys, k], 2)?, Tensor::cat(&[values, v], 2)?),
            None => (k.clone(), v.clone()),
        };
        self.cached = Some((k.clone(), v.clone()));
        let (n_new, n_all) = (q.dim(2)?, k.dim(2)?);
        let repeated = |x: &Tensor| {
            let x = x.unsqueeze(2)?.expand((BATCH, KV_HEADS, HEADS / KV_HEADS, n_all, DIM))?.contiguous()?;
            x.reshape((BATCH, HEADS, n_all, DIM))
        };
        let mask =
            (0..n_new * n_all).map(|at| if at % n_all > n_all - n_new + at / n_all { f32::NEG_INFINITY } else { 0.0 });
        let mask = Tensor::from_iter(mask, q.device())?.reshape((n_new, n_all))?;
        let logits = (q.contiguous()?.matmul(&repeated(&k)?.t()?.contiguous()?)? * (DIM as f64).powf(-0.5))?;
        let logits = logits.broadcast_add(&mask)?;
        let weights = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?)?.exp()?;
        weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?.matmul(&repeated(&v)?)
    }
}

fn tensor(heads: usize, n_tokens: usize, seed: usize) -> Tensor {
    let n = BATCH * heads * n_tokens * DIM;
    let values = (0..n).map(|i| ((i * 7919 + seed * 104_729) as f32 * 0.37).sin());
    let flat = Tensor::from_iter(values, &Device::Cpu).expect("made");
    flat.reshape((BATCH, heads, n_tokens, DIM)).expect("made")
}

fn config(bits: u8) -> CacheConfig {
    let method: Method = "oscar".parse().expect("a name");
    let stored = |role| Precision::new(bits, &method, role, ScaleDtype::Bf16).expect("in range");
    let layer = LayerConfig::new(HEADS, KV_HEADS, DIM).stored(stored(Role::Key), stored(Role::Value));
    let windows = Windows { sink: 4, keep: 16, flush: 8 };
    CacheConfig { windows, page_tokens: 16, ..CacheConfig::new(vec![layer]) }
}

/// Largest difference to plain attention over a prompt and some steps.
fn difference(bits: u8) -> f32 {
    let mut cache = BatchCache::new(config(bits), None, BATCH).expect("valid");
    let mut plain = Plain::default();
    let mut worst = 0.0f32;
    for (step, n_tokens) in [60, 1, 1, 20, 1].into_iter().enumerate() {
        let [q, k, v] =
            [(HEADS, 1), (KV_HEADS, 2), (KV_HEADS, 3)].map(|(heads, s)| tensor(heads, n_tokens, 10 * step + s));
        let found = cache.attend(0, &q, &k, &v).expect("valid");
        let expected = plain.attend(&q, &k, &v).expect("valid");
        assert_eq!((found.dims(), found.dtype()), (expected.dims(), DType::F32));
        let diff = (found - expected).expect("alike").abs().expect("f32").flatten_all().expect("f32");
        worst = worst.max(diff.max(0).expect("f32").to_scalar().expect("one"));
    }
    assert_eq!(cache.len(0).expect("there"), 83);
    worst
}

#[test]
fn sixteen_bits_are_candles_own_attention_and_fewer_are_near() {
    /// Logits of 32 products below 1 in f32, weighted sums of 83 values below 1: some ten rounding errors of 2⁻²⁴.
    const PLAIN_TOL: f32 = 3e-6;
    let [exact, eight, two] = [16, 8, 2].map(difference);
    assert!(exact <= PLAIN_TOL, "16 bits: {exact}");
    assert!(eight > exact && eight <= 0.02, "8 bits: {eight}");
    assert!(two > eight && two <= 1.0, "2 bits: {two}");
}

#[test]
fn other_dtypes_come_back_as_they_were_and_tokens_can_be_taken_back() {
    let mut cache = BatchCache::new(config(16), None, BATCH).expect("valid");
    let bf16 = |heads, seed| tensor(heads, 5, seed).to_dtype(DType::BF16).expect("made");
    let out = cache.attend(0, &bf16(HEADS, 1), &bf16(KV_HEADS, 2), &bf16(KV_HEADS, 3)).expect("valid");
    assert_eq!((out.dtype(), out.dims()), (DType::BF16, &[BATCH, HEADS, 5, DIM][..]));
    cache.truncate(2).expect("no sliding window");
    assert_eq!(cache.len(0).expect("there"), 2);
}

/// A cache that was given feedback matrices codes with them: what it holds is the cache below's, and not that of one without.
#[test]
fn a_cache_with_feedback_keeps_it() {
    let lower: Vec<f32> = (0..KV_HEADS * DIM * DIM)
        .map(|at| match (at / DIM % DIM, at % DIM) {
            (row, column) if row == column => 1.0,
            (row, column) if row > column => 0.4,
            _ => 0.0,
        })
        .collect();
    let attended = |feedback: Option<&[f32]>| {
        let mut cache = KvCache::new(config(2)).expect("valid");
        cache.set_feedback(0, feedback, feedback).expect("unit lower triangular");
        let mut cache = BatchCache::over(cache, None, BATCH).expect("valid");
        let outputs = [60, 1].map(|n_tokens| {
            let [q, k, v] =
                [(HEADS, 1), (KV_HEADS, 2), (KV_HEADS, 3)].map(|(heads, seed)| tensor(heads, n_tokens, seed));
            cache.attend(0, &q, &k, &v).expect("valid").flatten_all().expect("made").to_vec1::<f32>().expect("f32")
        });
        outputs.concat()
    };
    let mut plain = BatchCache::new(config(2), None, BATCH).expect("valid");
    let [q, k, v] = [(HEADS, 1), (KV_HEADS, 2), (KV_HEADS, 3)].map(|(heads, seed)| tensor(heads, 60, seed));
    let first = plain.attend(0, &q, &k, &v).expect("valid").flatten_all().expect("made").to_vec1::<f32>().expect("f32");
    let without = attended(None);
    assert_eq!(without[..first.len()], first, "nothing but the cache is another's");
    assert_ne!(attended(Some(&lower)), without);
}

#[test]
fn wrong_shapes_are_named() {
    let mut cache = BatchCache::new(config(2), None, BATCH).expect("valid");
    let (q, kv) = (tensor(HEADS, 2, 1), tensor(KV_HEADS, 2, 2));
    let error = cache.attend(0, &kv, &kv, &kv).expect_err("too few heads");
    let expected =
        "layer 0, queries: expected shape [3, 6, 2, 32] (batch, heads, tokens, head dimension), found [3, 2, 2, 32]";
    assert_eq!(error.to_string(), expected);
    let error = cache.attend(0, &q, &kv, &tensor(KV_HEADS, 3, 1)).expect_err("another length");
    assert!(matches!(error, RuntimeError::Shape { what: "values", .. }), "{error}");
    assert!(matches!(cache.attend(7, &q, &kv, &kv), Err(RuntimeError::NoLayer { layer: 7, last: 0 })));
    let flat = q.flatten_all().expect("made");
    assert!(matches!(cache.attend(0, &flat, &kv, &kv), Err(RuntimeError::Candle(_))));
}
