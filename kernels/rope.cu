// Norm of each head, then rotary position embedding (Eq. 10 and Eq. 8 of the paper), in place on queries and keys.
//
//   h = x / sqrt(mean(x^2) + eps) * weight                                              where there is a weight
//   (h[i], h[i + r/2]) = (h[i] cos - h[i + r/2] sin, h[i + r/2] cos + h[i] sin)         for i < r/2, r = ROTARY
//
// Arguments: x    rows of activations (bf16, or f32 with -DACT_F32), 16-byte aligned, `stride` elements apart (whole vectors of
//                 16 bytes). A row begins with n_q_heads heads of queries, then n_k_heads heads of keys, HEAD_DIM each: the
//                 front of a fused [q | k | v] row. Either count may be 0. What follows in the row is left alone.
//            q_weight, k_weight  [HEAD_DIM] f32, 16-byte aligned, or null for no norm; q_eps, k_eps.
//            cos, sin  [n_tokens, ROTARY / 2] f32, 16-byte aligned; not read when ROTARY is 0.
// All arithmetic is f32, rounded once. A head's sum of squares is a thread's elements in order, then a tree over its threads.
//
// Macros: HEAD_DIM, a multiple of 16 (8 with ACT_F32) and at most 512 (256); ROTARY, even, at most HEAD_DIM, 0 for no rotation.
// Launch: TEAM threads for HEADS = 4 heads of a token, TEAM = HEAD_DIM / 16 (8 with ACT_F32) rounded up to a power of two; block
// 256, grid ceil(n_tokens ceil((n_q_heads + n_k_heads) / HEADS) TEAM / 256), whose threads must be fewer than 2^32. No dynamic
// shared memory. sm_80 on.
// Floor: bytes, each head read and written once. Where ROTARY / 2 is not a whole number of vectors the accesses are elements.
// Oracle: f64 on the host; bf16 differs by 2^-8 relative to a pair's length, f32 by (HEAD_DIM / TEAM + 12) 2^-24.
#include "common.cuh"

constexpr u32 BLOCK = 256;
constexpr u32 HEADS = 4;
constexpr u32 HALF = ROTARY / 2;
// A thread holds two runs of ACT_VEC coordinates, the two sides of its pairs, made of units that lie together in memory.
constexpr u32 UNIT = HALF % ACT_VEC == 0 ? ACT_VEC : 1;
constexpr u32 UNITS = ACT_VEC / UNIT;
constexpr u32 LANES = HEAD_DIM / (2 * ACT_VEC);

__host__ __device__ constexpr u32 power_of_two_from(u32 n) {
    u32 p = 1;
    while (p < n) p *= 2;
    return p;
}
constexpr u32 TEAM = power_of_two_from(LANES);

static_assert(HEAD_DIM % (2 * ACT_VEC) == 0 && TEAM <= WARP_SIZE, "a head is held by at most a warp, two vectors a thread");
static_assert(ROTARY % 2 == 0 && ROTARY <= HEAD_DIM, "pairs within the head");

// Whether pair unit `unit` turns; the rest of the head passes through.
__device__ __forceinline__ bool turns(u32 unit) { return unit + 1 <= HALF / UNIT; }

// Where the two sides of a pair unit start: (i, i + r/2) where it turns; what is beyond r lies in two halves as well.
__device__ __forceinline__ u32 low_side(u32 unit) { return (turns(unit) ? unit : unit + HALF / UNIT) * UNIT; }
__device__ __forceinline__ u32 high_side(u32 unit) { return low_side(unit) + (turns(unit) ? HALF : HEAD_DIM / 2 - HALF); }

// Unit `u` of a run: activations, widened, or f32 of a weight or a table.
__device__ __forceinline__ void load_unit(const Act* p, float (&out)[ACT_VEC], u32 u) {
    if (UNIT == 1) {
        out[u] = to_f32(*p);
    } else {
        unpack(load16(p), out);
    }
}
#ifndef ACT_F32
__device__ __forceinline__ void load_unit(const float* p, float (&out)[ACT_VEC], u32 u) {
    if (UNIT == 1) {
        out[u] = *p;
    } else {
        load_f32(p, out);
    }
}
#endif

__device__ __forceinline__ void store_unit(Act* p, const float (&v)[ACT_VEC], u32 u) {
    if (UNIT == 1) {
        store_f32(p, v[u]);
    } else {
        store16(p, pack(v));
    }
}

// The two sides of a thread's pairs: of a head, of a weight, or cosines and sines.
struct Pairs {
    float low[ACT_VEC], high[ACT_VEC];
};

// Reads the sides of the lane's pairs from a head or a weight.
template <typename T>
__device__ __forceinline__ Pairs load_pairs(const T* from, u32 lane) {
    Pairs pairs;
#pragma unroll
    for (u32 u = 0; u < UNITS; u++) {
        load_unit(from + low_side(lane * UNITS + u), pairs.low, u);
        load_unit(from + high_side(lane * UNITS + u), pairs.high, u);
    }
    return pairs;
}

__device__ __forceinline__ void store_pairs(Act* to, u32 lane, const Pairs& pairs) {
#pragma unroll
    for (u32 u = 0; u < UNITS; u++) {
        store_unit(to + low_side(lane * UNITS + u), pairs.low, u);
        store_unit(to + high_side(lane * UNITS + u), pairs.high, u);
    }
}

// Cosines and sines of the lane's pairs, of one token; 1 and 0 for those that do not turn.
__device__ __forceinline__ Pairs load_turn(const float* cos, const float* sin, u32 lane) {
    Pairs turn;
#pragma unroll
    for (u32 e = 0; e < ACT_VEC; e++) turn.low[e] = 1.0f, turn.high[e] = 0.0f;
#pragma unroll
    for (u32 u = 0; u < UNITS; u++) {
        const u32 unit = lane * UNITS + u;
        if (!turns(unit)) continue;
        load_unit(cos + unit * UNIT, turn.low, u);
        load_unit(sin + unit * UNIT, turn.high, u);
    }
    return turn;
}

// 1 / rms of the head that the thread's team holds.
__device__ __forceinline__ float inverse_rms(const Pairs& h, float eps) {
    float sum = 0.0f;
#pragma unroll
    for (u32 e = 0; e < ACT_VEC; e++) sum += h.low[e] * h.low[e] + h.high[e] * h.high[e];
#pragma unroll
    for (u32 offset = TEAM / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, offset);
    return 1.0f / sqrtf(sum / HEAD_DIM + eps);
}

__device__ __forceinline__ void scale(Pairs& h, const Pairs& weight, float factor) {
#pragma unroll
    for (u32 e = 0; e < ACT_VEC; e++) h.low[e] *= factor * weight.low[e], h.high[e] *= factor * weight.high[e];
}

__device__ __forceinline__ void rotate(Pairs& h, const Pairs& turn) {
#pragma unroll
    for (u32 e = 0; e < ACT_VEC; e++) {
        const float low = h.low[e], high = h.high[e];
        h.low[e] = low * turn.low[e] - high * turn.high[e];
        h.high[e] = high * turn.low[e] + low * turn.high[e];
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    head_norm_rope(Act* x, u64 stride, u32 n_tokens, u32 n_q_heads, u32 n_k_heads, const float* q_weight, float q_eps,
                   const float* k_weight, float k_eps, const float* cos, const float* sin) {
    const u32 n_heads = n_q_heads + n_k_heads, n_teams = ceil_div(n_heads, HEADS);
    const u32 team = (blockIdx.x * BLOCK + threadIdx.x) / TEAM, lane = threadIdx.x % TEAM;
    const u32 token = team / n_teams, first = team % n_teams * HEADS;
    // Whole warps stay, because they shuffle; a team beyond the end, and lanes beyond a head, hold zeros.
    const bool active = token < n_tokens && lane < LANES;
    Act* const row = x + token * stride;
    Pairs h[HEADS] = {}, turn = {};
#pragma unroll
    for (u32 i = 0; i < HEADS; i++) {
        if (active && first + i < n_heads) h[i] = load_pairs(row + (first + i) * HEAD_DIM, lane);
    }
    const u64 angles = static_cast<u64>(token) * HALF;
    if (HALF != 0 && active) turn = load_turn(cos + angles, sin + angles, lane);
    // The shuffles are the whole warp's, whichever of its heads have a norm.
    const bool any_norm = q_weight != nullptr || k_weight != nullptr;
#pragma unroll
    for (u32 i = 0; i < HEADS; i++) {
        const bool is_query = first + i < n_q_heads;
        const float* const weight = is_query ? q_weight : k_weight;
        const float factor = any_norm ? inverse_rms(h[i], is_query ? q_eps : k_eps) : 1.0f;
        if (!active || first + i >= n_heads) continue;
        if (weight != nullptr) scale(h[i], load_pairs(weight, lane), factor);
        if (HALF != 0) rotate(h[i], turn);
        store_pairs(row + (first + i) * HEAD_DIM, lane, h[i]);
    }
}
