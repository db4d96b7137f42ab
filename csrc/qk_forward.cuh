// Forward of qk_norm_rope: y = rotation(norm(x) · weight + bias) of the rows of q and of k. Where they are alike, a block
// takes a token's q and k at once, so that its cos and sin are read once and one barrier serves both rows. Otherwise the
// first blocks walk the rows of q, the others those of k.
#include "qk_config.cuh"

namespace videoscale {

struct ForwardArguments {
    Side q, k;
    Rope rope;
    float eps;
    int q_blocks;
};

constexpr int ROWS = TOGETHER ? 2 : 1;  // of a stage
using Sum = BlockSum<THREADS, ROWS>;

// The sum of each statistic's channels; a barrier of the block unless heads are independent.
template <int STATISTICS>
__device__ __forceinline__ void sum_channels(float (&v)[STATISTICS], Sum& sum) {
    if constexpr (BY_HEAD) {
#pragma unroll
        for (int i = 0; i < STATISTICS; ++i) v[i] = head_sum(v[i]);
    } else {
        sum(v);
    }
}

// Makes of x̂ what is rotated.
__device__ __forceinline__ void affine(float (&v)[WIDTH], const Pack<Parameter, WIDTH>& weight,
                                       const Pack<Parameter, WIDTH>& bias) {
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) {
        if constexpr (ROUND) v[j] = rounded<Activation>(v[j]);
        if constexpr (HAS_WEIGHT) v[j] = __fmul_rn(v[j], to_float(weight.lane[j]));
        if constexpr (HAS_BIAS) v[j] = __fadd_rn(v[j], to_float(bias.lane[j]));
        if constexpr (ROUND_NORM) v[j] = rounded<Activation>(v[j]);
    }
}

// The vector of the thread that owns the other channels of this one's pairs; for all threads of a warp at once.
__device__ __forceinline__ void exchange(const float (&v)[WIDTH], float (&partner)[WIDTH]) {
    if constexpr (!ROUND_NORM) {
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) partner[j] = __shfl_xor_sync(0xffffffffu, v[j], DISTANCE);
        return;
    }
    union {
        Vector vector;
        unsigned words[4];
    } mine;
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) mine.vector.lane[j] = from_float<Activation>(v[j]);
#pragma unroll
    for (int i = 0; i < 4; ++i) mine.words[i] = __shfl_xor_sync(0xffffffffu, mine.words[i], DISTANCE);
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) partner[j] = to_float(mine.vector.lane[j]);
}

template <int HEADS>
__device__ __forceinline__ void forward_rows(const Side& first, const Side& second, const Rope& rope, float eps,
                                             int block, int blocks, char* stages, Barrier* full, Sum& sum) {
    using G = Geometry<HEADS>;
    constexpr int OWN = G::OWN, STATISTICS = ROWS * G::STATISTICS;
    constexpr float PER_CHANNEL = 1.f / (BY_HEAD ? HEAD_DIM : G::D);
    constexpr int LAG = ROTATED && TABLES_BY_HEAD;
    const Source sources[] = {first.x, second.x};
    Ring<HEADS, ROWS, LAG> ring(*reinterpret_cast<const Source(*)[ROWS]>(&sources), first, rope, stages, full, block,
                                blocks);
    auto side = [&](int r) -> const Side& { return r == 0 ? first : second; };
    auto of = [](int r, int k) { return BY_HEAD ? r * OWN + k : r; };  // which statistic is a vector's
    Pack<Parameter, WIDTH> weight[ROWS][OWN], bias[ROWS][OWN];
    float rstd_ahead[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int k = 0; k < OWN; ++k) {
            if (!G::owns(k)) continue;
            const int at = (BY_HEAD ? lane_of_head() : G::vector(k)) * WIDTH;
            using Parameters = Pack<Parameter, WIDTH>;
            if constexpr (HAS_WEIGHT) weight[r][k] = *reinterpret_cast<const Parameters*>(side(r).weight + at);
            if constexpr (HAS_BIAS) bias[r][k] = *reinterpret_cast<const Parameters*>(side(r).bias + at);
        }
        rstd_ahead[r] = OUTSIDE && block < first.rows ? side(r).rstd[block] : 0.f;
    }

    for (int row = block; row < first.rows; row += blocks, ring.next()) {
        float v[ROWS][OWN][WIDTH], mean[STATISTICS], rstd[STATISTICS];
#pragma unroll
        for (int i = 0; i < STATISTICS; ++i) mean[i] = rstd[i] = 0.f;
        if constexpr (OUTSIDE) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                rstd[r] = rstd_ahead[r];
                if (row + blocks < first.rows) rstd_ahead[r] = side(r).rstd[row + blocks];
            }
        }
        const bool rotated = ring.rotated_token(row) >= 0 && lane_of_head() < TURNED;
        Angles angles;
        ring.await_row();
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
            for (int k = 0; k < OWN; ++k) {
                if (!G::owns(k)) continue;
                load<Activation>(ring.vector(r, G::vector(k)), v[r][k]);
#pragma unroll
                for (int j = 0; j < WIDTH; ++j) mean[of(r, k)] += LAYER_NORM ? v[r][k][j] : 0.f;
            }
        }
        if constexpr (ROTATED && !TABLES_BY_HEAD) {
            if (rotated) ring.angles(0, angles);
        }
        if constexpr (LAYER_NORM) {
            sum_channels(mean, sum);
#pragma unroll
            for (int i = 0; i < STATISTICS; ++i) mean[i] *= PER_CHANNEL;
        }
        if constexpr (NORMED && !OUTSIDE) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
#pragma unroll
                for (int k = 0; k < OWN; ++k) {
                    if (!G::owns(k)) continue;
#pragma unroll
                    for (int j = 0; j < WIDTH; ++j) {
                        v[r][k][j] -= mean[of(r, k)];
                        rstd[of(r, k)] = fmaf(v[r][k][j], v[r][k][j], rstd[of(r, k)]);
                    }
                }
            }
            sum_channels(rstd, sum);
        }
        if constexpr (BY_HEAD || OUTSIDE || !NORMED) block_barrier();
        ring.request();
        if constexpr (SUMS_ALONE) {
            if (threadIdx.x == 0) first.of_rows[row] = rstd[0];
            continue;
        }

#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
            for (int k = 0; k < OWN; ++k) {
                float(&n)[WIDTH] = v[r][k];
                if constexpr (NORMED) {
                    const int i = of(r, k);
                    if (!OUTSIDE && (BY_HEAD || k == 0)) {
                        rstd[i] = rsqrtf(rstd[i] * PER_CHANNEL + eps);
                        if (BY_HEAD ? G::owns(k) && lane_of_head() == 0 : threadIdx.x == 0) {
                            if constexpr (LAYER_NORM) side(r).mean[statistic<HEADS>(row, k)] = mean[i];
                            side(r).rstd[statistic<HEADS>(row, k)] = rstd[i];
                        }
                    }
#pragma unroll
                    for (int j = 0; j < WIDTH; ++j) n[j] *= rstd[i];
                    affine(n, weight[r][k], bias[r][k]);
                }
                if constexpr (ROTATED) {
                    float partner[WIDTH];
                    if constexpr (SPLIT) exchange(n, partner);
                    if (rotated && G::owns(k)) {
                        if constexpr (TABLES_BY_HEAD) ring.angles(k, angles);
                        rotate<1>(angles, n, partner);
                    }
                }
                if (G::owns(k)) store<Activation>(side(r).out + (long long)row * G::D + G::vector(k) * WIDTH, n);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    qk_forward(const __grid_constant__ ForwardArguments a) {
    extern __shared__ __align__(128) char stages[];
    __shared__ Barrier full[STAGES];
    __shared__ Sum::Scratch scratch;
    Sum sum(scratch);
    const int block = blockIdx.x, q_blocks = a.q_blocks, k_blocks = gridDim.x - a.q_blocks;
    if constexpr (TOGETHER) {
        forward_rows<Q_HEADS>(a.q, a.k, a.rope, a.eps, block, gridDim.x, stages, full, sum);
    } else if constexpr (Q_HEADS == K_HEADS) {
        const Side& side = block < q_blocks ? a.q : a.k;
        forward_rows<Q_HEADS>(side, side, a.rope, a.eps, block < q_blocks ? block : block - q_blocks,
                              block < q_blocks ? q_blocks : k_blocks, stages, full, sum);
    } else if (block < q_blocks) {
        forward_rows<Q_HEADS>(a.q, a.q, a.rope, a.eps, block, q_blocks, stages, full, sum);
    } else {
        forward_rows<K_HEADS>(a.k, a.k, a.rope, a.eps, block - q_blocks, k_blocks, stages, full, sum);
    }
}

}  // namespace videoscale
