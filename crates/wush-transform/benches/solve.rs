//! Time to solve Qwen3-8B's 576 heads (36 layers × 8 KV heads × key and value, d = 128) with every measure, beside the
//! floor: one eigendecomposition of the same matrices and nothing else.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use faer::dyn_stack::{MemBuffer, MemStack};
use faer::linalg::evd::{ComputeEigenvectors, self_adjoint_evd, self_adjoint_evd_scratch};
use faer::{Col, Mat, MatRef, Par, Spec};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use rayon::prelude::*;
use wush_transform::wush;

const HEADS: usize = 36 * 8 * 2;
const DIM: usize = 128;
const DAMPING: f64 = 0.01;

/// A random symmetric positive definite matrix: diag(a) + B Bᵀ, a over two decades, B `[d, d/8]` uniform.
fn random_spd(rng: &mut ChaCha8Rng) -> Vec<f64> {
    let mut uniform = || (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
    let width = DIM / 8;
    let factor: Vec<f64> = (0..DIM * width).map(|_| 2.0 * uniform() - 1.0).collect();
    let diagonal: Vec<f64> = (0..DIM).map(|_| 10.0_f64.powf(2.0 * uniform() - 2.0)).collect();
    let row = |i: usize| &factor[i * width..][..width];
    let dot = |i: usize, j: usize| row(i).iter().zip(row(j)).map(|(x, y)| x * y).sum::<f64>();
    (0..DIM * DIM)
        .map(|at| {
            let (i, j) = (at / DIM, at % DIM);
            dot(i, j) + if i == j { diagonal[i] } else { 0.0 }
        })
        .collect()
}

fn eigendecomposition(matrix: &[f64]) -> f64 {
    let (mut values, mut vectors) = (Col::<f64>::zeros(DIM), Mat::<f64>::zeros(DIM, DIM));
    let scratch = self_adjoint_evd_scratch::<f64>(DIM, ComputeEigenvectors::Yes, Par::Seq, Spec::default());
    let mut memory = MemBuffer::new(scratch);
    let a = MatRef::from_row_major_slice(matrix, DIM, DIM);
    let stack = MemStack::new(&mut memory);
    self_adjoint_evd(a, values.as_mut().as_diagonal_mut(), Some(vectors.as_mut()), Par::Seq, stack, Spec::default())
        .expect("random SPD matrices converge");
    values[0] + vectors[(0, 0)]
}

fn bench(criterion: &mut Criterion) {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let heads: Vec<(Vec<f64>, Vec<f64>)> = (0..HEADS).map(|_| (random_spd(&mut rng), random_spd(&mut rng))).collect();
    let solve_all = || {
        heads.par_iter().for_each(|(gram, hessian)| {
            black_box(wush(gram, hessian, DIM, DAMPING).expect("damped heads are solvable"));
        });
    };
    let start = Instant::now();
    solve_all();
    println!("{HEADS} heads of d = {DIM} on {} threads: {:.3?}", rayon::current_num_threads(), start.elapsed());

    let mut group = criterion.benchmark_group("solve");
    group.sample_size(10).measurement_time(Duration::from_secs(12));
    group.bench_function("576 heads", |b| b.iter(solve_all));
    group.bench_function("576 eigendecompositions (floor)", |b| {
        b.iter(|| heads.par_iter().map(|(gram, _)| eigendecomposition(gram)).collect::<Vec<_>>());
    });
    group.bench_function("one head", |b| b.iter(|| wush(&heads[0].0, &heads[0].1, DIM, DAMPING)));
    group.bench_function("one eigendecomposition (floor)", |b| b.iter(|| eigendecomposition(&heads[0].0)));
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
