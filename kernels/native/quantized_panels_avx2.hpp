// Panels of 16 outputs in AVX2: each half has 8 outputs, one in each 32-bit lane. Included by quantized_panels.hpp.
//
// Activations of 16 bits are multiplied as words (`vpmaddwd`): that takes as many products as two planes of bytes and none of the sums
// that those need. Weights of a few columns stay in registers while rows pass by; both halves share each load of activations.
#pragma once

#include <cstring>

#include "activations.hpp"
#include "lanes.hpp"
#include "ops.hpp"

namespace sluicegate {
namespace {

constexpr int kPanels = 1;
constexpr int64_t kFewRows = 0;
constexpr int kHalves = 2, kHalfLanes = 8;

inline __m256i load_256(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

inline __m256i repeated_32(const uint8_t* from) {
    int32_t bits;
    std::memcpy(&bits, from, 4);
    return _mm256_set1_epi32(bits);
}

// Some columns of a panel in registers. `add` adds their products with a row's codes to the row's sums, half by half. 8-bit codes are
// stored + 128; where `kIsShifted`, they're multiplied like that.
template <int kPlanes, int kBits>
struct Columns;

// 8 columns as words: of each four columns the first and third, then the second and fourth, as the activations lie.
template <int kBits>
struct Columns<2, kBits> {
    static constexpr int kCount = 8, kRowBytes = 2 * kCount;
    static constexpr bool kIsShifted = true;
    __m256i words[4][kHalves];

    explicit Columns(const uint8_t* codes) {
        const __m256i mask = _mm256_set1_epi16(kBits == 4 ? 0x0f : 0xff);
        for (int half = 0; half < kHalves; ++half, codes += 32) {
            const __m256i first = load_256(codes);
            if constexpr (kBits == 4) {
                words[0][half] = _mm256_and_si256(first, mask);
                words[1][half] = _mm256_and_si256(_mm256_srli_epi16(first, 8), mask);
                words[2][half] = _mm256_and_si256(_mm256_srli_epi16(first, 4), mask);
                words[3][half] = _mm256_srli_epi16(first, 12);
            } else {
                const __m256i second = load_256(codes + 64);
                words[0][half] = _mm256_and_si256(first, mask);
                words[1][half] = _mm256_srli_epi16(first, 8);
                words[2][half] = _mm256_and_si256(second, mask);
                words[3][half] = _mm256_srli_epi16(second, 8);
            }
        }
    }

    void add(const uint8_t* row, __m256i* dots) const {
#pragma GCC unroll 4
        for (int pair = 0; pair < 4; ++pair) {
            const __m256i codes = repeated_32(row + 4 * pair);
            dots[0] = _mm256_add_epi32(dots[0], _mm256_madd_epi16(words[pair][0], codes));
            dots[1] = _mm256_add_epi32(dots[1], _mm256_madd_epi16(words[pair][1], codes));
        }
    }
};

// 16 columns as bytes. Sums of pairs fit 16 bits for four quads, and would for eight (8 * 2 * 15 * 127).
template <>
struct Columns<1, 4> {
    static constexpr int kCount = 16, kRowBytes = kCount;
    static constexpr bool kIsShifted = false;
    __m256i quads[4][kHalves];

    explicit Columns(const uint8_t* codes) {
        const __m256i mask = _mm256_set1_epi8(0x0f);
        for (int pair = 0; pair < 2; ++pair) {
            for (int half = 0; half < kHalves; ++half, codes += 32) {
                const __m256i both = load_256(codes);
                quads[2 * pair][half] = _mm256_and_si256(both, mask);
                quads[2 * pair + 1][half] = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
            }
        }
    }

    void add(const uint8_t* row, __m256i* dots) const {
        __m256i pairs[kHalves];
#pragma GCC unroll 4
        for (int quad = 0; quad < 4; ++quad) {
            const __m256i codes = repeated_32(row + kQuad * quad);
            for (int half = 0; half < kHalves; ++half) {
                const __m256i products = _mm256_maddubs_epi16(quads[quad][half], codes);
                pairs[half] = quad == 0 ? products : _mm256_add_epi16(pairs[half], products);
            }
        }
        const __m256i ones = _mm256_set1_epi16(1);
        for (int half = 0; half < kHalves; ++half) dots[half] = _mm256_add_epi32(dots[half], _mm256_madd_epi16(pairs[half], ones));
    }
};

// 8 columns as bytes. The products take one side without a sign, so the weights' goes to the activations, which are never -128.
template <>
struct Columns<1, 8> {
    static constexpr int kCount = 8, kRowBytes = kCount;
    static constexpr bool kIsShifted = false;
    __m256i quads[2][kHalves], magnitudes[2][kHalves];

    explicit Columns(const uint8_t* codes) {
        const __m256i flip = _mm256_set1_epi8(static_cast<char>(0x80));
        for (int quad = 0; quad < 2; ++quad) {
            for (int half = 0; half < kHalves; ++half, codes += 32) {
                quads[quad][half] = _mm256_xor_si256(load_256(codes), flip);
                magnitudes[quad][half] = _mm256_abs_epi8(quads[quad][half]);
            }
        }
    }

    void add(const uint8_t* row, __m256i* dots) const {
        const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 2
        for (int quad = 0; quad < 2; ++quad) {
            const __m256i codes = repeated_32(row + kQuad * quad);
            for (int half = 0; half < kHalves; ++half) {
                const __m256i pairs = _mm256_maddubs_epi16(magnitudes[quad][half], _mm256_sign_epi8(codes, quads[quad][half]));
                dots[half] = _mm256_add_epi32(dots[half], _mm256_madd_epi16(pairs, ones));
            }
        }
    }
};

// One group's scales and minima, and what a row's sums over the group come to with them.
struct GroupScales {
    __m256 scale[kHalves], minimum[kHalves];
    bool has_minimum;

    GroupScales(const uint8_t* from, const QuantizedMatrix& w) : has_minimum(w.has_minimum) {
        Floats numbers;
        load_scales(from, w.scale_bytes, numbers);
        for (int half = 0; half < kHalves; ++half) scale[half] = _mm256_load_ps(numbers.v + kHalfLanes * half);
        if (has_minimum) load_scales(from + kLanes * w.scale_bytes, w.scale_bytes, numbers);
        for (int half = 0; half < kHalves; ++half) minimum[half] = _mm256_load_ps(numbers.v + kHalfLanes * half);
    }

    void add(const __m256i* dots, float step, float offset, __m256* sums) const {
        for (int half = 0; half < kHalves; ++half) {
            const __m256 both = _mm256_mul_ps(scale[half], _mm256_set1_ps(step));
            sums[half] = _mm256_fmadd_ps(both, _mm256_cvtepi32_ps(dots[half]), sums[half]);
            if (has_minimum) sums[half] = _mm256_fmadd_ps(minimum[half], _mm256_set1_ps(offset), sums[half]);
        }
    }
};

template <int kPlanes, int kBits>
inline __m256i first_sum(int32_t codes_sum) {
    return kBits == 8 && Columns<kPlanes, kBits>::kIsShifted ? _mm256_set1_epi32(-128 * codes_sum) : _mm256_setzero_si256();
}

// One panel times a single row, y [16]: its sums stay in registers.
template <int kPlanes, int kBits>
[[gnu::noinline]] void multiply_row(const uint8_t* panel, const QuantizedMatrix& w, const uint8_t* row, float* y) {
    using Part = Columns<kPlanes, kBits>;
    const int group = w.group_size, code_bytes = group * kLanes * kBits / 8;
    const int64_t group_bytes = code_bytes + kLanes * w.scale_bytes * (w.has_minimum ? 2 : 1), groups = w.num_cols / group;
    __m256 sums[kHalves] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int64_t g = 0; g < groups; ++g, panel += group_bytes, row += kPlanes * group + 12) {
        const auto* step = reinterpret_cast<const float*>(row + kPlanes * group);
        int32_t codes_sum;
        std::memcpy(&codes_sum, step + 1, 4);
        __m256i dots[kHalves] = {first_sum<kPlanes, kBits>(codes_sum), first_sum<kPlanes, kBits>(codes_sum)};
        for (int first = 0; first < group; first += Part::kCount) {
            Part(panel + first * kLanes * kBits / 8).add(row + first * kPlanes, dots);
        }
        GroupScales(panel + code_bytes, w).add(dots, step[0], step[2], sums);
    }
    for (int half = 0; half < kHalves; ++half) _mm256_storeu_ps(y + kHalfLanes * half, sums[half]);
}

// One panel times all rows of a tile: y [rows, 16], zero at first.
template <int kPlanes, int kBits>
[[gnu::noinline]] void multiply_rows(const uint8_t* panel, const QuantizedMatrix& w, const uint8_t* tile, int64_t rows, float* y) {
    using Part = Columns<kPlanes, kBits>;
    const int group = w.group_size, code_bytes = group * kLanes * kBits / 8;
    const int64_t group_bytes = code_bytes + kLanes * w.scale_bytes * (w.has_minimum ? 2 : 1), groups = w.num_cols / group;
    alignas(64) int32_t sums_so_far[Activations::kTile][kLanes];
    for (int64_t g = 0; g < groups; ++g, panel += group_bytes, tile += rows * (kPlanes * group + 12)) {
        const auto* steps = reinterpret_cast<const float*>(tile + rows * kPlanes * group);
        const auto* sums = reinterpret_cast<const int32_t*>(steps + rows);
        const float* offsets = steps + 2 * rows;
        for (int first = 0; first < group; first += Part::kCount) {
            const Part part(panel + first * kLanes * kBits / 8);
            const uint8_t* row = tile + first * kPlanes;
            for (int64_t r = 0; r < rows; ++r, row += kPlanes * group) {
                auto* kept = reinterpret_cast<__m256i*>(sums_so_far[r]);
                __m256i dots[kHalves];
                for (int half = 0; half < kHalves; ++half) {
                    dots[half] = first == 0 ? first_sum<kPlanes, kBits>(sums[r]) : _mm256_load_si256(kept + half);
                }
                part.add(row, dots);
                for (int half = 0; half < kHalves; ++half) _mm256_store_si256(kept + half, dots[half]);
            }
        }
        const GroupScales scales(panel + code_bytes, w);
        for (int64_t r = 0; r < rows; ++r) {
            const auto* kept = reinterpret_cast<const __m256i*>(sums_so_far[r]);
            const __m256i dots[kHalves] = {_mm256_load_si256(kept), _mm256_load_si256(kept + 1)};
            float* to = y + r * kLanes;
            __m256 total[kHalves] = {_mm256_loadu_ps(to), _mm256_loadu_ps(to + kHalfLanes)};
            scales.add(dots, steps[r], offsets[r], total);
            for (int half = 0; half < kHalves; ++half) _mm256_storeu_ps(to + kHalfLanes * half, total[half]);
        }
    }
}

template <int kPlanes, int kBits, int kCount>
void multiply_panels(const uint8_t* panel, int64_t, const QuantizedMatrix& w, const uint8_t* tile, int64_t rows, float* y) {
    static_assert(kCount == 1);
    if (rows == 1) multiply_row<kPlanes, kBits>(panel, w, tile, y);
    else multiply_rows<kPlanes, kBits>(panel, w, tile, rows, y);
}

}  // namespace
}  // namespace sluicegate
