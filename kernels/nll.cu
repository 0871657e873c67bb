// Negative log likelihoods of target tokens from rows of logits, in nats.
//
//   nll     out[t] = log sum_j exp(cap(x[t, j])) - cap(x[t, targets[t]])
//
// where cap(x) = softcap tanh(x / softcap), or x where softcap is 0.
//
// Arguments: x        [n_rows, width] f32, rows `stride` elements apart. targets  [n_rows] u32. out  [n_rows] f64.
//            out is NaN or infinite where a logit of the row is NaN or positive infinity, and NaN where targets[t] >= width.
// Arithmetic: differences from the row's maximum and their exponentials are f32, the sums f64, in an order that depends on width alone.
//
// Launch: grid n_rows, block 1024. No dynamic shared memory, no macros. sm_80 on.
// Floor: bytes, each logit read once (a second time from L2).
// Oracle: f64 on the host. An exponential is within 2 units in the last place and its argument within 2^-24 of it, at most 88 where it is
// not zero: 2^-22 of a row's sum where logits lie close to the maximum, 1e-5 of terms that are e^-88 of it.
#include "common.cuh"

constexpr u32 BLOCK = 1024;
constexpr u32 N_WARPS = BLOCK / 32;

// Over the threads of the block, each of which gets the result. `shared` has room for a value a warp.
template <typename T, typename Join>
__device__ __forceinline__ T over_block(T value, T* shared, Join join) {
#pragma unroll
    for (u32 offset = 16; offset > 0; offset /= 2) value = join(value, __shfl_xor_sync(FULL_WARP, value, offset));
    __syncthreads(); // what was there has been read
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    T all = shared[0];
    for (u32 warp = 1; warp < N_WARPS; warp++) all = join(all, shared[warp]);
    return all;
}

__device__ __forceinline__ float cap(float x, float softcap) { return softcap > 0.0f ? softcap * tanhf(x / softcap) : x; }

extern "C" __global__ void __launch_bounds__(BLOCK) nll(const float* x, u64 stride, u32 width, float softcap, const u32* targets, double* out) {
    __shared__ float maxima[N_WARPS];
    __shared__ double sums[N_WARPS];
    const float* row = x + blockIdx.x * stride;
    float max = -__int_as_float(0x7f800000);
    for (u32 j = threadIdx.x; j < width; j += BLOCK) max = fmaxf(max, row[j]);
    max = cap(over_block(max, maxima, [](float a, float b) { return fmaxf(a, b); }), softcap);
    double sum = 0.0;
    for (u32 j = threadIdx.x; j < width; j += BLOCK) sum += expf(cap(row[j], softcap) - max);
    sum = over_block(sum, sums, [](double a, double b) { return a + b; });
    if (threadIdx.x > 0) return;
    const u32 target = targets[blockIdx.x];
    const double score = target < width ? cap(row[target], softcap) : __int_as_float(0x7fc00000);
    out[blockIdx.x] = max + log(sum) - score;
}
