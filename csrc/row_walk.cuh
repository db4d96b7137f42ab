// The order in which a block visits its rows: all rows lie in an order where every group is contiguous, blocks take runs
// of them in turn. Either a run is a block's whole share, so that a block meets few groups; or it is as short as a stage,
// so that all blocks together read and write one moving window of memory.
#pragma once
#include "row_config.cuh"
#ifndef __CUDACC_RTC__  // NVRTC has assert built in
#include <cassert>
#endif

namespace videoscale {

struct RowOrder {
    const int* order;   // indexed: entries in the order of their group; an entry is rows_per_group rows
    const int* starts;  // indexed: (groups + 1,) first entry of each group in that order
    int rows;
    int rows_per_group;
    int groups;
    int run;  // rows; blocks · run covers all rows, or several turns do; only the last cluster has blocks without rows
};

// First position of a group.
__device__ __forceinline__ int group_begin(const RowOrder& map, int group) {
    return (INDEXED ? map.starts[group] : group) * map.rows_per_group;
}

// Stops the device where an entry names a group that there is not: it lies before the first group or after the last.
__device__ __forceinline__ void assert_groups(const RowOrder& map) {
    if constexpr (INDEXED)
        assert(group_begin(map, 0) == 0 && group_begin(map, map.groups) == map.rows && "index out of range");
}

// A block's walk: its runs in turn. It goes in steps of at most ROWS rows that all belong to one group.
struct Walk {
    int position, end, group, group_end;  // end: of the run

    __device__ __forceinline__ explicit Walk(const RowOrder& map) {
        position = blockIdx.x * map.run;
        end = end_of_run(map);
        group = 0;
        group_end = map.rows;
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
        if (position == end) {
            const int of_others = (gridDim.x - 1) * map.run;
            position = map.rows - position > of_others ? position + of_others : map.rows;
            end = end_of_run(map);
        }
        if constexpr (!PER_ROW)
            while (position >= group_end && position < end) group_end = group_begin(map, ++group + 1);
    }
    __device__ __forceinline__ int end_of_run(const RowOrder& map) const {
        return map.rows - position > map.run ? position + map.run : map.rows;
    }
    // The row of memory that is i positions ahead.
    __device__ __forceinline__ int row(const RowOrder& map, int i) const {
        const int at = position + i;
        if constexpr (INDEXED) return map.order[at / map.rows_per_group] * map.rows_per_group + at % map.rows_per_group;
        return at;
    }
};

}  // namespace videoscale
