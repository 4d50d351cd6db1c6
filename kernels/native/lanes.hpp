// 16 lanes, the number formats that are stored, and the functions on them that every op shares.
#pragma once

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

inline float stored(const uint8_t* base, KvType type, int64_t index) {
    return type == KvType::bf16 ? bf16_to_float(reinterpret_cast<const uint16_t*>(base)[index]) : e4m3_to_float(base[index]);
}

// 16 stored elements as floats.
template <KvType kType>
inline void load_stored(const uint8_t* base, int64_t index, float* to) {
    if constexpr (kType == KvType::fp8) {
        // The vectorizer gives up on e4m3. Subnormals are (1 + m / 8) * 2^-6 - 2^-6, so that no float32 operand is subnormal.
#if defined(__AVX512F__)
        const __m512i bits = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(base + index)));
        const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7f)), shifted = _mm512_slli_epi32(magnitude, 20);
        const __m512i normal = _mm512_add_epi32(shifted, _mm512_set1_epi32(120 << 23));
        const __m512i biased = _mm512_add_epi32(shifted, _mm512_set1_epi32(121 << 23));
        const __m512 small = _mm512_sub_ps(_mm512_castsi512_ps(biased), _mm512_set1_ps(0x1p-6f));
        __m512i wide = _mm512_mask_mov_epi32(normal, _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(8)), _mm512_castps_si512(small));
        wide = _mm512_mask_mov_epi32(wide, _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7f)), _mm512_set1_epi32(0x7fc00000));
        wide = _mm512_or_si512(wide, _mm512_slli_epi32(_mm512_sub_epi32(bits, magnitude), 24));
        _mm512_storeu_si512(to, wide);
        return;
#elif defined(__AVX2__)
        for (int half = 0; half < 2; ++half) {
            const __m256i bits = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(base + index + 8 * half)));
            const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7f)), shifted = _mm256_slli_epi32(magnitude, 20);
            const __m256i normal = _mm256_add_epi32(shifted, _mm256_set1_epi32(120 << 23));
            const __m256i biased = _mm256_add_epi32(shifted, _mm256_set1_epi32(121 << 23));
            const __m256 small = _mm256_sub_ps(_mm256_castsi256_ps(biased), _mm256_set1_ps(0x1p-6f));
            const __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), magnitude);
            const __m256i is_nan = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7f));
            __m256i wide = _mm256_blendv_epi8(normal, _mm256_castps_si256(small), is_small);
            wide = _mm256_blendv_epi8(wide, _mm256_set1_epi32(0x7fc00000), is_nan);
            wide = _mm256_or_si256(wide, _mm256_slli_epi32(_mm256_sub_epi32(bits, magnitude), 24));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8 * half), wide);
        }
        return;
#endif
    }
    for (int i = 0; i < kLanes; ++i) to[i] = stored(base, kType, index + i);
}

}  // namespace
}  // namespace sluicegate
