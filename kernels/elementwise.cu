// What lies between the products: bias, gate of the MLP, embedding rows.
//
//   bias_add             x[t, j] += bias[j]
//   gate_silu            out[t, j] = g sigmoid(g) u               g = x[t, j], u = x[t, width + j]
//   gate_gelu_tanh       out[t, j] = g sigmoid(2 c) u             c = sqrt(2 / pi) (g + 0.044715 g^3): GELU's tanh form, since
//                                                                 (1 + tanh c) / 2 = sigmoid(2 c)
//   gate_gelu            out[t, j] = g (1 + erf(g / sqrt 2)) / 2 u
//   embed_bf16, _f32     out[t, j] = scale * table[ids[t], j]     a table of bf16 or of f32; NaN where ids[t] >= n_ids
//
// Arguments: x      activations (bf16, or f32 with -DACT_F32), rows `stride` elements apart, a multiple of 16 bytes; of a gate
//                   [n_rows, 2 width], the gate's columns first; `bias_add` works in place on [n_rows, width].
//            out    [n_rows, width] activations, dense. bias  [width] f32. table  [n_ids, width]. ids  [n_rows] u32.
//            width  a multiple of 8 (4 with ACT_F32). Every pointer but ids is 16-byte aligned.
// Arithmetic is f32, rounded once.
//
// Launch: block (X, Y) of 256 threads, X a power of two; grid (ceil(n_rows / Y), ceil(width / (8 X))), 4 X with ACT_F32. X is best
// the least power of two that holds a row's vectors, at most 256. No dynamic shared memory, no macros but ACT_F32. sm_80 on.
// Floor: bytes, each input read and each output written once.
// Oracle: f64 on the host. bf16 differs by its rounding, 2^-8 relative, and both by 2^-20 |g u|: 16 units in the last place for an
// exponential (or erf), a quotient and the rounded arguments of both, whose effect fades with the gate's slope.
#include "common.cuh"

constexpr u32 BLOCK = 256;

// The vector of a row that this thread works on; false beyond the end.
struct Place {
    u64 row;
    u32 column;
    bool inside;
};

__device__ __forceinline__ Place place(u32 n_rows, u32 width) {
    const u32 row = blockIdx.x * blockDim.y + threadIdx.y, column = (blockIdx.y * blockDim.x + threadIdx.x) * ACT_VEC;
    return {row, column, row < n_rows && column < width};
}

// 1 / (1 + e^-x); 0 below about -88, never NaN for a finite x.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

struct Silu {
    static __device__ __forceinline__ float of(float g) { return g * sigmoid(g); }
};

struct GeluTanh {
    static __device__ __forceinline__ float of(float g) {
        constexpr float TWICE_SQRT_2_OVER_PI = 1.5957691216f;
        return g * sigmoid(TWICE_SQRT_2_OVER_PI * (g + 0.044715f * g * g * g));
    }
};

struct Gelu {
    static __device__ __forceinline__ float of(float g) {
        constexpr float INVERSE_SQRT_2 = 0.70710678119f;
        return 0.5f * g * (1.0f + erff(g * INVERSE_SQRT_2));
    }
};

template <typename Activation>
__device__ __forceinline__ void gate(const Act* x, u64 stride, Act* out, u32 n_rows, u32 width) {
    const Place at = place(n_rows, width);
    if (!at.inside) return;
    const Act* const from = x + at.row * stride + at.column;
    const uint4 raw_gate = load16_once(from), raw_up = load16_once(from + width);
    float g[ACT_VEC], u[ACT_VEC];
    unpack(raw_gate, g);
    unpack(raw_up, u);
#pragma unroll
    for (u32 e = 0; e < ACT_VEC; e++) g[e] = Activation::of(g[e]) * u[e];
    store16(out + at.row * width + at.column, pack(g));
}

extern "C" __global__ void __launch_bounds__(BLOCK) gate_silu(const Act* x, u64 stride, Act* out, u32 n_rows, u32 width) {
    gate<Silu>(x, stride, out, n_rows, width);
}

extern "C" __global__ void __launch_bounds__(BLOCK) gate_gelu_tanh(const Act* x, u64 stride, Act* out, u32 n_rows, u32 width) {
    gate<GeluTanh>(x, stride, out, n_rows, width);
}

extern "C" __global__ void __launch_bounds__(BLOCK) gate_gelu(const Act* x, u64 stride, Act* out, u32 n_rows, u32 width) {
    gate<Gelu>(x, stride, out, n_rows, width);
}

extern "C" __global__ void __launch_bounds__(BLOCK) bias_add(Act* x, u64 stride, const float* bias, u32 n_rows, u32 width) {
    const Place at = place(n_rows, width);
    if (!at.inside) return;
    Act* const here = x + at.row * stride + at.column;
    float v[ACT_VEC], b[ACT_VEC];
    unpack(load16(here), v);
    load_f32(bias + at.column, b);
#pragma unroll
    for (u32 e = 0; e < ACT_VEC; e++) v[e] += b[e];
    store16(here, pack(v));
}

// ACT_VEC elements of a table, widened.
__device__ __forceinline__ void load_elements(const float* p, float (&out)[ACT_VEC]) { load_f32(p, out); }

__device__ __forceinline__ void load_elements(const u16* p, float (&out)[ACT_VEC]) {
#pragma unroll
    for (u32 e = 0; e < ACT_VEC; e += 4) {
        const uint2 four = *reinterpret_cast<const uint2*>(p + e);
        out[e] = bf16x2_low(four.x), out[e + 1] = bf16x2_high(four.x);
        out[e + 2] = bf16x2_low(four.y), out[e + 3] = bf16x2_high(four.y);
    }
}

template <typename Element>
__device__ __forceinline__ void embed(const Element* table, u32 n_ids, const u32* ids, float scale, Act* out, u32 n_rows,
                                      u32 width) {
    const Place at = place(n_rows, width);
    if (!at.inside) return;
    const u32 id = ids[at.row];
    const bool known = id < n_ids;
    float v[ACT_VEC];
    load_elements(table + static_cast<u64>(known ? id : 0) * width + at.column, v);
#pragma unroll
    for (u32 e = 0; e < ACT_VEC; e++) v[e] = known ? v[e] * scale : __uint_as_float(0x7fffffffu);
    store16(out + at.row * width + at.column, pack(v));
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    embed_bf16(const u16* table, u32 n_ids, const u32* ids, float scale, Act* out, u32 n_rows, u32 width) {
    embed(table, n_ids, ids, scale, out, n_rows, width);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    embed_f32(const float* table, u32 n_ids, const u32* ids, float scale, Act* out, u32 n_rows, u32 width) {
    embed(table, n_ids, ids, scale, out, n_rows, width);
}
