// The queries of many rows over one range of keys: the range is converted to floats once, and read from the first-level cache in strips
// while all queries pass by, a few at a time in registers.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "attention_row.hpp"
#include "lanes.hpp"

namespace sluicegate {
namespace {

constexpr int64_t kStrip = kTileVectors * kLanes;  // keys, or dimensions of values, that a group of queries takes at once
constexpr int64_t kStripKeys = 64;                 // keys whose values are weighed in one go: 16 KiB of 64 dimensions
constexpr int64_t kBatch = 96;                     // queries that pass by between two visits of a strip
static_assert(kRange % kStrip == 0 && kRange % kStripKeys == 0);

struct TileScratch {
    std::vector<float> keys;    // [kRange / kStrip, head_dim, kStrip], one column for each key
    std::vector<float> values;  // pieces of kStrip dimensions, [kRange, kStrip] each, then pieces of 16 for what is left
    std::vector<float> scores;  // [kBatch, kRange]
    std::vector<float> parts;   // [kBatch, head_dim rounded up to 16]

    void resize(int64_t dim) {
        const int64_t padded = (dim + kLanes - 1) / kLanes * kLanes;
        keys.resize(static_cast<size_t>(kRange * dim));
        values.resize(static_cast<size_t>(kRange * padded));
        scores.resize(static_cast<size_t>(kBatch * kRange));
        parts.resize(static_cast<size_t>(kBatch * padded));
    }
};

// Queries of one kv head over the keys of a range: query r attends to [first[r], last[r]) of them.
struct QueryBatch {
    int64_t count = 0;
    const float* q[kBatch];
    int64_t first[kBatch], last[kBatch];

    int64_t furthest(int64_t from, int64_t num) const { return *std::max_element(last + from, last + from + num); }
};

// Where dimension i (a multiple of 16) of a key's value lies in TileScratch::values.
inline int64_t value_place(int64_t key, int64_t i, int64_t dim) {
    if (i < dim / kStrip * kStrip) return i / kStrip * kStrip * kRange + key * kStrip + i % kStrip;
    return i * kRange + key * kLanes;
}

// Keys [begin, end) as floats.
template <KvType kType>
void load_range(const PagedHead& from, int64_t begin, int64_t end, TileScratch& scratch) {
    const KvLayer& layer = from.layer;
    const int64_t dim = layer.head_dim, whole = dim / kLanes * kLanes;
    for (int64_t key = begin; key < end; ++key) {
        const int64_t at = from.value_at(key);
        for (int64_t i = 0; i < whole; i += kLanes) load_16<kType>(layer.v, at + i).store(&scratch.values[value_place(key - begin, i, dim)]);
        if (whole == dim) continue;
        float* rest = &scratch.values[value_place(key - begin, whole, dim)];
        for (int64_t i = 0; i < kLanes; ++i) rest[i] = whole + i < dim ? load_one<kType>(layer.v, at + whole + i) : 0.0f;
    }
    const auto column_of = [&](int64_t key) { return &scratch.keys[(key - begin) / kStrip * kStrip * dim + (key - begin) % kStrip]; };
    if (from.has_vectors()) {
        for (int64_t key = begin; key < end; key += kLanes) {
            const int64_t at = from.key_at(key);
            float* column = column_of(key);
            for (int64_t i = 0; i < dim; ++i) load_16<kType>(layer.k, at + i * layer.page_size).store(column + i * kStrip);
        }
        return;
    }
    for (int64_t key = begin; key < end; ++key) {
        const int64_t at = from.key_at(key);
        float* column = column_of(key);
        for (int64_t i = 0; i < dim; ++i) column[i * kStrip] = load_one<kType>(layer.k, at + i * layer.page_size);
    }
}

// The products of kCount queries with kVectors * 16 columns.
template <int kCount, int kVectors>
inline void score_columns(const float* const* q, float scale, int64_t dim, const float* columns, float* scores) {
    V16 sum[kCount][kVectors];
    for (auto& row : sum) {
        for (auto& part : row) part = V16::zero();
    }
    for (int64_t i = 0; i < dim; ++i, columns += kStrip) {
        V16 keys[kVectors];
        for (int j = 0; j < kVectors; ++j) keys[j] = V16::load(columns + j * kLanes);
        for (int r = 0; r < kCount; ++r) {
            const V16 value = V16::all(q[r][i]);
            for (int j = 0; j < kVectors; ++j) sum[r][j].add_product(value, keys[j]);
        }
    }
    for (int r = 0; r < kCount; ++r) {
        for (int j = 0; j < kVectors; ++j) sum[r][j].times(V16::all(scale)).store(scores + r * kRange + j * kLanes);
    }
}

// Calls body with std::integral_constant<int, n> and the first of n queries, for groups as large as registers allow.
template <typename Body>
inline void in_groups(int64_t count, const Body& body) {
    int64_t query = 0;
    for (; query + kTileQueries <= count; query += kTileQueries) body(std::integral_constant<int, kTileQueries>{}, query);
    if constexpr (kTileQueries > 3) {
        for (; query + 3 <= count; query += 3) body(std::integral_constant<int, 3>{}, query);
    }
    for (; query < count; ++query) body(std::integral_constant<int, 1>{}, query);
}

// Scores of all queries with the keys that they attend to. Neighbouring places are written too, with numbers that mean nothing.
inline void score_tile(const QueryBatch& batch, float scale, int64_t dim, TileScratch& scratch) {
    const int64_t furthest = batch.furthest(0, batch.count);
    for (int64_t key = 0; key < furthest; key += kStrip) {
        const float* columns = &scratch.keys[key * dim];
        in_groups(batch.count, [&](auto size, int64_t query) {
            constexpr int kCount = decltype(size)::value;
            float* scores = &scratch.scores[query * kRange + key];
            const int64_t left = batch.furthest(query, kCount) - key;
            if (left > kStrip / 2) {
                score_columns<kCount, kTileVectors>(batch.q + query, scale, dim, columns, scores);
            } else {
                for (int64_t i = 0; i < left; i += kLanes) score_columns<kCount, 1>(batch.q + query, scale, dim, columns + i, scores + i);
            }
        });
    }
}

// Adds the values of keys [first, last) to the sums of kCount queries.
template <int kCount, int kVectors>
inline void add_values(const float* weights, const float* values, int64_t first, int64_t last, V16 (*sum)[kVectors]) {
    for (int64_t key = first; key < last; ++key) {
        V16 parts[kVectors];
        for (int j = 0; j < kVectors; ++j) parts[j] = V16::load(values + (key * kVectors + j) * kLanes);
        for (int r = 0; r < kCount; ++r) {
            const V16 weight = V16::all(weights[r * kRange + key]);
            for (int j = 0; j < kVectors; ++j) sum[r][j].add_product(weight, parts[j]);
        }
    }
}

// Adds a piece of the values of keys [begin, end) to `parts` of kCount queries, each query's keys in their order.
template <int kCount, int kVectors>
inline void weigh_strip(const QueryBatch& batch, int64_t query, const float* weights, const float* values, int64_t begin, int64_t end,
                        float* parts, int64_t stride) {
    int64_t first[kCount], last[kCount];
    for (int r = 0; r < kCount; ++r) {
        first[r] = std::clamp(batch.first[query + r], begin, end);
        last[r] = std::clamp(batch.last[query + r], begin, end);
    }
    const int64_t common_first = *std::max_element(first, first + kCount);
    const int64_t common_last = std::max(common_first, *std::min_element(last, last + kCount));
    V16 sum[kCount][kVectors];
    for (int r = 0; r < kCount; ++r) {
        for (int j = 0; j < kVectors; ++j) sum[r][j] = begin == 0 ? V16::zero() : V16::load(parts + r * stride + j * kLanes);
    }
    for (int r = 0; r < kCount; ++r) {
        add_values<1, kVectors>(weights + r * kRange, values, first[r], std::min(common_first, last[r]), sum + r);
    }
    add_values<kCount, kVectors>(weights, values, common_first, std::min(common_last, *std::min_element(last, last + kCount)), sum);
    for (int r = 0; r < kCount; ++r) {
        add_values<1, kVectors>(weights + r * kRange, values, std::max(first[r], std::min(common_last, last[r])), last[r], sum + r);
        for (int j = 0; j < kVectors; ++j) sum[r][j].store(parts + r * stride + j * kLanes);
    }
}

// Weighted sums of values for all queries, into scratch.parts.
inline void weigh_tile(const QueryBatch& batch, int64_t dim, TileScratch& scratch) {
    const int64_t stride = (dim + kLanes - 1) / kLanes * kLanes, furthest = batch.furthest(0, batch.count);
    for (int64_t i = 0; i < dim;) {
        const bool is_whole = i + kStrip <= dim;
        for (int64_t key = 0; key < furthest; key += kStripKeys) {
            in_groups(batch.count, [&](auto size, int64_t query) {
                constexpr int kCount = decltype(size)::value;
                if (key > 0 && batch.furthest(query, kCount) <= key) return;
                const float *weights = &scratch.scores[query * kRange], *values = &scratch.values[i * kRange];
                float* parts = &scratch.parts[query * stride + i];
                if (is_whole) weigh_strip<kCount, kTileVectors>(batch, query, weights, values, key, key + kStripKeys, parts, stride);
                else weigh_strip<kCount, 1>(batch, query, weights, values, key, key + kStripKeys, parts, stride);
            });
        }
        i += is_whole ? kStrip : kLanes;
    }
}

}  // namespace
}  // namespace sluicegate
