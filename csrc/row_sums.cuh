// Sums over rows that become the gradients of gate, scale, shift, weight and bias, and of the bias of the Linear that the
// branch comes from: which there are, and where a block leaves its part of them. No atomics: parts are added in a fixed
// order by rows_finalize.cuh.
//
// With y = n · (1 + scale) + shift and n = x̂ · weight + bias, everything of one group follows from Σ dy · x̂ and Σ dy.
// Where every row has its own scale, weight and bias need sums of their own. The branch's bias is the same for all rows,
// its sum is kept by group like the others.
#pragma once
#include "row_walk.cuh"

namespace videoscale {

constexpr bool AFFINE = HAS_WEIGHT || HAS_BIAS;
constexpr bool SUM_OPERANDS = SUMS && (!PER_ROW || TABLES || AFFINE);
constexpr bool SUM_NORM = SUM_OPERANDS && NORMED, SUM_AFFINE = SUM_NORM && PER_ROW && AFFINE;
constexpr bool SUM_GATE = SUM_OPERANDS && HAS_GATE, SUM_BRANCH = BRANCH_SUM;

// Places of the sums in a part; D floats each.
constexpr int DY_X_HAT = 0, DY = 1, DN_X_HAT = 2, DN = 3;
constexpr int DH_BRANCH = (SUM_NORM ? 2 : 0) + (SUM_AFFINE ? 2 : 0);
constexpr int DBRANCH = DH_BRANCH + (SUM_GATE ? 1 : 0);
constexpr int SUM_COUNT = DBRANCH + (SUM_BRANCH ? 1 : 0);
constexpr bool SUMMED = SUM_COUNT > 0;

// A block's part of a group. Either there is one group, or a block's run is all it has: blocks and groups both ascend
// along the walk then, so that block + group is unique.
__device__ __forceinline__ float* part(float* parts, int block, int group) {
    return parts + (long long)(block + group) * (SUM_COUNT * D);
}

}  // namespace videoscale
