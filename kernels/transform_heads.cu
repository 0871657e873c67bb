// Each head of bf16 activations times its group's matrix, on tensor cores.
//
//   out[t, n, i] = sum_j matrices[n / group, i, j] x[t, n, j]
//
// Arguments: x, out    [n_tokens, n_heads, HEAD_DIM] bf16, 16-byte aligned and apart, tokens x_stride and out_stride elements apart
//                      (multiples of 8).
//            matrices  [n_heads / group, HEAD_DIM, HEAD_DIM] f32, 8-byte aligned.
// A matrix enters as the sum of two bf16 matrices, so that its entries keep 16 bits; sums are f32, rounded once.
//
// Work: a warp keeps its columns of both parts of the matrix in registers and meets every position; the block's positions pass
// through shared memory in tiles, the next one on its way by cp.async, and leave through it in 16-byte vectors.
//
// Macros: HEAD_DIM, a multiple of 16 up to 128, or 192 or 256.
// Launch: block 32 WARPS, grid (n_heads, ceil(n_tokens / 512), HEAD_DIM / SLAB), dynamic shared memory
// 64 (2 (HEAD_DIM + 8) + SLAB + 8) 2 bytes; WARPS = HEAD_DIM / 16 and SLAB = HEAD_DIM up to 128, else WARPS = 8 and SLAB = 64.
// sm_80 on. Floor: bytes, x read and out written once; at HEAD_DIM 128 the 4 HEAD_DIM FLOPs an element take longer than these.
// Oracle: f64 on the host; bf16's rounding, 2^-8 relative, and 2^-16 from the matrix.
#include "common.cuh"

constexpr u32 PIECES = HEAD_DIM <= 128 ? 2 : 1;
constexpr u32 WARPS = HEAD_DIM <= 128 ? HEAD_DIM / 16 : 8;
constexpr u32 SLAB = WARPS * PIECES * 8;
constexpr u32 THREADS = WARPS * WARP_SIZE;
constexpr u32 STEPS = HEAD_DIM / 16;
constexpr u32 ROWS = 64;
constexpr u32 POSITIONS = 512;
constexpr u32 IN_STRIDE = HEAD_DIM + 8;
constexpr u32 OUT_STRIDE = SLAB + 8;

static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM <= 256 && HEAD_DIM % SLAB == 0, "whole pieces of 16 x 8, whole slabs");

// Two bf16 parts of a pair of matrix entries, as the B operand takes them.
struct Split {
    u32 high, low;
};

__device__ __forceinline__ Split split(float2 v) {
    const u32 high = f32_to_bf16x2(v.x, v.y);
    return {high, f32_to_bf16x2(v.x - bf16x2_low(high), v.y - bf16x2_high(high))};
}

// The warp's columns of the matrix: piece by piece, step by step, two halves of 8 rows of B.
using Held = Split[PIECES][STEPS][2];

__device__ __forceinline__ void hold(Held& held, const float* matrix, u32 column) {
    const u32 lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (u32 p = 0; p < PIECES; p++) {
#pragma unroll
        for (u32 s = 0; s < STEPS; s++) {
#pragma unroll
            for (u32 h = 0; h < 2; h++) {
                const float* const at = matrix + (column + p * 8 + lane / 4) * HEAD_DIM + s * 16 + h * 8 + lane % 4 * 2;
                held[p][s][h] = split(*reinterpret_cast<const float2*>(at));
            }
        }
    }
}

__device__ __forceinline__ void fetch(u32 tile, const u16* head, u64 stride, u32 first, u32 end) {
    constexpr u32 VECTORS = HEAD_DIM / 8;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < ROWS * VECTORS; i += THREADS) {
        const u32 row = i / VECTORS, vector = i % VECTORS, t = first + row;
        const bool valid = t < end;
        cp_async16_or_zero(tile + (row * IN_STRIDE + vector * 8) * 2, head + (valid ? t : 0) * stride + vector * 8, valid);
    }
}

// Columns `column` .. of 16 positions from `row`, to the tile of results.
__device__ __forceinline__ void multiply(u32 tile, u32 row, const Held& held, u16* results, u32 column) {
    const u32 lane = threadIdx.x % WARP_SIZE;
    const u32 at = tile + ((row + lane % 16) * IN_STRIDE + lane / 16 * 8) * 2;
    float acc[PIECES][4] = {};
#pragma unroll
    for (u32 s = 0; s < STEPS; s++) {
        u32 a[4];
        ldmatrix_x4(a, at + s * 16 * 2);
#pragma unroll
        for (u32 p = 0; p < PIECES; p++) {
            mma_bf16_16x8x16(acc[p], a, held[p][s][0].low, held[p][s][1].low);
            mma_bf16_16x8x16(acc[p], a, held[p][s][0].high, held[p][s][1].high);
        }
    }
#pragma unroll
    for (u32 p = 0; p < PIECES; p++) {
        u16* const out = results + (row + lane / 4) * OUT_STRIDE + column + p * 8 + lane % 4 * 2;
        *reinterpret_cast<u32*>(out) = f32_to_bf16x2(acc[p][0], acc[p][1]);
        *reinterpret_cast<u32*>(out + 8 * OUT_STRIDE) = f32_to_bf16x2(acc[p][2], acc[p][3]);
    }
}

__device__ __forceinline__ void store_tile(const u16* results, u16* out, u64 stride, u32 first, u32 end) {
    constexpr u32 VECTORS = SLAB / 8;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < ROWS * VECTORS; i += THREADS) {
        const u32 row = i / VECTORS, vector = i % VECTORS, t = first + row;
        if (t < end) store16(out + t * stride + vector * 8, load16(results + row * OUT_STRIDE + vector * 8));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    transform_heads(const u16* x, u64 x_stride, const float* matrices, u32 group, u16* out, u64 out_stride, u32 n_tokens) {
    extern __shared__ __align__(16) u16 shared[];
    u16* const results = shared + 2 * ROWS * IN_STRIDE;
    const u32 head = blockIdx.x, slab = blockIdx.z * SLAB, column = threadIdx.x / WARP_SIZE * (PIECES * 8);
    const u32 start = blockIdx.y * POSITIONS, end = min(start + POSITIONS, n_tokens);
    const u16* const from = x + head * HEAD_DIM;
    u16* const to = out + head * HEAD_DIM + slab;
    const auto stage = [&](u32 first) { return shared_address(shared) + first / ROWS % 2 * (ROWS * IN_STRIDE * 2); };

    fetch(stage(start), from, x_stride, start, end);
    cp_async_commit();
    Held held;
    hold(held, matrices + static_cast<u64>(head / group) * (HEAD_DIM * HEAD_DIM), slab + column);
    for (u32 first = start; first < end; first += ROWS) {
        if (first + ROWS < end) fetch(stage(first + ROWS), from, x_stride, first + ROWS, end);
        cp_async_commit();
        // The tile is here, and the results of the one before have left.
        cp_async_wait<1>();
        __syncthreads();
#pragma unroll
        for (u32 row = 0; row < ROWS; row += 16) multiply(stage(first), row, held, results, column);
        __syncthreads();
        store_tile(results, to, out_stride, first, end);
    }
}
