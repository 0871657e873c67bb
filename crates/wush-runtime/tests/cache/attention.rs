//! Attention over the packed cache against a naive one in f64 that follows Algorithm 2 as written: every group size, batches of
//! different lengths, lengths around every edge of pages and windows, sliding windows, softcaps, bits.

use crate::common::{Both, Naive, Numbers, assert_close, config, layer};
use wush_runtime::{CacheConfig, Chunk, FullDtype, KvCache, LayerConfig, Part, Windows};

const WINDOWS: Windows = Windows { sink: 4, keep: 10, flush: 3 };

#[test]
fn every_group_size_agrees() {
    let mut numbers = Numbers::new(1);
    for group in [1, 2, 3, 4, 5, 6, 7, 8, 12] {
        for (d, n_kv) in [(64, 2), (80, 1), (128, 1)] {
            let mut both = Both::new(&config(layer(group * n_kv, n_kv, d, [2, 2]), WINDOWS, 16), 1);
            for chunk in [50, 1, 1, 13, 1, 40, 1] {
                both.step(&[chunk], &mut numbers, &format!("group {group}, d {d}"));
            }
        }
    }
}

#[test]
fn every_pair_of_bits_agrees() {
    let mut numbers = Numbers::new(2);
    for keys in [2, 3, 4, 8, 16] {
        for values in [2, 3, 4, 8, 16] {
            for full in [FullDtype::F32, FullDtype::Bf16] {
                let config = CacheConfig { full, ..config(layer(4, 2, 64, [keys, values]), WINDOWS, 16) };
                let mut both = Both::new(&config, 1);
                for chunk in [60, 1, 7, 1] {
                    both.step(&[chunk], &mut numbers, &format!("keys {keys}, values {values}, {full:?}"));
                }
            }
        }
    }
}

#[test]
fn batches_of_one_to_sixteen_of_different_lengths_agree() {
    let mut numbers = Numbers::new(3);
    for n in 1..=16 {
        let mut both = Both::new(&config(layer(4, 2, 32, [2, 2]), WINDOWS, 8), n);
        for round in 0..6 {
            // Some sequences sit out, some bring a prompt, most one token.
            let chunks: Vec<_> = (0..n).map(|s| [1, 0, 25, 1, 3][(s + round) % 5]).collect();
            if chunks.iter().sum::<usize>() > 0 {
                both.step(&chunks, &mut numbers, &format!("batch {n}, round {round}"));
            }
        }
    }
}

#[test]
fn every_length_around_the_edges_of_pages_and_windows_agrees() {
    let mut numbers = Numbers::new(4);
    for windows in [
        WINDOWS,
        Windows { sink: 0, keep: 0, flush: 1 },
        Windows { sink: 0, keep: 5, flush: 8 },
        Windows { sink: 8, keep: 0, flush: 4 },
        Windows { sink: 16, keep: 128, flush: 16 },
    ] {
        for page in [1, 8, 64] {
            // One token at a time passes every edge.
            let mut both = Both::new(&config(layer(2, 1, 16, [2, 3]), windows, page), 1);
            for _ in 0..2 * page.max(8) + windows.sink + windows.keep + 2 * windows.flush + 2 {
                both.step(&[1], &mut numbers, &format!("{windows:?}, page {page}"));
            }
            // And a first chunk of every length around them, then more.
            let edge = windows.sink + windows.keep + windows.flush;
            for first in [windows.sink, edge, edge + page].into_iter().flat_map(|n| n.saturating_sub(1)..=n + 1) {
                let mut both = Both::new(&config(layer(2, 1, 16, [2, 3]), windows, page), 1);
                for chunk in [first, 1, page, 1, 2 * page + 1].into_iter().filter(|n| *n > 0) {
                    both.step(&[chunk], &mut numbers, &format!("{windows:?}, page {page}, first {first}"));
                }
            }
        }
    }
}

#[test]
fn long_chunks_and_long_caches_agree() {
    let mut numbers = Numbers::new(5);
    let mut both = Both::new(&config(layer(6, 2, 64, [2, 2]), Windows::STUDY, 256), 2);
    for chunks in [[700, 300], [1, 1], [1, 0], [513, 257], [1, 1]] {
        both.step(&chunks, &mut numbers, "long");
    }
}

#[test]
fn sliding_windows_and_softcaps_agree_and_old_pages_go() {
    let mut numbers = Numbers::new(6);
    for window in [1, 2, 9, 30, 100] {
        for softcap in [None, Some(3.0)] {
            let layer = LayerConfig { sliding_window: Some(window), softcap, ..layer(4, 2, 32, [2, 2]) };
            let config = CacheConfig { rewind: 5, ..config(layer, WINDOWS, 8) };
            let mut both = Both::new(&config, 1);
            for chunk in [40, 1, 1, 60, 1, 33, 1, 1, 1, 100, 1] {
                both.step(&[chunk], &mut numbers, &format!("window {window}, softcap {softcap:?}"));
            }
            let held = both.cache.memory();
            let row = 32 / 4 + 4;
            let most = 2 * row * (window + config.rewind + 2 * config.page_tokens + WINDOWS.keep);
            assert!(held.page_keys <= most, "window {window}: {} bytes of keys, at most {most}", held.page_keys);
        }
    }
}

#[test]
fn sixteen_bits_are_plain_attention() {
    let mut numbers = Numbers::new(7);
    let layer = LayerConfig::new(4, 2, 64);
    // A cache that moves everything through pages, and one whose window never ends.
    let paged = config(layer.clone(), WINDOWS, 8);
    let plain = config(layer, Windows { keep: 10_000, ..WINDOWS }, 8);
    let [mut paged, mut plain] = [paged, plain].map(|config| KvCache::new(config).expect("valid"));
    let (a, b) = (paged.add(), plain.add());
    let mut naive = Naive::new(plain.config(), 0);
    for n in [100, 1, 1, 30, 1] {
        let [queries, keys, values] = [4, 2, 2].map(|heads| numbers.take(n * heads * 64));
        let chunk = Chunk { queries: &queries, keys: &keys, values: &values };
        let mut outs = [vec![0.0; queries.len()], vec![0.0; queries.len()]];
        paged.step(0, &[Part { sequence: a, n_tokens: n }], chunk, &mut outs[0]).expect("valid");
        plain.step(0, &[Part { sequence: b, n_tokens: n }], chunk, &mut outs[1]).expect("valid");
        naive.append(&keys, &values);
        let expected = naive.attend(&queries);
        outs.iter().for_each(|out| assert_close(out, &expected, "16 bits"));
    }
}

/// The oracle's rows `[chunk, S, S_start, S_quant, first, last]`, positions from 1.
#[derive(serde::Deserialize)]
struct Boundary {
    sink: usize,
    keep: usize,
    flush: usize,
    rows: Vec<[usize; 6]>,
}

#[test]
fn boundaries_are_the_oracles() {
    let text = include_str!("../../../../tests/fixtures/oracle/cache.json");
    let cases: Vec<Boundary> = serde_json::from_str(text).expect("the oracle's file");
    assert!(cases.len() >= 2);
    for case in cases {
        let windows = Windows { sink: case.sink, keep: case.keep, flush: case.flush };
        let mut cache = KvCache::new(config(layer(1, 1, 16, [2, 2]), windows, 64)).expect("valid");
        let sequence = cache.add();
        for [chunk, len, start, quant, first, last] in case.rows {
            let before = cache.quantized(sequence, 0).expect("there").end;
            let parts = [Part { sequence, n_tokens: chunk }];
            cache.append(0, &parts, &vec![1.0; chunk * 16], &vec![1.0; chunk * 16]).expect("valid");
            cache.flush(0, &parts).expect("valid");
            let after = cache.quantized(sequence, 0).expect("there");
            let at = format!("{windows:?}, length {len}");
            assert_eq!(cache.len(sequence, 0).expect("there"), len, "{at}");
            assert_eq!(after.end - before.max(after.start), (last + 1).saturating_sub(first), "{at}: tokens quantized");
            if quant > case.sink {
                assert_eq!((before.max(case.sink), after.end), (start, quant), "{at}");
            }
        }
    }
}

#[test]
fn error_feedback_reaches_the_encoder_of_each_head() {
    let (d, n_kv) = (32, 2);
    let mut numbers = Numbers::new(8);
    // Unit lower triangular, another for each head and role.
    let lower: Vec<f32> = (0..2 * n_kv * d * d)
        .map(|at| match (at / d % d).cmp(&(at % d)) {
            std::cmp::Ordering::Less => 0.0,
            std::cmp::Ordering::Equal => 1.0,
            std::cmp::Ordering::Greater => 0.2 * numbers.take(1)[0],
        })
        .collect();
    let (for_keys, for_values) = lower.split_at(n_kv * d * d);
    let config = config(layer(4, n_kv, d, [2, 3]), WINDOWS, 8);
    let mut both = Both::new(&config, 1);
    both.cache.set_feedback(0, Some(for_keys), Some(for_values)).expect("unit lower triangular");
    both.naive[0].1.feedback = [for_keys, for_values].map(|lower| Some(lower.to_vec()));
    for chunk in [40, 1, 1, 9, 30] {
        both.step(&[chunk], &mut numbers, "feedback");
    }
    both.cache.set_feedback(0, None, None).expect("none");
    both.naive[0].1.feedback = [None, None];
    both.step(&[40], &mut numbers, "and without again");
    both.step(&[1], &mut numbers, "and without again");
}

#[test]
fn a_nan_in_a_query_stays_in_its_head() {
    let mut cache = KvCache::new(config(layer(4, 2, 16, [2, 2]), WINDOWS, 8)).expect("valid");
    let mut numbers = Numbers::new(9);
    let parts = [Part { sequence: cache.add(), n_tokens: 40 }];
    let [mut queries, keys, values] = [4, 2, 2].map(|heads| numbers.take(40 * heads * 16));
    queries[30 * 64 + 2 * 16 + 5] = f32::NAN;
    let mut out = vec![0.0; queries.len()];
    cache.step(0, &parts, Chunk { queries: &queries, keys: &keys, values: &values }, &mut out).expect("valid");
    for (at, head) in out.chunks_exact(16).enumerate() {
        assert!(head.iter().all(|x| x.is_nan() == (at == 30 * 4 + 2)), "token {}, head {}", at / 4, at % 4);
    }
}
