//! The device layer on a GPU: copies, launches, memory, matrix products against f64. Skipped, loudly, without one.

mod common;

use common::{random, random_bf16, relative_error, widened};
use half::bf16;
use wush_gpu::kernels::{EVERYWHERE, KernelFile};
use wush_gpu::launch::{Arg, Geometry};
use wush_gpu::matmul::{Matmul, MatmulElement, Matrix};
use wush_gpu::{Buffer, Device, GpuError, Queue};

/// One rounding of the result to bf16, relative to its norm: uniform within half a unit, 2⁻⁸ of the number at most, so 2⁻⁸ / √3 in
/// the mean square, and a tenth more for so few numbers; sums in f32 over 4096 terms add little.
const BF16_REL_TOL: f64 = 2.5e-3;
/// Where something is added, the library may round the product before it (seen at three tokens): two such roundings.
const BF16_SUM_REL_TOL: f64 = 1.42 * BF16_REL_TOL;
/// f32 sums of up to 4096 products in the library's order: their errors grow like the root of the number of terms, 64 · 2⁻²⁴
/// = 3.8e-6 at worst. TF32 would give 3e-4.
const F32_REL_TOL: f64 = 1e-5;

static SCALE: KernelFile = KernelFile {
    name: "test_scale",
    source: "// y[i] = FACTOR * x[i]\n\
             #include \"common.cuh\"\n\
             extern \"C\" __global__ void scale(const float *x, float *y, u32 n) {\n\
                 u32 i = blockIdx.x * blockDim.x + threadIdx.x;\n\
                 if (i < n) y[i] = FACTOR * x[i];\n\
             }\n",
    runs_on: EVERYWHERE,
    variants: &[&[("FACTOR", "2.0f")]],
};

#[test]
fn copies_come_back_as_they_went() {
    let Some(device) = common::device("copies_come_back_as_they_went") else { return };
    let data = random(1, 100_003);
    let buffer = device.upload(&data).expect("uploaded");
    assert_eq!(buffer.to_host().expect("downloaded"), data);
    assert_eq!(device.download(buffer.view().slice(5..77)).expect("downloaded"), data[5..77]);
    let mut pinned = device.pinned::<f32>(data.len()).expect("pinned memory");
    // SAFETY: the target is not touched until the queue is waited for.
    unsafe { device.begin_download(buffer.view(), &mut pinned, Queue::Copy) }.expect("begun");
    device.synchronize().expect("done");
    assert_eq!(*pinned, *data);
    let filled: Buffer<f32> = device.filled(10, 0xff).expect("filled");
    assert!(filled.to_host().expect("downloaded").iter().all(|x| x.is_nan()));
}

#[test]
fn a_kernel_runs_and_its_arguments_are_checked() {
    let Some(device) = common::device("a_kernel_runs_and_its_arguments_are_checked") else { return };
    let x = random(2, 1000);
    let from = device.upload(&x).expect("uploaded");
    let mut to: Buffer<f32> = device.filled(x.len(), 0xff).expect("filled");
    let kernel = device.kernel(&SCALE, "scale", &[("FACTOR", "2.0f".to_owned())]).expect("compiled");
    let args = [Arg::from(&from), Arg::from(&mut to), Arg::from(x.len() as u32)];
    // SAFETY: both buffers hold as many elements as the kernel is told.
    unsafe { device.launch(&kernel, Geometry::row(4, 256), &args) }.expect("started");
    let expected: Vec<f32> = x.iter().map(|x| 2.0 * x).collect();
    assert_eq!(to.to_host().expect("downloaded"), expected);
    // SAFETY: it is refused.
    let error =
        unsafe { device.launch(&kernel, Geometry::row(4, 256), &args[..2]) }.expect_err("an argument is missing");
    assert!(matches!(error, GpuError::Arguments { .. }), "{error}");
}

#[test]
fn memory_is_accounted_and_bounded() {
    let Some(device) = common::device("memory_is_accounted_and_bounded") else { return };
    let buffer: Buffer<u8> = device.uninit(100 << 20).expect("room");
    assert_eq!(device.memory().in_use, 100 << 20);
    drop(buffer);
    assert_eq!((device.memory().in_use, device.memory().reserved), (0, 100 << 20));
    device.set_budget(64 << 20, 64 << 20);
    let error = device.uninit::<u8>(80 << 20).expect_err("beyond the budget");
    assert!(matches!(error, GpuError::OutOfMemory { .. }), "{error}");
    device.uninit::<u8>(40 << 20).expect("within the budget, once idle memory is given back");
    assert_eq!(device.memory().peak_reserved, 100 << 20);
}

#[test]
fn clocks_run_forward() {
    let Some(device) = common::device("clocks_run_forward") else { return };
    let start = device.mark(Queue::Compute).expect("a mark");
    let _filled: Buffer<u8> = device.filled(512 << 20, 0).expect("filled");
    let seconds = device.mark(Queue::Compute).expect("a mark").seconds_since(&start).expect("read");
    assert!(seconds > 0.0 && seconds < 10.0, "{seconds} s");
}

/// `α x Wᵀ + b + β y` in f64.
fn reference(sizes: [usize; 3], operands: [&[f64]; 4], [alpha, beta]: [f64; 2]) -> Vec<f64> {
    let [n_tokens, n_in, n_out] = sizes;
    let [x, weight, bias, y] = operands;
    let at = |i: usize| {
        let (t, o) = (i / n_out, i % n_out);
        let row = x[t * n_in..][..n_in].iter().zip(&weight[o * n_in..][..n_in]);
        alpha * row.map(|(x, w)| x * w).sum::<f64>() + bias.get(o).unwrap_or(&0.0) + beta * y[i]
    };
    (0..n_tokens * n_out).map(at).collect()
}

/// What was off by more than `tols`, of a product alone and of one that is added.
fn check<T: MatmulElement + Into<f64>>(
    device: &Device,
    sizes: [usize; 3],
    make: fn(u64, usize) -> Vec<T>,
    tols: [f64; 2],
) -> Vec<String> {
    let mut wrong = Vec::new();
    let [n_tokens, n_in, n_out] = sizes;
    let [x, weight] = [make(1, n_tokens * n_in), make(2, n_out * n_in)];
    let [bias, start] = [make(3, n_out), make(4, n_tokens * n_out)];
    let wide = |values: &[T]| values.iter().map(|&x| x.into()).collect::<Vec<f64>>();
    let [on_x, on_weight, on_bias] = [&x, &weight, &bias].map(|data| device.upload(data).expect("uploaded"));
    for (has_bias, beta) in [(false, 0.0), (true, 0.0), (false, 1.0)] {
        let product = Matmul {
            x: Matrix::packed(on_x.view(), n_tokens, n_in),
            weight: Matrix::packed(on_weight.view(), n_out, n_in),
            bias: has_bias.then(|| on_bias.view()),
            alpha: 0.5,
            beta,
        };
        let run = || {
            let mut y = device.upload(&start).expect("uploaded");
            if beta == 0.0 {
                y.fill_bytes(0xff).expect("poisoned");
            }
            device.matmul(&product, &mut y.view_mut(), n_out).expect("multiplied");
            wide(&y.to_host().expect("downloaded"))
        };
        let found = run();
        let bias = if has_bias { wide(&bias) } else { Vec::new() };
        let operands = [&wide(&x)[..], &wide(&weight), &bias, &wide(&start)];
        let error = relative_error(found.iter().copied(), &reference(sizes, operands, [0.5, f64::from(beta)]));
        let line = format!("{sizes:?} of {} bytes, bias {has_bias}, beta {beta}: {error:e}", size_of::<T>());
        println!("{line}");
        let fits = error <= tols[usize::from(beta != 0.0)];
        wrong.extend((!fits).then_some(line));
        assert_eq!(found, run(), "the same bits again");
    }
    wrong
}

#[test]
fn products_agree_with_f64_in_both_types_at_every_border() {
    let Some(device) = common::device("products_agree_with_f64_in_both_types_at_every_border") else { return };
    let mut wrong = Vec::new();
    for sizes in [[1, 8, 8], [3, 64, 40], [129, 576, 192], [257, 1536, 576], [64, 4096, 136], [5, 33, 7]] {
        wrong.extend(check::<f32>(&device, sizes, random, [F32_REL_TOL; 2]));
        wrong.extend(check::<bf16>(&device, sizes, random_bf16, [BF16_REL_TOL, BF16_SUM_REL_TOL]));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_product_of_bf16_can_be_kept_in_f32_and_in_a_part_of_wider_rows() {
    let Some(device) = common::device("a_product_of_bf16_can_be_kept_in_f32_and_in_a_part_of_wider_rows") else {
        return;
    };
    let [n_tokens, n_in, n_out] = [100, 256, 64];
    let (x, weight) = (random_bf16(5, n_tokens * n_in), random_bf16(6, n_out * n_in));
    let (on_x, on_weight) = (device.upload(&x).expect("uploaded"), device.upload(&weight).expect("uploaded"));
    let mut y: Buffer<f32> = device.filled(n_tokens * 2 * n_out, 0).expect("filled");
    let product = Matmul {
        x: Matrix::packed(on_x.view(), n_tokens, n_in),
        weight: Matrix::packed(on_weight.view(), n_out, n_in),
        bias: None,
        alpha: 1.0,
        beta: 0.0,
    };
    let right = n_out..n_tokens * 2 * n_out;
    device.matmul(&product, &mut y.view_mut().slice(right), 2 * n_out).expect("multiplied");
    let found = y.to_host().expect("downloaded");
    let rows = || found.chunks_exact(2 * n_out);
    assert!(rows().all(|row| row[..n_out].iter().all(|&x| x == 0.0)), "the left half is left alone");
    let zeros = vec![0.0; n_tokens * n_out];
    let exact = reference([n_tokens, n_in, n_out], [&widened(&x), &widened(&weight), &[], &zeros], [1.0, 0.0]);
    let error = relative_error(rows().flat_map(|row| row[n_out..].iter().map(|&x| f64::from(x))), &exact);
    assert!(error <= F32_REL_TOL, "{error:e}");
}

#[test]
fn rows_of_a_wider_matrix_are_copied_one_after_the_other() {
    let Some(device) = common::device("rows_of_a_wider_matrix_are_copied_one_after_the_other") else { return };
    for [n_rows, width, stride] in [[1, 1, 1], [3, 5, 7], [2048, 192, 960], [4, 0, 8], [0, 8, 8]] {
        let data = random(9, 2 + n_rows * stride);
        let wider = device.upload(&data).expect("uploaded");
        let x = Matrix { view: wider.view().slice(2..data.len()), n_rows, width, stride };
        let rows = data[2..].chunks_exact(stride).flat_map(|row| row[..width].to_vec());
        assert_eq!(device.dense(x).expect("begun").to_host().expect("done"), rows.collect::<Vec<_>>());
    }
}
