// Backward of the row operations in one pass over dy, h, dh and branch.
//
//     dx̂ = dy · (1 + scale) · weight,   dnorm = rstd · (dx̂ - mean(dx̂) - x̂ · mean(dx̂ · x̂))   (RMS: without mean(dx̂))
//     dx = dh + dnorm,                  dbranch = dx · act(gate), through the branch's norm where it has one
//
// Everything is computed in float32 and rounded once. Blocks and columns as in rows_forward.cuh; the sums over rows that
// are the gradients of the operands stay in registers until their group ends.
#include "block_sum.cuh"
#include "cluster.cuh"
#include "dependent_launch.cuh"
#include "row_pipeline.cuh"
#include "row_sums.cuh"

namespace videoscale {

struct BackwardArguments {
    Source dy, h, dh, branch;
    OperandView gate, scale;
    const Affine *weight, *bias;
    const float *mean, *rstd;
    Activation *dx, *dbranch;      // contiguous
    OperandValue *dgate, *dscale, *dshift;  // (rows, D), where every row has its own
    float* parts;                  // (blocks + groups, SUM_COUNT, D), or of clusters: (clusters + 1, SUM_COUNT, D)
    RowOrder map;
    float eps;
};

enum Input { DY_ROW, H_ROW, DH_ROW, BRANCH_ROW, GATE_ROW, SCALE_ROW };
constexpr int ROW = D * sizeof(Activation);
constexpr bool READ_BRANCH = HAS_GATE || NORM_BRANCH;  // without either, dbranch is dx
using Pipeline = RowPipeline<1, NORMED ? ROW : 0, NORMED ? ROW : 0, HAS_DH ? ROW : 0, READ_BRANCH ? ROW : 0,
                             PER_ROW && HAS_GATE ? D * sizeof(OperandValue) : 0,
                             PER_ROW && HAS_SCALE ? D * sizeof(OperandValue) : 0>;
constexpr int SUMS_PER_ROW = (NORMED ? 1 : 0) + (LAYER_NORM ? 1 : 0) + (NORM_BRANCH ? 1 : 0);
using Sum = BlockSum<THREADS, (SUMS_PER_ROW > 0 ? SUMS_PER_ROW : 1) * ROWS>;

// One vector's operands; of the group, or the tables alone where every row has values of its own.
struct Columns {
    float gate[WIDTH];    // act(gate), or a table
    float factor[WIDTH];  // (1 + scale) · weight, or a table
    float weight[WIDTH], bias[WIDTH];

    __device__ __forceinline__ void compose_factor() {
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            factor[j] = HAS_SCALE ? 1.f + factor[j] : 1.f;
            if constexpr (HAS_WEIGHT) factor[j] *= weight[j];
        }
    }
};

// Leaves a thread's values where the finalize finds them, in L2 if there is room.
__device__ __forceinline__ void keep(float* to, const float (&v)[WIDTH]) {
#pragma unroll
    for (int j = 0; j < WIDTH; j += 4)
        *reinterpret_cast<float4*>(to + j) = make_float4(v[j], v[j + 1], v[j + 2], v[j + 3]);
}

struct Parts {
    float dy_x_hat[WIDTH], dy[WIDTH], dn_x_hat[WIDTH], dn[WIDTH], dh_branch[WIDTH], dbranch[WIDTH];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) dy_x_hat[j] = dy[j] = dn_x_hat[j] = dn[j] = dh_branch[j] = dbranch[j] = 0.f;
    }
    __device__ __forceinline__ void write(float* to) const {
        if constexpr (SUM_NORM) {
            keep(to + DY_X_HAT * D, dy_x_hat);
            keep(to + DY * D, dy);
        }
        if constexpr (SUM_AFFINE) {
            keep(to + DN_X_HAT * D, dn_x_hat);
            keep(to + DN * D, dn);
        }
        if constexpr (SUM_GATE) keep(to + DH_BRANCH * D, dh_branch);
        if constexpr (SUM_BRANCH) keep(to + DBRANCH * D, dbranch);
    }
};

struct Statistics {
    float mean[ROWS], rstd[ROWS];

    __device__ __forceinline__ void load(const BackwardArguments& a, const Walk& walk) {
        if constexpr (NORMED) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                if (r >= walk.count()) continue;
                const int row = walk.row(a.map, r);
                mean[r] = LAYER_NORM ? a.mean[row] : 0.f;
                rstd[r] = a.rstd[row];
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    rows_backward(const __grid_constant__ BackwardArguments a) {
    extern __shared__ __align__(128) char ring[];
    __shared__ Pipeline::Shared barriers;
    __shared__ typename Sum::Scratch scratch;
    const Source sources[] = {a.dy,
                              a.h,
                              a.dh,
                              a.branch,
                              {a.gate.values, a.gate.stride * int(sizeof(OperandValue))},
                              {a.scale.values, a.scale.stride * int(sizeof(OperandValue))}};
    Pipeline pipeline(a.map, sources, barriers, ring);
    Sum sum(scratch);
    if constexpr (SUMMED) let_dependents_start();

    Columns columns[OWN];
    Parts parts[OWN];
#pragma unroll
    for (int k = 0; k < OWN; ++k) {
        parts[k].clear();
        if (!owns(k)) continue;
        if constexpr (HAS_WEIGHT) load<Affine>(a.weight + column(k), columns[k].weight);
        if constexpr (HAS_BIAS && PER_ROW) load<Affine>(a.bias + column(k), columns[k].bias);
        if constexpr (PER_ROW && HAS_GATE) load_table(a.gate, column(k), columns[k].gate);
        if constexpr (PER_ROW && HAS_SCALE) load_table(a.scale, column(k), columns[k].factor);
    }

    int group = -1;
    Walk walk(a.map);
    Statistics statistics;
    statistics.load(a, walk);
    while (walk.more()) {
        const int count = walk.count();
        if (!PER_ROW && walk.group != group) {
            const bool flush = SUMMED && group >= 0;
#pragma unroll
            for (int k = 0; k < OWN; ++k) {
                if (!owns(k)) continue;
                const int at = column(k);
                if (flush) {
                    parts[k].write(part(a.parts, blockIdx.x, group) + at);
                    parts[k].clear();
                }
                if constexpr (HAS_GATE) {
                    load_operand(a.gate, walk.group, at, columns[k].gate);
                    if constexpr (TANH_GATE)
#pragma unroll
                        for (int j = 0; j < WIDTH; ++j) columns[k].gate[j] = tanhf(columns[k].gate[j]);
                }
                if constexpr (HAS_SCALE) load_operand(a.scale, walk.group, at, columns[k].factor);
                columns[k].compose_factor();
            }
            group = walk.group;
        }
        int row[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) row[r] = r < count ? walk.row(a.map, r) : 0;
        walk.advance(a.map);
        Statistics next;  // Asked for a stage ahead: their latency passes while this stage is computed.
        if (walk.more()) next.load(a, walk);

        pipeline.await_stage();
        // Per row: Σ dx̂ · x̂, Σ dx̂ (LayerNorm), Σ branch² (norm of the branch).
        float totals[(SUMS_PER_ROW > 0 ? SUMS_PER_ROW : 1) * ROWS];
        float* const along = totals;
        float* const plain = totals + (NORMED ? ROWS : 0);
        float* const squares = plain + (LAYER_NORM ? ROWS : 0);
#pragma unroll
        for (int i = 0; i < SUMS_PER_ROW * ROWS; ++i) totals[i] = 0.f;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (r >= count) continue;
#pragma unroll
            for (int k = 0; k < OWN; ++k) {
                if (!owns(k)) continue;
                if constexpr (NORMED) {
                    float dy[WIDTH], x_hat[WIDTH], dn[WIDTH];
                    load<Activation>(pipeline.own<DY_ROW>(r, k), dy);
                    load<Activation>(pipeline.own<H_ROW>(r, k), x_hat);
                    if constexpr (PER_ROW && HAS_SCALE) load<OperandValue>(pipeline.own<SCALE_ROW>(r, k), dn);
#pragma unroll
                    for (int j = 0; j < WIDTH; ++j) {
                        x_hat[j] = (x_hat[j] - statistics.mean[r]) * statistics.rstd[r];
                        float dx_hat;
                        if constexpr (PER_ROW) {
                            dn[j] = HAS_SCALE ? dy[j] * (1.f + columns[k].factor[j] + dn[j]) : dy[j];
                            dx_hat = HAS_WEIGHT ? dn[j] * columns[k].weight[j] : dn[j];
                        } else {
                            dx_hat = dy[j] * columns[k].factor[j];
                        }
                        along[r] = fmaf(dx_hat, x_hat[j], along[r]);
                        if constexpr (LAYER_NORM) plain[r] += dx_hat;
                        if constexpr (SUM_NORM) {
                            parts[k].dy_x_hat[j] = fmaf(dy[j], x_hat[j], parts[k].dy_x_hat[j]);
                            parts[k].dy[j] += dy[j];
                        }
                        if constexpr (SUM_AFFINE) {
                            parts[k].dn_x_hat[j] = fmaf(dn[j], x_hat[j], parts[k].dn_x_hat[j]);
                            parts[k].dn[j] += dn[j];
                        }
                    }
                    if constexpr (PER_ROW && SUMS) {
                        const long long at = (long long)row[r] * D + column(k);
                        if constexpr (HAS_SCALE) {
                            store<OperandValue>(a.dshift + at, dy);
#pragma unroll
                            for (int j = 0; j < WIDTH; ++j) {
                                if constexpr (HAS_WEIGHT) x_hat[j] *= columns[k].weight[j];
                                if constexpr (HAS_BIAS) x_hat[j] += columns[k].bias[j];
                                x_hat[j] *= dy[j];
                            }
                            store<OperandValue>(a.dscale + at, x_hat);
                        }
                    }
                }
                if constexpr (NORM_BRANCH) {
                    float b[WIDTH];
                    load<Activation>(pipeline.own<BRANCH_ROW>(r, k), b);
#pragma unroll
                    for (int j = 0; j < WIDTH; ++j) squares[r] = fmaf(b[j], b[j], squares[r]);
                }
            }
        }
        if constexpr (SUMS_PER_ROW > 0)
            sum(totals);
        else if constexpr (BULK)
            __syncthreads();
        pipeline.request();

        float dbranch[ROWS][OWN][WIDTH], along_branch[ROWS];  // kept only for the norm of the branch
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            along_branch[r] = 0.f;
            if (r >= count) continue;
            const float mean_along = NORMED ? along[r] * PER_CHANNEL : 0.f, mean_plain = LAYER_NORM ? plain[r] * PER_CHANNEL : 0.f;
            const float inverse_branch = NORM_BRANCH ? rsqrtf(squares[r] * PER_CHANNEL + a.eps) : 1.f;
#pragma unroll
            for (int k = 0; k < OWN; ++k) {
                if (!owns(k)) continue;
                const long long at = (long long)row[r] * D + column(k);
                float dx[WIDTH];
                if constexpr (NORMED) {
                    float x_hat[WIDTH], scale[WIDTH];
                    load<Activation>(pipeline.own<DY_ROW>(r, k), dx);
                    load<Activation>(pipeline.own<H_ROW>(r, k), x_hat);
                    if constexpr (PER_ROW && HAS_SCALE) load<OperandValue>(pipeline.own<SCALE_ROW>(r, k), scale);
#pragma unroll
                    for (int j = 0; j < WIDTH; ++j) {
                        x_hat[j] = (x_hat[j] - statistics.mean[r]) * statistics.rstd[r];
                        if constexpr (PER_ROW) {
                            if constexpr (HAS_SCALE) dx[j] *= 1.f + columns[k].factor[j] + scale[j];
                            if constexpr (HAS_WEIGHT) dx[j] *= columns[k].weight[j];
                        } else {
                            dx[j] *= columns[k].factor[j];
                        }
                        dx[j] = (dx[j] - mean_plain - x_hat[j] * mean_along) * statistics.rstd[r];
                    }
                    if constexpr (HAS_DH) {
                        load<Activation>(pipeline.own<DH_ROW>(r, k), x_hat);
#pragma unroll
                        for (int j = 0; j < WIDTH; ++j) dx[j] += x_hat[j];
                    }
                    store<Activation>(a.dx + at, dx);
                } else {
                    load<Activation>(pipeline.own<DH_ROW>(r, k), dx);
                }
                if constexpr (READ_BRANCH) {
                    float b[WIDTH], g[WIDTH];
                    load<Activation>(pipeline.own<BRANCH_ROW>(r, k), b);
                    if constexpr (HAS_GATE && PER_ROW) {
                        load<OperandValue>(pipeline.own<GATE_ROW>(r, k), g);
#pragma unroll
                        for (int j = 0; j < WIDTH; ++j) {
                            g[j] += columns[k].gate[j];
                            if constexpr (TANH_GATE) g[j] = tanhf(g[j]);
                        }
                    }
#pragma unroll
                    for (int j = 0; j < WIDTH; ++j) {
                        if constexpr (NORM_BRANCH) b[j] *= inverse_branch;
                        const float gate = PER_ROW ? g[j] : columns[k].gate[j];
                        const float dgated = dx[j];
                        if constexpr (HAS_GATE) dx[j] *= gate;
                        if constexpr (NORM_BRANCH) {
                            along_branch[r] = fmaf(dx[j], b[j], along_branch[r]);
                            dbranch[r][k][j] = dx[j];
                        }
                        if constexpr (HAS_GATE) {
                            b[j] *= dgated;
                            if constexpr (PER_ROW && TANH_GATE) b[j] *= 1.f - gate * gate;
                            if constexpr (SUM_GATE) parts[k].dh_branch[j] += b[j];
                        }
                    }
                    if constexpr (PER_ROW && HAS_GATE && SUMS) store<OperandValue>(a.dgate + at, b);
                    if constexpr (!NORM_BRANCH) store<Activation>(a.dbranch + at, dx);
                }
                if constexpr (SUM_BRANCH && !NORM_BRANCH) {
#pragma unroll
                    for (int j = 0; j < WIDTH; ++j) parts[k].dbranch[j] += dx[j];
                }
            }
        }
        if constexpr (NORM_BRANCH) {
            sum(along_branch);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                if (r >= count) continue;
                const float inverse = rsqrtf(squares[r] * PER_CHANNEL + a.eps), mean_along = along_branch[r] * PER_CHANNEL;
#pragma unroll
                for (int k = 0; k < OWN; ++k) {
                    if (!owns(k)) continue;
                    float b[WIDTH];
                    load<Activation>(pipeline.own<BRANCH_ROW>(r, k), b);
#pragma unroll
                    for (int j = 0; j < WIDTH; ++j) {
                        b[j] = (dbranch[r][k][j] - b[j] * inverse * mean_along) * inverse;
                        if constexpr (SUM_BRANCH) parts[k].dbranch[j] += b[j];
                    }
                    store<Activation>(a.dbranch + (long long)row[r] * D + column(k), b);
                }
            }
        }
        statistics = next;
        pipeline.next();
    }
    if constexpr (SUMMED) {
        // Clusters are launched only where there is one group, and where the ring, free now, can hold a part.
        const int size = cluster_size();
        float* const shared = reinterpret_cast<float*>(ring);
        float* const to = part(a.parts, blockIdx.x / size, PER_ROW || size > 1 ? 0 : group);
        if (size > 1) __syncthreads();
#pragma unroll
        for (int k = 0; k < OWN; ++k)
            if (owns(k)) parts[k].write((size > 1 ? shared : to) + column(k));
        if (size > 1) write_cluster_sum<THREADS>(to, shared, SUM_COUNT * D);
    }
}

}  // namespace videoscale
