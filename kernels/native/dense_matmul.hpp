// Matrix products with unquantized weights.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "lanes.hpp"
#include "ops.hpp"
#include "quantized_matmul.hpp"
#include "thread_pool.hpp"

namespace sluicegate {
namespace {

template <Dense kType>
inline void load_weights(const void* w, int64_t index, Floats& to) {
    if constexpr (kType == Dense::f32) {
        std::memcpy(to.v, static_cast<const float*>(w) + index, sizeof to.v);
    } else {
        const uint16_t* bits = static_cast<const uint16_t*>(w) + index;
        if constexpr (kType == Dense::f16) {
            load_scales(reinterpret_cast<const uint8_t*>(bits), 2, to);
        } else {
            for (int i = 0; i < kLanes; ++i) to.v[i] = bf16_to_float(bits[i]);
        }
    }
}

// One row against one panel of 16 outputs, [cols, 16] in memory; four chains of columns, so that additions overlap.
template <Dense kType, int kRows>
void dense_panel(const float* x, const void* w, int64_t first, int64_t cols, float* out, int64_t num_out, int64_t n) {
    Floats y[kRows][4] = {};
    for (int64_t k = 0; k < cols; k += 4) {
        for (int64_t c = 0; c < std::min<int64_t>(4, cols - k); ++c) {
            Floats weights;
            load_weights<kType>(w, first + (k + c) * kLanes, weights);
            for (int r = 0; r < kRows; ++r) {
                const float value = x[r * cols + k + c];
                for (int i = 0; i < kLanes; ++i) y[r][c].v[i] = __builtin_fmaf(value, weights.v[i], y[r][c].v[i]);
            }
        }
    }
    for (int r = 0; r < kRows; ++r) {
        for (int64_t i = 0; i < std::min<int64_t>(n, kLanes); ++i) {
            out[r * num_out + i] = (y[r][0].v[i] + y[r][1].v[i]) + (y[r][2].v[i] + y[r][3].v[i]);
        }
    }
}

template <Dense kType>
void dense_typed(const float* x, int64_t m, const void* w, int64_t n, int64_t k, float* out, int64_t stride) {
    const int64_t panels = (n + kLanes - 1) / kLanes;
    const int64_t pieces = std::min<int64_t>(panels, ThreadPool::instance().size() * 8);
    ThreadPool::instance().run(pieces, [&](int64_t piece, int) {
        for (int64_t p = panels * piece / pieces; p < panels * (piece + 1) / pieces; ++p) {
            const int64_t first = p * kLanes * k, left = n - p * kLanes;
            int64_t row = 0;
            for (; row + 4 <= m; row += 4) dense_panel<kType, 4>(x + row * k, w, first, k, out + row * stride + p * kLanes, stride, left);
            for (; row < m; ++row) dense_panel<kType, 1>(x + row * k, w, first, k, out + row * stride + p * kLanes, stride, left);
        }
    });
}

void dense_matmul(const float* x, int64_t m, const void* w, Dense type, int64_t n, int64_t k, float* out, int64_t stride) {
    if (type == Dense::bf16) dense_typed<Dense::bf16>(x, m, w, n, k, out, stride);
    else if (type == Dense::f16) dense_typed<Dense::f16>(x, m, w, n, k, out, stride);
    else dense_typed<Dense::f32>(x, m, w, n, k, out, stride);
}

// Rows of an unquantized matrix as floats.
void dense_rows(const void* w, Dense type, int64_t k, const int64_t* ids, int64_t count, float* out) {
    for (int64_t row = 0; row < count; ++row) {
        const int64_t first = ids[row] / kLanes * kLanes * k + ids[row] % kLanes;
        for (int64_t i = 0; i < k; ++i) {
            const int64_t at = first + i * kLanes;
            if (type == Dense::f32) out[row * k + i] = static_cast<const float*>(w)[at];
            else if (type == Dense::f16) out[row * k + i] = half_to_float(static_cast<const uint16_t*>(w)[at]);
            else out[row * k + i] = bf16_to_float(static_cast<const uint16_t*>(w)[at]);
        }
    }
}

}  // namespace
}  // namespace sluicegate
