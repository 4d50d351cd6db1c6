// All ops, compiled once for each instruction set; SLUICEGATE_OPS names the function that returns their table.
//
// Every result row is computed by the same sequence of operations whatever the number of rows, threads and tiles: integer sums
// are exact, and floating-point sums run in an order fixed by the row's own length. All multiply-adds are written as fmaf, so that
// each instruction set rounds at the same places and gives the same bits. Loops over 16 lanes are left to the vectorizer.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "ops.hpp"
#include "thread_pool.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace sluicegate {
namespace {

constexpr int kLanes = 16;
constexpr int kQuad = 4;              // columns in one 32-bit lane
constexpr int64_t kRowBlock = 128;    // activation rows that stay in the cache while weights stream by
constexpr int64_t kRange = 128;       // keys in one range of attention; ranges are merged in order
constexpr int64_t kRowTile = 32;      // rows of one sequence that share converted keys and values

struct alignas(64) Floats {
    float v[kLanes];
};

struct alignas(64) Ints {
    int32_t v[kLanes];
};

// 16 floats in registers. Every operation rounds as its scalar form does, lane by lane.
#if defined(__AVX512F__)
struct V16 {
    __m512 v;
    static V16 zero() { return {_mm512_setzero_ps()}; }
    static V16 load(const float* from) { return {_mm512_loadu_ps(from)}; }
    static V16 all(float value) { return {_mm512_set1_ps(value)}; }
    void store(float* to) const { _mm512_storeu_ps(to, v); }
    void add_product(V16 a, V16 b) { v = _mm512_fmadd_ps(a.v, b.v, v); }
    V16 times(V16 a) const { return {_mm512_mul_ps(v, a.v)}; }
};
constexpr int kQueries = 4;  // query rows that share a loaded vector of keys or values
#elif defined(__AVX2__)
struct V16 {
    __m256 a, b;
    static V16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
    static V16 load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
    static V16 all(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
    void store(float* to) const {
        _mm256_storeu_ps(to, a);
        _mm256_storeu_ps(to + 8, b);
    }
    void add_product(V16 x, V16 y) {
        a = _mm256_fmadd_ps(x.a, y.a, a);
        b = _mm256_fmadd_ps(x.b, y.b, b);
    }
    V16 times(V16 x) const { return {_mm256_mul_ps(a, x.a), _mm256_mul_ps(b, x.b)}; }
};
constexpr int kQueries = 1;
#else
struct V16 {
    float v[kLanes];
    static V16 zero() { return V16{}; }
    static V16 load(const float* from) {
        V16 to;
        std::memcpy(to.v, from, sizeof to.v);
        return to;
    }
    static V16 all(float value) {
        V16 to;
        for (float& lane : to.v) lane = value;
        return to;
    }
    void store(float* to) const { std::memcpy(to, v, sizeof v); }
    void add_product(const V16& a, const V16& b) {
        for (int i = 0; i < kLanes; ++i) v[i] = __builtin_fmaf(a.v[i], b.v[i], v[i]);
    }
    V16 times(const V16& a) const {
        V16 to;
        for (int i = 0; i < kLanes; ++i) to.v[i] = v[i] * a.v[i];
        return to;
    }
};
constexpr int kQueries = 1;
#endif

inline float bf16_to_float(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

inline uint16_t float_to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float half_to_float(uint16_t bits) {
    // Shift exponent and mantissa into place, then let the hardware rescale: exact for subnormals too.
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    uint32_t wide = static_cast<uint32_t>(bits & 0x7fffu) << 13;
    float value;
    std::memcpy(&value, &wide, 4);
    value *= 0x1p112f;
    std::memcpy(&wide, &value, 4);
    if ((bits & 0x7c00u) == 0x7c00u) wide |= 0x7f800000u;
    wide |= sign;
    std::memcpy(&value, &wide, 4);
    return value;
}

inline float e4m3_to_float(uint8_t bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x80u) << 24;
    uint32_t wide = static_cast<uint32_t>(bits & 0x7fu) << 20;
    float value;
    std::memcpy(&value, &wide, 4);
    value *= 0x1p120f;
    std::memcpy(&wide, &value, 4);
    wide |= sign;
    wide = (bits & 0x7fu) == 0x7fu ? 0x7fc00000u : wide;
    std::memcpy(&value, &wide, 4);
    return value;
}

// Round to nearest even on the e4m3 grid; the caller has clamped to +-448.
inline uint8_t float_to_e4m3(float value) {
    if (value != value) return 0x7f;
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint8_t sign = static_cast<uint8_t>(bits >> 24) & 0x80u;
    const float magnitude = std::fabs(value);
    if (magnitude < 0x1p-6f) {  // subnormal steps of 2^-9
        return sign | static_cast<uint8_t>(std::nearbyint(magnitude * 0x1p9f));
    }
    bits &= 0x7fffffffu;
    bits += 0x7ffffu + ((bits >> 20) & 1u);
    return sign | static_cast<uint8_t>((bits >> 20) - (120u << 3));
}

// e^x for x <= 0 by range reduction and a polynomial of degree 6 (Cephes' expf); below -87.3 it is 0.
inline float exp_neg(float x) {
    const float clamped = x < -87.3f ? -87.3f : x;
    const float n = std::nearbyint(clamped * 1.44269504088896341f);
    float r = __builtin_fmaf(n, -0.693359375f, clamped);
    r = __builtin_fmaf(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = __builtin_fmaf(p, r, 1.3981999507e-3f);
    p = __builtin_fmaf(p, r, 8.3334519073e-3f);
    p = __builtin_fmaf(p, r, 4.1665795894e-2f);
    p = __builtin_fmaf(p, r, 1.6666665459e-1f);
    p = __builtin_fmaf(p, r, 5.0000001201e-1f);
    p = __builtin_fmaf(p, r * r, r + 1.0f);
    const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    const float result = p * power;
    return x < -87.3f ? 0.0f : result;
}

inline float sum_lanes(const Floats& a) {
    float s[8];
    for (int i = 0; i < 8; ++i) s[i] = a.v[i] + a.v[i + 8];
    for (int i = 0; i < 4; ++i) s[i] += s[i + 4];
    return (s[0] + s[2]) + (s[1] + s[3]);
}

// ---- quantized matmul ----------------------------------------------------------------------------------------------

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

// ---- dense matmul --------------------------------------------------------------------------------------------------

template <Dense kType>
inline void load_weights(const void* w, int64_t index, Floats& to) {
    if constexpr (kType == Dense::f32) {
        std::memcpy(to.v, static_cast<const float*>(w) + index, sizeof to.v);
    } else {
        const uint16_t* bits = static_cast<const uint16_t*>(w) + index;
        if constexpr (kType == Dense::f16) {
            load_scales(reinterpret_cast<const uint8_t*>(bits), 2, to);
        } else {
            for (int i = 0; i < kLanes; ++i) to.v[i] = bf16_to_float(bits[i]);
        }
    }
}

// One row against one panel of 16 outputs, [cols, 16] in memory; four chains of columns, so that additions overlap.
template <Dense kType, int kRows>
void dense_panel(const float* x, const void* w, int64_t first, int64_t cols, float* out, int64_t num_out, int64_t n) {
    Floats y[kRows][4] = {};
    for (int64_t k = 0; k < cols; k += 4) {
        for (int64_t c = 0; c < std::min<int64_t>(4, cols - k); ++c) {
            Floats weights;
            load_weights<kType>(w, first + (k + c) * kLanes, weights);
            for (int r = 0; r < kRows; ++r) {
                const float value = x[r * cols + k + c];
                for (int i = 0; i < kLanes; ++i) y[r][c].v[i] = __builtin_fmaf(value, weights.v[i], y[r][c].v[i]);
            }
        }
    }
    for (int r = 0; r < kRows; ++r) {
        for (int64_t i = 0; i < std::min<int64_t>(n, kLanes); ++i) {
            out[r * num_out + i] = (y[r][0].v[i] + y[r][1].v[i]) + (y[r][2].v[i] + y[r][3].v[i]);
        }
    }
}

template <Dense kType>
void dense_typed(const float* x, int64_t m, const void* w, int64_t n, int64_t k, float* out) {
    const int64_t panels = (n + kLanes - 1) / kLanes;
    const int64_t pieces = std::min<int64_t>(panels, ThreadPool::instance().size() * 8);
    ThreadPool::instance().run(pieces, [&](int64_t piece, int) {
        for (int64_t p = panels * piece / pieces; p < panels * (piece + 1) / pieces; ++p) {
            const int64_t first = p * kLanes * k, left = n - p * kLanes;
            int64_t row = 0;
            for (; row + 4 <= m; row += 4) dense_panel<kType, 4>(x + row * k, w, first, k, out + row * n + p * kLanes, n, left);
            for (; row < m; ++row) dense_panel<kType, 1>(x + row * k, w, first, k, out + row * n + p * kLanes, n, left);
        }
    });
}

void dense_matmul(const float* x, int64_t m, const void* w, Dense type, int64_t n, int64_t k, float* out) {
    if (type == Dense::bf16) dense_typed<Dense::bf16>(x, m, w, n, k, out);
    else if (type == Dense::f16) dense_typed<Dense::f16>(x, m, w, n, k, out);
    else dense_typed<Dense::f32>(x, m, w, n, k, out);
}

// ---- small ops -----------------------------------------------------------------------------------------------------

template <typename Body>
void for_rows(int64_t rows, int64_t cost, const Body& body) {
    if (rows * cost < 65536) {
        for (int64_t row = 0; row < rows; ++row) body(row);
        return;
    }
    const int64_t pieces = std::min<int64_t>(rows, ThreadPool::instance().size() * 4);
    ThreadPool::instance().run(pieces, [&](int64_t piece, int) {
        for (int64_t row = rows * piece / pieces; row < rows * (piece + 1) / pieces; ++row) body(row);
    });
}

void rms_norm(const float* x, float* residual, const float* weight, float eps, int64_t rows, int64_t cols, float* out) {
    for_rows(rows, cols, [=](int64_t row) {
        const float* from = x + row * cols;
        if (residual != nullptr) {
            float* sum = residual + row * cols;
            for (int64_t i = 0; i < cols; ++i) sum[i] += from[i];
            from = sum;
        }
        Floats squares = {};
        int64_t i = 0;
        for (; i + kLanes <= cols; i += kLanes) {
            for (int j = 0; j < kLanes; ++j) squares.v[j] = __builtin_fmaf(from[i + j], from[i + j], squares.v[j]);
        }
        for (int j = 0; i + j < cols; ++j) squares.v[j] = __builtin_fmaf(from[i + j], from[i + j], squares.v[j]);
        const float inverse = 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(cols) + eps);
        for (int64_t j = 0; j < cols; ++j) out[row * cols + j] = from[j] * inverse * weight[j];
    });
}

// table: [positions, 2, head_dim / 2], cosines then sines
void rotary(float* x, const int32_t* positions, const float* table, int64_t rows, int64_t heads, int64_t head_dim) {
    const int64_t half = head_dim / 2;
    for_rows(rows, heads * head_dim, [=](int64_t row) {
        const float* cosines = table + static_cast<int64_t>(positions[row]) * head_dim;
        const float* sines = cosines + half;
        for (int64_t head = 0; head < heads; ++head) {
            float* a = x + (row * heads + head) * head_dim;
            float* b = a + half;
            for (int64_t i = 0; i < half; ++i) {
                const float first = a[i], second = b[i];
                a[i] = __builtin_fmaf(first, cosines[i], -(second * sines[i]));
                b[i] = __builtin_fmaf(second, cosines[i], first * sines[i]);
            }
        }
    });
}

void silu_mul(const float* gate, const float* up, int64_t stride, int64_t rows, int64_t cols, float* out) {
    for_rows(rows, cols * 4, [=](int64_t row) {
        const float* g = gate + row * stride;
        const float* u = up + row * stride;
        float* o = out + row * cols;
        for (int64_t i = 0; i < cols; ++i) {
            // 1 / (1 + e^-|g|) and its mirror image: the exponential never overflows. A NaN stays one.
            const float e = exp_neg(-std::fabs(g[i]));
            const float positive = 1.0f / (1.0f + e);
            const float sigmoid = g[i] >= 0.0f ? positive : e * positive;
            o[i] = g[i] * sigmoid * u[i];
        }
    });
}

void kv_write(const float* k, const float* v, const int64_t* slots, int64_t rows, const KvLayer& layer) {
    const int64_t heads = layer.num_kv_heads, dim = layer.head_dim;
    const auto store = [&](const float* from, float scale, uint8_t* base, int64_t index) {
        if (layer.type == KvType::bf16) {
            auto* to = reinterpret_cast<uint16_t*>(base) + index;
            for (int64_t i = 0; i < dim; ++i) to[i] = float_to_bf16(from[i] / scale);
        } else {
            uint8_t* to = base + index;
            for (int64_t i = 0; i < dim; ++i) {
                const float value = from[i] / scale;
                to[i] = float_to_e4m3(value > 448.0f ? 448.0f : (value < -448.0f ? -448.0f : value));
            }
        }
    };
    for_rows(rows, heads * dim * 8, [&](int64_t row) {
        if (slots[row] < 0) return;
        const int64_t page = slots[row] / layer.page_size, offset = slots[row] % layer.page_size;
        for (int64_t head = 0; head < heads; ++head) {
            const int64_t index = ((page * heads + head) * layer.page_size + offset) * dim;
            store(k + (row * heads + head) * dim, layer.k_scale[head], layer.k, index);
            store(v + (row * heads + head) * dim, layer.v_scale[head], layer.v, index);
        }
    });
}

// ---- attention -----------------------------------------------------------------------------------------------------

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

inline float stored(const uint8_t* base, KvType type, int64_t index) {
    return type == KvType::bf16 ? bf16_to_float(reinterpret_cast<const uint16_t*>(base)[index]) : e4m3_to_float(base[index]);
}

// 16 stored elements as floats.
template <KvType kType>
inline void load_stored(const uint8_t* base, int64_t index, float* to) {
    for (int i = 0; i < kLanes; ++i) to[i] = stored(base, kType, index + i);
}

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

// Turns scores of keys [first, last) into weights e^(score - maximum), 0 elsewhere, and sums them lane by lane.
inline void soften(float* scores, int64_t first, int64_t last, float* maximum, float* sum) {
    float top = -std::numeric_limits<float>::infinity();
    bool has_nan = false;
    for (int64_t i = first; i < last; ++i) {
        top = scores[i] > top ? scores[i] : top;
        has_nan |= scores[i] != scores[i];
    }
    if (has_nan) top = std::numeric_limits<float>::quiet_NaN();
    for (int64_t i = 0; i < first; ++i) scores[i] = -std::numeric_limits<float>::infinity();
    for (int64_t i = last; i < kRange; ++i) scores[i] = -std::numeric_limits<float>::infinity();
    Floats total = {};
    for (int64_t i = 0; i < kRange; i += kLanes) {
        for (int l = 0; l < kLanes; ++l) {
            scores[i + l] = exp_neg(scores[i + l] - top);
            total.v[l] += scores[i + l];
        }
    }
    *maximum = top;
    *sum = has_nan ? top : sum_lanes(total);
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

const Ops& SLUICEGATE_OPS() {
    static const Ops ops{SLUICEGATE_OPS_NAME, quantized_matmul, dense_matmul, rms_norm, rotary,
                         silu_mul, kv_write, paged_attention};
    return ops;
}

}  // namespace sluicegate
