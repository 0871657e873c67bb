//! Sessions against the decoder that computes the whole sequence anew for every token: the demonstration model, and a tiny
//! model of every family.

use std::path::{Path, PathBuf};

use wush_checkpoint::Checkpoint;
use wush_checkpoint::tokenizer::TextTokenizer;
use wush_format::monitor::{Monitor, Quiet};
use wush_generate::{Batch, CacheSettings, GenerateError, Sampler, Sampling, Session, bf16_bytes, longest, most_bytes};
use wush_model::ModelError;
use wush_model::arch;
use wush_model::attention::Exact;
use wush_model::cpu::{Cpu, Stored};
use wush_model::decoder::Decoder;
use wush_model::resident::Resident;
use wush_model::spec::ModelSpec;
use wush_quant::LayerBits;
use wush_runtime::{KvCache, SequenceId, Windows};

/// On a logit: two f32 forwards that sum in other orders, as in wush-model's tests against transformers.
const LOGIT_ABS_TOL: f32 = 1e-4;
/// Small windows, so that short sequences have pages.
const WINDOWS: Windows = Windows { sink: 2, keep: 6, flush: 4 };

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name)
}

fn open(dir: &Path) -> (Checkpoint, ModelSpec) {
    let checkpoint = Checkpoint::open(dir).expect("a checkpoint");
    let spec = arch::resolve(&checkpoint, None).expect("a known family");
    (checkpoint, spec)
}

fn settings(bits: u8, n_layers: usize) -> CacheSettings {
    let bits = (bits != 16).then(|| vec![LayerBits::both(bits.try_into().expect("bits of a code")); n_layers]);
    CacheSettings { bits, quantizer: "quest".parse().expect("known"), windows: WINDOWS }
}

fn cache(spec: &ModelSpec, bits: u8) -> KvCache {
    KvCache::new(settings(bits, spec.layers.len()).config(spec).expect("in range")).expect("a cache")
}

/// Ids below 64, seeded.
fn ids(n: usize) -> Vec<u32> {
    let mut state = 7u32;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 26
    };
    std::iter::repeat_with(next).take(n).collect()
}

/// Some hundred tokens of a text that the demonstration model has not seen, from a byte on.
fn demo_ids(start: usize) -> Vec<u32> {
    let dir = fixture("demo-model");
    let text = std::fs::read_to_string(dir.join("heldout.txt")).expect("a text");
    TextTokenizer::open(&dir).expect("a tokenizer").encode(&text[start..start + 1200]).expect("encoded")
}

/// Logits after all of `ids`, computed anew.
fn recomputed(decoder: &Decoder<'_, Cpu>, ids: &[u32]) -> Vec<f32> {
    let hidden = decoder.hidden(ids, &Exact).expect("computed");
    decoder.logits(&hidden, ids.len() - 1..ids.len()).expect("computed")
}

#[test]
fn sixteen_bits_are_token_for_token_the_unquantized_model() {
    let (checkpoint, spec) = open(&fixture("demo-model"));
    let decoder = Decoder::new(&checkpoint, &spec, &Cpu);
    let resident = Resident::load(&checkpoint, &spec, &Stored::BY_SHAPE, &Quiet).expect("loaded");
    for (start, sampling) in [(0, Sampling::GREEDY), (900, Sampling { temperature: 0.8, seed: 3, ..Sampling::GREEDY })]
    {
        let mut ids = demo_ids(start);
        let mut session = Session::new(&resident, cache(&spec, 16), None, ids.len()).expect("a session");
        let mut picked = [(); 2].map(|()| Sampler::new(sampling).expect("in range"));
        let mut logits = session.feed(&ids, 50, &Quiet).expect("fed");
        for n in 0..24 {
            let ids_by_both = [&logits, &recomputed(&decoder, &ids)];
            let [found, expected] = [0, 1].map(|who| picked[who].pick(ids_by_both[who]));
            assert_eq!(found, expected, "token {n} after {} of prompt", ids.len() - n);
            ids.push(found);
            logits = session.feed(&[found], 1, &Quiet).expect("fed");
        }
        assert_eq!(session.n_tokens(), ids.len());
    }
}

#[test]
fn every_family_goes_on_as_if_computed_anew() {
    let mut folders: Vec<PathBuf> =
        std::fs::read_dir(fixture("tiny")).expect("fixtures").map(|entry| entry.expect("entry").path()).collect();
    folders.retain(|path| path.is_dir());
    assert!(folders.len() > 20, "{folders:?}");
    for folder in folders {
        let (checkpoint, spec) = open(&folder);
        let decoder = Decoder::new(&checkpoint, &spec, &Cpu);
        let resident = Resident::load(&checkpoint, &spec, &Stored::BY_SHAPE, &Quiet).expect("loaded");
        let n_prompt = 12;
        let ids = ids(longest(&spec, n_prompt).min(40));
        let mut session = Session::new(&resident, cache(&spec, 16), None, n_prompt).expect("a session");
        session.feed(&ids[..n_prompt], 5, &Quiet).expect("fed");
        for n in n_prompt + 1..=ids.len() {
            let found = session.feed(&ids[n - 1..n], 1, &Quiet).expect("fed");
            let expected = recomputed(&decoder, &ids[..n]);
            let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst <= LOGIT_ABS_TOL, "{}: {n} tokens: logits off by {worst:e}", folder.display());
        }
    }
}

#[test]
fn every_width_is_nearer_the_more_bits_it_has_and_takes_what_was_planned() {
    let (checkpoint, spec) = open(&fixture("demo-model"));
    let resident = Resident::load(&checkpoint, &spec, &Stored::BY_SHAPE, &Quiet).expect("loaded");
    let ids = demo_ids(0);
    let run = |bits: u8| {
        let mut session = Session::new(&resident, cache(&spec, bits), None, ids.len()).expect("a session");
        let logits = session.feed(&ids, 64, &Quiet).expect("fed");
        let (bytes, config) =
            (session.memory().total() as u64, settings(bits, spec.layers.len()).config(&spec).expect("in range"));
        assert!(bytes <= most_bytes(&config, ids.len(), 64).expect("packed"), "{bits} bits: {bytes} bytes");
        (logits, bytes as f64 / bf16_bytes(&config, ids.len()) as f64)
    };
    let (exact, _) = run(16);
    let mut last = (f64::INFINITY, 0.0);
    for bits in [2, 3, 4, 8] {
        let (logits, ratio) = run(bits);
        let squares = logits.iter().zip(&exact).map(|(a, b)| f64::from(a - b).powi(2));
        let error = (squares.sum::<f64>() / exact.len() as f64).sqrt();
        assert!(error < last.0 && ratio > last.1 && ratio < 0.75, "{bits} bits: {error} {ratio} after {last:?}");
        last = (error, ratio);
    }
    assert!(last.0 < 0.2, "8 bits: {last:?}");
}

#[test]
fn no_session_goes_beyond_what_its_positions_mean() {
    // Beyond 16 tokens, its RoPE turns all keys otherwise.
    let (checkpoint, spec) = open(&fixture("tiny/phi3-longrope"));
    assert_eq!((longest(&spec, 10), longest(&spec, 20)), (16, spec.max_position_embeddings));
    let resident = Resident::load(&checkpoint, &spec, &Stored::BY_SHAPE, &Quiet).expect("loaded");
    let mut session = Session::new(&resident, cache(&spec, 16), None, 10).expect("a session");
    session.feed(&ids(16), 16, &Quiet).expect("fed");
    let error = session.feed(&[1], 1, &Quiet).expect_err("a 17th token");
    assert!(matches!(error, GenerateError::TooLong { found: 17, longest: 16 }), "{error}");
    let n = spec.max_position_embeddings + 1;
    let error = Session::new(&resident, cache(&spec, 16), None, n).err().expect("too long");
    assert!(matches!(error, GenerateError::TooLong { .. }), "{error}");
}

/// Asks to stop.
struct Stopped;

impl Monitor for Stopped {
    fn begin(&self, _: &str, _: &'static str, _: u64) {}
    fn advance(&self, _: u64) {}
    fn end(&self) {}
    fn note(&self, _: &str) {}
    fn interrupted(&self) -> bool {
        true
    }
}

#[test]
fn a_stop_is_heard_between_chunks() {
    let (checkpoint, spec) = open(&fixture("tiny/llama-gqa"));
    let resident = Resident::load(&checkpoint, &spec, &Stored::BY_SHAPE, &Quiet).expect("loaded");
    let mut session = Session::new(&resident, cache(&spec, 4), None, 4).expect("a session");
    let error = session.feed(&ids(4), 2, &Stopped).expect_err("stopped");
    assert!(matches!(error, GenerateError::Model(ModelError::Interrupted)), "{error}");
    let error = session.feed(&[], 2, &Quiet).expect_err("nothing");
    assert!(matches!(error, GenerateError::Model(ModelError::Sequence { .. })), "{error}");
}

/// Logits, bit for bit.
fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|x| x.to_bits()).collect()
}

/// Logits after each of the `n_new` greedy tokens that follow `ids`, and the tokens, of a sequence alone.
fn alone(resident: &Resident<'_, Stored>, cache: KvCache, ids: &[u32], n_new: usize) -> Vec<(u32, Vec<u32>)> {
    let mut session = Session::new(resident, cache, None, ids.len()).expect("a session");
    let mut greedy = Sampler::new(Sampling::GREEDY).expect("in range");
    let mut logits = session.feed(ids, CHUNK, &Quiet).expect("fed");
    let step = |_| {
        let id = greedy.pick(&logits);
        logits = session.feed(&[id], 1, &Quiet).expect("fed");
        (id, bits(&logits))
    };
    (0..n_new).map(step).collect()
}

/// Tokens that enter together.
const CHUNK: usize = 16;

#[test]
fn a_sequence_gets_in_any_company_what_it_gets_alone() {
    let (checkpoint, spec) = open(&fixture("demo-model"));
    let resident = Resident::load(&checkpoint, &spec, &Stored::BY_SHAPE, &Quiet).expect("loaded");
    let text = demo_ids(0);
    // Of different lengths; they join one after another, two steps apart, and leave again.
    let prompts: Vec<&[u32]> = [3, 40, 17, 1, 90, 16, 5].iter().map(|&n| &text[n..2 * n + 1]).collect();
    for width in [2, 16] {
        let mut batch = Batch::new(&resident, cache(&spec, width), None).expect("a batch");
        let mut greedy = Sampler::new(Sampling::GREEDY).expect("in range");
        let mut running: Vec<(usize, SequenceId, u32)> = Vec::new();
        let mut found = vec![Vec::new(); prompts.len()];
        for step in 0.. {
            if let Some(&prompt) = prompts.get(step / 2).filter(|_| step % 2 == 0) {
                let sequence = batch.add(prompt.len()).expect("it fits");
                let mut chunks = prompt.chunks(CHUNK).map(|ids| batch.feed(sequence, ids).expect("fed"));
                let hidden = chunks.by_ref().last().expect("tokens");
                let logits = batch.logits(&hidden, hidden.n_rows - 1..hidden.n_rows).expect("computed");
                running.push((step / 2, sequence, greedy.pick(&logits)));
            }
            let tokens: Vec<_> = running.iter().map(|&(_, sequence, id)| (sequence, id)).collect();
            let hidden = batch.feed_each(&tokens).expect("fed");
            let logits = batch.logits_each(&hidden).expect("computed");
            for ((index, _, id), logits) in running.iter_mut().zip(logits.chunks_exact(spec.vocab_size)) {
                found[*index].push((*id, bits(logits)));
                *id = greedy.pick(logits);
            }
            let (done, more) = running.into_iter().partition(|&(index, ..)| found[index].len() == 12 + index);
            running = more;
            done.into_iter()
                .for_each(|(_, sequence, _): (usize, SequenceId, u32)| batch.remove(sequence).expect("there"));
            if running.is_empty() && step / 2 >= prompts.len() {
                break;
            }
        }
        for (prompt, found) in prompts.iter().zip(found) {
            let expected = alone(&resident, cache(&spec, width), prompt, found.len());
            assert_eq!(found, expected, "{width} bits, prompt of {}", prompt.len());
        }
        assert_eq!((batch.n_sequences(), batch.memory().total()), (0, 0));
    }
}

#[test]
fn a_fork_goes_on_as_if_it_had_been_alone() {
    let (checkpoint, spec) = open(&fixture("demo-model"));
    let resident = Resident::load(&checkpoint, &spec, &Stored::BY_SHAPE, &Quiet).expect("loaded");
    let text = demo_ids(0);
    for width in [2, 16] {
        let mut batch = Batch::new(&resident, cache(&spec, width), None).expect("a batch");
        let first = batch.add(70).expect("it fits");
        text[..48].chunks(CHUNK).for_each(|ids| drop(batch.feed(first, ids).expect("fed")));
        let fork = batch.fork(first, 60).expect("there").expect("RoPE of one kind");
        // What the first goes on with is nothing to the fork.
        batch.feed(first, &text[200..216]).expect("fed");
        let hidden = batch.feed(fork, &text[48..60]).expect("fed");
        let logits = batch.logits(&hidden, 11..12).expect("computed");
        let mut session = Session::new(&resident, cache(&spec, width), None, 60).expect("a session");
        let expected = session.feed(&text[..60], CHUNK, &Quiet).expect("fed");
        assert_eq!(bits(&logits), bits(&expected), "{width} bits");
        assert_eq!((batch.n_tokens(first).expect("there"), batch.n_tokens(fork).expect("there")), (64, 60));
    }
    let (checkpoint, spec) = open(&fixture("tiny/phi3-longrope"));
    let resident = Resident::load(&checkpoint, &spec, &Stored::BY_SHAPE, &Quiet).expect("loaded");
    let mut batch = Batch::new(&resident, cache(&spec, 16), None).expect("a batch");
    let short = batch.add(10).expect("it fits");
    batch.feed(short, &ids(8)).expect("fed");
    assert!(batch.fork(short, 16).expect("there").is_some());
    assert!(batch.fork(short, 17).expect("there").is_none(), "longer prompts turn their keys otherwise");
}
