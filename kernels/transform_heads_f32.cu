// Each head of f32 activations times its group's matrix, in f32.
//
//   out[t, n, i] = sum_j matrices[n / group, i, j] x[t, n, j]
//
// Arguments: x, out    [n_tokens, n_heads, HEAD_DIM] f32, apart, tokens x_stride and out_stride elements apart.
//            matrices  [n_heads / group, HEAD_DIM, HEAD_DIM] f32.
// Sums are f32 in the order of j.
//
// Macros: HEAD_DIM.
// Launch: block 256, grid (n_heads, ceil(n_tokens / 64), ceil(HEAD_DIM / 64)), no dynamic shared memory. sm_80 on.
// Floor: f32 FLOPs, 2 HEAD_DIM an element. Oracle: f64 on the host, within HEAD_DIM 2^-24 of the sum of magnitudes.
#include "common.cuh"

constexpr u32 BLOCK = 256;
constexpr u32 TILE = 64;
constexpr u32 DEPTH = 16;

// A piece of a matrix, transposed: [depth, row]; zeros beyond its end.
using Tile = float[DEPTH][TILE + 4];

__device__ __forceinline__ void fetch(Tile& tile, const float* from, u64 stride, u32 first, u32 end, u32 depth) {
#pragma unroll
    for (u32 i = threadIdx.x; i < TILE * DEPTH; i += BLOCK) {
        const u32 row = i / DEPTH, k = i % DEPTH;
        const bool inside = first + row < end && depth + k < HEAD_DIM;
        tile[k][row] = inside ? from[(first + row) * stride + depth + k] : 0.0f;
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    transform_heads(const float* x, u64 x_stride, const float* matrices, u32 group, float* out, u64 out_stride, u32 n_tokens) {
    __shared__ Tile positions, rows;
    const u32 head = blockIdx.x, first = blockIdx.y * TILE, column = blockIdx.z * TILE;
    const float* const matrix = matrices + static_cast<u64>(head / group) * (HEAD_DIM * HEAD_DIM);
    // A thread computes positions i .. i + 4 and columns j .. j + 4 of the tile.
    const u32 i = threadIdx.x / 16 * 4, j = threadIdx.x % 16 * 4;
    float sum[4][4] = {};
    for (u32 depth = 0; depth < HEAD_DIM; depth += DEPTH) {
        fetch(positions, x + head * HEAD_DIM, x_stride, first, n_tokens, depth);
        fetch(rows, matrix, HEAD_DIM, column, HEAD_DIM, depth);
        __syncthreads();
#pragma unroll
        for (u32 k = 0; k < DEPTH; k++) {
#pragma unroll
            for (u32 m = 0; m < 16; m++) sum[m / 4][m % 4] += positions[k][i + m / 4] * rows[k][j + m % 4];
        }
        __syncthreads();
    }
#pragma unroll
    for (u32 m = 0; m < 16; m++) {
        const u32 t = first + i + m / 4, c = column + j + m % 4;
        if (t < n_tokens && c < HEAD_DIM) out[t * out_stride + head * HEAD_DIM + c] = sum[m / 4][m % 4];
    }
}
