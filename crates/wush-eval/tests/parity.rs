//! The evaluation's cache, which takes a sequence whole, against the runtime's, which takes it chunk by chunk into pages:
//! the same codes bit for bit, and the same outputs up to the order of f32 sums.

use std::path::Path;

use wush_eval::Protocol;
use wush_eval::cache::{LayerCache, QuantizedCache, Side};
use wush_format::tensor_file::TensorFile;
use wush_model::attention::{AttentionProduct, Place};
use wush_model::backend::Backend;
use wush_model::cpu::{Cpu, Rows};
use wush_model::spec::{
    Activation, AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec, Projection, QkNorm, TensorSlice,
};
use wush_quant::{Codec, Feedback, Method, Quantizer, Role, ScaleDtype};
use wush_runtime::{CacheConfig, Chunk, KvCache, LayerConfig, Part, Precision};

/// Unit roundoff of f32.
const U: f64 = f32::EPSILON as f64 / 2.0;
/// Roundings are taken as independent, so their sizes add up in square; a sum of such is off by more than λ times that but
/// once in 1500 (λ = 4: 2 exp(−λ²/2)), and the sizes below are the largest of each case, met by few outputs.
const LAMBDA: f64 = 4.0;
/// Scale and zero point are factored out of the runtime's sums, whose terms `q c` and `q z` are then larger than `q k̂`.
const FACTORED: f64 = 4.0;

/// Uniform in ±1, with an outlier now and then as keys have.
struct Numbers(u64);

impl Numbers {
    fn take(&mut self, n: usize) -> Vec<f32> {
        let mut below = |n: u64| {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) % n
        };
        let mut next = || {
            let x = below(1 << 20) as f32 / (1 << 19) as f32 - 1.0;
            if below(40) == 0 { 4.0 * x } else { x }
        };
        (0..n).map(|_| next()).collect()
    }

    fn rows(&mut self, n_rows: usize, width: usize) -> Rows {
        Rows { n_rows, width, data: self.take(n_rows * width) }
    }

    /// Matrices `[n, d, d]` whose rows have a norm of about 1.
    fn matrices(&mut self, n: usize, d: usize) -> Vec<f32> {
        self.take(n * d * d).iter().map(|x| x * (1.5 / d as f32).sqrt()).collect()
    }

    /// Unit lower triangular matrices `[n, d, d]`.
    fn triangular(&mut self, n: usize, d: usize) -> Vec<f32> {
        let mut matrices = self.matrices(n, d);
        for (at, x) in matrices.iter_mut().enumerate() {
            let (row, column) = (at / d % d, at % d);
            *x = if row == column {
                1.0
            } else if row > column {
                *x * 0.5
            } else {
                0.0
            };
        }
        matrices
    }
}

/// What is put before the quantizer.
#[derive(Debug, Clone, Copy, Default)]
struct Options {
    transform: bool,
    mean: bool,
    feedback: bool,
}

#[derive(Debug, Clone, Copy)]
struct Case {
    n_heads: usize,
    n_kv_heads: usize,
    dim: usize,
    sliding_window: Option<usize>,
    softcap: Option<f32>,
    bits: [u8; 2],
    quantizers: [&'static str; 2],
    options: Options,
    protocol: Protocol,
    n_tokens: usize,
}

impl Case {
    const BASE: Self = Self {
        n_heads: 4,
        n_kv_heads: 2,
        dim: 32,
        sliding_window: None,
        softcap: None,
        bits: [2, 2],
        quantizers: ["quest", "oscar"],
        options: Options { transform: true, mean: true, feedback: false },
        protocol: Protocol::PAPER,
        n_tokens: 333,
    };

    fn quantizer(&self, role: Role) -> Quantizer {
        let side = if role == Role::Key { 0 } else { 1 };
        let method: Method = self.quantizers[side].parse().expect("a quantizer");
        let bits = self.bits[side].try_into().expect("bits");
        method.quantizer(bits, role, ScaleDtype::Bf16).expect("in range")
    }

    /// How one side is cached, and its feedback matrices as the runtime takes them.
    fn side(&self, role: Role, numbers: &mut Numbers) -> (Side, Option<Vec<f32>>) {
        let (n, d) = (self.n_kv_heads, self.dim);
        let identity = || (0..n * d * d).map(|at| if at / d % d == at % d { 1.0 } else { 0.0 }).collect::<Vec<f32>>();
        let mut matrices = || if self.options.transform { numbers.matrices(n, d) } else { identity() };
        let (transform, reader) = (matrices(), matrices());
        let mean = (self.options.mean && role == Role::Key).then(|| numbers.take(n * d));
        let lower = self.options.feedback.then(|| numbers.triangular(n, d));
        let of_heads = |lower: &Vec<f32>| lower.chunks_exact(d * d).map(|l| Feedback::new(d, l).expect("L")).collect();
        let feedback = lower.as_ref().map(of_heads);
        let codec = Codec::new(d, self.quantizer(role)).expect("a head dimension");
        (Side { transform, reader, mean, codec, feedback }, lower)
    }

    fn spec(&self) -> ModelSpec {
        let (n_heads, n_kv_heads, head_dim) = (self.n_heads, self.n_kv_heads, self.dim);
        let projection = || Projection { weight: TensorSlice::matrix("", 1, 1), bias: None };
        let norm = NormSpec { weight: TensorSlice::vector("", 1), eps: 1e-6, plus_one: false };
        let attn = AttentionSpec {
            n_heads,
            n_kv_heads,
            head_dim,
            q: projection(),
            k: projection(),
            v: projection(),
            o: projection(),
            q_norm: QkNorm::None,
            k_norm: QkNorm::None,
            rope: None,
            window: self.sliding_window,
            scale: (head_dim as f32).sqrt().recip(),
            logit_softcap: self.softcap,
        };
        let mlp = MlpSpec { gate: projection(), up: projection(), down: projection(), activation: Activation::Silu };
        let layer =
            LayerSpec { attn_pre_norm: None, attn, attn_post_norm: None, mlp_pre_norm: None, mlp, mlp_post_norm: None };
        ModelSpec {
            family: "test",
            hidden_size: 1,
            vocab_size: 1,
            max_position_embeddings: self.n_tokens,
            embedding: TensorSlice::matrix("", 1, 1),
            embedding_scale: 1.0,
            final_norm: norm,
            lm_head: TensorSlice::matrix("", 1, 1),
            final_logit_softcap: None,
            layers: vec![layer],
        }
    }

    /// The runtime's cache with the same quantizers, and pages whose borders are not the windows'.
    fn runtime(&self, feedback: [Option<Vec<f32>>; 2]) -> KvCache {
        let layer = LayerConfig {
            sliding_window: self.sliding_window,
            softcap: self.softcap,
            ..LayerConfig::new(self.n_heads, self.n_kv_heads, self.dim)
        };
        let [keys, values] = [Role::Key, Role::Value].map(|role| Precision::Packed(self.quantizer(role)));
        let base = CacheConfig::new(vec![layer.stored(keys, values)]);
        let windows = self.protocol.windows();
        let mut cache = KvCache::new(CacheConfig { windows, page_tokens: 24, ..base }).expect("a configuration");
        cache.set_feedback(0, feedback[0].as_deref(), feedback[1].as_deref()).expect("triangular");
        cache
    }

    /// Both ways over the same random queries, keys and values.
    fn check(&self, seed: u64) {
        let numbers = &mut Numbers(2 * seed + 1);
        let ((keys, key_feedback), (values, value_feedback)) =
            (self.side(Role::Key, numbers), self.side(Role::Value, numbers));
        let spec = self.spec();
        let shape = spec.layers[0].attn.shape();
        let (n, d) = (self.n_tokens, self.dim);
        let q = numbers.rows(n, self.n_heads * d);
        let [k, v] = [0, 1].map(|_| numbers.rows(n, self.n_kv_heads * d));
        let reader = |side: &Side| Cpu.head_matrices(self.n_kv_heads, d, &side.reader).expect("the CPU does not fail");
        let readers = [&keys, &values].map(reader);
        let amplified = largest_norm(&values.reader, d);
        let layers = vec![LayerCache { keys: Some(keys), values: Some(values) }];
        let whole = QuantizedCache::new(&spec, layers, self.protocol, &Cpu).expect("the model's shapes");
        let out = whole.attend(&Cpu, Place { layer: 0, sequence: 0 }, [&q, &k, &v], &shape).expect("finite");

        let everything = self.protocol.sink.min(n)..n;
        let cached_keys = whole.keys(0, &k, everything.clone()).expect("finite").expect("keys are cached");
        let cached_values = whole.values(0, &v, everything).expect("finite").expect("values are cached");
        let queries = Cpu.transform_heads(&q, &readers[0], d).expect("the CPU does not fail");
        let mut paged = self.runtime([key_feedback, value_feedback]);
        let read = run(&mut paged, self.protocol, [&queries, &cached_keys.exact, &cached_values.exact]);
        let expected = Cpu.transform_heads(&read, &readers[1], d).expect("the CPU does not fail");

        if self.sliding_window.is_none() {
            self.same_codes(&paged, [&cached_keys.quantized, &cached_values.quantized]);
        }
        let keys = largest_norm(&cached_keys.exact.data, d).max(largest_norm(&cached_keys.quantized.data, d));
        let held = cached_values.quantized.data.iter().chain(&cached_values.exact.data);
        let largest = held.fold(0.0, |most, x| f64::from(x.abs()).max(most));
        // d products, of a size of ‖q‖‖k‖ / √d each, give a logit that is off by δ; its weight by a factor of 1 ± 2δ; an output
        // by 2δ of the largest value and by the rounding of a sum of n terms; and what undoes T_V makes that ‖row of T_V⁻¹‖
        // times as much.
        let delta = FACTORED * LAMBDA * U * f64::from(shape.scale) * largest_norm(&queries.data, d) * keys;
        let sum = FACTORED * LAMBDA * U * ((n + d) as f64).sqrt();
        let tol = (2.0 * delta + sum) * largest * amplified;
        for (at, (found, expected)) in out.data.iter().zip(&expected.data).enumerate() {
            let diff = f64::from((found - expected).abs());
            assert!(diff <= tol, "{self:?}: token {}, {found} for {expected}, tolerance {tol}", at / out.width);
        }
    }

    /// What the runtime's pages hold reads as the evaluation's rows do, bit for bit.
    fn same_codes(&self, paged: &KvCache, rows: [&Rows; 2]) {
        let sequence = paged.sequences().next().expect("one sequence");
        let quantized = paged.quantized(sequence, 0).expect("one layer");
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("cache.safetensors");
        paged.save(sequence, &path).expect("saved");
        for (role, rows) in [(Role::Key, rows[0]), (Role::Value, rows[1])] {
            if quantized.is_empty() {
                continue;
            }
            let codec = Codec::new(self.dim, self.quantizer(role)).expect("a head dimension");
            let packed = packed(&path, role);
            let of_head = quantized.len() * codec.layout().n_bytes();
            assert_eq!(packed.len(), of_head * self.n_kv_heads, "{self:?}");
            let mut read = vec![0.0; quantized.len() * self.dim];
            for (head, packed) in packed.chunks_exact(of_head).enumerate() {
                codec.unpack(packed, &mut read).expect("whole records");
                for (position, found) in quantized.clone().zip(read.chunks_exact(self.dim)) {
                    let expected = &rows.slice(position..position + 1)[head * self.dim..][..self.dim];
                    assert!(bits(found).eq(bits(expected)), "{self:?}: {role:?}, head {head}, position {position}");
                }
            }
        }
    }
}

fn bits(x: &[f32]) -> impl Iterator<Item = u32> + '_ {
    x.iter().map(|x| x.to_bits())
}

/// All packed records of a saved cache, `[n_kv, tokens, n_bytes]`.
fn packed(path: &Path, role: Role) -> Vec<u8> {
    let file = TensorFile::open(path).expect("a cache's file");
    let name = if role == Role::Key { "keys" } else { "values" };
    file.tensor(&format!("layers.0.page_{name}")).expect("pages").bytes.to_vec()
}

/// Algorithm 2 through the runtime: every chunk a step.
fn run(cache: &mut KvCache, protocol: Protocol, [queries, keys, values]: [&Rows; 3]) -> Rows {
    let sequence = cache.add();
    let mut out = Rows::zeros(queries.n_rows, queries.width);
    for chunk in protocol.chunks(queries.n_rows) {
        let held = cache.quantized(sequence, 0).expect("one layer");
        assert_eq!(held.is_empty(), chunk.quantized.is_empty(), "before {:?}", chunk.queries);
        assert!(held.is_empty() || held == chunk.quantized, "{held:?} before {:?}", chunk.queries);
        let of = |x: &Rows| x.slice(chunk.queries.clone()).to_vec();
        let (queries, keys, values) = (of(queries), of(keys), of(values));
        let step = Chunk { queries: &queries, keys: &keys, values: &values };
        let into = &mut out.data[chunk.queries.start * out.width..chunk.queries.end * out.width];
        cache.step(0, &[Part { sequence, n_tokens: chunk.queries.len() }], step, into).expect("accepted");
    }
    out
}

/// Largest 2-norm of a row of `[rows, d]`.
fn largest_norm(rows: &[f32], d: usize) -> f64 {
    let norm = |row: &[f32]| row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    rows.chunks_exact(d).map(norm).fold(0.0, f64::max)
}

#[test]
fn every_bit_width_and_quantizer_agrees() {
    let mut seed = 0;
    for bits in [2, 3, 4, 8] {
        for quantizers in [["quest", "quest"], ["oscar", "oscar"], ["oscar-linear", "quest:1.8"]] {
            for feedback in [false, true] {
                seed += 1;
                let options = Options { feedback, ..Case::BASE.options };
                Case { bits: [bits, bits], quantizers, options, ..Case::BASE }.check(seed);
            }
        }
    }
    Case { bits: [2, 8], ..Case::BASE }.check(100);
}

#[test]
fn every_group_size_and_head_dimension_agrees() {
    let shapes = [(1, 1, 64), (2, 2, 16), (6, 2, 48), (3, 1, 128), (8, 2, 80), (5, 1, 33), (12, 1, 64), (7, 1, 256)];
    for (seed, (n_heads, n_kv_heads, dim)) in (200..).zip(shapes) {
        Case { n_heads, n_kv_heads, dim, n_tokens: 250, ..Case::BASE }.check(seed);
    }
}

#[test]
fn every_choice_before_the_quantizer_agrees() {
    for choice in 0..8 {
        let options = Options { transform: choice & 1 > 0, mean: choice & 2 > 0, feedback: choice & 4 > 0 };
        Case { options, ..Case::BASE }.check(300 + choice);
    }
}

#[test]
fn every_chunk_window_and_length_agrees() {
    let cases = [
        ([16, 16, 128, 16], 161),
        ([16, 16, 128, 16], 512),
        ([1, 4, 20, 3], 130),
        ([7, 3, 30, 5], 211),
        ([100, 0, 0, 1], 333),
        ([64, 64, 256, 8], 500),
        ([97, 5, 1, 11], 300),
    ];
    for (seed, ([chunk, sink, keep, flush], n_tokens)) in (400..).zip(cases) {
        Case { protocol: Protocol { chunk, sink, keep, flush }, n_tokens, ..Case::BASE }.check(seed);
    }
}

/// The evaluation leaves such sequences as they are; the cases above use matrices that do not undo each other.
#[test]
fn sequences_that_stay_exact_agree() {
    let options = Options { transform: false, ..Case::BASE.options };
    for (seed, [chunk, sink, keep, flush]) in (600..).zip([[400, 16, 16, 16], [16, 1000, 128, 16], [16, 16, 128, 400]])
    {
        Case { options, protocol: Protocol { chunk, sink, keep, flush }, n_tokens: 300, ..Case::BASE }.check(seed);
    }
}

#[test]
fn sliding_windows_and_softcaps_agree() {
    for (seed, (sliding_window, softcap)) in (500..).zip([(Some(64), None), (Some(150), Some(20.0)), (None, Some(5.0))])
    {
        Case { sliding_window, softcap, ..Case::BASE }.check(seed);
    }
}
