// 16 lanes, the number formats that are stored, and the functions on them that every op shares.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "ops.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace sluicegate {
namespace {

constexpr int kLanes = 16;
constexpr int kQuad = 4;              // columns in one 32-bit lane
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
    V16 minus(V16 a) const { return {_mm512_sub_ps(v, a.v)}; }
    void add(V16 a) { v = _mm512_add_ps(v, a.v); }
    void raise(V16 a) { v = _mm512_max_ps(a.v, v); }  // where a is NaN it stays
    V16 magnitude() const { return {_mm512_abs_ps(v)}; }
    bool has_nan() const { return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q) != 0; }
    float largest() const { return _mm512_reduce_max_ps(v); }  // of numbers that aren't NaN
    V16 rounded() const { return {_mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
    V16 fma(V16 a, V16 b) const { return {_mm512_fmadd_ps(v, a.v, b.v)}; }
    V16 times_power_of_two(V16 n) const { return {_mm512_scalef_ps(v, n.v)}; }
    V16 zero_where_below(V16 a, float limit) const {
        return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, _mm512_set1_ps(limit), _CMP_NLT_UQ), v)};
    }
};
constexpr int kQueries = 4;  // queries of one row that share a loaded vector of keys or values
constexpr int kTileQueries = 6, kTileVectors = 4;  // queries and vectors of 16 whose sums stay in registers
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
    V16 minus(V16 x) const { return {_mm256_sub_ps(a, x.a), _mm256_sub_ps(b, x.b)}; }
    void add(V16 x) {
        a = _mm256_add_ps(a, x.a);
        b = _mm256_add_ps(b, x.b);
    }
    void raise(V16 x) {  // where x is NaN it stays
        a = _mm256_max_ps(x.a, a);
        b = _mm256_max_ps(x.b, b);
    }
    bool has_nan() const {
        return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(a, a, _CMP_UNORD_Q), _mm256_cmp_ps(b, b, _CMP_UNORD_Q))) != 0;
    }
    V16 magnitude() const {
        const __m256 sign = _mm256_set1_ps(-0.0f);
        return {_mm256_andnot_ps(sign, a), _mm256_andnot_ps(sign, b)};
    }
    float largest() const {
        alignas(32) float lanes[8];
        _mm256_store_ps(lanes, _mm256_max_ps(a, b));
        return *std::max_element(lanes, lanes + 8);
    }
    V16 rounded() const {
        constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        return {_mm256_round_ps(a, kMode), _mm256_round_ps(b, kMode)};
    }
    V16 fma(V16 x, V16 y) const { return {_mm256_fmadd_ps(a, x.a, y.a), _mm256_fmadd_ps(b, x.b, y.b)}; }
    V16 power_of_two() const {
        const auto half = [](__m256 x) {
            return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127)), 23));
        };
        return {half(a), half(b)};
    }
    V16 times_power_of_two(V16 n) const { return times(n.power_of_two()); }
    V16 zero_where_below(V16 x, float limit) const {
        const __m256 low = _mm256_set1_ps(limit);
        return {_mm256_and_ps(_mm256_cmp_ps(x.a, low, _CMP_NLT_UQ), a), _mm256_and_ps(_mm256_cmp_ps(x.b, low, _CMP_NLT_UQ), b)};
    }
};
constexpr int kQueries = 3;
constexpr int kTileQueries = 3, kTileVectors = 2;
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
    V16 minus(const V16& a) const {
        V16 to;
        for (int i = 0; i < kLanes; ++i) to.v[i] = v[i] - a.v[i];
        return to;
    }
    void add(const V16& a) {
        for (int i = 0; i < kLanes; ++i) v[i] += a.v[i];
    }
    void raise(const V16& a) {  // where a is NaN it stays
        for (int i = 0; i < kLanes; ++i) v[i] = a.v[i] > v[i] ? a.v[i] : v[i];
    }
    bool has_nan() const {
        bool any = false;
        for (const float lane : v) any |= lane != lane;
        return any;
    }
    V16 magnitude() const {
        V16 to;
        for (int i = 0; i < kLanes; ++i) to.v[i] = std::fabs(v[i]);
        return to;
    }
    float largest() const { return *std::max_element(v, v + kLanes); }
    V16 rounded() const {
        V16 to;
        for (int i = 0; i < kLanes; ++i) to.v[i] = std::nearbyint(v[i]);
        return to;
    }
    V16 fma(const V16& a, const V16& b) const {
        V16 to;
        for (int i = 0; i < kLanes; ++i) to.v[i] = __builtin_fmaf(v[i], a.v[i], b.v[i]);
        return to;
    }
    V16 power_of_two() const {
        V16 to;
        for (int i = 0; i < kLanes; ++i) {
            const int32_t bits = v[i] != v[i] ? 0 : (static_cast<int32_t>(v[i]) + 127) << 23;
            std::memcpy(&to.v[i], &bits, 4);
        }
        return to;
    }
    V16 times_power_of_two(const V16& n) const { return times(n.power_of_two()); }
    V16 zero_where_below(const V16& a, float limit) const {
        V16 to;
        for (int i = 0; i < kLanes; ++i) to.v[i] = a.v[i] < limit ? 0.0f : v[i];
        return to;
    }
};
constexpr int kQueries = 1;
constexpr int kTileQueries = 1, kTileVectors = 4;
#endif

inline float bf16_to_float(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

// Round to nearest even; the caller has clamped to +-65504.
inline uint16_t float_to_half(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
    if (value != value) return sign | 0x7e00u;
    const float magnitude = std::fabs(value);
    if (magnitude < 0x1p-14f) {  // subnormal steps of 2^-24
        return sign | static_cast<uint16_t>(std::nearbyint(magnitude * 0x1p24f));
    }
    bits &= 0x7fffffffu;
    bits += 0xfffu + ((bits >> 13) & 1u);
    return sign | static_cast<uint16_t>((bits >> 13) - (112u << 10));
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

// The same for 16 lanes, with the same roundings.
inline V16 exp_neg(V16 x) {
    V16 clamped = x;
    clamped.raise(V16::all(-87.3f));
    const V16 n = clamped.times(V16::all(1.44269504088896341f)).rounded();
    V16 r = n.fma(V16::all(-0.693359375f), clamped);
    r = n.fma(V16::all(2.12194440e-4f), r);
    V16 p = V16::all(1.9875691500e-4f);
    for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
        p = p.fma(r, V16::all(c));
    }
    V16 tail = r;
    tail.add(V16::all(1.0f));
    p = p.fma(r.times(r), tail);
    return p.times_power_of_two(n).zero_where_below(x, -87.3f);
}

// Lane i and i + 8, then i + 4, then i + 2, then i + 1.
inline float sum_lanes(const Floats& a) {
    float s[8];
    for (int i = 0; i < 8; ++i) s[i] = a.v[i] + a.v[i + 8];
    for (int i = 0; i < 4; ++i) s[i] += s[i + 4];
    return (s[0] + s[2]) + (s[1] + s[3]);
}

inline float sum_lanes(V16 a) {
#if defined(__AVX512F__)
    const __m256 s = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    Floats lanes;
    a.store(lanes.v);
    return sum_lanes(lanes);
#endif
}

// What a loaded element must be multiplied with; left to the end of a sum, since a power of two commutes with every rounding.
template <KvType kType>
constexpr float kUnit = kType == KvType::fp8 ? 256.0f : 1.0f;

// A stored element, divided by its type's unit.
template <KvType kType>
inline float load_one(const uint8_t* base, int64_t index) {
    if constexpr (kType == KvType::fp8) return e4m3_to_float(base[index]) * 0x1p-8f;
    const uint16_t bits = reinterpret_cast<const uint16_t*>(base)[index];
    return kType == KvType::bf16 ? bf16_to_float(bits) : half_to_float(bits);
}

// 16 neighbouring elements alike.
template <KvType kType>
inline V16 load_16(const uint8_t* base, int64_t index) {
#if defined(__AVX512F__)
    if constexpr (kType == KvType::bf16) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(reinterpret_cast<const uint16_t*>(base) + index));
        return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
    } else if constexpr (kType == KvType::fp16) {
        return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(reinterpret_cast<const uint16_t*>(base) + index)))};
    } else {
        // An e4m3 number's bits, moved to the place of a float16's, are that number times 2^-8, subnormals too; only NaN is not.
        const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(base + index)));
        const __m256i bits = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(wide, 8), 1), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
        const __mmask16 is_nan = _mm256_cmpeq_epi16_mask(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(0x7f));
        return {_mm512_cvtph_ps(_mm256_mask_mov_epi16(bits, is_nan, _mm256_set1_epi16(0x7e00)))};
    }
#elif defined(__AVX2__)
    if constexpr (kType == KvType::bf16) {
        const auto* from = reinterpret_cast<const __m128i*>(reinterpret_cast<const uint16_t*>(base) + index);
        const auto half = [](__m128i bits) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)); };
        return {half(_mm_loadu_si128(from)), half(_mm_loadu_si128(from + 1))};
    } else if constexpr (kType == KvType::fp16) {
        const auto* from = reinterpret_cast<const __m128i*>(reinterpret_cast<const uint16_t*>(base) + index);
        return {_mm256_cvtph_ps(_mm_loadu_si128(from)), _mm256_cvtph_ps(_mm_loadu_si128(from + 1))};
    } else {
        const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(base + index)));
        const __m256i bits = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(wide, 8), 1), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
        const __m256i is_nan = _mm256_cmpeq_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(0x7f));
        const __m256i halves = _mm256_blendv_epi8(bits, _mm256_set1_epi16(0x7e00), is_nan);
        return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
    }
#else
    V16 to;
    for (int i = 0; i < kLanes; ++i) to.v[i] = load_one<kType>(base, index + i);
    return to;
#endif
}

}  // namespace
}  // namespace sluicegate
