// A kernel that is launched while the one before it still runs (sm_90 and newer), so that its launch costs no time.
#pragma once

namespace videoscale {

// The dependent kernel may start once every block has called this (and once there is room for it).
__device__ __forceinline__ void let_dependents_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Until the kernel before this one has ended and all that it wrote is visible. At once where nothing is under way.
__device__ __forceinline__ void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace videoscale
