// The indexer of sparse attention: scores of all earlier tokens for a row, and the choice of the highest.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "lanes.hpp"
#include "mla_attention.hpp"
#include "ops.hpp"
#include "thread_pool.hpp"

namespace sluicegate {
namespace {

// A number whose order is that of score, then of the lower position. A NaN is above all: what it poisons must not be left out in silence.
inline uint64_t rank_of(float score, int64_t position) {
    uint32_t bits;
    score += 0.0f;  // one zero
    std::memcpy(&bits, &score, 4);
    if (score != score) bits = 0xffffffffu;
    else bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return static_cast<uint64_t>(bits) << 32 | (0xffffffffu - static_cast<uint32_t>(position));
}

class Indexer {
public:
    Indexer(const IndexCall& call, const KvLayer& layer)
        : call_(call), layer_(layer), lanes_((call.num_heads + kLanes - 1) / kLanes * kLanes) {}

    void run() {
        for (int64_t first = 0; first < call_.num_rows;) {
            int64_t end = first, floats = 0;
            while (end < call_.num_rows && (end == first || floats + num_keys(end) <= kScoresAtOnce)) floats += num_keys(end++);
            some(first, end);
            first = end;
        }
    }

private:
    static constexpr int64_t kScoresAtOnce = int64_t{1} << 22;

    int64_t num_keys(int64_t row) const { return call_.row_position[row] + int64_t{1}; }
    // A row that sees no more than it may select needs no scores.
    bool has_choice(int64_t row) const { return num_keys(row) > call_.num_selected; }

    // Rows [first, end): first all scores, in pieces of a tile of rows and a range of keys, then the choices.
    void some(int64_t first, int64_t end) const {
        struct Piece {
            int64_t first_row, num_rows, range;
        };
        std::vector<Piece> pieces;
        std::vector<int64_t> offsets;
        int64_t total = 0;
        for (int64_t row = first; row < end; ++row) {
            offsets.push_back(total);
            if (has_choice(row)) total += num_keys(row);
        }
        for (int64_t row = first; row < end;) {
            int64_t stop = row + 1;
            if (!has_choice(row)) {
                row = stop;
                continue;
            }
            while (stop < end && stop - row < kLatentRows && call_.row_sequence[stop] == call_.row_sequence[row] &&
                   call_.row_position[stop] == call_.row_position[stop - 1] + 1) {
                ++stop;
            }
            for (int64_t r = 0; r * kRange < num_keys(stop - 1); ++r) pieces.push_back({row, stop - row, r});
            row = stop;
        }
        thread_local std::vector<float> buffer;
        buffer.resize(static_cast<size_t>(total));
        float* scores = buffer.data();
        const int64_t* offset = offsets.data();
        ThreadPool::instance().run(static_cast<int64_t>(pieces.size()), [&](int64_t index, int) {
            const Piece& piece = pieces[index];
            score(piece.first_row, piece.num_rows, piece.range, scores + offset[piece.first_row - first]);
        });
        ThreadPool::instance().run(end - first, [&](int64_t index, int) { choose(first + index, scores + offset[index]); });
    }

    // Scores of keys in range r for rows of one sequence, each row's behind those of the row before: the sum over heads of weight * max(0, query * key). The sum over heads runs over
    // vectors of 16 heads, then over lanes.
    void score(int64_t first_row, int64_t num_rows, int64_t r, float* scores) const {
        thread_local std::vector<float> keys, queries, weights, products_of_heads;
        const int64_t dim = layer_.v_dim, sequence = call_.row_sequence[first_row];
        const int64_t begin = r * kRange, end = std::min(begin + kRange, num_keys(first_row + num_rows - 1));
        const LatentKeys places{call_.page_table + sequence * call_.max_pages, nullptr, layer_.page_size};
        if (call_.expected.page_keys != nullptr) {
            verify_keys(call_.expected, layer_, call_.page_table, sequence, call_.max_pages, places, begin, end);
        }
        keys.resize(static_cast<size_t>(kRange * dim));
        queries.resize(static_cast<size_t>(dim * lanes_));
        weights.resize(static_cast<size_t>(lanes_));
        products_of_heads.resize(static_cast<size_t>(kRange * lanes_));
        load(places, begin, end - begin, keys.data());
        for (int64_t row = first_row; row < first_row + num_rows; scores += num_keys(row++)) {
            const int64_t last = std::min(end, num_keys(row)) - begin;
            if (last <= 0) continue;
            spread_heads(call_.q + row * call_.q_stride, call_.num_heads, dim, lanes_, queries.data());
            spread_heads(call_.weights + row * call_.weights_stride, call_.num_heads, 1, lanes_, weights.data());
            products(keys.data(), dim, 1, last, queries.data(), lanes_, dim,
                     [&](int64_t key, int64_t lane, V16 product) { product.store(&products_of_heads[key * lanes_ + lane]); });
            for (int64_t key = 0; key < last; ++key) {
                V16 sum = V16::zero();
                for (int64_t lane = 0; lane < lanes_; lane += kLanes) {
                    V16 product = V16::load(&products_of_heads[key * lanes_ + lane]);
                    product.raise(V16::zero());  // where it is NaN it stays
                    sum.add_product(product, V16::load(&weights[lane]));
                }
                Floats lanes;
                sum.store(lanes.v);
                scores[begin + key] = sum_lanes(lanes);
            }
        }
    }

    void load(const LatentKeys& places, int64_t begin, int64_t count, float* to) const {
        const auto slot_of = [&](int64_t index) { return places.slot(begin + index); };
        if (layer_.type == KvType::bf16) load_tokens<KvType::bf16>(layer_.v, layer_.v_dim, count, slot_of, to);
        else if (layer_.type == KvType::fp16) load_tokens<KvType::fp16>(layer_.v, layer_.v_dim, count, slot_of, to);
        else load_tokens<KvType::fp8>(layer_.v, layer_.v_dim, count, slot_of, to);
    }

    // The positions with the highest scores, ascending; the rest of the row is -1.
    void choose(int64_t row, const float* scores) const {
        int32_t* out = call_.out + row * call_.num_selected;
        const int64_t count = std::min(call_.num_selected, num_keys(row));
        std::fill(out + count, out + call_.num_selected, -1);
        if (!has_choice(row)) {
            for (int64_t i = 0; i < count; ++i) out[i] = static_cast<int32_t>(i);
            return;
        }
        thread_local std::vector<uint64_t> ranks;
        ranks.resize(static_cast<size_t>(num_keys(row)));
        for (int64_t key = 0; key < num_keys(row); ++key) ranks[key] = rank_of(scores[key], key);
        std::nth_element(ranks.begin(), ranks.begin() + (count - 1), ranks.end(), std::greater<>());
        for (int64_t i = 0; i < count; ++i) out[i] = static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(ranks[i]));
        std::sort(out, out + count);
    }

    const IndexCall& call_;
    const KvLayer& layer_;
    int64_t lanes_;
};

void indexer_topk(const IndexCall& call, const KvLayer& layer) { Indexer(call, layer).run(); }

}  // namespace
}  // namespace sluicegate
