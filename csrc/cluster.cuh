// Blocks that run side by side and read each other's shared memory (sm_90 and newer; elsewhere a block is alone).
#pragma once
#include "async_copy.cuh"

namespace videoscale {

constexpr int MOST_IN_CLUSTER = 8;  // that every device with clusters has

// Blocks in this block's cluster: 1 unless the launch asks for more.
__device__ __forceinline__ int cluster_size() {
    unsigned size = 1;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
#endif
    return size;
}

// This block's place among them.
__device__ __forceinline__ int cluster_rank() {
    unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}

// Barrier of all threads of the cluster; what they wrote to shared memory before is visible to all after.
__device__ __forceinline__ void sync_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

// Four floats of the block with that rank, from where this block has `mine`.
__device__ __forceinline__ float4 load_of_rank(const float* mine, int rank) {
#if __CUDA_ARCH__ >= 900
    float4 v;
    asm volatile(
        "{\n"
        ".reg .b32 theirs;\n"
        "mapa.shared::cluster.u32 theirs, %4, %5;\n"
        "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [theirs];\n"
        "}\n"
        : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
        : "r"(shared_address(mine)), "r"(rank)
        : "memory");
    return v;
#else
    return *reinterpret_cast<const float4*>(mine);
#endif
}

// Writes the sum over the cluster's blocks of `count` floats each, in the order of their ranks. Every block sums and
// writes a share. What the block's threads have put there need not be visible yet.
template <int THREADS>
__device__ __forceinline__ void write_cluster_sum(float* to, const float* mine, int count) {
    sync_cluster();
    const int size = cluster_size(), last = size - 1, shift = __ffs(size) - 1;  // size is a power of two
    const int stride = size * THREADS * 4, first = (cluster_rank() * THREADS + threadIdx.x) * 4;
    // The loads of MOST_IN_CLUSTER / size places are all on their way before the first is there.
    for (int begin = first; begin < count; begin += stride * MOST_IN_CLUSTER >> shift) {
        float4 loaded[MOST_IN_CLUSTER], sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int i = 0; i < MOST_IN_CLUSTER; ++i) {
            const int place = begin + (i >> shift) * stride;
            if (place < count) loaded[i] = load_of_rank(mine + place, i & last);
        }
#pragma unroll
        for (int i = 0; i < MOST_IN_CLUSTER; ++i) {
            const int place = begin + (i >> shift) * stride;
            if (place >= count) continue;
            sum.x += loaded[i].x;
            sum.y += loaded[i].y;
            sum.z += loaded[i].z;
            sum.w += loaded[i].w;
            if ((i & last) != last) continue;
            *reinterpret_cast<float4*>(to + place) = sum;
            sum = make_float4(0.f, 0.f, 0.f, 0.f);
        }
    }
    sync_cluster();  // No block ends while others read its shared memory.
}

}  // namespace videoscale
