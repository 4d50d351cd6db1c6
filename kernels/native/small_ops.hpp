// Normalization, rotary embedding, gated activation, and writing of keys and values.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "lanes.hpp"
#include "ops.hpp"
#include "page_seal.hpp"
#include "thread_pool.hpp"

namespace sluicegate {
namespace {

template <typename Body>
void for_rows(int64_t rows, int64_t cost, const Body& body) {
    if (rows * cost < 8192) {
        for (int64_t row = 0; row < rows; ++row) body(row);
        return;
    }
    const int64_t pieces = std::min<int64_t>(rows, ThreadPool::instance().size() * 4);
    ThreadPool::instance().run(pieces, [&](int64_t piece, int) {
        for (int64_t row = rows * piece / pieces; row < rows * (piece + 1) / pieces; ++row) body(row);
    });
}

inline float inverse_rms(const float* from, int64_t count, float eps) {
    Floats squares = {};
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        for (int j = 0; j < kLanes; ++j) squares.v[j] = __builtin_fmaf(from[i + j], from[i + j], squares.v[j]);
    }
    for (int j = 0; i + j < count; ++j) squares.v[j] = __builtin_fmaf(from[i + j], from[i + j], squares.v[j]);
    return 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(count) + eps);
}

void rms_norm(const float* x, float* residual, const float* weight, float eps, int64_t rows, int64_t cols, float* out) {
    for_rows(rows, cols, [=](int64_t row) {
        const float* from = x + row * cols;
        if (residual != nullptr) {
            float* sum = residual + row * cols;
            for (int64_t i = 0; i < cols; ++i) sum[i] += from[i];
            from = sum;
        }
        const float inverse = inverse_rms(from, cols, eps);
        for (int64_t j = 0; j < cols; ++j) out[row * cols + j] = from[j] * inverse * weight[j];
    });
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, int64_t rows, int64_t cols, float* out) {
    for_rows(rows, cols, [=](int64_t row) {
        const float* from = x + row * cols;
        const auto sum = [&](const auto& term) {  // in 16 chains, then over them
            Floats total = {};
            for (int64_t i = 0; i < cols; ++i) total.v[i % kLanes] += term(from[i]);
            return sum_lanes(total) / static_cast<float>(cols);
        };
        const float mean = sum([](float value) { return value; });
        const float variance = sum([mean](float value) { return (value - mean) * (value - mean); });
        const float inverse = 1.0f / std::sqrt(variance + eps);
        for (int64_t j = 0; j < cols; ++j) out[row * cols + j] = __builtin_fmaf((from[j] - mean) * inverse, weight[j], bias[j]);
    });
}

// table: [positions, 2, head_dim / 2], cosines then sines
void rotary(float* x, int64_t row_stride, int64_t head_stride, const int32_t* positions, const float* table, int64_t rows, int64_t heads,
            int64_t head_dim) {
    const int64_t half = head_dim / 2;
    for_rows(rows, heads * head_dim, [=](int64_t row) {
        const float* cosines = table + static_cast<int64_t>(positions[row]) * head_dim;
        const float* sines = cosines + half;
        for (int64_t head = 0; head < heads; ++head) {
            float* a = x + row * row_stride + head * head_stride;
            float* b = a + half;
            for (int64_t i = 0; i < half; ++i) {
                const float first = a[i], second = b[i];
                a[i] = __builtin_fmaf(first, cosines[i], -(second * sines[i]));
                b[i] = __builtin_fmaf(second, cosines[i], first * sines[i]);
            }
        }
    });
}

// Each head of each row by itself, in place.
void head_norm(float* x, int64_t row_stride, int64_t head_stride, const float* weight, float eps, int64_t rows, int64_t heads, int64_t dim) {
    for_rows(rows, heads * dim, [=](int64_t row) {
        for (int64_t head = 0; head < heads; ++head) {
            float* at = x + row * row_stride + head * head_stride;
            const float inverse = inverse_rms(at, dim, eps);
            for (int64_t i = 0; i < dim; ++i) at[i] = at[i] * inverse * weight[i];
        }
    });
}

void add_bias(float* x, int64_t stride, const float* bias, int64_t rows, int64_t cols) {
    for_rows(rows, cols, [=](int64_t row) {
        for (int64_t i = 0; i < cols; ++i) x[row * stride + i] += bias[i];
    });
}

// 1 / (1 + e^-z) by e^-|z| or its mirror image: the exponential never overflows. A NaN stays one.
inline float sigmoid(float z) {
    const float e = exp_neg(-std::fabs(z));
    const float positive = 1.0f / (1.0f + e);
    return z >= 0.0f ? positive : e * positive;
}

void silu_mul(const float* gate, const float* up, int64_t stride, int64_t rows, int64_t cols, float* out) {
    for_rows(rows, cols * 4, [=](int64_t row) {
        const float* g = gate + row * stride;
        const float* u = up + row * stride;
        float* o = out + row * cols;
        for (int64_t i = 0; i < cols; ++i) {
            o[i] = g[i] * sigmoid(g[i]) * u[i];
        }
    });
}

// GELU's tanh form: (1 + tanh(z / 2)) / 2 is the sigmoid of z.
void gelu_mul(const float* gate, const float* up, int64_t stride, int64_t rows, int64_t cols, float* out) {
    for_rows(rows, cols * 4, [=](int64_t row) {
        const float* g = gate + row * stride;
        const float* u = up + row * stride;
        float* o = out + row * cols;
        for (int64_t i = 0; i < cols; ++i) {
            const float z = g[i] * __builtin_fmaf(g[i] * g[i], 0.0713548162726f, 1.5957691216057f);
            o[i] = g[i] * sigmoid(z) * u[i];
        }
    });
}

// A row of one head, encoded.
template <KvType kType>
inline void encode(const float* from, float scale, int64_t dim, uint8_t* to) {
    auto* wide = reinterpret_cast<uint16_t*>(to);
    constexpr float kLimit = kType == KvType::fp8 ? 448.0f : 65504.0f;
    for (int64_t i = 0; i < dim; ++i) {
        const float value = from[i] / scale;
        if constexpr (kType == KvType::bf16) {
            wide[i] = float_to_bf16(value);
        } else {
            const float clamped = value > kLimit ? kLimit : (value < -kLimit ? -kLimit : value);
            if constexpr (kType == KvType::fp16) wide[i] = float_to_half(clamped);
            else to[i] = float_to_e4m3(clamped);
        }
    }
}

// Writes a row that lies by token, `to` being its place; returns by how much that changes the sums of its part of the page.
template <KvType kType, typename Stored>
inline Sums write_row(const float* from, float scale, int64_t dim, int64_t page_size, int64_t offset, const int16_t* words, Stored* part) {
    const auto sums = [&] { return words == nullptr ? Sums{} : token_sums(part, dim, page_size, offset, words); };
    const Sums before = sums();
    encode<kType>(from, scale, dim, reinterpret_cast<uint8_t*>(part + offset * dim));
    const Sums after = sums();
    return {after.first - before.first, after.second - before.second};
}

template <KvType kType>
void kv_write_typed(const float* k, int64_t k_stride, const float* v, int64_t v_stride, const int64_t* slots, int64_t rows,
                    const KvLayer& layer) {
    using Stored = std::conditional_t<kType == KvType::fp8, uint8_t, uint16_t>;
    const int64_t heads = layer.num_kv_heads, dim = layer.head_dim, v_dim = layer.v_dim, page_size = layer.page_size;
    const LayerSeals& seals = layer.seals;
    for_rows(rows, heads * (dim + v_dim) * 4, [&](int64_t row) {
        if (slots[row] < 0) return;
        const int64_t page = slots[row] / page_size, offset = slots[row] % page_size;
        // A key that lies by dimension touches each line of its page: all of them are asked for at once.
        const int64_t part_bytes = layer.keys_by_token ? 0 : heads * k_bytes(layer);
        for (int64_t at = 0; at < part_bytes; at += 64) __builtin_prefetch(layer.k + page * part_bytes + at, 1);
        for (int64_t head = 0; head < heads; ++head) {
            auto* keys = reinterpret_cast<Stored*>(layer.k) + (page * heads + head) * page_size * dim;
            auto* values = reinterpret_cast<Stored*>(layer.v) + (page * heads + head) * page_size * v_dim;
            const float* key = k + row * k_stride + head * dim;
            Sums change;
            if (layer.keys_by_token) {
                change += write_row<kType>(key, layer.k_scale[head], dim, page_size, offset, seals.k_words, keys);
            } else {
                alignas(64) Stored encoded[256];
                encode<kType>(key, layer.k_scale[head], dim, reinterpret_cast<uint8_t*>(encoded));
                if (seals.tags != nullptr) change += write_column(layer, encoded, offset, keys);
                else for (int64_t i = 0; i < dim; ++i) keys[i * page_size + offset] = encoded[i];
            }
            if (v_dim > 0) {
                const float* value = v + row * v_stride + head * v_dim;
                change += write_row<kType>(value, layer.v_scale[head], v_dim, page_size, offset, seals.v_words, values);
            }
            if (seals.tags == nullptr) continue;
            const uint32_t* constants = seals.rows + 2 * offset;
            change += {constants[2] - constants[0], constants[3] - constants[1]};
            add_to_tag(layer, page, head, change);
        }
    });
}

void kv_write(const float* k, int64_t k_stride, const float* v, int64_t v_stride, const int64_t* slots, int64_t rows,
              const KvLayer& layer) {
    if (layer.type == KvType::bf16) kv_write_typed<KvType::bf16>(k, k_stride, v, v_stride, slots, rows, layer);
    else if (layer.type == KvType::fp16) kv_write_typed<KvType::fp16>(k, k_stride, v, v_stride, slots, rows, layer);
    else kv_write_typed<KvType::fp8>(k, k_stride, v, v_stride, slots, rows, layer);
}

// Rows of a quantized matrix, dequantized.
void quantized_rows(const QuantizedMatrix& w, const int64_t* ids, int64_t count, float* out) {
    const int64_t group = w.group_size, groups = w.num_cols / group, code_bytes = group * kLanes * w.bits / 8;
    const int64_t scales = kLanes * w.scale_bytes, group_bytes = code_bytes + scales * (w.has_minimum ? 2 : 1);
    const auto number = [&](const uint8_t* from, int64_t lane) {
        if (w.scale_bytes == 2) return half_to_float(reinterpret_cast<const uint16_t*>(from)[lane]);
        return reinterpret_cast<const float*>(from)[lane];
    };
    for_rows(count, w.num_cols * 8, [&](int64_t row) {
        const int64_t lane = ids[row] % kLanes;
        const uint8_t* from = w.packed + ids[row] / kLanes * groups * group_bytes;
        for (int64_t g = 0; g < groups; ++g, from += group_bytes) {
            const float scale = number(from + code_bytes, lane);
            const float minimum = w.has_minimum ? number(from + code_bytes + scales, lane) : 0.0f;
            for (int64_t i = 0; i < group; ++i) {
                const int64_t quad = i / kQuad;
                const int32_t byte = from[64 * (w.bits == 4 ? quad / 2 : quad) + lane * kQuad + i % kQuad];
                const int32_t code = w.bits == 8 ? byte - 128 : (quad & 1 ? byte >> 4 : byte & 15);
                const float value = static_cast<float>(code) * scale;
                const int64_t column = w.order == nullptr ? g * group + i : w.order[g * group + i];
                out[row * w.num_cols + column] = w.has_minimum ? value + minimum : value;
            }
        }
    });
}

}  // namespace
}  // namespace sluicegate
