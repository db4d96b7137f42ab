// Flags by which the blocks of one kernel tell the kernel after it, launched while they still run, that what they leave
// in memory is there, so that it need not wait for the last of them before it touches what the others left.
//
// The dependent kernel starts when every block has called `let_dependents_start`. A block lowers its flag before that, so
// no value from an earlier use of the memory is taken for its own; and since all blocks run by then, waiting for a flag
// cannot keep any of them from running.
#pragma once

namespace videoscale {

// By one thread, before a barrier of the block that precedes `let_dependents_start`.
__device__ __forceinline__ void lower(int* flag) {
    asm volatile("st.relaxed.gpu.global.s32 [%0], 0;" ::"l"(flag) : "memory");
    __threadfence();
}

// By one thread, after a barrier that follows what all threads wrote.
__device__ __forceinline__ void raise(int* flag) {
    asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flag) : "memory");
}

// Until the flag is up; what was written before is visible to this thread then.
__device__ __forceinline__ void await_raised(const int* flag) {
    for (;;) {
        int value;
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
        if (value == 1) return;
        __nanosleep(200);  // The blocks that are waited for need the memory more.
    }
}

}  // namespace videoscale
