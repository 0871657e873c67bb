//! The forward pass on a GPU against the CPU's, in every family: statistics and log likelihoods, in f32 and in bf16. Skipped,
//! loudly, without a GPU.

mod common;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use common::{random, relative_error};
use half::bf16;
use wush_checkpoint::Checkpoint;
use wush_format::hash::Sha;
use wush_format::monitor::Quiet;
use wush_gpu::Device;
use wush_gpu::backend::{Compute, Gpu};
use wush_gpu::carrier::HostCarrier;
use wush_gpu::forward::Forward;
use wush_gpu::plan::{GpuMemory, Placement, Work};
use wush_gpu::statistics::RunningSums;
use wush_gpu::weighted::WeightedSums;
use wush_model::arch;
use wush_model::attention::Exact;
use wush_model::backend::Backend;
use wush_model::cpu::Cpu;
use wush_model::decoder::Decoder;
use wush_model::observer::{Moments, Observer};
use wush_model::spec::ModelSpec;
use wush_stats::{Accumulator, LayerSums, STATS_VERSION, SecondPass, Statistics, StatsInfo};
use wush_tests::Scratch;

/// f32 against f32: sums in other orders, each of at most 2¹² terms and so within 2¹² · 2⁻²⁴ = 2.4e-4 of the sum of magnitudes at
/// the very worst; errors of random sign stay below half of that, through a few layers, too.
const F32_REL_TOL: f64 = 1e-4;
/// Roundings to bf16 that a layer adds to the residual stream: two of the stream itself, and those of the norms, of queries, keys,
/// values, probabilities, outputs, gates and gated, which reach it as they are or halved.
const ROUNDINGS_PER_LAYER: f64 = 10.0;
/// A rounding to bf16, relative: uniform within half a unit in the last place, 2⁻⁸ at most, in the mean square.
const BF16_ROUNDING: f64 = 1.0 / 256.0 / 1.732;
/// Tokens of a test's sequence: a tile of attention and a part of one.
const N_TOKENS: usize = 193;
/// Mean NLL of a token may move by this share of the activations' error, in nats: logits of these models are a few units.
const NLL_PER_ERROR: f64 = 4.0;

/// What statistics of bf16 activations may be off by, in the Frobenius norm: both factors of a product carry the error of the
/// stream, which is a sum of independent roundings.
fn bf16_tolerance(n_layers: usize) -> f64 {
    2.0 * (ROUNDINGS_PER_LAYER * n_layers as f64).sqrt() * BF16_ROUNDING
}

struct Collector<'a> {
    spec: &'a ModelSpec,
    layers: Vec<Moments>,
}

impl<B: Backend> Observer<B> for Collector<'_> {
    type Seen = Moments;

    fn see(&self, gpu: &B, layer: usize, q: &B::Tensor, k: &B::Tensor, v: &B::Tensor) -> wush_model::Result<Moments> {
        let attn = &self.spec.layers[layer].attn;
        Moments::of(gpu, attn.n_kv_heads, attn.head_dim, [q, k, v])
    }

    fn add(&mut self, layer: usize, seen: Moments) -> wush_model::Result<()> {
        assert_eq!(self.layers.len(), layer, "one sequence, layers in order");
        self.layers.push(seen);
        Ok(())
    }
}

/// One model and a sequence for it.
struct Case {
    name: String,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    ids: Vec<u32>,
}

impl Case {
    fn open(folder: PathBuf) -> Self {
        let checkpoint = Checkpoint::open(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        let spec = arch::resolve(&checkpoint, None).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        let n_tokens = N_TOKENS.min(spec.max_position_embeddings);
        let id = |x: f32| ((f64::from(x) * 0.5 + 0.5) * spec.vocab_size as f64) as u32 % spec.vocab_size as u32;
        let ids = random(7, n_tokens).into_iter().map(id).collect();
        Self { name: folder.file_name().expect("a name").to_string_lossy().into_owned(), checkpoint, spec, ids }
    }

    fn run<B: Backend>(&self, backend: &B) -> (Vec<Moments>, Vec<f64>) {
        let decoder = Decoder::new(&self.checkpoint, &self.spec, backend);
        let mut collector = Collector { spec: &self.spec, layers: Vec::new() };
        let sequences = std::slice::from_ref(&self.ids);
        decoder.observe(sequences, &mut collector, &Quiet).unwrap_or_else(|e| panic!("{}: {e}", self.name));
        let nll = decoder.nll(&self.ids, &Exact).unwrap_or_else(|e| panic!("{}: {e}", self.name));
        (collector.layers, nll)
    }

    fn statistics(&self, attention_hessians: bool) -> Statistics {
        let attn = &self.spec.layers[0].attn;
        let info = StatsInfo {
            format_version: STATS_VERSION,
            tool: "test".into(),
            model_id: self.name.clone(),
            model_hash: Sha::of(b"test"),
            family: self.spec.family.into(),
            n_heads: attn.n_heads,
            n_kv_heads: attn.n_kv_heads,
            head_dim: attn.head_dim,
            positions: 0,
            max_seq_len: 0,
            source: "test".into(),
            rope_scaling: None,
            shift_invariant: self.spec.is_shift_invariant(),
            attention_hessians,
            second_pass: false,
            device: "cuda".into(),
            compute: "bf16".into(),
            sequence_hashes: vec![],
        };
        Statistics::new(&self.spec, info)
    }

    fn check<T: Compute>(&self, gpu: &Gpu<T>, exact: &(Vec<Moments>, Vec<f64>), tol: f64) -> Vec<String> {
        let (moments, nll) = self.run(gpu);
        let mut wrong = Vec::new();
        for (layer, (found, exact)) in moments.iter().zip(&exact.0).enumerate() {
            for (role, found, exact) in [
                ("queries", &found.query_gram, &exact.query_gram),
                ("keys", &found.key_gram, &exact.key_gram),
                ("values", &found.value_gram, &exact.value_gram),
            ] {
                let error = relative_error(found.iter().copied(), exact);
                let line = format!("{} in {}: layer {layer}, {role}: {error:e}", self.name, T::NAME);
                println!("{line}");
                wrong.extend(exceeds(error, tol).then_some(line));
            }
        }
        let mean = |nll: &[f64]| nll.iter().sum::<f64>() / nll.len() as f64;
        let difference = (mean(&nll) - mean(&exact.1)).abs();
        let line = format!("{} in {}: mean NLL is off by {difference:e}", self.name, T::NAME);
        wrong.extend(exceeds(difference, NLL_PER_ERROR * tol).then_some(line));
        wrong
    }
}

/// Whether an error is beyond a tolerance; a NaN is.
fn exceeds(error: f64, tol: f64) -> bool {
    error.is_nan() || error > tol
}

/// A copy of a tiny model with half as many heads of twice the size, where its heads are smaller than a GPU's: the projections
/// have the same sizes.
fn with_wider_heads(folder: &Path, scratch: &Scratch) -> PathBuf {
    let text = std::fs::read_to_string(folder.join("config.json")).expect("config.json");
    let mut config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let number = |config: &serde_json::Value, key: &str| config[key].as_u64();
    let Some(n_heads) = number(&config, "num_attention_heads") else { return folder.to_owned() };
    let n_kv_heads = number(&config, "num_key_value_heads").unwrap_or(n_heads);
    let hidden = number(&config, "hidden_size").expect("a width");
    if number(&config, "head_dim").unwrap_or(hidden / n_heads) != 8 || n_kv_heads % 2 != 0 {
        return folder.to_owned();
    }
    config["num_attention_heads"] = (n_heads / 2).into();
    config["num_key_value_heads"] = (n_kv_heads / 2).into();
    config["head_dim"] = 16.into();
    let name = folder.file_name().expect("a name").to_string_lossy().into_owned();
    let copy = scratch.copy_of(folder, &name);
    std::fs::write(copy.join("config.json"), config.to_string()).expect("written");
    copy
}

fn cases(scratch: &Scratch) -> Vec<Case> {
    let fixtures = wush_tests::fixture("tiny");
    let mut folders: Vec<PathBuf> = std::fs::read_dir(fixtures)
        .expect("fixtures")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.is_dir())
        .collect();
    folders.push(wush_tests::fixture("demo-model"));
    folders.sort();
    let wider = folders.into_iter().map(|folder| with_wider_heads(&folder, scratch));
    wider.map(Case::open).filter(|case| wush_gpu::plan::check(&case.spec).is_ok()).collect()
}

#[test]
fn every_family_computes_on_a_gpu_what_it_computes_on_the_cpu() {
    let Some(device) = common::device("every_family_computes_on_a_gpu_what_it_computes_on_the_cpu") else { return };
    let (narrow, wide) = (Gpu::<bf16>::new(device.clone()), Gpu::<f32>::new(device));
    let mut wrong = Vec::new();
    let scratch = Scratch::new();
    let cases = cases(&scratch);
    let families: BTreeSet<_> = cases.iter().map(|case| case.spec.family).collect();
    assert!(families.len() >= 8, "only {families:?}");
    for case in cases {
        let exact = case.run(&Cpu);
        wrong.extend(case.check(&wide, &exact, F32_REL_TOL));
        wrong.extend(case.check(&narrow, &exact, bf16_tolerance(case.spec.layers.len())));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Folder of one more model, such as a real one: where it is set, its statistics are compared, and what they differ by is printed.
const MODEL_VARIABLE: &str = "WUSH_TEST_GPU_MODEL";

#[test]
fn a_named_model_computes_on_a_gpu_what_it_computes_on_the_cpu() {
    let Some(folder) = std::env::var_os(MODEL_VARIABLE) else {
        return eprintln!("skipped: {MODEL_VARIABLE} names no model");
    };
    let Some(device) = common::device("a_named_model_computes_on_a_gpu_what_it_computes_on_the_cpu") else { return };
    let case = Case::open(folder.into());
    let exact = case.run(&Cpu);
    let mut wrong = case.check(&Gpu::<f32>::new(device.clone()), &exact, F32_REL_TOL);
    wrong.extend(case.check(&Gpu::<bf16>::new(device), &exact, bf16_tolerance(case.spec.layers.len())));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Sums over groups of sequences with the layers placed as `planned`, within `limit` bytes; and the most that was taken of the card.
fn placed_sums(device: &Device, case: &Case, groups: &[&[Vec<u32>]], planned: Placement) -> (Vec<LayerSums>, u64) {
    let n_tokens = groups.iter().flat_map(|group| group.iter().map(Vec::len)).max().expect("a sequence");
    let work = Work { checkpoint: Some(&case.checkpoint), spec: &case.spec, n_tokens, hessians: false };
    let memory = GpuMemory::of::<bf16>(&work, planned);
    // Memory of this handle alone is counted.
    let device = Device::open(device.info().ordinal).expect("opened before");
    let forward = Forward::new(Gpu::<bf16>::new(device.clone()), Gpu::new, (&work, &memory), memory.total());
    let forward = forward.expect("memory");
    let decoder = forward.decoder(&case.checkpoint, &case.spec);
    let mut sums = RunningSums::new(&device, (&case.checkpoint, &case.spec), &case.statistics(false)).expect("memory");
    for group in groups {
        if forward.is_streamed() {
            sums.by_layer(group.len()).expect("memory");
            forward.observe(&decoder, group, &mut sums, &Quiet).expect("within what was planned");
        } else {
            let mut one = |ids| forward.observe(&decoder, std::slice::from_ref(ids), &mut sums, &Quiet);
            group.iter().try_for_each(&mut one).expect("within what was planned");
        }
    }
    let [peak, _] = forward.peak();
    assert!(peak <= memory.total(), "{planned:?}: {peak} of {} planned", memory.total());
    (sums.download().expect("downloaded"), peak)
}

#[test]
fn layers_that_come_and_go_give_the_bits_of_layers_that_stay() {
    let Some(device) = common::device("layers_that_come_and_go_give_the_bits_of_layers_that_stay") else { return };
    let case = Case::open(wush_tests::fixture("demo-model"));
    let sequence = |s: usize, n: usize| -> Vec<u32> { case.ids.iter().cycle().skip(7 * s).take(n).copied().collect() };
    let lengths = [193, 150, 193, 17, 64, 193, 1];
    let sequences: Vec<Vec<u32>> = lengths.iter().enumerate().map(|(s, &n)| sequence(s, n)).collect();
    // One and two stay on the card, three and more move; groups of other sizes follow each other.
    for cuts in [&[1][..], &[2], &[3], &[7], &[4, 7], &[1, 3, 6, 7]] {
        let mut first = 0;
        let groups: Vec<&[Vec<u32>]> =
            cuts.iter().map(|&end| &sequences[std::mem::replace(&mut first, end)..end]).collect();
        let (resident, whole) = placed_sums(&device, &case, &groups, Placement::Resident);
        let (streamed, two_layers) = placed_sums(&device, &case, &groups, Placement::Streamed);
        assert_eq!(resident, streamed, "groups that end at {cuts:?}");
        assert!(two_layers < whole, "{two_layers} bytes with two layers, {whole} with all");
    }
}

/// The token whose embedding is not finite.
const POISONED: u32 = 9;

/// Makes the embedding of [`POISONED`] begin with infinity.
fn poison(path: &Path) {
    let mut bytes = std::fs::read(path).expect("a file");
    let n_header = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + n_header]).expect("a header");
    let table = &header["model.embed_tokens.weight"];
    let [start, width] =
        [&table["data_offsets"][0], &table["shape"][1]].map(|n| n.as_u64().expect("a number") as usize);
    let at = 8 + n_header + start + POISONED as usize * width * size_of::<bf16>();
    bytes[at..at + 2].copy_from_slice(&bf16::INFINITY.to_le_bytes());
    std::fs::write(path, bytes).expect("written");
}

#[test]
fn what_is_not_finite_is_named_in_either_order() {
    let Some(device) = common::device("what_is_not_finite_is_named_in_either_order") else { return };
    let scratch = Scratch::new();
    let folder = scratch.copy_of(&wush_tests::fixture("demo-model"), "demo-model");
    poison(&folder.join("model.safetensors"));
    let case = Case::open(folder);
    let sequences = [vec![1, 2, 3], vec![4, 5, POISONED, 6], vec![7, 8]];
    let gpu = Gpu::<bf16>::new(device.clone());
    let weights = (&case.checkpoint, &case.spec);
    let decoder = Decoder::new(&case.checkpoint, &case.spec, &gpu);
    let mut sums = RunningSums::new(&device, weights, &case.statistics(false)).expect("memory");
    let one = |ids| decoder.observe(std::slice::from_ref(ids), &mut sums, &Quiet);
    let by_sequence = sequences.iter().try_for_each(one).expect_err("not finite").to_string();
    let mut sums = RunningSums::new(&device, weights, &case.statistics(false)).expect("memory");
    sums.by_layer(sequences.len()).expect("memory");
    let loader = Gpu::<bf16>::new(Device::open(device.info().ordinal).expect("opened before"));
    let mut carrier = HostCarrier::new(&gpu, &loader, (4, case.spec.hidden_size)).expect("memory");
    let by_layer = decoder.stream(&sequences, &mut sums, (&loader, &mut carrier), &Quiet).expect_err("not finite");
    assert_eq!(by_layer.to_string(), by_sequence);
    assert!(by_sequence.contains("layer 0") && by_sequence.contains("sequence 1"), "{by_sequence}");
}

#[test]
fn running_sums_are_the_sums_of_the_sequences_and_repeat_bit_for_bit() {
    let Some(device) = common::device("running_sums_are_the_sums_of_the_sequences_and_repeat_bit_for_bit") else {
        return;
    };
    let gpu = Gpu::<bf16>::new(device.clone());
    let case = Case::open(wush_tests::fixture("demo-model"));
    let weights = (&case.checkpoint, &case.spec);
    let decoder = Decoder::new(&case.checkpoint, &case.spec, &gpu).keeping_weights();
    let sequences = [case.ids.clone(), case.ids[3..150].to_vec()];
    let run = |pauses: bool| {
        let mut statistics = case.statistics(false);
        let mut sums = RunningSums::new(&device, weights, &statistics).expect("memory");
        for sequence in &sequences {
            decoder.observe(std::slice::from_ref(sequence), &mut sums, &Quiet).expect("finite");
            if pauses {
                let downloaded = sums.download().expect("downloaded");
                statistics.take_over(downloaded, std::slice::from_ref(sequence)).expect("counted");
                sums = RunningSums::new(&device, weights, &statistics).expect("memory");
            }
        }
        sums.download().expect("downloaded")
    };
    let whole = run(false);
    assert_eq!(whole, run(false), "the same bits again");
    assert_eq!(whole, run(true), "the same bits across a stop");
    for (layer, found) in whole.iter().enumerate() {
        let mut expected = vec![0.0; found.moments.key_gram.len()];
        for ids in &sequences {
            let mut collector = Collector { spec: &case.spec, layers: Vec::new() };
            decoder.observe(std::slice::from_ref(ids), &mut collector, &Quiet).expect("finite");
            expected.iter_mut().zip(&collector.layers[layer].key_gram).for_each(|(sum, part)| *sum += part);
        }
        // One addition in another order.
        let error = relative_error(found.moments.key_gram.iter().copied(), &expected);
        assert!(error <= 1e-14, "layer {layer}: {error:e}");
    }
}

/// Appendix C's sums are made of differences of values and outputs, and of products of two probabilities: their relative error is a
/// few times that of the activations.
const HESSIAN_PER_ERROR: f64 = 4.0;

#[test]
fn exact_hessians_are_those_of_the_cpu_and_symmetric() {
    let Some(device) = common::device("exact_hessians_are_those_of_the_cpu_and_symmetric") else { return };
    let case = Case::open(wush_tests::fixture("demo-model"));
    let weights = (&case.checkpoint, &case.spec);
    let sequences = std::slice::from_ref(&case.ids);
    let mut expected = case.statistics(true);
    let mut accumulator = Accumulator::new(&mut expected, sequences).with_weights(weights.0, weights.1);
    let decoder = Decoder::new(&case.checkpoint, &case.spec, &Cpu);
    decoder.observe(sequences, &mut accumulator, &Quiet).expect("finite");
    let gpu = Gpu::<bf16>::new(device.clone());
    let mut sums = RunningSums::new(&device, weights, &case.statistics(true)).expect("memory");
    let decoder = Decoder::new(&case.checkpoint, &case.spec, &gpu);
    decoder.observe(sequences, &mut sums, &Quiet).expect("finite");
    let tol = HESSIAN_PER_ERROR * bf16_tolerance(case.spec.layers.len());
    for (found, (layer, expected)) in sums.download().expect("downloaded").iter().zip(&expected.layers) {
        let (found, expected) =
            (found.hessians.as_ref().expect("gathered"), expected.attention.as_ref().expect("gathered"));
        for (role, found, expected) in [("key", &found[0], &expected.key), ("value", &found[1], &expected.value)] {
            let error = relative_error(found.iter().copied(), &expected.data);
            assert!(error <= tol, "layer {layer}, {role} Hessian: {error:e} beyond {tol:e}");
            let d = expected.dim;
            let is_symmetric = |matrix: &[f64]| (0..d * d).all(|at| matrix[at] == matrix[at % d * d + at / d]);
            assert!(found.chunks_exact(d * d).all(is_symmetric), "layer {layer}, {role} Hessian");
        }
    }
}

/// Sums of f64 products in two orders, positions and parts: 2⁻⁵³ an addition, of which there are hundreds.
const ORDER_REL_TOL: f64 = 1e-12;

#[test]
fn weighted_sums_are_those_of_the_host_over_the_same_activations() {
    let Some(device) = common::device("weighted_sums_are_those_of_the_host_over_the_same_activations") else { return };
    let case = Case::open(wush_tests::fixture("demo-model"));
    let sequences = [case.ids.clone(), case.ids[3..150].to_vec()];
    let gpu = Gpu::<bf16>::new(device.clone());
    let decoder = Decoder::new(&case.checkpoint, &case.spec, &gpu);
    let mut sums = RunningSums::new(&device, (&case.checkpoint, &case.spec), &case.statistics(false)).expect("memory");
    let mut statistics = case.statistics(false);
    for ids in &sequences {
        decoder.observe(std::slice::from_ref(ids), &mut sums, &Quiet).expect("finite");
    }
    statistics.take_over(sums.download().expect("downloaded"), &sequences).expect("counted");
    let mut on_host = statistics.clone();
    let mut pass = SecondPass::new(&mut on_host).expect("finished sums");
    decoder.observe(&sequences, &mut pass, &Quiet).expect("finite");
    pass.finish();
    let pass = SecondPass::new(&mut statistics).expect("finished sums");
    let mut weighted = WeightedSums::new(&device, pass.means()).expect("memory");
    decoder.observe(&sequences, &mut weighted, &Quiet).expect("finite");
    pass.finish_with(weighted.download().expect("downloaded"));
    for ((layer, found), expected) in statistics.layers.iter().zip(on_host.layers.values()) {
        let [found, expected] = [found, expected].map(|sums| &sums.weighted_value_gram.as_ref().expect("summed").data);
        let error = relative_error(found.iter().copied(), expected);
        assert!(error <= ORDER_REL_TOL, "layer {layer}: {error:e}");
    }
}
