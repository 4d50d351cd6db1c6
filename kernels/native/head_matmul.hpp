// Products with a small matrix for each head.
#pragma once

#include <algorithm>

#include "dense_matmul.hpp"
#include "lanes.hpp"
#include "ops.hpp"
#include "thread_pool.hpp"

namespace sluicegate {
namespace {

template <Dense kType>
inline V16 load_panel(const void* w, int64_t index) {
    if constexpr (kType == Dense::f32) return V16::load(static_cast<const float*>(w) + index);
    else if constexpr (kType == Dense::f16) return load_16<KvType::fp16>(static_cast<const uint8_t*>(w), index);
    else return load_16<KvType::bf16>(static_cast<const uint8_t*>(w), index);
}

// kRows rows against one panel of 16 outputs, [k, 16] in memory; four chains of columns, so that additions overlap.
template <Dense kType, int kRows>
inline void head_panel(const float* x, int64_t x_stride, const void* w, int64_t first, int64_t k, float* out, int64_t out_stride, int64_t n) {
    V16 y[kRows][4];
    for (auto& row : y) {
        for (auto& chain : row) chain = V16::zero();
    }
    int64_t i = 0;
    for (; i + 4 <= k; i += 4) {
        for (int c = 0; c < 4; ++c) {
            const V16 weights = load_panel<kType>(w, first + (i + c) * kLanes);
            for (int r = 0; r < kRows; ++r) y[r][c].add_product(V16::all(x[r * x_stride + i + c]), weights);
        }
    }
    for (int64_t c = 0; i + c < k; ++c) {
        const V16 weights = load_panel<kType>(w, first + (i + c) * kLanes);
        for (int r = 0; r < kRows; ++r) y[r][c].add_product(V16::all(x[r * x_stride + i + c]), weights);
    }
    for (int r = 0; r < kRows; ++r) {
        y[r][0].add(y[r][1]);
        y[r][2].add(y[r][3]);
        y[r][0].add(y[r][2]);
        Floats sum;
        y[r][0].store(sum.v);
        std::copy(sum.v, sum.v + std::min<int64_t>(n, kLanes), out + r * out_stride);
    }
}

template <Dense kType>
void head_matmul_typed(const float* x, int64_t x_stride, int64_t rows, const void* w, int64_t heads, int64_t n, int64_t k, float* out) {
    const int64_t panels = (n + kLanes - 1) / kLanes, units = heads * panels;
    const int64_t pieces = std::min<int64_t>(units, ThreadPool::instance().size() * 8);
    ThreadPool::instance().run(pieces, [&](int64_t piece, int) {
        for (int64_t unit = units * piece / pieces; unit < units * (piece + 1) / pieces; ++unit) {
            const int64_t head = unit / panels, panel = unit % panels, left = n - panel * kLanes;
            const float* from = x + head * k;
            float* to = out + head * n + panel * kLanes;
            int64_t row = 0;
            for (; row + 4 <= rows; row += 4) {
                head_panel<kType, 4>(from + row * x_stride, x_stride, w, unit * kLanes * k, k, to + row * heads * n, heads * n, left);
            }
            for (; row < rows; ++row) {
                head_panel<kType, 1>(from + row * x_stride, x_stride, w, unit * kLanes * k, k, to + row * heads * n, heads * n, left);
            }
        }
    });
}

void head_matmul(const float* x, int64_t x_stride, int64_t rows, const void* w, Dense type, int64_t heads, int64_t n, int64_t k, float* out) {
    if (type == Dense::bf16) head_matmul_typed<Dense::bf16>(x, x_stride, rows, w, heads, n, k, out);
    else if (type == Dense::f16) head_matmul_typed<Dense::f16>(x, x_stride, rows, w, heads, n, k, out);
    else head_matmul_typed<Dense::f32>(x, x_stride, rows, w, heads, n, k, out);
}

}  // namespace
}  // namespace sluicegate
