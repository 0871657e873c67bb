//! Sequences of appends, truncations, forks, saves and loads against a naive cache that does the same by copying; and a
//! cache's memory.

use crate::common::{Both, Naive, Numbers, assert_close, config, layer};
use proptest::prelude::*;
use wush_runtime::{CacheConfig, Chunk, FullDtype, KvCache, Part, RuntimeError, SequenceId, Windows};

const WINDOWS: Windows = Windows { sink: 3, keep: 6, flush: 4 };

#[derive(Debug, Clone)]
enum Action {
    /// Tokens for one sequence.
    Append(usize, usize),
    /// One token for every sequence: a decoding step of a batch.
    Step,
    /// Takes back so many tokens of a sequence.
    Truncate(usize, usize),
    Fork(usize),
    Remove(usize),
    /// Saves a sequence and reads it as a new one.
    SaveAndLoad(usize),
}

fn action() -> impl Strategy<Value = Action> {
    let which = 0..8usize;
    prop_oneof![
        4 => (which.clone(), 1..40usize).prop_map(|(s, n)| Action::Append(s, n)),
        4 => Just(Action::Step),
        2 => (which.clone(), 0..30usize).prop_map(|(s, n)| Action::Truncate(s, n)),
        2 => which.clone().prop_map(Action::Fork),
        1 => which.clone().prop_map(Action::Remove),
        1 => which.prop_map(Action::SaveAndLoad),
    ]
}

fn run(config: &CacheConfig, actions: &[Action], seed: u64) {
    let dir = tempfile::tempdir().expect("room");
    let mut numbers = Numbers::new(seed);
    let mut both = Both::new(config, 1);
    for (i, action) in actions.iter().enumerate() {
        let n = both.naive.len();
        let what = format!("action {i}, {action:?}");
        match *action {
            Action::Append(s, n_tokens) if n > 0 => {
                let mut chunks = vec![0; n];
                chunks[s % n] = n_tokens;
                both.step(&chunks, &mut numbers, &what);
            }
            Action::Step if n > 0 => both.step(&vec![1; n], &mut numbers, &what),
            Action::Truncate(s, by) if n > 0 => {
                let (sequence, naive) = &mut both.naive[s % n];
                let len = naive.len().saturating_sub(by);
                both.cache.truncate(*sequence, len).expect("nothing is let go without sliding windows");
                naive.truncate(len);
            }
            Action::Fork(s) if (1..6).contains(&n) => {
                let (sequence, naive) = both.naive[s % n].clone();
                both.naive.push((both.cache.fork(sequence).expect("there"), naive));
            }
            Action::Remove(s) if n > 1 => {
                let (sequence, _) = both.naive.remove(s % n);
                both.cache.remove(sequence).expect("there");
            }
            Action::SaveAndLoad(s) if (1..6).contains(&n) => {
                let (sequence, naive) = both.naive[s % n].clone();
                let paths = ["a", "b"].map(|name| dir.path().join(name));
                both.cache.save(sequence, &paths[0]).expect("saved");
                let loaded = both.cache.load(&paths[0]).expect("loaded");
                both.cache.save(loaded, &paths[1]).expect("saved");
                let [a, b] = paths.map(|path| std::fs::read(path).expect("there"));
                assert!(a == b, "{what}: a loaded cache saves other bytes");
                both.naive.push((loaded, naive));
            }
            _ => {}
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 60,
        rng_seed: proptest::test_runner::RngSeed::Fixed(5),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_order_of_operations_agrees(
        actions in prop::collection::vec(action(), 1..40),
        bits in prop::sample::select(vec![[2, 2], [3, 16], [16, 2], [4, 8], [16, 16]]),
        page in prop::sample::select(vec![1usize, 4, 7, 64]),
        bf16 in any::<bool>(),
        seed in any::<u32>(),
    ) {
        let full = if bf16 { FullDtype::Bf16 } else { FullDtype::F32 };
        let config = CacheConfig { full, ..config(layer(4, 2, 16, bits), WINDOWS, page) };
        run(&config, &actions, seed.into());
    }
}

#[test]
fn a_fork_shares_its_pages_until_it_writes() {
    let mut numbers = Numbers::new(1);
    let mut both = Both::new(&config(layer(2, 2, 32, [2, 2]), WINDOWS, 16), 1);
    both.step(&[200], &mut numbers, "prompt");
    let before = both.cache.memory();
    let (sequence, naive) = both.naive[0].clone();
    both.naive.push((both.cache.fork(sequence).expect("there"), naive));
    let forked = both.cache.memory();
    assert_eq!((forked.page_keys, forked.page_values), (before.page_keys, before.page_values), "pages are shared");
    // Both go their own ways: 192 packed tokens each end a page and 4 begin another. The first to write copies the page that
    // was in work, and both begin one of their own.
    for _ in 0..6 {
        both.step(&[1, 1], &mut numbers, "after the fork");
    }
    let apart = both.cache.memory();
    let page = 16 * 12;
    assert_eq!(apart.page_keys, before.page_keys + 2 * 3 * page, "{apart:?}");
    both.cache.remove(both.naive.pop().expect("the fork").0).expect("there");
    both.step(&[50], &mut numbers, "the fork is gone");
}

#[test]
fn truncation_in_a_sliding_window_layer_gives_back_what_it_promises() {
    let mut numbers = Numbers::new(2);
    let layer = wush_runtime::LayerConfig { sliding_window: Some(20), ..layer(2, 1, 16, [2, 2]) };
    let config = CacheConfig { rewind: 10, ..config(layer, WINDOWS, 4) };
    let mut both = Both::new(&config, 1);
    for _ in 0..10 {
        both.step(&[37], &mut numbers, "fill");
        let (sequence, naive) = &mut both.naive[0];
        let len = naive.len() - 10;
        both.cache.truncate(*sequence, len).expect("rewind allows 10");
        naive.truncate(len);
        both.step(&[1], &mut numbers, "after taking 10 back");
    }
    let (sequence, naive) = &mut both.naive[0];
    let error = both.cache.truncate(*sequence, 100).expect_err("let go");
    assert!(matches!(error, RuntimeError::Freed { layer: 0, needed: 81, .. }), "{error}");
    assert_eq!(both.cache.len(*sequence, 0).expect("there"), naive.len(), "nothing changed");
    both.cache.truncate(*sequence, 0).expect("an empty cache needs nothing");
    naive.truncate(0);
    both.step(&[30], &mut numbers, "again");
}

#[test]
fn a_loaded_cache_goes_on_as_if_nothing_had_happened() {
    let dir = tempfile::tempdir().expect("room");
    let path = dir.path().join("cache.safetensors");
    let config = config(layer(4, 2, 64, [2, 3]), Windows::STUDY, 64);
    let mut both = Both::new(&config, 1);
    let mut numbers = Numbers::new(3);
    both.step(&[500], &mut numbers, "prompt");
    both.cache.save(both.naive[0].0, &path).expect("saved");
    let naive = both.naive[0].1.clone();
    let mut cache = KvCache::new(config.clone()).expect("valid");
    let loaded = cache.load(&path).expect("loaded");
    let mut both = Both { cache, naive: vec![(loaded, naive)] };
    both.step(&[1], &mut numbers, "loaded");
    both.step(&[40], &mut numbers, "loaded");
}

/// Bytes a token-head takes at 2 bits, d = 128: 32 of codes, 4 of scale and zero point.
const PACKED_BYTES: usize = 36;

#[test]
fn memory_is_36_bytes_a_token_head_and_the_windows() {
    let n_kv = 8;
    let config = CacheConfig { full: FullDtype::Bf16, ..config(layer(32, n_kv, 128, [2, 2]), Windows::SERVING, 256) };
    let mut cache = KvCache::new(config).expect("valid");
    let sequence = cache.add();
    let n_tokens = 32_768;
    let chunk = vec![0.5; 2048 * n_kv * 128];
    for _ in 0..n_tokens / 2048 {
        cache.append(0, &[Part { sequence, n_tokens: 2048 }], &chunk, &chunk).expect("valid");
        cache.flush(0, &[Part { sequence, n_tokens: 2048 }]).expect("valid");
    }
    let memory = cache.memory();
    let n_quantized = cache.quantized(sequence, 0).expect("there").len();
    assert_eq!(n_quantized, n_tokens - 64 - 256);
    let expected = 2 * n_kv * n_quantized * PACKED_BYTES;
    let pages = memory.page_keys + memory.page_values;
    assert!(pages >= expected && pages as f64 <= 1.01 * expected as f64, "{pages} bytes of pages for {expected}");
    // S_sink, S_keep and fewer than S_flush tokens more, two bytes a coordinate, keys and values.
    let windows = 2 * n_kv * (64 + 256 + 8) * 128 * 2;
    let found = memory.window_keys + memory.window_values;
    assert!(found <= windows, "{found} bytes of windows, at most {windows}");
    let all = (expected + windows) as f64;
    assert!((memory.total() as f64 - all).abs() <= 0.01 * all, "{memory:?} for {all}");
}

#[test]
fn parts_of_a_step_can_be_called_alone() {
    let mut numbers = Numbers::new(4);
    let config = config(layer(2, 1, 32, [2, 2]), WINDOWS, 8);
    let mut cache = KvCache::new(config.clone()).expect("valid");
    let (sequence, mut naive): (SequenceId, _) = (cache.add(), Naive::new(&config, 0));
    for n_tokens in [30, 5, 1, 17] {
        let [queries, keys, values] = [2, 1, 1].map(|heads| numbers.take(n_tokens * heads * 32));
        let parts = [Part { sequence, n_tokens }];
        // No flush: the next append makes up for it.
        cache.append(0, &parts, &keys, &values).expect("valid");
        naive.append(&keys, &values);
        let mut out = vec![0.0; queries.len()];
        cache.attend(0, &parts, &queries, &mut out).expect("valid");
        assert_close(&out, &naive.attend(&queries), "append and attend");
        naive.flush();
    }
    let empty = Chunk { queries: &[], keys: &[], values: &[] };
    cache.step(0, &[], empty, &mut []).expect("an empty batch is no error");
    cache.step(0, &[Part { sequence, n_tokens: 0 }], empty, &mut []).expect("nor is an empty part");
}
