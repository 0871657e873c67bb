//! Small checkpoints in temporary directories, written by hand so that key order and padding are those of the test.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use half::{bf16, f16};
use serde_json::{Value, json};
use wush_format::hash::{Sha, hash_file};
use wush_format::manifest::{FileEntry, Solve};
use wush_format::transforms::{HeadMatrices, LayerTransforms, Transforms};

/// A deterministic stream of numbers (splitmix64).
pub struct Rng(pub u64);

impl Rng {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Standard normal, by the sum of twelve uniforms.
    pub fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.unit()).sum::<f64>() - 6.0
    }

    pub fn normals(&mut self, n: usize, scale: f64) -> Vec<f64> {
        (0..n).map(|_| self.normal() * scale).collect()
    }
}

/// Shape and layout of a test checkpoint.
#[derive(Debug, Clone)]
pub struct Tiny {
    pub n_layers: usize,
    pub n_heads: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
    pub hidden: usize,
    /// "BF16", "F16", "F32" or "F64".
    pub dtype: &'static str,
    pub layout: Layout,
    pub n_shards: usize,
    pub seed: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Llama without biases.
    Llama,
    /// Llama with biases on q, k, v and o.
    LlamaBias,
    /// Qwen2: biases on q, k and v.
    Qwen2,
    /// Phi-3: fused qkv.
    Phi3,
}

impl Default for Tiny {
    fn default() -> Self {
        Self {
            n_layers: 2,
            n_heads: 4,
            n_kv_heads: 2,
            head_dim: 8,
            hidden: 24,
            dtype: "BF16",
            layout: Layout::Llama,
            n_shards: 1,
            seed: 1,
        }
    }
}

pub type Named = Vec<(String, Vec<usize>, Vec<f64>)>;

const VOCAB: usize = 11;
const INTERMEDIATE: usize = 12;

impl Tiny {
    pub fn config(&self) -> Value {
        let (model_type, class) = match self.layout {
            Layout::Llama | Layout::LlamaBias => ("llama", "LlamaForCausalLM"),
            Layout::Qwen2 => ("qwen2", "Qwen2ForCausalLM"),
            Layout::Phi3 => ("phi3", "Phi3ForCausalLM"),
        };
        json!({
            "architectures": [class],
            "model_type": model_type,
            "attention_bias": self.layout == Layout::LlamaBias,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "head_dim": self.head_dim,
            "intermediate_size": INTERMEDIATE,
            "max_position_embeddings": 128,
            "num_attention_heads": self.n_heads,
            "num_hidden_layers": self.n_layers,
            "num_key_value_heads": self.n_kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": true,
            "vocab_size": VOCAB,
        })
    }

    /// Every tensor with random values, in the order of the data section.
    pub fn tensors(&self) -> Named {
        let mut rng = Rng(self.seed);
        let (q, kv, h) = (self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim, self.hidden);
        let mut out: Named = Vec::new();
        let mut add = |name: String, shape: &[usize]| {
            let n = shape.iter().product();
            out.push((name, shape.to_vec(), rng.normals(n, 0.3)));
        };
        add("model.embed_tokens.weight".into(), &[VOCAB, h]);
        for layer in 0..self.n_layers {
            let mut put = |name: &str, shape: &[usize]| add(format!("model.layers.{layer}.{name}"), shape);
            put("self_attn.o_proj.weight", &[h, q]);
            if self.layout == Layout::Phi3 {
                put("self_attn.qkv_proj.weight", &[q + 2 * kv, h]);
                put("mlp.gate_up_proj.weight", &[2 * INTERMEDIATE, h]);
            } else {
                put("self_attn.q_proj.weight", &[q, h]);
                put("self_attn.v_proj.weight", &[kv, h]);
                put("self_attn.k_proj.weight", &[kv, h]);
                put("mlp.gate_proj.weight", &[INTERMEDIATE, h]);
                put("mlp.up_proj.weight", &[INTERMEDIATE, h]);
            }
            if matches!(self.layout, Layout::LlamaBias | Layout::Qwen2) {
                put("self_attn.v_proj.bias", &[kv]);
                put("self_attn.q_proj.bias", &[q]);
                put("self_attn.k_proj.bias", &[kv]);
            }
            if self.layout == Layout::LlamaBias {
                put("self_attn.o_proj.bias", &[h]);
            }
            put("mlp.down_proj.weight", &[h, INTERMEDIATE]);
            put("input_layernorm.weight", &[h]);
            put("post_attention_layernorm.weight", &[h]);
        }
        add("model.norm.weight".into(), &[h]);
        out
    }

    /// Writes the checkpoint with random values.
    pub fn write(&self, dir: &Path) {
        self.write_tensors(dir, &self.tensors());
    }

    /// Writes the checkpoint with these values. Tensors go to the shards in turn, so roles and layers are torn apart.
    pub fn write_tensors(&self, dir: &Path, tensors: &Named) {
        fs::create_dir_all(dir).expect("temporary directory");
        fs::write(dir.join("config.json"), serde_json::to_string_pretty(&self.config()).expect("JSON")).expect("write");
        fs::write(dir.join("LICENSE"), "A licence.\n").expect("write");
        fs::create_dir_all(dir.join("extra")).expect("directory");
        fs::write(dir.join("extra/notes.bin"), [0_u8, 255, 10, 13]).expect("write");
        let name = |shard| {
            if self.n_shards == 1 {
                "model.safetensors".to_owned()
            } else {
                format!("model-{:05}-of-{:05}.safetensors", shard + 1, self.n_shards)
            }
        };
        let mut shards: Vec<Named> = vec![Vec::new(); self.n_shards];
        let mut map = BTreeMap::new();
        for (i, tensor) in tensors.iter().enumerate() {
            map.insert(tensor.0.clone(), name(i % self.n_shards));
            shards[i % self.n_shards].push(tensor.clone());
        }
        for (i, shard) in shards.iter().enumerate() {
            fs::write(dir.join(name(i)), safetensors_bytes(shard, self.dtype)).expect("write");
        }
        if self.n_shards > 1 {
            let total: usize = tensors.iter().map(|(_, _, values)| values.len() * size_of_dtype(self.dtype)).sum();
            let index = format!(
                "{{\n  \"metadata\": {{ \"total_size\": {total} }},\n  \"weight_map\": {}\n}}\n",
                serde_json::to_string_pretty(&map).expect("JSON")
            );
            fs::write(dir.join("model.safetensors.index.json"), index).expect("write");
        }
    }

    /// Random, well-conditioned value and key transforms for the checkpoint in `dir`.
    pub fn transforms(&self, dir: &Path) -> Transforms {
        let mut rng = Rng(self.seed ^ 0xabcd);
        let mut matrices = || HeadMatrices {
            n_heads: self.n_kv_heads,
            dim: self.head_dim,
            data: (0..self.n_kv_heads).flat_map(|_| well_conditioned(&mut rng, self.head_dim)).collect(),
        };
        let layers = (0..self.n_layers).map(|layer| (layer, LayerTransforms::new(matrices(), matrices()))).collect();
        Transforms {
            layers,
            model_hash: model_hash(dir),
            solve: Solve::as_published("wush"),
            calibration: None,
            report: Vec::new(),
        }
    }
}

/// A diagonally dominant matrix times row scales between 1/2 and 2.
pub fn well_conditioned(rng: &mut Rng, dim: usize) -> Vec<f64> {
    let mut out = rng.normals(dim * dim, 0.5 / (dim as f64).sqrt());
    for row in 0..dim {
        out[row * dim + row] += 1.5;
        let scale = 2f64.powf(rng.unit() * 2.0 - 1.0);
        out[row * dim..(row + 1) * dim].iter_mut().for_each(|x| *x *= scale);
    }
    out
}

/// The model hash of a checkpoint directory.
pub fn model_hash(dir: &Path) -> Sha {
    let mut shards: Vec<FileEntry> = fs::read_dir(dir)
        .expect("directory")
        .map(|entry| entry.expect("entry").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"))
        .map(|path| {
            let (sha256, n_bytes) = hash_file(&path).expect("readable");
            FileEntry { path: path.file_name().expect("name").to_string_lossy().into_owned(), n_bytes, sha256 }
        })
        .collect();
    shards.sort_by(|a, b| a.path.cmp(&b.path));
    wush_checkpoint::weights_hash(&shards)
}

pub fn size_of_dtype(dtype: &str) -> usize {
    match dtype {
        "F64" => 8,
        "F32" => 4,
        _ => 2,
    }
}

pub fn encode(dtype: &str, values: &[f64]) -> Vec<u8> {
    match dtype {
        "BF16" => values.iter().flat_map(|&x| bf16::from_f64(x).to_le_bytes()).collect(),
        "F16" => values.iter().flat_map(|&x| f16::from_f64(x).to_le_bytes()).collect(),
        "F32" => values.iter().flat_map(|&x| (x as f32).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|&x| x.to_le_bytes()).collect(),
    }
}

pub fn decode(dtype: &str, bytes: &[u8]) -> Vec<f64> {
    match dtype {
        "BF16" => bytes.as_chunks::<2>().0.iter().map(|&raw| f64::from(bf16::from_le_bytes(raw))).collect(),
        "F16" => bytes.as_chunks::<2>().0.iter().map(|&raw| f64::from(f16::from_le_bytes(raw))).collect(),
        "F32" => bytes.as_chunks::<4>().0.iter().map(|&raw| f64::from(f32::from_le_bytes(raw))).collect(),
        _ => bytes.as_chunks::<8>().0.iter().map(|&raw| f64::from_le_bytes(raw)).collect(),
    }
}

/// A safetensors file whose metadata stands in the middle of the header and whose JSON is padded.
pub fn safetensors_bytes(tensors: &Named, dtype: &str) -> Vec<u8> {
    let mut entries = Vec::new();
    let mut data = Vec::new();
    for (name, shape, values) in tensors {
        let begin = data.len();
        data.extend(encode(dtype, values));
        entries.push(format!(
            "\"{name}\": {{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[{begin},{}]}}",
            data.len()
        ));
    }
    entries.insert(entries.len() / 2, "\"__metadata__\":{\"format\":\"pt\",\"a\":\"é\"}".to_owned());
    let mut json = format!("{{{}}}", entries.join(", ")).into_bytes();
    json.resize(json.len().next_multiple_of(8) + 8, b' ');
    [(json.len() as u64).to_le_bytes().to_vec(), json, data].concat()
}

/// Reads a tensor as f64.
pub fn read(dir: &Path, name: &str) -> Vec<f64> {
    let checkpoint = wush_checkpoint::Checkpoint::open(dir).expect("a checkpoint");
    let view = checkpoint.tensor(name).expect("the tensor");
    decode(&format!("{:?}", view.dtype), view.bytes)
}

/// Row-major product `[m, k] · [k, n]`.
pub fn matmul(a: &[f64], b: &[f64], m: usize, k: usize, n: usize) -> Vec<f64> {
    let mut out = vec![0.0; m * n];
    for i in 0..m {
        for l in 0..k {
            for j in 0..n {
                out[i * n + j] += a[i * k + l] * b[l * n + j];
            }
        }
    }
    out
}

/// ‖a − b‖ / ‖b‖.
pub fn rel_diff(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(x, y)| x - y)) / norm(&mut b.iter().copied())
}

/// Largest |a − b| over largest |b|.
pub fn max_rel_diff(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let scale = b.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
    a.iter().zip(b).map(|(x, y)| (x - y).abs() / scale).fold(0.0, |m, x| if x <= m { m } else { x })
}
