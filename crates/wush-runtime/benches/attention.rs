//! Attention of one decoding step over a long cache at 2 bits, beside the same over caches in f32 and bf16 in the same run, and
//! beside reading the packed bytes once; packing a prompt; key transforms. `cargo bench -p wush-runtime` measures with
//! criterion; `-- quick` prints the fastest of several runs and the ratios, with `--features parallel` on all cores.
//!
//! 32,768 tokens, 8 KV heads, 32 query heads, d = 128; windows of Section 5.3 (64, 256, 8).

use std::collections::BTreeMap;
use std::hint::black_box;
use std::path::Path;
use std::time::Duration;

use criterion::Criterion;
use rustix::time::{ClockId, clock_gettime};
use wush_format::bundle::{KeyLayer, KeySidecar};
use wush_format::hash::Sha;
use wush_quant::{Method, Role, ScaleDtype};
use wush_runtime::{CacheConfig, FullDtype, KeyTransforms, KvCache, LayerConfig, Part, Precision};

const N_TOKENS: usize = 32_768;
const HEADS: [usize; 2] = [32, 8];
const DIM: usize = 128;
/// Tokens of a prompt's chunk.
const CHUNK: usize = 2048;
/// Bytes that lie between two uses of the same cache: more than the machine's caches keep, as when a model has many layers.
const APART: usize = 256 << 20;
/// Repetitions of a quick timing; the fastest counts.
const REPEATS: usize = 24;

/// One thing to measure: its name, the bytes it reads, and itself.
struct Action {
    name: String,
    n_bytes: usize,
    run: Box<dyn FnMut()>,
}

impl Action {
    fn new(name: impl Into<String>, n_bytes: usize, run: impl FnMut() + 'static) -> Self {
        Self { name: name.into(), n_bytes, run: Box::new(run) }
    }
}

fn main() {
    let actions = actions();
    if std::env::args().any(|arg| arg == "quick") {
        return actions.into_iter().for_each({
            let mut first = f64::NAN;
            move |action| quick(action, &mut first)
        });
    }
    let mut criterion = Criterion::default().configure_from_args();
    let mut group = criterion.benchmark_group("runtime");
    group.sample_size(10).measurement_time(Duration::from_secs(3));
    for mut action in actions {
        group.bench_function(action.name, |bencher| bencher.iter(&mut action.run));
    }
    group.finish();
    criterion.final_summary();
}

fn actions() -> Vec<Action> {
    let mut actions = Vec::new();
    for (bits, full) in [(2, FullDtype::F32), (4, FullDtype::F32), (16, FullDtype::Bf16), (16, FullDtype::F32)] {
        let mut case = Case::new(bits, full);
        actions.push(Action::new(format!("attention, {}", case.name), case.n_bytes, move || case.attend()));
    }
    for (name, row_bytes) in [("2-bit", 36), ("bf16", 2 * DIM), ("f32", 4 * DIM)] {
        let n_bytes = N_TOKENS * HEADS[1] * 2 * row_bytes;
        let caches = vec![vec![1u8; n_bytes]; APART.div_ceil(n_bytes)];
        let mut next = (0..caches.len()).cycle();
        let run = move || read(&caches[next.next().expect("endless")]);
        actions.push(Action::new(format!("read the bytes of {name} once"), n_bytes, run));
    }
    let mut prompt = Prompt::new();
    let n_bytes = 2 * size_of_val(&*prompt.keys);
    actions.push(Action::new("append and pack 2048 tokens, quest", n_bytes, move || prompt.run()));
    for n_tokens in [1, 64] {
        let mut transform = Transform::new(n_tokens);
        let name = format!("key and query transforms, {n_tokens} tokens");
        actions.push(Action::new(name, 2 * HEADS[1] * DIM * DIM * size_of::<f32>(), move || transform.run()));
    }
    actions
}

/// Prints the fastest time, its rate, and its ratio to the first action's.
fn quick(mut action: Action, first: &mut f64) {
    let mut time = || {
        let start = seconds();
        (action.run)();
        seconds() - start
    };
    let fastest = (0..REPEATS).map(|_| time()).fold(f64::INFINITY, f64::min);
    *first = if first.is_nan() { fastest } else { *first };
    let gigabytes = action.n_bytes as f64 / fastest / 1e9;
    println!("{:42} {:9.3} ms  {gigabytes:6.2} GB/s  x {:.2}", action.name, fastest * 1e3, fastest / *first);
}

/// CPU time of this thread, which other work on the machine hardly touches; with several threads the time that passes.
fn seconds() -> f64 {
    let clock = if cfg!(feature = "parallel") { ClockId::Monotonic } else { ClockId::ThreadCPUTime };
    let time = clock_gettime(clock);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

fn numbers(n: usize) -> Vec<f32> {
    let mut state = 1u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u32 << 24) as f32 - 0.5
    };
    (0..n).map(|_| uniform() + uniform()).collect()
}

fn config(bits: u8, full: FullDtype) -> CacheConfig {
    let method: Method = "quest".parse().expect("a name");
    let stored = |role| Precision::new(bits, &method, role, ScaleDtype::Bf16).expect("in range");
    let layer = LayerConfig::new(HEADS[0], HEADS[1], DIM).stored(stored(Role::Key), stored(Role::Value));
    CacheConfig { full, ..CacheConfig::new(vec![layer]) }
}

/// Full caches of one layer, used in turn, and a step's queries.
struct Case {
    name: String,
    cache: KvCache,
    parts: Vec<Part>,
    next: usize,
    queries: Vec<f32>,
    out: Vec<f32>,
    n_bytes: usize,
}

impl Case {
    fn new(bits: u8, full: FullDtype) -> Self {
        let name = if bits == 16 { format!("{full:?}").to_lowercase() } else { format!("{bits} bits") };
        let mut cache = KvCache::new(config(bits, full)).expect("valid");
        let (mut parts, mut n_bytes) = (vec![fill(&mut cache)], cache.memory().total());
        println!("{name}: {:.2} MB, {:?}", n_bytes as f64 / 1e6, cache.memory());
        parts.extend((1..APART.div_ceil(n_bytes)).map(|_| fill(&mut cache)));
        n_bytes = cache.memory().total() / parts.len();
        let queries = numbers(HEADS[0] * DIM);
        Self { name, cache, parts, next: 0, out: queries.clone(), queries, n_bytes }
    }

    fn attend(&mut self) {
        self.next = (self.next + 1) % self.parts.len();
        let part = self.parts[self.next];
        self.cache.attend(0, &[part], black_box(&self.queries), &mut self.out).expect("valid");
        black_box(&self.out);
    }
}

/// A new sequence of [`N_TOKENS`]; the part is one decoding step of it.
fn fill(cache: &mut KvCache) -> Part {
    let sequence = cache.add();
    let kv = numbers(CHUNK * HEADS[1] * DIM);
    for _ in 0..N_TOKENS / CHUNK {
        let parts = [Part { sequence, n_tokens: CHUNK }];
        cache.append(0, &parts, &kv, &kv).expect("valid");
        cache.flush(0, &parts).expect("valid");
    }
    Part { sequence, n_tokens: 1 }
}

/// Sums all bytes as words: what reading them costs.
fn read(bytes: &[u8]) {
    let (words, _) = black_box(bytes).as_chunks();
    let mut sums = [0u64; 8];
    for words in words.chunks_exact(8) {
        sums.iter_mut().zip(words).for_each(|(sum, &word)| *sum = sum.wrapping_add(u64::from_le_bytes(word)));
    }
    black_box(sums);
}

struct Prompt {
    cache: KvCache,
    keys: Vec<f32>,
}

impl Prompt {
    fn new() -> Self {
        let cache = KvCache::new(config(2, FullDtype::F32)).expect("valid");
        Self { cache, keys: numbers(CHUNK * HEADS[1] * DIM) }
    }

    fn run(&mut self) {
        let sequence = self.cache.add();
        let parts = [Part { sequence, n_tokens: CHUNK }];
        self.cache.append(0, &parts, &self.keys, &self.keys).expect("valid");
        self.cache.flush(0, &parts).expect("valid");
        self.cache.remove(sequence).expect("there");
    }
}

/// Key transforms of one layer, the identity: its cost is that of any other.
struct Transform {
    transforms: KeyTransforms,
    keys: Vec<f32>,
    queries: Vec<f32>,
}

impl Transform {
    fn new(n_tokens: usize) -> Self {
        let of_head = |_| (0..DIM * DIM).map(|at| f32::from(u8::from(at / DIM == at % DIM)));
        let key: Vec<f32> = (0..HEADS[1]).flat_map(of_head).collect();
        let layer = KeyLayer::new(HEADS[1], DIM, key.clone(), key);
        let sidecar = KeySidecar { layers: BTreeMap::from([(0, layer)]), model_hash: Sha([0; 32]) };
        let transforms = KeyTransforms::from_sidecar(Path::new("identity"), &sidecar).expect("its own inverse");
        let [queries, keys] = HEADS.map(|heads| numbers(n_tokens * heads * DIM));
        Self { transforms, keys, queries }
    }

    fn run(&mut self) {
        self.transforms.transform_keys(0, &mut self.keys).expect("whole");
        self.transforms.transform_queries(0, HEADS[0], &mut self.queries).expect("whole");
    }
}
