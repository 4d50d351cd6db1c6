// The queries of a single row over one range of keys, which are read straight from the pages: a decode step reads each key once.
#pragma once

#include <algorithm>

#include "lanes.hpp"
#include "ops.hpp"

namespace sluicegate {
namespace {

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

template <KvType kType>
constexpr int64_t kElementBytes = kType == KvType::fp8 ? 1 : 2;

// Keys [begin, end) of a sequence and kv head, which a thread is likely to read after those that it has in hand; none if they're equal.
struct Ahead {
    PagedHead from;
    int64_t begin, end;

    // A page's keys take as many bytes as its values: fetch as many of them as values of one key have.
    template <KvType kType>
    void fetch(int64_t key) const {
        const int64_t bytes = from.layer.head_dim * kElementBytes<kType>;
        const uint8_t* at = from.layer.k + from.value_at(key) * kElementBytes<kType>;
        for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(at + line, 0, 2);
    }
};

// Products of kCount queries with keys [begin, end), as many at a time as registers hold. Up to 63 places behind are written too, with numbers that mean nothing.
// Pages lie anywhere, so the processor can't guess the next one: the keys' values are fetched meanwhile.
template <KvType kType, int kCount>
inline void score_pages(const float* const* q, float scale, const PagedHead& from, int64_t begin, int64_t end, float* scores) {
    const KvLayer& layer = from.layer;
    const int64_t page_size = layer.page_size;
    for (int64_t key = begin; key < end; key += kTileVectors * kLanes) {
        int64_t at[kTileVectors], values[kTileVectors];  // beyond the end the last keys are read again
        for (int j = 0; j < kTileVectors; ++j) {
            const int64_t first = std::min(key + j * kLanes, (end - 1) / kLanes * kLanes);
            at[j] = from.key_at(first);
            values[j] = from.value_at(first) * kElementBytes<kType>;
        }
        V16 sum[kCount][kTileVectors];
        for (auto& row : sum) {
            for (auto& part : row) part = V16::zero();
        }
        // 16 keys have dim / 4 lines of values of one byte each.
        constexpr int64_t kEach = 4 / kElementBytes<kType>;
        for (int64_t i = 0; i < layer.head_dim; ++i) {
            if (i % kEach == 0) {
                for (int j = 0; j < kTileVectors; ++j) __builtin_prefetch(layer.v + values[j] + i / kEach * 64, 0, 2);
            }
            V16 keys[kTileVectors];
            for (int j = 0; j < kTileVectors; ++j) keys[j] = load_16<kType>(layer.k, at[j] + i * page_size);
            for (int r = 0; r < kCount; ++r) {
                const V16 value = V16::all(q[r][i]);
                for (int j = 0; j < kTileVectors; ++j) sum[r][j].add_product(value, keys[j]);
            }
        }
        for (int r = 0; r < kCount; ++r) {
            for (int j = 0; j < kTileVectors; ++j) sum[r][j].times(V16::all(scale)).store(scores + r * kRange + key - begin + j * kLanes);
        }
    }
}

// Weighted sums of the values of keys [begin + first, begin + last), in the order of the keys: out [kCount, head_dim], which must be a
// multiple of 64. The keys ahead are fetched meanwhile.
template <KvType kType, int kCount>
inline void weigh_pages(const float* weights, const PagedHead& from, int64_t begin, int64_t first, int64_t last, const Ahead& ahead, float* out) {
    const KvLayer& layer = from.layer;
    const int64_t dim = layer.head_dim;
    int64_t at[kRange];
    for (int64_t key = first; key < last; ++key) at[key] = from.value_at(begin + key);
    for (int64_t i = 0; i < dim; i += kTileVectors * kLanes) {
        V16 sum[kCount][kTileVectors];
        for (auto& row : sum) {
            for (auto& part : row) part = V16::zero();
        }
        for (int64_t key = first; key < last; ++key) {
            if (i == 0 && ahead.begin + key < ahead.end) ahead.fetch<kType>(ahead.begin + key);
            V16 parts[kTileVectors];
            for (int j = 0; j < kTileVectors; ++j) parts[j] = load_16<kType>(layer.v, at[key] + i + j * kLanes);
            for (int r = 0; r < kCount; ++r) {
                const V16 weight = V16::all(weights[r * kRange + key]);
                for (int j = 0; j < kTileVectors; ++j) sum[r][j].add_product(weight, parts[j]);
            }
        }
        for (int r = 0; r < kCount; ++r) {
            for (int j = 0; j < kTileVectors; ++j) sum[r][j].store(out + r * dim + i + j * kLanes);
        }
    }
}

}  // namespace
}  // namespace sluicegate
