//! The kernels between the products on a GPU, against f64 on the host, in bf16 and in f32. Skipped, loudly, without a GPU.

mod common;

use common::{Real, columns, poisoned, random, real, uploaded, wide};
use half::{bf16, f16};
use wush_gpu::convert::Convert;
use wush_gpu::elementwise::{Gate, Table};
use wush_gpu::matmul::Matrix;
use wush_gpu::norm::Norm;
use wush_gpu::operand::MatrixMut;
use wush_gpu::rope::{HeadNormRope, Rotation};
use wush_gpu::{Buffer, Device, Element, GpuError};

const EPS: [f32; 2] = [1e-6, 1e-5];

/// Eq. 10 of rows, in f64.
fn norm(x: &[f64], weight: &[f32], eps: f32) -> Vec<f64> {
    let of_row = |row: &[f64]| {
        let mean_square = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
        let scale = 1.0 / (mean_square + f64::from(eps)).sqrt();
        row.iter().zip(weight).map(|(x, &w)| x * scale * f64::from(w)).collect::<Vec<f64>>()
    };
    x.chunks_exact(weight.len()).flat_map(of_row).collect()
}

fn sum(x: &[f64], y: &[f64]) -> Vec<f64> {
    x.iter().zip(y).map(|(x, y)| x + y).collect()
}

fn norms<T: Real>(device: &Device) {
    for (n_rows, width) in [(1, 8), (37, 576), (5, 4096), (3, 8192), (130, 72)] {
        let [weight, post] = [1, 2].map(|seed| random(seed, width));
        let [weights, posts] = [&weight, &post].map(|data| uploaded(device, data));
        let [norm_of, post_of] = [(&weights, EPS[0]), (&posts, EPS[1])].map(|(w, eps)| Norm { weight: w.view(), eps });
        let stride = width + 16;
        let strided: Vec<T> = real(3, n_rows * stride);
        let from = uploaded(device, &strided);
        let mut out: Buffer<T> = poisoned(device, n_rows * stride);
        let matrix = Matrix { view: from.view(), n_rows, width, stride };
        device.rms_norm(matrix, norm_of, &mut out.view_mut(), stride).expect("begun");
        let (exact, found) =
            (norm(&wide(&columns(&strided, stride, 0..width)), &weight, EPS[0]), out.to_host().expect("done"));
        T::close("rms_norm", wide(&columns(&found, stride, 0..width)), &exact);
        assert!(columns(&found, stride, width..stride).iter().all(|x| x.wide().is_nan()), "nothing beside the rows");

        let (x, y): (Vec<T>, Vec<T>) = (real(4, n_rows * width), real(5, n_rows * width));
        for (with_post, with_norm) in [(false, false), (false, true), (true, false), (true, true)] {
            let (mut stream, added) = (uploaded(device, &x), uploaded(device, &y));
            let mut z: Buffer<T> = poisoned(device, x.len());
            let mut z_view = z.view_mut();
            let then = with_norm.then_some((norm_of, &mut z_view));
            let added = Matrix::packed(added.view(), n_rows, width);
            device.add_residual(&mut stream.view_mut(), added, with_post.then_some(post_of), then).expect("begun");
            let found = wide(&stream.to_host().expect("done"));
            let update = if with_post { norm(&wide(&y), &post, EPS[1]) } else { wide(&y) };
            T::close("residual", found.clone(), &sum(&wide(&x), &update));
            if with_norm {
                T::close("norm of the residual", wide(&z.to_host().expect("done")), &norm(&found, &weight, EPS[0]));
            }
        }
    }
}

#[test]
fn norms_and_residuals_agree_with_f64() {
    let Some(device) = common::device("norms_and_residuals_agree_with_f64") else { return };
    norms::<bf16>(&device);
    norms::<f32>(&device);
}

#[test]
fn a_norm_in_place_is_the_norm() {
    let Some(device) = common::device("a_norm_in_place_is_the_norm") else { return };
    let (n_rows, width) = (70, 640);
    let (x, weight): (Vec<bf16>, _) = (real(1, n_rows * width), random(2, width));
    let weights = uploaded(&device, &weight);
    let norm = Norm { weight: weights.view(), eps: EPS[0] };
    let mut in_place = uploaded(&device, &x);
    device.rms_norm_in_place(&mut MatrixMut::packed(in_place.view_mut(), n_rows, width), norm).expect("begun");
    let from = uploaded(&device, &x);
    let mut out: Buffer<bf16> = poisoned(&device, x.len());
    device.rms_norm(Matrix::packed(from.view(), n_rows, width), norm, &mut out.view_mut(), width).expect("begun");
    assert_eq!(in_place.to_host().expect("done"), out.to_host().expect("done"));
}

/// One shape of `head_norm_rope`.
struct Heads {
    head_dim: usize,
    rotary_dim: usize,
    n_heads: [usize; 2],
    n_tokens: usize,
    normed: [bool; 2],
}

impl Heads {
    /// Norm and Eq. 8 of one head, in f64.
    fn exact(&self, head: &[f64], weight: Option<(&[f32], f32)>, angles: [&[f32]; 2]) -> Vec<f64> {
        let mut out = weight.map_or(head.to_vec(), |(weight, eps)| norm(head, weight, eps));
        let half = self.rotary_dim / 2;
        for i in 0..half {
            let (a, b, c, s) = (out[i], out[i + half], f64::from(angles[0][i]), f64::from(angles[1][i]));
            (out[i], out[i + half]) = (a * c - b * s, b * c + a * s);
        }
        out
    }

    fn check<T: Real>(&self, device: &Device) {
        let Self { head_dim, rotary_dim, n_heads: [n_q, n_k], n_tokens, normed } = *self;
        let (heads, half) = (n_q + n_k, rotary_dim / 2);
        // Values follow the keys in a fused row.
        let width = (heads + 1) * head_dim;
        let x: Vec<T> = real(1, n_tokens * width);
        let weights = [2, 3].map(|seed| random(seed, head_dim));
        let on_device = weights.each_ref().map(|data| uploaded(device, data));
        let tables = [4, 5].map(|seed| random(seed, n_tokens * half));
        let [cos, sin] = tables.each_ref().map(|data| uploaded(device, data));
        let norm_of = |i: usize| normed[i].then(|| Norm { weight: on_device[i].view(), eps: EPS[i] });
        let mut rows = uploaded(device, &x);
        let what = HeadNormRope {
            head_dim,
            n_q_heads: n_q,
            n_k_heads: n_k,
            q_norm: norm_of(0),
            k_norm: norm_of(1),
            rotation: (rotary_dim > 0).then_some(Rotation { rotary_dim, cos: cos.view(), sin: sin.view() }),
        };
        device.head_norm_rope(&mut MatrixMut::packed(rows.view_mut(), n_tokens, width), &what).expect("begun");
        let found = rows.to_host().expect("done");
        let mut exact = Vec::new();
        for (t, row) in x.chunks(width).enumerate() {
            let angles = tables.each_ref().map(|table| &table[t * half..][..half]);
            for (n, head) in row[..heads * head_dim].chunks(head_dim).enumerate() {
                let kind = usize::from(n >= n_q);
                let weight = normed[kind].then_some((weights[kind].as_slice(), EPS[kind]));
                exact.extend(self.exact(&wide(head), weight, angles));
            }
        }
        T::close("head_norm_rope", wide(&columns(&found, width, 0..heads * head_dim)), &exact);
        let tail = heads * head_dim..width;
        assert_eq!(columns(&found, width, tail.clone()), columns(&x, width, tail), "what follows in a row stays");
    }
}

#[test]
fn head_norms_and_rotations_agree_with_f64() {
    let Some(device) = common::device("head_norms_and_rotations_agree_with_f64") else { return };
    let dims = [(64, 64), (80, 80), (80, 40), (96, 96), (112, 112), (128, 128), (128, 96), (128, 0), (256, 256)];
    for (head_dim, rotary_dim) in dims {
        let heads = [[8, 2], [5, 1], [3, 0], [0, 3], [7, 1], [2, 2]];
        for (i, n_heads) in heads.into_iter().enumerate() {
            let normed = [[true, true], [false, true], [true, false], [false, true], [true, true], [false, false]][i];
            let shape = Heads { head_dim, rotary_dim, n_heads, n_tokens: [33, 1, 7, 50, 19, 65][i], normed };
            shape.check::<bf16>(&device);
            shape.check::<f32>(&device);
        }
    }
}

/// A gate's activation in f64.
fn activation(gate: Gate, g: f64) -> f64 {
    match gate {
        Gate::Silu => g / (1.0 + (-g).exp()),
        Gate::GeluTanh => 0.5 * g * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (g + 0.044_715 * g * g * g)).tanh()),
        Gate::Gelu => 0.5 * g * libm::erfc(-g / std::f64::consts::SQRT_2),
    }
}

/// 16 units in the last place for an exponential or erf, a quotient and their rounded arguments, relative to |g u|: the
/// kernel's derivation.
const GATE_TOL: f64 = 1.0 / (1 << 20) as f64;

fn gates<T: Real>(device: &Device) {
    for (n_rows, width) in [(1, 8), (33, 1000), (7, 2304)] {
        let stride = 2 * width + 8;
        let x: Vec<T> = random(1, n_rows * stride).into_iter().map(|x| T::narrow(6.0 * x)).collect();
        let from = uploaded(device, &x);
        for gate in [Gate::Silu, Gate::GeluTanh, Gate::Gelu] {
            let mut out: Buffer<T> = poisoned(device, n_rows * width);
            let matrix = Matrix { view: from.view(), n_rows, width: 2 * width, stride };
            device.gate(matrix, gate, &mut out.view_mut()).expect("begun");
            let found = wide(&out.to_host().expect("done"));
            for (t, row) in x.chunks(stride).enumerate() {
                for j in 0..width {
                    let (g, u) = (row[j].wide(), row[width + j].wide());
                    let (exact, found) = (activation(gate, g) * u, found[t * width + j]);
                    let tol = T::ROUNDING * exact.abs() + GATE_TOL * (g * u).abs();
                    assert!((found - exact).abs() <= tol, "{gate:?}({g}) {u}: {found}, exactly {exact}");
                }
            }
        }
    }
}

#[test]
fn gates_agree_with_f64() {
    let Some(device) = common::device("gates_agree_with_f64") else { return };
    gates::<bf16>(&device);
    gates::<f32>(&device);
}

fn biases_and_embeddings<T: Real>(device: &Device) {
    for (n_rows, width) in [(1, 8), (77, 576), (9, 4096)] {
        let stride = width + 8;
        let (x, bias): (Vec<T>, _) = (real(1, n_rows * stride), random(2, width));
        let (mut rows, biases) = (uploaded(device, &x), uploaded(device, &bias));
        device.add_bias(&mut MatrixMut { view: rows.view_mut(), n_rows, width, stride }, biases.view()).expect("begun");
        let found = rows.to_host().expect("done");
        let bias: Vec<f64> = bias.iter().map(|&b| f64::from(b)).collect();
        let exact = sum(&wide(&columns(&x, stride, 0..width)), &bias.repeat(n_rows));
        T::close("bias", wide(&columns(&found, stride, 0..width)), &exact);
        assert_eq!(columns(&found, stride, width..stride), columns(&x, stride, width..stride));

        let (table, n_ids, scale) = (random(3, 50 * width), 50, 3.5f32);
        let ids: Vec<u32> = (0..n_rows as u32).map(|t| t * 37 % n_ids).collect();
        let stored: Vec<bf16> = table.iter().map(|&x| bf16::from_f32(x)).collect();
        let (f32s, bf16s, chosen) = (uploaded(device, &table), uploaded(device, &stored), uploaded(device, &ids));
        for (is_bf16, rows) in [(true, Table::Bf16(bf16s.view())), (false, Table::F32(f32s.view()))] {
            let mut out: Buffer<T> = poisoned(device, n_rows * width);
            device.embed(rows, chosen.view(), (width, scale), &mut out.view_mut()).expect("begun");
            let at = |i: usize| if is_bf16 { stored[i].to_f64() } else { f64::from(table[i]) };
            let row = |&id: &u32| (0..width).map(move |j| at(id as usize * width + j) * f64::from(scale));
            let exact: Vec<f64> = ids.iter().flat_map(row).collect();
            T::close("embedding", wide(&out.to_host().expect("done")), &exact);
        }
        let beyond = uploaded(device, &[n_ids]);
        let mut out = uploaded(device, &vec![T::narrow(0.0); width]);
        device.embed(Table::F32(f32s.view()), beyond.view(), (width, scale), &mut out.view_mut()).expect("begun");
        assert!(out.to_host().expect("done").iter().all(|x| x.wide().is_nan()), "an unknown id is no row");
    }
}

#[test]
fn biases_and_embeddings_agree_with_f64() {
    let Some(device) = common::device("biases_and_embeddings_agree_with_f64") else { return };
    biases_and_embeddings::<bf16>(&device);
    biases_and_embeddings::<f32>(&device);
}

fn converted<F: Convert<T> + Copy, T: Element + PartialEq>(device: &Device, from: &[F], exact: &[T]) {
    let source = uploaded(device, from);
    let mut found: Buffer<T> = poisoned(device, from.len());
    device.convert(source.view(), &mut found.view_mut()).expect("begun");
    assert_eq!(found.to_host().expect("done"), exact);
}

#[test]
fn conversions_are_those_of_the_host() {
    let Some(device) = common::device("conversions_are_those_of_the_host") else { return };
    for len in [1, 7, 8, 2048, 10_003] {
        // Over the ranges of bf16 and of f16, infinities and subnormal numbers included.
        let spread = |(i, x): (usize, f32)| x * 2f32.powi((i as i32 * 7) % 280 - 150);
        let x: Vec<f32> = random(len as u64, len).into_iter().enumerate().map(spread).collect();
        let f16s: Vec<f16> = x.iter().map(|&x| f16::from_f32(x)).collect();
        let bf16s: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
        converted(&device, &bf16s, &bf16s.iter().map(|x| x.to_f32()).collect::<Vec<f32>>());
        converted(&device, &f16s, &f16s.iter().map(|x| x.to_f32()).collect::<Vec<f32>>());
        converted(&device, &x, &bf16s);
        converted(&device, &f16s, &f16s.iter().map(|x| bf16::from_f32(x.to_f32())).collect::<Vec<bf16>>());
    }
}

#[test]
fn operands_that_a_kernel_cannot_take_are_errors() {
    let Some(device) = common::device("operands_that_a_kernel_cannot_take_are_errors") else { return };
    let x: Buffer<bf16> = device.filled(1024, 0).expect("filled");
    let mut out: Buffer<bf16> = device.filled(1024, 0).expect("filled");
    let refused = |matrix: Matrix<'_, bf16>, out: &mut Buffer<bf16>| {
        device.gate(matrix, Gate::Silu, &mut out.view_mut()).expect_err("refused")
    };
    let packed = |view, width| Matrix::packed(view, 4, width);
    let error = refused(packed(x.view(), 20), &mut out);
    assert_eq!(error.to_string(), "gate and up: expected a width that is a multiple of 8, found 20");
    let error = refused(packed(x.view().slice(1..1000), 16), &mut out);
    assert_eq!(error.to_string(), "gate and up: expected an address that is a multiple of 16, found 2");
    let error = refused(packed(x.view(), 512), &mut out);
    assert!(matches!(error, GpuError::Length { expected: 2048, found: 1024, .. }), "{error}");
}
