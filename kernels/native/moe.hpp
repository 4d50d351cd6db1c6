// A mixture of experts: routing, then the products of each row with its experts, grouped by expert, so that a matrix is read once for
// all rows that chose it and the cost is that of the experts that are used.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "dense_matmul.hpp"
#include "lanes.hpp"
#include "ops.hpp"
#include "quantized_matmul.hpp"
#include "small_ops.hpp"
#include "thread_pool.hpp"

namespace sluicegate {
namespace {

constexpr int64_t kMoeRows = 256;  // rows at a time: bounds the memory, and leaves enough rows to an expert

// Sigmoids, or a softmax; false if a logit is NaN or so large that the row means nothing.
inline bool router_scores(const float* logits, const Routing& routing, float* scores) {
    const int64_t n = routing.num_experts;
    float top = -std::numeric_limits<float>::infinity();
    bool is_sound = true;
    for (int64_t e = 0; e < n; ++e) {
        is_sound &= std::fabs(logits[e]) <= std::numeric_limits<float>::max();
        top = std::max(top, logits[e]);
    }
    if (!is_sound) return false;
    if (routing.is_sigmoid) {
        for (int64_t e = 0; e < n; ++e) scores[e] = sigmoid(logits[e]);
        return true;
    }
    float sum = 0.0f;
    for (int64_t e = 0; e < n; ++e) {
        scores[e] = exp_neg(logits[e] - top);
        sum += scores[e];
    }
    for (int64_t e = 0; e < n; ++e) scores[e] /= sum;
    return true;
}

// Experts outside the best groups can't be chosen. A group counts as much as its two best experts.
inline void keep_best_groups(const Routing& routing, std::vector<float>& choice) {
    constexpr float kNever = -std::numeric_limits<float>::infinity();
    const int64_t size = routing.num_experts / routing.num_groups;
    std::vector<float> worth(routing.num_groups);
    for (int64_t g = 0; g < routing.num_groups; ++g) {
        float first = kNever, second = kNever;
        for (int64_t e = g * size; e < (g + 1) * size; ++e) {
            second = std::max(second, std::min(first, choice[e]));
            first = std::max(first, choice[e]);
        }
        worth[g] = size > 1 ? first + second : first;
    }
    std::vector<bool> is_kept(routing.num_groups);
    for (int64_t i = 0; i < routing.top_groups; ++i) {
        int64_t best = -1;
        for (int64_t g = 0; g < routing.num_groups; ++g) {
            if (!is_kept[g] && (best < 0 || worth[g] > worth[best])) best = g;
        }
        is_kept[best] = true;
    }
    for (int64_t e = 0; e < routing.num_experts; ++e) {
        if (!is_kept[e / size]) choice[e] = kNever;
    }
}

// One row's experts, ascending, and what each one's result counts. Of equal experts the first is chosen.
inline void route(const float* logits, const Routing& routing, int32_t* experts, float* weights) {
    thread_local std::vector<float> scores, choice;
    scores.resize(routing.num_experts);
    if (!router_scores(logits, routing, scores.data())) {
        for (int64_t i = 0; i < routing.top_k; ++i) {
            experts[i] = static_cast<int32_t>(i);
            weights[i] = std::numeric_limits<float>::quiet_NaN();
        }
        return;
    }
    choice = scores;
    if (routing.bias != nullptr) {
        for (int64_t e = 0; e < routing.num_experts; ++e) choice[e] += routing.bias[e];
    }
    if (routing.num_groups > 1) keep_best_groups(routing, choice);
    for (int64_t i = 0; i < routing.top_k; ++i) {
        int64_t best = 0;
        for (int64_t e = 1; e < routing.num_experts; ++e) {
            if (choice[e] > choice[best]) best = e;
        }
        choice[best] = -std::numeric_limits<float>::infinity();
        experts[i] = static_cast<int32_t>(best);
    }
    std::sort(experts, experts + routing.top_k);
    float sum = 1e-20f;
    for (int64_t i = 0; i < routing.top_k; ++i) sum += scores[experts[i]];
    for (int64_t i = 0; i < routing.top_k; ++i) {
        const float score = scores[experts[i]];
        weights[i] = (routing.is_normalized ? score / sum : score) * routing.scale;
    }
}

// Rows of one expert lie behind each other, from `first` on.
struct Segment {
    int64_t expert, first, count;
};

class Moe {
public:
    explicit Moe(const MoeCall& call) : call_(call), routing_(call.routing), hidden_(call.down.one.num_rows), size_(call.down.one.num_cols) {}

    void run() {
        for (int64_t row = 0; row < call_.num_rows; row += kMoeRows) rows(row, std::min(kMoeRows, call_.num_rows - row));
    }

private:
    // What a product reads: quantized tiles or floats, row by row in the order of the segments.
    struct Input {
        Activations tiles;
        std::vector<float> floats;
    };
    struct Memory {
        std::vector<int32_t> experts;  // [rows, top_k]
        std::vector<float> weights;
        std::vector<int64_t> source, place;  // of an ordered row the one of x; of (row, choice) the ordered row
        std::vector<Segment> segments;
        std::vector<float> gate_up, results;
        Input x, product;
    };

    void rows(int64_t first, int64_t count) {
        thread_local Memory memory;
        Memory& m = memory;  // the caller's, not each pool thread's own
        const int64_t k = routing_.top_k, total = count * k;
        m.experts.resize(total);
        m.weights.resize(total);
        for_rows(count, routing_.num_experts * (k + 8), [&](int64_t row) {
            route(call_.logits + (first + row) * routing_.num_experts, routing_, m.experts.data() + row * k, m.weights.data() + row * k);
        });
        order(count, m);
        m.gate_up.resize(total * 2 * size_);
        m.results.resize(total * hidden_);
        prepare(call_.gate_up, total, m.x);
        for_tiles(m, [&](const Segment& tile) {
            fill(call_.gate_up, tile, m.x, [&](int64_t at, float* to) {
                std::memcpy(to, call_.x + (first + m.source[at]) * hidden_, hidden_ * sizeof(float));
            });
        });
        multiply(call_.gate_up, m.segments, m.x, m.gate_up.data());
        prepare(call_.down, total, m.product);
        for_tiles(m, [&](const Segment& tile) {
            fill(call_.down, tile, m.product, [&](int64_t at, float* to) {
                const float* gate = m.gate_up.data() + at * 2 * size_;
                for (int64_t i = 0; i < size_; ++i) to[i] = gate[i] * sigmoid(gate[i]) * gate[size_ + i];
            });
        });
        multiply(call_.down, m.segments, m.product, m.results.data());
        for_rows(count, hidden_ * k, [&](int64_t row) { combine(first, row, m); });
    }

    // Counts (row, choice) pairs by expert; ordered by expert, then by row.
    void order(int64_t count, Memory& m) const {
        const int64_t k = routing_.top_k;
        std::vector<int64_t> next(routing_.num_experts + 1);
        for (int64_t i = 0; i < count * k; ++i) ++next[m.experts[i] + 1];
        m.segments.clear();
        for (int64_t e = 0; e < routing_.num_experts; ++e) {
            if (next[e + 1] > 0) m.segments.push_back({e, next[e], next[e + 1]});
            next[e + 1] += next[e];
        }
        m.source.resize(count * k);
        m.place.resize(count * k);
        for (int64_t i = 0; i < count * k; ++i) {
            m.place[i] = next[m.experts[i]]++;
            m.source[m.place[i]] = i / k;
        }
    }

    // Rows of a segment in tiles as the quantized products take them.
    template <typename Body>
    static void for_tiles(const Memory& m, const Body& body) {
        std::vector<Segment> tiles;
        for (const Segment& segment : m.segments) {
            for (int64_t row = 0; row < segment.count;) {
                const int64_t count = Activations::tile_rows(row, segment.count);
                tiles.push_back({segment.expert, segment.first + row, count});
                row += count;
            }
        }
        const auto count = static_cast<int64_t>(tiles.size());
        const int64_t pieces = m.source.size() < 16 ? 1 : std::min<int64_t>(count, ThreadPool::instance().size() * 4);
        ThreadPool::instance().run(pieces, [&](int64_t piece, int) {
            for (int64_t i = count * piece / pieces; i < count * (piece + 1) / pieces; ++i) body(tiles[i]);
        });
    }

    static void prepare(const ExpertMatrices& matrices, int64_t rows, Input& to) {
        const int64_t cols = matrices.one.num_cols;
        if (matrices.is_dense) {
            to.floats.resize(rows * cols);
            return;
        }
        to.tiles.planes = matrices.one.planes;
        to.tiles.group = matrices.one.group_size;
        to.tiles.groups = cols / matrices.one.group_size;
        to.tiles.bytes.resize(static_cast<size_t>(rows * to.tiles.row_bytes()));
    }

    // Rows [tile.first, + tile.count), each written by write(row, to), as the product reads them.
    template <typename Write>
    static void fill(const ExpertMatrices& matrices, const Segment& tile, Input& to, const Write& write) {
        const int64_t cols = matrices.one.num_cols;
        if (matrices.is_dense) {
            for (int64_t r = 0; r < tile.count; ++r) write(tile.first + r, to.floats.data() + (tile.first + r) * cols);
            return;
        }
        thread_local std::vector<float> rows;
        rows.resize(tile.count * cols);
        for (int64_t r = 0; r < tile.count; ++r) write(tile.first + r, rows.data() + r * cols);
        quantize_tile(rows.data(), tile.count, cols, nullptr, to.tiles, to.tiles.tile(tile.first));
    }

    // out [ordered rows, matrix rows]
    static void multiply(const ExpertMatrices& matrices, const std::vector<Segment>& segments, const Input& x, float* out) {
        const int64_t panels = (matrices.one.num_rows + kLanes - 1) / kLanes, threads = ThreadPool::instance().size();
        const auto count = static_cast<int64_t>(segments.size());
        const int64_t cuts = std::clamp<int64_t>(8 * threads / count, 1, panels);  // pieces of each expert's matrix
        ThreadPool::instance().run(count * cuts, [&](int64_t piece, int) {
            const int64_t cut = piece % cuts;
            product(matrices, segments[piece / cuts], panels * cut / cuts, panels * (cut + 1) / cuts, x, out);
        });
    }

    static void product(const ExpertMatrices& matrices, const Segment& segment, int64_t first, int64_t end, const Input& x, float* out) {
        const QuantizedMatrix& w = matrices.one;
        const uint8_t* packed = matrices.packed + segment.expert * matrices.expert_bytes;
        const int64_t stride = w.num_rows;
        if (matrices.is_dense) {
            const float* from = x.floats.data() + segment.first * w.num_cols;
            float* to = out + segment.first * stride;
            if (matrices.type == Dense::e4m3) fp8_panels(from, segment.count, {packed, w.num_rows, w.num_cols}, first, end, to, stride);
            else if (matrices.type == Dense::bf16) dense_rows_of<Dense::bf16>(from, segment.count, packed, w, first, end, to);
            else if (matrices.type == Dense::f16) dense_rows_of<Dense::f16>(from, segment.count, packed, w, first, end, to);
            else dense_rows_of<Dense::f32>(from, segment.count, packed, w, first, end, to);
            return;
        }
        QuantizedMatrix expert = w;
        expert.packed = packed;
        for (int64_t row = 0; row < segment.count;) {
            const int64_t count = Activations::tile_rows(row, segment.count), at = segment.first + row;
            multiply_tile(expert, first, end, w.planes, x.tiles.tile(at), count, out + at * stride, stride);
            row += count;
        }
    }

    template <Dense kType>
    static void dense_rows_of(const float* x, int64_t rows, const void* packed, const QuantizedMatrix& w, int64_t first, int64_t end, float* out) {
        const int64_t k = w.num_cols, stride = w.num_rows;
        for (int64_t p = first; p < end; ++p) {
            const int64_t begin = p * kLanes * k, left = w.num_rows - p * kLanes;
            int64_t row = 0;
            for (; row + 4 <= rows; row += 4) dense_panel<kType, 4>(x + row * k, packed, begin, k, out + row * stride + p * kLanes, stride, left);
            for (; row < rows; ++row) dense_panel<kType, 1>(x + row * k, packed, begin, k, out + row * stride + p * kLanes, stride, left);
        }
    }

    // A row's sum over its experts, in their order; `added` comes last.
    void combine(int64_t first, int64_t row, const Memory& m) const {
        const int64_t k = routing_.top_k;
        float* out = call_.out + (first + row) * hidden_;
        std::fill(out, out + hidden_, 0.0f);
        for (int64_t i = 0; i < k; ++i) {
            const float weight = m.weights[row * k + i];
            const float* from = m.results.data() + m.place[row * k + i] * hidden_;
            for (int64_t j = 0; j < hidden_; ++j) out[j] = __builtin_fmaf(weight, from[j], out[j]);
        }
        if (call_.added == nullptr) return;
        const float* added = call_.added + (first + row) * hidden_;
        for (int64_t j = 0; j < hidden_; ++j) out[j] += added[j];
    }

    const MoeCall& call_;
    const Routing& routing_;
    int64_t hidden_, size_;
};

void moe(const MoeCall& call) { Moe(call).run(); }

}  // namespace
}  // namespace sluicegate
