// The gradients of weight and bias of qk_norm_rope, and of the biases of the projections before it: sums over the parts
// that the blocks of its backward left, column by column, in a fixed order.
#include "vectors.cuh"

namespace videoscale {

using Parameter = PARAMETER;
constexpr int COLUMNS = 32, LANES = 32;  // of a block

// Of q or k: parts (count, width) become gradient (width,), weight and bias side by side.
struct Parts {
    const float* parts;
    Parameter* gradient;
    int count, width;
};

struct FinalizeArguments {
    Parts q, k;
};

extern "C" __global__ void __launch_bounds__(COLUMNS* LANES) qk_finalize(const __grid_constant__ FinalizeArguments a) {
    __shared__ float of_lane[LANES][COLUMNS];
    const int q_blocks = (a.q.width + COLUMNS - 1) / COLUMNS;
    const bool of_q = blockIdx.x < q_blocks;
    const Parts& side = of_q ? a.q : a.k;
    const int column = (of_q ? blockIdx.x : blockIdx.x - q_blocks) * COLUMNS + threadIdx.x;
    float sum = 0.f;
    if (column < side.width) {
#pragma unroll 8
        for (int i = threadIdx.y; i < side.count; i += LANES) sum += side.parts[(long long)i * side.width + column];
    }
    of_lane[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && column < side.width) {
        sum = 0.f;
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane) sum += of_lane[lane][threadIdx.x];
        side.gradient[column] = from_float<Parameter>(sum);
    }
}

}  // namespace videoscale
