// Panels of 16 outputs with 4- or 8-bit weights, times the rows of a tile: what the quantized products spend their time in.
#pragma once

#include <algorithm>
#include <cstring>

#include "activations.hpp"
#include "lanes.hpp"
#include "ops.hpp"

namespace sluicegate {
namespace {

inline void load_scales(const uint8_t* from, int scale_bytes, Floats& to) {
    if (scale_bytes == 2) {
#if defined(__AVX512F__)
        _mm512_store_ps(to.v, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__F16C__)
        for (int half = 0; half < 2; ++half) {
            _mm256_store_ps(to.v + 8 * half,
                            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + half)));
        }
#else
        uint16_t bits[kLanes];
        std::memcpy(bits, from, sizeof bits);
        for (int i = 0; i < kLanes; ++i) to.v[i] = half_to_float(bits[i]);
#endif
    } else {
        std::memcpy(to.v, from, sizeof to.v);
    }
}

#if defined(__AVX512VNNI__)

constexpr int kPanels = 2;  // panels whose weights are in registers while rows pass by: two share each load of an activation
constexpr int64_t kFewRows = 8;  // up to which weights come from memory faster than they are used: one panel at a time, one stream
constexpr int64_t kHardwareRows = 2;  // up to which the processor's own prefetching does better than ours
constexpr int kAheadBytes = 4096;

inline __m512i four_codes(const uint8_t* from) {
    int32_t four;
    std::memcpy(&four, from, 4);
    return _mm512_set1_epi32(four);
}

// The next kQuads * 4 columns of a panel as vectors of bytes.
template <int kBits, int kQuads>
inline void unpack(const uint8_t* codes, __m512i* weights) {
    if constexpr (kBits == 4) {
        const __m512i mask = _mm512_set1_epi8(0x0f);
        for (int pair = 0; pair < kQuads / 2; ++pair) {
            const __m512i both = _mm512_loadu_si512(codes + 64 * pair);
            weights[2 * pair] = _mm512_and_si512(both, mask);
            weights[2 * pair + 1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
        }
    } else {
        for (int quad = 0; quad < kQuads; ++quad) weights[quad] = _mm512_loadu_si512(codes + 64 * quad);
    }
}

// Dot products of one row's kQuads * 4 columns with those of kCount panels.
template <int kPlanes, int kCount, int kQuads>
inline void dot_row(const uint8_t* codes, int group, const __m512i (*weights)[kQuads], __m512i* dots) {
    __m512i tops[kCount];
    for (int p = 0; p < kCount; ++p) tops[p] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int quad = 0; quad < kQuads; ++quad) {
        if constexpr (kPlanes == 2) {
            const __m512i high = four_codes(codes + kQuad * quad), low = four_codes(codes + group + kQuad * quad);
            for (int p = 0; p < kCount; ++p) {
                tops[p] = _mm512_dpbusd_epi32(tops[p], weights[p][quad], high);
                dots[p] = _mm512_dpbusd_epi32(dots[p], weights[p][quad], low);
            }
        } else {
            const __m512i code = four_codes(codes + kQuad * quad);
            for (int p = 0; p < kCount; ++p) dots[p] = _mm512_dpbusd_epi32(dots[p], weights[p][quad], code);
        }
    }
    if constexpr (kPlanes == 2) {
        for (int p = 0; p < kCount; ++p) dots[p] = _mm512_add_epi32(dots[p], _mm512_slli_epi32(tops[p], 8));
    }
}

// One panel times a single row, y [16]: there's nothing to share, and its sums stay in registers.
template <int kPlanes, int kBits, int kQuads>
[[gnu::noinline]] void multiply_row(const uint8_t* panel, const QuantizedMatrix& w, const uint8_t* row, float* y) {
    const int group = w.group_size, code_bytes = group * kLanes * kBits / 8, scales = kLanes * w.scale_bytes;
    const int64_t groups = w.num_cols / group;
    __m512 sum = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; ++g) {
        const auto* step = reinterpret_cast<const float*>(row + kPlanes * group);
        int32_t codes_sum;
        std::memcpy(&codes_sum, step + 1, 4);
        Floats scale, minimum;
        load_scales(panel + code_bytes, w.scale_bytes, scale);
        if (w.has_minimum) load_scales(panel + code_bytes + scales, w.scale_bytes, minimum);
        __m512i dots = kBits == 8 ? _mm512_set1_epi32(-128 * codes_sum) : _mm512_setzero_si512();
        const auto add = [&](int first) {
            __m512i weights[1][kQuads];
            unpack<kBits, kQuads>(panel + first * kLanes * kBits / 8, weights[0]);
            dot_row<kPlanes, 1, kQuads>(row + first, group, weights, &dots);
        };
        if (group == kQuads * kQuad) add(0);
        else for (int first = 0; first < group; first += kQuads * kQuad) add(first);
        sum = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_load_ps(scale.v), _mm512_set1_ps(step[0])), _mm512_cvtepi32_ps(dots), sum);
        if (w.has_minimum) sum = _mm512_fmadd_ps(_mm512_load_ps(minimum.v), _mm512_set1_ps(step[2]), sum);
        panel += code_bytes + scales * (w.has_minimum ? 2 : 1);
        row += kPlanes * group + 12;
    }
    _mm512_store_ps(y, sum);
}

// kCount panels, panel_bytes apart, times all rows of a tile: y [rows, kCount, 16].
template <int kPlanes, int kBits, int kCount, int kQuads>
[[gnu::noinline]] void multiply_panels(const uint8_t* panel, int64_t panel_bytes, const QuantizedMatrix& w, const uint8_t* tile, int64_t rows,
                                       float* y) {
    const bool prefetches = kCount == 1 && rows > kHardwareRows;
    constexpr int kColumns = kQuads * kQuad;
    const int group = w.group_size, code_bytes = group * kLanes * kBits / 8, scales = kLanes * w.scale_bytes;
    const int64_t groups = w.num_cols / group;
    const int group_bytes = code_bytes + scales * (w.has_minimum ? 2 : 1);
    alignas(64) int32_t sums_so_far[Activations::kTile][kCount][kLanes];
    for (int64_t g = 0; g < groups; ++g) {
        const auto* steps = reinterpret_cast<const float*>(tile + rows * kPlanes * group);
        const auto* sums = reinterpret_cast<const int32_t*>(steps + rows);
        const float* offsets = steps + 2 * rows;
        Floats scale[kCount], minimum[kCount] = {};
        for (int line = 0; prefetches && line < group_bytes; line += 64) _mm_prefetch(panel + kAheadBytes + line, _MM_HINT_T0);
        for (int p = 0; p < kCount; ++p) {
            const uint8_t* from = panel + p * panel_bytes + code_bytes;
            load_scales(from, w.scale_bytes, scale[p]);
            if (w.has_minimum) load_scales(from + scales, w.scale_bytes, minimum[p]);
        }
        for (int first = 0; first < group; first += kColumns) {
            __m512i weights[kCount][kQuads];
            for (int p = 0; p < kCount; ++p) unpack<kBits, kQuads>(panel + p * panel_bytes + first * kLanes * kBits / 8, weights[p]);
            const bool is_last = first + kColumns == group;
            for (int64_t r = 0; r < rows; ++r) {
                __m512i dots[kCount];
                for (int p = 0; p < kCount; ++p) {
                    // 8-bit codes are stored + 128: take 128 times the activations' sum off again.
                    if (first == 0) dots[p] = kBits == 8 ? _mm512_set1_epi32(-128 * sums[r]) : _mm512_setzero_si512();
                    else dots[p] = _mm512_load_si512(sums_so_far[r][p]);
                }
                dot_row<kPlanes, kCount, kQuads>(tile + r * kPlanes * group + first, group, weights, dots);
                if (!is_last) {
                    for (int p = 0; p < kCount; ++p) _mm512_store_si512(sums_so_far[r][p], dots[p]);
                    continue;
                }
                const __m512 step = _mm512_set1_ps(steps[r]), offset = _mm512_set1_ps(offsets[r]);
                for (int p = 0; p < kCount; ++p) {
                    float* to = y + (r * kCount + p) * kLanes;
                    const __m512 both = _mm512_mul_ps(_mm512_load_ps(scale[p].v), step);
                    __m512 sum = _mm512_fmadd_ps(both, _mm512_cvtepi32_ps(dots[p]), _mm512_load_ps(to));
                    if (w.has_minimum) sum = _mm512_fmadd_ps(_mm512_load_ps(minimum[p].v), offset, sum);
                    _mm512_store_ps(to, sum);
                }
            }
        }
        panel += group_bytes;
        tile += rows * (kPlanes * group + 12);
    }
}

template <int kPlanes, int kBits, int kCount>
void multiply_panels(const uint8_t* panel, int64_t panel_bytes, const QuantizedMatrix& w, const uint8_t* tile, int64_t rows, float* y) {
    const auto multiply = [&]<int kQuads>() {
        if constexpr (kCount == 1) {
            if (rows == 1) return multiply_row<kPlanes, kBits, kQuads>(panel, w, tile, y);
        }
        multiply_panels<kPlanes, kBits, kCount, kQuads>(panel, panel_bytes, w, tile, rows, y);
    };
    if (w.group_size == 16) multiply.template operator()<4>();
    else multiply.template operator()<8>();
}

#elif !defined(__AVX2__)

constexpr int kPanels = 1;
constexpr int64_t kFewRows = 0;

// Adds the dot products of one group of a panel's columns with those of each row.
template <int kPlanes, int kBits>
inline void add_group_dots(const uint8_t* codes, int group, const int8_t* tile, int64_t rows, Ints* dots) {
    for (int64_t r = 0; r < rows; ++r) {
        const int8_t* a = tile + r * kPlanes * group;
        for (int column = 0; column < group; ++column) {
            const int quad = column / kQuad;
            const int32_t code = kPlanes == 2 ? a[column] * 256 + a[group + column] : a[column];
            const uint8_t* bytes = codes + 64 * (kBits == 4 ? quad / 2 : quad) + column % kQuad;
            for (int lane = 0; lane < kLanes; ++lane) {
                const int32_t byte = bytes[lane * kQuad];
                dots[r].v[lane] += code * (kBits == 8 ? byte - 128 : (quad & 1 ? byte >> 4 : byte & 15));
            }
        }
    }
}

template <int kPlanes, int kBits, int kCount>
void multiply_panels(const uint8_t* panel, int64_t, const QuantizedMatrix& w, const uint8_t* tile, int64_t rows, float* y) {
    static_assert(kCount == 1);
    const int group = w.group_size, code_bytes = group * kLanes * kBits / 8, scales = kLanes * w.scale_bytes;
    const int64_t groups = w.num_cols / group;
    Ints dots[Activations::kTile];
    for (int64_t g = 0; g < groups; ++g) {
        const auto* steps = reinterpret_cast<const float*>(tile + rows * kPlanes * group);
        const float* offsets = steps + 2 * rows;
        Floats scale, minimum = {};
        load_scales(panel + code_bytes, w.scale_bytes, scale);
        if (w.has_minimum) load_scales(panel + code_bytes + scales, w.scale_bytes, minimum);
        std::memset(dots, 0, static_cast<size_t>(rows) * sizeof(Ints));
        add_group_dots<kPlanes, kBits>(panel, group, reinterpret_cast<const int8_t*>(tile), rows, dots);
        for (int64_t r = 0; r < rows; ++r) {
            float* to = y + r * kLanes;
            for (int i = 0; i < kLanes; ++i) to[i] = __builtin_fmaf(scale.v[i] * steps[r], static_cast<float>(dots[r].v[i]), to[i]);
            if (w.has_minimum) {
                for (int i = 0; i < kLanes; ++i) to[i] = __builtin_fmaf(minimum.v[i], offsets[r], to[i]);
            }
        }
        panel += code_bytes + scales * (w.has_minimum ? 2 : 1);
        tile += rows * (kPlanes * group + 12);
    }
}

#endif

}  // namespace
}  // namespace sluicegate

#if defined(__AVX2__) && !defined(__AVX512VNNI__)
#include "quantized_panels_avx2.hpp"
#endif

namespace sluicegate {
namespace {

// Panels [first, end) of a matrix times the rows of a tile, to out [rows, stride], whose first w.num_rows columns are the result's.
template <int kPlanes, int kBits>
void multiply_tile_of(const QuantizedMatrix& w, int64_t first, int64_t end, const uint8_t* tile, int64_t rows, float* out, int64_t stride) {
    alignas(64) float y[Activations::kTile * kPanels * kLanes];
    const int64_t panel_bytes = w.panel_bytes();
    for (int64_t p = first; p < end;) {
        const int64_t count = rows > kFewRows && end - p >= kPanels ? kPanels : 1;
        std::memset(y, 0, static_cast<size_t>(rows * count * kLanes) * sizeof(float));
        const uint8_t* panel = w.packed + p * panel_bytes;
        if (count == kPanels) multiply_panels<kPlanes, kBits, kPanels>(panel, panel_bytes, w, tile, rows, y);
        else multiply_panels<kPlanes, kBits, 1>(panel, panel_bytes, w, tile, rows, y);
        const int64_t columns = std::min(count * kLanes, w.num_rows - p * kLanes);
        for (int64_t r = 0; r < rows; ++r) {
            std::memcpy(out + r * stride + p * kLanes, y + r * count * kLanes, static_cast<size_t>(columns) * sizeof(float));
        }
        p += count;
    }
}

inline void multiply_tile(const QuantizedMatrix& w, int64_t first, int64_t end, int planes, const uint8_t* tile, int64_t rows, float* out,
                          int64_t stride) {
    if (w.bits == 4) {
        if (planes == 2) multiply_tile_of<2, 4>(w, first, end, tile, rows, out, stride);
        else multiply_tile_of<1, 4>(w, first, end, tile, rows, out, stride);
    } else {
        if (planes == 2) multiply_tile_of<2, 8>(w, first, end, tile, rows, out, stride);
        else multiply_tile_of<1, 8>(w, first, end, tile, rows, out, stride);
    }
}

}  // namespace
}  // namespace sluicegate
