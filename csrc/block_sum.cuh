// Sums over a block, the same in every thread, in a fixed order.
#pragma once

namespace videoscale {

template <int THREADS, int MAX_VALUES>
struct BlockSum {
    static constexpr int WARPS = THREADS / 32;
    static constexpr int PADDED = (WARPS + 3) / 4 * 4;
    struct Scratch {
        alignas(16) float of_warp[2][MAX_VALUES][PADDED];
    };

    Scratch& scratch;
    int turn = 0;  // Two buffers take turns, so that one barrier per sum is enough.

    __device__ __forceinline__ explicit BlockSum(Scratch& s) : scratch(s) {
        float* words = &s.of_warp[0][0][0];
        for (int i = threadIdx.x; i < 2 * MAX_VALUES * PADDED; i += THREADS) words[i] = 0.f;
        __syncthreads();
    }

    // Replaces each value by its sum over the block's threads. Also a barrier of the block.
    template <int N>
    __device__ __forceinline__ void operator()(float (&v)[N]) {
        static_assert(N <= MAX_VALUES, "scratch is too small");
#pragma unroll
        for (int step = 16; step > 0; step /= 2)
#pragma unroll
            for (int i = 0; i < N; ++i) v[i] += __shfl_xor_sync(0xffffffffu, v[i], step);
        if constexpr (WARPS == 1) {
            __syncwarp();
            return;
        }
        float(&mine)[MAX_VALUES][PADDED] = scratch.of_warp[turn];
        turn ^= 1;
        if (threadIdx.x % 32 == 0) {
#pragma unroll
            for (int i = 0; i < N; ++i) mine[i][threadIdx.x / 32] = v[i];
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < N; ++i) {
            float sum = 0.f;
#pragma unroll
            for (int w = 0; w < PADDED; w += 4) {
                const float4 part = *reinterpret_cast<const float4*>(&mine[i][w]);
                sum += (part.x + part.y) + (part.z + part.w);
            }
            v[i] = sum;
        }
    }
};

}  // namespace videoscale
