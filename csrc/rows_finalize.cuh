// Adds the blocks' parts of each group in a fixed order and turns the sums into gradients of the operands.
//
// Grid: (columns, shares of the groups). A share is every gridDim.y-th group; the gradients of weight, bias and the branch's
// bias add its groups up, in order too, and leave the shares' sums to be added.
#include "async_copy.cuh"
#include "dependent_launch.cuh"
#include "row_sums.cuh"

namespace videoscale {

struct FinalizeArguments {
    const float* parts;
    OperandView gate, scale;
    const Affine *weight, *bias;
    float *dgate, *dscale, *dshift;  // (groups, D); where every row has its own: (1, D), of the tables
    float *dweight, *dbias, *dbranch_bias;  // (shares, D)
    RowOrder map;  // of rows_backward
    int blocks;    // likewise; where they left a part per cluster: clusters
};

// A thread adds four columns of every LANES-th part. They come BATCH at a time through shared memory: latency is what this
// kernel costs, and of loads to registers the compiler leaves only two on their way. For the same reason a block has few
// columns, of two sectors of memory, and many lanes: at D = 1536 528 blocks leave parts, and 96 blocks fetch them.
constexpr int COLUMNS = 16, QUADS = COLUMNS / 4, LANES = 64, THREAD_COUNT = QUADS * LANES, WARPS = THREAD_COUNT / 32;
constexpr int BATCH = 10 / SUM_COUNT;
using Sums = float[SUM_COUNT][4];
using Staged = float4[BATCH][SUM_COUNT][THREAD_COUNT];

// Adds this thread's columns of the parts that blocks first … last have of a group.
__device__ __forceinline__ void add_parts(const float* parts, int group, int first, int last, int column, int thread,
                                          Staged& staged, Sums& sums) {
    for (int begin = first + threadIdx.y; begin <= last; begin += LANES * BATCH) {
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int block = begin + b * LANES;
            const float* const from = part(const_cast<float*>(parts), block, group) + column;
#pragma unroll
            for (int i = 0; i < SUM_COUNT; ++i)
                if (block <= last) copy_async<16>(&staged[b][i][thread], from + i * D);
        }
        commit_copies();
        await_copies<0>();
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            if (begin + b * LANES > last) break;
#pragma unroll
            for (int i = 0; i < SUM_COUNT; ++i) {
                const float4 v = staged[b][i][thread];
                sums[i][0] += v.x;
                sums[i][1] += v.y;
                sums[i][2] += v.z;
                sums[i][3] += v.w;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREAD_COUNT) rows_finalize(const __grid_constant__ FinalizeArguments a) {
    __shared__ Staged staged;
    __shared__ float of_warp[SUM_COUNT][WARPS][COLUMNS];
    const int thread = threadIdx.y * QUADS + threadIdx.x;
    const int column = blockIdx.x * COLUMNS + threadIdx.x * 4;  // the first of four to read
    const int c = blockIdx.x * COLUMNS + thread;                // to write, by the first warp
    const int groups = PER_ROW ? 1 : a.map.groups;
    float dweight = 0.f, dbias = 0.f, dbranch_bias = 0.f;
    await_previous_kernel();
    for (int group = blockIdx.y; group < groups; group += gridDim.y) {
        int first = 0, last = a.blocks - 1;
        if constexpr (!PER_ROW) {
            const int begin = group_begin(a.map, group), end = group_begin(a.map, group + 1);
            first = begin / a.map.run;
            last = begin < end ? min((end - 1) / a.map.run, last) : first - 1;
        }
        Sums of_thread = {};
        if (column < D) add_parts(a.parts, group, first, last, column, thread, staged, of_thread);
#pragma unroll
        for (int i = 0; i < SUM_COUNT; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
#pragma unroll
                for (int step = 16; step >= QUADS; step /= 2)
                    of_thread[i][j] += __shfl_xor_sync(0xffffffffu, of_thread[i][j], step);
                if (thread % 32 < QUADS) of_warp[i][thread / 32][threadIdx.x * 4 + j] = of_thread[i][j];
            }
        __syncthreads();
        if (thread < COLUMNS && c < D) {
            float sums[SUM_COUNT];
#pragma unroll
            for (int i = 0; i < SUM_COUNT; ++i) {
                sums[i] = 0.f;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) sums[i] += of_warp[i][w][thread];
            }
            const long long to = (long long)group * D + c;
            if constexpr (SUM_NORM) {
                float dscale = sums[DY_X_HAT];
                if constexpr (HAS_WEIGHT) dscale *= to_float(a.weight[c]);
                if constexpr (HAS_BIAS) dscale += sums[DY] * to_float(a.bias[c]);
                if constexpr (HAS_SCALE) {
                    a.dscale[to] = dscale;
                    a.dshift[to] = sums[DY];
                }
                if constexpr (SUM_AFFINE) {
                    dweight = sums[DN_X_HAT];
                    dbias = sums[DN];
                } else if constexpr (AFFINE) {
                    float factor = 1.f;
                    if constexpr (HAS_SCALE) {
                        factor += to_float(a.scale.values[group * a.scale.stride + c]);
                        if (a.scale.table != nullptr) factor += to_float(a.scale.table[c]);
                    }
                    dweight = fmaf(factor, sums[DY_X_HAT], dweight);
                    dbias = fmaf(factor, sums[DY], dbias);
                }
            }
            if constexpr (SUM_GATE) {
                float dgate = sums[DH_BRANCH];
                if constexpr (TANH_GATE && !PER_ROW) {
                    float gate = to_float(a.gate.values[group * a.gate.stride + c]);
                    if (a.gate.table != nullptr) gate += to_float(a.gate.table[c]);
                    gate = tanhf(gate);
                    dgate *= 1.f - gate * gate;
                }
                a.dgate[to] = dgate;
            }
            if constexpr (SUM_BRANCH) dbranch_bias += sums[DBRANCH];
        }
        __syncthreads();
    }
    if (thread < COLUMNS && c < D) {
        const int to = blockIdx.y * D + c;
        if constexpr (SUM_NORM && HAS_WEIGHT) a.dweight[to] = dweight;
        if constexpr (SUM_NORM && HAS_BIAS) a.dbias[to] = dbias;
        if constexpr (SUM_BRANCH) a.dbranch_bias[to] = dbranch_bias;
    }
}

}  // namespace videoscale
