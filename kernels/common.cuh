// Device helpers shared by the kernels: integer types, bf16 <-> f32, 16-byte accesses, reductions, `mma.sync`, `ldmatrix`,
// `cp.async`.
//
// Header-free: NVRTC compiles it with no toolkit on the machine. The loader splices this file in place of the line
// `#include "common.cuh"`; it defines device functions only, no kernel. Everything here runs on compute capability 8.0 and later.
// bf16 values travel as their bits (`u16`, or `u32` for a pair with the lower index in the lower half).
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8, "fixed-width types");

constexpr u32 WARP_SIZE = 32;
constexpr u32 FULL_WARP = 0xffffffffu;

__host__ __device__ constexpr u32 ceil_div(u32 a, u32 b) { return (a + b - 1) / b; }

// ---- bf16 <-> f32 --------------------------------------------------------------------------------------------------------

// Exact: bf16 is the upper half of an f32.
__device__ __forceinline__ float bf16_to_f32(u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }

// The lower (even) element of a pair.
__device__ __forceinline__ float bf16x2_low(u32 pair) { return __uint_as_float(pair << 16); }

// The upper (odd) element of a pair.
__device__ __forceinline__ float bf16x2_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Round to nearest, ties to even; a NaN becomes the canonical NaN 0x7fff.
__device__ __forceinline__ u16 f32_to_bf16(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// Two roundings in one instruction; `low` goes to the lower half.
__device__ __forceinline__ u32 f32_to_bf16x2(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// Eight bf16 of a 16-byte vector, widened.
__device__ __forceinline__ void unpack_bf16x8(const uint4& v, float (&out)[8]) {
    out[0] = bf16x2_low(v.x), out[1] = bf16x2_high(v.x);
    out[2] = bf16x2_low(v.y), out[3] = bf16x2_high(v.y);
    out[4] = bf16x2_low(v.z), out[5] = bf16x2_high(v.z);
    out[6] = bf16x2_low(v.w), out[7] = bf16x2_high(v.w);
}

// Eight f32 rounded to a 16-byte vector of bf16.
__device__ __forceinline__ uint4 pack_bf16x8(const float (&v)[8]) {
    return make_uint4(f32_to_bf16x2(v[0], v[1]), f32_to_bf16x2(v[2], v[3]), f32_to_bf16x2(v[4], v[5]),
                      f32_to_bf16x2(v[6], v[7]));
}

// ---- 16-byte accesses (addresses are multiples of 16) --------------------------------------------------------------------

__device__ __forceinline__ uint4 load16(const void* p) { return *static_cast<const uint4*>(p); }

__device__ __forceinline__ void store16(void* p, const uint4& v) { *static_cast<uint4*>(p) = v; }

// Read-only data used once: the read-only path, not kept in L1. The kernel must not write what it reads through this.
__device__ __forceinline__ uint4 load16_once(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

// ---- activations: bf16, or f32 where a source is compiled with -DACT_F32 -------------------------------------------------

#ifdef ACT_F32
using Act = float;
#else
using Act = u16;
#endif

// Activations in a 16-byte vector.
[[maybe_unused]] constexpr u32 ACT_VEC = 16 / sizeof(Act);

__device__ __forceinline__ float to_f32(float value) { return value; }
__device__ __forceinline__ float to_f32(u16 bits) { return bf16_to_f32(bits); }

// Rounds to the type of `out`.
__device__ __forceinline__ void store_f32(float* out, float value) { *out = value; }
__device__ __forceinline__ void store_f32(u16* out, float value) { *out = f32_to_bf16(value); }

// A 16-byte vector of f32 or of bf16, widened.
__device__ __forceinline__ void unpack(const uint4& v, float (&out)[8]) { unpack_bf16x8(v, out); }
__device__ __forceinline__ void unpack(const uint4& v, float (&out)[4]) {
    out[0] = __uint_as_float(v.x), out[1] = __uint_as_float(v.y), out[2] = __uint_as_float(v.z), out[3] = __uint_as_float(v.w);
}

__device__ __forceinline__ uint4 pack(const float (&v)[8]) { return pack_bf16x8(v); }
__device__ __forceinline__ uint4 pack(const float (&v)[4]) {
    return make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
}

// N consecutive f32, N a multiple of 4, `p` a multiple of 16 bytes.
template <u32 N>
__device__ __forceinline__ void load_f32(const float* p, float (&out)[N]) {
    static_assert(N % 4 == 0, "16-byte vectors");
#pragma unroll
    for (u32 i = 0; i < N; i += 4) {
        const float4 v = *reinterpret_cast<const float4*>(p + i);
        out[i] = v.x, out[i + 1] = v.y, out[i + 2] = v.z, out[i + 3] = v.w;
    }
}

// ---- reductions: fixed order, so the same inputs give the same bits ------------------------------------------------------

// Sum over the warp, in every lane.
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (u32 offset = WARP_SIZE / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(FULL_WARP, v, offset);
    return v;
}

// Maximum over the warp, in every lane (a NaN is dropped where another value exists, as `fmaxf` does).
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (u32 offset = WARP_SIZE / 2; offset > 0; offset /= 2) v = fmaxf(v, __shfl_xor_sync(FULL_WARP, v, offset));
    return v;
}

// Sum over a block of at most 1024 threads (a multiple of 32), in every thread. `scratch` is 32 floats of shared memory; it may
// be reused right after the call, because the function ends with a barrier.
__device__ __forceinline__ float block_sum(float v, float* scratch) {
    const u32 lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, n_warps = blockDim.x / WARP_SIZE;
    v = warp_sum(v);
    if (n_warps == 1) return v;
    if (lane == 0) scratch[warp] = v;
    __syncthreads();
    v = warp_sum(lane < n_warps ? scratch[lane] : 0.0f);
    __syncthreads();
    return v;
}

// ---- shared memory, cp.async ---------------------------------------------------------------------------------------------

// The 32-bit address of a pointer into shared memory.
__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// 16 bytes from global to shared memory, past the registers and L1; both addresses are multiples of 16.
__device__ __forceinline__ void cp_async16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// As `cp_async16`; writes zeros and reads nothing where `valid` is false (`from` must still be a mapped address).
__device__ __forceinline__ void cp_async16_or_zero(u32 to, const void* from, bool valid) {
    const u32 n_bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(n_bytes) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most N of this thread's newest groups are pending.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ---- matrix instructions -------------------------------------------------------------------------------------------------

// Four 8x8 matrices of 16-bit elements; lane 8i + r gives the address of row r of matrix i. Register i of lane l holds row l / 4,
// columns 2 (l % 4) and the next, of matrix i.
__device__ __forceinline__ void ldmatrix_x4(u32 (&out)[4], u32 row_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(row_address)
                 : "memory");
}

// As `ldmatrix_x4`, each 8x8 matrix transposed on the way.
__device__ __forceinline__ void ldmatrix_x4_transposed(u32 (&out)[4], u32 row_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(row_address)
                 : "memory");
}

// Two 8x8 matrices; lanes 0 to 15 give the row addresses.
__device__ __forceinline__ void ldmatrix_x2(u32 (&out)[2], u32 row_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(out[0]), "=r"(out[1])
                 : "r"(row_address)
                 : "memory");
}

// As `ldmatrix_x2`, each 8x8 matrix transposed on the way.
__device__ __forceinline__ void ldmatrix_x2_transposed(u32 (&out)[2], u32 row_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(out[0]), "=r"(out[1])
                 : "r"(row_address)
                 : "memory");
}

// D += A B for A [16, 16] row-major, B [16, 8] column-major, both bf16, and D [16, 8] f32. With g = lane / 4 and c = 2 (lane % 4):
// a = A[g][c..], A[g + 8][c..], A[g][c + 8..], A[g + 8][c + 8..]; b = B[c..][g], B[c + 8..][g];
// d = D[g][c], D[g][c + 1], D[g + 8][c], D[g + 8][c + 1].
__device__ __forceinline__ void mma_bf16_16x8x16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
