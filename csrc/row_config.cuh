// Constants of one variant of a row operation, and of its tuning. All come as macros from kernels/cuda/row_kernels.py.
#pragma once
#include "vectors.cuh"

namespace videoscale {

// Variant.
using Activation = ACTIVATION;  // of x, branch, h, y and their gradients
using OperandValue = MODULATION_TYPE;  // of gate, scale and shift
using OperandTable = TABLE_TYPE;       // of their tables
using Affine = AFFINE_TYPE;            // of weight and bias
constexpr int D = CHANNELS;
constexpr float PER_CHANNEL = 1.f / D;
constexpr bool LAYER_NORM = NORM == 1, RMS_NORM = NORM == 2, NORMED = NORM != 0;
constexpr bool HAS_RESIDUAL = RESIDUAL, HAS_GATE = GATE != 0, TANH_GATE = GATE == 2, NORM_BRANCH = BRANCH_NORM;
constexpr bool HAS_SCALE = SCALE, HAS_SHIFT = SHIFT, HAS_WEIGHT = WEIGHT, HAS_BIAS = BIAS;
constexpr bool EAGER = EAGER_ROUNDING;
constexpr bool PER_ROW = PER_ROW_OPERANDS;  // every row has an operand row of its own
constexpr bool INDEXED = INDEX;

// Tuning.
constexpr int THREADS = BLOCK_THREADS;
constexpr int STAGES = PIPELINE_STAGES;
constexpr int ROWS = STAGE_ROWS;  // rows reduced together
constexpr int BLOCKS_PER_SM = RESIDENT_BLOCKS;
constexpr bool BULK = BULK_COPIES;

// A thread owns the vectors threadIdx.x, threadIdx.x + THREADS, … of every row.
constexpr int WIDTH = 16 / sizeof(Activation);
constexpr int VECTORS = D / WIDTH;
constexpr int OWN = (VECTORS + THREADS - 1) / THREADS;
static_assert(D % 8 == 0, "D must be a multiple of 8");
static_assert(THREADS % 32 == 0, "threads come in warps");

__device__ __forceinline__ bool owns(int k) {
    return VECTORS % THREADS == 0 || k + 1 < OWN || k * THREADS + threadIdx.x < VECTORS;
}
__device__ __forceinline__ int column(int k) { return (k * THREADS + threadIdx.x) * WIDTH; }

// An operand: values[group] + table.
struct OperandView {
    const OperandValue* values;
    const OperandTable* table;  // or null
    long long stride;           // of values, in elements
};

// v = table[column …], 0 where there is none.
__device__ __forceinline__ void load_table(const OperandView& operand, int column, float (&v)[WIDTH]) {
    if (operand.table != nullptr) {
        load<OperandTable>(operand.table + column, v);
    } else {
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) v[j] = 0.f;
    }
}

// v = values[group, column …] + table[column …].
__device__ __forceinline__ void load_operand(const OperandView& operand, int group, int column, float (&v)[WIDTH]) {
    float table[WIDTH];
    load_table(operand, column, table);
    load<OperandValue>(operand.values + group * operand.stride + column, v);
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) v[j] += table[j];
}

}  // namespace videoscale
