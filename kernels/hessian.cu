// The exact Hessians of attention's output error, summed over the positions of one sequence (Appendix C: Eq. 56, 60, 61). Nothing
// of size S x S is in memory.
//
//   Σ_s H_K(h,s) = 2 scale² Σ_{a,b} Q_a diag(c_{·,a,b}) Q_bᵀ    c_{t,a,b} = Σ_s p_{a,t,s} p_{b,t,s} r_{a,b}(s,t)
//   Σ_s H_V(h,s) = 2 Σ_{a,b} (Σ_t w_{t,a,b}) Γ_{a,b}              w_{t,a,b} = Σ_s p_{a,t,s} p_{b,t,s}
//   r_{a,b}(s,t) = (v_s - o_{a,t})ᵀ Γ_{a,b} (v_s - o_{b,t}) = f_{a,b}(s) - g_{a,b}(t) · v_s + e_{a,b}(t), where with v' = v - μ, o' = o - μ
//   f = v'_sᵀ Γ_{a,b} v'_s,   g = Γ_{a,b}ᵀ o'_a + Γ_{a,b} o'_b,   e = o'_aᵀ Γ_{a,b} o'_b + g · μ
// over the query heads a, b of KV head h's group (a <= b suffices: c and w are symmetric), with Γ_{a,b} = W_O(h,a) W_O(h,b)ᵀ. Any μ
// gives the same r; a mean of the values makes its three terms small. With SOFTCAP each p in c (not in w) carries the cap's slope
// 1 - tanh². Scores never leave the registers.
//
// Kernels, in order (each on all KV heads; IMAGE_THREADS is HEAD_DIM rounded up to 32). p and o come from `attention_mma.cu` with EXACT:
// outputs f32 `[n_tokens, n_kv_heads GROUP HEAD_DIM]` and lse f32 `[n_kv_heads GROUP, n_tokens]`.
//   hessian_mean     v -> mean f32 `[n_kv_heads, HEAD_DIM]`: of at most 1024 rows.     grid (1, n_kv_heads), block IMAGE_THREADS
//   hessian_energies v, mean, coupling -> f                         grid (padded / 32, PAIRS, n_kv_heads), block IMAGE_THREADS
//   hessian_slopes   outputs, mean, coupling -> -g and e            as hessian_energies; shared memory 256 · IMAGE_THREADS bytes
//   hessian_pairs    q, k, v, lse, f, -g, e -> c and sums of w      grid (padded / COLUMNS, n_kv_heads), block 32 · WARPS,
//                    shared memory below
//   hessian_key      q, c -> key_hessian += 2 scale² Σ …            grid (ceil(HEAD_DIM / 32)², n_kv_heads), block 1024,
//                    shared memory 8448 · (GROUP + 2) + 256 · PAIRS bytes
//   hessian_value    w, coupling -> value_hessian += 2 Σ …          grid (n_kv_heads, any), block 1024
// Shapes. q, k, v: bf16 as in `attention_mma.cu` (strides in elements, multiples of 8). coupling: f32 `[n_kv_heads, GROUP d, GROUP d]`.
// padded: n_tokens rounded up to 32. energies f and offsets e: f32 `[n_kv_heads, PAIRS, padded]`; slopes -g: bf16
// `[n_kv_heads, PAIRS, 2, padded, d]`, high and low parts; c: f32 `[n_kv_heads, PAIRS, padded]`; overlaps: f32
// `[n_kv_heads, PAIRS, padded / COLUMNS]`; Hessians: f64 `[n_kv_heads, d, d]`, added to. Everything but the Hessians is written whole,
// padding too. Pairs go (0,0), (0,1) … (1,1) …
// Shared memory of hessian_pairs in bytes:
//   (GROUP + 2 PAIRS) COLUMNS PITCH + 4 COLUMNS (GROUP + PAIRS) + 4 WARPS PAIRS KEY_ROWS, and at least 4 WARPS PAIRS (COLUMNS + 1).
// Macros: HEAD_DIM (a multiple of 16 up to 256), GROUP (1 to 8), COLUMNS (16, or 8 where 16 does not fit), SOFTCAP (0 or 1), WARPS.
// Compute capability 8.0 and later.
//
// Numbers. q, k and v are bf16 exactly, so scores are f32 sums of exact products: p has a relative error of 2^-23 max|score| (base 2),
// 1e-5 at scores of 100. -g is split in two bf16, so g · v has 2^-17 |g| |v| at most, and less by sqrt(d) for errors of random sign; f, e,
// c and w are f32. With κ = |v| / |v - o| where the probabilities lie, c's relative error is at most about 2^-17 κ + 2^-22 max|score|.
// Sums over t: f32 over 16 positions of a group's heads, f64 beyond. Fixed orders throughout: the same bits from run to run.
// Oracle: Eq. 56 and Eq. 60 as written, in f64. Tolerance 5e-5 of the Hessian's norm (8e-6 seen).
// Floor: for each pair (t, s <= t) and KV head, 2 HEAD_DIM (GROUP + 2 PAIRS) operations at the rate of `mma.sync`. Seen on an H200 for 32/8
//   heads of 128: 4.4 ms at 4096 tokens, attention included (hessian_pairs 1.46, at 283 of 630 TFLOP/s), 130 ms at 32768.
#include "common.cuh"

#ifndef SOFTCAP
#define SOFTCAP 0
#endif
#ifndef COLUMNS
#define COLUMNS 16
#endif
#ifndef WARPS
#define WARPS 8
#endif

constexpr u32 PAIRS = GROUP * (GROUP + 1) / 2;
constexpr u32 STEPS = HEAD_DIM / 16; // contraction steps
constexpr u32 KEY_TILES = HEAD_DIM <= 128 ? 2 : 1;
constexpr u32 KEY_ROWS = 16 * KEY_TILES; // keys that a warp takes at once
constexpr u32 COLUMN_TILES = COLUMNS / 8;
constexpr u32 THREADS = WARPS * WARP_SIZE;
// An odd number of 32-byte steps: four neighbouring rows lie in different banks.
constexpr u32 PITCH = 2 * HEAD_DIM + (STEPS % 2 == 0 ? 32 : 0);
constexpr u32 IMAGE_ROWS = 32;
constexpr u32 IMAGE_THREADS = ceil_div(HEAD_DIM, WARP_SIZE) * WARP_SIZE;
constexpr u32 MEAN_ROWS = 1024;
static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM <= 256 && GROUP >= 1 && GROUP <= 8 && COLUMNS % 8 == 0 && 32 % COLUMNS == 0, "shapes covered");

constexpr float LOG2_E = 1.4426950408889634f;

// Index of the pair (a, b), a <= b.
__host__ __device__ constexpr u32 pair_index(u32 a, u32 b) { return a * GROUP - a * (a + 1) / 2 + b; }

// The pair with this index.
__device__ __forceinline__ void pair_heads(u32 pair, u32& a, u32& b) {
    a = 0;
    while (pair_index(a, GROUP - 1) < pair) a++;
    b = pair - pair_index(a, a) + a;
}

// ---- μ, f, g, e ----------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(IMAGE_THREADS)
hessian_mean(const u16* v, float* mean, u32 n_tokens, u32 v_stride) {
    const u32 head = blockIdx.y, i = threadIdx.x;
    if (i >= HEAD_DIM) return;
    const u32 n_rows = min(n_tokens, MEAN_ROWS), step = n_tokens / n_rows;
    float sum = 0.0f;
#pragma unroll 8
    for (u32 row = 0; row < n_rows; row++) sum += bf16_to_f32(v[static_cast<u64>(row * step) * v_stride + head * HEAD_DIM + i]);
    mean[head * HEAD_DIM + i] = sum / static_cast<float>(n_rows);
}

using Images = float[IMAGE_ROWS];
using ImageRows = float[IMAGE_ROWS][IMAGE_THREADS];

// images[t] += Σ_i block[i][j] x[t][i] for this thread's j; `block` is a `[HEAD_DIM, HEAD_DIM]` part of the couplings.
__device__ __forceinline__ void add_images(Images& images, const float* block, const ImageRows& x, u32 j) {
    for (u32 i = 0; i < HEAD_DIM; i += 4) {
        float coupling[4];
#pragma unroll
        for (u32 e = 0; e < 4; e++) coupling[e] = block[static_cast<u64>(i + e) * (GROUP * HEAD_DIM) + j];
#pragma unroll
        for (u32 t = 0; t < IMAGE_ROWS; t++) {
            const float4 row = *reinterpret_cast<const float4*>(&x[t][i]);
            images[t] = fmaf(coupling[3], row.w, fmaf(coupling[2], row.z, fmaf(coupling[1], row.y, fmaf(coupling[0], row.x, images[t]))));
        }
    }
}

// out[t] = Σ_j terms[t] of thread j, for the rows of the block; `products` is scratch. All threads of the block call it.
__device__ __forceinline__ void sum_rows(const Images& terms, ImageRows& products, float* out) {
    const u32 lane = threadIdx.x % WARP_SIZE;
    __syncthreads(); // what lay in `products` has been read
#pragma unroll
    for (u32 t = 0; t < IMAGE_ROWS; t++) products[t][threadIdx.x] = threadIdx.x < HEAD_DIM ? terms[t] : 0.0f;
    __syncthreads();
    for (u32 t = threadIdx.x / WARP_SIZE; t < IMAGE_ROWS; t += IMAGE_THREADS / WARP_SIZE) {
        float sum = 0.0f;
        for (u32 j = lane; j < IMAGE_THREADS; j += WARP_SIZE) sum += products[t][j];
        sum = warp_sum(sum);
        if (lane == 0) out[t] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(IMAGE_THREADS)
hessian_energies(const u16* v, const float* mean, const float* coupling, float* energies, u32 n_tokens, u32 padded, u32 v_stride) {
    __shared__ __align__(16) ImageRows rows;
    const u32 first = blockIdx.x * IMAGE_ROWS, head = blockIdx.z, j = threadIdx.x;
    u32 a, b;
    pair_heads(blockIdx.y, a, b);
    for (u32 t = 0; t < IMAGE_ROWS && j < HEAD_DIM; t++) {
        const u32 s = first + t;
        rows[t][j] = s < n_tokens ? bf16_to_f32(v[static_cast<u64>(s) * v_stride + head * HEAD_DIM + j]) - mean[head * HEAD_DIM + j] : 0.0f;
    }
    __syncthreads();
    Images images = {};
    if (j < HEAD_DIM) {
        add_images(images, coupling + (static_cast<u64>(head) * GROUP + a) * HEAD_DIM * GROUP * HEAD_DIM + b * HEAD_DIM, rows, j);
#pragma unroll
        for (u32 t = 0; t < IMAGE_ROWS; t++) images[t] *= rows[t][j];
    }
    sum_rows(images, rows, energies + (static_cast<u64>(head) * PAIRS + blockIdx.y) * padded + first);
}

extern "C" __global__ void __launch_bounds__(IMAGE_THREADS)
hessian_slopes(const float* outputs, const float* mean, const float* coupling, u16* slopes, float* offsets, u32 n_tokens, u32 padded, u32 stride) {
    extern __shared__ __align__(16) float shared[];
    ImageRows &left = reinterpret_cast<ImageRows*>(shared)[0], &right = reinterpret_cast<ImageRows*>(shared)[1];
    const u32 first = blockIdx.x * IMAGE_ROWS, head = blockIdx.z, j = threadIdx.x;
    const u64 pair = static_cast<u64>(head) * PAIRS + blockIdx.y;
    u32 a, b;
    pair_heads(blockIdx.y, a, b);
    const float mu = j < HEAD_DIM ? mean[head * HEAD_DIM + j] : 0.0f;
    for (u32 t = 0; t < IMAGE_ROWS && j < HEAD_DIM; t++) {
        const float* row = outputs + static_cast<u64>(first + t) * stride + head * GROUP * HEAD_DIM + j;
        const bool valid = first + t < n_tokens;
        left[t][j] = valid ? row[a * HEAD_DIM] - mu : 0.0f;
        right[t][j] = valid ? row[b * HEAD_DIM] - mu : 0.0f;
    }
    __syncthreads();
    Images g = {}, terms = {};
    if (j < HEAD_DIM) {
        const float* couplings = coupling + static_cast<u64>(head) * GROUP * HEAD_DIM * GROUP * HEAD_DIM;
        add_images(g, couplings + static_cast<u64>(a) * HEAD_DIM * GROUP * HEAD_DIM + b * HEAD_DIM, left, j);
#pragma unroll
        for (u32 t = 0; t < IMAGE_ROWS; t++) terms[t] = g[t] * right[t][j];
        // Γ_{a,b} x by columns of Γ_{b,a}, its transpose; Γ_{a,a} is its own.
        if (a == b) {
#pragma unroll
            for (u32 t = 0; t < IMAGE_ROWS; t++) g[t] *= 2.0f;
        } else {
            add_images(g, couplings + static_cast<u64>(b) * HEAD_DIM * GROUP * HEAD_DIM + a * HEAD_DIM, right, j);
        }
        u16 *high = slopes + (2 * pair * padded + first) * HEAD_DIM + j, *low = high + static_cast<u64>(padded) * HEAD_DIM;
#pragma unroll
        for (u32 t = 0; t < IMAGE_ROWS; t++) {
            terms[t] = fmaf(g[t], mu, terms[t]);
            const u16 rounded = f32_to_bf16(-g[t]);
            high[t * HEAD_DIM] = rounded;
            low[t * HEAD_DIM] = f32_to_bf16(-g[t] - bf16_to_f32(rounded));
        }
    }
    sum_rows(terms, left, offsets + pair * padded + first);
}

// ---- c and w -------------------------------------------------------------------------------------------------------------

// Tiles of `KEY_ROWS` keys (rows) by COLUMNS queries. A lane holds, of each 16 x 8 part, rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next.
using Tile = float[KEY_TILES][COLUMN_TILES][4];
using Fragments = u32[KEY_TILES][STEPS][4];

// Four bytes that the kernel does not write, or zeros. Volatile, so that neighbours do not become one load of eight: that would tie
// registers to pairs which the matrix instruction wants apart, at the price of a copy each time.
__device__ __forceinline__ u32 load4_or_zero(const u16* from, bool valid) {
    u32 value;
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; mov.u32 %0, 0; @p ld.global.nc.u32 %0, [%1]; }"
                 : "=&r"(value)
                 : "l"(from), "r"(static_cast<u32>(valid)));
    return value;
}

// A fragments of KEY_ROWS rows from device memory. The contraction runs in another order than the instruction's: lane l takes columns
// 4 (l % 4) .. + 4 of each step, eight neighbouring bytes, on both operands. Rows past the end are zeros.
__device__ __forceinline__ void load_fragments(Fragments& a, const u16* rows, u32 stride, u32 first, u32 n_rows) {
    const u32 lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (u32 i = 0; i < KEY_TILES; i++)
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u32 row = first + i * 16 + half * 8 + lane / 4;
            const u16* from = rows + static_cast<u64>(row) * stride + lane % 4 * 4;
#pragma unroll
            for (u32 step = 0; step < STEPS; step++) {
                a[i][step][half] = load4_or_zero(from + step * 16, row < n_rows);
                a[i][step][half + 2] = load4_or_zero(from + step * 16 + 2, row < n_rows);
            }
        }
}

// tile += A B, with B the COLUMNS rows at `columns` in shared memory (this lane's address).
__device__ __forceinline__ void add_product(Tile& tile, const Fragments& a, const unsigned char* columns) {
#pragma unroll
    for (u32 step = 0; step < STEPS; step++)
#pragma unroll
        for (u32 n = 0; n < COLUMN_TILES; n++) {
            const uint2 b = *reinterpret_cast<const uint2*>(columns + n * 8 * PITCH + step * 32);
#pragma unroll
            for (u32 i = 0; i < KEY_TILES; i++) mma_bf16_16x8x16(tile[i][n], a[i][step], b.x, b.y);
        }
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// What of the scores a block needs to make probabilities.
struct Softmax {
    const float* lse; // shared, `[GROUP, COLUMNS]`
    float scale, softcap;
    u32 window, first_column;

    // Unscaled scores of head `a` to probabilities, and with `bend` to probabilities times the softcap's slope.
    template <bool bend>
    __device__ __forceinline__ void apply(Tile& tile, u32 a, u32 first_key) const {
        const u32 lane = threadIdx.x % WARP_SIZE;
#pragma unroll
        for (u32 n = 0; n < COLUMN_TILES; n++)
#pragma unroll
            for (u32 e = 0; e < 4; e++) {
                const u32 column = n * 8 + lane % 4 * 2 + e % 2, t = first_column + column;
                const float total = lse[a * COLUMNS + column];
#pragma unroll
                for (u32 i = 0; i < KEY_TILES; i++) {
                    const u32 s = first_key + i * 16 + lane / 4 + e / 2 * 8;
                    const bool reads = s <= t && (window == 0 || t - s < window);
                    tile[i][n][e] = reads ? probability<bend>(tile[i][n][e], total) : 0.0f;
                }
            }
    }

    template <bool bend>
    __device__ __forceinline__ float probability(float score, float total) const {
        if (!SOFTCAP) return exp2_fast(fmaf(score, scale * LOG2_E, -total));
        // tanh(x) = 1 - 2 / (1 + e^2x) and 1 - tanh² = 4 u (1 - u) with u = 1 / (1 + e^2x): no cancellation on either side.
        const float u = reciprocal_fast(1.0f + exp2_fast(2.0f * LOG2_E * scale / softcap * score));
        const float p = exp2_fast(fmaf(-2.0f * LOG2_E * softcap, u, softcap * LOG2_E - total));
        return bend ? p * 4.0f * u * (1.0f - u) : p;
    }
};

// A warp's sums over its keys.
struct Sums {
    float c[PAIRS][2 * COLUMN_TILES]; // columns 2 (l % 4) and the next of each column tile
    float w[PAIRS];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (u32 pair = 0; pair < PAIRS; pair++) {
            w[pair] = 0.0f;
#pragma unroll
            for (u32 n = 0; n < 2 * COLUMN_TILES; n++) {
                c[pair][n] = 0.0f;
            }
        }
    }

    __device__ __forceinline__ void add_overlaps(const Tile (&p)[GROUP]) {
#pragma unroll
        for (u32 a = 0; a < GROUP; a++)
#pragma unroll
            for (u32 b = a; b < GROUP; b++) {
                float sum = 0.0f;
#pragma unroll
                for (u32 at = 0; at < KEY_TILES * COLUMN_TILES * 4; at++) sum = fmaf((&p[a][0][0][0])[at], (&p[b][0][0][0])[at], sum);
                w[pair_index(a, b)] += sum;
            }
    }

    // c += p_a p_b r of one tile and pair.
    __device__ __forceinline__ void add_residuals(u32 pair, const Tile& a, const Tile& b, const Tile& residuals) {
#pragma unroll
        for (u32 i = 0; i < KEY_TILES; i++)
#pragma unroll
            for (u32 n = 0; n < COLUMN_TILES; n++)
#pragma unroll
                for (u32 e = 0; e < 4; e++) {
                    float& sum = c[pair][2 * n + e % 2];
                    sum = fmaf(a[i][n][e] * b[i][n][e], residuals[i][n][e], sum);
                }
    }
};

// Where a block's operands lie in shared memory.
struct Operands {
    unsigned char *queries, *slopes; // `[GROUP, COLUMNS]` and `[PAIRS, 2, COLUMNS]` rows at PITCH
    float *lse, *offsets, *energies; // `[GROUP, COLUMNS]`, `[PAIRS, COLUMNS]`, `[WARPS, PAIRS, KEY_ROWS]`

    __device__ __forceinline__ explicit Operands(unsigned char* memory)
        : queries(memory), slopes(memory + GROUP * COLUMNS * PITCH), lse(reinterpret_cast<float*>(slopes + 2 * PAIRS * COLUMNS * PITCH)),
          offsets(lse + GROUP * COLUMNS), energies(offsets + PAIRS * COLUMNS) {}
};

// Arguments of `hessian_pairs` that belong to one KV head.
struct Head {
    const u16 *q, *k, *v, *slopes;
    const float *lse, *energies, *offsets;
    u32 n_tokens, padded, q_stride, k_stride, v_stride;
};

// Fills the operands of the columns from `first` on; columns past the end get a probability of zero. Ends with a barrier.
__device__ __forceinline__ void load_operands(const Operands& to, const Head& head, u32 first) {
    constexpr u32 CHUNKS = HEAD_DIM / 8;
    for (u32 at = threadIdx.x; at < (GROUP + 2 * PAIRS) * COLUMNS * CHUNKS; at += THREADS) {
        const u32 chunk = at % CHUNKS, row = at / CHUNKS, column = row % COLUMNS, operand = row / COLUMNS, t = first + column;
        const bool is_query = operand < GROUP, valid = !is_query || t < head.n_tokens;
        const u16* from = is_query ? head.q + static_cast<u64>(valid ? t : 0) * head.q_stride + operand * HEAD_DIM
                                   : head.slopes + (static_cast<u64>(operand - GROUP) * head.padded + t) * HEAD_DIM;
        cp_async16_or_zero(shared_address(to.queries + row * PITCH + chunk * 16), from + chunk * 8, valid);
    }
    cp_async_commit();
    for (u32 at = threadIdx.x; at < GROUP * COLUMNS; at += THREADS) {
        const u32 t = first + at % COLUMNS;
        to.lse[at] = t < head.n_tokens ? head.lse[static_cast<u64>(at / COLUMNS) * head.n_tokens + t] : __int_as_float(0x7f800000);
    }
    for (u32 at = threadIdx.x; at < PAIRS * COLUMNS; at += THREADS) {
        to.offsets[at] = head.offsets[static_cast<u64>(at / COLUMNS) * head.padded + first + at % COLUMNS];
    }
    cp_async_wait<0>();
    __syncthreads();
}

// Starts the copy of the energies of KEY_ROWS keys to this warp's part of shared memory.
__device__ __forceinline__ void start_energies(float* to, const Head& head, u32 first_key) {
    constexpr u32 CHUNKS = KEY_ROWS / 4;
    for (u32 at = threadIdx.x % WARP_SIZE; at < PAIRS * CHUNKS; at += WARP_SIZE) {
        const float* from = head.energies + static_cast<u64>(at / CHUNKS) * head.padded + first_key + at % CHUNKS * 4;
        cp_async16(shared_address(to + at * 4), from);
    }
    cp_async_commit();
}

// residuals = f + e, before the products with -g are added.
__device__ __forceinline__ void start_residuals(Tile& residuals, const float* energies, const float* offsets) {
    const u32 lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (u32 n = 0; n < COLUMN_TILES; n++) {
        const float2 offset = *reinterpret_cast<const float2*>(offsets + n * 8 + lane % 4 * 2);
#pragma unroll
        for (u32 i = 0; i < KEY_TILES; i++) {
            const float low = energies[i * 16 + lane / 4], high = energies[i * 16 + lane / 4 + 8];
            residuals[i][n][0] = low + offset.x, residuals[i][n][1] = low + offset.y;
            residuals[i][n][2] = high + offset.x, residuals[i][n][3] = high + offset.y;
        }
    }
}

// Scores of every head of the group against `keys`, to probabilities (and with `bend` their slopes).
template <bool bend>
__device__ __forceinline__ void attend(Tile (&p)[GROUP], const Fragments& keys, const unsigned char* queries, const Softmax& softmax, u32 first_key) {
#pragma unroll
    for (u32 a = 0; a < GROUP; a++) {
#pragma unroll
        for (u32 at = 0; at < KEY_TILES * COLUMN_TILES * 4; at++) (&p[a][0][0][0])[at] = 0.0f;
        add_product(p[a], keys, queries + a * COLUMNS * PITCH);
        softmax.apply<bend>(p[a], a, first_key);
    }
}

// Adds one tile of keys to a warp's sums.
__device__ __forceinline__ void add_tile(Sums& sums, const Head& head, const Operands& operands, const Softmax& softmax, u32 first_key) {
    const u32 lane = threadIdx.x % WARP_SIZE, lane_offset = lane / 4 * PITCH + lane % 4 * 8;
    float* const energies = operands.energies + threadIdx.x / WARP_SIZE * PAIRS * KEY_ROWS;
    __syncwarp(); // the last tile's energies have been read
    start_energies(energies, head, first_key);
    Tile p[GROUP];
    {
        Fragments keys;
        load_fragments(keys, head.k, head.k_stride, first_key, head.n_tokens);
        attend<false>(p, keys, operands.queries + lane_offset, softmax, first_key);
        sums.add_overlaps(p);
        if (SOFTCAP) attend<true>(p, keys, operands.queries + lane_offset, softmax, first_key);
    }
    Fragments values;
    load_fragments(values, head.v, head.v_stride, first_key, head.n_tokens);
    cp_async_wait<0>();
    __syncwarp();
#pragma unroll
    for (u32 a = 0; a < GROUP; a++)
#pragma unroll
        for (u32 b = a; b < GROUP; b++) {
            constexpr u32 PART = COLUMNS * PITCH;
            const u32 pair = pair_index(a, b);
            const unsigned char* slopes = operands.slopes + 2 * pair * PART + lane_offset;
            Tile residuals;
            start_residuals(residuals, energies + pair * KEY_ROWS, operands.offsets + pair * COLUMNS);
            add_product(residuals, values, slopes);
            add_product(residuals, values, slopes + PART);
            sums.add_residuals(pair, p[a], p[b], residuals);
        }
}

// Sums of the block's warps, in their order. `scratch` is `[WARPS, PAIRS, COLUMNS + 1]`, w last; c and w begin at the block's place.
__device__ __forceinline__ void store_sums(Sums& sums, float* scratch, float* c, float* w, u32 padded) {
    const u32 lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    __syncthreads(); // the operands have been read; `scratch` may lie over them
#pragma unroll
    for (u32 pair = 0; pair < PAIRS; pair++) {
        float* to = scratch + (warp * PAIRS + pair) * (COLUMNS + 1);
#pragma unroll
        for (u32 n = 0; n < 2 * COLUMN_TILES; n++) {
            float sum = sums.c[pair][n];
#pragma unroll
            for (u32 offset = 4; offset < WARP_SIZE; offset *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, offset);
            if (lane < 4) to[n / 2 * 8 + lane * 2 + n % 2] = sum;
        }
        const float overlap = warp_sum(sums.w[pair]);
        if (lane == 0) to[COLUMNS] = overlap;
    }
    __syncthreads();
    for (u32 at = threadIdx.x; at < PAIRS * (COLUMNS + 1); at += THREADS) {
        const u32 pair = at / (COLUMNS + 1), column = at % (COLUMNS + 1);
        float sum = 0.0f;
        for (u32 i = 0; i < WARPS; i++) sum += scratch[i * PAIRS * (COLUMNS + 1) + at];
        if (column < COLUMNS) c[static_cast<u64>(pair) * padded + column] = sum;
        else w[static_cast<u64>(pair) * (padded / COLUMNS)] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
hessian_pairs(const u16* q, const u16* k, const u16* v, const float* lse, const float* energies, const u16* slopes, const float* offsets, float* c,
              float* overlaps, u32 n_tokens, u32 padded, u32 q_stride, u32 k_stride, u32 v_stride, float scale, float softcap, u32 window) {
    extern __shared__ __align__(16) unsigned char memory[];
    // The longest columns come first.
    const u32 kv_head = blockIdx.y, block = gridDim.x - 1 - blockIdx.x, first = block * COLUMNS, warp = threadIdx.x / WARP_SIZE;
    const u64 kv_offset = static_cast<u64>(kv_head) * HEAD_DIM, of_pairs = static_cast<u64>(kv_head) * PAIRS * padded;
    const Head head{q + kv_offset * GROUP, k + kv_offset, v + kv_offset, slopes + 2 * of_pairs * HEAD_DIM,
                    lse + static_cast<u64>(kv_head) * GROUP * n_tokens, energies + of_pairs, offsets + of_pairs,
                    n_tokens, padded, q_stride, k_stride, v_stride};
    const Operands operands(memory);
    load_operands(operands, head, first);
    const Softmax softmax{operands.lse, scale, softcap, window, first};
    const u32 first_key = window != 0 && first + 1 > window ? first + 1 - window : 0, end_key = min(first + COLUMNS, n_tokens);
    Sums sums;
    sums.clear();
    for (u32 key = (first_key / KEY_ROWS + warp) * KEY_ROWS; key < end_key; key += WARPS * KEY_ROWS) {
        add_tile(sums, head, operands, softmax, key);
    }
    float* w = overlaps + static_cast<u64>(kv_head) * PAIRS * (padded / COLUMNS) + block;
    store_sums(sums, reinterpret_cast<float*>(memory), c + of_pairs + first, w, padded);
}

// ---- the sums over positions ---------------------------------------------------------------------------------------------

constexpr u32 GRAM_SIDE = 32;     // of a block's part of the Hessian
constexpr u32 GRAM_COLUMNS = 64;  // positions at once
constexpr u32 GRAM_THREADS = 1024;
constexpr u32 TEAM = 256;         // threads that cover the part; each team takes some of the positions
constexpr u32 TEAMS = GRAM_THREADS / TEAM;
constexpr u32 TEAM_COLUMNS = GRAM_COLUMNS / TEAMS;
using GramRows = float[GRAM_COLUMNS][GRAM_SIDE + 1];
using GramParts = double[TEAMS - 1][TEAM][4];
static_assert(sizeof(GramParts) <= (GROUP + 2) * sizeof(GramRows), "the teams' sums lie over the rows");

// Columns `first_dim` .. + 32 of a head's queries from position `first` on; zeros past either end.
__device__ __forceinline__ void load_queries(GramRows& to, const u16* q, u32 stride, u32 first, u32 n_tokens, u32 first_dim) {
    for (u32 at = threadIdx.x; at < GRAM_COLUMNS * GRAM_SIDE; at += GRAM_THREADS) {
        const u32 row = at / GRAM_SIDE, i = at % GRAM_SIDE, t = first + row;
        to[row][i] = t < n_tokens && first_dim + i < HEAD_DIM ? bf16_to_f32(q[static_cast<u64>(t) * stride + first_dim + i]) : 0.0f;
    }
}

// mixed[t][j] = Σ_b c_{t,a,b} q_b[t][j].
__device__ __forceinline__ void mix(GramRows& mixed, const GramRows (&q)[GROUP], const float (&c)[PAIRS][GRAM_COLUMNS], u32 a) {
    for (u32 at = threadIdx.x; at < GRAM_COLUMNS * GRAM_SIDE; at += GRAM_THREADS) {
        const u32 t = at / GRAM_SIDE, j = at % GRAM_SIDE;
        float sum = 0.0f;
#pragma unroll
        for (u32 b = 0; b < GROUP; b++) sum = fmaf(c[a <= b ? pair_index(a, b) : pair_index(b, a)][t], q[b][t][j], sum);
        mixed[t][j] = sum;
    }
}

// sums += Σ_t x[t][i] y[t][j] for rows i, i + 16 and columns j, j + 16 of this thread, over positions from `first` on.
__device__ __forceinline__ void add_outer(float (&sums)[4], const GramRows& x, const GramRows& y, u32 first, u32 i, u32 j) {
#pragma unroll
    for (u32 t = first; t < first + TEAM_COLUMNS; t++) {
        const float x0 = x[t][i], x1 = x[t][i + 16], y0 = y[t][j], y1 = y[t][j + 16];
        sums[0] = fmaf(x0, y0, sums[0]), sums[1] = fmaf(x0, y1, sums[1]);
        sums[2] = fmaf(x1, y0, sums[2]), sums[3] = fmaf(x1, y1, sums[3]);
    }
}

// The teams' sums, in their order, in the first team.
__device__ __forceinline__ void add_teams(double (&totals)[4], GramParts& parts) {
    const u32 team = threadIdx.x / TEAM, thread = threadIdx.x % TEAM;
    __syncthreads(); // the rows have been read
#pragma unroll
    for (u32 at = 0; at < 4 && team > 0; at++) parts[team - 1][thread][at] = totals[at];
    __syncthreads();
#pragma unroll
    for (u32 other = 0; other < TEAMS - 1; other++)
#pragma unroll
        for (u32 at = 0; at < 4; at++) totals[at] += parts[other][thread][at];
}

extern "C" __global__ void __launch_bounds__(GRAM_THREADS)
hessian_key(const u16* q, const float* c, double* key_hessian, u32 n_tokens, u32 padded, u32 q_stride, float scale) {
    extern __shared__ __align__(16) float shared[];
    GramRows* const rows = reinterpret_cast<GramRows*>(shared);
    auto& right = *reinterpret_cast<GramRows(*)[GROUP]>(rows);
    GramRows &left = rows[GROUP], &mixed = rows[GROUP + 1];
    auto& weights = *reinterpret_cast<float(*)[PAIRS][GRAM_COLUMNS]>(rows + GROUP + 2);
    constexpr u32 PARTS = ceil_div(HEAD_DIM, GRAM_SIDE);
    const u32 head = blockIdx.y, first_i = blockIdx.x / PARTS * GRAM_SIDE, first_j = blockIdx.x % PARTS * GRAM_SIDE;
    const u32 team = threadIdx.x / TEAM, i = threadIdx.x % TEAM / 16, j = threadIdx.x % 16;
    const u16* queries = q + static_cast<u64>(head) * GROUP * HEAD_DIM;
    double totals[4] = {};
    for (u32 first = 0; first < n_tokens; first += GRAM_COLUMNS) {
        __syncthreads();
        for (u32 b = 0; b < GROUP; b++) load_queries(right[b], queries + b * HEAD_DIM, q_stride, first, n_tokens, first_j);
        for (u32 at = threadIdx.x; at < PAIRS * GRAM_COLUMNS; at += GRAM_THREADS) {
            const u32 t = first + at % GRAM_COLUMNS;
            (&weights[0][0])[at] = t < n_tokens ? c[(static_cast<u64>(head) * PAIRS + at / GRAM_COLUMNS) * padded + t] : 0.0f;
        }
        float sums[4] = {};
        for (u32 a = 0; a < GROUP; a++) {
            __syncthreads();
            load_queries(left, queries + a * HEAD_DIM, q_stride, first, n_tokens, first_i);
            mix(mixed, right, weights, a);
            __syncthreads();
            add_outer(sums, left, mixed, team * TEAM_COLUMNS, i, j);
        }
#pragma unroll
        for (u32 at = 0; at < 4; at++) totals[at] += static_cast<double>(sums[at]);
    }
    add_teams(totals, *reinterpret_cast<GramParts*>(shared));
    const double factor = 2.0 * static_cast<double>(scale) * static_cast<double>(scale);
#pragma unroll
    for (u32 at = 0; at < 4 && team == 0; at++) {
        const u32 row = first_i + i + at / 2 * 16, column = first_j + j + at % 2 * 16;
        if (row < HEAD_DIM && column < HEAD_DIM) key_hessian[(static_cast<u64>(head) * HEAD_DIM + row) * HEAD_DIM + column] += factor * totals[at];
    }
}

extern "C" __global__ void __launch_bounds__(GRAM_THREADS)
hessian_value(const float* overlaps, const float* coupling, double* value_hessian, u32 padded) {
    __shared__ double partial[GRAM_THREADS], weights[PAIRS];
    const u32 head = blockIdx.x, n_blocks = padded / COLUMNS;
    for (u32 pair = 0; pair < PAIRS; pair++) {
        double sum = 0.0;
        for (u32 at = threadIdx.x; at < n_blocks; at += GRAM_THREADS) sum += static_cast<double>(overlaps[(static_cast<u64>(head) * PAIRS + pair) * n_blocks + at]);
        partial[threadIdx.x] = sum;
        for (u32 half = GRAM_THREADS / 2; half > 0; half /= 2) {
            __syncthreads();
            if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
        }
        if (threadIdx.x == 0) weights[pair] = partial[0];
        __syncthreads();
    }
    const float* couplings = coupling + static_cast<u64>(head) * GROUP * HEAD_DIM * GROUP * HEAD_DIM;
    for (u32 at = blockIdx.y * GRAM_THREADS + threadIdx.x; at < HEAD_DIM * HEAD_DIM; at += gridDim.y * GRAM_THREADS) {
        const u32 i = at / HEAD_DIM, j = at % HEAD_DIM;
        double sum = 0.0;
        for (u32 a = 0; a < GROUP; a++)
            for (u32 b = a; b < GROUP; b++) {
                // Both orders of a pair are one matrix and its transpose; Γ_{a,a} is symmetric.
                const double upper = couplings[static_cast<u64>(a * HEAD_DIM + i) * (GROUP * HEAD_DIM) + b * HEAD_DIM + j];
                const double lower = couplings[static_cast<u64>(a * HEAD_DIM + j) * (GROUP * HEAD_DIM) + b * HEAD_DIM + i];
                sum += weights[pair_index(a, b)] * (a == b ? 0.5 : 1.0) * (upper + lower);
            }
        value_hessian[static_cast<u64>(head) * HEAD_DIM * HEAD_DIM + at] += 2.0 * sum;
    }
}
