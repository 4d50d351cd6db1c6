// Matrix products with 8-bit floats (e4m3, no infinity): codes are decoded exactly, products added in float32.
//
// For each group of 128 columns four chains of columns are added and joined, then multiplied with the group's scale and added to the
// total, in the order of the groups: a row's order of additions depends on nothing but the number of columns.
#pragma once

#include <algorithm>
#include <vector>

#include "lanes.hpp"
#include "ops.hpp"
#include "thread_pool.hpp"

namespace sluicegate {
namespace {

constexpr int64_t kFp8Group = 128;
constexpr int64_t kDecodeFrom = 4;  // rows from which a group's codes are decoded once for all of them
#if defined(__AVX512F__)
constexpr int kFp8Rows = 4;
#elif defined(__AVX2__)
constexpr int kFp8Rows = 1;
#else
constexpr int kFp8Rows = 2;
#endif

// Adds one group's share to the totals of some rows, 16 outputs each. Weights are floats or codes, [count, 16].
template <int kRows, typename Weights>
inline void fp8_group(const float* x, int64_t cols, const Weights& weights, int64_t count, V16 scale, float* totals) {
    V16 part[kRows][4];
    for (int r = 0; r < kRows; ++r) {
        for (int c = 0; c < 4; ++c) part[r][c] = V16::zero();
    }
    int64_t k = 0;
    for (; k + 4 <= count; k += 4) {
        for (int c = 0; c < 4; ++c) {
            const V16 w = weights(k + c);
            for (int r = 0; r < kRows; ++r) part[r][c].add_product(V16::all(x[r * cols + k + c]), w);
        }
    }
    for (int c = 0; k + c < count; ++c) {
        const V16 w = weights(k + c);
        for (int r = 0; r < kRows; ++r) part[r][c].add_product(V16::all(x[r * cols + k + c]), w);
    }
    for (int r = 0; r < kRows; ++r) {
        part[r][0].add(part[r][1]);
        part[r][2].add(part[r][3]);
        part[r][0].add(part[r][2]);
        V16 total = V16::load(totals + r * kLanes);
        total.add_product(part[r][0], scale);
        total.store(totals + r * kLanes);
    }
}

template <typename Weights>
inline void fp8_rows_of_group(const float* x, int64_t m, int64_t cols, const Weights& weights, int64_t count, V16 scale, float* totals) {
    int64_t row = 0;
    for (; row + kFp8Rows <= m; row += kFp8Rows) fp8_group<kFp8Rows>(x + row * cols, cols, weights, count, scale, totals + row * kLanes);
    for (; row < m; ++row) fp8_group<1>(x + row * cols, cols, weights, count, scale, totals + row * kLanes);
}

inline int64_t fp8_panel_bytes(int64_t cols) {
    return kLanes * (cols + (cols + kFp8Group - 1) / kFp8Group * static_cast<int64_t>(sizeof(float)));
}

// The 16 outputs of a panel for each row, into totals [m, 16].
void fp8_panel(const float* x, int64_t m, const uint8_t* panel, int64_t cols, float* totals) {
    std::fill(totals, totals + m * kLanes, 0.0f);
    alignas(64) float decoded[kFp8Group * kLanes];
    const auto* scales = reinterpret_cast<const float*>(panel + cols * kLanes);
    for (int64_t first = 0; first < cols; first += kFp8Group, scales += kLanes) {
        const int64_t count = std::min(kFp8Group, cols - first);
        const uint8_t* group = panel + first * kLanes;
        // Loaded numbers are divided by the type's unit, a power of two, which the scale makes good.
        const V16 scale = V16::load(scales).times(V16::all(kUnit<KvType::fp8>));
        const auto load = [group](int64_t k) { return load_16<KvType::fp8>(group, k * kLanes); };
        if (m < kDecodeFrom) {
            fp8_rows_of_group(x + first, m, cols, load, count, scale, totals);
            continue;
        }
        for (int64_t k = 0; k < count; ++k) load(k).store(decoded + k * kLanes);
        const auto ready = [&decoded](int64_t k) { return V16::load(decoded + k * kLanes); };
        fp8_rows_of_group(x + first, m, cols, ready, count, scale, totals);
    }
}

// Panels [first, end) of a matrix: out [m, stride].
void fp8_panels(const float* x, int64_t m, const Fp8Matrix& w, int64_t first, int64_t end, float* out, int64_t stride) {
    thread_local std::vector<float> totals;
    totals.resize(static_cast<size_t>(m * kLanes));
    for (int64_t p = first; p < end; ++p) {
        fp8_panel(x, m, w.packed + p * fp8_panel_bytes(w.num_cols), w.num_cols, totals.data());
        const int64_t count = std::min<int64_t>(kLanes, w.num_rows - p * kLanes);
        for (int64_t row = 0; row < m; ++row) std::copy_n(totals.data() + row * kLanes, count, out + row * stride + p * kLanes);
    }
}

void fp8_matmul(const float* x, int64_t m, const Fp8Matrix& w, float* out, int64_t stride) {
    const int64_t panels = (w.num_rows + kLanes - 1) / kLanes;
    const int64_t pieces = std::min<int64_t>(panels, ThreadPool::instance().size() * 8);
    ThreadPool::instance().run(pieces, [&](int64_t piece, int) {
        fp8_panels(x, m, w, panels * piece / pieces, panels * (piece + 1) / pieces, out, stride);
    });
}

// Rows of such a matrix as floats.
void fp8_rows(const Fp8Matrix& w, const int64_t* ids, int64_t count, float* out) {
    for (int64_t row = 0; row < count; ++row) {
        const int64_t lane = ids[row] % kLanes;
        const uint8_t* codes = w.packed + ids[row] / kLanes * fp8_panel_bytes(w.num_cols);
        const auto* scales = reinterpret_cast<const float*>(codes + w.num_cols * kLanes);
        for (int64_t k = 0; k < w.num_cols; ++k) {
            out[row * w.num_cols + k] = e4m3_to_float(codes[k * kLanes + lane]) * scales[k / kFp8Group * kLanes + lane];
        }
    }
}

}  // namespace
}  // namespace sluicegate
