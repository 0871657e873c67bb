// Conversions between the types that checkpoints store and the ones that kernels take: out[i] = in[i].
//
//   bf16_to_f32s, f16_to_f32s   exact
//   f32_to_bf16s, f16_to_bf16s  to nearest, ties to even; beyond bf16's range infinite; NaN stays NaN
//
// Arguments: in, out  [n] elements, 16-byte aligned, apart; n any number.
// Launch: block 256, grid ceil(n / 2048): a thread converts 8 elements, the last one the tail too. No dynamic shared memory, no
// macros. sm_80 on. Floor: bytes, each element read and written once. Oracle: f64 on the host, bit for bit.
#include "common.cuh"

constexpr u32 BLOCK = 256;
constexpr u32 PER_THREAD = 8;

struct F16 {
    u16 bits;
};

__device__ __forceinline__ float widen(float v) { return v; }
__device__ __forceinline__ float widen(u16 v) { return bf16_to_f32(v); }
__device__ __forceinline__ float widen(F16 v) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(v.bits));
    return wide;
}

// Eight elements as one or two 16-byte vectors.
template <typename T>
struct alignas(16) Eight {
    T v[PER_THREAD];
};

template <typename From, typename To>
__device__ __forceinline__ void convert(const From* in, To* out, u64 n) {
    const u64 first = (static_cast<u64>(blockIdx.x) * BLOCK + threadIdx.x) * PER_THREAD;
    if (first + PER_THREAD <= n) {
        const Eight<From> from = *reinterpret_cast<const Eight<From>*>(in + first);
        Eight<To> to;
#pragma unroll
        for (u32 i = 0; i < PER_THREAD; i++) store_f32(&to.v[i], widen(from.v[i]));
        *reinterpret_cast<Eight<To>*>(out + first) = to;
    } else {
        for (u64 i = first; i < n; i++) store_f32(out + i, widen(in[i]));
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK) bf16_to_f32s(const u16* in, float* out, u64 n) { convert(in, out, n); }
extern "C" __global__ void __launch_bounds__(BLOCK) f16_to_f32s(const F16* in, float* out, u64 n) { convert(in, out, n); }
extern "C" __global__ void __launch_bounds__(BLOCK) f32_to_bf16s(const float* in, u16* out, u64 n) { convert(in, out, n); }
extern "C" __global__ void __launch_bounds__(BLOCK) f16_to_bf16s(const F16* in, u16* out, u64 n) { convert(in, out, n); }
