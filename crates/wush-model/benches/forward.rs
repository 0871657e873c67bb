//! Speed of the CPU forward: `cargo bench -p wush-model` (matmul libraries side by side), and with
//! `WUSH_BENCH_MODEL=DIR [WUSH_BENCH_TOKENS=FILE.json]` the tokens/s of a calibration, Gram matrices included (that alone
//! with `-- calibration`).
//!
//! The matmul part compares faer, which the backend uses, with the `gemm` crate, which candle-core uses, on the shapes of
//! a small model's layer; the calibration part is to be read beside `benches/torch/calibrate.py` on the same tokens.

use std::path::Path;
use std::time::Instant;

use faer::{Accum, MatMut, MatRef, Par, linalg::matmul::matmul};
use wush_checkpoint::Checkpoint;
use wush_format::monitor::Quiet;
use wush_model::Result;
use wush_model::backend::Backend;
use wush_model::cpu::Cpu;
use wush_model::decoder::Decoder;
use wush_model::observer::{Moments, Observer};
use wush_model::spec::ModelSpec;

/// As in the binary.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Repetitions of a timing; the fastest counts.
const REPEATS: usize = 7;

fn main() {
    if std::env::args().any(|arg| arg == "calibration") {
        return calibration(Path::new(
            &std::env::var("WUSH_BENCH_MODEL").expect("WUSH_BENCH_MODEL names a checkpoint"),
        ));
    }
    for (rows, depth, cols) in [(256, 576, 576), (1024, 576, 1536), (1024, 1536, 576), (512, 1536, 8960)] {
        matmul_libraries(rows, depth, cols);
    }
    match std::env::var("WUSH_BENCH_MODEL") {
        Ok(dir) => calibration(Path::new(&dir)),
        Err(_) => println!("calibration: skipped, WUSH_BENCH_MODEL names no checkpoint"),
    }
}

fn matmul_libraries(rows: usize, depth: usize, cols: usize) {
    let (x, w) = (vec![0.5f32; rows * depth], vec![0.25f32; cols * depth]);
    let mut y = vec![0.0f32; rows * cols];
    let faer = fastest(|| {
        let x = MatRef::from_row_major_slice(&x, rows, depth);
        let w = MatRef::from_row_major_slice(&w, cols, depth);
        let y = MatMut::from_row_major_slice_mut(&mut y, rows, cols);
        matmul(y, Accum::Replace, x, w.transpose(), 1.0, Par::Seq);
    });
    let (stride, one) = (depth as isize, 1);
    // SAFETY: the three buffers have rows*cols, rows*depth and cols*depth elements, and the strides stay inside them.
    let gemm = fastest(|| unsafe {
        let (y, x, w) = (y.as_mut_ptr(), x.as_ptr(), w.as_ptr());
        let serial = gemm::Parallelism::None;
        let cols_stride = cols as isize;
        gemm::gemm(
            rows,
            cols,
            depth,
            y,
            one,
            cols_stride,
            false,
            x,
            one,
            stride,
            w,
            stride,
            one,
            0.0,
            1.0,
            false,
            false,
            false,
            serial,
        );
    });
    let gflop = 2.0 * (rows * depth * cols) as f64 / 1e9;
    println!(
        "f32 {rows} x {depth} x {cols}, one thread: faer {:.0} GFLOP/s, gemm {:.0} GFLOP/s, ratio {:.2}",
        gflop / faer,
        gflop / gemm,
        gemm / faer
    );
}

fn fastest(mut work: impl FnMut()) -> f64 {
    let once = |_| {
        let start = Instant::now();
        work();
        start.elapsed().as_secs_f64()
    };
    (0..REPEATS).map(once).fold(f64::INFINITY, f64::min)
}

/// Takes the moments as a calibration does, and lets them go.
struct Watch<'a>(&'a ModelSpec);

impl<B: Backend> Observer<B> for Watch<'_> {
    type Seen = Moments;

    fn see(&self, backend: &B, layer: usize, q: &B::Tensor, k: &B::Tensor, v: &B::Tensor) -> Result<Moments> {
        let attn = &self.0.layers[layer].attn;
        Moments::of(backend, attn.n_kv_heads, attn.head_dim, [q, k, v])
    }

    fn add(&mut self, _layer: usize, seen: Moments) -> Result<()> {
        std::hint::black_box(seen);
        Ok(())
    }
}

fn calibration(dir: &Path) {
    let checkpoint = Checkpoint::open(dir).expect("WUSH_BENCH_MODEL is a checkpoint");
    let spec = wush_model::arch::resolve(&checkpoint, None).expect("a supported family");
    let sequences = tokens(spec.vocab_size);
    let n_tokens: usize = sequences.iter().map(Vec::len).sum();
    let decoder = Decoder::new(&checkpoint, &spec, &Cpu);
    let start = Instant::now();
    decoder.observe(&sequences, &mut Watch(&spec), &Quiet).expect("the forward pass runs");
    let seconds = start.elapsed().as_secs_f64();
    println!("calibration: {n_tokens} tokens in {seconds:.2} s, {:.0} tokens/s", n_tokens as f64 / seconds);
}

/// Token-id lists of `WUSH_BENCH_TOKENS`, or 16 × 1024 pseudo-random ids.
fn tokens(vocab_size: usize) -> Vec<Vec<u32>> {
    if let Ok(file) = std::env::var("WUSH_BENCH_TOKENS") {
        let text = std::fs::read_to_string(file).expect("WUSH_BENCH_TOKENS is readable");
        return serde_json::from_str(&text).expect("WUSH_BENCH_TOKENS holds lists of ids");
    }
    let id = |i: usize| ((i * 7919 + i / 7) % vocab_size) as u32;
    (0..16).map(|s| (0..1024).map(|t| id(s * 1024 + t)).collect()).collect()
}
