// Adds the blocks' parts of each group in a fixed order and turns the sums into gradients of the operands.
//
// Grid: (columns, groups); with weight or bias (columns, 1), since their gradients add the groups up, in order too.
#include "row_sums.cuh"

namespace videoscale {

struct FinalizeArguments {
    const float* parts;
    OperandView gate, scale;
    const void *weight, *bias;
    float *dgate, *dscale, *dshift;  // (groups, D); where every row has its own: (1, D), of the tables
    float *dweight, *dbias;          // (D,)
    RowOrder map;
    int blocks;  // of rows_backward
};

constexpr int COLUMNS = 32, LANES = 16;  // a block adds LANES parts at a time

template <typename T>
__device__ __forceinline__ float at(const void* values, long long i) {
    return to_float(static_cast<const T*>(values)[i]);
}

extern "C" __global__ void __launch_bounds__(COLUMNS* LANES) rows_finalize(const __grid_constant__ FinalizeArguments a) {
    __shared__ float partial[SUM_COUNT][LANES][COLUMNS];
    const int lane = threadIdx.y, c = blockIdx.x * COLUMNS + threadIdx.x;
    const int groups = PER_ROW ? 1 : a.map.groups;
    float dweight = 0.f, dbias = 0.f;
    for (int group = blockIdx.y; group < groups; group += gridDim.y) {
        int first = 0, last = a.blocks - 1;
        if constexpr (!PER_ROW) {
            const int begin = group_begin(a.map, group), end = group_begin(a.map, group + 1);
            first = share_of(a.map.rows, a.blocks, begin);
            last = begin < end ? share_of(a.map.rows, a.blocks, end - 1) : first - 1;
        }
        float sums[SUM_COUNT];
#pragma unroll
        for (int i = 0; i < SUM_COUNT; ++i) sums[i] = 0.f;
        if (c < D) {
#pragma unroll 4
            for (int block = first + lane; block <= last; block += LANES) {
                const float* from = part(const_cast<float*>(a.parts), block, PER_ROW ? 0 : group) + c;
#pragma unroll
                for (int i = 0; i < SUM_COUNT; ++i) sums[i] += __ldcs(from + i * D);
            }
        }
#pragma unroll
        for (int i = 0; i < SUM_COUNT; ++i) partial[i][lane][threadIdx.x] = sums[i];
        __syncthreads();
        if (lane == 0 && c < D) {
#pragma unroll
            for (int i = 0; i < SUM_COUNT; ++i) {
                sums[i] = 0.f;
#pragma unroll
                for (int l = 0; l < LANES; ++l) sums[i] += partial[i][l][threadIdx.x];
            }
            const long long to = (long long)group * D + c;
            if constexpr (SUM_NORM) {
                float dscale = sums[DY_X_HAT];
                if constexpr (HAS_WEIGHT) dscale *= at<Weight>(a.weight, c);
                if constexpr (HAS_BIAS) dscale += sums[DY] * at<Bias>(a.bias, c);
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
                        factor += at<ScaleValue>(a.scale.values, group * a.scale.stride + c);
                        if (a.scale.table != nullptr) factor += at<ScaleTable>(a.scale.table, c);
                    }
                    dweight = fmaf(factor, sums[DY_X_HAT], dweight);
                    dbias = fmaf(factor, sums[DY], dbias);
                }
            }
            if constexpr (SUM_GATE) {
                float dgate = sums[DH_BRANCH];
                if constexpr (TANH_GATE && !PER_ROW) {
                    float gate = at<GateValue>(a.gate.values, group * a.gate.stride + c);
                    if (a.gate.table != nullptr) gate += at<GateTable>(a.gate.table, c);
                    gate = tanhf(gate);
                    dgate *= 1.f - gate * gate;
                }
                a.dgate[to] = dgate;
            }
        }
        __syncthreads();
    }
    if (AFFINE && NORMED && lane == 0 && c < D) {
        if constexpr (HAS_WEIGHT) a.dweight[c] = dweight;
        if constexpr (HAS_BIAS) a.dbias[c] = dbias;
    }
}

}  // namespace videoscale
