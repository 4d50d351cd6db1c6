// Attention over paged keys and values.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <deque>
#include <limits>
#include <vector>

#include "attention_row.hpp"
#include "attention_tile.hpp"
#include "lanes.hpp"
#include "ops.hpp"
#include "page_seal.hpp"
#include "softmax.hpp"
#include "thread_pool.hpp"

namespace sluicegate {
namespace {

struct Tile {
    int64_t first_row;
    int64_t num_rows;
    int64_t num_keys;  // of its last row
};

class Attention {
public:
    Attention(const AttentionCall& call, const KvLayer& layer) : call_(call), layer_(layer) {
        ratio_ = call.num_heads / layer.num_kv_heads;
        for (int64_t row = 0; row < call.num_rows;) {
            int64_t end = row + 1;
            while (end < call.num_rows && end - row < kRowTile && call.row_sequence[end] == call.row_sequence[row] &&
                   call.row_position[end] == call.row_position[end - 1] + 1) {
                ++end;
            }
            tiles_.push_back({row, end - row, call.row_position[end - 1] + int64_t{1}});
            row = end;
        }
    }

    void run() {
        const int64_t units = num_units();
        const int64_t threads = ThreadPool::instance().size();
        if (units >= 4 * threads) {
            ThreadPool::instance().run(units, [&](int64_t unit, int) { whole(unit); });
        } else {
            split(units);
        }
    }

private:
    // Keys [begin, end) of range r that some row of the tile attends to, cut to what lies before the tile's last key.
    int64_t first_range(const Tile& tile) const {
        if (call_.window == 0) return 0;
        const int64_t oldest = call_.row_position[tile.first_row] + 1 - call_.window;
        return std::max<int64_t>(0, oldest) / kRange;
    }
    static int64_t num_ranges(const Tile& tile) { return (tile.num_keys + kRange - 1) / kRange; }

    size_t state_size() const { return static_cast<size_t>(layer_.head_dim) + 2; }

    // The result of one tile and kv head over one range, as [rows * ratio] states of (maximum, sum, values).
    template <KvType kType>
    void range(const Tile& tile, int64_t kv_head, int64_t r, const Ahead& ahead, float* states, bool merges) const {
        const int64_t begin = r * kRange, end = std::min(tile.num_keys, begin + kRange);
        const PagedHead pages = pages_of(tile, kv_head);
        PageSums sums(layer_, kv_head);
        const int64_t first_place = call_.page_keys == nullptr ? 0 : expect(tile, begin, end, r == first_range(tile), sums);
        const Span span{tile, pages, kv_head, begin, end, ahead, states, merges, sums};
        // One row reads each key once: straight from the pages. More rows share what is converted once.
        if (tile.num_rows == 1 && pages.has_vectors() && layer_.head_dim % (4 * kLanes) == 0) row_range<kType>(span);
        else tile_range<kType>(span);
        sums.judge([&](int64_t i) {
            int64_t none = 0;
            const int64_t found = 1 + call_.layer * call_.max_pages + first_place + i;
            std::atomic_ref<int64_t>(call_.violations[call_.row_sequence[tile.first_row]]).compare_exchange_strong(none, found);
        });
    }

    // Of keys [begin, end) the pages that begin here, or all of them in the first range. Their sums are taken right after the pass over their bytes,
    // which are in the caches then, and while what was fetched ahead is on its way. Returns the first one's place in the table.
    int64_t expect(const Tile& tile, int64_t begin, int64_t end, bool is_first, PageSums& sums) const {
        const int64_t sequence = call_.row_sequence[tile.first_row], size = layer_.page_size;
        const int64_t table = sequence * call_.max_pages, first = is_first ? begin / size : (begin + size - 1) / size;
        for (int64_t place = first; place * size < end; ++place) {
            const int64_t num_tokens = std::clamp<int64_t>(call_.num_tokens[sequence] - place * size, 0, size);
            sums.expect({call_.page_table[table + place], call_.page_keys[table + place], num_tokens});
        }
        return first;
    }

    // One tile and kv head over keys [begin, end).
    struct Span {
        const Tile& tile;
        const PagedHead& pages;
        int64_t kv_head, begin, end;
        const Ahead& ahead;
        float* states;
        bool merges;
        PageSums& sums;
    };

    template <KvType kType>
    float score_scale(int64_t kv_head) const {
        return call_.softmax_scale * layer_.k_scale[kv_head] * kUnit<kType>;
    }

    // Keys of the span that a row attends to, counted from its beginning.
    void limits(const Span& span, int64_t row, int64_t* first, int64_t* last) const {
        const int64_t position = call_.row_position[row];
        const int64_t oldest = call_.window ? std::max<int64_t>(0, position + 1 - call_.window) : 0;
        *last = std::max<int64_t>(0, std::min(span.end, position + 1) - span.begin);
        *first = std::min(std::max<int64_t>(0, oldest - span.begin), *last);
    }

    template <KvType kType>
    void row_range(const Span& span) const {
        int64_t query = 0;
        for (; query + kQueries <= ratio_; query += kQueries) row_queries<kType, kQueries>(span, query);
        if constexpr (kQueries == 4) {
            if (ratio_ - query == 3) row_queries<kType, 3>(span, query);
        }
        if constexpr (kQueries > 1) {
            if (ratio_ - query == 2) row_queries<kType, 2>(span, query);
            else if (ratio_ - query == 1) row_queries<kType, 1>(span, query);
        }
    }

    // Heads [query, query + kCount) of the kv head's group, for the tile's only row.
    template <KvType kType, int kCount>
    void row_queries(const Span& span, int64_t query) const {
        thread_local std::vector<float> parts;
        const int64_t dim = layer_.head_dim, row = span.tile.first_row;
        parts.resize(static_cast<size_t>(kCount * dim));
        const float* q[kCount];
        for (int r = 0; r < kCount; ++r) q[r] = call_.q + row * call_.q_stride + (span.kv_head * ratio_ + query + r) * dim;
        int64_t first, last;
        limits(span, row, &first, &last);
        alignas(64) float scores[kCount * kRange];
        score_pages<kType, kCount>(q, score_scale<kType>(span.kv_head), span.pages, span.begin, span.begin + last, scores);
        if (query == 0) span.sums.add_keys();
        float maximum[kCount], sum[kCount];
        for (int r = 0; r < kCount; ++r) maximum[r] = largest_score(scores + r * kRange, first, last);
        for (int r = 0; r < kCount; ++r) sum[r] = soften(scores + r * kRange, last, maximum[r]);
        weigh_pages<kType, kCount>(scores, span.pages, span.begin, first, last, span.ahead, parts.data());
        if (query == 0) span.sums.add_values();
        for (int r = 0; r < kCount; ++r) add_part(span, query + r, maximum[r], sum[r], parts.data() + r * dim);
    }

    template <KvType kType>
    void tile_range(const Span& span) const {
        thread_local TileScratch scratch;
        const int64_t dim = layer_.head_dim, count = span.tile.num_rows * ratio_;
        const int64_t stride = (dim + kLanes - 1) / kLanes * kLanes;
        scratch.resize(dim);
        load_range<kType>(span.pages, span.begin, span.end, scratch);
        span.sums.add_keys();
        span.sums.add_values();
        for (int64_t begin = 0; begin < count; begin += kBatch) {
            QueryBatch batch;
            batch.count = std::min(kBatch, count - begin);
            for (int64_t r = 0; r < batch.count; ++r) {
                const int64_t row = span.tile.first_row + (begin + r) / ratio_, head = span.kv_head * ratio_ + (begin + r) % ratio_;
                batch.q[r] = call_.q + row * call_.q_stride + head * dim;
                limits(span, row, batch.first + r, batch.last + r);
            }
            score_tile(batch, score_scale<kType>(span.kv_head), dim, scratch);
            float maximum[kBatch], sum[kBatch];
            const auto has_keys = [&](int64_t r) { return batch.first[r] < batch.last[r]; };
            for (int64_t r = 0; r < batch.count; ++r) {
                if (has_keys(r)) maximum[r] = largest_score(&scratch.scores[r * kRange], batch.first[r], batch.last[r]);
            }
            for (int64_t r = 0; r < batch.count; ++r) {
                if (has_keys(r)) sum[r] = soften(&scratch.scores[r * kRange], batch.last[r], maximum[r]);
            }
            weigh_tile(batch, dim, scratch);
            for (int64_t r = 0; r < batch.count; ++r) {
                if (has_keys(r)) add_part(span, begin + r, maximum[r], sum[r], &scratch.parts[r * stride]);
            }
        }
    }

    // One query's result over one range becomes its state, or is merged into it. Query = row * ratio + head within the group.
    void add_part(const Span& span, int64_t query, float maximum, float sum, const float* part) const {
        if (maximum == -std::numeric_limits<float>::infinity()) return;  // no key with any weight, in `whole` as in `split`
        float* state = span.states + query * static_cast<int64_t>(state_size());
        if (span.merges) {
            merge({state, state + 1, state + 2}, maximum, sum, part, layer_.head_dim);
        } else {
            state[0] = maximum;
            state[1] = sum;
            std::memcpy(state + 2, part, static_cast<size_t>(layer_.head_dim) * sizeof(float));
        }
    }

    void range(const Tile& tile, int64_t kv_head, int64_t r, const Ahead& ahead, float* states, bool merges) const {
        if (layer_.type == KvType::bf16) range<KvType::bf16>(tile, kv_head, r, ahead, states, merges);
        else if (layer_.type == KvType::fp16) range<KvType::fp16>(tile, kv_head, r, ahead, states, merges);
        else range<KvType::fp8>(tile, kv_head, r, ahead, states, merges);
    }

    PagedHead pages_of(const Tile& tile, int64_t kv_head) const {
        return {layer_, call_.page_table + call_.row_sequence[tile.first_row] * call_.max_pages, kv_head};
    }

    // The keys of range r of a unit; none where it has no such range.
    Ahead keys_of(int64_t unit, int64_t r) const {
        const Tile& tile = tile_of(unit);
        const int64_t begin = r * kRange;
        return {pages_of(tile, unit % layer_.num_kv_heads), begin, std::max(begin, std::min(tile.num_keys, begin + kRange))};
    }

    // What comes after range r of a unit that is computed as a whole.
    Ahead after(int64_t unit, int64_t r) const {
        const int64_t next = unit + 1;  // in this thread's share, most often
        if (r + 1 < num_ranges(tile_of(unit)) || next >= num_units()) return keys_of(unit, r + 1);
        return keys_of(next, first_range(tile_of(next)));
    }

    int64_t num_units() const { return static_cast<int64_t>(tiles_.size()) * layer_.num_kv_heads; }

    void clear(float* states, int64_t count) const {
        for (int64_t i = 0; i < count; ++i) {
            float* state = states + i * state_size();
            std::fill(state, state + state_size(), 0.0f);
            state[0] = -std::numeric_limits<float>::infinity();
        }
    }

    void finish(const Tile& tile, int64_t kv_head, const float* states) const {
        const int64_t dim = layer_.head_dim;
        for (int64_t row = 0; row < tile.num_rows; ++row) {
            for (int64_t h = 0; h < ratio_; ++h) {
                const float* state = states + (row * ratio_ + h) * state_size();
                float* out = call_.out + ((tile.first_row + row) * call_.num_heads + kv_head * ratio_ + h) * dim;
                const float unit = layer_.type == KvType::fp8 ? kUnit<KvType::fp8> : 1.0f;
                const float inverse = layer_.v_scale[kv_head] * unit / state[1];
                for (int64_t i = 0; i < dim; ++i) out[i] = state[2 + i] * inverse;
            }
        }
    }

    // A tile and kv head from beginning to end in one thread.
    void whole(int64_t unit) const {
        const Tile& tile = tiles_[unit / layer_.num_kv_heads];
        const int64_t kv_head = unit % layer_.num_kv_heads;
        thread_local std::vector<float> states;
        states.resize(static_cast<size_t>(tile.num_rows * ratio_) * state_size());
        clear(states.data(), tile.num_rows * ratio_);
        for (int64_t r = first_range(tile); r < num_ranges(tile); ++r) {
            range(tile, kv_head, r, after(unit, r), states.data(), true);
        }
        finish(tile, kv_head, states.data());
    }

    // Few tiles with many keys: threads share the ranges of a tile and kv head, and whoever computes the last of them merges all, in the
    // same order as in `whole`.
    void split(int64_t units) const {
        struct Piece {
            int64_t unit, range;
        };
        struct Unit {
            size_t offset;  // of its first state
            int64_t first;  // range
            std::atomic<int64_t> num_left;
        };
        std::vector<Piece> pieces;
        std::deque<Unit> progress;
        size_t total = 0;
        for (int64_t unit = 0; unit < units; ++unit) {
            const Tile& tile = tile_of(unit);
            const int64_t first = first_range(tile), end = num_ranges(tile);
            progress.emplace_back(total, first, end - first);
            for (int64_t r = first; r < end; ++r) pieces.push_back({unit, r});
            total += static_cast<size_t>((end - first) * tile.num_rows * ratio_) * state_size();
        }
        thread_local std::vector<float> buffer;
        buffer.resize(total);
        float* states = buffer.data();
        ThreadPool::instance().run(static_cast<int64_t>(pieces.size()), [&](int64_t index, int) {
            const Piece& piece = pieces[index];
            Unit& unit = progress[piece.unit];
            const Tile& tile = tile_of(piece.unit);
            const int64_t count = tile.num_rows * ratio_;
            float* own = states + unit.offset + static_cast<size_t>((piece.range - unit.first) * count) * state_size();
            clear(own, count);
            const auto next = static_cast<size_t>(index + 1);
            const Ahead ahead = next < pieces.size() ? keys_of(pieces[next].unit, pieces[next].range) : keys_of(piece.unit, num_ranges(tile));
            range(tile, piece.unit % layer_.num_kv_heads, piece.range, ahead, own, false);
            if (unit.num_left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
                merge_all(tile, piece.unit % layer_.num_kv_heads, states + unit.offset, num_ranges(tile) - unit.first);
            }
        });
    }

    void merge_all(const Tile& tile, int64_t kv_head, const float* parts, int64_t num_parts) const {
        const int64_t count = tile.num_rows * ratio_;
        thread_local std::vector<float> merged;
        merged.resize(static_cast<size_t>(count) * state_size());
        clear(merged.data(), count);
        for (int64_t part = 0; part < num_parts; ++part) {
            for (int64_t i = 0; i < count; ++i) {
                const float* from = parts + (part * count + i) * state_size();
                if (from[0] == -std::numeric_limits<float>::infinity()) continue;
                float* into = merged.data() + i * state_size();
                merge({into, into + 1, into + 2}, from[0], from[1], from + 2, layer_.head_dim);
            }
        }
        finish(tile, kv_head, merged.data());
    }

    const Tile& tile_of(int64_t unit) const { return tiles_[unit / layer_.num_kv_heads]; }

    const AttentionCall& call_;
    const KvLayer& layer_;
    int64_t ratio_;
    std::vector<Tile> tiles_;
};

void paged_attention(const AttentionCall& call, const KvLayer& layer) { Attention(call, layer).run(); }

}  // namespace
}  // namespace sluicegate
