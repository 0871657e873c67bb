//! Speed of packing, unpacking and attention's two products, beside a copy of the same bytes: `cargo bench -p wush-quant`.
//!
//! One thread; 32,768 tokens of 8 KV heads, laid out as records one after another. `dot` and `axpy` run with one query and
//! with four (a group of grouped-query attention). A copy reads and writes the packed bytes. `-- quick` prints a line for each
//! layout and the ratios to the copy, the fastest of several runs; `-- quick levels` also on narrower vectors. Without it
//! criterion measures.

use std::cmp::Ordering;
use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput};
use wush_quant::{Accumulators, Bits, Codec, Feedback, Level, Method, Queries, Role, ScaleDtype};

const N_TOKENS: usize = 32_768 * 8;
const DIMS: [usize; 2] = [64, 128];
/// Tokens a call: a page's worth and more, as a runtime would pass.
const BLOCK: usize = 256;
/// Repetitions of a quick timing; the fastest counts.
const REPEATS: usize = 11;

fn main() {
    if std::env::args().any(|arg| arg == "quick") {
        return quick();
    }
    let mut criterion = Criterion::default().configure_from_args();
    for dim in DIMS {
        for bits in Bits::ALL {
            measure(&mut criterion, &mut Data::new(dim, bits, Level::widest()));
        }
    }
    criterion.final_summary();
}

struct Data {
    codec: Codec,
    /// The same with the OSCAR-style quantizer, which only packing knows.
    oscar: Codec,
    feedback: Feedback,
    numbers: Vec<f32>,
    packed: Vec<u8>,
    copy: Vec<u8>,
}

impl Data {
    fn new(dim: usize, bits: Bits, level: Level) -> Self {
        let [codec, oscar] = ["quest", "oscar"].map(|name| {
            let method: Method = name.parse().expect("a name");
            let quantizer = method.quantizer(bits, Role::Key, ScaleDtype::Bf16).expect("in range");
            Codec::new(dim, quantizer).expect("in range").at(level).expect("available")
        });
        let mut state = 1u64;
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u32 << 24) as f32 - 0.5
        };
        let numbers: Vec<f32> = (0..N_TOKENS * dim).map(|_| uniform() + uniform()).collect();
        let mut packed = vec![0; N_TOKENS * codec.layout().n_bytes()];
        codec.pack(&numbers, &mut packed).expect("in range");
        let copy = packed.clone();
        let lower: Vec<f32> = (0..dim * dim)
            .map(|at| match (at / dim).cmp(&(at % dim)) {
                Ordering::Less => 0.0,
                Ordering::Equal => 1.0,
                Ordering::Greater => numbers[at] / 8.0,
            })
            .collect();
        let feedback = Feedback::new(dim, &lower).expect("unit lower triangular");
        Self { codec, oscar, feedback, numbers, packed, copy }
    }

    fn copy(&mut self) {
        self.copy.copy_from_slice(black_box(&self.packed));
        black_box(&self.copy);
    }

    fn pack(&mut self) {
        self.codec.pack(black_box(&self.numbers), &mut self.packed).expect("in range");
    }

    fn pack_oscar(&mut self) {
        self.oscar.pack(black_box(&self.numbers), &mut self.packed).expect("in range");
    }

    fn pack_with_feedback(&mut self) {
        // As a runtime flushes: 16 tokens of a head at a time.
        let (layout, numbers) = (self.codec.layout(), black_box(&self.numbers));
        let flushes = numbers.chunks_exact(16 * layout.head_dim());
        for (x, packed) in flushes.zip(self.packed.chunks_exact_mut(16 * layout.n_bytes())) {
            self.codec.pack_with_feedback(x, &self.feedback, packed).expect("in range");
        }
    }

    fn unpack(&mut self) {
        self.codec.unpack(black_box(&self.packed), &mut self.numbers).expect("whole records");
    }

    fn dot(&self, group: usize) {
        let queries = Queries::new(self.codec.layout(), &self.numbers[..group * self.codec.layout().head_dim()]);
        let queries = queries.expect("whole");
        let mut scores = vec![0.0; group * BLOCK];
        for block in self.packed.chunks_exact(BLOCK * self.codec.layout().n_bytes()) {
            self.codec.dot(&queries, black_box(block), &mut scores).expect("right lengths");
            black_box(&scores);
        }
    }

    fn axpy(&self, group: usize) {
        let weights = vec![1.0 / N_TOKENS as f32; group * BLOCK];
        let mut sums = Accumulators::new(self.codec.layout(), group);
        for block in self.packed.chunks_exact(BLOCK * self.codec.layout().n_bytes()) {
            self.codec.axpy(&weights, black_box(block), &mut sums).expect("right lengths");
        }
        black_box(&sums);
    }
}

/// One thing to measure.
type Action = fn(&mut Data);

/// What is measured, by name.
const ACTIONS: [(&str, Action); 9] = [
    ("copy", Data::copy),
    ("pack, quest", Data::pack),
    ("pack, oscar", Data::pack_oscar),
    ("pack, feedback", Data::pack_with_feedback),
    ("unpack", Data::unpack),
    ("dot, 1 query", |data| data.dot(1)),
    ("dot, 4 queries", |data| data.dot(4)),
    ("axpy, 1 query", |data| data.axpy(1)),
    ("axpy, 4 queries", |data| data.axpy(4)),
];

fn measure(criterion: &mut Criterion, data: &mut Data) {
    let (dim, bits) = (data.codec.layout().head_dim(), data.codec.layout().bits().get());
    let mut group = criterion.benchmark_group(format!("d {dim}, {bits} bits"));
    group.sample_size(10).measurement_time(Duration::from_secs(2)).throughput(Throughput::Elements(N_TOKENS as u64));
    for (name, action) in ACTIONS {
        group.bench_function(name, |bencher| bencher.iter(|| action(data)));
    }
    group.finish();
}

fn quick() {
    let all = std::env::args().any(|arg| arg == "levels");
    let levels = Level::ALL.into_iter().filter(|level| level.is_available() && (all || *level == Level::widest()));
    for level in levels {
        for (dim, bits) in DIMS.into_iter().flat_map(|dim| Bits::ALL.map(|bits| (dim, bits))) {
            let mut data = Data::new(dim, bits, level);
            let mut copy = f64::NAN;
            println!("d {dim}, {} bits, {} bytes, {}", bits.get(), data.codec.layout().n_bytes(), level.name());
            for (name, action) in ACTIONS {
                let seconds = fastest(|| action(&mut data));
                copy = if name == "copy" { seconds } else { copy };
                let (rate, gigabytes) = (N_TOKENS as f64 / seconds / 1e6, data.packed.len() as f64 / seconds / 1e9);
                println!("    {name:16} {rate:6.1} M token-heads/s {gigabytes:6.2} GB/s  copy x {:.2}", seconds / copy);
            }
        }
    }
}

fn fastest(mut work: impl FnMut()) -> f64 {
    let time = |work: &mut dyn FnMut()| {
        let start = Instant::now();
        work();
        start.elapsed().as_secs_f64()
    };
    (0..REPEATS).map(|_| time(&mut work)).fold(f64::INFINITY, f64::min)
}
