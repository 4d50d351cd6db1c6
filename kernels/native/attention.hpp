// Attention over paged keys and values.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <deque>
#include <limits>
#include <vector>

#include "lanes.hpp"
#include "ops.hpp"
#include "page_seal.hpp"
#include "thread_pool.hpp"

namespace sluicegate {
namespace {

// One head's running result over the ranges seen so far: softmax(scores) @ V as (maximum, sum, weighted values).
struct Partial {
    float* maximum;
    float* sum;
    float* values;  // [head_dim]
};

struct Tile {
    int64_t first_row;
    int64_t num_rows;
    int64_t num_keys;  // of its last row
};

struct Scratch {
    std::vector<float> keys;    // [head_dim, kRange], one column for each key
    std::vector<float> values;  // [kRange, head_dim]
    std::vector<float> scores;  // [kQueries, kRange]
    std::vector<float> parts;   // [kQueries, head_dim]
};

// Where a sequence's keys and values lie for one kv head. Within a page keys are stored by dimension, [head_dim, page_size], so that 16
// neighbouring keys are one load; values are stored by token, [page_size, head_dim].
struct PagedHead {
    const KvLayer& layer;
    const int32_t* pages;
    int64_t head;

    int64_t page_at(int64_t key) const {
        return (pages[key / layer.page_size] * layer.num_kv_heads + head) * layer.page_size * layer.head_dim;
    }
    int64_t key_at(int64_t key) const { return page_at(key) + key % layer.page_size; }
    int64_t value_at(int64_t key) const { return page_at(key) + key % layer.page_size * layer.head_dim; }
    // Whether 16 keys from a multiple of 16 on lie side by side.
    bool has_vectors() const { return layer.page_size % kLanes == 0; }
};

// Keys [begin, end): keys by columns, values by rows, both as floats.
template <KvType kType>
void load_range(const PagedHead& from, int64_t begin, int64_t end, Scratch& scratch) {
    const KvLayer& layer = from.layer;
    const int64_t dim = layer.head_dim, whole = dim / kLanes * kLanes;
    for (int64_t key = begin; key < end; ++key) {
        const int64_t at = from.value_at(key);
        float* values = &scratch.values[(key - begin) * dim];
        for (int64_t i = 0; i < whole; i += kLanes) load_16<kType>(layer.v, at + i).store(values + i);
        for (int64_t i = whole; i < dim; ++i) values[i] = load_one<kType>(layer.v, at + i);
    }
    if (from.has_vectors()) {
        for (int64_t key = begin; key < end; key += kLanes) {
            const int64_t at = from.key_at(key);
            float* column = &scratch.keys[key - begin];
            for (int64_t i = 0; i < dim; ++i) load_16<kType>(layer.k, at + i * layer.page_size).store(column + i * kRange);
        }
        return;
    }
    for (int64_t key = begin; key < end; ++key) {
        const int64_t at = from.key_at(key);
        for (int64_t i = 0; i < dim; ++i) {
            scratch.keys[i * kRange + key - begin] = load_one<kType>(layer.k, at + i * layer.page_size);
        }
    }
}

// The products of kCount queries with 64 keys in four vectors, which `load(i, j)` gives for dimension i.
template <int kCount, typename Load>
inline void score_keys(const float* const* q, float scale, int64_t dim, const Load& load, float* scores) {
    V16 sum[kCount][4];
    for (auto& row : sum) {
        for (auto& part : row) part = V16::zero();
    }
    for (int64_t i = 0; i < dim; ++i) {
        const V16 keys[4] = {load(i, 0), load(i, 1), load(i, 2), load(i, 3)};
        for (int r = 0; r < kCount; ++r) {
            const V16 value = V16::all(q[r][i]);
            for (int j = 0; j < 4; ++j) sum[r][j].add_product(value, keys[j]);
        }
    }
    for (int r = 0; r < kCount; ++r) {
        for (int j = 0; j < 4; ++j) sum[r][j].times(V16::all(scale)).store(scores + r * kRange + j * kLanes);
    }
}

// Scores of keys [0, last) of the loaded range for kCount queries. Up to 63 places behind are written too, with numbers that mean nothing.
template <int kCount>
inline void score_range(const float* const* q, float scale, int64_t dim, const Scratch& scratch, int64_t last, float* scores) {
    for (int64_t key = 0; key < last; key += 4 * kLanes) {
        const float* columns = &scratch.keys[key];
        score_keys<kCount>(q, scale, dim, [&](int64_t i, int j) { return V16::load(columns + i * kRange + j * kLanes); }, scores + key);
    }
}

// The same for keys [begin, end), read from the pages.
template <KvType kType, int kCount>
inline void score_pages(const float* const* q, float scale, const PagedHead& from, int64_t begin, int64_t end, float* scores) {
    const KvLayer& layer = from.layer;
    const int64_t page_size = layer.page_size;
    for (int64_t key = begin; key < end; key += 4 * kLanes) {
        int64_t at[4];  // beyond the end the last keys are read again
        for (int j = 0; j < 4; ++j) at[j] = from.key_at(std::min(key + j * kLanes, (end - 1) / kLanes * kLanes));
        const auto load = [&](int64_t i, int j) { return load_16<kType>(layer.k, at[j] + i * page_size); };
        score_keys<kCount>(q, scale, layer.head_dim, load, scores + key - begin);
    }
}

// Turns scores of keys [first, last) into weights e^(score - maximum), 0 elsewhere up to a multiple of 16, and sums them lane by lane.
// Where all scores are -infinity there is nothing to weigh, and the maximum says so.
inline void soften(float* scores, int64_t first, int64_t last, float* maximum, float* sum) {
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    const int64_t end = (last + kLanes - 1) / kLanes * kLanes;
    std::fill(scores, scores + first, kNone);
    std::fill(scores + last, scores + end, kNone);
    V16 tops = V16::all(kNone);
    bool has_nan = false;
    for (int64_t i = 0; i < end; i += kLanes) {
        const V16 part = V16::load(scores + i);
        tops.raise(part);
        has_nan |= part.has_nan();
    }
    Floats lanes;
    tops.store(lanes.v);
    float top = kNone;
    for (const float lane : lanes.v) top = lane > top ? lane : top;
    *maximum = has_nan ? std::numeric_limits<float>::quiet_NaN() : top;
    *sum = *maximum;
    if (has_nan || top == kNone) {
        std::fill(scores, scores + end, *maximum);
        return;
    }
    V16 total = V16::zero();
    for (int64_t i = 0; i < end; i += kLanes) {
        const V16 weight = exp_neg(V16::load(scores + i).minus(V16::all(top)));
        weight.store(scores + i);
        total.add(weight);
    }
    total.store(lanes.v);
    *sum = sum_lanes(lanes);
}

// Adds keys [first, last) of kCount queries to sums over 64 dimensions; `load(key, j)` gives a key's vector j.
template <int kCount, typename Load>
inline void add_values(const float* weights, const Load& load, int64_t first, int64_t last, V16 (*sum)[4]) {
    for (int64_t key = first; key < last; ++key) {
        const V16 parts[4] = {load(key, 0), load(key, 1), load(key, 2), load(key, 3)};
        for (int r = 0; r < kCount; ++r) {
            const V16 weight = V16::all(weights[r * kRange + key]);
            for (int j = 0; j < 4; ++j) sum[r][j].add_product(weight, parts[j]);
        }
    }
}

// Weighted sums of the values of keys [first[r], last[r]), in the order of the keys, for kCount queries: out [kCount, dim].
template <int kCount>
inline void weigh_values(const float* weights, const int64_t* first, const int64_t* last, int64_t dim, const Scratch& scratch,
                         float* out) {
    const int64_t common_first = *std::max_element(first, first + kCount);
    const int64_t common_last = std::max(common_first, *std::min_element(last, last + kCount));
    int64_t i = 0;
    for (; i + 4 * kLanes <= dim; i += 4 * kLanes) {
        V16 sum[kCount][4];
        const float* values = scratch.values.data() + i;
        const auto load = [&](int64_t key, int j) { return V16::load(values + key * dim + j * kLanes); };
        for (int r = 0; r < kCount; ++r) {
            for (auto& part : sum[r]) part = V16::zero();
            add_values<1>(weights + r * kRange, load, first[r], std::min(common_first, last[r]), sum + r);
        }
        add_values<kCount>(weights, load, common_first, std::min(common_last, *std::min_element(last, last + kCount)), sum);
        for (int r = 0; r < kCount; ++r) {
            add_values<1>(weights + r * kRange, load, std::max(first[r], std::min(common_last, last[r])), last[r], sum + r);
            for (int j = 0; j < 4; ++j) sum[r][j].store(out + r * dim + i + j * kLanes);
        }
    }
    for (; i < dim; ++i) {
        for (int r = 0; r < kCount; ++r) {
            float sum = 0.0f;
            for (int64_t key = first[r]; key < last[r]; ++key) {
                sum = __builtin_fmaf(weights[r * kRange + key], scratch.values[key * dim + i], sum);
            }
            out[r * dim + i] = sum;
        }
    }
}

// The same for one row's queries and keys [begin + first, begin + last), read from the pages; head_dim must be a multiple of 64.
template <KvType kType, int kCount>
inline void weigh_pages(const float* weights, const PagedHead& from, int64_t begin, int64_t first, int64_t last, float* out) {
    const KvLayer& layer = from.layer;
    const int64_t dim = layer.head_dim;
    int64_t at[kRange];
    for (int64_t key = first; key < last; ++key) at[key] = from.value_at(begin + key);
    for (int64_t i = 0; i < dim; i += 4 * kLanes) {
        V16 sum[kCount][4];
        for (auto& row : sum) {
            for (auto& part : row) part = V16::zero();
        }
        const auto load = [&](int64_t key, int j) { return load_16<kType>(layer.v, at[key] + i + j * kLanes); };
        add_values<kCount>(weights, load, first, last, sum);
        for (int r = 0; r < kCount; ++r) {
            for (int j = 0; j < 4; ++j) sum[r][j].store(out + r * dim + i + j * kLanes);
        }
    }
}

inline void merge(const Partial& into, float maximum, float sum, const float* values, int64_t dim) {
    const bool is_larger = maximum > *into.maximum || maximum != maximum;
    const float top = is_larger ? maximum : *into.maximum;
    // A NaN maximum stays: every exponential from here on is NaN, and so is the result.
    const float keep = *into.maximum == -std::numeric_limits<float>::infinity() ? 0.0f : exp_neg(*into.maximum - top);
    const float add = exp_neg(maximum - top);
    *into.sum = __builtin_fmaf(*into.sum, keep, sum * add);
    for (int64_t i = 0; i < dim; ++i) into.values[i] = __builtin_fmaf(into.values[i], keep, values[i] * add);
    *into.maximum = top;
}

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
        const int64_t units = static_cast<int64_t>(tiles_.size()) * layer_.num_kv_heads;
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
    void range(const Tile& tile, int64_t kv_head, int64_t r, float* states, bool merges) const {
        thread_local Scratch scratch;
        const int64_t dim = layer_.head_dim, begin = r * kRange, end = std::min(tile.num_keys, begin + kRange);
        scratch.keys.resize(static_cast<size_t>(dim * kRange));
        scratch.values.resize(static_cast<size_t>(dim * kRange));
        scratch.scores.resize(kQueries * kRange);
        scratch.parts.resize(static_cast<size_t>(kQueries * dim));
        if (call_.page_keys != nullptr) verify(tile, kv_head, begin, end, r == first_range(tile));
        const PagedHead pages{layer_, call_.page_table + call_.row_sequence[tile.first_row] * call_.max_pages, kv_head};
        // One row reads each key once: straight from the pages. More rows share what is converted once.
        const bool is_direct = tile.num_rows == 1 && pages.has_vectors() && dim % (4 * kLanes) == 0;
        if (!is_direct) load_range<kType>(pages, begin, end, scratch);
        const Span span{tile, kv_head, begin, end, states, merges, is_direct ? &pages : nullptr};
        const int64_t count = tile.num_rows * ratio_;
        int64_t query = 0;
        for (; query + kQueries <= count; query += kQueries) queries<kType, kQueries>(span, query, scratch);
        if constexpr (kQueries == 4) {
            if (count - query == 3) queries<kType, 3>(span, query, scratch);
            else if (count - query == 2) queries<kType, 2>(span, query, scratch);
            else if (count - query == 1) queries<kType, 1>(span, query, scratch);
        }
    }

    // Verifies the pages of keys [begin, end) that begin here, or all of them in the first range: right before the pass over their
    // bytes, which then come from the cache.
    void verify(const Tile& tile, int64_t kv_head, int64_t begin, int64_t end, bool is_first) const {
        const int64_t sequence = call_.row_sequence[tile.first_row], size = layer_.page_size;
        const int64_t table = sequence * call_.max_pages;
        for (int64_t place = is_first ? begin / size : (begin + size - 1) / size; place * size < end; ++place) {
            const int64_t num_tokens = std::clamp<int64_t>(call_.num_tokens[sequence] - place * size, 0, size);
            if (is_sealed(layer_, call_.page_table[table + place], kv_head, call_.page_keys[table + place], num_tokens)) continue;
            int64_t none = 0;
            std::atomic_ref<int64_t>(call_.violations[sequence]).compare_exchange_strong(none, 1 + call_.layer * call_.max_pages + place);
        }
    }

    // One tile and kv head over keys [begin, end); `pages` if they are read from there, else they are in the scratch.
    struct Span {
        const Tile& tile;
        int64_t kv_head, begin, end;
        float* states;
        bool merges;
        const PagedHead* pages;
    };

    // Queries [query, query + kCount) of a tile over one range; query = row * ratio + head within the group.
    template <KvType kType, int kCount>
    void queries(const Span& span, int64_t query, Scratch& scratch) const {
        const auto& [tile, kv_head, begin, end, states, merges, pages] = span;
        const int64_t dim = layer_.head_dim;
        const float* q[kCount];
        int64_t first[kCount], last[kCount], furthest = 0;
        for (int r = 0; r < kCount; ++r) {
            const int64_t row = tile.first_row + (query + r) / ratio_, head = kv_head * ratio_ + (query + r) % ratio_;
            const int64_t position = call_.row_position[row];
            const int64_t oldest = call_.window ? std::max<int64_t>(0, position + 1 - call_.window) : 0;
            q[r] = call_.q + row * call_.q_stride + head * dim;
            last[r] = std::max<int64_t>(0, std::min(end, position + 1) - begin);
            first[r] = std::min(std::max<int64_t>(0, oldest - begin), last[r]);
            furthest = std::max(furthest, last[r]);
        }
        float* scores = scratch.scores.data();
        const float scale = call_.softmax_scale * layer_.k_scale[kv_head] * kUnit<kType>;
        if (pages != nullptr) score_pages<kType, kCount>(q, scale, *pages, begin, begin + furthest, scores);
        else score_range<kCount>(q, scale, dim, scratch, furthest, scores);
        float maximum[kCount], sum[kCount];
        for (int r = 0; r < kCount; ++r) {
            if (first[r] < last[r]) soften(scores + r * kRange, first[r], last[r], maximum + r, sum + r);
        }
        if (pages != nullptr) weigh_pages<kType, kCount>(scores, *pages, begin, first[0], last[0], scratch.parts.data());
        else weigh_values<kCount>(scores, first, last, dim, scratch, scratch.parts.data());
        for (int r = 0; r < kCount; ++r) {
            if (first[r] >= last[r]) continue;  // the range holds no key for this row
            if (maximum[r] == -std::numeric_limits<float>::infinity()) continue;  // or none with any weight, in `whole` as in `split`
            float* state = states + (query + r) * state_size();
            const float* part = scratch.parts.data() + r * dim;
            if (merges) {
                merge({state, state + 1, state + 2}, maximum[r], sum[r], part, dim);
            } else {
                state[0] = maximum[r];
                state[1] = sum[r];
                std::memcpy(state + 2, part, static_cast<size_t>(dim) * sizeof(float));
            }
        }
    }

    void range(const Tile& tile, int64_t kv_head, int64_t r, float* states, bool merges) const {
        if (layer_.type == KvType::bf16) range<KvType::bf16>(tile, kv_head, r, states, merges);
        else if (layer_.type == KvType::fp16) range<KvType::fp16>(tile, kv_head, r, states, merges);
        else range<KvType::fp8>(tile, kv_head, r, states, merges);
    }

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
        for (int64_t r = first_range(tile); r < num_ranges(tile); ++r) range(tile, kv_head, r, states.data(), true);
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
            range(tile, piece.unit % layer_.num_kv_heads, piece.range, own, false);
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
