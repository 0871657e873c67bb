//! A calibration of a model that is only a shape: its weights are drawn on the card, its tokens at random.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::time::Instant;

use half::bf16;
use serde_json::{Value, json};
use wush_checkpoint::Checkpoint;
use wush_format::hash::Sha;
use wush_format::monitor::Quiet;
use wush_model::spec::{LayerSpec, ModelSpec};
use wush_model::{ModelError, Result, arch};
use wush_stats::{STATS_VERSION, Statistics, StatsInfo};

use crate::backend::Gpu;
use crate::bench::LayerShape;
use crate::device::Device;
use crate::forward::Forward;
use crate::plan::{GpuMemory, Work};
use crate::statistics::RunningSums;

/// Sequences that run before the clock does: they bring the weights and compile the kernels.
const WARM_UP: usize = 1;

/// A model's shape.
#[derive(Debug)]
pub struct ModelShape {
    /// As typed.
    pub name: &'static str,
    family: &'static str,
    n_layers: usize,
    hidden: usize,
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    intermediate: usize,
    vocabulary: usize,
    /// Keys that all layers but every sixth read.
    window: Option<usize>,
}

/// Every shape, by name.
pub const SHAPES: &[ModelShape] = &[
    ModelShape {
        name: "gemma3-12b",
        family: "gemma3_text",
        n_layers: 48,
        hidden: 3840,
        n_heads: 16,
        n_kv_heads: 8,
        head_dim: 256,
        intermediate: 15_360,
        vocabulary: 262_208,
        window: Some(1024),
    },
    ModelShape {
        name: "llama3-70b",
        family: "llama",
        n_layers: 80,
        hidden: 8192,
        n_heads: 64,
        n_kv_heads: 8,
        head_dim: 128,
        intermediate: 28_672,
        vocabulary: 128_256,
        window: None,
    },
    ModelShape {
        name: "llama3-8b",
        family: "llama",
        n_layers: 32,
        hidden: 4096,
        n_heads: 32,
        n_kv_heads: 8,
        head_dim: 128,
        intermediate: 14_336,
        vocabulary: 128_256,
        window: None,
    },
    ModelShape {
        name: "qwen3-32b",
        family: "qwen3",
        n_layers: 64,
        hidden: 5120,
        n_heads: 64,
        n_kv_heads: 8,
        head_dim: 128,
        intermediate: 25_600,
        vocabulary: 151_936,
        window: None,
    },
    ModelShape {
        name: "qwen3-8b",
        family: "qwen3",
        n_layers: 36,
        hidden: 4096,
        n_heads: 32,
        n_kv_heads: 8,
        head_dim: 128,
        intermediate: 12_288,
        vocabulary: 151_936,
        window: None,
    },
];

/// How much is calibrated, and in how much memory.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    /// Sequences that are timed.
    pub n_sequences: usize,
    /// Tokens of each.
    pub seq_len: usize,
    /// Bytes of the card that may be taken.
    pub limit: u64,
}

/// What a calibration took.
#[derive(Debug, Clone)]
pub struct Calibration {
    /// Seconds by the host's clock, the device being waited for: of each sequence, or the mean of those that went through a streamed
    /// model together.
    pub sequences: Vec<f64>,
    /// Of all of them together.
    pub total_seconds: f64,
    /// Seconds a sequence by stage, by the device's clock: in a run of its own, or that of a streamed model.
    pub stages: BTreeMap<&'static str, f64>,
    /// Operations of a sequence that are matrix products: of weights, of attention, of Gram matrices; a multiply-add being two.
    pub operations: [f64; 3],
    /// Bytes that were taken from the card at most, and of pinned host memory.
    pub peak: [u64; 2],
}

impl Calibration {
    /// Median of the sequences.
    pub fn seconds(&self) -> f64 {
        let mut sorted = self.sequences.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
    }
}

/// A shape as a checkpoint without weights.
#[derive(Debug)]
pub struct StandIn {
    shape: &'static ModelShape,
    checkpoint: Checkpoint,
    spec: ModelSpec,
}

impl StandIn {
    /// Of `shape`; `folder` is where [`ModelShape::write`] was.
    ///
    /// # Errors
    /// What a checkpoint is refused for.
    pub fn open(shape: &'static ModelShape, folder: &Path) -> Result<Self> {
        let checkpoint = Checkpoint::open(folder)?;
        let spec = arch::resolve(&checkpoint, None)?;
        Ok(Self { shape, checkpoint, spec })
    }

    /// Elements of a token's hidden state.
    pub fn width(&self) -> usize {
        self.spec.hidden_size
    }

    fn work(&self, size: &Size) -> Work<'_> {
        Work { checkpoint: None, spec: &self.spec, n_tokens: size.seq_len, hessians: false }
    }

    /// What its calibration will take of the card.
    ///
    /// # Errors
    /// `DoesNotFit`.
    pub fn memory(&self, size: &Size) -> crate::Result<GpuMemory> {
        GpuMemory::within::<bf16>(&self.work(size), size.limit)
    }

    /// Calibrates on random sequences; `ready` is called before the clock runs.
    ///
    /// # Errors
    /// Those of the forward pass, the device's among them.
    pub fn calibrate(
        &self,
        device: &Device,
        size: &Size,
        memory: &GpuMemory,
        ready: impl FnOnce(),
    ) -> Result<Calibration> {
        let Self { shape, checkpoint, spec } = self;
        let largest = spec.layers.iter().flat_map(LayerSpec::slices).map(|slice| slice.rows.len() * slice.cols).max();
        let loader = |device| Gpu::<bf16>::drawing_on_host(device, largest.unwrap_or(0));
        let forward = Forward::new(Gpu::drawing(device.clone()), loader, (&self.work(size), memory), size.limit)?;
        let decoder = forward.decoder(checkpoint, spec);
        let mut sums = RunningSums::new(device, (checkpoint, spec), &shape.statistics(spec))?;
        let sequences: Vec<Vec<u32>> =
            (0..WARM_UP + size.n_sequences).map(|s| shape.sequence(s, size.seq_len)).collect();
        let (warm_up, timed) = sequences.split_at(WARM_UP);
        let mut observe = |sequences: &[Vec<u32>]| {
            if forward.is_streamed() {
                sums.by_layer(sequences.len())?;
            }
            let start = Instant::now();
            forward.observe(&decoder, sequences, &mut sums, &Quiet)?;
            Ok::<f64, ModelError>(start.elapsed().as_secs_f64())
        };
        observe(warm_up)?;
        ready();
        let n_timed = timed.len() as f64;
        let (sequences, total_seconds, n_profiled) = if forward.is_streamed() {
            forward.gpu().start_profile();
            let total = observe(timed)?;
            (vec![total / n_timed], total, n_timed)
        } else {
            let each = timed.iter().map(|ids| observe(std::slice::from_ref(ids))).collect::<Result<Vec<f64>>>()?;
            forward.gpu().start_profile();
            observe(warm_up)?;
            let total = each.iter().sum();
            (each, total, 1.0)
        };
        let mut stages = forward.gpu().end_profile()?;
        stages.values_mut().for_each(|seconds| *seconds /= n_profiled);
        let operations = operations(spec, size.seq_len);
        Ok(Calibration { sequences, total_seconds, stages, operations, peak: forward.peak() })
    }
}

/// Operations of one sequence: no attention, output or MLP in the last layer, half of all pairs of positions, half of a symmetric
/// matrix.
fn operations(spec: &ModelSpec, n_tokens: usize) -> [f64; 3] {
    let last = spec.layers.len() - 1;
    let mut sums = [0.0; 3];
    for (id, LayerSpec { attn, mlp, .. }) in spec.layers.iter().enumerate() {
        let elements = |p: &wush_model::spec::Projection| p.weight.rows.len() as f64 * p.weight.cols as f64;
        let before: f64 = [&attn.q, &attn.k, &attn.v].into_iter().map(elements).sum();
        let after: f64 = [&attn.o, &mlp.gate, &mlp.up, &mlp.down].into_iter().map(elements).sum();
        let n = n_tokens as f64;
        let window = attn.window.map_or(n, |window| n.min(window as f64));
        let pairs = window * (window + 1.0) / 2.0 + (n - window) * window;
        let (heads, d) = (attn.n_heads as f64, attn.head_dim as f64);
        sums[0] += 2.0 * n * before;
        sums[2] += n * d * d * (heads + 2.0 * attn.n_kv_heads as f64);
        if id != last {
            sums[0] += 2.0 * n * after;
            sums[1] += 4.0 * pairs * d * heads;
        }
    }
    sums
}

impl ModelShape {
    /// The shape of this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        SHAPES.iter().find(|shape| shape.name == name)
    }

    /// Token ids of its vocabulary.
    fn sequence(&self, s: usize, seq_len: usize) -> Vec<u32> {
        let id = |i: usize| ((i * 7919 + i / 7) % self.vocabulary) as u32;
        (0..seq_len).map(|t| id(s * seq_len + t)).collect()
    }

    /// One of its layers.
    pub fn layer(&self) -> LayerShape {
        let Self { hidden, n_heads, n_kv_heads, head_dim, intermediate, .. } = *self;
        LayerShape { hidden, n_heads, n_kv_heads, head_dim, intermediate }
    }

    fn config(&self, seq_len: usize) -> Value {
        let mut config = json!({
            "model_type": self.family,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": seq_len.max(32_768),
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": true,
            "attention_bias": false,
            "torch_dtype": "bfloat16",
        });
        if let Some(window) = self.window {
            config["sliding_window"] = window.into();
            config["sliding_window_pattern"] = 6.into();
            config["hidden_activation"] = "gelu_pytorch_tanh".into();
            config["query_pre_attn_scalar"] = self.head_dim.into();
            config["rope_local_base_freq"] = json!(1e4);
        }
        config
    }

    /// Names and shapes of a checkpoint's tensors.
    fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let (h, d, i) = (self.hidden, self.head_dim, self.intermediate);
        let (q, kv) = (self.n_heads * d, self.n_kv_heads * d);
        let mut all = vec![
            ("model.embed_tokens.weight".to_owned(), vec![self.vocabulary, h]),
            ("model.norm.weight".to_owned(), vec![h]),
        ];
        for layer in 0..self.n_layers {
            let mut add =
                |name: &str, shape: Vec<usize>| all.push((format!("model.layers.{layer}.{name}.weight"), shape));
            add("input_layernorm", vec![h]);
            add("post_attention_layernorm", vec![h]);
            add("self_attn.q_proj", vec![q, h]);
            add("self_attn.k_proj", vec![kv, h]);
            add("self_attn.v_proj", vec![kv, h]);
            add("self_attn.o_proj", vec![h, q]);
            add("mlp.gate_proj", vec![i, h]);
            add("mlp.up_proj", vec![i, h]);
            add("mlp.down_proj", vec![h, i]);
            if self.family != "llama" {
                add("self_attn.q_norm", vec![d]);
                add("self_attn.k_norm", vec![d]);
            }
            if self.window.is_some() {
                add("pre_feedforward_layernorm", vec![h]);
                add("post_feedforward_layernorm", vec![h]);
            }
        }
        all
    }

    /// A configuration, and a file of weights that is all header: the system makes holes of the rest, and nothing reads them.
    ///
    /// # Errors
    /// What cannot be written.
    pub fn write(&self, folder: &Path, seq_len: usize) -> io::Result<()> {
        std::fs::write(folder.join("config.json"), self.config(seq_len).to_string())?;
        let (mut header, mut end) = (serde_json::Map::new(), 0u64);
        for (name, shape) in self.tensors() {
            let n_bytes = shape.iter().product::<usize>() as u64 * size_of::<bf16>() as u64;
            header.insert(name, json!({ "dtype": "BF16", "shape": shape, "data_offsets": [end, end + n_bytes] }));
            end += n_bytes;
        }
        let mut text = Value::Object(header).to_string();
        text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
        let mut file = File::create(folder.join("model.safetensors"))?;
        file.write_all(&(text.len() as u64).to_le_bytes())?;
        file.write_all(text.as_bytes())?;
        file.set_len(8 + text.len() as u64 + end)
    }

    fn statistics(&self, spec: &ModelSpec) -> Statistics {
        let info = StatsInfo {
            format_version: STATS_VERSION,
            tool: String::new(),
            model_id: self.name.to_owned(),
            model_hash: Sha::of(self.name.as_bytes()),
            family: spec.family.to_owned(),
            n_heads: self.n_heads,
            n_kv_heads: self.n_kv_heads,
            head_dim: self.head_dim,
            positions: 0,
            max_seq_len: 0,
            source: String::new(),
            rope_scaling: None,
            shift_invariant: true,
            attention_hessians: false,
            second_pass: false,
            device: "cuda".to_owned(),
            compute: "bf16".to_owned(),
            sequence_hashes: Vec::new(),
        };
        Statistics::new(spec, info)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Placement;

    #[test]
    fn every_shape_is_a_model_that_is_understood() {
        for shape in SHAPES {
            let folder = tempfile::tempdir().expect("a folder");
            shape.write(folder.path(), 32_768).expect("written");
            let checkpoint = Checkpoint::open(folder.path()).expect("a checkpoint");
            let spec = arch::resolve(&checkpoint, None).unwrap_or_else(|e| panic!("{}: {e}", shape.name));
            crate::plan::check(&spec).unwrap_or_else(|e| panic!("{}: {e}", shape.name));
            let windows = spec.layers.iter().filter(|layer| layer.attn.window.is_some()).count();
            assert_eq!(windows > 0, shape.window.is_some(), "{}", shape.name);
        }
    }

    #[test]
    fn the_8b_model_has_the_operations_that_are_documented() {
        let folder = tempfile::tempdir().expect("a folder");
        let shape = ModelShape::named("qwen3-8b").expect("a shape");
        shape.write(folder.path(), 32_768).expect("written");
        let checkpoint = Checkpoint::open(folder.path()).expect("a checkpoint");
        let spec = arch::resolve(&checkpoint, None).expect("understood");
        let [linear, attention, gram] = operations(&spec, 32_768).map(|x| x / 1e12);
        assert!(
            (linear - 444.3).abs() < 0.1 && (attention - 307.9).abs() < 0.1 && (gram - 0.93).abs() < 0.01,
            "{linear} {attention} {gram}"
        );
    }
    #[test]
    fn a_shape_that_does_not_fit_streams_and_one_that_never_does_is_refused() {
        let plan = |name: &str, limit: u64| {
            let folder = tempfile::tempdir().expect("a folder");
            let shape = ModelShape::named(name).expect("a shape");
            shape.write(folder.path(), 32_768).expect("written");
            let model = StandIn::open(shape, folder.path()).expect("understood");
            model.memory(&Size { n_sequences: 1, seq_len: 32_768, limit })
        };
        for (name, gib, expected) in [
            ("qwen3-8b", 20, Placement::Resident),
            ("qwen3-32b", 24, Placement::Streamed),
            ("qwen3-32b", 80, Placement::Resident),
            ("llama3-70b", 48, Placement::Streamed),
        ] {
            let memory = plan(name, gib << 30).expect("a way");
            assert_eq!(memory.placement, expected, "{name} in {gib} GiB");
            assert!(memory.total() <= gib << 30);
        }
        assert!(matches!(plan("qwen3-32b", 1 << 30), Err(crate::GpuError::DoesNotFit { .. })));
    }
}
