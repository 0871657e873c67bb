//! Compares the CPU forward with reference numbers of a real checkpoint: `goldens MODEL GOLDEN.safetensors…`.
//!
//! A golden file holds `input_ids`, `nll`, and for some layers the lower triangles of the Gram matrices of keys, values
//! and queries (`layerN.gram_k`, …) as transformers computes them in float32. Prints the largest differences.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;
use std::time::Instant;

use wush_checkpoint::Checkpoint;
use wush_format::monitor::Quiet;
use wush_format::tensor_file::TensorFile;
use wush_model::attention::Exact;
use wush_model::backend::Backend;
use wush_model::cpu::Cpu;
use wush_model::decoder::Decoder;
use wush_model::observer::{Moments, Observer};
use wush_model::spec::ModelSpec;

struct Grams<'a> {
    spec: &'a ModelSpec,
    sums: BTreeMap<(usize, &'static str), Vec<f64>>,
}

impl<B: Backend> Observer<B> for Grams<'_> {
    type Seen = Moments;

    fn see(
        &self,
        backend: &B,
        layer: usize,
        q: &B::Tensor,
        k: &B::Tensor,
        v: &B::Tensor,
    ) -> wush_model::Result<Moments> {
        let attn = &self.spec.layers[layer].attn;
        Moments::of(backend, attn.n_kv_heads, attn.head_dim, [q, k, v])
    }

    fn add(&mut self, layer: usize, seen: Moments) -> wush_model::Result<()> {
        let named = [("gram_q", seen.query_gram), ("gram_k", seen.key_gram), ("gram_v", seen.value_gram)];
        self.sums.extend(named.map(|(name, gram)| ((layer, name), gram)));
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let checkpoint = Checkpoint::open(Path::new(&args.next().ok_or("usage: goldens MODEL GOLDEN…")?))?;
    let spec = wush_model::arch::resolve(&checkpoint, None)?;
    let decoder = Decoder::new(&checkpoint, &spec, &Cpu);
    for path in args {
        let golden = TensorFile::open(Path::new(&path))?;
        let ids: Vec<u32> = i64s(&golden, "input_ids")?.into_iter().map(|id| id as u32).collect();
        let expected = golden.f32("nll", &[ids.len() - 1])?;
        let start = Instant::now();
        let nll = decoder.nll(&ids, &Exact)?;
        let worst = nll.iter().zip(expected).map(|(a, b)| (a - f64::from(b)).abs()).fold(0.0, f64::max);
        let mut grams = Grams { spec: &spec, sums: BTreeMap::new() };
        decoder.observe(&[ids], &mut grams, &Quiet)?;
        println!("{path}: NLL {worst:.1e}, Gram {:.1e} ({:.1?})", gram_error(&golden, &grams)?, start.elapsed());
    }
    Ok(())
}

/// Largest |Δ_ij| / sqrt(G_ii G_jj) over the golden's layers.
fn gram_error(golden: &TensorFile, grams: &Grams<'_>) -> Result<f64, Box<dyn Error>> {
    let mut worst = 0.0f64;
    for (&(layer, name), sum) in &grams.sums {
        let Some(info) = golden.tensors().get(&format!("layer{layer}.{name}")) else { continue };
        let attn = &grams.spec.layers[layer].attn;
        let (d, packed) = (attn.head_dim, golden.f64(&format!("layer{layer}.{name}"), &info.shape)?);
        for h in 0..attn.n_kv_heads {
            let expected = &packed[h * d * (d + 1) / 2..];
            let diagonal = |i: usize| expected[i * (i + 1) / 2 + i];
            for i in 0..d {
                for j in 0..=i {
                    let diff = (sum[h * d * d + i * d + j] - expected[i * (i + 1) / 2 + j]).abs();
                    let scale = (diagonal(i) * diagonal(j)).sqrt();
                    worst = worst.max(if diff == 0.0 { 0.0 } else { diff / scale });
                }
            }
        }
    }
    Ok(worst)
}

fn i64s(file: &TensorFile, name: &str) -> Result<Vec<i64>, Box<dyn Error>> {
    let view = file.tensor(name)?;
    Ok(view.bytes.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().expect("8 bytes"))).collect())
}
