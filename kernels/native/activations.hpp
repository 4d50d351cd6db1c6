// Activations as the quantized products take them: signed codes with a step for each row and group.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "lanes.hpp"
#include "thread_pool.hpp"

namespace sluicegate {
namespace {

// x ~ code * step, symmetric per row and group. With two planes a code has 16 bits, code = 256 * high + low; with one it's a byte. One
// plane halves the work, and costs 4% of the logits' magnitude: hidden states have channels a hundred times larger than their neighbours.
//
// Rows lie in tiles as the products read them, so that one pointer walks through a tile: for each group the codes of each row (its high
// bytes, then its low ones; with AVX2 alone words, of each four the first, third, second and fourth), then each row's step, then each row's
// sum of codes (exact), then that sum times the step. Bytes are never -128, so that they can be negated, and words are rounded alike.
struct Activations {
    std::vector<uint8_t> bytes;
    int64_t groups;
    int group;
    int planes = 2;

    static constexpr int64_t kTile = 32;

    // Rows of the tile that begins at `row` of `end`, all tiles but the last having `size`.
    static int64_t tile_rows(int64_t row, int64_t end, int64_t size = kTile) { return std::min(size, end - row); }
    int64_t row_bytes() const { return groups * (planes * group + 12); }
    uint8_t* tile(int64_t row) { return bytes.data() + row * row_bytes(); }
    const uint8_t* tile(int64_t row) const { return bytes.data() + row * row_bytes(); }
};

constexpr int kMaxGroup = 128;
template <int kPlanes>
constexpr float kMaxCode = kPlanes == 2 ? 127 * 256 : 127;

// Codes i to i + 15 of scaled activations of a row's group, which lie at `to`; adds them to `total`.
template <int kPlanes>
inline void write_codes(V16 scaled, int8_t* to, int group, int i, Ints& total) {
    [[maybe_unused]] int8_t *const high = to + i, *const low = to + group + i;
#if defined(__AVX512F__)
    __m512i codes = _mm512_cvtps_epi32(scaled.v);
    if constexpr (kPlanes == 2) {
        const __mmask16 is_128 = _mm512_cmpeq_epi32_mask(_mm512_and_si512(codes, _mm512_set1_epi32(255)), _mm512_set1_epi32(128));
        codes = _mm512_mask_add_epi32(codes, is_128, codes, _mm512_set1_epi32(1));
        const __m512i tops = _mm512_srai_epi32(_mm512_add_epi32(codes, _mm512_set1_epi32(128)), 8);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(high), _mm512_cvtepi32_epi8(tops));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(low), _mm512_cvtepi32_epi8(codes));
    } else {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(high), _mm512_cvtepi32_epi8(codes));
    }
    _mm512_store_si512(total.v, _mm512_add_epi32(_mm512_load_si512(total.v), codes));
#elif defined(__AVX2__)
    __m256i codes[2] = {_mm256_cvtps_epi32(scaled.a), _mm256_cvtps_epi32(scaled.b)};
    if constexpr (kPlanes == 2) {
        for (auto& half : codes) {  // where the lower byte would be -128
            half = _mm256_sub_epi32(half, _mm256_cmpeq_epi32(_mm256_and_si256(half, _mm256_set1_epi32(255)), _mm256_set1_epi32(128)));
        }
    }
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(codes[0], codes[1]), 0xd8);
    if constexpr (kPlanes == 2) {
        const __m256i in_turns = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 2 * i), in_turns);
    } else {
        const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(high), bytes);
    }
    for (int half = 0; half < 2; ++half) {
        auto* sums = reinterpret_cast<__m256i*>(total.v + 8 * half);
        _mm256_store_si256(sums, _mm256_add_epi32(_mm256_load_si256(sums), codes[half]));
    }
#else
    for (int lane = 0; lane < kLanes; ++lane) {
        auto code = static_cast<int32_t>(std::nearbyint(scaled.v[lane]));
        if constexpr (kPlanes == 2) {
            code += (code & 255) == 128 ? 1 : 0;
            const int32_t top = (code + 128) >> 8;
            high[lane] = static_cast<int8_t>(top);
            low[lane] = static_cast<int8_t>(code - (top << 8));
        } else {
            high[lane] = static_cast<int8_t>(code);
        }
        total.v[lane] += code;
    }
#endif
}

// `size` is a multiple of 16; kPlanes * size bytes are written at `to`.
template <int kPlanes>
inline void quantize_group(const float* x, int size, int8_t* to, float* step, int32_t* sum) {
    V16 tops = V16::zero();
    bool has_nan = false;
    for (int i = 0; i < size; i += kLanes) {
        const V16 part = V16::load(x + i);
        has_nan |= part.has_nan();
        tops.raise(part.magnitude());
    }
    const float amax = tops.largest();
    if (has_nan || amax > std::numeric_limits<float>::max()) {  // a NaN step carries the row's fault into its own result and into no other row's
        std::memset(to, 0, static_cast<size_t>(kPlanes * size));
        *step = std::numeric_limits<float>::quiet_NaN();
        *sum = 0;
        return;
    }
    *step = amax / kMaxCode<kPlanes>;
    // Below this the inverse would overflow; groups that small are zeros for all that matters.
    const float inverse = amax > 1e-30f ? kMaxCode<kPlanes> / amax : 0.0f;
    Ints total = {};
    for (int i = 0; i < size; i += kLanes) {
        write_codes<kPlanes>(V16::load(x + i).times(V16::all(inverse)), to, size, i, total);
    }
    *sum = 0;
    for (const int32_t lane : total.v) *sum += lane;
}

// With an order, a group's inputs are gathered before they are rounded.
template <int kPlanes>
inline void quantize_tile_of(const float* x, int64_t num_rows, int64_t cols, const int32_t* order, const Activations& a, uint8_t* to) {
    const int group = a.group;
    float gathered[kMaxGroup];
    for (int64_t g = 0; g < a.groups; ++g) {
        auto* steps = reinterpret_cast<float*>(to + num_rows * kPlanes * group);
        auto* sums = reinterpret_cast<int32_t*>(steps + num_rows);
        auto* offsets = steps + 2 * num_rows;
        for (int64_t r = 0; r < num_rows; ++r) {
            auto* codes = reinterpret_cast<int8_t*>(to) + r * kPlanes * group;
            const float* from = x + r * cols + g * group;
            if (order != nullptr) {
                for (int i = 0; i < group; ++i) gathered[i] = x[r * cols + order[g * group + i]];
                from = gathered;
            }
            quantize_group<kPlanes>(from, group, codes, steps + r, sums + r);
            offsets[r] = steps[r] * static_cast<float>(sums[r]);
        }
        to += num_rows * (kPlanes * group + 12);
    }
}

inline void quantize_tile(const float* x, int64_t num_rows, int64_t cols, const int32_t* order, const Activations& a, uint8_t* to) {
    if (a.planes == 2) quantize_tile_of<2>(x, num_rows, cols, order, a, to);
    else quantize_tile_of<1>(x, num_rows, cols, order, a, to);
}

// In tiles of `tile_size` rows, which the pool's threads share in their order.
void quantize_rows(const float* x, int64_t rows, int64_t tile_size, const QuantizedMatrix& w, Activations& a) {
    a.groups = w.num_cols / w.group_size;
    a.group = w.group_size;
    a.planes = w.planes;
    a.bytes.resize(static_cast<size_t>(rows * a.row_bytes()));
    ThreadPool::instance().run((rows + tile_size - 1) / tile_size, [&](int64_t tile, int) {
        const int64_t row = tile * tile_size;
        quantize_tile(x + row * w.num_cols, Activations::tile_rows(row, rows, tile_size), w.num_cols, w.order, a, a.tile(row));
    });
}

}  // namespace
}  // namespace sluicegate
