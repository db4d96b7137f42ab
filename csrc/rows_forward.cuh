// Forward of the row operations: h = residual + act(gate) · branch, then y = (norm(h) · weight + bias) · (1 + scale) + shift.
//
// Persistent blocks, each with a contiguous share of the rows; a thread owns columns, so that modulation stays in its
// registers while the group lasts. Rows of one stage are reduced together. The variance is a second pass over registers.
#include "block_sum.cuh"
#include "row_pipeline.cuh"

namespace videoscale {

struct ForwardArguments {
    Source x, branch;
    OperandView gate, scale, shift;
    const Affine *weight, *bias;
    Activation *h, *y;  // contiguous
    float *mean, *rstd;
    RowOrder map;
    float eps;
};

enum Input { X, BRANCH, GATE_ROW, SCALE_ROW, SHIFT_ROW };
constexpr int ROW = D * sizeof(Activation);
// Inputs that are read again after a stage's first barrier keep the stage until the end of its turn.
constexpr int LAG = PER_ROW || NORM_BRANCH || !NORMED;
using Pipeline = RowPipeline<LAG, ROW, HAS_RESIDUAL ? ROW : 0, PER_ROW && HAS_GATE ? D * sizeof(OperandValue) : 0,
                             PER_ROW && HAS_SCALE ? D * sizeof(OperandValue) : 0,
                             PER_ROW && HAS_SHIFT ? D * sizeof(OperandValue) : 0>;
using Sum = BlockSum<THREADS, ROWS>;
using Values = float[ROWS][OWN][WIDTH];

// v as the eager law rounds it between two operations.
__device__ __forceinline__ float step(float v) { return EAGER ? rounded<Activation>(v) : v; }

__device__ __forceinline__ void activate(float (&gate)[WIDTH]) {
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) {
        gate[j] = step(gate[j]);
        if constexpr (TANH_GATE) gate[j] = step(tanhf(gate[j]));
    }
}

// What one vector's columns are multiplied by and shifted by.
struct Modulation {
    float scale[WIDTH], shift[WIDTH], weight[WIDTH], bias[WIDTH];

    __device__ __forceinline__ void load_affine(const ForwardArguments& a, int at) {
        if constexpr (HAS_WEIGHT) load<Affine>(a.weight + at, weight);
        if constexpr (HAS_BIAS) load<Affine>(a.bias + at, bias);
    }

    // Makes of scale, which was values + table, 1 + scale; where nothing is rounded between, takes in the affine too.
    __device__ __forceinline__ void compose() {
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            scale[j] = HAS_SCALE ? step(1.f + step(scale[j])) : 1.f;
            shift[j] = HAS_SHIFT ? step(shift[j]) : 0.f;
            if constexpr (!EAGER) {
                if constexpr (HAS_BIAS) shift[j] += scale[j] * bias[j];
                if constexpr (HAS_WEIGHT) scale[j] *= weight[j];
            }
        }
    }

    __device__ __forceinline__ float operator()(float x_hat, int j) const {
        if constexpr (!EAGER) return fmaf(x_hat, scale[j], shift[j]);
        float y = x_hat;
        if constexpr (RMS_NORM) y = step(y);
        if constexpr (HAS_WEIGHT) y *= weight[j];
        if constexpr (HAS_BIAS) y += bias[j];
        y = step(y);
        if constexpr (HAS_SCALE) y = step(y * scale[j]);
        return y + shift[j];
    }
};

// Sums of squares of the branch's rows, to 1 / RMS.
__device__ __forceinline__ void inverse_rms_of_branch(const Pipeline& pipeline, Sum& sum, int count, float eps,
                                                      float (&inverse)[ROWS]) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        inverse[r] = 0.f;
        if (r < count) {
#pragma unroll
            for (int k = 0; k < OWN; ++k) {
                if (!owns(k)) continue;
                float b[WIDTH];
                load<Activation>(pipeline.own<BRANCH>(r, k), b);
#pragma unroll
                for (int j = 0; j < WIDTH; ++j) inverse[r] = fmaf(b[j], b[j], inverse[r]);
            }
        }
    }
    sum(inverse);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) inverse[r] = rsqrtf(inverse[r] * PER_CHANNEL + eps);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    rows_forward(const __grid_constant__ ForwardArguments a) {
    extern __shared__ __align__(128) char ring[];
    __shared__ Pipeline::Shared barriers;
    __shared__ Sum::Scratch scratch;
    const Source sources[] = {a.x,
                              a.branch,
                              {a.gate.values, a.gate.stride * int(sizeof(OperandValue))},
                              {a.scale.values, a.scale.stride * int(sizeof(OperandValue))},
                              {a.shift.values, a.shift.stride * int(sizeof(OperandValue))}};
    assert_groups(a.map);
    Pipeline pipeline(a.map, sources, barriers, ring);
    Sum sum(scratch);

    // Of the group, or the tables alone where every row has values of its own.
    float gate[OWN][WIDTH];
    Modulation modulation[OWN];
#pragma unroll
    for (int k = 0; k < OWN; ++k) {
        if (!owns(k)) continue;
        modulation[k].load_affine(a, column(k));
        if constexpr (PER_ROW) {
            if constexpr (HAS_GATE) load_table(a.gate, column(k), gate[k]);
            if constexpr (HAS_SCALE) load_table(a.scale, column(k), modulation[k].scale);
            if constexpr (HAS_SHIFT) load_table(a.shift, column(k), modulation[k].shift);
        }
    }

    int group = -1;
    for (Walk walk(a.map); walk.more(); walk.advance(a.map), pipeline.next()) {
        const int count = walk.count();
        if (!PER_ROW && walk.group != group) {
            group = walk.group;
#pragma unroll
            for (int k = 0; k < OWN; ++k) {
                if (!owns(k)) continue;
                const int at = column(k);
                if constexpr (HAS_GATE) {
                    load_operand(a.gate, group, at, gate[k]);
                    activate(gate[k]);
                }
                if constexpr (HAS_SCALE) load_operand(a.scale, group, at, modulation[k].scale);
                if constexpr (HAS_SHIFT) load_operand(a.shift, group, at, modulation[k].shift);
                modulation[k].compose();
            }
        }
        int row[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) row[r] = r < count ? walk.row(a.map, r) : 0;

        pipeline.await_stage();
        float inverse_branch[ROWS];
        if constexpr (NORM_BRANCH) {
            inverse_rms_of_branch(pipeline, sum, count, a.eps, inverse_branch);
            pipeline.request();
        } else if constexpr (!NORMED) {
            if constexpr (BULK) __syncthreads();
            pipeline.request();
        }

        float v[ROWS][OWN][WIDTH];
        float total[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            total[r] = 0.f;
            if (r >= count) continue;
#pragma unroll
            for (int k = 0; k < OWN; ++k) {
                if (!owns(k)) continue;
                load<Activation>(pipeline.own<X>(r, k), v[r][k]);
                if constexpr (HAS_RESIDUAL) {
                    float b[WIDTH], g[WIDTH];
                    load<Activation>(pipeline.own<BRANCH>(r, k), b);
                    if constexpr (PER_ROW && HAS_GATE) {
                        load<OperandValue>(pipeline.own<GATE_ROW>(r, k), g);
#pragma unroll
                        for (int j = 0; j < WIDTH; ++j) g[j] += gate[k][j];
                        activate(g);
                    }
#pragma unroll
                    for (int j = 0; j < WIDTH; ++j) {
                        if constexpr (NORM_BRANCH) b[j] *= inverse_branch[r];
                        if constexpr (HAS_GATE) b[j] *= PER_ROW ? g[j] : gate[k][j];
                        v[r][k][j] = rounded<Activation>(v[r][k][j] + step(b[j]));
                    }
                    store<Activation>(a.h + (long long)row[r] * D + column(k), v[r][k]);
                }
#pragma unroll
                for (int j = 0; j < WIDTH; ++j) total[r] += RMS_NORM ? v[r][k][j] * v[r][k][j] : v[r][k][j];
            }
        }
        if constexpr (!NORMED) continue;

        sum(total);
        if constexpr (!NORM_BRANCH) pipeline.request();
        float mean[ROWS], rstd[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            mean[r] = LAYER_NORM ? total[r] * PER_CHANNEL : 0.f;
            if constexpr (LAYER_NORM) total[r] = 0.f;
        }
        if constexpr (LAYER_NORM) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                if (r >= count) continue;
#pragma unroll
                for (int k = 0; k < OWN; ++k) {
                    if (!owns(k)) continue;
#pragma unroll
                    for (int j = 0; j < WIDTH; ++j) {
                        const float centred = v[r][k][j] - mean[r];
                        total[r] = fmaf(centred, centred, total[r]);
                    }
                }
            }
            sum(total);
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (r >= count) continue;
            rstd[r] = rsqrtf(total[r] * PER_CHANNEL + a.eps);
            if (threadIdx.x == 0) {
                if constexpr (LAYER_NORM) a.mean[row[r]] = mean[r];
                a.rstd[row[r]] = rstd[r];
            }
#pragma unroll
            for (int k = 0; k < OWN; ++k) {
                if (!owns(k)) continue;
                Modulation own = modulation[k];
                if constexpr (PER_ROW) {
                    float operand[WIDTH];
                    if constexpr (HAS_SCALE) {
                        load<OperandValue>(pipeline.own<SCALE_ROW>(r, k), operand);
#pragma unroll
                        for (int j = 0; j < WIDTH; ++j) own.scale[j] += operand[j];
                    }
                    if constexpr (HAS_SHIFT) {
                        load<OperandValue>(pipeline.own<SHIFT_ROW>(r, k), operand);
#pragma unroll
                        for (int j = 0; j < WIDTH; ++j) own.shift[j] += operand[j];
                    }
                    own.compose();
                }
                float y[WIDTH];
#pragma unroll
                for (int j = 0; j < WIDTH; ++j) y[j] = own((v[r][k][j] - mean[r]) * rstd[r], j);
                store<Activation>(a.y + (long long)row[r] * D + column(k), y);
            }
        }
    }
}

}  // namespace videoscale
