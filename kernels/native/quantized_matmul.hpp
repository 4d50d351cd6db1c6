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
// `sum` is the exact sum of a group's codes.
struct Activations {
    std::vector<int8_t> high;    // [rows, cols]
    std::vector<int8_t> low;     // [rows, cols], never -128: AVX2 must be able to negate it
    std::vector<float> scale;    // [rows, groups]
    std::vector<int32_t> sum;    // [rows, groups]
};

constexpr float kMaxCode = 127 * 256;

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

void quantize_rows(const float* x, int64_t rows, int64_t cols, int group, Activations& a) {
    const int64_t groups = cols / group;
    a.high.resize(static_cast<size_t>(rows * cols));
    a.low.resize(static_cast<size_t>(rows * cols));
    a.scale.resize(static_cast<size_t>(rows * groups));
    a.sum.resize(static_cast<size_t>(rows * groups));
    const auto body = [&](int64_t row, int) {
        for (int64_t g = 0; g < groups; ++g) {
            const int64_t at = row * cols + g * group;
            quantize_group(x + at, group, &a.high[at], &a.low[at], &a.scale[row * groups + g], &a.sum[row * groups + g]);
        }
    };
    if (rows < 8) {
        for (int64_t row = 0; row < rows; ++row) body(row, 0);
    } else {
        ThreadPool::instance().run(rows, body);
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

// Dot products of kRows activation rows with a panel's 16 weight rows over one group.
template <int kRows, int kBits>
inline void dot_group(const uint8_t* codes, const int8_t* const* high, const int8_t* const* low, int num_quads,
                      const int32_t* sums, __m512i* dots) {
    __m512i tops[kRows];
    for (int r = 0; r < kRows; ++r) {
        tops[r] = _mm512_setzero_si512();
        // 8-bit codes are stored + 128: take 128 times the activations' sum off again.
        dots[r] = kBits == 8 ? _mm512_set1_epi32(-128 * sums[r]) : _mm512_setzero_si512();
    }
    const auto quad_of = [](const int8_t* from) {
        int32_t four;
        std::memcpy(&four, from, 4);
        return _mm512_set1_epi32(four);
    };
    const auto add = [&](__m512i weights, int quad) {
        for (int r = 0; r < kRows; ++r) {
            tops[r] = _mm512_dpbusd_epi32(tops[r], weights, quad_of(high[r] + kQuad * quad));
            dots[r] = _mm512_dpbusd_epi32(dots[r], weights, quad_of(low[r] + kQuad * quad));
        }
    };
    if constexpr (kBits == 4) {
        const __m512i mask = _mm512_set1_epi8(0x0f);
        for (int quad = 0; quad < num_quads; quad += 2, codes += 64) {
            const __m512i both = _mm512_loadu_si512(codes);
            add(_mm512_and_si512(both, mask), quad);
            add(_mm512_and_si512(_mm512_srli_epi16(both, 4), mask), quad + 1);
        }
    } else {
        for (int quad = 0; quad < num_quads; ++quad, codes += 64) add(_mm512_loadu_si512(codes), quad);
    }
    for (int r = 0; r < kRows; ++r) dots[r] = _mm512_add_epi32(dots[r], _mm512_slli_epi32(tops[r], 8));
}

template <int kRows, int kBits>
void panel_rows(const uint8_t* panel, const QuantizedMatrix& w, const Activations& act, int64_t row, float* out, int64_t n) {
    const int64_t groups = w.num_cols / w.group_size;
    const int64_t code_bytes = static_cast<int64_t>(w.group_size) * kLanes * kBits / 8;
    const int64_t scales = kLanes * w.scale_bytes;
    __m512 y[kRows];
    for (int r = 0; r < kRows; ++r) y[r] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; ++g) {
        const int8_t* high[kRows];
        const int8_t* low[kRows];
        int32_t sums[kRows];
        for (int r = 0; r < kRows; ++r) {
            high[r] = &act.high[(row + r) * w.num_cols + g * w.group_size];
            low[r] = &act.low[(row + r) * w.num_cols + g * w.group_size];
            sums[r] = act.sum[(row + r) * groups + g];
        }
        __m512i dots[kRows];
        dot_group<kRows, kBits>(panel, high, low, w.group_size / kQuad, sums, dots);
        Floats s, m;
        load_scales(panel + code_bytes, w.scale_bytes, s);
        const __m512 scale = _mm512_load_ps(s.v);
        __m512 minimum = _mm512_setzero_ps();
        if (w.has_minimum) {
            load_scales(panel + code_bytes + scales, w.scale_bytes, m);
            minimum = _mm512_load_ps(m.v);
        }
        for (int r = 0; r < kRows; ++r) {
            const float step = act.scale[(row + r) * groups + g];
            const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(step));
            y[r] = _mm512_fmadd_ps(both, _mm512_cvtepi32_ps(dots[r]), y[r]);
            if (w.has_minimum) {
                const float sum = step * static_cast<float>(act.sum[(row + r) * groups + g]);
                y[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(sum), y[r]);
            }
        }
        panel += code_bytes + scales * (w.has_minimum ? 2 : 1);
    }
    const auto mask = static_cast<__mmask16>(n >= kLanes ? 0xffff : (1 << n) - 1);
    for (int r = 0; r < kRows; ++r) _mm512_mask_storeu_ps(out + r * w.num_rows, mask, y[r]);
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
void panel_rows(const uint8_t* panel, const QuantizedMatrix& w, const Activations& act, int64_t row, float* out, int64_t n) {
    const int64_t groups = w.num_cols / w.group_size;
    const int64_t code_bytes = static_cast<int64_t>(w.group_size) * kLanes * kBits / 8;
    const int64_t scales = kLanes * w.scale_bytes;
    Floats y[kRows] = {};
    for (int64_t g = 0; g < groups; ++g) {
        Floats scale, minimum = {};
        load_scales(panel + code_bytes, w.scale_bytes, scale);
        if (w.has_minimum) load_scales(panel + code_bytes + scales, w.scale_bytes, minimum);
        for (int r = 0; r < kRows; ++r) {
            Ints tops, dots;
            const int64_t at = (row + r) * w.num_cols + g * w.group_size;
            dot_panel<kBits>(panel, &act.high[at], w.group_size / kQuad, tops);
            dot_panel<kBits>(panel, &act.low[at], w.group_size / kQuad, dots);
            for (int i = 0; i < kLanes; ++i) dots.v[i] += tops.v[i] * 256;
            const float step = act.scale[(row + r) * groups + g];
            const float sum = step * static_cast<float>(act.sum[(row + r) * groups + g]);
            for (int i = 0; i < kLanes; ++i) {
                y[r].v[i] = __builtin_fmaf(scale.v[i] * step, static_cast<float>(dots.v[i]), y[r].v[i]);
            }
            if (w.has_minimum) {
                for (int i = 0; i < kLanes; ++i) y[r].v[i] = __builtin_fmaf(minimum.v[i], sum, y[r].v[i]);
            }
        }
        panel += code_bytes + scales * (w.has_minimum ? 2 : 1);
    }
    for (int r = 0; r < kRows; ++r) {
        for (int64_t i = 0; i < std::min<int64_t>(n, kLanes); ++i) out[r * w.num_rows + i] = y[r].v[i];
    }
}

#endif

template <int kBits>
void panel_block(const uint8_t* panel, const QuantizedMatrix& w, const Activations& act, int64_t row, int64_t end, float* out,
                 int64_t n) {
    constexpr int kTile = 8;
    for (; row + kTile <= end; row += kTile) panel_rows<kTile, kBits>(panel, w, act, row, out + row * w.num_rows, n);
    if (row + 4 <= end) {
        panel_rows<4, kBits>(panel, w, act, row, out + row * w.num_rows, n);
        row += 4;
    }
    if (row + 2 <= end) {
        panel_rows<2, kBits>(panel, w, act, row, out + row * w.num_rows, n);
        row += 2;
    }
    if (row < end) panel_rows<1, kBits>(panel, w, act, row, out + row * w.num_rows, n);
}

void quantized_matmul(const float* x, int64_t num_rows, const QuantizedMatrix& w, float* out) {
    thread_local Activations act;
    quantize_rows(x, num_rows, w.num_cols, w.group_size, act);
    const Activations& activations = act;  // the caller's, not each pool thread's own
    const int64_t panels = (w.num_rows + kLanes - 1) / kLanes;
    const int64_t group_bytes = static_cast<int64_t>(w.group_size) * kLanes * w.bits / 8 +
                                kLanes * w.scale_bytes * (w.has_minimum ? 2 : 1);
    const int64_t panel_bytes = group_bytes * (w.num_cols / w.group_size);
    // Few pieces for a single row, where each is short; more where their sizes can be evened out.
    const int64_t pieces = std::min<int64_t>(panels, ThreadPool::instance().size() * (num_rows < 4 ? 2 : 8));
    for (int64_t block = 0; block < num_rows; block += kRowBlock) {
        const int64_t end = std::min(num_rows, block + kRowBlock);
        ThreadPool::instance().run(pieces, [&](int64_t piece, int) {
            for (int64_t p = panels * piece / pieces; p < panels * (piece + 1) / pieces; ++p) {
                const uint8_t* panel = w.packed + p * panel_bytes;
                const int64_t n = w.num_rows - p * kLanes;
                if (w.bits == 4) panel_block<4>(panel, w, activations, block, end, out + p * kLanes, n);
                else panel_block<8>(panel, w, activations, block, end, out + p * kLanes, n);
            }
        });
    }
}

}  // namespace
}  // namespace sluicegate
