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

// Products of kCount queries with keys [begin, end), as many at a time as registers hold. Up to 63 places behind are written too, with numbers that mean nothing.
template <KvType kType, int kCount>
inline void score_pages(const float* const* q, float scale, const PagedHead& from, int64_t begin, int64_t end, float* scores) {
    const KvLayer& layer = from.layer;
    const int64_t page_size = layer.page_size;
    for (int64_t key = begin; key < end; key += kTileVectors * kLanes) {
        int64_t at[kTileVectors];  // beyond the end the last keys are read again
        for (int j = 0; j < kTileVectors; ++j) at[j] = from.key_at(std::min(key + j * kLanes, (end - 1) / kLanes * kLanes));
        V16 sum[kCount][kTileVectors];
        for (auto& row : sum) {
            for (auto& part : row) part = V16::zero();
        }
        for (int64_t i = 0; i < layer.head_dim; ++i) {
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
// multiple of 64.
template <KvType kType, int kCount>
inline void weigh_pages(const float* weights, const PagedHead& from, int64_t begin, int64_t first, int64_t last, float* out) {
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
