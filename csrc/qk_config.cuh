// Constants of one variant of qk_norm_rope and of its tuning, all macros from kernels/cuda/qk_norm_rope.py; and the
// ring through which tokens come.
//
// A thread owns the 16-byte vectors threadIdx.x, threadIdx.x + THREADS, … of a row of HEADS heads. The lanes of a head
// are neighbours in one warp, and the same channels of a head belong to a thread in all its vectors.
#pragma once
#include "async_copy.cuh"
#include "block_sum.cuh"
#include "vectors.cuh"

namespace videoscale {

using Activation = ACTIVATION;
using Parameter = PARAMETER;
constexpr bool LAYER_NORM = NORM == 1, RMS_NORM = NORM == 2, NORMED = NORM != 0;
constexpr bool BY_HEAD = PER_HEAD, ROUND = ROUND_X_HAT, ROUND_NORM = ROUND_NORMED, HAS_WEIGHT = WEIGHT, HAS_BIAS = BIAS;
constexpr bool OUTSIDE = GIVEN;  // rstd in forward, the rows' means in backward
constexpr bool SPLIT = HALF, ROTATED = PAIRS > 0, TABLES_BY_HEAD = TABLE_HEADS;
constexpr bool TOGETHER = Q_HEADS == K_HEADS && ROTATED;  // Forward takes a token's q and k at once.
constexpr bool SUM_DX = DX_SUMS;       // backward: over all rows
constexpr bool SUMS_ALONE = SUMS_ONLY;  // forward: of squares; backward: of dx̂ · x̂
constexpr int THREADS = BLOCK_THREADS, STAGES = PIPELINE_STAGES, BLOCKS_PER_SM = RESIDENT_BLOCKS;

constexpr int WIDTH = 16 / sizeof(Activation);
constexpr int LANES = HEAD_DIM / WIDTH;              // vectors of a head
constexpr int TURNED = 2 * PAIRS / WIDTH;            // of these, how many are rotated
constexpr int DISTANCE = PAIRS / WIDTH;              // half: vectors between the two channels of a pair
static_assert(HEAD_DIM % WIDTH == 0 && LANES <= 32 && (LANES & (LANES - 1)) == 0, "a head's lanes must fit in a warp");
static_assert(PAIRS % 4 == 0 && 2 * PAIRS % WIDTH == 0, "a vector is rotated as a whole");
static_assert(!SPLIT || !ROTATED || (PAIRS % WIDTH == 0 && (DISTANCE & (DISTANCE - 1)) == 0), "partners are found by xor");
static_assert(STAGES >= 2, "the ring needs a stage that is on its way");

using Vector = Pack<Activation, WIDTH>;

// Rows of one input; the stride is in bytes.
struct Source {
    const char* rows;
    long long stride;
};

// q or k.
struct Side {
    Source x, dy;
    Activation* out;  // y or dx, contiguous
    const Parameter *weight, *bias;
    float *mean, *rstd;
    float* of_rows;  // sums that leave, or means that come from outside
    float* parts;    // backward: sums over this block's rows
    float* dx_parts;  // backward: likewise of dx, (blocks, D)
    int rows, tokens;
};

// cos and sin of (samples or 1, length, heads or 1, PAIRS), PAIR_STRIDE floats from pair to pair. Rows begin on 16 bytes,
// with COS_PHASE and SIN_PHASE floats before the first pair's.
struct Rope {
    const float *cos, *sin;
    long long cos_sample, cos_token, sin_sample, sin_token;  // strides in floats
    int start, length;
};

template <int HEADS>
struct Geometry {
    static constexpr int D = HEADS * HEAD_DIM, VECTORS = D / WIDTH;
    static constexpr int OWN = (VECTORS + THREADS - 1) / THREADS;
    static constexpr int STATISTICS = BY_HEAD ? OWN : 1;  // that a thread needs of a row
    static constexpr int TABLE = ROTATED ? (TABLES_BY_HEAD ? HEADS : 1) * PAIRS * PAIR_STRIDE : 0;

    __device__ static __forceinline__ bool owns(int k) {
        return VECTORS % THREADS == 0 || k + 1 < OWN || k * THREADS + threadIdx.x < VECTORS;
    }
    __device__ static __forceinline__ int vector(int k) { return k * THREADS + threadIdx.x; }
    __device__ static __forceinline__ int head(int k) { return vector(k) / LANES; }
};

__device__ __forceinline__ int lane_of_head() { return threadIdx.x % LANES; }

// Where of a statistic this thread's k-th vector is; owned vectors only.
template <int HEADS>
__device__ __forceinline__ long long statistic(int row, int k) {
    return BY_HEAD ? (long long)row * HEADS + Geometry<HEADS>::head(k) : row;
}

__device__ __forceinline__ void block_barrier() {
    if constexpr (THREADS == 32)
        __syncwarp();
    else
        __syncthreads();
}

// Sum over the lanes of a head, in each of them.
__device__ __forceinline__ float head_sum(float v) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
    return v;
}

// cos and sin of the pairs of one of a thread's vectors.
struct Angles {
    static constexpr int PER_VECTOR = SPLIT ? WIDTH : WIDTH / 2;
    float cos[PER_VECTOR], sin[PER_VECTOR];
};

// The rows block, block + blocks, … of INPUTS inputs, each with its token's cos and sin, through STAGES stages.
// LAG: 0 where a stage is released at the first barrier after it was read, 1 where it is used until the end of its turn
// and released at the next turn's barrier.
template <int HEADS, int INPUTS, int LAG>
struct Ring {
    using G = Geometry<HEADS>;
    static constexpr int ROW = G::D * sizeof(Activation), TABLE = G::TABLE * sizeof(float);
    static constexpr int STAGE = INPUTS * ROW + 2 * TABLE;

    const Source (&sources)[INPUTS];
    const Side& side;
    const Rope& rope;
    char* const stages;
    Barrier* const full;
    const int step;
    int requested, fill = 0, drain = 0;
    unsigned parity = 0;

    __device__ __forceinline__ Ring(const Source (&sources)[INPUTS], const Side& side, const Rope& rope, char* stages,
                                    Barrier* full, int block, int blocks)
        : sources(sources), side(side), rope(rope), stages(stages), full(full), step(blocks), requested(block) {
        if (threadIdx.x == 0) {
            for (int s = 0; s < STAGES; ++s) initialise(&full[s]);
            publish_barriers();
        }
        __syncthreads();
        for (int s = 0; s < STAGES - LAG; ++s) request();
    }

    // The token of a row among the rotated ones, or -1.
    __device__ __forceinline__ int rotated_token(int row) const {
        if constexpr (!ROTATED) return -1;
        const int token = row % side.tokens - rope.start;
        return token >= 0 && token < rope.length ? token : -1;
    }

    // Starts the copies of the next row into the stage that is released. Every thread must have passed a barrier since it
    // read that.
    __device__ __forceinline__ void request() {
        if (threadIdx.x == 0 && requested < side.rows) {
            const int token = rotated_token(requested);
            char* const to = stages + fill * STAGE;
            expect_bytes(&full[fill], INPUTS * ROW + (token >= 0 ? 2 * TABLE : 0));
#pragma unroll
            for (int i = 0; i < INPUTS; ++i)
                copy_bulk(to + i * ROW, sources[i].rows + requested * sources[i].stride, ROW, &full[fill]);
            if constexpr (ROTATED) {
                if (token >= 0) {
                    const int sample = requested / side.tokens;
                    const float* const cos = rope.cos + sample * rope.cos_sample + token * rope.cos_token;
                    const float* const sin = rope.sin + sample * rope.sin_sample + token * rope.sin_token;
                    copy_bulk(to + INPUTS * ROW, cos, TABLE, &full[fill]);
                    copy_bulk(to + INPUTS * ROW + TABLE, sin, TABLE, &full[fill]);
                }
            }
        }
        requested += step;
        fill = fill + 1 == STAGES ? 0 : fill + 1;
    }

    __device__ __forceinline__ void await_row() const { await(&full[drain], parity); }
    __device__ __forceinline__ void next() {
        drain = drain + 1 == STAGES ? 0 : drain + 1;
        parity ^= drain == 0;
    }

    // A vector of the current row.
    __device__ __forceinline__ const char* vector(int input, int index) const {
        return stages + drain * STAGE + input * ROW + index * 16;
    }

    // Those of this thread's k-th vector, which are those of all its vectors unless the tables differ by head. For lanes
    // below TURNED only.
    __device__ __forceinline__ void angles(int k, Angles& to) const {
        constexpr int N = Angles::PER_VECTOR;
        const int lane = SPLIT ? lane_of_head() % (DISTANCE > 0 ? DISTANCE : 1) : lane_of_head();
        const int at = ((TABLES_BY_HEAD ? G::head(k) * PAIRS : 0) + lane * N) * PAIR_STRIDE;
        const char* const table = stages + drain * STAGE + INPUTS * ROW + at * sizeof(float);
        float cos[N * PAIR_STRIDE], sin[N * PAIR_STRIDE];
        load<float>(table, cos);
        load<float>(table + TABLE, sin);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            to.cos[j] = cos[j * PAIR_STRIDE + COS_PHASE];
            to.sin[j] = sin[j * PAIR_STRIDE + SIN_PHASE];
        }
    }
};

// Turns two channels: products and sum are rounded one by one, as eager code does.
__device__ __forceinline__ void turn(float a, float b, float cos, float sin, float& to_a, float& to_b) {
    to_a = __fsub_rn(__fmul_rn(a, cos), __fmul_rn(b, sin));
    to_b = __fadd_rn(__fmul_rn(a, sin), __fmul_rn(b, cos));
}

// Rotates one of a thread's vectors; half: partner is the vector of the other channels of its pairs. SIGN -1 rotates back.
template <int SIGN>
__device__ __forceinline__ void rotate(const Angles& by, float (&v)[WIDTH], const float (&partner)[WIDTH]) {
    if constexpr (SPLIT) {
        const bool first = lane_of_head() < DISTANCE;
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            float a, b;
            turn(first ? v[j] : partner[j], first ? partner[j] : v[j], by.cos[j], SIGN * by.sin[j], a, b);
            v[j] = first ? a : b;
        }
    } else {
#pragma unroll
        for (int j = 0; j < WIDTH / 2; ++j)
            turn(v[2 * j], v[2 * j + 1], by.cos[j], SIGN * by.sin[j], v[2 * j], v[2 * j + 1]);
    }
}

}  // namespace videoscale
