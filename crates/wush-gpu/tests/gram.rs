//! Sums over positions and products of heads on a GPU, against f64 on the host: Gram matrices, column sums, checks for what is
//! not finite, transforms of heads. Skipped, loudly, without a GPU.

mod common;

use common::{Real, poisoned, random, real, relative_error, uploaded, wide};
use half::bf16;
use wush_gpu::matmul::Matrix;
use wush_gpu::sums::{FiniteCheck, NonFinite};
use wush_gpu::{Buffer, Device};

/// Of bf16 Gram matrices on tensor cores, in the Frobenius norm: derived in the kernel's file.
const GRAM_REL_TOL: f64 = 5e-6;
/// Of f64 sums of up to 2^13 terms in two orders: their roundings add up like the root of their number at best, and to
/// 2^13 · 2⁻⁵³ at worst.
const F64_REL_TOL: f64 = 1e-12;
/// Head dims of the families.
const HEAD_DIMS: [usize; 6] = [64, 80, 96, 112, 128, 256];

/// `[tokens, heads d]` whose rows lie `stride` apart, and the heads that form groups of `group`, from `first` on.
struct Rows<'a, T> {
    x: &'a [T],
    stride: usize,
    head_dim: usize,
}

impl<T: Real> Rows<'_, T> {
    /// Σ_g Σ_t w x xᵀ of `n_groups` groups in f64, full symmetric.
    fn gram(&self, first: usize, group: usize, n_groups: usize, weights: Option<&[f64]>) -> Vec<f64> {
        let dim = self.head_dim;
        let n_tokens = self.x.len().div_ceil(self.stride);
        let mut out = vec![0.0; n_groups * dim * dim];
        for (h, gram) in out.chunks_exact_mut(dim * dim).enumerate() {
            for (t, row) in self.x.chunks(self.stride).enumerate() {
                for head in row[(first + h * group) * dim..][..group * dim].chunks_exact(dim) {
                    let head = wide(head);
                    let weight = weights.map_or(1.0, |weights| weights[h * n_tokens + t]);
                    for (i, row) in gram.chunks_exact_mut(dim).enumerate() {
                        row.iter_mut().zip(&head).for_each(|(sum, x)| *sum += weight * head[i] * x);
                    }
                }
            }
        }
        out
    }
}

/// Values around means that differ by column, as keys have them: the case where a sum loses most.
fn with_means<T: Real>(seed: u64, n_rows: usize, width: usize) -> Vec<T> {
    let means = random(seed + 1, width);
    random(seed, n_rows * width).iter().enumerate().map(|(i, x)| T::narrow(x + 3.0 * means[i % width])).collect()
}

/// q, k and v in one row; the Gram matrices of each, from one call.
fn grams<T: Real>(device: &Device, head_dim: usize, [n_tokens, n_kv, group]: [usize; 3], tol: f64) {
    let n_heads = n_kv * (group + 2);
    let (width, stride) = (n_heads * head_dim, n_heads * head_dim + 8);
    let x: Vec<T> = with_means(n_tokens as u64, n_tokens, stride);
    let rows = uploaded(device, &x);
    let matrix = Matrix { view: rows.view(), n_rows: n_tokens, width, stride };
    let parts = device.gram_parts(matrix, head_dim).expect("begun");
    let reference = Rows { x: &x, stride, head_dim };
    for (first, group) in [(0, group), (n_kv * group, 1), (n_kv * (group + 1), 1)] {
        let before = vec![0.5; n_kv * head_dim * head_dim];
        let mut into = uploaded(device, &before);
        device.add_gram(&parts, first..first + n_kv * group, &mut into.view_mut()).expect("begun");
        let found = into.to_host().expect("done");
        let exact = reference.gram(first, group, n_kv, None);
        let error = relative_error(found.iter().map(|x| x - 0.5), &exact);
        assert!(error <= tol, "{n_tokens} tokens, heads of {head_dim}, groups of {group}: {error:e}");
        for gram in found.chunks_exact(head_dim * head_dim) {
            assert!((0..gram.len()).all(|at| gram[at] == gram[at % head_dim * head_dim + at / head_dim]), "symmetric");
        }
    }
}

#[test]
fn gram_matrices_on_tensor_cores_agree_with_f64() {
    let Some(device) = common::device("gram_matrices_on_tensor_cores_agree_with_f64") else { return };
    for head_dim in HEAD_DIMS {
        for shape in [[1, 1, 1], [63, 2, 3], [700, 1, 2]] {
            grams::<bf16>(&device, head_dim, shape, GRAM_REL_TOL);
        }
    }
    for group in 1..=8 {
        grams::<bf16>(&device, 64, [130, 2, group], GRAM_REL_TOL);
    }
    // A part's border, and a sum long enough for the tensor cores' truncation to show.
    grams::<bf16>(&device, 64, [4097, 1, 1], GRAM_REL_TOL);
}

#[test]
fn gram_matrices_of_f32_are_f64_throughout() {
    let Some(device) = common::device("gram_matrices_of_f32_are_f64_throughout") else { return };
    for head_dim in [64, 80, 256] {
        grams::<f32>(&device, head_dim, [1, 1, 1], F64_REL_TOL);
        grams::<f32>(&device, head_dim, [77, 2, 2], F64_REL_TOL);
    }
    grams::<f32>(&device, 64, [1025, 1, 1], F64_REL_TOL);
}

#[test]
fn gram_matrices_are_the_same_in_every_run() {
    let Some(device) = common::device("gram_matrices_are_the_same_in_every_run") else { return };
    let (n_tokens, n_heads, head_dim) = (9000, 3, 128);
    let x: Vec<bf16> = with_means(1, n_tokens, n_heads * head_dim);
    let rows = uploaded(&device, &x);
    let run = || {
        let matrix = Matrix::packed(rows.view(), n_tokens, n_heads * head_dim);
        let parts = device.gram_parts(matrix, head_dim).expect("begun");
        let mut into: Buffer<f64> = device.filled(head_dim * head_dim, 0).expect("filled");
        device.add_gram(&parts, 0..n_heads, &mut into.view_mut()).expect("begun");
        into.to_host().expect("done").into_iter().map(f64::to_bits).collect::<Vec<u64>>()
    };
    let first = run();
    assert!((0..3).all(|_| run() == first));
}

fn weighted<T: Real>(device: &Device, head_dim: usize, n_tokens: usize) {
    let n_kv = 2;
    let width = n_kv * head_dim;
    let (keys, values): (Vec<T>, Vec<T>) = (real(1, n_tokens * width), with_means(2, n_tokens, width));
    // A Gram matrix of a few more vectors: positive semidefinite, as the mean of queries is.
    let of_queries: Vec<f32> = random(3, (head_dim + 3) * width);
    let a = Rows { x: &of_queries, stride: width, head_dim }.gram(0, 1, n_kv, None);
    let [k, v] = [&keys, &values].map(|data| uploaded(device, data));
    let matrix = |buffer| Matrix::packed(Buffer::view(buffer), n_tokens, width);
    let matrices = uploaded(device, &a);
    let forms = device.quadratic_forms(matrix(&k), matrices.view(), head_dim).expect("begun");
    let mut exact = vec![0.0; n_kv * n_tokens];
    for (t, row) in keys.chunks_exact(width).enumerate() {
        for (h, key) in row.chunks_exact(head_dim).enumerate() {
            let (key, a) = (wide(key), &a[h * head_dim * head_dim..][..head_dim * head_dim]);
            let image = a.chunks_exact(head_dim).map(|row| row.iter().zip(&key).map(|(a, k)| a * k).sum::<f64>());
            exact[h * n_tokens + t] = image.zip(&key).map(|(image, k)| image * k).sum::<f64>().max(0.0);
        }
    }
    let found = forms.to_host().expect("done");
    let error = relative_error(found.iter().copied(), &exact);
    assert!(error <= F64_REL_TOL, "forms of {n_tokens} tokens, heads of {head_dim}: {error:e}");

    let parts = device.weighted_gram_parts(matrix(&v), Some(forms.view()), head_dim).expect("begun");
    let mut into: Buffer<f64> = device.filled(n_kv * head_dim * head_dim, 0).expect("filled");
    device.add_gram(&parts, 0..n_kv, &mut into.view_mut()).expect("begun");
    let exact = Rows { x: &values, stride: width, head_dim }.gram(0, 1, n_kv, Some(&exact));
    let error = relative_error(into.to_host().expect("done"), &exact);
    assert!(error <= F64_REL_TOL, "weighted, {n_tokens} tokens, heads of {head_dim}: {error:e}");
}

#[test]
fn weighted_gram_matrices_agree_with_f64() {
    let Some(device) = common::device("weighted_gram_matrices_agree_with_f64") else { return };
    for (head_dim, n_tokens) in [(64, 1), (80, 33), (128, 100), (256, 40), (64, 1030)] {
        weighted::<bf16>(&device, head_dim, n_tokens);
        weighted::<f32>(&device, head_dim, n_tokens);
    }
}

fn column_sums<T: Real>(device: &Device) {
    for (n_rows, width) in [(1, 8), (257, 72), (1025, 576), (700, 1032)] {
        let stride = width + 8;
        let x: Vec<T> = with_means(1, n_rows, stride);
        let rows = uploaded(device, &x);
        let mut into = uploaded(device, &vec![0.25; width]);
        let matrix = Matrix { view: rows.view(), n_rows, width, stride };
        device.column_sums(matrix, &mut into.view_mut()).expect("begun");
        let mut exact = vec![0.25; width];
        for row in x.chunks(stride) {
            exact.iter_mut().zip(row).for_each(|(sum, x)| *sum += x.wide());
        }
        let error = relative_error(into.to_host().expect("done"), &exact);
        assert!(error <= F64_REL_TOL, "{n_rows} x {width}: {error:e}");
    }
}

#[test]
fn column_sums_agree_with_f64() {
    let Some(device) = common::device("column_sums_agree_with_f64") else { return };
    column_sums::<bf16>(&device);
    column_sums::<f32>(&device);
}

fn non_finite<T: Real>(device: &Device) {
    for (n_rows, width) in [(1, 8), (100, 576), (19, 2056)] {
        let mut check = FiniteCheck::new(device, 3).expect("room");
        let mut x: Vec<T> = real(1, n_rows * width);
        let look = |check: &mut FiniteCheck, slot, x: &[T]| {
            let rows = uploaded(device, x);
            check.look(slot, Matrix::packed(rows.view(), n_rows, width)).expect("begun");
            check.first().expect("done")
        };
        assert_eq!(look(&mut check, 0, &x), None);
        let values = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        // From the end to the front, so that each is the first.
        for (i, index) in [n_rows * width - 1, n_rows * width / 2, 3, 0].into_iter().enumerate() {
            x[index] = T::narrow(values[i % 3]);
            assert_eq!(look(&mut check, 1, &x), Some(NonFinite { slot: 1, index }));
        }
        check.clear().expect("begun");
        assert_eq!(check.first().expect("done"), None);
    }
}

#[test]
fn the_first_element_that_is_not_finite_is_found() {
    let Some(device) = common::device("the_first_element_that_is_not_finite_is_found") else { return };
    non_finite::<bf16>(&device);
    non_finite::<f32>(&device);
}

fn transforms<T: Real>(device: &Device, head_dim: usize, [n_tokens, n_kv, group]: [usize; 3]) {
    let width = n_kv * group * head_dim;
    let stride = width + 16;
    let (x, matrices): (Vec<T>, _) = (real(1, n_tokens * stride), random(2, n_kv * head_dim * head_dim));
    let (rows, on_device) = (uploaded(device, &x), uploaded(device, &matrices));
    let mut out: Buffer<T> = poisoned(device, n_tokens * width);
    let matrix = Matrix { view: rows.view(), n_rows: n_tokens, width, stride };
    device.transform_heads(matrix, on_device.view(), head_dim, &mut out.view_mut()).expect("begun");
    let mut exact = Vec::with_capacity(n_tokens * width);
    for row in x.chunks(stride) {
        for (n, head) in row[..width].chunks_exact(head_dim).enumerate() {
            let (head, matrix) = (wide(head), &matrices[n / group * head_dim * head_dim..][..head_dim * head_dim]);
            let product = |row: &[f32]| row.iter().zip(&head).map(|(&m, x)| f64::from(m) * x).sum::<f64>();
            exact.extend(matrix.chunks_exact(head_dim).map(product));
        }
    }
    T::close("transform_heads", wide(&out.to_host().expect("done")), &exact);
}

#[test]
fn transforms_of_heads_agree_with_f64() {
    let Some(device) = common::device("transforms_of_heads_agree_with_f64") else { return };
    for head_dim in HEAD_DIMS {
        transforms::<bf16>(&device, head_dim, [70, 2, 1]);
        transforms::<f32>(&device, head_dim, [70, 2, 1]);
    }
    for group in 1..=8 {
        transforms::<bf16>(&device, 64, [65, 2, group]);
        transforms::<f32>(&device, 64, [65, 2, group]);
    }
    transforms::<bf16>(&device, 128, [513, 1, 1]);
}
