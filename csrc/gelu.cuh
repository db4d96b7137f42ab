// The tanh-approximate GELU, its gradient, and the gradient's sums over all rows.
//
// gelu(x) = x · σ(w) with w = 2 √(2/π) (x + 0.044715 x³), since 1 + tanh(u) = 2 σ(2u).
//
// Grid: (column tiles, shares of the rows). A thread owns WIDTH columns of its tile and walks the rows of its share, ROWS
// at a time; the shares take turns, so that at any time the device works on neighbouring rows.
#include "dependent_launch.cuh"
#include "vectors.cuh"

namespace videoscale {

using Activation = ACTIVATION;          // of x, y and their gradients
constexpr int THREADS = BLOCK_THREADS;  // columns of a tile, in vectors
constexpr int WIDTH = 16 / sizeof(Activation);
constexpr int ROWS = 4;  // of which a thread has the loads on their way at once

constexpr float LINEAR = 1.5957691216057308f, CUBIC = LINEAR * 0.044715f, LOG2_E = 1.4426950408889634f;

struct Rows {
    const char* first;
    long long stride;  // bytes
};

struct ForwardArguments {
    Rows x;
    Activation* y;  // (rows, columns), as all that is written
    int rows, columns;
};

struct BackwardArguments {
    Rows dy, x;
    Activation *dx, *y;  // y, the forward's output, null where it is not wanted again
    float* parts;  // (shares, columns), or null where no sums are wanted
    int rows, columns;
};

struct FinalizeArguments {
    const float* parts;
    float* sums;  // (columns,)
    int shares, columns;
};

// To 2 units in the last place; infinity where the true value is not a float.
__device__ __forceinline__ float exp2_fast(float v) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
    return result;
}

// To 1 unit in the last place; 0 of infinity.
__device__ __forceinline__ float reciprocal_fast(float v) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
    return result;
}

// σ(w) at x, of which square is x².
__device__ __forceinline__ float sigmoid_of_w(float x, float square) {
    return reciprocal_fast(1.f + exp2_fast(x * fmaf(-CUBIC * LOG2_E, square, -LINEAR * LOG2_E)));
}

__device__ __forceinline__ float gelu(float x) { return x * sigmoid_of_w(x, x * x); }

// σ + x σ' = σ + σ (1 - σ) x dw/dx. Leaves y in the place of x, with the forward's bits.
__device__ __forceinline__ float gelu_slope(float& x) {
    const float square = x * x, sigmoid = sigmoid_of_w(x, square);
    const float x_dw = x * fmaf(3.f * CUBIC, square, LINEAR);
    x *= sigmoid;
    return fmaf(fmaf(-sigmoid, sigmoid, sigmoid), x_dw, sigmoid);
}

// WIDTH values of a row.
__device__ __forceinline__ uint4 read(const Rows& rows, int row, int column) {
    return __ldcs(reinterpret_cast<const uint4*>(rows.first + row * rows.stride + column * sizeof(Activation)));
}

extern "C" __global__ void __launch_bounds__(THREADS, FORWARD_BLOCKS)
    gelu_forward(const __grid_constant__ ForwardArguments a) {
    const int column = (blockIdx.x * THREADS + threadIdx.x) * WIDTH, last = a.rows - 1;
    if (column >= a.columns) return;
    for (long long begin = (long long)blockIdx.y * ROWS; begin <= last; begin += (long long)gridDim.y * ROWS) {
        const int first = int(begin);
        uint4 x[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) x[r] = read(a.x, first + min(r, last - first), column);  // no branch between loads
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (last - first < r) break;
            float v[WIDTH];
            load<Activation>(&x[r], v);
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) v[j] = gelu(v[j]);
            store<Activation>(a.y + (long long)(first + r) * a.columns + column, v);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BACKWARD_BLOCKS)
    gelu_backward(const __grid_constant__ BackwardArguments a) {
    const int column = (blockIdx.x * THREADS + threadIdx.x) * WIDTH, last = a.rows - 1;
    if (column >= a.columns) return;
    float sums[WIDTH] = {};
    for (long long begin = (long long)blockIdx.y * ROWS; begin <= last; begin += (long long)gridDim.y * ROWS) {
        const int first = int(begin);
        uint4 dy[ROWS], x[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int row = first + min(r, last - first);
            dy[r] = read(a.dy, row, column);
            x[r] = read(a.x, row, column);
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (last - first < r) break;
            float v[WIDTH], dx[WIDTH];
            load<Activation>(&dy[r], dx);
            load<Activation>(&x[r], v);
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                dx[j] *= gelu_slope(v[j]);
                sums[j] += dx[j];
            }
            store<Activation>(a.dx + (long long)(first + r) * a.columns + column, dx);
            if (a.y != nullptr) store<Activation>(a.y + (long long)(first + r) * a.columns + column, v);
        }
    }
    if (a.parts == nullptr) return;
    let_dependents_start();
    float* const part = a.parts + (long long)blockIdx.y * a.columns + column;
#pragma unroll
    for (int j = 0; j < WIDTH; j += 4)
        *reinterpret_cast<float4*>(part + j) = make_float4(sums[j], sums[j + 1], sums[j + 2], sums[j + 3]);
}

// Adds the shares' parts in a fixed order. A thread adds four columns of every LANES-th part.
constexpr int QUADS = 8, LANES = 32, FINALIZE_COLUMNS = QUADS * 4;

extern "C" __global__ void __launch_bounds__(QUADS* LANES)
    gelu_finalize(const __grid_constant__ FinalizeArguments a) {
    __shared__ float4 of_lane[LANES][QUADS];
    const int column = blockIdx.x * FINALIZE_COLUMNS + threadIdx.x * 4;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    await_previous_kernel();
    if (column < a.columns) {
#pragma unroll 4
        for (int share = threadIdx.y; share < a.shares; share += LANES) {
            const float4 v = *reinterpret_cast<const float4*>(a.parts + (long long)share * a.columns + column);
            sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
        }
    }
    of_lane[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || column >= a.columns) return;
    for (int lane = 1; lane < LANES; ++lane) {
        const float4 v = of_lane[lane][threadIdx.x];
        sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
    }
    *reinterpret_cast<float4*>(a.sums + column) = sum;
}

}  // namespace videoscale
