// Causal attention with grouped queries, flash style, on `mma.sync`: compute capability 8.0 and later.
//
// out[t, n] = Σ_s p[t, s] v[s, n / G],   p[t, ·] = softmax over the keys s with t - window < s <= t of cap(scale · q[t, n] · k[s, n / G])
// (Eq. 2), where G = n_heads / n_kv_heads and cap(x) = softcap · tanh(x / softcap), or x. Never stores a score.
//
// Arguments. q `[n_tokens, n_heads HEAD_DIM]`, k and v `[n_tokens, n_kv_heads HEAD_DIM]`, out as q: bf16, rows `*_stride` elements
// apart (a multiple of 8; the tensors begin at multiples of 16 bytes; out's strides even). window: keys that a query reads, itself
// counted; 0 reads all before it. softcap is read only with SOFTCAP. Any n_tokens >= 1 below 2^31.
//   With EXACT, out is f32 and lse f32 `[n_heads, n_tokens]` receives log2 Σ_s 2^(log2(e) · score); else lse is not touched.
// Grid (ceil(n_tokens / BLOCK_ROWS) · G, n_kv_heads), block 32 · WARPS, dynamic shared memory
//   (BLOCK_ROWS + STAGES · BLOCK_KEYS) · (2 · HEAD_DIM + 16) bytes.
// Macros: HEAD_DIM (a multiple of 16 up to 256); SOFTCAP, EXACT (0 or 1); STAGES, BLOCK_KEYS (a multiple of 16), WARPS and
//   BLOCKS_PER_SM have defaults; STAGES 2 fits two blocks into the shared memory of compute capability 8.0.
//   BLOCK_ROWS = WARPS · 16 · ROW_TILES, where ROW_TILES is 2 up to a head dim of 128 and 1 above.
//
// Numbers: products of bf16 with f32 sums; softmax in f32, base 2. The reference of the exponent follows the row's maximum only when
// that exceeds it by 2^8, which changes no relative precision: p / Σp is the same for any reference, and p <= 2^8 (n_tokens) stays far
// from overflow. p is rounded to bf16 before it meets v (relative error 2^-9 a term, of random sign); with EXACT p = hi + lo in two
// bf16 (2^-17 a term).
// Oracle: attention in f64. Tolerance 4e-3 of the output's norm (rounding of p and of the output to bf16, 1.5e-3 each; 2.2e-3 seen),
//   with EXACT 2e-5 (2.4e-6 seen).
// Floor: 4 · HEAD_DIM operations for each pair (t, s) over the rate of `mma.sync`: 590 to 630 TFLOP/s from registers alone on an H200.
//   Seen there at 32768 tokens, HEAD_DIM 128, 32/8 heads: 352 to 389; at 16384 tokens 64 325, 80 341, 96 350, 112 355, 256 295.
#include "common.cuh"

#ifndef SOFTCAP
#define SOFTCAP 0
#endif
#ifndef EXACT
#define EXACT 0
#endif
#ifndef STAGES
#define STAGES 3
#endif
#ifndef WARPS
#define WARPS 4
#endif
#ifndef BLOCK_KEYS
#define BLOCK_KEYS (HEAD_DIM <= 64 || HEAD_DIM == 112 ? 64 : HEAD_DIM == 80 || HEAD_DIM == 128 ? 48 : 32)
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 2
#endif

constexpr u32 ROW_TILES = HEAD_DIM <= 128 ? 2 : 1;
constexpr u32 WARP_ROWS = 16 * ROW_TILES;
constexpr u32 BLOCK_ROWS = WARPS * WARP_ROWS;
constexpr u32 THREADS = WARPS * WARP_SIZE;
constexpr u32 STEPS = HEAD_DIM / 16;      // contraction steps of q · k
constexpr u32 KEY_TILES = BLOCK_KEYS / 8; // 8 columns of scores each
constexpr u32 DIM_TILES = HEAD_DIM / 8;   // 8 columns of the output each

// An odd number of 16-byte chunks: the eight rows of an 8x8 matrix lie in different banks.
constexpr u32 PITCH = 2 * HEAD_DIM + 16;
constexpr u32 TILE_BYTES = BLOCK_KEYS * PITCH;
static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM <= 256 && BLOCK_KEYS % 16 == 0 && STAGES >= 2, "shapes that the fragments cover");

constexpr float LOG2_E = 1.4426950408889634f;
// Below every score that f32 softmax can tell from it, and finite, so that differences of references are never NaN.
constexpr float NO_REFERENCE = -1e30f;
// The reference lags behind the row's maximum by at most this, in powers of two.
constexpr float LAG = 8.0f;

using Scores = float[ROW_TILES][KEY_TILES][4];
using Output = float[ROW_TILES][DIM_TILES][4];

// A fragments of the probabilities of 16 keys, and with EXACT of what their rounding left.
struct Probabilities {
    u32 high[ROW_TILES][4];
#if EXACT
    u32 rest[ROW_TILES][4];
#endif
};

// Rows of a matrix in device memory.
struct Rows {
    const u16* data;
    u32 stride;
    u32 n_rows;
};

// Both within 2 units in the last place. The exponential is volatile so that it stays where it is written, between the products.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// `cp_async16_or_zero` where `wanted`, without a branch: a warp that parts between products waits for all of them.
__device__ __forceinline__ void cp_async16_if(bool wanted, u32 to, const void* from, bool valid) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; @p cp.async.cg.shared.global [%0], [%1], 16, %2; }" ::"r"(to), "l"(from),
                 "r"(valid ? 16 : 0), "r"(static_cast<u32>(wanted))
                 : "memory");
}

// The copy of N_ROWS rows from row `first` on into shared memory at PITCH, in pieces that fit between other work. Rows past the
// end become zeros, which no probability of zero can turn into a NaN.
template <u32 N_ROWS>
struct Copy {
    static constexpr u32 CHUNKS = HEAD_DIM / 8;
    // Threads of one row: the largest power of two that divides its chunks.
    static constexpr u32 LANES = CHUNKS & (~CHUNKS + 1);
    static constexpr u32 ROWS_AT_ONCE = THREADS / LANES, CHUNKS_OF_LANE = CHUNKS / LANES;
    static constexpr u32 PIECES = ceil_div(N_ROWS, ROWS_AT_ONCE) * CHUNKS_OF_LANE;

    const u16* from; // this thread's first chunk
    const u16* base; // any mapped address
    u64 step;        // elements from a row to that ROWS_AT_ONCE later
    u32 to, row, n_rows;

    __device__ __forceinline__ Copy(u32 target, const Rows& source, u32 first)
        : from(source.data + static_cast<u64>(first + threadIdx.x / LANES) * source.stride + threadIdx.x % LANES * 8), base(source.data),
          step(static_cast<u64>(source.stride) * ROWS_AT_ONCE), to(target + threadIdx.x / LANES * PITCH + threadIdx.x % LANES * 16),
          row(first + threadIdx.x / LANES), n_rows(source.n_rows) {}

    __device__ __forceinline__ void piece(u32 at) const {
        const u32 pass = at / CHUNKS_OF_LANE, chunk = at % CHUNKS_OF_LANE * LANES;
        const bool wanted = N_ROWS % ROWS_AT_ONCE == 0 || pass * ROWS_AT_ONCE + threadIdx.x / LANES < N_ROWS;
        const bool valid = row + pass * ROWS_AT_ONCE < n_rows;
        cp_async16_if(wanted, to + pass * ROWS_AT_ONCE * PITCH + chunk * 16, valid ? from + pass * step + chunk * 8 : base, valid);
    }

    // The share of the pieces that falls to slot `slot` of `n_slots`.
    __device__ __forceinline__ void share(u32 slot, u32 n_slots) const {
#pragma unroll
        for (u32 at = 0; at < PIECES; at++)
            if (at * n_slots / PIECES == slot) piece(at);
    }

    __device__ __forceinline__ void all() const { share(0, 1); }
};

using TileCopy = Copy<BLOCK_KEYS>;

// A ring of tiles: K of block j is tile 2j, V is tile 2j + 1. STAGES - 1 copies are under way while one tile is read.
struct Ring {
    u32 base;  // shared address
    u32 slot;  // slot of the tile to be read next
    Rows k, v;
    u32 first_block, n_blocks;

    // The copy of `tile` into `into`; past the end it reads nothing.
    __device__ __forceinline__ TileCopy copy(u32 tile, u32 into) const {
        Rows from = tile % 2 == 0 ? k : v;
        if (tile / 2 >= n_blocks) from.n_rows = 0;
        return TileCopy(base + into * TILE_BYTES, from, (first_block + tile / 2) * BLOCK_KEYS);
    }

    // Waits for the next tile and returns its address.
    __device__ __forceinline__ u32 wait() const {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        return base + slot * TILE_BYTES;
    }

    // The copy to be made while `tile` is read: of the tile STAGES - 1 later, into the slot that all warps have left.
    __device__ __forceinline__ TileCopy ahead(u32 tile) const { return copy(tile + STAGES - 1, slot == 0 ? STAGES - 1 : slot - 1); }

    // Closes the group of the copy ahead and moves on.
    __device__ __forceinline__ void advance() {
        cp_async_commit();
        slot = slot + 1 == STAGES ? 0 : slot + 1;
    }
};

// Shared addresses of this lane's rows for `ldmatrix`: A fragments (queries), B fragments of K, and of V (transposed).
__device__ __forceinline__ u32 lane_a() {
    const u32 lane = threadIdx.x % WARP_SIZE;
    return lane % 16 * PITCH + lane / 16 * 16;
}

__device__ __forceinline__ u32 lane_k() {
    const u32 lane = threadIdx.x % WARP_SIZE;
    return (lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 16;
}

__device__ __forceinline__ u32 lane_v() { return lane_a(); }

// scores = Q Kᵀ, unscaled, with the copy of another tile in between.
__device__ __forceinline__ void multiply_keys(Scores& scores, u32 queries, u32 keys, const TileCopy& copy) {
#pragma unroll
    for (u32 i = 0; i < ROW_TILES; i++)
#pragma unroll
        for (u32 n = 0; n < KEY_TILES; n++)
#pragma unroll
            for (u32 e = 0; e < 4; e++) scores[i][n][e] = 0.0f;
#pragma unroll
    for (u32 step = 0; step < STEPS; step++) {
        u32 a[ROW_TILES][4];
#pragma unroll
        for (u32 i = 0; i < ROW_TILES; i++) ldmatrix_x4(a[i], queries + i * 16 * PITCH + step * 32);
#pragma unroll
        for (u32 n = 0; n < KEY_TILES; n += 2) {
            u32 b[4];
            ldmatrix_x4(b, keys + n * 8 * PITCH + step * 32);
#pragma unroll
            for (u32 i = 0; i < ROW_TILES; i++) {
                mma_bf16_16x8x16(scores[i][n], a[i], b[0], b[1]);
                mma_bf16_16x8x16(scores[i][n + 1], a[i], b[2], b[3]);
            }
        }
        copy.share(step, STEPS);
    }
}

// Unscaled scores to softcap · tanh(scale · score / softcap), by 1 - 2 / (1 + e^2x): f32's precision, where tanh.approx has 2^-11.
__device__ __forceinline__ void cap_scores(Scores& scores, float scale, float softcap) {
    const float inner = 2.0f * LOG2_E * scale / softcap;
#pragma unroll
    for (u32 i = 0; i < ROW_TILES; i++)
#pragma unroll
        for (u32 n = 0; n < KEY_TILES; n++)
#pragma unroll
            for (u32 e = 0; e < 4; e++) {
                scores[i][n][e] = softcap - 2.0f * softcap * reciprocal_fast(1.0f + exp2_fast(inner * scores[i][n][e]));
            }
}

// Scores of keys that a query does not read become -inf. `row` and `key` are those of this lane's first score.
__device__ __forceinline__ void mask_scores(Scores& scores, u32 row, u32 key, u32 window) {
#pragma unroll
    for (u32 i = 0; i < ROW_TILES; i++)
#pragma unroll
        for (u32 n = 0; n < KEY_TILES; n++)
#pragma unroll
            for (u32 e = 0; e < 4; e++) {
                const u32 t = row + i * 16 + e / 2 * 8, s = key + n * 8 + e % 2;
                const bool reads = s <= t && (window == 0 || t - s < window);
                if (!reads) scores[i][n][e] = -__int_as_float(0x7f800000);
            }
}

// Σ_s p v and Σ_s p of a warp's rows, relative to 2^reference. This lane holds rows l / 4 and l / 4 + 8 of each row tile.
struct Accumulator {
    Output output;
    float reference[ROW_TILES][2];
    float sum[ROW_TILES][2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (u32 i = 0; i < ROW_TILES; i++) {
#pragma unroll
            for (u32 n = 0; n < DIM_TILES; n++)
#pragma unroll
                for (u32 e = 0; e < 4; e++) output[i][n][e] = 0.0f;
#pragma unroll
            for (u32 half = 0; half < 2; half++) reference[i][half] = NO_REFERENCE, sum[i][half] = 0.0f;
        }
    }

    // Raises the references where a row's maximum has outgrown its own by LAG. Rare after the first tiles, and then without a shuffle.
    __device__ __forceinline__ void follow(const Scores& scores, float scale) {
        float highest[ROW_TILES][2];
        bool outgrown = false;
#pragma unroll
        for (u32 i = 0; i < ROW_TILES; i++)
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                float max = fmaxf(scores[i][0][2 * half], scores[i][0][2 * half + 1]);
#pragma unroll
                for (u32 n = 1; n < KEY_TILES; n++) max = fmaxf(max, fmaxf(scores[i][n][2 * half], scores[i][n][2 * half + 1]));
                highest[i][half] = max * scale;
                outgrown |= highest[i][half] > reference[i][half] + LAG;
            }
        if (__any_sync(FULL_WARP, outgrown)) raise(highest);
    }

    __device__ __forceinline__ void raise(float (&highest)[ROW_TILES][2]) {
#pragma unroll
        for (u32 i = 0; i < ROW_TILES; i++)
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                float max = highest[i][half];
                max = fmaxf(max, __shfl_xor_sync(FULL_WARP, max, 1));
                max = fmaxf(max, __shfl_xor_sync(FULL_WARP, max, 2));
                max = fmaxf(max, reference[i][half]);
                const float factor = exp2_fast(reference[i][half] - max);
                reference[i][half] = max;
                sum[i][half] *= factor;
#pragma unroll
                for (u32 n = 0; n < DIM_TILES; n++) output[i][n][2 * half] *= factor, output[i][n][2 * half + 1] *= factor;
            }
    }

    // Two probabilities, entry (i, r) of the A fragments of 16 keys: register r holds rows by r % 2 and keys by r / 2.
    __device__ __forceinline__ void exponentiate(Probabilities& p, const Scores& scores, float scale, u32 c, u32 entry) {
        const u32 i = entry / 4, r = entry % 4;
        const float* score = &scores[i][2 * c + r / 2][2 * (r % 2)];
        const float low = exp2_fast(fmaf(score[0], scale, -reference[i][r % 2]));
        const float high = exp2_fast(fmaf(score[1], scale, -reference[i][r % 2]));
        sum[i][r % 2] += low + high;
        p.high[i][r] = f32_to_bf16x2(low, high);
#if EXACT
        p.rest[i][r] = f32_to_bf16x2(low - bf16x2_low(p.high[i][r]), high - bf16x2_high(p.high[i][r]));
#endif
    }

    // Adds p v of one tile, 16 keys at a time; the exponentials of the next 16 and the copy of another tile run between the products.
    __device__ __forceinline__ void add(const Scores& scores, float scale, u32 values, const TileCopy& copy) {
        constexpr u32 ENTRIES = 4 * ROW_TILES, CHUNKS = KEY_TILES / 2, PRODUCTS = DIM_TILES / 2;
        Probabilities p[2];
#pragma unroll
        for (u32 entry = 0; entry < ENTRIES; entry++) exponentiate(p[0], scores, scale, 0, entry);
#pragma unroll
        for (u32 c = 0; c < CHUNKS; c++)
#pragma unroll
            for (u32 n = 0; n < PRODUCTS; n++) {
                u32 b[4];
                ldmatrix_x4_transposed(b, values + c * 16 * PITCH + n * 32);
                multiply(2 * n, p[c % 2], b);
#pragma unroll
                for (u32 entry = 0; entry < ENTRIES; entry++) {
                    if (c + 1 < CHUNKS && entry * PRODUCTS / ENTRIES == n) exponentiate(p[(c + 1) % 2], scores, scale, c + 1, entry);
                }
                copy.share(c * PRODUCTS + n, CHUNKS * PRODUCTS);
            }
    }

    // Adds p times two column tiles of v.
    __device__ __forceinline__ void multiply(u32 n, const Probabilities& p, const u32 (&b)[4]) {
#pragma unroll
        for (u32 i = 0; i < ROW_TILES; i++) {
            mma_bf16_16x8x16(output[i][n], p.high[i], b[0], b[1]);
            mma_bf16_16x8x16(output[i][n + 1], p.high[i], b[2], b[3]);
#if EXACT
            mma_bf16_16x8x16(output[i][n], p.rest[i], b[0], b[1]);
            mma_bf16_16x8x16(output[i][n + 1], p.rest[i], b[2], b[3]);
#endif
        }
    }
};

#if EXACT
using Out = float;
__device__ __forceinline__ void store_pair(float* to, float low, float high) { *reinterpret_cast<float2*>(to) = make_float2(low, high); }
#else
using Out = u16;
__device__ __forceinline__ void store_pair(u16* to, float low, float high) { *reinterpret_cast<u32*>(to) = f32_to_bf16x2(low, high); }
#endif

// Divides by the sums and writes the rows that exist. `out` and `lse` are those of the head.
__device__ __forceinline__ void store(Accumulator& result, Out* out, float* lse, u32 stride, u32 row, u32 n_tokens) {
    const u32 column = threadIdx.x % 4 * 2;
#pragma unroll
    for (u32 i = 0; i < ROW_TILES; i++)
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            float sum = result.sum[i][half];
            sum += __shfl_xor_sync(FULL_WARP, sum, 1);
            sum += __shfl_xor_sync(FULL_WARP, sum, 2);
            const u32 t = row + i * 16 + half * 8;
            if (t >= n_tokens) continue;
            const float inverse = 1.0f / sum;
            Out* to = out + static_cast<u64>(t) * stride + column;
#pragma unroll
            for (u32 n = 0; n < DIM_TILES; n++) {
                store_pair(to + n * 8, result.output[i][n][2 * half] * inverse, result.output[i][n][2 * half + 1] * inverse);
            }
            if (EXACT && column == 0) lse[t] = result.reference[i][half] + log2f(sum);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
attention_mma(const u16* q, const u16* k, const u16* v, Out* out, float* lse, u32 n_tokens, u32 n_heads, u32 n_kv_heads, u32 q_stride,
              u32 k_stride, u32 v_stride, u32 out_stride, float scale, float softcap, u32 window) {
    extern __shared__ __align__(16) unsigned char memory[];
    // The heads of a group are neighbours, so they read the same keys at the same time; the longest rows come first.
    const u32 group = n_heads / n_kv_heads, kv_head = blockIdx.y, head = kv_head * group + blockIdx.x % group;
    const u32 first_row = (gridDim.x / group - 1 - blockIdx.x / group) * BLOCK_ROWS;
    const u32 end_row = min(first_row + BLOCK_ROWS, n_tokens);
    const u32 first_key = window != 0 && first_row + 1 > window ? first_row + 1 - window : 0;

    const u32 queries_at = shared_address(memory);
    const u64 kv_offset = static_cast<u64>(kv_head) * HEAD_DIM;
    const Rows keys_from{k + kv_offset, k_stride, n_tokens}, values_from{v + kv_offset, v_stride, n_tokens};
    Ring ring{queries_at + BLOCK_ROWS * PITCH, 0, keys_from, values_from, first_key / BLOCK_KEYS, 0};
    ring.n_blocks = ceil_div(end_row, BLOCK_KEYS) - ring.first_block;
    Copy<BLOCK_ROWS>(queries_at, {q + static_cast<u64>(head) * HEAD_DIM, q_stride, n_tokens}, first_row).all();
#pragma unroll
    for (u32 tile = 0; tile < STAGES - 1; tile++) {
        ring.copy(tile, tile).all();
        cp_async_commit();
    }

    const u32 lane = threadIdx.x % WARP_SIZE;
    const u32 warp_row = first_row + threadIdx.x / WARP_SIZE * WARP_ROWS, last_row = warp_row + WARP_ROWS - 1;
    const u32 queries = queries_at + (warp_row - first_row) * PITCH + lane_a();
    const float factor = SOFTCAP ? LOG2_E : scale * LOG2_E;
    Accumulator result;
    result.clear();
    for (u32 block = 0; block < ring.n_blocks; block++) {
        const u32 key = (ring.first_block + block) * BLOCK_KEYS, last_key = key + BLOCK_KEYS - 1;
        const bool reads = key <= last_row && (window == 0 || last_key + window > warp_row);
        Scores scores;
        const u32 keys = ring.wait() + lane_k();
        const TileCopy ahead_of_keys = ring.ahead(2 * block);
        if (reads) {
            multiply_keys(scores, queries, keys, ahead_of_keys);
            if (SOFTCAP) cap_scores(scores, scale, softcap);
            const bool whole = last_key <= warp_row && (window == 0 || key + window > last_row);
            if (!whole) mask_scores(scores, warp_row + lane / 4, key + lane % 4 * 2, window);
            result.follow(scores, factor);
        } else {
            ahead_of_keys.all();
        }
        ring.advance();
        const u32 values = ring.wait() + lane_v();
        const TileCopy ahead_of_values = ring.ahead(2 * block + 1);
        if (reads) result.add(scores, factor, values, ahead_of_values);
        else ahead_of_values.all();
        ring.advance();
    }
    float* const head_lse = EXACT ? lse + static_cast<u64>(head) * n_tokens : nullptr;
    store(result, out + static_cast<u64>(head) * HEAD_DIM, head_lse, out_stride, warp_row + lane / 4, n_tokens);
}
