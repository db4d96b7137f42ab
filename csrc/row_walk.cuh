// The order in which a block visits its rows: a contiguous share of all rows in an order where every group is one run.
#pragma once
#include "row_config.cuh"

namespace videoscale {

struct RowOrder {
    const int* order;   // indexed: entries in the order of their group; an entry is rows_per_group rows
    const int* starts;  // indexed: (groups + 1,) first entry of each group in that order
    int rows;
    int rows_per_group;
    int groups;
};

// First position of a block's share; the shares differ by at most one row.
__device__ __forceinline__ int share_begin(int rows, int blocks, int block) {
    return block * (rows / blocks) + min(block, rows % blocks);
}

// The block whose share holds a position.
__device__ __forceinline__ int share_of(int rows, int blocks, int position) {
    const int small = rows / blocks, large_ones = rows % blocks;
    const int in_large = large_ones * (small + 1);
    return position < in_large ? position / (small + 1) : large_ones + (position - in_large) / small;
}

// First position of a group.
__device__ __forceinline__ int group_begin(const RowOrder& map, int group) {
    return (INDEXED ? map.starts[group] : group) * map.rows_per_group;
}

// A block's walk. It goes in steps of at most ROWS rows that all belong to one group.
struct Walk {
    int position, end, group, group_end;

    __device__ __forceinline__ explicit Walk(const RowOrder& map) {
        position = share_begin(map.rows, gridDim.x, blockIdx.x);
        end = share_begin(map.rows, gridDim.x, blockIdx.x + 1);
        group = 0;
        group_end = end;
        if constexpr (INDEXED) {
            for (int high = map.groups; high - group > 1;) {  // group_begin(group) <= position < group_begin(high)
                const int middle = (group + high) / 2;
                (group_begin(map, middle) <= position ? group : high) = middle;
            }
            group_end = group_begin(map, group + 1);
        } else if constexpr (!PER_ROW) {
            group = position / map.rows_per_group;
            group_end = group_begin(map, group + 1);
        }
    }
    __device__ __forceinline__ bool more() const { return position < end; }
    __device__ __forceinline__ int count() const { return min(ROWS, min(end, group_end) - position); }
    __device__ __forceinline__ void advance(const RowOrder& map) {
        position += count();
        if constexpr (!PER_ROW)
            while (position == group_end && position < end) group_end = group_begin(map, ++group + 1);
    }
    // The row of memory that is i positions ahead.
    __device__ __forceinline__ int row(const RowOrder& map, int i) const {
        const int at = position + i;
        if constexpr (INDEXED) return map.order[at / map.rows_per_group] * map.rows_per_group + at % map.rows_per_group;
        return at;
    }
};

}  // namespace videoscale
