// Causal attention with grouped queries in f32 throughout: the path for f32 activations. No tensor cores, no rounding below f32.
//
// out[t, n] = Σ_s p[t, s] v[s, n / G],   p[t, ·] = softmax over the keys s with t - window < s <= t of cap(scale · q[t, n] · k[s, n / G])
// (Eq. 2), where G = n_heads / n_kv_heads and cap(x) = softcap · tanh(x / softcap), or x where softcap is 0.
//
// attention_f32_windowed is the same over a cache that holds some tokens quantized (Algorithm 2): query t reads keys and values
//   [start, end) of kq and vq, ranges[t] = (start, end), and all others of k and v. A tile that queries read from both is multiplied
//   twice.
//
// Arguments. q `[n_tokens, n_heads HEAD_DIM]`, k and v `[n_tokens, n_kv_heads HEAD_DIM]`, out as q: f32, rows `*_stride` elements apart
// (a multiple of 4; the tensors begin at multiples of 16 bytes). window: keys that a query reads, itself counted; 0 reads all before it.
// Any n_tokens >= 1 below 2^31. kq, vq: rows as far apart as those of k and v. ranges `[n_tokens]` pairs of u32, start <= end <= t,
//   neither less than an earlier token's; (0, 0) for none.
// Grid (ceil(n_tokens / BLOCK) · G, n_kv_heads), block 256, dynamic shared memory 4 · (2 · BLOCK · (HEAD_DIM + 4) + BLOCK · (BLOCK + 4))
//   bytes, where BLOCK is 64 up to a head dim of 128 and 32 above: at most 85 KiB. Compute capability 8.0 and later.
// Macro: HEAD_DIM, a multiple of 8 up to 256.
//
// Oracle: attention in f64, over the mixed keys and values. Tolerance 1e-5 of the output's norm for scores up to about 50: their f32 rounding is the exponent's error
//   (2e-6 seen); 4e-5 for scores up to 300.
// Floor: 4 · HEAD_DIM operations for each pair (t, s) over the f32 rate (67 TFLOP/s on an H200). Seen there at 4096 tokens: HEAD_DIM 64
//   29 TFLOP/s, 128 31, 256 21.
#include "common.cuh"

constexpr u32 BLOCK = HEAD_DIM <= 128 ? 64 : 32;
constexpr u32 SIDE = 16; // threads along each side of a score tile
constexpr u32 THREADS = SIDE * SIDE;
constexpr u32 PER_THREAD = BLOCK / SIDE;     // rows, and keys, of a thread
constexpr u32 CHUNKS = HEAD_DIM / 4;         // 16-byte chunks of a row
constexpr u32 THREAD_CHUNKS = ceil_div(CHUNKS, SIDE);
// An odd number of 16-byte chunks: neighbouring rows lie in different banks.
constexpr u32 PITCH = HEAD_DIM + 4;
constexpr u32 SCORE_PITCH = BLOCK + 4;
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 256, "shapes that the tiles cover");

constexpr float LOG2_E = 1.4426950408889634f;
// Below every score, and finite, so that differences of references are never NaN.
constexpr float NO_REFERENCE = -1e30f;

using Tile = float[PER_THREAD][PER_THREAD];

// BLOCK rows from row `first` on into shared memory; rows past the end become zeros.
__device__ __forceinline__ void copy_rows(float* to, const float* from, u32 stride, u32 first, u32 n_rows) {
    for (u32 at = threadIdx.x; at < BLOCK * CHUNKS; at += THREADS) {
        const u32 row = at / CHUNKS, chunk = at % CHUNKS;
        float4 values = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (first + row < n_rows) values = *reinterpret_cast<const float4*>(from + static_cast<u64>(first + row) * stride + chunk * 4);
        *reinterpret_cast<float4*>(to + row * PITCH + chunk * 4) = values;
    }
}

__device__ __forceinline__ float dot4(const float4& a, const float4& b, float sum) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// Products of this thread's rows (y + 16 i) and keys (x + 16 j).
__device__ __forceinline__ void multiply_keys(Tile& scores, const float* queries, const float* keys, u32 x, u32 y) {
#pragma unroll
    for (u32 i = 0; i < PER_THREAD; i++)
#pragma unroll
        for (u32 j = 0; j < PER_THREAD; j++) scores[i][j] = 0.0f;
#pragma unroll 2
    for (u32 chunk = 0; chunk < CHUNKS; chunk++) {
        float4 a[PER_THREAD], b[PER_THREAD];
#pragma unroll
        for (u32 i = 0; i < PER_THREAD; i++) {
            a[i] = *reinterpret_cast<const float4*>(queries + (y + SIDE * i) * PITCH + chunk * 4);
            b[i] = *reinterpret_cast<const float4*>(keys + (x + SIDE * i) * PITCH + chunk * 4);
        }
#pragma unroll
        for (u32 i = 0; i < PER_THREAD; i++)
#pragma unroll
            for (u32 j = 0; j < PER_THREAD; j++) scores[i][j] = dot4(a[i], b[j], scores[i][j]);
    }
}

// Scores in powers of two, capped and masked; `row` and `key` are those of this thread's first score.
__device__ __forceinline__ void finish_scores(Tile& scores, float scale, float softcap, u32 row, u32 key, u32 window) {
#pragma unroll
    for (u32 i = 0; i < PER_THREAD; i++)
#pragma unroll
        for (u32 j = 0; j < PER_THREAD; j++) {
            const u32 t = row + SIDE * i, s = key + SIDE * j;
            float score = scores[i][j] * scale;
            if (softcap > 0.0f) score = softcap * tanhf(score / softcap);
            const bool reads = s <= t && (window == 0 || t - s < window);
            scores[i][j] = reads ? score * LOG2_E : -__int_as_float(0x7f800000);
        }
}

// Over the 16 threads of a row.
__device__ __forceinline__ float row_max(float v) {
#pragma unroll
    for (u32 offset = SIDE / 2; offset > 0; offset /= 2) v = fmaxf(v, __shfl_xor_sync(FULL_WARP, v, offset));
    return v;
}

__device__ __forceinline__ float row_sum(float v) {
#pragma unroll
    for (u32 offset = SIDE / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(FULL_WARP, v, offset);
    return v;
}

// Σ_s p v of a thread's rows and chunks (x + 16 c), relative to 2^reference.
struct Accumulator {
    float output[PER_THREAD][THREAD_CHUNKS][4];
    float reference[PER_THREAD];
    float sum[PER_THREAD]; // of this thread's keys alone

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (u32 i = 0; i < PER_THREAD; i++) {
            reference[i] = NO_REFERENCE, sum[i] = 0.0f;
#pragma unroll
            for (u32 c = 0; c < THREAD_CHUNKS; c++)
#pragma unroll
                for (u32 e = 0; e < 4; e++) output[i][c][e] = 0.0f;
        }
    }

    // Raises the references to the rows' maxima and makes probabilities of the scores.
    __device__ __forceinline__ void weigh(Tile& scores) {
#pragma unroll
        for (u32 i = 0; i < PER_THREAD; i++) {
            float max = scores[i][0];
#pragma unroll
            for (u32 j = 1; j < PER_THREAD; j++) max = fmaxf(max, scores[i][j]);
            max = fmaxf(row_max(max), reference[i]);
            const float factor = exp2f(reference[i] - max);
            reference[i] = max, sum[i] *= factor;
#pragma unroll
            for (u32 c = 0; c < THREAD_CHUNKS; c++)
#pragma unroll
                for (u32 e = 0; e < 4; e++) output[i][c][e] *= factor;
#pragma unroll
            for (u32 j = 0; j < PER_THREAD; j++) {
                scores[i][j] = exp2f(scores[i][j] - max);
                sum[i] += scores[i][j];
            }
        }
    }

    // Adds p v of one tile, four keys at a time.
    __device__ __forceinline__ void add(const float* probabilities, const float* values, u32 x, u32 y) {
        for (u32 s = 0; s < BLOCK; s += 4) {
            float4 p[PER_THREAD];
#pragma unroll
            for (u32 i = 0; i < PER_THREAD; i++) p[i] = *reinterpret_cast<const float4*>(probabilities + (y + SIDE * i) * SCORE_PITCH + s);
#pragma unroll
            for (u32 c = 0; c < THREAD_CHUNKS; c++) {
                if (CHUNKS % SIDE != 0 && x + SIDE * c >= CHUNKS) continue;
                const float* column = values + s * PITCH + (x + SIDE * c) * 4;
                float4 v[4];
#pragma unroll
                for (u32 key = 0; key < 4; key++) v[key] = *reinterpret_cast<const float4*>(column + key * PITCH);
#pragma unroll
                for (u32 i = 0; i < PER_THREAD; i++) {
                    output[i][c][0] = dot4(p[i], make_float4(v[0].x, v[1].x, v[2].x, v[3].x), output[i][c][0]);
                    output[i][c][1] = dot4(p[i], make_float4(v[0].y, v[1].y, v[2].y, v[3].y), output[i][c][1]);
                    output[i][c][2] = dot4(p[i], make_float4(v[0].z, v[1].z, v[2].z, v[3].z), output[i][c][2]);
                    output[i][c][3] = dot4(p[i], make_float4(v[0].w, v[1].w, v[2].w, v[3].w), output[i][c][3]);
                }
            }
        }
    }

    // Divides by the sums and writes the rows that exist; `out` is that of the head.
    __device__ __forceinline__ void store(float* out, u32 stride, u32 row, u32 n_tokens, u32 x) const {
#pragma unroll
        for (u32 i = 0; i < PER_THREAD; i++) {
            const float inverse = 1.0f / row_sum(sum[i]);
            const u32 t = row + SIDE * i;
            if (t >= n_tokens) continue;
#pragma unroll
            for (u32 c = 0; c < THREAD_CHUNKS; c++) {
                if (x + SIDE * c >= CHUNKS) continue;
                const float* o = output[i][c];
                *reinterpret_cast<float4*>(out + static_cast<u64>(t) * stride + (x + SIDE * c) * 4) =
                    make_float4(o[0] * inverse, o[1] * inverse, o[2] * inverse, o[3] * inverse);
            }
        }
    }
};

// What is told of a call beside its operands.
struct Shape {
    u32 n_tokens, n_heads, n_kv_heads, q_stride, k_stride, v_stride, out_stride;
    float scale, softcap;
    u32 window;
};

// Keys and values of one KV head.
struct KeysValues {
    const float *k, *v;

    __device__ __forceinline__ KeysValues of_head(u32 head) const {
        return {k + static_cast<u64>(head) * HEAD_DIM, v + static_cast<u64>(head) * HEAD_DIM};
    }
};

// Which keys are quantized for this thread's rows (y + 16 i), and for all and any of the block's.
struct Quantized {
    uint2 rows[PER_THREAD];
    uint2 all, any;

    __device__ __forceinline__ void load(const uint2* ranges, u32 first, u32 y, u32 n_tokens) {
#pragma unroll
        for (u32 i = 0; i < PER_THREAD; i++) rows[i] = ranges[min(first + y + SIDE * i, n_tokens - 1)];
        // Ranges begin and end no earlier than those of earlier tokens, so the first and the last row tell.
        const uint2 top = ranges[first], bottom = ranges[min(first + BLOCK, n_tokens) - 1];
        all = make_uint2(bottom.x, top.y), any = make_uint2(min(top.x, bottom.x), bottom.y);
    }

    __device__ __forceinline__ bool holds(u32 i, u32 key) const { return rows[i].x <= key && key < rows[i].y; }
    __device__ __forceinline__ bool all_of(u32 key) const { return all.x <= key && key + BLOCK <= all.y; }
    __device__ __forceinline__ bool any_of(u32 key) const { return key < any.y && any.x < key + BLOCK; }
};

// The probabilities of keys from one source to shared memory, the others as zeros.
template <bool WINDOWED>
__device__ __forceinline__ void write_probabilities(float* to, const Tile& p, const Quantized& reads, bool quantized, u32 key, u32 x, u32 y) {
#pragma unroll
    for (u32 i = 0; i < PER_THREAD; i++)
#pragma unroll
        for (u32 j = 0; j < PER_THREAD; j++) {
            const bool here = !WINDOWED || reads.holds(i, key + x + SIDE * j) == quantized;
            to[(y + SIDE * i) * SCORE_PITCH + x + SIDE * j] = here ? p[i][j] : 0.0f;
        }
}

template <bool WINDOWED>
__device__ __forceinline__ void attend(const float* q, KeysValues exact, KeysValues quantized, const uint2* ranges, float* out, const Shape& shape) {
    extern __shared__ __align__(16) float memory[];
    float *const queries = memory, *const tile = queries + BLOCK * PITCH, *const probabilities = tile + BLOCK * PITCH;
    // The heads of a group are neighbours, so they read the same keys at the same time; the longest rows come first.
    const u32 n_tokens = shape.n_tokens, window = shape.window;
    const u32 group = shape.n_heads / shape.n_kv_heads, kv_head = blockIdx.y, head = kv_head * group + blockIdx.x % group;
    const u32 first_row = (gridDim.x / group - 1 - blockIdx.x / group) * BLOCK, end_row = min(first_row + BLOCK, n_tokens);
    const u32 first_key = window != 0 && first_row + 1 > window ? first_row + 1 - window : 0;
    const u32 x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    const KeysValues sources[2] = {exact.of_head(kv_head), quantized.of_head(kv_head)};
    Quantized reads;
    if (WINDOWED) reads.load(ranges, first_row, y, n_tokens);

    copy_rows(queries, q + static_cast<u64>(head) * HEAD_DIM, shape.q_stride, first_row, n_tokens);
    Accumulator result;
    result.clear();
    for (u32 key = first_key / BLOCK * BLOCK; key < end_row; key += BLOCK) {
        const bool from[2] = {!WINDOWED || !reads.all_of(key), WINDOWED && reads.any_of(key)};
        Tile scores;
#pragma unroll
        for (u32 s = 0; s < 1 + WINDOWED; s++) {
            if (!from[s]) continue;
            __syncthreads(); // the last tile and its probabilities have been read
            copy_rows(tile, sources[s].k, shape.k_stride, key, n_tokens);
            __syncthreads();
            Tile products;
            multiply_keys(products, queries, tile, x, y);
#pragma unroll
            for (u32 i = 0; i < PER_THREAD; i++)
#pragma unroll
                for (u32 j = 0; j < PER_THREAD; j++)
                    if (!WINDOWED || reads.holds(i, key + x + SIDE * j) == (s == 1)) scores[i][j] = products[i][j];
        }
        finish_scores(scores, shape.scale, shape.softcap, first_row + y, key + x, window);
        result.weigh(scores);
#pragma unroll
        for (u32 s = 0; s < 1 + WINDOWED; s++) {
            if (!from[s]) continue;
            __syncthreads(); // the tile and earlier probabilities have been read
            write_probabilities<WINDOWED>(probabilities, scores, reads, s == 1, key, x, y);
            copy_rows(tile, sources[s].v, shape.v_stride, key, n_tokens);
            __syncthreads();
            result.add(probabilities, tile, x, y);
        }
    }
    result.store(out + static_cast<u64>(head) * HEAD_DIM, shape.out_stride, first_row + y, n_tokens, x);
}

extern "C" __global__ void __launch_bounds__(THREADS)
attention_f32(const float* q, const float* k, const float* v, float* out, u32 n_tokens, u32 n_heads, u32 n_kv_heads, u32 q_stride,
              u32 k_stride, u32 v_stride, u32 out_stride, float scale, float softcap, u32 window) {
    const Shape shape = {n_tokens, n_heads, n_kv_heads, q_stride, k_stride, v_stride, out_stride, scale, softcap, window};
    attend<false>(q, {k, v}, {k, v}, nullptr, out, shape);
}

extern "C" __global__ void __launch_bounds__(THREADS)
attention_f32_windowed(const float* q, const float* k, const float* v, const float* kq, const float* vq, const uint2* ranges, float* out,
                       u32 n_tokens, u32 n_heads, u32 n_kv_heads, u32 q_stride, u32 k_stride, u32 v_stride, u32 out_stride, float scale,
                       float softcap, u32 window) {
    const Shape shape = {n_tokens, n_heads, n_kv_heads, q_stride, k_stride, v_stride, out_stride, scale, softcap, window};
    attend<true>(q, {k, v}, {kq, vq}, ranges, out, shape);
}
