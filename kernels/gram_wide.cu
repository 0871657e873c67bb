// Gram matrices in f64 throughout: of f32 heads, and weighted ones for OSCAR's value rotation.
//
//   quadratic_forms   w[h, t] = max(0, k[t, h]^T A[h] k[t, h])       A is positive semidefinite: what is below 0 is rounding
//   gram_wide_parts   partial[p, n, i, j] = sum_t w[n, t] x[t, n, i] x[t, n, j]
//                     t in p * 1024 .. (p + 1) * 1024, i / 32 >= j / 32; w is 1 where there is none
//
// The parts are added by gram.cu's add_gram. This is also the naive variant that gram.cu is compared with.
//
// Arguments: x, k     [n_tokens, n_heads, HEAD_DIM] activations (bf16, or f32 with -DACT_F32), tokens `stride` elements apart.
//            a        [n_heads, HEAD_DIM, HEAD_DIM] f64, 16-byte aligned. w  [n_heads, n_tokens] f64, or null.
//            partial  [n_parts, n_heads, HEAD_DIM, HEAD_DIM] f64, n_parts = ceil(n_tokens / 1024).
// Products of two activations are exact in f64; every sum is f64, positions in order, then parts.
//
// Macros: HEAD_DIM, a multiple of 8, at most 256; ACT_F32.
// Launch: gram_wide_parts: block 256, grid (n_heads, n_parts, S (S + 1) / 2) with S = ceil(HEAD_DIM / 32). quadratic_forms: block
// 256, grid (n_heads, ceil(n_tokens / 32)), dynamic shared memory 32 (HEAD_DIM + 1) 8 bytes. sm_80 on.
// Floor: f64 FLOPs, HEAD_DIM^2 (2 HEAD_DIM^2 of a form) a position and head. Oracle: f64 on the host, within
// (n_tokens + HEAD_DIM) 2^-53 relative to sums of magnitudes.
#include "common.cuh"

constexpr u32 BLOCK = 256;
constexpr u32 TILE = 32;
constexpr u32 PART = 1024;

static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 256, "groups of four rows, keys in shared memory");

// Positions by columns, widened; zeros beyond the head and beyond the last position.
using Tile = double[TILE][TILE + 1];

__device__ __forceinline__ void fetch(Tile& tile, const Act* head, u64 stride, u32 column, u32 first, u32 end,
                                      const double* weights) {
#pragma unroll
    for (u32 i = threadIdx.x; i < TILE * TILE; i += BLOCK) {
        const u32 row = i / TILE, j = i % TILE, t = first + row;
        const bool inside = t < end && column + j < HEAD_DIM;
        const double value = inside ? to_f32(head[t * stride + column + j]) : 0.0f;
        tile[row][j] = inside && weights != nullptr ? weights[t] * value : value;
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    gram_wide_parts(const Act* x, u64 stride, u32 n_tokens, const double* w, double* partial) {
    __shared__ Tile left, right;
    u32 row = 0;
    while ((row + 1) * (row + 2) / 2 <= blockIdx.z) row++;
    const u32 column = blockIdx.z - row * (row + 1) / 2;
    const u32 start = blockIdx.y * PART, end = min(start + PART, n_tokens);
    const Act* const head = x + blockIdx.x * HEAD_DIM;
    const double* const weights = w == nullptr ? nullptr : w + static_cast<u64>(blockIdx.x) * n_tokens;
    // A thread sums rows i, i + 16 and columns j, j + 16 of the tile.
    const u32 i = threadIdx.x / 16, j = threadIdx.x % 16;
    double sum[2][2] = {};
    for (u32 first = start; first < end; first += TILE) {
        fetch(left, head, stride, row * TILE, first, end, weights);
        fetch(right, head, stride, column * TILE, first, end, nullptr);
        __syncthreads();
#pragma unroll 8
        for (u32 t = 0; t < TILE; t++) {
            const double a[2] = {left[t][i], left[t][i + 16]}, b[2] = {right[t][j], right[t][j + 16]};
#pragma unroll
            for (u32 m = 0; m < 4; m++) sum[m / 2][m % 2] += a[m / 2] * b[m % 2];
        }
        __syncthreads();
    }
    double* const out = partial + (static_cast<u64>(blockIdx.y) * gridDim.x + blockIdx.x) * (HEAD_DIM * HEAD_DIM);
#pragma unroll
    for (u32 m = 0; m < 4; m++) {
        const u32 r = row * TILE + i + m / 2 * 16, c = column * TILE + j + m % 2 * 16;
        if (r < HEAD_DIM && c < HEAD_DIM) out[r * HEAD_DIM + c] = sum[m / 2][m % 2];
    }
}

// Forms of the positions first .. first + 32 of one head: a thread has one position and every eighth group of four rows of A.
extern "C" __global__ void __launch_bounds__(BLOCK)
    quadratic_forms(const Act* k, u64 stride, u32 n_tokens, const double* a, double* w) {
    constexpr u32 ROWS = 4, STRANDS = BLOCK / TILE;
    extern __shared__ __align__(16) double keys[];
    __shared__ double strands[STRANDS][TILE];
    const u32 first = blockIdx.y * TILE, lane = threadIdx.x % TILE, strand = threadIdx.x / TILE;
    for (u32 i = threadIdx.x; i < TILE * HEAD_DIM; i += BLOCK) {
        const u32 t = first + i / HEAD_DIM, j = i % HEAD_DIM;
        const Act* const key = k + t * stride + blockIdx.x * HEAD_DIM;
        keys[i / HEAD_DIM * (HEAD_DIM + 1) + j] = t < n_tokens ? to_f32(key[j]) : 0.0f;
    }
    __syncthreads();
    const double* const matrix = a + static_cast<u64>(blockIdx.x) * (HEAD_DIM * HEAD_DIM);
    const double* const key = keys + lane * (HEAD_DIM + 1);
    double form = 0.0;
    for (u32 i = strand * ROWS; i < HEAD_DIM; i += STRANDS * ROWS) {
        double image[ROWS] = {};
#pragma unroll 4
        for (u32 j = 0; j < HEAD_DIM; j += 2) {
            const double x = key[j], y = key[j + 1];
#pragma unroll
            for (u32 r = 0; r < ROWS; r++) {
                const double2 pair = *reinterpret_cast<const double2*>(matrix + (i + r) * HEAD_DIM + j);
                image[r] += pair.x * x + pair.y * y;
            }
        }
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) form += key[i + r] * image[r];
    }
    strands[strand][lane] = form;
    __syncthreads();
    if (strand != 0 || first + lane >= n_tokens) return;
    double total = 0.0;
#pragma unroll
    for (u32 s = 0; s < STRANDS; s++) total += strands[s][lane];
    w[static_cast<u64>(blockIdx.x) * n_tokens + first + lane] = fmax(total, 0.0);
}
