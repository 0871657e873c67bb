//! The forward pass against transformers, over tiny models of every family and RoPE scaling (`tests/fixtures/tiny`).

mod common;

use std::path::{Path, PathBuf};

use common::Collector;
use wush_checkpoint::Checkpoint;
use wush_format::monitor::Quiet;
use wush_format::tensor_file::TensorFile;
use wush_model::arch;
use wush_model::attention::Exact;
use wush_model::backend::Backend;
use wush_model::cpu::{Cpu, Rows, Stored};
use wush_model::decoder::Decoder;
use wush_model::resident::Resident;
use wush_model::rope::Span;
use wush_model::spec::ModelSpec;
use wush_model::{ModelError, Result};

/// On `|G_ij - expected| / sqrt(G_ii G_jj)`. Two f32 forwards of these depths and widths differ by some 1e-6: rounding
/// 2^-24 times the square root of the few thousand operations behind one activation.
const GRAM_REL_TOL: f64 = 1e-4;
/// On one token's NLL and on a logit, nats; the same argument over logits of magnitude 10.
const NLL_ABS_TOL: f64 = 1e-4;

/// Variants in the fixtures folder: a lost folder must not pass as a test.
const N_VARIANTS: usize = 21;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tiny")
}

/// One sequence of a golden file.
struct Golden<'a> {
    file: &'a TensorFile,
    sequence: &'a str,
}

impl Golden<'_> {
    fn tensor(&self, name: &str) -> (Vec<usize>, &[u8]) {
        let view = self.file.tensor(&format!("{}.{name}", self.sequence)).expect("in the golden file");
        (view.shape.to_vec(), view.bytes)
    }

    fn ids(&self) -> Vec<u32> {
        let ids = self.tensor("input_ids").1.chunks_exact(8);
        ids.map(|b| i64::from_le_bytes(b.try_into().expect("8 bytes")) as u32).collect()
    }

    fn f64(&self, name: &str) -> Vec<f64> {
        self.tensor(name).1.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().expect("8 bytes"))).collect()
    }

    fn f32(&self, name: &str) -> Vec<f64> {
        let floats = self.tensor(name).1.chunks_exact(4);
        floats.map(|b| f64::from(f32::from_le_bytes(b.try_into().expect("4 bytes")))).collect()
    }
}

/// Largest deviation of a full symmetric Gram from the packed lower triangles, over sqrt(G_ii G_jj).
fn gram_deviation(full: &[f64], packed: &[f64], n_heads: usize, d: usize) -> f64 {
    assert_eq!(packed.len(), n_heads * d * (d + 1) / 2, "golden Gram's size");
    let mut worst = 0.0_f64;
    for (head, triangle) in full.chunks_exact(d * d).zip(packed.chunks_exact(d * (d + 1) / 2)) {
        for i in 0..d {
            for j in 0..=i {
                let scale = (head[i * d + i] * head[j * d + j]).sqrt().max(f64::MIN_POSITIVE);
                let deviation = (head[i * d + j] - triangle[i * (i + 1) / 2 + j]).abs() / scale;
                // A NaN must win.
                worst = if deviation <= worst { worst } else { deviation };
            }
        }
    }
    worst
}

fn worst_difference(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let differences = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, |worst, x| if x <= worst { worst } else { x })
}

fn check_sequence<B: Backend>(
    backend: &B,
    ckpt: &Checkpoint,
    spec: &ModelSpec,
    golden: &Golden<'_>,
) -> std::result::Result<(), ModelError> {
    let decoder = Decoder::new(ckpt, spec, backend);
    let ids = golden.ids();
    let mut collector = Collector::new(spec);
    decoder.observe(std::slice::from_ref(&ids), &mut collector, &Quiet)?;
    let place = format!("{} {}", ckpt.dir().display(), golden.sequence);
    assert!(collector.layers.keys().copied().eq(0..spec.layers.len()), "{place}: every layer is observed");
    for (&layer, seen) in &collector.layers {
        let [seen] = seen.as_slice() else { panic!("{place}: layer {layer} was seen {} times", seen.len()) };
        let attn = &spec.layers[layer].attn;
        let named = [("gram_k", &seen.key_gram), ("gram_q", &seen.query_gram), ("gram_v", &seen.value_gram)];
        for (role, gram) in named {
            let expected = golden.f32(&format!("layers.{layer}.{role}"));
            let deviation = gram_deviation(gram, &expected, attn.n_kv_heads, attn.head_dim);
            assert!(deviation <= GRAM_REL_TOL, "{place}: layer {layer} {role}: off by {deviation:e}");
        }
    }
    let nll = worst_difference(&decoder.nll(&ids, &Exact)?, &golden.f64("nll"));
    assert!(nll <= NLL_ABS_TOL, "{place}: NLL off by {nll:e}");
    let last = decoder.logits(&decoder.hidden(&ids, &Exact)?, ids.len() - 1..ids.len())?;
    let last: Vec<f64> = last.into_iter().map(f64::from).collect();
    let logits = worst_difference(&last, &golden.f32("last_logits"));
    assert!(logits <= NLL_ABS_TOL, "{place}: last logits off by {logits:e}");
    Ok(())
}

/// The same logits when the sequence enters in steps of many, one and a few tokens, over keys and values that are kept.
fn check_resident(ckpt: &Checkpoint, spec: &ModelSpec, golden: &Golden<'_>) -> Result<()> {
    let resident = Resident::load(ckpt, spec, &Stored::BY_SHAPE, &Quiet)?;
    let ids = golden.ids();
    let mut held: Vec<Vec<Rows>> = vec![Vec::new(); spec.layers.len()];
    let (mut first, mut logits) = (0, Vec::new());
    for n_tokens in [ids.len() - 6, 1, 1, 3, 1] {
        let span = Span { first, n_tokens, seq_len: ids.len() };
        let attend = |layer: usize, qkv: [&Rows; 3]| -> Result<Rows> {
            let held = &mut held[layer];
            match held.is_empty() {
                true => held.extend(qkv.map(Rows::clone)),
                false => held.iter_mut().zip(qkv).for_each(|(held, new)| {
                    held.data.extend(&new.data);
                    held.n_rows += new.n_rows;
                }),
            }
            let all = Stored::BY_SHAPE.attention(&held[0], &held[1], &held[2], &spec.layers[layer].attn.shape())?;
            let data = all.slice(first..first + n_tokens).to_vec();
            Ok(Rows { n_rows: n_tokens, width: all.width, data })
        };
        let hidden = resident.step(&Stored::BY_SHAPE, &ids[first..first + n_tokens], &[span], attend)?;
        logits = resident.logits(&hidden, n_tokens - 1..n_tokens)?;
        first += n_tokens;
    }
    let logits: Vec<f64> = logits.into_iter().map(f64::from).collect();
    let worst = worst_difference(&logits, &golden.f32("last_logits"));
    assert!(worst <= NLL_ABS_TOL, "{} {}: logits off by {worst:e}", ckpt.dir().display(), golden.sequence);
    Ok(())
}

#[test]
fn forward_matches_transformers_in_every_family_and_scaling() {
    let mut folders: Vec<PathBuf> = std::fs::read_dir(fixtures())
        .expect("fixtures")
        .map(|entry| entry.expect("entry").path())
        .filter(|path| path.is_dir())
        .collect();
    folders.sort();
    assert_eq!(folders.len(), N_VARIANTS);
    let mut families = std::collections::BTreeSet::new();
    for folder in folders {
        let ckpt = Checkpoint::open(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        let spec = arch::resolve(&ckpt, None).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        families.insert(spec.family);
        let file = TensorFile::open(&folder.join("golden.safetensors")).expect("golden");
        for sequence in ["short", "long"] {
            let golden = Golden { file: &file, sequence };
            for checked in
                [check_sequence(&Cpu, &ckpt, &spec, &golden), check_sequence(&Stored::BY_SHAPE, &ckpt, &spec, &golden)]
            {
                checked.unwrap_or_else(|e| panic!("{} {sequence}: {e}", folder.display()));
            }
            check_resident(&ckpt, &spec, &golden).unwrap_or_else(|e| panic!("{} {sequence}: {e}", folder.display()));
        }
    }
    let missing: Vec<_> = arch::FAMILIES.iter().filter(|family| !families.contains(family.name)).collect();
    assert!(missing.is_empty(), "families without a tiny model: {missing:?}");
}
