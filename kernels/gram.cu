// Gram matrices of bf16 heads (Algorithm 1, line 4 of the paper), on tensor cores.
//
//   gram_parts   partial[p, n, i, j] = sum_t x[t, n, i] x[t, n, j]    t in p * 4096 .. (p + 1) * 4096, i / 32 >= j / 32
//   add_gram     into[h, i, j] += sum_g sum_p partial[p, first_head + h * group + g, i, j], both triangles from the lower one
//
// Arguments: x        [n_tokens, n_heads, HEAD_DIM] bf16, 16-byte aligned, tokens `stride` elements apart (a multiple of 8).
//                     One call takes queries, keys and values where they are a fused row.
//            partial  [n_parts, n_heads, HEAD_DIM, HEAD_DIM] f64, n_parts = ceil(n_tokens / 4096), 16-byte aligned; blocks
//                     above the diagonal are not written.
//            into     [n_groups, HEAD_DIM, HEAD_DIM] f64, full symmetric.
//
// Sums: products of bf16 are exact in f32; 512 positions are summed in f32 by the tensor cores, then added to f64 sums in
// registers; parts in f64, in order. A tensor core truncates where it adds: each of 512 / 8 steps (8 is the least depth that
// hardware takes at once) loses less than 2^-23 of the sum so far, which grows linearly on the diagonal, so a diagonal entry is
// low by less than (512 / 8 / 2) 2^-23 = 3.8e-6 relative; entries off it lose as much relative to sqrt(G_ii G_jj). The tolerance
// against f64, in the Frobenius norm, is 5e-6. The order of all sums depends on shapes alone.
//
// Work: the lower triangle in blocks of 32 x 32, one a warp; HEAD_DIM is padded to a multiple of 32 with zeros in shared memory.
// All warps share a pipeline of STAGES tiles of positions in shared memory, filled by cp.async. A is X^T and B is X: both come
// from the same tile through transposing ldmatrix. Rows are padded by 16 bytes, so that 8 of them meet all banks.
//
// Macros: HEAD_DIM, a multiple of 8, at most 256.
// Launch of gram_parts: block 32 WARPS, grid (n_heads, n_parts, ceil(BLOCKS / WARPS)), dynamic shared memory
// STAGES ROWS (PADDED + 8) 2 bytes; with PADDED = HEAD_DIM rounded up to 32, BLOCKS = (PADDED / 32) (PADDED / 32 + 1) / 2,
// WARPS = min(BLOCKS, 12), STAGES = 4, ROWS = 64, or 32 when PADDED > 128. add_gram: block 256, grid
// (ceil(HEAD_DIM^2 / 256), n_groups). sm_80 on. Floor: bytes, x read once (ceil(BLOCKS / WARPS) times, the others from L2).
// Oracle: gram_wide.cu, and f64 on the host.
#include "common.cuh"

constexpr u32 TILE = 32;
constexpr u32 PADDED = ceil_div(HEAD_DIM, TILE) * TILE;
constexpr u32 SIDE = PADDED / TILE;
constexpr u32 BLOCKS = SIDE * (SIDE + 1) / 2;
constexpr u32 WARPS = BLOCKS < 12 ? BLOCKS : 12;
constexpr u32 THREADS = WARPS * WARP_SIZE;
constexpr u32 STAGES = 4;
constexpr u32 ROWS = PADDED > 128 ? 32 : 64;
constexpr u32 ROW_STRIDE = PADDED + 8;
constexpr u32 PART = 4096;
constexpr u32 F32_POSITIONS = 512;
constexpr u32 TILES_PER_SUM = F32_POSITIONS / ROWS;
constexpr u32 VECTORS = HEAD_DIM / 8;

static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 256, "whole vectors, and a tile in shared memory");
static_assert(PART % F32_POSITIONS == 0 && F32_POSITIONS % ROWS == 0, "f32 sums end with a tile");

// Row and column of 32 x 32 block `block` of the lower triangle, counted row by row.
struct Block {
    u32 row, column;
};

__device__ __forceinline__ Block block_of(u32 block) {
    u32 row = 0;
    while ((row + 1) * (row + 2) / 2 <= block) row++;
    return {row, block - row * (row + 1) / 2};
}

// Starts copying positions `first` .. `first + ROWS` of one head to a tile; zeros beyond the end.
__device__ __forceinline__ void fetch(u32 tile, const u16* head, u64 stride, u32 first, u32 end) {
#pragma unroll 4
    for (u32 i = threadIdx.x; i < ROWS * VECTORS; i += THREADS) {
        const u32 row = i / VECTORS, vector = i % VECTORS, t = first + row;
        const bool valid = t < end;
        cp_async16_or_zero(tile + (row * ROW_STRIDE + vector * 8) * 2, head + (valid ? t : 0) * stride + vector * 8, valid);
    }
}

// Zeros everywhere, for the columns that pad a head: no copy touches them.
__device__ __forceinline__ void clear(u16* tiles) {
    for (u32 i = threadIdx.x; i < STAGES * ROWS * ROW_STRIDE / 8; i += THREADS) store16(tiles + i * 8, make_uint4(0, 0, 0, 0));
    __syncthreads();
}

// acc += X^T X over the 16 positions from `row` of a tile, in the block's 2 x 4 pieces of 16 x 8.
__device__ __forceinline__ void multiply(u32 tile, u32 row, Block block, float (&acc)[2][4][4]) {
    // Lanes 0-7 address positions 0-7 of the first 8 columns, 8-15 the same of the next 8, 16-31 positions 8-15.
    const u32 lane = threadIdx.x % WARP_SIZE;
    const u32 at = tile + ((row + lane % 8 + lane / 16 * 8) * ROW_STRIDE + lane / 8 % 2 * 8) * 2;
    u32 a[2][4], b[2][4];
#pragma unroll
    for (u32 i = 0; i < 2; i++) ldmatrix_x4_transposed(a[i], at + (block.row * TILE + i * 16) * 2);
#pragma unroll
    for (u32 j = 0; j < 2; j++) ldmatrix_x4_transposed(b[j], at + (block.column * TILE + j * 16) * 2);
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
#pragma unroll
        for (u32 j = 0; j < 4; j++) mma_bf16_16x8x16(acc[i][j], a[i], b[j / 2][j % 2], b[j / 2][j % 2 + 2]);
    }
}

// sum += acc, and acc starts again.
__device__ __forceinline__ void widen(float (&acc)[2][4][4], double (&sum)[2][4][4]) {
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
#pragma unroll
            for (u32 r = 0; r < 4; r++) sum[i][j][r] += acc[i][j][r], acc[i][j][r] = 0.0f;
        }
    }
}

__device__ __forceinline__ void store_block(double* out, Block block, const double (&sum)[2][4][4]) {
    const u32 lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            const u32 row = block.row * TILE + i * 16 + lane / 4, column = block.column * TILE + j * 8 + lane % 4 * 2;
            if (row >= HEAD_DIM || column >= HEAD_DIM) continue;
            *reinterpret_cast<double2*>(out + row * HEAD_DIM + column) = make_double2(sum[i][j][0], sum[i][j][1]);
            if (row + 8 >= HEAD_DIM) continue;
            *reinterpret_cast<double2*>(out + (row + 8) * HEAD_DIM + column) = make_double2(sum[i][j][2], sum[i][j][3]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) gram_parts(const u16* x, u64 stride, u32 n_tokens, double* partial) {
    extern __shared__ __align__(16) u16 tiles[];
    const u32 first = blockIdx.y * PART, end = min(first + PART, n_tokens), n_tiles = ceil_div(end - first, ROWS);
    const u16* const head = x + blockIdx.x * HEAD_DIM;
    const u32 base = shared_address(tiles), which = blockIdx.z * WARPS + threadIdx.x / WARP_SIZE;
    const Block block = block_of(min(which, BLOCKS - 1));
    const auto stage = [&](u32 tile) { return base + tile % STAGES * (ROWS * ROW_STRIDE * 2); };

    if (PADDED != HEAD_DIM) clear(tiles);
#pragma unroll
    for (u32 tile = 0; tile < STAGES - 1; tile++) {
        if (tile < n_tiles) fetch(stage(tile), head, stride, first + tile * ROWS, end);
        cp_async_commit();
    }
    float acc[2][4][4] = {};
    double sum[2][4][4] = {};
    for (u32 tile = 0; tile < n_tiles; tile++) {
        // Tile `tile` is here, and every warp is done with the one before it, whose place the next copy takes.
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        const u32 next = tile + STAGES - 1;
        if (next < n_tiles) fetch(stage(next), head, stride, first + next * ROWS, end);
        cp_async_commit();
#pragma unroll
        for (u32 row = 0; row < ROWS; row += 16) multiply(stage(tile), row, block, acc);
        if ((tile + 1) % TILES_PER_SUM == 0 || tile + 1 == n_tiles) widen(acc, sum);
    }
    const u64 out = static_cast<u64>(blockIdx.y) * gridDim.x + blockIdx.x;
    if (which < BLOCKS) store_block(partial + out * (HEAD_DIM * HEAD_DIM), block, sum);
}

extern "C" __global__ void __launch_bounds__(256)
    add_gram(const double* partial, u32 n_parts, u32 n_heads, u32 first_head, u32 group, double* into) {
    const u32 at = blockIdx.x * 256 + threadIdx.x, i = at / HEAD_DIM, j = at % HEAD_DIM;
    if (i >= HEAD_DIM || j > i) return;
    double sum = 0.0;
    for (u32 g = 0; g < group; g++) {
        const u64 head = first_head + blockIdx.y * group + g;
        for (u32 p = 0; p < n_parts; p++) sum += partial[(static_cast<u64>(p) * n_heads + head) * (HEAD_DIM * HEAD_DIM) + at];
    }
    double* const out = into + static_cast<u64>(blockIdx.y) * (HEAD_DIM * HEAD_DIM);
    const double total = out[at] + sum;
    out[at] = total;
    out[j * HEAD_DIM + i] = total;
}
