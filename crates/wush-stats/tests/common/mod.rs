//! A small model's spec and checkpoint, random activations, and passes over them.

#![allow(dead_code, clippy::allow_attributes, reason = "each test file uses its own part")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use wush_format::hash::Sha;
use wush_format::tensor_file::{NewTensor, TensorFile, write_tensor_file};
use wush_model::cpu::{Cpu, Rows};
use wush_model::observer::Observer;
use wush_model::spec::{
    Activation, AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec, Projection, QkNorm, TensorSlice,
};
use wush_stats::{Accumulator, Result, STATS_VERSION, Statistics, StatsInfo};

/// Shape of one attention layer.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub n_heads: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
}

fn projection(name: String, rows: usize, cols: usize) -> Projection {
    Projection { weight: TensorSlice::matrix(name, rows, cols), bias: None }
}

fn layer(id: usize, shape: Shape, hidden: usize) -> LayerSpec {
    let attn = |role: &str, rows, cols| projection(format!("layers.{id}.{role}"), rows, cols);
    let mlp = |role: &str| projection(format!("layers.{id}.mlp.{role}"), hidden, hidden);
    let Shape { n_heads, n_kv_heads, head_dim } = shape;
    LayerSpec {
        attn_pre_norm: None,
        attn: AttentionSpec {
            n_heads,
            n_kv_heads,
            head_dim,
            q: attn("q", n_heads * head_dim, hidden),
            k: attn("k", n_kv_heads * head_dim, hidden),
            v: attn("v", n_kv_heads * head_dim, hidden),
            o: attn("o", hidden, n_heads * head_dim),
            q_norm: QkNorm::None,
            k_norm: QkNorm::None,
            rope: None,
            window: None,
            scale: 1.0,
            logit_softcap: None,
        },
        attn_post_norm: None,
        mlp_pre_norm: None,
        mlp: MlpSpec { gate: mlp("gate"), up: mlp("up"), down: mlp("down"), activation: Activation::Silu },
        mlp_post_norm: None,
    }
}

/// A model with attention layers of these shapes.
pub fn spec(shapes: &[Shape], hidden: usize) -> ModelSpec {
    let matrix = |name: &str| TensorSlice::matrix(name, 8, hidden);
    ModelSpec {
        family: "llama",
        hidden_size: hidden,
        vocab_size: 8,
        max_position_embeddings: 64,
        embedding: matrix("embedding"),
        embedding_scale: 1.0,
        final_norm: NormSpec { weight: TensorSlice::vector("norm", hidden), eps: 0.0, plus_one: false },
        lm_head: matrix("embedding"),
        final_logit_softcap: None,
        layers: shapes.iter().enumerate().map(|(id, shape)| layer(id, *shape, hidden)).collect(),
    }
}

/// A checkpoint directory with the output projections alone, `[hidden, n_heads d]` f32 each.
pub fn write_checkpoint(dir: &Path, spec: &ModelSpec, weights: &[Vec<f32>]) {
    let tensors: BTreeMap<String, NewTensor> = spec
        .layers
        .iter()
        .zip(weights)
        .map(|(layer, data)| {
            let slice = &layer.attn.o.weight;
            (slice.name.clone(), NewTensor::f32(&[slice.total_rows, slice.cols], data))
        })
        .collect();
    write_tensor_file(&dir.join("model.safetensors"), &tensors, &BTreeMap::new()).expect("writes");
    std::fs::write(dir.join("config.json"), "{}").expect("writes");
}

pub fn info() -> StatsInfo {
    StatsInfo {
        format_version: STATS_VERSION,
        tool: "wush test".into(),
        model_id: "tiny".into(),
        model_hash: Sha::of(b"weights"),
        family: "llama".into(),
        n_heads: 4,
        n_kv_heads: 2,
        head_dim: 4,
        positions: 0,
        max_seq_len: 0,
        source: "text.txt".into(),
        rope_scaling: None,
        shift_invariant: true,
        attention_hessians: false,
        second_pass: false,
        device: "cpu".into(),
        compute: "f32".into(),
        sequence_hashes: vec![],
    }
}

/// A seeded source of numbers in [−1, 1) (SplitMix64).
pub struct Source(pub u64);

impl Source {
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn number(&mut self) -> f32 {
        (self.word() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub fn rows(&mut self, n_rows: usize, width: usize) -> Rows {
        Rows { n_rows, width, data: (0..n_rows * width).map(|_| self.number()).collect() }
    }
}

/// Two layers that differ in heads and dimension, as in hybrid models.
pub const SHAPES: [Shape; 2] =
    [Shape { n_heads: 4, n_kv_heads: 2, head_dim: 4 }, Shape { n_heads: 3, n_kv_heads: 1, head_dim: 6 }];

/// Activations that depend on the token ids and the layer alone.
pub fn qkv(ids: &[u32], layer: usize) -> [Rows; 3] {
    let Shape { n_heads, n_kv_heads, head_dim } = SHAPES[layer];
    let seed = ids.iter().fold(layer as u64, |seed, id| seed.wrapping_mul(31).wrapping_add(u64::from(*id)));
    let mut source = Source(seed);
    [n_heads, n_kv_heads, n_kv_heads].map(|n| source.rows(ids.len(), n * head_dim))
}

/// Sequences of token ids of different lengths.
pub fn sequences(n: usize, seed: u64) -> Vec<Vec<u32>> {
    let mut source = Source(seed);
    (0..n).map(|i| (0..3 + i % 4).map(|_| (source.word() >> 32) as u32).collect()).collect()
}

/// One sequence's activations in one layer, as the decoder shows them.
pub fn show(accumulator: &mut Accumulator<'_>, layer: usize, [q, k, v]: [&Rows; 3]) -> wush_model::Result<()> {
    let seen = accumulator.see(&Cpu, layer, q, k, v)?;
    Observer::<Cpu>::add(accumulator, layer, seen)
}

/// One pass over `sequences`, as the decoder does it: layer by layer, sequences in order.
pub fn observe(statistics: &mut Statistics, sequences: &[Vec<u32>]) -> Result<()> {
    let mut accumulator = Accumulator::new(statistics, sequences);
    for layer in 0..SHAPES.len() {
        for ids in sequences {
            let [q, k, v] = qkv(ids, layer);
            show(&mut accumulator, layer, [&q, &k, &v])?;
        }
    }
    accumulator.finish()
}

/// Statistics of these sequences.
pub fn statistics(sequences: &[Vec<u32>]) -> Statistics {
    let mut statistics = Statistics::new(&spec(&SHAPES, 8), info());
    observe(&mut statistics, sequences).expect("finite activations");
    statistics
}

/// One attention module of the oracle.
pub struct Module {
    pub file: TensorFile,
    pub name: String,
    pub shape: Shape,
    pub hidden: usize,
    pub n_sequences: usize,
    pub seq_len: usize,
    pub tau: f64,
}

impl Module {
    pub fn all() -> Vec<Self> {
        let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/oracle");
        let text = std::fs::read(dir.join("attention.json")).expect("the fixture is there");
        let cases: Vec<serde_json::Value> = serde_json::from_slice(&text).expect("valid JSON");
        let module = |case: &serde_json::Value| {
            let number = |key: &str| case[key].as_u64().expect("a number") as usize;
            Self {
                file: TensorFile::open(&dir.join("attention.safetensors")).expect("valid"),
                name: case["name"].as_str().expect("a name").to_owned(),
                shape: Shape { n_heads: number("n_q"), n_kv_heads: number("n_kv"), head_dim: number("d") },
                hidden: number("d_model"),
                n_sequences: number("sequences"),
                seq_len: number("S"),
                tau: case["tau"].as_f64().expect("a number"),
            }
        };
        cases.iter().map(module).collect()
    }

    pub fn tensor(&self, key: &str, shape: &[usize]) -> Vec<f64> {
        self.file.f64(&format!("{}.{key}", self.name), shape).unwrap_or_else(|e| panic!("{key}: {e}"))
    }
}
