// Normalization, rotary embedding, gated activation, and writing of keys and values.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "lanes.hpp"
#include "ops.hpp"
#include "thread_pool.hpp"

namespace sluicegate {
namespace {

template <typename Body>
void for_rows(int64_t rows, int64_t cost, const Body& body) {
    if (rows * cost < 65536) {
        for (int64_t row = 0; row < rows; ++row) body(row);
        return;
    }
    const int64_t pieces = std::min<int64_t>(rows, ThreadPool::instance().size() * 4);
    ThreadPool::instance().run(pieces, [&](int64_t piece, int) {
        for (int64_t row = rows * piece / pieces; row < rows * (piece + 1) / pieces; ++row) body(row);
    });
}

void rms_norm(const float* x, float* residual, const float* weight, float eps, int64_t rows, int64_t cols, float* out) {
    for_rows(rows, cols, [=](int64_t row) {
        const float* from = x + row * cols;
        if (residual != nullptr) {
            float* sum = residual + row * cols;
            for (int64_t i = 0; i < cols; ++i) sum[i] += from[i];
            from = sum;
        }
        Floats squares = {};
        int64_t i = 0;
        for (; i + kLanes <= cols; i += kLanes) {
            for (int j = 0; j < kLanes; ++j) squares.v[j] = __builtin_fmaf(from[i + j], from[i + j], squares.v[j]);
        }
        for (int j = 0; i + j < cols; ++j) squares.v[j] = __builtin_fmaf(from[i + j], from[i + j], squares.v[j]);
        const float inverse = 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(cols) + eps);
        for (int64_t j = 0; j < cols; ++j) out[row * cols + j] = from[j] * inverse * weight[j];
    });
}

// table: [positions, 2, head_dim / 2], cosines then sines
void rotary(float* x, const int32_t* positions, const float* table, int64_t rows, int64_t heads, int64_t head_dim) {
    const int64_t half = head_dim / 2;
    for_rows(rows, heads * head_dim, [=](int64_t row) {
        const float* cosines = table + static_cast<int64_t>(positions[row]) * head_dim;
        const float* sines = cosines + half;
        for (int64_t head = 0; head < heads; ++head) {
            float* a = x + (row * heads + head) * head_dim;
            float* b = a + half;
            for (int64_t i = 0; i < half; ++i) {
                const float first = a[i], second = b[i];
                a[i] = __builtin_fmaf(first, cosines[i], -(second * sines[i]));
                b[i] = __builtin_fmaf(second, cosines[i], first * sines[i]);
            }
        }
    });
}

void silu_mul(const float* gate, const float* up, int64_t stride, int64_t rows, int64_t cols, float* out) {
    for_rows(rows, cols * 4, [=](int64_t row) {
        const float* g = gate + row * stride;
        const float* u = up + row * stride;
        float* o = out + row * cols;
        for (int64_t i = 0; i < cols; ++i) {
            // 1 / (1 + e^-|g|) and its mirror image: the exponential never overflows. A NaN stays one.
            const float e = exp_neg(-std::fabs(g[i]));
            const float positive = 1.0f / (1.0f + e);
            const float sigmoid = g[i] >= 0.0f ? positive : e * positive;
            o[i] = g[i] * sigmoid * u[i];
        }
    });
}

void kv_write(const float* k, const float* v, const int64_t* slots, int64_t rows, const KvLayer& layer) {
    const int64_t heads = layer.num_kv_heads, dim = layer.head_dim;
    const auto store = [&](const float* from, float scale, uint8_t* base, int64_t index) {
        if (layer.type == KvType::bf16) {
            auto* to = reinterpret_cast<uint16_t*>(base) + index;
            for (int64_t i = 0; i < dim; ++i) to[i] = float_to_bf16(from[i] / scale);
        } else {
            uint8_t* to = base + index;
            for (int64_t i = 0; i < dim; ++i) {
                const float value = from[i] / scale;
                to[i] = float_to_e4m3(value > 448.0f ? 448.0f : (value < -448.0f ? -448.0f : value));
            }
        }
    };
    for_rows(rows, heads * dim * 8, [&](int64_t row) {
        if (slots[row] < 0) return;
        const int64_t page = slots[row] / layer.page_size, offset = slots[row] % layer.page_size;
        for (int64_t head = 0; head < heads; ++head) {
            const int64_t index = ((page * heads + head) * layer.page_size + offset) * dim;
            store(k + (row * heads + head) * dim, layer.k_scale[head], layer.k, index);
            store(v + (row * heads + head) * dim, layer.v_scale[head], layer.v, index);
        }
    });
}

}  // namespace
}  // namespace sluicegate
