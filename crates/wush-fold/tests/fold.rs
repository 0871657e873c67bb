//! Folding as its callers see it: files in, files out.

mod support;

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use support::{Layout, Rng, Tiny, decode, matmul, max_rel_diff, model_hash, read, rel_diff};
use tempfile::TempDir;
use wush_checkpoint::Checkpoint;
use wush_fold::{FoldDtype, FoldError, FoldOutcome, UnfoldDtype, fold, unfold};
use wush_format::bundle::{ValueLayer, ValueSidecar};
use wush_format::hash::hash_file;
use wush_format::monitor::{Monitor, Quiet};
use wush_format::transforms::Transforms;
use wush_model::arch::resolve;

/// Largest relative error of a stored 2-byte or 4-byte fold's product W_O'W_V', u·√2·√d at most: the roundings of the two
/// factors are independent, and the transforms of these tests have condition numbers below ten, which the last factor covers.
fn product_tolerance(dtype: &str) -> f64 {
    let unit_roundoff = match dtype {
        "BF16" => 1.0 / 256.0,
        "F16" => 1.0 / 2048.0,
        "F32" => f64::from(f32::EPSILON) / 2.0,
        _ => f64::EPSILON / 2.0,
    };
    unit_roundoff * 2f64.sqrt() * 10.0
}

fn fold_into(source: &Path, out: &Path, transforms: &Transforms, dtype: FoldDtype) -> Result<FoldOutcome, FoldError> {
    let checkpoint = Checkpoint::open(source).expect("the source opens");
    let spec = resolve(&checkpoint, None).expect("the source is understood");
    fs::create_dir_all(out).expect("temporary directory");
    fold(&checkpoint, &spec, transforms, out, dtype, &Quiet)
}

/// Values of head `kv`: `[d, hidden]`, bias `[d]`; output blocks of its group, `[hidden, d]` each.
struct Head {
    value: Vec<f64>,
    bias: Option<Vec<f64>>,
    outputs: Vec<Vec<f64>>,
}

fn head(tiny: &Tiny, dir: &Path, layer: usize, kv: usize) -> Head {
    let (d, h, q) = (tiny.head_dim, tiny.hidden, tiny.n_heads * tiny.head_dim);
    let name = |part: &str| format!("model.layers.{layer}.self_attn.{part}");
    let (values, offset) = match tiny.layout {
        Layout::Phi3 => (read(dir, &name("qkv_proj.weight")), q + tiny.n_kv_heads * d),
        _ => (read(dir, &name("v_proj.weight")), 0),
    };
    let bias = matches!(tiny.layout, Layout::LlamaBias | Layout::Qwen2).then(|| read(dir, &name("v_proj.bias")));
    let output = read(dir, &name("o_proj.weight"));
    let group = tiny.n_heads / tiny.n_kv_heads;
    let block = |n: usize| output.chunks(q).flat_map(|row| row[n * d..(n + 1) * d].to_vec()).collect();
    Head {
        value: values[(offset + kv * d) * h..][..d * h].to_vec(),
        bias: bias.map(|bias| bias[kv * d..(kv + 1) * d].to_vec()),
        outputs: (kv * group..(kv + 1) * group).map(block).collect(),
    }
}

/// W_O W_V of every query head of the group, one after the other.
fn products(tiny: &Tiny, head: &Head) -> Vec<f64> {
    let (d, h) = (tiny.head_dim, tiny.hidden);
    head.outputs.iter().flat_map(|output| matmul(output, &head.value, h, d, h)).collect()
}

fn bias_products(tiny: &Tiny, head: &Head) -> Option<Vec<f64>> {
    let bias = head.bias.as_ref()?;
    Some(head.outputs.iter().flat_map(|output| matmul(output, bias, tiny.hidden, tiny.head_dim, 1)).collect())
}

fn layouts() -> impl Strategy<Value = Tiny> {
    let heads = prop_oneof![Just((4, 2)), Just((3, 1)), Just((2, 2)), Just((6, 2)), Just((1, 1))];
    let layout = prop_oneof![Just(Layout::Llama), Just(Layout::LlamaBias), Just(Layout::Qwen2), Just(Layout::Phi3)];
    let dtype = prop_oneof![Just("BF16"), Just("F16"), Just("F32")];
    (heads, layout, dtype, 1..4_usize, prop_oneof![Just(4), Just(6), Just(12)], any::<u64>()).prop_map(
        |((n_heads, n_kv_heads), layout, dtype, n_shards, head_dim, seed)| Tiny {
            n_heads,
            n_kv_heads,
            head_dim,
            layout,
            dtype,
            n_shards,
            seed,
            ..Tiny::default()
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn folding_keeps_the_function_and_reports_its_error(tiny in layouts(), wide in any::<bool>()) {
        let root = TempDir::new().expect("temporary directory");
        let (source, out) = (root.path().join("source"), root.path().join("out"));
        tiny.write(&source);
        let dtype = if wide { FoldDtype::F32 } else { FoldDtype::Keep };
        let outcome = fold_into(&source, &out, &tiny.transforms(&source), dtype).expect("it folds");
        let tolerance = product_tolerance(if wide { "F32" } else { tiny.dtype });
        prop_assert_eq!(outcome.report.heads.len(), tiny.n_layers * tiny.n_kv_heads);
        for entry in &outcome.report.heads {
            let (before, after) = (head(&tiny, &source, entry.layer, entry.head), head(&tiny, &out, entry.layer, entry.head));
            let error = rel_diff(&products(&tiny, &after), &products(&tiny, &before));
            prop_assert!(error <= tolerance, "{error:e} > {tolerance:e}");
            // The report is exact, not an estimate: what the naive products give, up to their own cancellation.
            prop_assert!((entry.rel_error - error).abs() <= 1e-6 * error + 1e-14, "{} {error}", entry.rel_error);
            prop_assert!(entry.rel_error <= outcome.report.max_rel_error);
            prop_assert!(entry.inverse_error <= 1e-13);
            match (bias_products(&tiny, &after), bias_products(&tiny, &before), entry.bias_rel_error) {
                (Some(after), Some(before), Some(reported)) => {
                    let error = rel_diff(&after, &before);
                    prop_assert!((reported - error).abs() <= 1e-6 * error + 1e-14);
                }
                (None, None, None) => {}
                _ => prop_assert!(false, "a bias is there or not, in all three"),
            }
        }
    }

    #[test]
    fn unfolding_gives_the_original_back_within_rounding(tiny in layouts(), wide in any::<bool>()) {
        let root = TempDir::new().expect("temporary directory");
        let [source, folded, back] = ["source", "folded", "back"].map(|name| root.path().join(name));
        tiny.write(&source);
        let transforms = tiny.transforms(&source);
        let dtype = if wide { FoldDtype::F32 } else { FoldDtype::Keep };
        let outcome = fold_into(&source, &folded, &transforms, dtype).expect("it folds");
        let narrow = |values: &[f64]| values.iter().map(|&x| x as f32).collect();
        let layers = transforms.layers.iter().map(|(&layer, transforms)| (layer, ValueLayer {
            n_kv_heads: tiny.n_kv_heads, head_dim: tiny.head_dim, value: narrow(&transforms.value.data),
        }));
        let sidecar = ValueSidecar { layers: layers.collect(), model_hash: outcome.folded_hash };
        let bundle = Checkpoint::open(&folded).expect("it opens");
        let spec = resolve(&bundle, None).expect("it is understood");
        fs::create_dir_all(&back).expect("temporary directory");
        let undone = unfold(&bundle, &spec, &sidecar, &back, UnfoldDtype::Original, &Quiet).expect("it unfolds");
        prop_assert_eq!(undone.model_hash, outcome.folded_hash);
        let restored = Checkpoint::open(&back).expect("it opens");
        for (name, shape, _) in tiny.tensors() {
            let (a, b) = (read(&back, &name), read(&source, &name));
            prop_assert!(rel_diff(&a, &b) <= product_tolerance(tiny.dtype), "{name} {shape:?}");
            let dtype = restored.tensor(&name).expect("the tensor").dtype;
            prop_assert_eq!(format!("{dtype:?}"), tiny.dtype);
        }
    }
}

#[test]
fn everything_else_is_copied_byte_for_byte_and_every_digest_is_right() {
    for (layout, n_shards) in [(Layout::Llama, 1), (Layout::LlamaBias, 3), (Layout::Phi3, 2)] {
        let tiny = Tiny { layout, n_shards, ..Tiny::default() };
        let root = TempDir::new().expect("temporary directory");
        let (source, out) = (root.path().join("source"), root.path().join("out"));
        tiny.write(&source);
        let outcome = fold_into(&source, &out, &tiny.transforms(&source), FoldDtype::Keep).expect("it folds");
        for (dir, files) in [(&source, &outcome.source_files), (&out, &outcome.files)] {
            for file in files {
                let (sha256, n_bytes) = hash_file(&dir.join(&file.path)).expect("it is there");
                assert_eq!((sha256, n_bytes), (file.sha256, file.n_bytes), "{}", file.path);
            }
            assert!(files.is_sorted_by(|a, b| a.path < b.path));
            assert_eq!(files.len(), n_shards + 3 + usize::from(n_shards > 1));
        }
        assert_eq!((outcome.model_hash, outcome.folded_hash), (model_hash(&source), model_hash(&out)));
        let (before, after) = (Checkpoint::open(&source).expect("opens"), Checkpoint::open(&out).expect("opens"));
        for (a, b) in before.shards().iter().zip(after.shards()) {
            assert_eq!((&a.file_name, a.file.header_bytes()), (&b.file_name, b.file.header_bytes()));
        }
        for name in before.tensor_names() {
            let (a, b) = (before.tensor(name).expect("there").bytes, after.tensor(name).expect("there").bytes);
            let folded = ["v_proj.weight", "v_proj.bias", "o_proj.weight", "qkv_proj.weight"]
                .iter()
                .any(|end| name.ends_with(end));
            assert_eq!(a != b, folded, "{name}");
        }
    }
}

#[test]
fn fold_dtype_f32_widens_the_folded_tensors_and_nothing_else() {
    for layout in [Layout::LlamaBias, Layout::Phi3] {
        let tiny = Tiny { layout, n_shards: 2, ..Tiny::default() };
        let root = TempDir::new().expect("temporary directory");
        let (source, out) = (root.path().join("source"), root.path().join("out"));
        tiny.write(&source);
        fold_into(&source, &out, &tiny.transforms(&source), FoldDtype::F32).expect("it folds");
        let (before, after) = (Checkpoint::open(&source).expect("opens"), Checkpoint::open(&out).expect("opens"));
        let mut growth = 0;
        for (name, shape, _) in tiny.tensors() {
            let (a, b) = (before.tensor(&name).expect("there"), after.tensor(&name).expect("there"));
            let folded = ["v_proj.weight", "v_proj.bias", "o_proj.weight", "qkv_proj.weight"]
                .iter()
                .any(|end| name.ends_with(end));
            assert_eq!(before.locate(&name).expect("there").0, after.locate(&name).expect("there").0);
            assert_eq!((a.shape, b.shape), (&shape[..], &shape[..]));
            if folded {
                assert_eq!(format!("{:?}", b.dtype), "F32");
                growth += b.bytes.len() - a.bytes.len();
            } else {
                assert_eq!((a.dtype, a.bytes), (b.dtype, b.bytes), "{name}");
            }
        }
        if layout == Layout::Phi3 {
            // Rows of the fused tensor that are not values are the same numbers in a wider type.
            let name = "model.layers.0.self_attn.qkv_proj.weight";
            let n = (tiny.n_heads + tiny.n_kv_heads) * tiny.head_dim * tiny.hidden;
            let (a, b) = (read(&source, name), read(&out, name));
            assert_eq!(a[..n], b[..n]);
            assert!(a[n..] != b[n..]);
        }
        let index = |dir: &Path| fs::read_to_string(dir.join("model.safetensors.index.json")).expect("readable");
        let total = |text: &str| {
            serde_json::from_str::<serde_json::Value>(text).expect("JSON")["metadata"]["total_size"].as_u64()
        };
        let (old, new) = (total(&index(&source)).expect("a number"), total(&index(&out)).expect("a number"));
        assert_eq!(new, old + growth as u64);
        assert_eq!(index(&out), index(&source).replace(&old.to_string(), &new.to_string()));
        for (a, b) in before.shards().iter().zip(after.shards()) {
            assert_eq!(a.file.metadata(), b.file.metadata());
            let keys = |header: &[u8]| {
                let text = String::from_utf8(header[8..].to_vec()).expect("UTF-8");
                let mut keys: Vec<_> = tiny
                    .tensors()
                    .into_iter()
                    .filter_map(|(name, ..)| Some((text.find(&format!("\"{name}\""))?, name)))
                    .collect();
                keys.push((text.find("__metadata__").expect("there"), String::new()));
                keys.sort();
                keys.into_iter().map(|(_, name)| name).collect::<Vec<_>>()
            };
            assert_eq!(keys(a.file.header_bytes()), keys(b.file.header_bytes()));
        }
    }
}

#[test]
fn the_same_bytes_whatever_the_thread_count() {
    let tiny = Tiny { n_heads: 6, n_kv_heads: 2, head_dim: 16, hidden: 300, ..Tiny::default() };
    let root = TempDir::new().expect("temporary directory");
    let source = root.path().join("source");
    tiny.write(&source);
    let transforms = tiny.transforms(&source);
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
        let out = root.path().join(format!("out{threads}"));
        pool.install(|| fold_into(&source, &out, &transforms, FoldDtype::Keep).expect("it folds"))
    };
    let first = run(1);
    assert_eq!(first, run(3));
    assert_eq!(first, run(4));
}

#[test]
fn the_folding_oracle_is_met() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/oracle");
    let file = wush_format::tensor_file::TensorFile::open(&dir.join("folding.safetensors")).expect("the oracle");
    let cases: serde_json::Value =
        serde_json::from_slice(&fs::read(dir.join("folding.json")).expect("the oracle")).expect("JSON");
    for case in cases.as_array().expect("a list") {
        let number = |key: &str| case[key].as_u64().expect("a number") as usize;
        let name = case["name"].as_str().expect("a name");
        let layout = match (number("v_bias"), number("o_bias")) {
            (0, 0) => Layout::Llama,
            (1, 1) => Layout::LlamaBias,
            _ => Layout::Qwen2,
        };
        let tiny = Tiny {
            n_layers: 1,
            n_heads: number("n_q"),
            n_kv_heads: number("n_kv"),
            head_dim: number("d"),
            hidden: number("d_model"),
            dtype: "F64",
            layout,
            ..Tiny::default()
        };
        check_oracle_case(&file, name, &tiny, &case["tau"]);
    }
}

/// Relative limit of the oracle's comparisons: the reference's own two builds differ by 1e-11 on T; T is given here, and
/// what remains are products of length d and one inverse of condition below 1e3.
const ORACLE_TOL: f64 = 1e-12;

fn check_oracle_case(file: &wush_format::tensor_file::TensorFile, case: &str, tiny: &Tiny, tau: &serde_json::Value) {
    let oracle = |name: &str| file.tensor(&format!("{case}.{name}")).ok().map(|view| decode("F64", view.bytes));
    let root = TempDir::new().expect("temporary directory");
    let [source, out, shape] = ["source", "out", "shape"].map(|name| root.path().join(name));
    let mut tensors = tiny.tensors();
    for (name, _, values) in &mut tensors {
        let part = name.rsplit("self_attn.").next().unwrap_or_default();
        match oracle(part) {
            Some(found) => *values = found,
            None if part.ends_with(".bias") => values.fill(0.0),
            None => {}
        }
    }
    tiny.write_tensors(&source, &tensors);
    let mut transforms = tiny.transforms(&source);
    transforms.layers.get_mut(&0).expect("one layer").value.data = oracle("TV").expect("in the oracle");
    // The forward reads no F64, so the spec is that of the same checkpoint in F32.
    Tiny { dtype: "F32", ..tiny.clone() }.write(&shape);
    let spec = resolve(&Checkpoint::open(&shape).expect("opens"), None).expect("understood");
    fs::create_dir_all(&out).expect("temporary directory");
    let checkpoint = Checkpoint::open(&source).expect("opens");
    let outcome = fold(&checkpoint, &spec, &transforms, &out, FoldDtype::Keep, &Quiet).expect("it folds");
    assert!(
        outcome.report.max_rel_error <= ORACLE_TOL
            && outcome.report.heads.iter().all(|head| head.inverse_error <= ORACLE_TOL)
    );
    for name in ["v_proj.weight", "v_proj.bias", "o_proj.weight"] {
        if let Some(expected) = oracle(&format!("{name}.folded")) {
            let found = read(&out, &format!("model.layers.0.self_attn.{name}"));
            let diff = max_rel_diff(&found, &expected);
            assert!(diff <= ORACLE_TOL, "{case} {name}: {diff:e}");
        }
    }
    let tau = tau.as_f64().expect("a number");
    for (dir, label) in [(&source, "original"), (&out, "folded")] {
        let y = attention(tiny, dir, &|name| oracle(name), tau);
        let diff = max_rel_diff(&y, &oracle("Y").expect("in the oracle"));
        assert!(diff <= 10.0 * ORACLE_TOL, "{case} {label} Y: {diff:e}");
    }
}

/// The oracle's module in f64: headwise norms without eps, RoPE at base 1e4, causal softmax over tau.
fn attention(tiny: &Tiny, dir: &Path, oracle: &dyn Fn(&str) -> Option<Vec<f64>>, tau: f64) -> Vec<f64> {
    let (d, h) = (tiny.head_dim, tiny.hidden);
    let x = oracle("X").expect("in the oracle");
    let n_tokens = x.len() / h;
    // y = W x + b for every row of `input`, `[tokens, width]`.
    let project = |part: &str, input: &[f64], width: usize| -> Vec<f64> {
        let weight = read(dir, &format!("model.layers.0.self_attn.{part}.weight"));
        let biased = tiny.layout == Layout::LlamaBias || tiny.layout == Layout::Qwen2 && part != "o_proj";
        let rows = weight.len() / width;
        let bias = if biased { read(dir, &format!("model.layers.0.self_attn.{part}.bias")) } else { vec![0.0; rows] };
        let mut out = Vec::new();
        for token in input.chunks(width) {
            let dot = |row: &[f64]| row.iter().zip(token).map(|(w, x)| w * x).sum::<f64>();
            out.extend(weight.chunks(width).zip(&bias).map(|(row, bias)| dot(row) + bias));
        }
        out
    };
    let normed = |mut states: Vec<f64>, gain: &[f64], heads: usize| {
        for (position, token) in states.chunks_mut(heads * d).enumerate() {
            for head in token.chunks_mut(d) {
                let rms = (head.iter().map(|x| x * x).sum::<f64>() / d as f64).sqrt();
                head.iter_mut().zip(gain).for_each(|(x, gain)| *x *= gain / rms);
                for i in 0..d / 2 {
                    let angle = position as f64 * 1e4f64.powf(-2.0 * i as f64 / d as f64);
                    let (a, b) = (head[i], head[i + d / 2]);
                    head[i] = a * angle.cos() - b * angle.sin();
                    head[i + d / 2] = a * angle.sin() + b * angle.cos();
                }
            }
        }
        states
    };
    let (n_q, n_kv) = (tiny.n_heads, tiny.n_kv_heads);
    let q = normed(project("q_proj", &x, h), &oracle("q_norm").expect("in the oracle"), n_q);
    let k = normed(project("k_proj", &x, h), &oracle("k_norm").expect("in the oracle"), n_kv);
    let v = project("v_proj", &x, h);
    let mut mixed = vec![0.0; n_tokens * n_q * d];
    for t in 0..n_tokens {
        for head in 0..n_q {
            let kv = head / (n_q / n_kv);
            let query = &q[(t * n_q + head) * d..][..d];
            let score = |s: usize| {
                (k[(s * n_kv + kv) * d..][..d].iter().zip(query).map(|(k, q)| k * q).sum::<f64>() / tau).exp()
            };
            let weights: Vec<f64> = (0..=t).map(score).collect();
            let total: f64 = weights.iter().sum();
            for (s, weight) in weights.iter().enumerate() {
                for i in 0..d {
                    mixed[(t * n_q + head) * d + i] += weight / total * v[(s * n_kv + kv) * d + i];
                }
            }
        }
    }
    project("o_proj", &mixed, n_q * d)
}

fn expect_error(change: impl FnOnce(&mut Transforms), expected: &str) {
    let tiny = Tiny::default();
    let root = TempDir::new().expect("temporary directory");
    let (source, out) = (root.path().join("source"), root.path().join("out"));
    tiny.write(&source);
    let mut transforms = tiny.transforms(&source);
    change(&mut transforms);
    let error = fold_into(&source, &out, &transforms, FoldDtype::Keep).expect_err("it must be refused");
    assert!(error.to_string().contains(expected), "{error}");
    let wrong_model = matches!(error, FoldError::WrongModel { .. });
    let is_empty = fs::read_dir(&out).expect("directory").next().is_none();
    assert!(is_empty || wrong_model, "only the hash needs the whole pass");
}

#[test]
fn transforms_that_do_not_fit_are_refused() {
    let value =
        |t: &mut Transforms| t.layers.get_mut(&1).map(|layer| std::mem::take(&mut layer.value.data)).expect("layer 1");
    expect_error(
        |t| t.layers.get_mut(&1).expect("layer 1").value.data[70] = f64::NAN,
        "layer 1, KV head 1: the value transform has a non-finite entry",
    );
    expect_error(
        |t| {
            let data = &mut t.layers.get_mut(&1).expect("layer 1").value.data;
            data.copy_within(64..72, 72);
        },
        "layer 1, KV head 1: the value transform cannot be inverted",
    );
    expect_error(
        |t| {
            let data = value(t);
            let layer = t.layers.get_mut(&1).expect("layer 1");
            layer.value = wush_format::transforms::HeadMatrices { n_heads: 8, dim: 4, data };
        },
        "layer 1: value transforms: expected shape [2, 8, 8], found [8, 4, 4]",
    );
    expect_error(|t| drop(t.layers.remove(&0)), "layer 0: the model has it, the transforms do not");
    expect_error(|t| drop(t.layers.insert(2, t.layers[&0].clone())), "layer 2: the transforms have it");
    expect_error(|t| t.model_hash = wush_format::hash::Sha([7; 32]), "the transforms belong to model 0707");
}

#[test]
fn what_the_stored_dtype_cannot_hold_is_named() {
    let tiny = Tiny { dtype: "F16", ..Tiny::default() };
    let root = TempDir::new().expect("temporary directory");
    let (source, out) = (root.path().join("source"), root.path().join("out"));
    tiny.write(&source);
    let mut transforms = tiny.transforms(&source);
    transforms.layers.get_mut(&1).expect("layer 1").value.data.iter_mut().for_each(|x| *x *= 1e6);
    let error = fold_into(&source, &out, &transforms, FoldDtype::Keep).expect_err("65504 is F16's largest");
    assert!(error.to_string().starts_with("tensor model.layers.1.self_attn.v_proj.weight: folding gives"), "{error}");
    assert!(error.hint().is_some_and(|hint| hint.contains("--fold-dtype f32")));
    fs::remove_dir_all(&out).expect("remove");
    fold_into(&source, &out, &transforms, FoldDtype::F32).expect("F32 holds it");
}

#[test]
fn a_bundle_is_not_folded_again_and_shared_tensors_are_refused() {
    let tiny = Tiny::default();
    let root = TempDir::new().expect("temporary directory");
    let (source, out) = (root.path().join("source"), root.path().join("out"));
    tiny.write(&source);
    let transforms = tiny.transforms(&source);
    let checkpoint = Checkpoint::open(&source).expect("opens");
    let mut spec = resolve(&checkpoint, None).expect("understood");
    spec.layers[1].attn.v.weight = spec.layers[0].attn.v.weight.clone();
    fs::create_dir_all(&out).expect("directory");
    let error =
        fold(&checkpoint, &spec, &transforms, &out, FoldDtype::Keep, &Quiet).expect_err("two layers, one tensor");
    assert!(matches!(error, FoldError::SharedTensor { .. }), "{error}");
    fs::create_dir(source.join("wush")).expect("directory");
    fs::write(source.join("wush/manifest.json"), "{}").expect("write");
    let error = fold_into(&source, &out, &transforms, FoldDtype::Keep).expect_err("folded already");
    assert!(matches!(error, FoldError::AlreadyFolded { .. }), "{error}");
}

/// Asks to stop after `n` questions.
struct StopAfter(std::sync::atomic::AtomicUsize);

impl Monitor for StopAfter {
    fn begin(&self, _: &str, _: &'static str, _: u64) {}
    fn advance(&self, _: u64) {}
    fn end(&self) {}
    fn note(&self, _: &str) {}
    fn interrupted(&self) -> bool {
        use std::sync::atomic::Ordering::Relaxed;
        self.0.fetch_update(Relaxed, Relaxed, |left| Some(left.saturating_sub(1))) == Ok(0)
    }
}

#[test]
fn an_interrupted_fold_says_so() {
    let tiny = Tiny { n_shards: 3, ..Tiny::default() };
    let root = TempDir::new().expect("temporary directory");
    let source = root.path().join("source");
    tiny.write(&source);
    let checkpoint = Checkpoint::open(&source).expect("opens");
    let spec = resolve(&checkpoint, None).expect("understood");
    let mut rng = Rng(3);
    for round in 0..8 {
        let out = root.path().join(format!("out{round}"));
        fs::create_dir_all(&out).expect("directory");
        let monitor = StopAfter(((rng.bits() % 12) as usize).into());
        let error = fold(&checkpoint, &spec, &tiny.transforms(&source), &out, FoldDtype::Keep, &monitor);
        assert!(matches!(error, Err(FoldError::Interrupted)), "{error:?}");
    }
}
