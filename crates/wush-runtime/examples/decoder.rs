//! A decoder that runs over the cache: how a server would use this crate, in one file.
//!
//! ```text
//! cargo run --release -p wush-runtime --example decoder [DIR [PROMPT]]
//! ```
//!
//! `DIR` is a Qwen3 checkpoint or a bundle made of one (the demo model unless given). The prompt is continued twice, with the
//! cache unquantized and at 2 bits. The decoder is as plain as can be: what matters is in `Decoder::attention`.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use tokenizers::Tokenizer;
use wush_format::bundle::WUSH_DIR;
use wush_format::tensor_file::{Dtype, TensorFile};
use wush_quant::{Method, Role, ScaleDtype};
use wush_runtime::{CacheConfig, Chunk, KeyTransforms, KvCache, LayerConfig, Part, Precision, SequenceId, Windows};

/// Tokens that are generated.
const N_NEW: usize = 80;
const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/demo-model");
/// A text that the demo model has not seen; its first tokens are the prompt.
const PROMPT: &str = include_str!("../../../tests/fixtures/demo-model/heldout.txt");
/// Tokens of it.
const PROMPT_TOKENS: usize = 600;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().unwrap_or_else(|| DEMO.to_owned());
    let given = args.next();
    let dir = Path::new(&dir);
    let tokenizer = Tokenizer::from_file(dir.join("tokenizer.json")).map_err(anyhow::Error::from_boxed)?;
    // A bundle has key transforms; its value transforms are in its weights already.
    let is_bundle = dir.join(WUSH_DIR).is_dir();
    let transforms = is_bundle.then(|| KeyTransforms::of_bundle(dir)).transpose()?;
    let decoder = Decoder::load(dir, transforms)?;
    let encoded = tokenizer.encode(given.as_deref().unwrap_or(PROMPT), false).map_err(anyhow::Error::from_boxed)?;
    let mut prompt = encoded.get_ids().to_vec();
    if given.is_none() {
        prompt.truncate(PROMPT_TOKENS);
    }
    ensure!(!prompt.is_empty(), "the prompt is empty");
    let keys = if decoder.transforms.is_some() { "transformed" } else { "as they are" };
    println!("{} tokens of prompt, keys {keys}", prompt.len());
    for bits in [16, 2] {
        let mut cache = decoder.cache(bits)?;
        let start = Instant::now();
        let text = generate(&decoder, &mut cache, &prompt)?;
        let rate = N_NEW as f64 / start.elapsed().as_secs_f64();
        println!(
            "\n{bits} bits, {} bytes of cache, {rate:.0} tokens/s:\n{}",
            cache.memory().total(),
            tokenizer.decode(&text, false).map_err(anyhow::Error::from_boxed)?
        );
    }
    Ok(())
}

/// The most likely continuation.
fn generate(decoder: &Decoder, cache: &mut KvCache, prompt: &[u32]) -> Result<Vec<u32>> {
    let sequence = cache.add();
    let mut logits = decoder.forward(cache, sequence, prompt)?;
    let mut text = Vec::new();
    while text.len() < N_NEW {
        let largest = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).context("an empty vocabulary")?;
        let token = u32::try_from(largest.0)?;
        text.push(token);
        logits = decoder.forward(cache, sequence, &[token])?;
    }
    Ok(text)
}

struct Decoder {
    dir: PathBuf,
    config: serde_json::Value,
    embedding: Vec<f32>,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    transforms: Option<KeyTransforms>,
}

struct Layer {
    input_norm: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    o: Vec<f32>,
    q_norm: Vec<f32>,
    k_norm: Vec<f32>,
    mlp_norm: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    down: Vec<f32>,
}

impl Decoder {
    fn load(dir: &Path, transforms: Option<KeyTransforms>) -> Result<Self> {
        let config: serde_json::Value = serde_json::from_slice(&std::fs::read(dir.join("config.json"))?)?;
        let weights = TensorFile::open(&dir.join("model.safetensors"))?;
        ensure!(config["model_type"] == "qwen3", "this example knows Qwen3, and no other family");
        let tensor = |name: &str| read(&weights, name);
        let layer = |i: usize| {
            let of = |name: &str| read(&weights, &format!("model.layers.{i}.{name}.weight"));
            anyhow::Ok(Layer {
                input_norm: of("input_layernorm")?,
                q: of("self_attn.q_proj")?,
                k: of("self_attn.k_proj")?,
                v: of("self_attn.v_proj")?,
                o: of("self_attn.o_proj")?,
                q_norm: of("self_attn.q_norm")?,
                k_norm: of("self_attn.k_norm")?,
                mlp_norm: of("post_attention_layernorm")?,
                gate: of("mlp.gate_proj")?,
                up: of("mlp.up_proj")?,
                down: of("mlp.down_proj")?,
            })
        };
        let n_layers = size(&config, "num_hidden_layers")?;
        let layers = (0..n_layers).map(layer).collect::<Result<_>>()?;
        let (embedding, norm) = (tensor("model.embed_tokens.weight")?, tensor("model.norm.weight")?);
        Ok(Self { dir: dir.to_owned(), embedding, layers, norm, transforms, config })
    }

    /// An empty cache of this model, with the windows of the paper's perplexity study.
    fn cache(&self, bits: u8) -> Result<KvCache> {
        // A bundle has error feedback or not, and each has its quantizer.
        let method = Method::for_encoder(self.dir.join("wush/value_feedback.safetensors").exists());
        let stored = |role| Precision::new(bits, &method, role, ScaleDtype::Bf16);
        let layer = LayerConfig::new(
            size(&self.config, "num_attention_heads")?,
            size(&self.config, "num_key_value_heads")?,
            size(&self.config, "head_dim")?,
        );
        let layer = layer.stored(stored(Role::Key)?, stored(Role::Value)?);
        let config = CacheConfig { windows: Windows::STUDY, ..CacheConfig::new(vec![layer; self.layers.len()]) };
        if self.transforms.is_none() {
            return Ok(KvCache::new(config)?);
        }
        // With what the encoder may use to lose less; reading is the same.
        Ok(KvCache::of_bundle(config, &self.dir)?.0)
    }

    /// Logits after the last of `tokens`, which follow what the cache holds of the sequence.
    fn forward(&self, cache: &mut KvCache, sequence: SequenceId, tokens: &[u32]) -> Result<Vec<f32>> {
        let hidden = self.norm.len();
        let mut x: Vec<f32> =
            tokens.iter().flat_map(|&id| &self.embedding[id as usize * hidden..][..hidden]).copied().collect();
        for (id, layer) in self.layers.iter().enumerate() {
            let attended = self.attention(cache, (id, layer), sequence, &norm(&x, &layer.input_norm))?;
            add(&mut x, &linear(&attended, &layer.o, hidden));
            let normed = norm(&x, &layer.mlp_norm);
            let width = layer.gate.len() / hidden;
            let (mut gate, up) = (linear(&normed, &layer.gate, width), linear(&normed, &layer.up, width));
            gate.iter_mut().zip(up).for_each(|(g, u)| *g = *g / (1.0 + (-*g).exp()) * u);
            add(&mut x, &linear(&gate, &layer.down, hidden));
        }
        let last = norm(&x[x.len() - hidden..], &self.norm);
        Ok(linear(&last, &self.embedding, self.embedding.len() / hidden))
    }

    /// Where the cache comes in: queries, keys and values of the new tokens, norm and RoPE as in the model, then the key
    /// transforms and one call.
    fn attention(
        &self,
        cache: &mut KvCache,
        (id, layer): (usize, &Layer),
        sequence: SequenceId,
        x: &[f32],
    ) -> Result<Vec<f32>> {
        let LayerConfig { n_heads, n_kv_heads, head_dim, .. } = cache.config().layers[id];
        let n_tokens = x.len() / self.norm.len();
        let mut queries = norm(&linear(x, &layer.q, n_heads * head_dim), &layer.q_norm);
        let mut keys = norm(&linear(x, &layer.k, n_kv_heads * head_dim), &layer.k_norm);
        let values = linear(x, &layer.v, n_kv_heads * head_dim);

        let first = cache.len(sequence, id)?;
        let theta = self.config["rope_theta"].as_f64().context("rope_theta")?;
        rope(&mut queries, (n_heads, head_dim), first, theta);
        rope(&mut keys, (n_kv_heads, head_dim), first, theta);

        if let Some(transforms) = &self.transforms {
            transforms.transform_queries(id, n_heads, &mut queries)?;
            transforms.transform_keys(id, &mut keys)?;
        }
        let mut out = vec![0.0; queries.len()];
        let chunk = Chunk { queries: &queries, keys: &keys, values: &values };
        cache.step(id, &[Part { sequence, n_tokens }], chunk, &mut out)?;
        Ok(out)
    }
}

fn size(config: &serde_json::Value, key: &str) -> Result<usize> {
    Ok(usize::try_from(config[key].as_u64().with_context(|| format!("config.json: {key}"))?)?)
}

fn read(weights: &TensorFile, name: &str) -> Result<Vec<f32>> {
    let view = weights.tensor(name)?;
    match view.dtype {
        Dtype::F32 => Ok(view.bytes.as_chunks().0.iter().map(|&x| f32::from_le_bytes(x)).collect()),
        Dtype::BF16 => {
            let wide = |&[low, high]: &[u8; 2]| f32::from_le_bytes([0, 0, low, high]);
            Ok(view.bytes.as_chunks().0.iter().map(wide).collect())
        }
        other => anyhow::bail!("{name}: {other} is not read here"),
    }
}

/// `[rows, n_out]` from `x` `[rows, n_in]` and `weight` `[n_out, n_in]`.
fn linear(x: &[f32], weight: &[f32], n_out: usize) -> Vec<f32> {
    let n_in = weight.len() / n_out;
    let product = |row: &[f32], weight: &[f32]| {
        let mut sums = [0.0f32; 16];
        for (a, b) in row.chunks(16).zip(weight.chunks(16)) {
            sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
        }
        sums.iter().sum::<f32>()
    };
    x.chunks_exact(n_in).flat_map(|row| weight.chunks_exact(n_in).map(move |weight| product(row, weight))).collect()
}

/// RMS norm of every `weight.len()` numbers.
fn norm(x: &[f32], weight: &[f32]) -> Vec<f32> {
    let mut out = Vec::with_capacity(x.len());
    for row in x.chunks_exact(weight.len()) {
        let mean_square = row.iter().map(|x| x * x).sum::<f32>() / row.len() as f32;
        let scale = 1.0 / (mean_square + 1e-6).sqrt();
        out.extend(row.iter().zip(weight).map(|(x, w)| x * scale * w));
    }
    out
}

fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

/// Rotates pairs (i, i + d/2) of every head; the first token stands at position `first`.
fn rope(x: &mut [f32], (n_heads, d): (usize, usize), first: usize, theta: f64) {
    for (token, heads) in x.chunks_exact_mut(n_heads * d).enumerate() {
        for head in heads.chunks_exact_mut(d) {
            let (a, b) = head.split_at_mut(d / 2);
            for (i, (a, b)) in a.iter_mut().zip(b).enumerate() {
                let angle = (first + token) as f64 * theta.powf(-2.0 * i as f64 / d as f64);
                let (sin, cos) = (angle.sin() as f32, angle.cos() as f32);
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
    }
}
