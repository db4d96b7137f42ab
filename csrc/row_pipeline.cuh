// Rows on their way from global memory through the stages of a ring in shared memory, so that the loads in flight are
// held by shared memory and not by registers.
#pragma once
#include "async_copy.cuh"
#include "row_walk.cuh"

namespace videoscale {

// Rows of one input.
struct Source {
    const void* rows;
    long long stride;  // in bytes
};

// ROW_BYTES: of each input, 0 for one that the variant lacks.
// LAG: how many stages are kept after the one that is read: 0 where a stage is released right after the first barrier
// that follows its last use, 1 where it is used until the end of its turn and released after the next turn's barrier.
template <int LAG, int... ROW_BYTES>
struct RowPipeline {
    static constexpr int INPUTS = sizeof...(ROW_BYTES);
    static constexpr int BYTES_PER_ROW = (ROW_BYTES + ...);
    static_assert(STAGES > LAG, "the ring needs a stage that is on its way");

    struct Shared {
#if __CUDA_ARCH__ >= 900
        Barrier full[STAGES];
#endif
    };

    const RowOrder& map;
    const Source (&sources)[INPUTS];
    Shared& shared;
    char* ring;
    Walk requested;
    int fill = 0, drain = 0;
    unsigned parity = 0;

    __device__ __forceinline__ RowPipeline(const RowOrder& map, const Source (&sources)[INPUTS], Shared& shared, char* ring)
        : map(map), sources(sources), shared(shared), ring(ring), requested(map) {
#if __CUDA_ARCH__ >= 900
        if constexpr (BULK) {
            if (threadIdx.x == 0) {
                for (int s = 0; s < STAGES; ++s) initialise(&shared.full[s]);
                publish_barriers();
            }
            __syncthreads();
        }
#endif
        for (int s = 0; s < STAGES - LAG; ++s) request();
    }

    // Starts the copies of the next stage. The whole block must have finished with the stage that it overwrites.
    __device__ __forceinline__ void request() {
        if (requested.more()) {
            if constexpr (BULK) {
                if (threadIdx.x == 0) request_bulk();
            } else {
#pragma unroll
                for (int r = 0; r < ROWS; ++r)
                    if (r < requested.count()) request_own<0>(r, requested.row(map, r));
            }
            requested.advance(map);
        }
        if constexpr (!BULK) commit_copies();
        fill = fill + 1 == STAGES ? 0 : fill + 1;
    }

    // Until the oldest stage is there.
    __device__ __forceinline__ void await_stage() const {
#if __CUDA_ARCH__ >= 900
        if constexpr (BULK) await(&shared.full[drain], parity);
#endif
        if constexpr (!BULK) await_copies<STAGES - LAG - 1>();
    }

    // On to the next stage.
    __device__ __forceinline__ void next() {
        drain = drain + 1 == STAGES ? 0 : drain + 1;
        parity ^= drain == 0;
    }

    // This thread's k-th vector of row r of an input in the oldest stage.
    template <int INPUT>
    __device__ __forceinline__ const void* own(int r, int k) const {
        return place<INPUT>(drain, r) + (k * THREADS + threadIdx.x) * (BYTES<INPUT> / VECTORS);
    }

  private:
    __device__ static constexpr int row_bytes(int input) {
        const int bytes[] = {ROW_BYTES...};
        return bytes[input];
    }
    __device__ static constexpr int offset(int input) {
        return input == 0 ? 0 : offset(input - 1) + ROWS * row_bytes(input - 1);
    }
    // As constants by type: a loop over inputs would look them up at run time.
    template <int INPUT>
    static constexpr int BYTES = row_bytes(INPUT);
    template <int INPUT>
    static constexpr int OFFSET = offset(INPUT);

    template <int INPUT>
    __device__ __forceinline__ char* place(int stage, int r) const {
        return ring + stage * (ROWS * BYTES_PER_ROW) + OFFSET<INPUT> + r * BYTES<INPUT>;
    }
    template <int INPUT>
    __device__ __forceinline__ const char* origin(int row) const {
        return static_cast<const char*>(sources[INPUT].rows) + row * sources[INPUT].stride;
    }

    __device__ __forceinline__ void request_bulk() {
#if __CUDA_ARCH__ >= 900
        const int count = requested.count();
        expect_bytes(&shared.full[fill], count * BYTES_PER_ROW);
        for (int r = 0; r < count; ++r) request_whole<0>(r, requested.row(map, r));
#endif
    }

    template <int INPUT>
    __device__ __forceinline__ void request_whole(int r, int row) {
#if __CUDA_ARCH__ >= 900
        if constexpr (INPUT < INPUTS) {
            if constexpr (BYTES<INPUT> > 0)
                copy_bulk(place<INPUT>(fill, r), origin<INPUT>(row), BYTES<INPUT>, &shared.full[fill]);
            request_whole<INPUT + 1>(r, row);
        }
#endif
    }

    template <int INPUT>
    __device__ __forceinline__ void request_own(int r, int row) {
        if constexpr (INPUT < INPUTS) {
            if constexpr (BYTES<INPUT> > 0) {
                constexpr int OF_VECTOR = BYTES<INPUT> / VECTORS, STEP = OF_VECTOR < 16 ? OF_VECTOR : 16;
#pragma unroll
                for (int k = 0; k < OWN; ++k)
#pragma unroll
                    for (int b = 0; b < OF_VECTOR; b += STEP) {
                        const int at = (k * THREADS + threadIdx.x) * OF_VECTOR + b;
                        if (owns(k)) copy_async<STEP>(place<INPUT>(fill, r) + at, origin<INPUT>(row) + at);
                    }
            }
            request_own<INPUT + 1>(r, row);
        }
    }
};

}  // namespace videoscale
