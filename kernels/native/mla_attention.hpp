// Multi-head latent attention in its absorbed form over paged latent vectors.
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

// All heads attend to the same key, so heads are the lanes: an element of a key is multiplied with that element of 16 heads' queries, a
// head's sums run over its own lane, and no sum is ever taken across lanes.
#if defined(__AVX512F__)
constexpr int kKeyBlock = 6, kVectorBlock = 4;
#elif defined(__AVX2__)
constexpr int kKeyBlock = 3, kVectorBlock = 2;
#else
constexpr int kKeyBlock = 1, kVectorBlock = 1;
#endif
constexpr int64_t kLatentRows = 8;  // rows of one sequence that share converted keys
// Ranges are merged in order within a span, and spans in order: what threads share are spans, for a state of all heads is large.
constexpr int64_t kSpanRanges = 8;

// Vectors that lie by token, `count` of them as floats. `slot_of(i)` is where vector i lies, page * page_size + offset.
template <KvType kType, typename SlotOf>
inline void load_tokens(const uint8_t* stored, int64_t dim, int64_t count, const SlotOf& slot_of, float* to) {
    const int64_t whole = dim / kLanes * kLanes;
    for (int64_t token = 0; token < count; ++token, to += dim) {
        const int64_t at = slot_of(token) * dim;
        for (int64_t i = 0; i < whole; i += kLanes) load_16<kType>(stored, at + i).store(to + i);
        for (int64_t i = whole; i < dim; ++i) to[i] = load_one<kType>(stored, at + i);
    }
}

// to[i * lanes + head] = from[head * count + i], 0 in lanes that no head has. In blocks of 16 by 16: heads lie a power of two apart, and
// reading one element of each would have them drive each other out of the first-level cache.
inline void spread_heads(const float* from, int64_t heads, int64_t count, int64_t lanes, float* to) {
    alignas(64) float block[kLanes][kLanes];
    for (int64_t first = 0; first < lanes; first += kLanes) {
        for (int64_t i = 0; i < count; i += kLanes) {
            const int64_t width = std::min<int64_t>(kLanes, count - i);
            for (int64_t lane = 0; lane < kLanes; ++lane) {
                const int64_t head = first + lane;
                if (head < heads) std::memcpy(block[lane], from + head * count + i, static_cast<size_t>(width) * sizeof(float));
                else std::memset(block[lane], 0, sizeof block[lane]);
            }
            for (int64_t j = 0; j < width; ++j) {
                float* line = to + (i + j) * lanes + first;
                for (int64_t lane = 0; lane < kLanes; ++lane) line[lane] = block[lane][j];
            }
        }
    }
}

// out[a * out_stride + lane] = sum over i of left[a * left_a + i * left_i] * right[i * lanes + lane], for kCount a's and 16 * kVectors lanes.
template <int kCount, int kVectors>
inline void lane_products(const float* left, int64_t left_a, int64_t left_i, const float* right, int64_t lanes, int64_t count,
                          V16 (*sum)[kVectors]) {
    for (int a = 0; a < kCount; ++a) {
        for (int v = 0; v < kVectors; ++v) sum[a][v] = V16::zero();
    }
    for (int64_t i = 0; i < count; ++i) {
        V16 vectors[kVectors];
        for (int v = 0; v < kVectors; ++v) vectors[v] = V16::load(right + i * lanes + v * kLanes);
        for (int a = 0; a < kCount; ++a) {
            const V16 value = V16::all(left[a * left_a + i * left_i]);
            for (int v = 0; v < kVectors; ++v) sum[a][v].add_product(value, vectors[v]);
        }
    }
}

// The same for any number of a's and lanes, cut into blocks; `take(a, lane, sum)` gets each vector of the result.
template <int kVectors, typename Take>
inline void products_of_lanes(const float* left, int64_t left_a, int64_t left_i, int64_t num_a, const float* right, int64_t lanes,
                              int64_t lane, int64_t count, const Take& take) {
    int64_t a = 0;
    for (; a + kKeyBlock <= num_a; a += kKeyBlock) {
        V16 sum[kKeyBlock][kVectors];
        lane_products<kKeyBlock, kVectors>(left + a * left_a, left_a, left_i, right + lane, lanes, count, sum);
        for (int j = 0; j < kKeyBlock; ++j) {
            for (int v = 0; v < kVectors; ++v) take(a + j, lane + v * kLanes, sum[j][v]);
        }
    }
    for (; a < num_a; ++a) {
        V16 sum[1][kVectors];
        lane_products<1, kVectors>(left + a * left_a, left_a, left_i, right + lane, lanes, count, sum);
        for (int v = 0; v < kVectors; ++v) take(a, lane + v * kLanes, sum[0][v]);
    }
}

template <typename Take>
inline void products(const float* left, int64_t left_a, int64_t left_i, int64_t num_a, const float* right, int64_t lanes, int64_t count,
                     const Take& take) {
    int64_t lane = 0;
    for (; lane + kVectorBlock * kLanes <= lanes; lane += kVectorBlock * kLanes) {
        products_of_lanes<kVectorBlock>(left, left_a, left_i, num_a, right, lanes, lane, count, take);
    }
    for (; lane < lanes; lane += kLanes) products_of_lanes<1>(left, left_a, left_i, num_a, right, lanes, lane, count, take);
}

// Where the keys of one row lie: all of its sequence in order, or those that were selected for it.
struct LatentKeys {
    const int32_t* pages;
    const int32_t* selected;  // null: all
    int64_t page_size;

    int64_t position(int64_t index) const { return selected == nullptr ? index : selected[index]; }
    int64_t slot(int64_t index) const {
        const int64_t at = position(index);
        return pages[at / page_size] * page_size + at % page_size;
    }
};

// Notes down the first page in a table that has not the seal that it must have.
inline void verify_place(const SealExpectation& expected, const KvLayer& layer, const int32_t* page_table, int64_t sequence,
                         int64_t max_pages, int64_t place) {
    const int64_t at = sequence * max_pages + place, size = layer.page_size;
    const int64_t num_tokens = std::clamp<int64_t>(expected.num_tokens[sequence] - place * size, 0, size);
    if (is_sealed(layer, 0, {page_table[at], expected.page_keys[at], num_tokens})) return;
    int64_t none = 0;
    std::atomic_ref<int64_t>(expected.violations[sequence]).compare_exchange_strong(none, 1 + expected.layer * max_pages + place);
}

// The same for the pages of a row's keys [begin, end) that were not verified with the keys before them.
inline void verify_keys(const SealExpectation& expected, const KvLayer& layer, const int32_t* page_table, int64_t sequence,
                        int64_t max_pages, const LatentKeys& keys, int64_t begin, int64_t end) {
    int64_t before = begin == 0 ? -1 : keys.position(begin - 1) / layer.page_size;
    for (int64_t index = begin; index < end; ++index) {
        const int64_t place = keys.position(index) / layer.page_size;
        if (place != before) verify_place(expected, layer, page_table, sequence, max_pages, place);
        before = place;
    }
}

class LatentAttention {
public:
    LatentAttention(const LatentCall& call, const KvLayer& layer)
        : call_(call), layer_(layer), lanes_((call.num_heads + kLanes - 1) / kLanes * kLanes) {
        for (int64_t row = 0; row < call.num_rows;) {
            int64_t end = row + 1;
            while (call.selected == nullptr && end < call.num_rows && end - row < kLatentRows &&
                   call.row_sequence[end] == call.row_sequence[row] && call.row_position[end] == call.row_position[end - 1] + 1) {
                ++end;
            }
            tiles_.push_back({row, end - row, num_keys(end - 1)});
            row = end;
        }
    }

    void run() {
        const auto count = static_cast<int64_t>(tiles_.size());
        if (count >= 4 * ThreadPool::instance().size()) {
            ThreadPool::instance().run(count, [&](int64_t index, int) { whole(tiles_[index]); });
        } else {
            split();
        }
    }

private:
    struct Tile {
        int64_t first_row, num_rows;
        int64_t num_keys;  // of its last row
    };
    struct Scratch {
        std::vector<float> queries;  // [rows, key_dim, lanes]
        std::vector<float> keys;     // [kRange, key_dim]
        std::vector<float> weights;  // [kRange, lanes]: scores at first
        std::vector<float> factors;  // [4, lanes]
    };

    int64_t key_dim() const { return layer_.head_dim; }
    static int64_t num_ranges(const Tile& tile) { return (tile.num_keys + kRange - 1) / kRange; }
    static int64_t num_spans(const Tile& tile) { return (num_ranges(tile) + kSpanRanges - 1) / kSpanRanges; }
    // A row's running result: maximum and sum of each head, then [latent_dim, lanes].
    int64_t state_size() const { return (2 + call_.latent_dim) * lanes_; }

    // Keys of a row: those up to its position, or what was selected, up to the first number that means none.
    int64_t num_keys(int64_t row) const {
        const int64_t all = call_.row_position[row] + int64_t{1};
        if (call_.selected == nullptr) return all;
        const int32_t* selected = call_.selected + row * call_.max_selected;
        int64_t count = 0;
        while (count < call_.max_selected && selected[count] >= 0 && selected[count] < all) ++count;
        return count;
    }

    LatentKeys keys_of(const Tile& tile) const {
        const int32_t* selected = call_.selected == nullptr ? nullptr : call_.selected + tile.first_row * call_.max_selected;
        return {call_.page_table + call_.row_sequence[tile.first_row] * call_.max_pages, selected, layer_.page_size};
    }

    static Scratch& scratch() {
        thread_local Scratch scratch;
        return scratch;
    }

    void spread_queries(const Tile& tile) const {
        Scratch& own = scratch();
        own.queries.resize(static_cast<size_t>(tile.num_rows * key_dim() * lanes_));
        own.keys.resize(static_cast<size_t>(kRange * key_dim()));
        own.weights.resize(static_cast<size_t>(kRange * lanes_));
        own.factors.resize(static_cast<size_t>(4 * lanes_));
        for (int64_t row = 0; row < tile.num_rows; ++row) {
            float* to = &own.queries[row * key_dim() * lanes_];
            const int64_t from = tile.first_row + row;
            spread_heads(call_.q_latent + from * call_.latent_stride, call_.num_heads, call_.latent_dim, lanes_, to);
            spread_heads(call_.q_rope + from * call_.rope_stride, call_.num_heads, call_.rope_dim, lanes_, to + call_.latent_dim * lanes_);
        }
    }

    void load(const LatentKeys& keys, int64_t begin, int64_t count, float* to) const {
        const auto slot_of = [&](int64_t index) { return keys.slot(begin + index); };
        if (layer_.type == KvType::bf16) load_tokens<KvType::bf16>(layer_.k, key_dim(), count, slot_of, to);
        else if (layer_.type == KvType::fp16) load_tokens<KvType::fp16>(layer_.k, key_dim(), count, slot_of, to);
        else load_tokens<KvType::fp8>(layer_.k, key_dim(), count, slot_of, to);
    }

    float unit() const { return layer_.k_scale[0] * (layer_.type == KvType::fp8 ? kUnit<KvType::fp8> : 1.0f); }

    // Turns scores [keys, lanes] into weights e^(score - maximum); maximum and sum of each lane. Where all scores are -infinity, all weights are 0.
    void soften(int64_t num_keys, float* scores, float* maximum, float* sum) const {
        constexpr float kNone = -std::numeric_limits<float>::infinity();
        for (int64_t lane = 0; lane < lanes_; lane += kLanes) {
            V16 top = V16::all(kNone);
            for (int64_t key = 0; key < num_keys; ++key) top.raise(V16::load(scores + key * lanes_ + lane));
            Floats shift;
            top.store(shift.v);
            top.store(maximum + lane);
            for (float& one : shift.v) one = one == kNone ? 0.0f : one;
            const V16 less = V16::load(shift.v);
            V16 total = V16::zero();
            for (int64_t key = 0; key < num_keys; ++key) {
                float* score = scores + key * lanes_ + lane;
                const V16 weight = exp_neg(V16::load(score).minus(less));
                weight.store(score);
                total.add(weight);
            }
            total.store(sum + lane);
        }
    }

    // Merges maxima and sums into a state, and gives the factors for both vectors.
    void merge_sums(float* state, const float* maximum, const float* sum, float* keep, float* add) const {
        for (int64_t lane = 0; lane < lanes_; ++lane) {
            const float top = maximum[lane] > state[lane] ? maximum[lane] : state[lane];
            const float shift = top == -std::numeric_limits<float>::infinity() ? 0.0f : top;
            keep[lane] = exp_neg(state[lane] - shift);
            add[lane] = exp_neg(maximum[lane] - shift);
            state[lanes_ + lane] = __builtin_fmaf(state[lanes_ + lane], keep[lane], sum[lane] * add[lane]);
            state[lane] = top;
        }
    }

    static void merge_vector(float* into, V16 values, const float* keep, const float* add) {
        V16 merged = values.times(V16::load(add));
        merged.add_product(V16::load(into), V16::load(keep));
        merged.store(into);
    }

    // One tile over range r, merged into [rows] states.
    void range(const Tile& tile, int64_t r, float* states) const {
        Scratch& own = scratch();
        const int64_t begin = r * kRange, end = std::min(tile.num_keys, begin + kRange), dim = key_dim();
        const LatentKeys keys = keys_of(tile);
        if (call_.expected.page_keys != nullptr) {
            verify_keys(call_.expected, layer_, call_.page_table, call_.row_sequence[tile.first_row], call_.max_pages, keys, begin, end);
        }
        load(keys, begin, end - begin, own.keys.data());
        const V16 scale = V16::all(call_.softmax_scale * unit());
        float *maximum = own.factors.data(), *sum = maximum + lanes_, *keep = sum + lanes_, *add = keep + lanes_;
        float* weights = own.weights.data();
        for (int64_t row = 0; row < tile.num_rows; ++row) {
            const int64_t last = call_.selected != nullptr ? end - begin : std::min(end, call_.row_position[tile.first_row + row] + int64_t{1}) - begin;
            if (last <= 0) continue;  // the range holds no key for this row
            products(own.keys.data(), dim, 1, last, &own.queries[row * dim * lanes_], lanes_, dim,
                     [&](int64_t key, int64_t lane, V16 score) { score.times(scale).store(weights + key * lanes_ + lane); });
            soften(last, weights, maximum, sum);
            float* state = states + row * state_size();
            float* values = state + 2 * lanes_;
            merge_sums(state, maximum, sum, keep, add);
            products(own.keys.data(), 1, dim, call_.latent_dim, weights, lanes_, last, [&](int64_t i, int64_t lane, V16 part) {
                merge_vector(values + i * lanes_ + lane, part, keep + lane, add + lane);
            });
        }
    }

    void clear(float* states, int64_t count) const {
        std::fill(states, states + count * state_size(), 0.0f);
        for (int64_t i = 0; i < count; ++i) {
            std::fill(states + i * state_size(), states + i * state_size() + lanes_, -std::numeric_limits<float>::infinity());
        }
    }

    void finish(const Tile& tile, const float* states) const {
        for (int64_t row = 0; row < tile.num_rows; ++row) {
            float* out = call_.out + (tile.first_row + row) * call_.num_heads * call_.latent_dim;
            if (tile.num_keys == 0) std::fill(out, out + call_.num_heads * call_.latent_dim, 0.0f);  // nothing was selected
            for (int64_t head = 0; head < call_.num_heads && tile.num_keys > 0; ++head) {
                const float* state = states + row * state_size();
                const float inverse = unit() / state[lanes_ + head];
                const float* values = state + 2 * lanes_ + head;
                for (int64_t i = 0; i < call_.latent_dim; ++i) out[head * call_.latent_dim + i] = values[i * lanes_] * inverse;
            }
        }
    }

    // One tile over a span, as [rows] states of its own.
    void span(const Tile& tile, int64_t index, float* states) const {
        clear(states, tile.num_rows);
        for (int64_t r = index * kSpanRanges; r < std::min((index + 1) * kSpanRanges, num_ranges(tile)); ++r) range(tile, r, states);
    }

    // Merges a span's states into the total of its tile. A row that has no key in the span keeps what it has, bit for bit.
    void merge_span(const Tile& tile, int64_t index, const float* states, float* total) const {
        float *keep = scratch().factors.data(), *add = keep + lanes_;
        for (int64_t row = 0; row < tile.num_rows; ++row) {
            if (index * kSpanRanges * kRange > call_.row_position[tile.first_row + row]) continue;
            const float* from = states + row * state_size();
            float* into = total + row * state_size();
            merge_sums(into, from, from + lanes_, keep, add);
            for (int64_t i = 0; i < call_.latent_dim; ++i) {
                for (int64_t lane = 0; lane < lanes_; lane += kLanes) {
                    const int64_t at = (2 + i) * lanes_ + lane;
                    merge_vector(into + at, V16::load(from + at), keep + lane, add + lane);
                }
            }
        }
    }

    // A tile from beginning to end in one thread.
    void whole(const Tile& tile) const {
        thread_local std::vector<float> states;
        const int64_t size = tile.num_rows * state_size();
        states.resize(static_cast<size_t>(2 * size));
        clear(states.data(), tile.num_rows);
        spread_queries(tile);
        for (int64_t index = 0; index < num_spans(tile); ++index) {
            span(tile, index, states.data() + size);
            merge_span(tile, index, states.data() + size, states.data());
        }
        finish(tile, states.data());
    }

    // Few tiles: threads share their spans. As many tiles at once as bounded memory holds the states of.
    void split() const {
        for (size_t first = 0; first < tiles_.size();) {
            size_t end = first;
            int64_t floats = 0;
            while (end < tiles_.size() && (end == first || floats + num_floats(tiles_[end]) <= kFloatsAtOnce)) floats += num_floats(tiles_[end++]);
            split(first, end, static_cast<size_t>(floats));
            first = end;
        }
    }

    static constexpr int64_t kFloatsAtOnce = int64_t{1} << 23;
    int64_t num_floats(const Tile& tile) const { return (num_spans(tile) + 1) * tile.num_rows * state_size(); }

    // Tiles [first, end). Whoever computes a tile's last span merges all, in the same order as in `whole`.
    void split(size_t first, size_t end, size_t floats) const {
        struct Progress {
            float* states;  // the total's, then the spans'
            std::atomic<int64_t> num_left;
        };
        struct Piece {
            size_t tile;
            int64_t span;
        };
        thread_local std::vector<float> buffer;
        buffer.resize(floats);
        std::vector<Piece> pieces;
        std::deque<Progress> progress;
        float* states = buffer.data();
        for (size_t index = first; index < end; ++index) {
            if (tiles_[index].num_keys == 0) finish(tiles_[index], nullptr);
            progress.emplace_back(states, num_spans(tiles_[index]));
            for (int64_t s = 0; s < num_spans(tiles_[index]); ++s) pieces.push_back({index, s});
            states += num_floats(tiles_[index]);
        }
        ThreadPool::instance().run(static_cast<int64_t>(pieces.size()), [&](int64_t number, int) {
            const Piece& piece = pieces[static_cast<size_t>(number)];
            const Tile& tile = tiles_[piece.tile];
            Progress& unit = progress[piece.tile - first];
            const int64_t size = tile.num_rows * state_size();
            spread_queries(tile);
            span(tile, piece.span, unit.states + (piece.span + 1) * size);
            if (unit.num_left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
            clear(unit.states, tile.num_rows);
            for (int64_t s = 0; s < num_spans(tile); ++s) merge_span(tile, s, unit.states + (s + 1) * size, unit.states);
            finish(tile, unit.states);
        });
    }

    const LatentCall& call_;
    const KvLayer& layer_;
    int64_t lanes_;
    std::vector<Tile> tiles_;
};

void mla_attention(const LatentCall& call, const KvLayer& layer) { LatentAttention(call, layer).run(); }

}  // namespace
}  // namespace sluicegate
