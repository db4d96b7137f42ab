// Backward of qk_norm_rope in one pass over dy and x: dx, and this block's part of the sums for weight and bias, and of dx
// for the bias of the projection that x comes from, which stay in registers while the block walks its rows. With SUMS_ONLY,
// the rows' sums of dx̂ · x̂ alone.
#include "qk_config.cuh"

namespace videoscale {

struct BackwardArguments {
    Side q, k;
    Rope rope;
    int q_blocks;
};

enum Input { DY, X };
constexpr int SUMS = LAYER_NORM ? 2 : 1;  // of a row: Σ dx̂ · x̂, and for LayerNorm Σ dx̂
using Sum = BlockSum<THREADS, SUMS>;

// Part of a block, or with statistics per head of each of its threads that own the same channels.
constexpr int PARAMETERS = HAS_WEIGHT + HAS_BIAS;

template <int HEADS>
__device__ __forceinline__ void backward_rows(const Side& side, const Rope& rope, int block, int blocks, char* stages,
                                              Barrier* full, Sum& sum) {
    using G = Geometry<HEADS>;
    constexpr int OWN = G::OWN, STATISTICS = G::STATISTICS, SUMMED = BY_HEAD ? 1 : OWN;
    constexpr int INPUTS = NORMED ? 2 : 1;
    constexpr float PER_CHANNEL = 1.f / (BY_HEAD ? HEAD_DIM : G::D);
    const Source sources[] = {side.dy, side.x};
    constexpr int LAG = 1;  // x is read again after the barrier.
    Ring<HEADS, INPUTS, LAG> ring(*reinterpret_cast<const Source(*)[INPUTS]>(&sources), side, rope, stages, full, block,
                             blocks);
    Pack<Parameter, WIDTH> weight[SUMMED];
    float weight_sum[SUMMED][WIDTH], bias_sum[SUMMED][WIDTH], dx_sum[OWN][WIDTH];
#pragma unroll
    for (int k = 0; k < OWN; ++k)
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) dx_sum[k][j] = 0.f;
#pragma unroll
    for (int k = 0; k < SUMMED; ++k) {
        const int at = (BY_HEAD ? lane_of_head() : G::vector(k)) * WIDTH;
        if constexpr (HAS_WEIGHT) {
            if (G::owns(k)) weight[k] = *reinterpret_cast<const Pack<Parameter, WIDTH>*>(side.weight + at);
        }
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) weight_sum[k][j] = bias_sum[k][j] = 0.f;
    }

    // Statistics of a row come while the one before it is worked on.
    float mean_ahead[STATISTICS], rstd_ahead[STATISTICS], along_ahead = 0.f;
    auto look_ahead = [&](int row) {
        if (!NORMED || row >= side.rows) return;
#pragma unroll
        for (int i = 0; i < STATISTICS; ++i) {
            if (BY_HEAD && !G::owns(i)) continue;
            if constexpr (LAYER_NORM) mean_ahead[i] = __ldg(side.mean + statistic<HEADS>(row, i));
            rstd_ahead[i] = __ldg(side.rstd + statistic<HEADS>(row, i));
        }
        if constexpr (OUTSIDE) along_ahead = __ldg(side.of_rows + row);
    };
    look_ahead(block);

    for (int row = block; row < side.rows; row += blocks, ring.next()) {
        float mean[STATISTICS], rstd[STATISTICS];
#pragma unroll
        for (int i = 0; i < STATISTICS; ++i) {
            mean[i] = LAYER_NORM ? mean_ahead[i] : 0.f;
            rstd[i] = rstd_ahead[i];
        }
        const float along_outside = along_ahead;
        look_ahead(row + blocks);
        ring.await_row();

        const bool rotated = ring.rotated_token(row) >= 0 && lane_of_head() < TURNED;
        Angles angles;
        if constexpr (ROTATED && !TABLES_BY_HEAD) {
            if (rotated) ring.angles(0, angles);
        }
        float g[OWN][WIDTH], totals[STATISTICS][SUMS];
#pragma unroll
        for (int i = 0; i < STATISTICS; ++i)
#pragma unroll
            for (int s = 0; s < SUMS; ++s) totals[i][s] = 0.f;
#pragma unroll
        for (int k = 0; k < OWN; ++k) {
            if (!G::owns(k)) continue;
            load<Activation>(ring.vector(DY, G::vector(k)), g[k]);
            if constexpr (ROTATED) {
                if (rotated) {
                    float partner[WIDTH];
                    if constexpr (SPLIT) load<Activation>(ring.vector(DY, G::vector(k) ^ DISTANCE), partner);
                    if constexpr (TABLES_BY_HEAD) ring.angles(k, angles);
                    rotate<-1>(angles, g[k], partner);
                }
            }
            if constexpr (NORMED) {
                const int of = BY_HEAD ? k : 0, to = BY_HEAD ? 0 : k;
                float x[WIDTH];
                load<Activation>(ring.vector(X, G::vector(k)), x);
#pragma unroll
                for (int j = 0; j < WIDTH; ++j) {
                    const float x_hat = (x[j] - mean[of]) * rstd[of];
                    weight_sum[to][j] = fmaf(g[k][j], x_hat, weight_sum[to][j]);
                    if constexpr (HAS_BIAS) bias_sum[to][j] += g[k][j];
                    if constexpr (HAS_WEIGHT) g[k][j] *= to_float(weight[to].lane[j]);
                    totals[of][0] = fmaf(g[k][j], x_hat, totals[of][0]);
                    if constexpr (LAYER_NORM) totals[of][1] += g[k][j];
                }
            }
        }
        if constexpr (NORMED && !OUTSIDE) {
            if constexpr (BY_HEAD) {
#pragma unroll
                for (int i = 0; i < STATISTICS; ++i)
#pragma unroll
                    for (int s = 0; s < SUMS; ++s) totals[i][s] = head_sum(totals[i][s]);
            } else {
                sum(totals[0]);
            }
        }
        if constexpr (BY_HEAD || OUTSIDE || !NORMED) block_barrier();
        ring.request();
        if constexpr (SUMS_ALONE) {
            if (threadIdx.x == 0) side.of_rows[row] = totals[0][0];
            continue;
        }
#pragma unroll
        for (int k = 0; k < OWN; ++k) {
            if (!G::owns(k)) continue;
            if constexpr (NORMED) {
                const int of = BY_HEAD ? k : 0;
                const float along = OUTSIDE ? along_outside : totals[of][0] * PER_CHANNEL;
                const float along_one = LAYER_NORM ? totals[of][SUMS - 1] * PER_CHANNEL : 0.f;
                float x[WIDTH];
                load<Activation>(ring.vector(X, G::vector(k)), x);
#pragma unroll
                for (int j = 0; j < WIDTH; ++j) {
                    const float x_hat = (x[j] - mean[of]) * rstd[of];
                    g[k][j] = (g[k][j] - x_hat * along - along_one) * rstd[of];
                }
            }
            if constexpr (SUM_DX) {
#pragma unroll
                for (int j = 0; j < WIDTH; ++j) dx_sum[k][j] += g[k][j];
            }
            store<Activation>(side.out + (long long)row * G::D + G::vector(k) * WIDTH, g[k]);
        }
    }

    if constexpr (SUM_DX && !SUMS_ALONE) {
#pragma unroll
        for (int k = 0; k < OWN; ++k) {
            if (!G::owns(k)) continue;
            float* const to = side.dx_parts + (long long)block * G::D + G::vector(k) * WIDTH;
#pragma unroll
            for (int j = 0; j < WIDTH; j += 4)
                *reinterpret_cast<float4*>(to + j) =
                    make_float4(dx_sum[k][j], dx_sum[k][j + 1], dx_sum[k][j + 2], dx_sum[k][j + 3]);
        }
    }

    if constexpr (PARAMETERS > 0 && !SUMS_ALONE) {
        constexpr int COLUMNS = BY_HEAD ? HEAD_DIM : G::D;
        const long long part = BY_HEAD ? (long long)block * (THREADS / LANES) + threadIdx.x / LANES : block;
#pragma unroll
        for (int k = 0; k < SUMMED; ++k) {
            if (!BY_HEAD && !G::owns(k)) continue;
            const int at = (BY_HEAD ? lane_of_head() : G::vector(k)) * WIDTH;
            float* const to = side.parts + part * PARAMETERS * COLUMNS + at;
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                to[j] = weight_sum[k][j];
                if constexpr (HAS_BIAS) to[COLUMNS + j] = bias_sum[k][j];
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    qk_backward(const __grid_constant__ BackwardArguments a) {
    extern __shared__ __align__(128) char stages[];
    __shared__ Barrier full[STAGES];
    __shared__ Sum::Scratch scratch;
    Sum sum(scratch);
    const int block = blockIdx.x, q_blocks = a.q_blocks, k_blocks = gridDim.x - a.q_blocks;
    if constexpr (Q_HEADS == K_HEADS) {
        const bool of_q = block < q_blocks;
        backward_rows<Q_HEADS>(of_q ? a.q : a.k, a.rope, of_q ? block : block - q_blocks, of_q ? q_blocks : k_blocks,
                               stages, full, sum);
    } else if (block < q_blocks) {
        backward_rows<Q_HEADS>(a.q, a.rope, block, q_blocks, stages, full, sum);
    } else {
        backward_rows<K_HEADS>(a.k, a.rope, block - q_blocks, k_blocks, stages, full, sum);
    }
}

}  // namespace videoscale
