// 16-byte vectors of activations and their float values.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace videoscale {

template <typename T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack {
    T lane[N];
};

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ float from_float<float>(float v) { return v; }
template <>
__device__ __forceinline__ __half from_float<__half>(float v) { return __float2half_rn(v); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) { return __float2bfloat16_rn(v); }

// v as T holds it.
template <typename T>
__device__ __forceinline__ float rounded(float v) { return to_float(from_float<T>(v)); }

// What BYTES are moved in: 16 bytes at a time, or 8 where there are no more.
template <int BYTES>
struct Words {
    using Type = uint4;
};
template <>
struct Words<8> {
    using Type = uint2;
};

// N values at an address aligned to 16 bytes (or to N values, if those are fewer), global or shared.
template <typename T, int N>
__device__ __forceinline__ void load(const void* address, float (&v)[N]) {
    const Pack<T, N> pack = *static_cast<const Pack<T, N>*>(address);
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = to_float(pack.lane[j]);
}

// Writes N values that nobody reads soon, to an address aligned as for load.
template <typename T, int N>
__device__ __forceinline__ void store(void* address, const float (&v)[N]) {
    using Word = typename Words<N * sizeof(T)>::Type;
    union {
        Pack<T, N> pack;
        Word words[N * sizeof(T) / sizeof(Word)];
    } out;
#pragma unroll
    for (int j = 0; j < N; ++j) out.pack.lane[j] = from_float<T>(v[j]);
#pragma unroll
    for (int i = 0; i < int(N * sizeof(T) / sizeof(Word)); ++i) __stcs(static_cast<Word*>(address) + i, out.words[i]);
}

}  // namespace videoscale
