// RMS norm of rows (Eq. 10 of the paper), alone and fused with the residual stream.
//
//   norm(x)[j] = x[j] / sqrt(mean_j(x[j]^2) + eps) * weight[j]
//
//   rms_norm             out = norm(x)
//   add                  x += y
//   add_norm             x += y                 z = norm(x)
//   add_post             x += post(y)
//   add_post_norm        x += post(y)           z = norm(x)
//
// Arguments: x, y, z, out  [n_rows, WIDTH] activations, bf16, or f32 with -DACT_F32; a row starts a multiple of 16 bytes from the
//                          base, which is 16-byte aligned. y and z are dense; x and out of `rms_norm` have strides in elements, so
//                          that a slice of a fused projection can be normed; out may be x.
//            weight, post_weight  [WIDTH] f32, 16-byte aligned, 1 already added where the family multiplies by 1 + w.
// A sum of squares is f32: a thread's elements in order, then a tree over the warp and over the warps. The residual is rounded to
// the activations' type before its norm is taken, so that z is the norm of the x that is stored.
//
// Macros: WIDTH, a multiple of 8 (4 with ACT_F32); THREADS, a multiple of 32, at most 1024, at least WIDTH / 64 (32).
// Launch: grid n_rows (one block a row), block THREADS, no dynamic shared memory. Any architecture from sm_80 on.
// Floor: bytes. rms_norm reads and writes a row once; add and add_post move three rows, add_norm and add_post_norm four.
// Oracle: f64 on the host; a bf16 result differs by its rounding, 2^-8 relative, an f32 one by (WIDTH / THREADS + 12) 2^-24.
#include "common.cuh"

constexpr u32 VECTORS = WIDTH / ACT_VEC;
constexpr u32 PER_THREAD = ceil_div(VECTORS, THREADS);

static_assert(WIDTH % ACT_VEC == 0, "rows of whole 16-byte vectors");
static_assert(THREADS % WARP_SIZE == 0 && THREADS <= 1024, "whole warps");
static_assert(PER_THREAD <= 8, "a row is held in registers");

// What a thread holds of a row: vectors threadIdx.x, threadIdx.x + THREADS, ...; zeros beyond the end.
using Held = float[PER_THREAD][ACT_VEC];

__device__ __forceinline__ u32 column(u32 i) { return (threadIdx.x + i * THREADS) * ACT_VEC; }

__device__ __forceinline__ void load_row(const Act* row, Held& held) {
    uint4 raw[PER_THREAD];
#pragma unroll
    for (u32 i = 0; i < PER_THREAD; i++) raw[i] = column(i) < WIDTH ? load16(row + column(i)) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (u32 i = 0; i < PER_THREAD; i++) unpack(raw[i], held[i]);
}

__device__ __forceinline__ void store_row(Act* row, const Held& held) {
#pragma unroll
    for (u32 i = 0; i < PER_THREAD; i++) {
        if (column(i) < WIDTH) store16(row + column(i), pack(held[i]));
    }
}

// held *= weight / rms(held).
__device__ __forceinline__ void normalize(Held& held, const float* weight, float eps, float* scratch) {
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < PER_THREAD; i++) {
#pragma unroll
        for (u32 e = 0; e < ACT_VEC; e++) sum += held[i][e] * held[i][e];
    }
    const float scale = 1.0f / sqrtf(block_sum(sum, scratch) / WIDTH + eps);
#pragma unroll
    for (u32 i = 0; i < PER_THREAD; i++) {
        if (column(i) >= WIDTH) continue;
        float w[ACT_VEC];
        load_f32(weight + column(i), w);
#pragma unroll
        for (u32 e = 0; e < ACT_VEC; e++) held[i][e] = held[i][e] * scale * w[e];
    }
}

// y becomes the row that is stored: x + y, rounded.
__device__ __forceinline__ void add_to(Act* row, const Held& x, Held& y) {
#pragma unroll
    for (u32 i = 0; i < PER_THREAD; i++) {
        float sum[ACT_VEC];
#pragma unroll
        for (u32 e = 0; e < ACT_VEC; e++) sum[e] = x[i][e] + y[i][e];
        const uint4 rounded = pack(sum);
        if (column(i) < WIDTH) store16(row + column(i), rounded);
        unpack(rounded, y[i]);
    }
}

template <bool POST, bool NORM>
__device__ __forceinline__ void residual(Act* x, const Act* y, const float* post_weight, float post_eps, const float* weight,
                                         float eps, Act* z) {
    __shared__ float scratch[WARP_SIZE];
    const u64 at = static_cast<u64>(blockIdx.x) * WIDTH;
    Held held, stream;
    load_row(y + at, held);
    load_row(x + at, stream);
    if (POST) normalize(held, post_weight, post_eps, scratch);
    add_to(x + at, stream, held);
    if (NORM) {
        normalize(held, weight, eps, scratch);
        store_row(z + at, held);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm(const Act* x, u64 x_stride, const float* weight, float eps, Act* out, u64 out_stride) {
    __shared__ float scratch[WARP_SIZE];
    Held held;
    load_row(x + blockIdx.x * x_stride, held);
    normalize(held, weight, eps, scratch);
    store_row(out + blockIdx.x * out_stride, held);
}

extern "C" __global__ void __launch_bounds__(THREADS) add(Act* x, const Act* y) {
    residual<false, false>(x, y, nullptr, 0.0f, nullptr, 0.0f, nullptr);
}

extern "C" __global__ void __launch_bounds__(THREADS) add_norm(Act* x, const Act* y, const float* weight, float eps, Act* z) {
    residual<false, true>(x, y, nullptr, 0.0f, weight, eps, z);
}

extern "C" __global__ void __launch_bounds__(THREADS) add_post(Act* x, const Act* y, const float* post_weight, float post_eps) {
    residual<true, false>(x, y, post_weight, post_eps, nullptr, 0.0f, nullptr);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    add_post_norm(Act* x, const Act* y, const float* post_weight, float post_eps, const float* weight, float eps, Act* z) {
    residual<true, true>(x, y, post_weight, post_eps, weight, eps, z);
}
