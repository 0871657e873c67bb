// What is asked of activations as a whole: is everything finite, and the sums of the columns.
//
//   first_non_finite     first[0] = min(first[0], t width + j) over all t, j where x[t, j] is NaN or infinite
//   column_sums          partial[c, j] = sum of x[t, j] over chunk c's rows, t in c * 256 .. (c + 1) * 256
//   add_column_sums      into[j] += sum_c partial[c, j]
//
// Arguments: x        [n_rows, width] activations (bf16, or f32 with -DACT_F32), 16-byte aligned, rows `stride` elements apart, a
//                     multiple of 16 bytes; width a multiple of 8 (4 with ACT_F32).
//            first    [1] u64, set to 2^64 - 1 before; a minimum does not depend on the order, so it is the same in every run.
//            partial  [n_chunks, width] f64, n_chunks = ceil(n_rows / 256). into  [width] f64.
// Sums are f64 in a fixed order: 8 interleaved partial sums a chunk, then those, then the chunks.
//
// Launch: first_non_finite: block (X, Y) of 256 threads, grid (ceil(n_rows / (8 Y)), ceil(width / (8 X))), 4 X with ACT_F32, X the
// least power of two that holds a row's vectors, at most 256; a thread looks at 8 rows. column_sums: block (32, 8), grid
// (ceil(width / 256), n_chunks), 128 with ACT_F32. add_column_sums: block 256, grid ceil(width / 256). No dynamic shared memory, no
// macros but ACT_F32. sm_80 on.
// Floor: bytes, each element read once. Oracle: f64 on the host; the sums within n_rows 2^-53 of the sum of magnitudes.
#include "common.cuh"

constexpr u32 BLOCK = 256;
constexpr u32 ROWS_PER_THREAD = 8;
constexpr u32 CHUNK = 256;
constexpr u32 LANES = 32;
constexpr u32 STRANDS = BLOCK / LANES;

// Whether all exponent bits are set in one of a word's elements: the word itself, or the upper and the lower half.
__device__ __forceinline__ bool is_non_finite(u32 word) {
    const bool upper = (word & 0x7f800000u) == 0x7f800000u, lower = (word & 0x7f80u) == 0x7f80u;
    return upper || (sizeof(Act) == 2 && lower);
}

__device__ __forceinline__ bool is_non_finite(const uint4& v) {
    return is_non_finite(v.x) || is_non_finite(v.y) || is_non_finite(v.z) || is_non_finite(v.w);
}

// Which element of a vector that has one is the first.
__device__ __forceinline__ u32 which(const uint4& raw) {
    float v[ACT_VEC];
    unpack(raw, v);
    u32 first = 0;
#pragma unroll
    for (u32 e = ACT_VEC; e-- > 0;) {
        if (is_non_finite(__float_as_uint(v[e]))) first = e;
    }
    return first;
}

extern "C" __global__ void __launch_bounds__(BLOCK) first_non_finite(const Act* x, u64 stride, u32 n_rows, u32 width, u64* first) {
    const u32 column = (blockIdx.y * blockDim.x + threadIdx.x) * ACT_VEC;
    const u32 top = blockIdx.x * blockDim.y * ROWS_PER_THREAD + threadIdx.y;
    if (column >= width) return;
    uint4 raw[ROWS_PER_THREAD];
#pragma unroll
    for (u32 i = 0; i < ROWS_PER_THREAD; i++) {
        const u64 row = top + i * blockDim.y;
        raw[i] = row < n_rows ? load16_once(x + row * stride + column) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (u32 i = 0; i < ROWS_PER_THREAD; i++) {
        const u64 row = top + i * blockDim.y;
        if (is_non_finite(raw[i])) atomicMin(first, row * width + column + which(raw[i]));
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK) column_sums(const Act* x, u64 stride, u32 n_rows, u32 width, double* partial) {
    __shared__ double strands[STRANDS][LANES * ACT_VEC];
    const u32 column = (blockIdx.x * LANES + threadIdx.x) * ACT_VEC;
    const u32 end = min((blockIdx.y + 1) * CHUNK, n_rows);
    double sum[ACT_VEC] = {};
    if (column < width) {
#pragma unroll 8
        for (u32 row = blockIdx.y * CHUNK + threadIdx.y; row < end; row += STRANDS) {
            float v[ACT_VEC];
            unpack(load16_once(x + row * stride + column), v);
#pragma unroll
            for (u32 e = 0; e < ACT_VEC; e++) sum[e] += v[e];
        }
    }
#pragma unroll
    for (u32 e = 0; e < ACT_VEC; e++) strands[threadIdx.y][threadIdx.x * ACT_VEC + e] = sum[e];
    __syncthreads();
    const u32 mine = threadIdx.y * LANES + threadIdx.x, out = blockIdx.x * LANES * ACT_VEC + mine;
    if (mine >= LANES * ACT_VEC || out >= width) return;
    double total = 0.0;
#pragma unroll
    for (u32 s = 0; s < STRANDS; s++) total += strands[s][mine];
    partial[static_cast<u64>(blockIdx.y) * width + out] = total;
}

extern "C" __global__ void __launch_bounds__(BLOCK) add_column_sums(const double* partial, u32 n_chunks, u32 width, double* into) {
    const u32 column = blockIdx.x * BLOCK + threadIdx.x;
    if (column >= width) return;
    double total = 0.0;
    for (u32 c = 0; c < n_chunks; c++) total += partial[static_cast<u64>(c) * width + column];
    into[column] += total;
}
