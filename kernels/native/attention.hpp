// Attention over paged keys and values.
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

// Columns [first, first + 16) of 16 keys' rows into 16 rows of the key table. Null stands for a row of zeros.
template <KvType kType>
inline void transpose_block(const uint8_t* k, const int64_t* rows, int64_t first, float* to) {
#if defined(__AVX512F__)
    __m512 r[16], t[16];
    for (int i = 0; i < 16; ++i) {
        if (rows[i] < 0) {
            r[i] = _mm512_setzero_ps();
        } else if constexpr (kType == KvType::bf16) {
            const auto* from = reinterpret_cast<const __m256i*>(reinterpret_cast<const uint16_t*>(k) + rows[i] + first);
            r[i] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from)), 16));
        } else {
            alignas(64) float row[kLanes];
            load_stored<kType>(k, rows[i] + first, row);
            r[i] = _mm512_load_ps(row);
        }
    }
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    const auto low = [](__m512 a, __m512 b) { return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b))); };
    const auto high = [](__m512 a, __m512 b) { return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b))); };
    for (int i = 0; i < 16; i += 4) {
        r[i] = low(t[i], t[i + 2]);
        r[i + 1] = high(t[i], t[i + 2]);
        r[i + 2] = low(t[i + 1], t[i + 3]);
        r[i + 3] = high(t[i + 1], t[i + 3]);
    }
    // r[4 i + j] holds, in its 128-bit lane l, column 4 l + j of rows 4 i .. 4 i + 3.
    for (int j = 0; j < 4; ++j) {
        const __m512 a = _mm512_shuffle_f32x4(r[j], r[4 + j], 0x88), b = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0x88);
        const __m512 c = _mm512_shuffle_f32x4(r[j], r[4 + j], 0xdd), d = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0xdd);
        _mm512_storeu_ps(to + j * kRange, _mm512_shuffle_f32x4(a, b, 0x88));
        _mm512_storeu_ps(to + (4 + j) * kRange, _mm512_shuffle_f32x4(c, d, 0x88));
        _mm512_storeu_ps(to + (8 + j) * kRange, _mm512_shuffle_f32x4(a, b, 0xdd));
        _mm512_storeu_ps(to + (12 + j) * kRange, _mm512_shuffle_f32x4(c, d, 0xdd));
    }
#else
    for (int i = 0; i < kLanes; ++i) {
        float row[kLanes] = {};
        if (rows[i] >= 0) load_stored<kType>(k, rows[i] + first, row);
        for (int j = 0; j < kLanes; ++j) to[j * kRange + i] = row[j];
    }
#endif
}

// Keys [begin, end) of a sequence and kv head: keys by columns, values by rows, both as floats.
template <KvType kType>
void load_range(const AttentionCall& call, const KvLayer& layer, int64_t sequence, int64_t kv_head, int64_t begin, int64_t end,
                Scratch& scratch) {
    const int64_t dim = layer.head_dim, whole = dim / kLanes * kLanes;
    const int32_t* pages = call.page_table + sequence * call.max_pages;
    for (int64_t block = begin; block < end; block += kLanes) {
        int64_t rows[kLanes];  // where each key's row begins, -1 beyond the end
        for (int64_t i = 0; i < kLanes; ++i) {
            const int64_t key = block + i;
            rows[i] = -1;
            if (key >= end) continue;
            const int64_t page = pages[key / layer.page_size];
            rows[i] = ((page * layer.num_kv_heads + kv_head) * layer.page_size + key % layer.page_size) * dim;
            float* values = &scratch.values[(key - begin) * dim];
            for (int64_t j = 0; j < whole; j += kLanes) load_stored<kType>(layer.v, rows[i] + j, values + j);
            for (int64_t j = whole; j < dim; ++j) {
                values[j] = stored(layer.v, kType, rows[i] + j);
                scratch.keys[j * kRange + key - begin] = stored(layer.k, kType, rows[i] + j);
            }
        }
        for (int64_t j = 0; j < whole; j += kLanes) {
            transpose_block<kType>(layer.k, rows, j, &scratch.keys[j * kRange + block - begin]);
        }
    }
}

// Scores of keys [0, last) for kCount queries. Up to 63 places behind are written too, with numbers that mean nothing.
template <int kCount>
inline void score_range(const float* const* q, float scale, int64_t dim, const Scratch& scratch, int64_t last, float* scores) {
    for (int64_t key = 0; key < last; key += 4 * kLanes) {
        V16 sum[kCount][4];
        for (auto& row : sum) {
            for (auto& part : row) part = V16::zero();
        }
        for (int64_t i = 0; i < dim; ++i) {
            const float* column = &scratch.keys[i * kRange + key];
            const V16 keys[4] = {V16::load(column), V16::load(column + 16), V16::load(column + 32), V16::load(column + 48)};
            for (int r = 0; r < kCount; ++r) {
                const V16 value = V16::all(q[r][i]);
                for (int j = 0; j < 4; ++j) sum[r][j].add_product(value, keys[j]);
            }
        }
        for (int r = 0; r < kCount; ++r) {
            for (int j = 0; j < 4; ++j) sum[r][j].times(V16::all(scale)).store(scores + r * kRange + key + j * kLanes);
        }
    }
}

// Turns scores of keys [first, last) into weights e^(score - maximum), 0 elsewhere, and sums them lane by lane. Where all scores are
// -infinity there is nothing to weigh, and the maximum says so.
inline void soften(float* scores, int64_t first, int64_t last, float* maximum, float* sum) {
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    std::fill(scores, scores + first, kNone);
    std::fill(scores + last, scores + kRange, kNone);
    Floats tops;
    Ints nans = {};
    for (float& lane : tops.v) lane = kNone;
    for (int64_t i = 0; i < kRange; i += kLanes) {
        for (int l = 0; l < kLanes; ++l) {
            tops.v[l] = scores[i + l] > tops.v[l] ? scores[i + l] : tops.v[l];
            nans.v[l] |= scores[i + l] != scores[i + l] ? 1 : 0;
        }
    }
    float top = kNone;
    bool has_nan = false;
    for (int l = 0; l < kLanes; ++l) {
        top = tops.v[l] > top ? tops.v[l] : top;
        has_nan |= nans.v[l] != 0;
    }
    *maximum = has_nan ? std::numeric_limits<float>::quiet_NaN() : top;
    *sum = *maximum;
    if (has_nan || top == kNone) {
        std::fill(scores, scores + kRange, *maximum);
        return;
    }
    Floats total = {};
    for (int64_t i = 0; i < kRange; i += kLanes) {
        for (int l = 0; l < kLanes; ++l) {
            scores[i + l] = exp_neg(scores[i + l] - top);
            total.v[l] += scores[i + l];
        }
    }
    *sum = sum_lanes(total);
}

// Adds keys [first, last) of kCount queries to sums over 64 dimensions.
template <int kCount>
inline void add_values(const float* weights, const float* values, int64_t first, int64_t last, int64_t dim, V16 (*sum)[4]) {
    for (int64_t key = first; key < last; ++key) {
        const float* row = values + key * dim;
        const V16 parts[4] = {V16::load(row), V16::load(row + 16), V16::load(row + 32), V16::load(row + 48)};
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
        for (int r = 0; r < kCount; ++r) {
            for (auto& part : sum[r]) part = V16::zero();
            add_values<1>(weights + r * kRange, values, first[r], std::min(common_first, last[r]), dim, sum + r);
        }
        add_values<kCount>(weights, values, common_first, std::min(common_last, *std::min_element(last, last + kCount)), dim, sum);
        for (int r = 0; r < kCount; ++r) {
            add_values<1>(weights + r * kRange, values, std::max(first[r], std::min(common_last, last[r])), last[r], dim, sum + r);
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
        load_range<kType>(call_, layer_, call_.row_sequence[tile.first_row], kv_head, begin, end, scratch);
        const int64_t count = tile.num_rows * ratio_;
        int64_t query = 0;
        for (; query + kQueries <= count; query += kQueries) {
            queries<kQueries>(tile, kv_head, begin, end, query, states, merges, scratch);
        }
        for (; query < count; ++query) queries<1>(tile, kv_head, begin, end, query, states, merges, scratch);
    }

    // Queries [query, query + kCount) of a tile over the loaded range; query = row * ratio + head within the group.
    template <int kCount>
    void queries(const Tile& tile, int64_t kv_head, int64_t begin, int64_t end, int64_t query, float* states, bool merges,
                 Scratch& scratch) const {
        const int64_t dim = layer_.head_dim;
        const float* q[kCount];
        int64_t first[kCount], last[kCount], furthest = 0;
        for (int r = 0; r < kCount; ++r) {
            const int64_t row = tile.first_row + (query + r) / ratio_, head = kv_head * ratio_ + (query + r) % ratio_;
            const int64_t position = call_.row_position[row];
            const int64_t oldest = call_.window ? std::max<int64_t>(0, position + 1 - call_.window) : 0;
            q[r] = call_.q + (row * call_.num_heads + head) * dim;
            last[r] = std::max<int64_t>(0, std::min(end, position + 1) - begin);
            first[r] = std::min(std::max<int64_t>(0, oldest - begin), last[r]);
            furthest = std::max(furthest, last[r]);
        }
        float* scores = scratch.scores.data();
        score_range<kCount>(q, call_.softmax_scale * layer_.k_scale[kv_head], dim, scratch, furthest, scores);
        float maximum[kCount], sum[kCount];
        for (int r = 0; r < kCount; ++r) {
            if (first[r] < last[r]) soften(scores + r * kRange, first[r], last[r], maximum + r, sum + r);
        }
        weigh_values<kCount>(scores, first, last, dim, scratch, scratch.parts.data());
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
                const float inverse = layer_.v_scale[kv_head] / state[1];
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

    // Few tiles with many keys: threads share the ranges, which are merged in the same order as in `whole`.
    void split(int64_t units) const {
        struct Piece {
            int64_t unit, range;
            size_t offset;
        };
        std::vector<Piece> pieces;
        size_t total = 0;
        for (int64_t unit = 0; unit < units; ++unit) {
            const Tile& tile = tiles_[unit / layer_.num_kv_heads];
            for (int64_t r = first_range(tile); r < num_ranges(tile); ++r) {
                pieces.push_back({unit, r, total});
                total += static_cast<size_t>(tile.num_rows * ratio_) * state_size();
            }
        }
        thread_local std::vector<float> buffer;
        buffer.resize(total);
        float* states = buffer.data();
        ThreadPool::instance().run(static_cast<int64_t>(pieces.size()), [&](int64_t index, int) {
            const Piece& piece = pieces[index];
            const Tile& tile = tiles_[piece.unit / layer_.num_kv_heads];
            clear(states + piece.offset, tile.num_rows * ratio_);
            range(tile, piece.unit % layer_.num_kv_heads, piece.range, states + piece.offset, false);
        });
        std::vector<float> merged;
        for (size_t index = 0; index < pieces.size();) {
            const int64_t unit = pieces[index].unit;
            const Tile& tile = tiles_[unit / layer_.num_kv_heads];
            const int64_t count = tile.num_rows * ratio_;
            merged.resize(static_cast<size_t>(count) * state_size());
            clear(merged.data(), count);
            for (; index < pieces.size() && pieces[index].unit == unit; ++index) {
                for (int64_t i = 0; i < count; ++i) {
                    const float* part = states + pieces[index].offset + i * state_size();
                    if (part[0] == -std::numeric_limits<float>::infinity()) continue;
                    float* into = merged.data() + i * state_size();
                    merge({into, into + 1, into + 2}, part[0], part[1], part + 2, layer_.head_dim);
                }
            }
            finish(tile, unit % layer_.num_kv_heads, merged.data());
        }
    }

    const AttentionCall& call_;
    const KvLayer& layer_;
    int64_t ratio_;
    std::vector<Tile> tiles_;
};

void paged_attention(const AttentionCall& call, const KvLayer& layer) { Attention(call, layer).run(); }

}  // namespace
}  // namespace sluicegate
