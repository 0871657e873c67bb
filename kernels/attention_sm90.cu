// Causal attention with grouped queries, flash style, for Hopper (sm_90a): wgmma, tensor copies, warpgroups with roles.
//
// out[t, n] = Σ_s p[t, s] v[s, n / G],   p[t, ·] = softmax over the keys s with t - window < s <= t of cap(scale · q[t, n] · k[s, n / G])
// (Eq. 2), where G = n_heads / n_kv_heads and cap(x) = softcap · tanh(x / softcap), or x. Never stores a score.
//
// Arguments. q, k and v come as tensor maps of rank 3 over `[n_tokens, n_heads HEAD_DIM]` (q) and `[n_tokens, n_kv_heads HEAD_DIM]`
//   (k, v), bf16, whose rows may be slices of a longer row (strides and addresses multiples of 16 bytes): dimensions
//   (64, n_tokens, columns / 64), strides (row, 128 bytes), box (64, BLOCK_M for q or BLOCK_N for k and v, HEAD_DIM / 64), 128-byte
//   swizzle, zeros outside.
//   out `[n_tokens, n_heads HEAD_DIM]` bf16, 16-byte aligned, rows out_stride elements apart (a multiple of 8).
//   n_tokens >= 1; group = G; window: keys that a query reads, itself counted, 0 for all before it; scale > 0; softcap is read only
//   with SOFTCAP. heads_at_once, a multiple of group: see `work_of`.
// Grid ceil(n_tokens / BLOCK_M) · n_heads, block 2 BLOCK_M + 128, dynamic shared memory
//   2 HEAD_DIM (BLOCK_M + 2 STAGES BLOCK_N) + 8 (1 + 4 STAGES) bytes.
// Macros: HEAD_DIM 64, 128 or 256; BLOCK_M, queries of a block, 128 or 192 (192 up to HEAD_DIM 64); BLOCK_N, keys of a step, 80 or
//   128; STAGES, tiles of keys and of values in flight; SOFTCAP, 0 or 1.
//
// One warpgroup copies tiles of keys and values into two rings; the others hold 64 query rows each. A step of a consumer starts
// S = Q Kᵀ of the next keys and O += P V of these, waits for S alone, and takes its softmax while P V runs; the tensor cores pass from
// one consumer to the next by named barriers, so that one's softmax lies under the others' products.
//
// Numbers: products of bf16 with f32 sums; softmax in f32, base 2, the scale folded into the exponent. The reference of the exponent
// follows the row's maximum only when that exceeds it by 2^8, which changes no relative precision: p / Σp is the same for any
// reference, and p <= 2^8 (n_tokens) stays far from overflow. p is rounded to bf16 before it meets v. The order of every sum is fixed.
// A value that is not finite can spoil the up to BLOCK_N - 1 queries before it too (0 · NaN), as it spoils all that follow.
// Oracle: attention in f64; tolerance 4e-3 of the output's norm (rounding of p and of the output to bf16, 1.5e-3 each; 2.2e-3 seen).
// Floor: 4 HEAD_DIM operations for each pair (t, s) over the rate of a large bf16 product, 670 TFLOP/s sustained on an H200 (750 to 800
//   in short runs). Seen there at 32768 tokens: HEAD_DIM 128, 32/8 heads 677 (sustained 670), 64 560 (530), 256, 16/8 heads 751 (720).
#include "common.cuh"

constexpr u32 ROWS = 64;  // of a consumer: the M of wgmma
constexpr u32 CONSUMERS = BLOCK_M / ROWS;
constexpr u32 WARPGROUP = 128;
constexpr u32 THREADS = WARPGROUP * (CONSUMERS + 1);
constexpr u32 CHUNK = 64;  // columns of a swizzled row of 128 bytes; a tile is [CHUNKS][rows][CHUNK]
constexpr u32 CHUNKS = HEAD_DIM / CHUNK;
constexpr u32 CHUNK_ROW_BYTES = 128;
constexpr u32 Q_BYTES = BLOCK_M * HEAD_DIM * 2;
constexpr u32 KV_BYTES = BLOCK_N * HEAD_DIM * 2;
// Registers of a thread by role; their sum over a block's threads fits the 64 Ki of a multiprocessor.
constexpr u32 PRODUCER_REGISTERS = CONSUMERS == 2 ? 24 : 32;
constexpr u32 CONSUMER_REGISTERS = CONSUMERS == 2 ? 240 : 160;

static_assert(HEAD_DIM == 64 || HEAD_DIM == 128 || HEAD_DIM == 256, "head dims of whole chunks that fit the registers");
static_assert(BLOCK_M == 128 || (BLOCK_M == 192 && HEAD_DIM == 64), "two consumers, or three with few registers");
static_assert(BLOCK_N % 16 == 0 && STAGES >= 2, "whole wgmma steps, rings");

constexpr float LOG2_E = 1.4426950408889634f;
// Below every score that f32 softmax can tell from it, and finite, so that differences of references are never NaN.
constexpr float NO_REFERENCE = -1e30f;
// The reference lags behind the row's maximum by at most this, in powers of two.
constexpr float LAG = 8.0f;

// A CUtensorMap, opaque.
struct alignas(64) TensorMap {
    u64 words[16];
};

// ---- barriers and tensor copies ------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 n_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(n_bytes) : "memory");
}

// Until the barrier's phase of this parity is over.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    u32 over = 0;
    while (!over) {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(over)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    }
}

// Copies a box of rows from `row` and of CHUNKS chunks from `chunk`; `barrier` counts its bytes.
__device__ __forceinline__ void copy_tile(u32 to, const TensorMap* from, u32 row, u32 chunk, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
                 "l"(from), "r"(0), "r"(row), "r"(chunk), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void named_sync(u32 id, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

__device__ __forceinline__ void named_arrive(u32 id, u32 threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// ---- wgmma ---------------------------------------------------------------------------------------------------------------

// Placeholders of accumulators in eights, and their operands.
#define W0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define W8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define W16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define W24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define W32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define W40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define W48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define W56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define W64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define W72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define W80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define W88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define W96 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define W104 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define W112 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define W120 ",%120,%121,%122,%123,%124,%125,%126,%127"
#define D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define D32(i) D8(i), D8(i + 8), D8(i + 16), D8(i + 24)

// D [64, N] f32 of a warpgroup, in the layout of `mma.sync`: thread l of warp w has, of rows 16 w + l / 4 (elements 4 j, 4 j + 1) and
// 8 below (4 j + 2, 4 j + 3), columns 8 j + 2 (l % 4) and the next.
//   of_shared:    D = or += A Bᵀ, A [64, 16] and B [N, 16] in shared memory
//   of_registers: D += A B, A [64, 16] in registers (two eights of columns of D's layout, rounded), B [16, N] in shared memory
template <u32 N>
struct Wgmma;

// X0 to X4 are the placeholders after the accumulators'.
#define WGMMA(N, ACCUMULATORS, X0, X1, X2, X3, X4, ...)                                                                             \
    template <>                                                                                                                    \
    struct Wgmma<N> {                                                                                                              \
        static __device__ __forceinline__ void of_shared(float (&d)[N / 2], u64 a, u64 b, u32 accumulate) {                        \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " X2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N                       \
                         "k16.f32.bf16.bf16 {" ACCUMULATORS "}, " X0 ", " X1 ", p, 1, 1, 0, 0;\n}"                                 \
                         : __VA_ARGS__                                                                                             \
                         : "l"(a), "l"(b), "r"(accumulate));                                                                       \
        }                                                                                                                          \
        static __device__ __forceinline__ void of_registers(float (&d)[N / 2], const u32* a, u64 b) {                              \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n" #N                            \
                         "k16.f32.bf16.bf16 {" ACCUMULATORS "}, {" X0 "," X1 "," X2 "," X3 "}, " X4 ", p, 1, 1, 1;\n}"             \
                         : __VA_ARGS__                                                                                             \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                    \
        }                                                                                                                          \
    }

WGMMA(64, W0 W8 W16 W24, "%32", "%33", "%34", "%35", "%36", D32(0));
WGMMA(80, W0 W8 W16 W24 W32, "%40", "%41", "%42", "%43", "%44", D32(0), D8(32));
WGMMA(128, W0 W8 W16 W24 W32 W40 W48 W56, "%64", "%65", "%66", "%67", "%68", D32(0), D32(32));
WGMMA(256, W0 W8 W16 W24 W32 W40 W48 W56 W64 W72 W80 W88 W96 W104 W112 W120, "%128", "%129", "%130", "%131", "%132", D32(0), D32(32),
      D32(64), D32(96));

// Before products that read registers written since the last.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most LEFT committed groups are running.
template <u32 LEFT>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Holds what reads or writes x on its side of this point: the compiler knows nothing of products that still write to x.
template <u32 N>
__device__ __forceinline__ void pin(float (&x)[N]) {
#pragma unroll
    for (u32 i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}

// A matrix in shared memory with 128-byte swizzle; groups of eight rows lie 1024 bytes apart, chunks `chunk_bytes` (read only where the
// contraction runs over rows). Addresses in it count 16 bytes.
__device__ __forceinline__ u64 descriptor(u32 address, u32 chunk_bytes) {
    return (static_cast<u64>(1) << 62) | (static_cast<u64>(1024 >> 4) << 32) | (static_cast<u64>(chunk_bytes >> 4) << 16) | (address >> 4);
}

// ---- a block's work and memory -------------------------------------------------------------------------------------------

struct Work {
    u32 head;
    i32 first_row;               // BLOCK_M queries from here
    i32 first_block, last_block; // of BLOCK_N keys
};

// The longest rows first, so that the last blocks to start are short; `heads_at_once` heads together, so that their keys and values
// stay in L2; the heads of a group side by side, because they read the same tiles.
__device__ __forceinline__ Work work_of(u32 block, u32 n_tokens, u32 n_heads, u32 heads_at_once, u32 window) {
    const u32 n_tiles = ceil_div(n_tokens, BLOCK_M);
    const u32 section = block / (n_tiles * heads_at_once), within = block % (n_tiles * heads_at_once);
    const u32 heads = min(heads_at_once, n_heads - section * heads_at_once);
    const u32 row = (n_tiles - 1 - within / heads) * BLOCK_M;
    const u32 first_key = window != 0 && row + 1 > window ? row + 1 - window : 0;
    const u32 last_key = min(row + BLOCK_M, n_tokens) - 1;
    return {section * heads_at_once + within % heads, static_cast<i32>(row), static_cast<i32>(first_key / BLOCK_N),
            static_cast<i32>(last_key / BLOCK_N)};
}

// Shared memory: the tile of queries, rings of tiles of keys and values, barriers.
struct Shared {
    u32 q, k, v;
    u32 q_full, k_full, v_full, k_empty, v_empty;

    __device__ __forceinline__ explicit Shared(u32 base)
        : q(base), k(q + Q_BYTES), v(k + STAGES * KV_BYTES), q_full(v + STAGES * KV_BYTES), k_full(q_full + 8), v_full(k_full + 8 * STAGES),
          k_empty(v_full + 8 * STAGES), v_empty(k_empty + 8 * STAGES) {}

    __device__ __forceinline__ void init() const {
        barrier_init(q_full, 1);
        for (u32 i = 0; i < STAGES; i++) {
            barrier_init(k_full + 8 * i, 1);
            barrier_init(v_full + 8 * i, 1);
            barrier_init(k_empty + 8 * i, 4 * CONSUMERS);  // a lane of each warp
            barrier_init(v_empty + 8 * i, 4 * CONSUMERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
};

// A place in a ring.
struct Place {
    u32 stage = 0, parity = 0;

    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// One thread: the queries once, then keys and values from the diagonal down, as the consumers free their tiles.
__device__ __forceinline__ void produce(const Shared& mem, const Work& work, u32 group, const TensorMap* q, const TensorMap* k,
                                        const TensorMap* v) {
    const u32 kv_chunk = work.head / group * CHUNKS;
    barrier_expect(mem.q_full, Q_BYTES);
    copy_tile(mem.q, q, work.first_row, work.head * CHUNKS, mem.q_full);
    Place at;
    for (i32 block = work.last_block; block >= work.first_block; block--, at.next()) {
        const u32 barrier = 8 * at.stage, tile = at.stage * KV_BYTES;
        barrier_wait(mem.k_empty + barrier, at.parity ^ 1);
        barrier_expect(mem.k_full + barrier, KV_BYTES);
        copy_tile(mem.k + tile, k, block * BLOCK_N, kv_chunk, mem.k_full + barrier);
        barrier_wait(mem.v_empty + barrier, at.parity ^ 1);
        barrier_expect(mem.v_full + barrier, KV_BYTES);
        copy_tile(mem.v + tile, v, block * BLOCK_N, kv_chunk, mem.v_full + barrier);
    }
}

// ---- softmax of a consumer's rows ----------------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 1);
    return x + __shfl_xor_sync(FULL_WARP, x, 2);
}

// Which of a thread's two rows element i of an accumulator belongs to.
__device__ __forceinline__ constexpr u32 half_of(u32 i) { return (i >> 1) & 1; }

// What a thread holds of 64 rows.
struct Rows {
    float out[HEAD_DIM / 2];   // not yet divided by `sum`
    float scores[BLOCK_N / 2]; // of the newest keys; then their probabilities, relative to `reference`
    u32 probs[BLOCK_N / 4];    // rounded, of the keys before
    float reference[2], sum[2], shrink[2];
    bool moved; // the reference did, by `shrink`, in some row of the warp

    __device__ __forceinline__ Rows() : reference{NO_REFERENCE, NO_REFERENCE}, sum{0.0f, 0.0f}, shrink{1.0f, 1.0f}, moved(false) {
#pragma unroll
        for (u32 i = 0; i < HEAD_DIM / 2; i++) out[i] = 0.0f;
    }

    // scores = tanh(scores scale / softcap) = 1 - 2 / (2^(factor scores) + 1), where factor = 2 log2(e) scale / softcap. (`tanh.approx`
    // errs by 2^-11 of softcap.)
    __device__ __forceinline__ void cap(float factor) {
#pragma unroll
        for (u32 i = 0; i < BLOCK_N / 2; i++) scores[i] = fmaf(-2.0f, reciprocal_approx(exp2_approx(scores[i] * factor) + 1.0f), 1.0f);
    }

    // Drops the keys that a row does not read; `past` is the thread's first row minus its first key.
    __device__ __forceinline__ void mask(i32 past, i32 window) {
#pragma unroll
        for (u32 i = 0; i < BLOCK_N / 2; i++) {
            const i32 key = 8 * (i / 4) + (i & 1), last = past + 8 * half_of(i);
            if (key > last || (window != 0 && key <= last - window)) scores[i] = -__int_as_float(0x7f800000);
        }
    }

    // scores = 2^(scale scores - scale reference), summed. Moves the reference when a row's maximum outgrew it by 2^LAG.
    __device__ __forceinline__ void softmax(float scale) {
        float top[2][2] = {{reference[0], reference[0]}, {reference[1], reference[1]}};
#pragma unroll
        for (u32 i = 0; i < BLOCK_N / 2; i++) top[half_of(i)][i & 1] = fmaxf(top[half_of(i)][i & 1], scores[i]);
        const float now[2] = {quad_max(fmaxf(top[0][0], top[0][1])), quad_max(fmaxf(top[1][0], top[1][1]))};
        const bool outgrown = (now[0] - reference[0]) * scale > LAG || (now[1] - reference[1]) * scale > LAG;
        moved = __any_sync(FULL_WARP, outgrown);
        if (moved) {
#pragma unroll
            for (u32 h = 0; h < 2; h++) {
                shrink[h] = exp2_approx((reference[h] - now[h]) * scale);
                reference[h] = now[h];
                sum[h] *= shrink[h];
            }
        }
        const float base[2] = {reference[0] * scale, reference[1] * scale};
        float part[2][2] = {};
#pragma unroll
        for (u32 i = 0; i < BLOCK_N / 2; i++) {
            scores[i] = exp2_approx(fmaf(scores[i], scale, -base[half_of(i)]));
            part[half_of(i)][i & 1] += scores[i];
        }
        sum[0] += part[0][0] + part[0][1];
        sum[1] += part[1][0] + part[1][1];
    }

    __device__ __forceinline__ void shrink_out() {
#pragma unroll
        for (u32 i = 0; i < HEAD_DIM / 2; i++) out[i] *= shrink[half_of(i)];
    }

    __device__ __forceinline__ void round_probs() {
#pragma unroll
        for (u32 i = 0; i < BLOCK_N / 4; i++) probs[i] = f32_to_bf16x2(scores[2 * i], scores[2 * i + 1]);
    }
};

// A 4 x 4 transpose over a quad: thread c gets word c of its four threads.
__device__ __forceinline__ void quad_transpose(u32 (&w)[4], u32 c) {
    const bool odd = c & 1, high = c & 2;
    const u32 a = __shfl_xor_sync(FULL_WARP, odd ? w[0] : w[1], 1), b = __shfl_xor_sync(FULL_WARP, odd ? w[2] : w[3], 1);
    (odd ? w[0] : w[1]) = a, (odd ? w[2] : w[3]) = b;
    const u32 e = __shfl_xor_sync(FULL_WARP, high ? w[0] : w[2], 2), f = __shfl_xor_sync(FULL_WARP, high ? w[1] : w[3], 2);
    (high ? w[0] : w[2]) = e, (high ? w[1] : w[3]) = f;
}

// Rows of the output, divided by their sums and rounded; `row` is the thread's first.
__device__ __forceinline__ void store(const Rows& r, u16* out, u64 stride, u32 row, u32 n_tokens) {
    const u32 c = threadIdx.x % 4;
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        const float inverse = 1.0f / quad_sum(r.sum[h]);
        const u32 token = row + 8 * h;
#pragma unroll
        for (u32 part = 0; part < HEAD_DIM / 32; part++) {
            u32 w[4];
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                const u32 i = 16 * part + 4 * j + 2 * h;
                w[j] = f32_to_bf16x2(r.out[i] * inverse, r.out[i + 1] * inverse);
            }
            quad_transpose(w, c);
            if (token < n_tokens) store16(out + token * stride + 32 * part + 8 * c, make_uint4(w[0], w[1], w[2], w[3]));
        }
    }
}

// ---- a consumer ----------------------------------------------------------------------------------------------------------

// A warpgroup with 64 rows of queries.
struct Consumer {
    const Shared& mem;
    const u32 index, lane;
    const i32 first_row, row, window; // of the warpgroup, of the thread
    const float scale;                // what a score is multiplied by in the exponent of 2
    const float cap_factor;
    Place k, v;

    // The tensor cores go round: they are taken before a step's products are issued and then passed on, at the very end to nobody.
    __device__ __forceinline__ void take_turn() const { named_sync(1 + index, 2 * WARPGROUP); }
    __device__ __forceinline__ void pass_turn(bool is_last_step) const {
        if (!is_last_step || index + 1 < CONSUMERS) named_arrive(1 + (index + 1) % CONSUMERS, 2 * WARPGROUP);
    }

    __device__ __forceinline__ void issue_qk(Rows& r) const {
        const u64 q = descriptor(mem.q + index * ROWS * CHUNK_ROW_BYTES, 16);
        const u64 keys = descriptor(mem.k + k.stage * KV_BYTES, 16);
#pragma unroll
        for (u32 i = 0; i < HEAD_DIM / 16; i++) {
            const u32 chunk = i / 4, within = 2 * (i % 4);
            Wgmma<BLOCK_N>::of_shared(r.scores, q + chunk * (BLOCK_M * CHUNK_ROW_BYTES / 16) + within,
                                      keys + chunk * (BLOCK_N * CHUNK_ROW_BYTES / 16) + within, i > 0);
        }
        wgmma_commit();
    }

    __device__ __forceinline__ void issue_pv(Rows& r) const {
        barrier_wait(mem.v_full + 8 * v.stage, v.parity);
        const u64 values = descriptor(mem.v + v.stage * KV_BYTES, BLOCK_N * CHUNK_ROW_BYTES);
        wgmma_fence();
#pragma unroll
        for (u32 i = 0; i < BLOCK_N / 16; i++) Wgmma<HEAD_DIM>::of_registers(r.out, r.probs + 4 * i, values + i * CHUNK_ROW_BYTES);
        wgmma_commit();
    }

    __device__ __forceinline__ void finish_qk(Rows& r) {
        pin(r.scores);
        if (lane == 0) barrier_arrive(mem.k_empty + 8 * k.stage);
        k.next();
#if SOFTCAP
        r.cap(cap_factor);
#endif
    }

    __device__ __forceinline__ void finish_pv(Rows& r) {
        if (lane == 0) barrier_arrive(mem.v_empty + 8 * v.stage);
        v.next();
    }

    __device__ __forceinline__ void mask(Rows& r, i32 block) const {
        r.mask(row - block * static_cast<i32>(BLOCK_N) - 2 * static_cast<i32>(lane % 4), window);
    }

    __device__ __forceinline__ void await_keys() const { barrier_wait(mem.k_full + 8 * k.stage, k.parity); }

    __device__ __forceinline__ void first_step(Rows& r, i32 block, bool is_last) {
        await_keys();
        take_turn();
        pin(r.scores);
        wgmma_fence();
        issue_qk(r);
        pass_turn(is_last);
        wgmma_wait<0>();
        finish_qk(r);
        mask(r, block);
        r.softmax(scale);
        r.round_probs();
    }

    template <bool MASKED>
    __device__ __forceinline__ void step(Rows& r, i32 block, bool is_last) {
        await_keys();
        take_turn();
        pin(r.scores);
        pin(r.out);
        wgmma_fence();
        issue_qk(r);
        issue_pv(r);
        pass_turn(is_last);
        wgmma_wait<1>();
        finish_qk(r);
        if (MASKED) mask(r, block);
        r.softmax(scale);
        // All warps of a warpgroup must wait at one instruction: not in the branches of `moved`. The compiler moves it up to between the
        // maxima and the exponentials; held below them it was no faster.
        wgmma_wait<0>();
        pin(r.out);
        finish_pv(r);
        if (r.moved) r.shrink_out();
        r.round_probs();
    }

    __device__ __forceinline__ void run(Rows& r, const Work& work) {
        // Blocks [clear_from, clear_to) need no mask: all their keys are read by all 64 rows.
        const i32 clear_to = (first_row + 1) / static_cast<i32>(BLOCK_N);
        const i32 unread = first_row + static_cast<i32>(ROWS) - window; // keys that the last row does not read
        const i32 clear_from = window != 0 && unread > 0 ? (unread - 1) / static_cast<i32>(BLOCK_N) + 1 : 0;
        if (index == CONSUMERS - 1) pass_turn(false);
        barrier_wait(mem.q_full, 0);
        i32 block = work.last_block;
        const i32 last = work.first_block; // of the steps
        first_step(r, block, block == last);
        block--;
        for (; block >= last && block >= clear_to; block--) step<true>(r, block, block == last);
        for (; block >= last && block >= clear_from; block--) step<false>(r, block, block == last);
        for (; block >= last; block--) step<true>(r, block, block == last);
        pin(r.out);
        issue_pv(r);
        wgmma_wait<0>();
        pin(r.out);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_sm90(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v, u16* out,
                   u32 out_stride, u32 n_tokens, u32 n_heads, u32 group, u32 window, u32 heads_at_once, float scale, float softcap) {
    extern __shared__ __align__(1024) u8 memory[];
    const Shared mem(shared_address(memory));
    const Work work = work_of(blockIdx.x, n_tokens, n_heads, heads_at_once, window);
    if (threadIdx.x == 0) mem.init();
    __syncthreads();
    // From lane 0, so that the compiler knows it for one value of the warp.
    const u32 role = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP, 0);
    if (role == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (threadIdx.x == 0) produce(mem, work, group, &q, &k, &v);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        const u32 lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE % 4, index = role - 1;
        const i32 first_row = work.first_row + static_cast<i32>(ROWS * index);
        const i32 row = first_row + static_cast<i32>(16 * warp + lane / 4);
        const float exponent_scale = (SOFTCAP ? softcap : scale) * LOG2_E, cap_factor = 2.0f * LOG2_E * scale / softcap;
        Consumer consumer{mem, index, lane, first_row, row, static_cast<i32>(window), exponent_scale, cap_factor};
        Rows r;
        consumer.run(r, work);
        store(r, out + work.head * HEAD_DIM, out_stride, static_cast<u32>(row), n_tokens);
    }
}
