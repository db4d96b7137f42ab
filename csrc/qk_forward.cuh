// Forward of qk_norm_rope: y = rotation(norm(x) · weight + bias) of the rows of q and of k. The first blocks walk those
// of q, the others those of k, side by side, so that a token's cos and sin come from the L2 cache the second time.
#include "qk_config.cuh"

namespace videoscale {

struct ForwardArguments {
    Side q, k;
    Rope rope;
    float eps;
    int q_blocks;
};

using Sum = BlockSum<THREADS, 1>;

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
        v[j] = rounded<Activation>(v[j]);
    }
}

// The vector of the thread that owns the other channels of this one's pairs; for all threads of a warp at once.
__device__ __forceinline__ void exchange(const float (&v)[WIDTH], float (&partner)[WIDTH]) {
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
__device__ __forceinline__ void forward_rows(const Side& side, const Rope& rope, float eps, int block, int blocks,
                                             char* stages, Barrier* full, Sum& sum) {
    using G = Geometry<HEADS>;
    constexpr int OWN = G::OWN, STATISTICS = G::STATISTICS;
    constexpr float PER_CHANNEL = 1.f / (BY_HEAD ? HEAD_DIM : G::D);
    const Source sources[] = {side.x};
    Ring<HEADS, 1> ring(sources, side, rope, stages, full, block, blocks);
    Pack<Parameter, WIDTH> weight[OWN], bias[OWN];
#pragma unroll
    for (int k = 0; k < OWN; ++k) {
        if (!G::owns(k)) continue;
        const int at = (BY_HEAD ? lane_of_head() : G::vector(k)) * WIDTH;
        if constexpr (HAS_WEIGHT) weight[k] = *reinterpret_cast<const Pack<Parameter, WIDTH>*>(side.weight + at);
        if constexpr (HAS_BIAS) bias[k] = *reinterpret_cast<const Pack<Parameter, WIDTH>*>(side.bias + at);
    }
    float rstd_ahead = OUTSIDE && block < side.rows ? side.rstd[block] : 0.f;

    for (int row = block; row < side.rows; row += blocks, ring.next()) {
        float mean[STATISTICS], rstd[STATISTICS];
        if constexpr (OUTSIDE) {
            rstd[0] = rstd_ahead;
            if (row + blocks < side.rows) rstd_ahead = side.rstd[row + blocks];
        }
        ring.await_row();
        float v[OWN][WIDTH];
#pragma unroll
        for (int i = 0; i < STATISTICS; ++i) mean[i] = 0.f;
#pragma unroll
        for (int k = 0; k < OWN; ++k) {
            if (!G::owns(k)) continue;
            load<Activation>(ring.vector(0, G::vector(k)), v[k]);
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) mean[BY_HEAD ? k : 0] += LAYER_NORM ? v[k][j] : 0.f;
        }
        if constexpr (LAYER_NORM) {
            sum_channels(mean, sum);
#pragma unroll
            for (int i = 0; i < STATISTICS; ++i) mean[i] *= PER_CHANNEL;
        }
        if constexpr (NORMED && !OUTSIDE) {
#pragma unroll
            for (int i = 0; i < STATISTICS; ++i) rstd[i] = 0.f;
#pragma unroll
            for (int k = 0; k < OWN; ++k) {
                if (!G::owns(k)) continue;
#pragma unroll
                for (int j = 0; j < WIDTH; ++j) {
                    v[k][j] -= mean[BY_HEAD ? k : 0];
                    rstd[BY_HEAD ? k : 0] = fmaf(v[k][j], v[k][j], rstd[BY_HEAD ? k : 0]);
                }
            }
            sum_channels(rstd, sum);
            if constexpr (SUMS_ALONE) {
                if (threadIdx.x == 0) side.of_rows[row] = rstd[0];
            } else {
#pragma unroll
                for (int i = 0; i < STATISTICS; ++i) {
                    rstd[i] = rsqrtf(rstd[i] * PER_CHANNEL + eps);
                    if (BY_HEAD ? G::owns(i) && lane_of_head() == 0 : threadIdx.x == 0) {
                        if constexpr (LAYER_NORM) side.mean[statistic<HEADS>(row, i)] = mean[i];
                        side.rstd[statistic<HEADS>(row, i)] = rstd[i];
                    }
                }
            }
        }
        if constexpr (BY_HEAD || OUTSIDE || !NORMED) block_barrier();
        ring.request();
        if constexpr (SUMS_ALONE) continue;

        const bool rotated = ring.rotated_token(row) >= 0;
#pragma unroll
        for (int k = 0; k < OWN; ++k) {
            if constexpr (NORMED) {
#pragma unroll
                for (int j = 0; j < WIDTH; ++j) v[k][j] *= rstd[BY_HEAD ? k : 0];
                affine(v[k], weight[k], bias[k]);
            }
            if constexpr (ROTATED) {
                float partner[WIDTH];
                if constexpr (SPLIT) exchange(v[k], partner);
                if (rotated && lane_of_head() < TURNED && G::owns(k)) rotate<1>(ring, k, v[k], partner);
            }
            if (G::owns(k)) store<Activation>(side.out + (long long)row * G::D + G::vector(k) * WIDTH, v[k]);
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
    if constexpr (Q_HEADS == K_HEADS) {
        const bool of_q = block < q_blocks;
        forward_rows<Q_HEADS>(of_q ? a.q : a.k, a.rope, a.eps, of_q ? block : block - q_blocks,
                              of_q ? q_blocks : k_blocks, stages, full, sum);
    } else if (block < q_blocks) {
        forward_rows<Q_HEADS>(a.q, a.rope, a.eps, block, q_blocks, stages, full, sum);
    } else {
        forward_rows<K_HEADS>(a.k, a.rope, a.eps, block - q_blocks, k_blocks, stages, full, sum);
    }
}

}  // namespace videoscale
