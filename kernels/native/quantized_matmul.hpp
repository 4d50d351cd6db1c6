// Matrix products with 4- and 8-bit weights: exact integer dot products for each group, scaled and summed in the order of the groups.
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

// Activations as 16-bit codes, symmetric per row and group: x ~ code * scale, code = 256 * high + low. Eight bits would halve the work
// and cost 4% of the logits' magnitude: hidden states have channels that are a hundred times larger than their neighbours.
//
// Rows lie in tiles as the products read them, so that one pointer walks through a tile: for each group the codes of each row (its high
// bytes, then its low ones, never -128: AVX2 must be able to negate them), then each row's scale, then each row's sum of codes (exact),
// then that sum times the scale.
struct Activations {
    std::vector<uint8_t> bytes;
    int64_t groups;
    int group;

    static constexpr int64_t kTile = 8;

    // Rows of the tile that begins at `row` of `end`: as many as fit of 8, 4, 2, 1.
    static int64_t tile_rows(int64_t row, int64_t end) {
        const int64_t left = end - row;
        return left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
    }
    int64_t row_bytes() const { return groups * (2 * group + 12); }
    uint8_t* tile(int64_t row) { return bytes.data() + row * row_bytes(); }
    const uint8_t* tile(int64_t row) const { return bytes.data() + row * row_bytes(); }
};

constexpr float kMaxCode = 127 * 256;
constexpr int kMaxGroup = 128;
constexpr int64_t kPieceBytes = 128 * 1024;

inline void quantize_group(const float* x, int size, int8_t* high, int8_t* low, float* scale, int32_t* sum) {
    float amax = 0.0f;
    bool is_finite = true;
    for (int i = 0; i < size; ++i) {
        const float magnitude = std::fabs(x[i]);
        amax = magnitude > amax ? magnitude : amax;
        is_finite &= magnitude <= std::numeric_limits<float>::max();
    }
    if (!is_finite) {  // a NaN scale carries the row's fault into its own result and into no other row's
        std::memset(high, 0, static_cast<size_t>(size));
        std::memset(low, 0, static_cast<size_t>(size));
        *scale = std::numeric_limits<float>::quiet_NaN();
        *sum = 0;
        return;
    }
    *scale = amax / kMaxCode;
    // Below this the inverse would overflow; groups that small are zeros for all that matters.
    const float inverse = amax > 1e-30f ? kMaxCode / amax : 0.0f;
    int32_t total = 0;
    for (int i = 0; i < size; ++i) {
        auto code = static_cast<int32_t>(std::nearbyint(x[i] * inverse));
        code += (code & 255) == 128 ? 1 : 0;
        const int32_t top = (code + 128) >> 8;
        high[i] = static_cast<int8_t>(top);
        low[i] = static_cast<int8_t>(code - (top << 8));
        total += code;
    }
    *sum = total;
}

// With an order, a group's inputs are gathered before they are rounded.
inline void quantize_tile(const float* x, int64_t num_rows, int64_t cols, const int32_t* order, Activations& a, uint8_t* to) {
    const int group = a.group;
    float gathered[kMaxGroup];
    for (int64_t g = 0; g < a.groups; ++g) {
        auto* scales = reinterpret_cast<float*>(to + num_rows * 2 * group);
        auto* sums = reinterpret_cast<int32_t*>(scales + num_rows);
        auto* offsets = scales + 2 * num_rows;
        for (int64_t r = 0; r < num_rows; ++r) {
            auto* high = reinterpret_cast<int8_t*>(to) + r * 2 * group;
            const float* from = x + r * cols + g * group;
            if (order != nullptr) {
                for (int i = 0; i < group; ++i) gathered[i] = x[r * cols + order[g * group + i]];
                from = gathered;
            }
            quantize_group(from, group, high, high + group, scales + r, sums + r);
            offsets[r] = scales[r] * static_cast<float>(sums[r]);
        }
        to += num_rows * (2 * group + 12);
    }
}

void quantize_rows(const float* x, int64_t rows, int64_t cols, const int32_t* order, int group, Activations& a) {
    a.groups = cols / group;
    a.group = group;
    a.bytes.resize(static_cast<size_t>(rows * a.row_bytes()));
    const int64_t whole = rows / Activations::kTile;
    const auto body = [&](int64_t tile, int) {
        for (int64_t row = tile * Activations::kTile; row < std::min(rows, (tile + 1) * Activations::kTile);) {
            const int64_t count = Activations::tile_rows(row, rows);
            quantize_tile(x + row * cols, count, cols, order, a, a.tile(row));
            row += count;
        }
    };
    if (whole < 2) {
        for (int64_t tile = 0; tile * Activations::kTile < rows; ++tile) body(tile, 0);
    } else {
        ThreadPool::instance().run((rows + Activations::kTile - 1) / Activations::kTile, body);
    }
}

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

inline __m512i four_codes(const uint8_t* from) {
    int32_t four;
    std::memcpy(&four, from, 4);
    return _mm512_set1_epi32(four);
}

// 32 columns of a panel as 8 vectors of bytes.
template <int kBits>
inline void unpack(const uint8_t* codes, __m512i* weights) {
    if constexpr (kBits == 4) {
        const __m512i mask = _mm512_set1_epi8(0x0f);
        for (int pair = 0; pair < 4; ++pair) {
            const __m512i both = _mm512_loadu_si512(codes + 64 * pair);
            weights[2 * pair] = _mm512_and_si512(both, mask);
            weights[2 * pair + 1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
        }
    } else {
        for (int quad = 0; quad < 8; ++quad) weights[quad] = _mm512_loadu_si512(codes + 64 * quad);
    }
}

// A panel's 16 outputs for kRows rows. Weights stay in registers while the rows pass by.
template <int kRows, int kBits>
void panel_rows(const uint8_t* panel, const QuantizedMatrix& w, const uint8_t* tile, float* out, int64_t stride, int64_t n) {
    const int group = w.group_size, code_bytes = group * kLanes * kBits / 8, scales = kLanes * w.scale_bytes;
    const int64_t groups = w.num_cols / group;
    __m512 y[kRows];
    for (int r = 0; r < kRows; ++r) y[r] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; ++g) {
        const uint8_t* steps = tile + kRows * 2 * group;
        const auto* sums = reinterpret_cast<const int32_t*>(steps + 4 * kRows);
        Floats s, m;
        load_scales(panel + code_bytes, w.scale_bytes, s);
        if (w.has_minimum) load_scales(panel + code_bytes + scales, w.scale_bytes, m);
        const __m512 scale = _mm512_load_ps(s.v), minimum = _mm512_load_ps(m.v);
        const auto finish = [&](int r, __m512i dots) {
            const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(reinterpret_cast<const float*>(steps)[r]));
            y[r] = _mm512_fmadd_ps(both, _mm512_cvtepi32_ps(dots), y[r]);
            if (w.has_minimum) {
                y[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(reinterpret_cast<const float*>(sums + kRows)[r]), y[r]);
            }
        };
        // 8-bit codes are stored + 128: take 128 times the activations' sum off again.
        const auto start = [&](int r) { return kBits == 8 ? _mm512_set1_epi32(-128 * sums[r]) : _mm512_setzero_si512(); };
        if (group == 32) {
            __m512i weights[8];
            unpack<kBits>(panel, weights);
            for (int r = 0; r < kRows; ++r) {
                const uint8_t* codes = tile + r * 64;
                __m512i tops = _mm512_setzero_si512(), dots = start(r);
                for (int quad = 0; quad < 8; ++quad) {
                    tops = _mm512_dpbusd_epi32(tops, weights[quad], four_codes(codes + kQuad * quad));
                    dots = _mm512_dpbusd_epi32(dots, weights[quad], four_codes(codes + 32 + kQuad * quad));
                }
                finish(r, _mm512_add_epi32(dots, _mm512_slli_epi32(tops, 8)));
            }
        } else {
            __m512i tops[kRows], dots[kRows];
            for (int r = 0; r < kRows; ++r) {
                tops[r] = _mm512_setzero_si512();
                dots[r] = start(r);
            }
            const int quads = std::min(8, group / kQuad);
            for (int first = 0; first < group; first += 32) {
                __m512i weights[8];
                if (quads == 8) unpack<kBits>(panel + first * kLanes * kBits / 8, weights);
                else for (int quad = 0; quad < quads; ++quad) weights[quad] = _mm512_loadu_si512(panel + 64 * quad);
                for (int r = 0; r < kRows; ++r) {
                    const uint8_t* codes = tile + r * 2 * group + first;
                    for (int quad = 0; quad < quads; ++quad) {
                        tops[r] = _mm512_dpbusd_epi32(tops[r], weights[quad], four_codes(codes + kQuad * quad));
                        dots[r] = _mm512_dpbusd_epi32(dots[r], weights[quad], four_codes(codes + group + kQuad * quad));
                    }
                }
            }
            for (int r = 0; r < kRows; ++r) finish(r, _mm512_add_epi32(dots[r], _mm512_slli_epi32(tops[r], 8)));
        }
        panel += code_bytes + scales * (w.has_minimum ? 2 : 1);
        tile += kRows * (2 * group + 12);
    }
    const auto mask = static_cast<__mmask16>(n >= kLanes ? 0xffff : (1 << n) - 1);
    for (int r = 0; r < kRows; ++r) _mm512_mask_storeu_ps(out + r * stride, mask, y[r]);
}

#else

#if defined(__AVX2__)

// Half a panel: 8 weight rows in the 32-bit lanes. Unsigned 4-bit codes: sums of pairs fit 16 bits for 8 quads (8 * 2 * 15 * 128).
template <int kBits>
inline __m256i dot_half(const uint8_t* codes, const int8_t* a, int num_quads, __m256i dots) {
    const __m256i ones = _mm256_set1_epi16(1);
    const auto quad_of = [&](int quad) {
        int32_t four;
        std::memcpy(&four, a + kQuad * quad, 4);
        return _mm256_set1_epi32(four);
    };
    if constexpr (kBits == 4) {
        const __m256i low = _mm256_set1_epi8(0x0f);
        for (int quad = 0; quad < num_quads;) {
            __m256i pairs = _mm256_setzero_si256();
            for (const int end = std::min(quad + 8, num_quads); quad < end; quad += 2, codes += 64) {
                const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
                const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
                pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(_mm256_and_si256(both, low), quad_of(quad)));
                pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(high, quad_of(quad + 1)));
            }
            dots = _mm256_add_epi32(dots, _mm256_madd_epi16(pairs, ones));
        }
    } else {
        const __m256i flip = _mm256_set1_epi8(static_cast<char>(0x80));
        for (int quad = 0; quad < num_quads; ++quad, codes += 64) {
            const __m256i w = _mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)), flip);
            const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(quad_of(quad), w));
            dots = _mm256_add_epi32(dots, _mm256_madd_epi16(pairs, ones));
        }
    }
    return dots;
}

template <int kBits>
inline void dot_panel(const uint8_t* codes, const int8_t* a, int num_quads, Ints& dots) {
    for (int half = 0; half < 2; ++half) {
        const __m256i sum = dot_half<kBits>(codes + 32 * half, a, num_quads, _mm256_setzero_si256());
        _mm256_store_si256(reinterpret_cast<__m256i*>(dots.v + 8 * half), sum);
    }
}

#else

template <int kBits>
inline void dot_panel(const uint8_t* codes, const int8_t* a, int num_quads, Ints& dots) {
    for (int lane = 0; lane < kLanes; ++lane) dots.v[lane] = 0;
    for (int quad = 0; quad < num_quads; ++quad) {
        const uint8_t* vector = codes + 64 * (kBits == 4 ? quad / 2 : quad);
        for (int lane = 0; lane < kLanes; ++lane) {
            for (int i = 0; i < kQuad; ++i) {
                const int32_t byte = vector[lane * kQuad + i];
                const int32_t weight = kBits == 8 ? byte - 128 : (quad & 1 ? byte >> 4 : byte & 15);
                dots.v[lane] += weight * a[kQuad * quad + i];
            }
        }
    }
}

#endif

template <int kRows, int kBits>
void panel_rows(const uint8_t* panel, const QuantizedMatrix& w, const uint8_t* tile, float* out, int64_t stride, int64_t n) {
    const int group = w.group_size;
    const int64_t groups = w.num_cols / group;
    const int64_t code_bytes = static_cast<int64_t>(group) * kLanes * kBits / 8;
    const int64_t scales = kLanes * w.scale_bytes;
    Floats y[kRows] = {};
    for (int64_t g = 0; g < groups; ++g) {
        const auto* steps = reinterpret_cast<const float*>(tile + kRows * 2 * group);
        const float* offsets = steps + 2 * kRows;
        Floats scale, minimum = {};
        load_scales(panel + code_bytes, w.scale_bytes, scale);
        if (w.has_minimum) load_scales(panel + code_bytes + scales, w.scale_bytes, minimum);
        for (int r = 0; r < kRows; ++r) {
            Ints tops, dots;
            const auto* high = reinterpret_cast<const int8_t*>(tile) + r * 2 * group;
            dot_panel<kBits>(panel, high, group / kQuad, tops);
            dot_panel<kBits>(panel, high + group, group / kQuad, dots);
            for (int i = 0; i < kLanes; ++i) dots.v[i] += tops.v[i] * 256;
            for (int i = 0; i < kLanes; ++i) {
                y[r].v[i] = __builtin_fmaf(scale.v[i] * steps[r], static_cast<float>(dots.v[i]), y[r].v[i]);
            }
            if (w.has_minimum) {
                for (int i = 0; i < kLanes; ++i) y[r].v[i] = __builtin_fmaf(minimum.v[i], offsets[r], y[r].v[i]);
            }
        }
        panel += code_bytes + scales * (w.has_minimum ? 2 : 1);
        tile += kRows * (2 * group + 12);
    }
    for (int r = 0; r < kRows; ++r) {
        for (int64_t i = 0; i < std::min<int64_t>(n, kLanes); ++i) out[r * stride + i] = y[r].v[i];
    }
}

#endif

template <int kBits>
void panel_tile(const uint8_t* panel, const QuantizedMatrix& w, const uint8_t* tile, int64_t rows, float* out, int64_t stride, int64_t n) {
    if (rows == 8) panel_rows<8, kBits>(panel, w, tile, out, stride, n);
    else if (rows == 4) panel_rows<4, kBits>(panel, w, tile, out, stride, n);
    else if (rows == 2) panel_rows<2, kBits>(panel, w, tile, out, stride, n);
    else panel_rows<1, kBits>(panel, w, tile, out, stride, n);
}

// out [num_rows, stride]: the first w.num_rows columns are written.
void quantized_matmul(const float* x, int64_t num_rows, const QuantizedMatrix& w, float* out, int64_t stride) {
    thread_local Activations act;
    quantize_rows(x, num_rows, w.num_cols, w.order, w.group_size, act);
    const Activations& activations = act;  // the caller's, not each pool thread's own
    const int64_t panels = (w.num_rows + kLanes - 1) / kLanes;
    const int64_t group_bytes = static_cast<int64_t>(w.group_size) * kLanes * w.bits / 8 +
                                kLanes * w.scale_bytes * (w.has_minimum ? 2 : 1);
    const int64_t panel_bytes = group_bytes * (w.num_cols / w.group_size);
    // Few pieces for a single row, where each is short; else as many as leave a piece's weights in the second-level cache, or can be evened out.
    const int64_t threads = ThreadPool::instance().size();
    const int64_t wanted = num_rows < 4 ? threads * 2 : std::max(threads * 8, panels * panel_bytes / kPieceBytes);
    const int64_t pieces = std::min<int64_t>(panels, wanted);
    ThreadPool::instance().run(pieces, [&](int64_t piece, int) {
        for (int64_t row = 0; row < num_rows;) {
            const int64_t count = Activations::tile_rows(row, num_rows);
            const uint8_t* tile = activations.tile(row);
            for (int64_t p = panels * piece / pieces; p < panels * (piece + 1) / pieces; ++p) {
                const uint8_t* panel = w.packed + p * panel_bytes;
                float* to = out + row * stride + p * kLanes;
                const int64_t n = w.num_rows - p * kLanes;
                if (w.bits == 4) panel_tile<4>(panel, w, tile, count, to, stride, n);
                else panel_tile<8>(panel, w, tile, count, to, stride, n);
            }
            row += count;
        }
    });
}

}  // namespace
}  // namespace sluicegate
