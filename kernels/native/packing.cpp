#include "packing.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "thread_pool.hpp"

namespace sluicegate {

namespace {

constexpr int64_t kPanelRows = 16;
constexpr int64_t kTileColumns = 64;
constexpr int64_t kCheckedAtOnce = 1 << 18;

template <typename Body>
void for_panels(int64_t rows, const Body& body) {
    const int64_t panels = (rows + kPanelRows - 1) / kPanelRows;
    const int64_t pieces = std::min<int64_t>(panels, ThreadPool::instance().size() * 4);
    ThreadPool::instance().run(pieces, [&](int64_t piece, int) {
        for (int64_t panel = panels * piece / pieces; panel < panels * (piece + 1) / pieces; ++panel) {
            body(panel, std::min(kPanelRows, rows - panel * kPanelRows));
        }
    });
}

// 16 numbers of one group, zero where the panel has no row.
template <typename Bits>
void pack_numbers(const uint8_t* from, int64_t groups, int64_t first, int64_t count, int64_t group, uint8_t* out) {
    Bits numbers[kPanelRows] = {};
    for (int64_t row = 0; row < count; ++row) std::memcpy(numbers + row, from + ((first + row) * groups + group) * sizeof(Bits), sizeof(Bits));
    std::memcpy(out, numbers, sizeof numbers);
}

void pack_numbers(const uint8_t* from, int32_t bytes, int64_t groups, int64_t first, int64_t count, int64_t group, uint8_t* out) {
    if (bytes == 2) pack_numbers<uint16_t>(from, groups, first, count, group, out);
    else pack_numbers<uint32_t>(from, groups, first, count, group, out);
}

// Of one or several groups: 32-bit words of each row, at least as many as the largest group has (8 bits, 128 columns).
constexpr int64_t kMaxWords = 32;
using Tile = uint32_t[kPanelRows][kMaxWords];

// Columns 0..7 as nibbles from the lowest up -> bytes of columns (0, 4), (1, 5), (2, 6), (3, 7).
inline uint32_t interleaved(uint32_t pairs) {
    const auto spread = [](uint32_t four) {
        four = (four | (four << 8)) & 0x00ff00ffu;
        return (four | (four << 4)) & 0x0f0f0f0fu;
    };
    return spread(pairs & 0xffffu) | (spread(pairs >> 16) << 4);
}

// Each row's words, changed one by one, while they lie side by side.
#if defined(__x86_64__)
__attribute__((target_clones("avx2", "default")))
#endif
void change_words(const uint8_t* from, int64_t row_bytes, int64_t rows, int64_t words, bool is_int4, Tile& tile) {
    for (int64_t row = 0; row < rows; ++row) {
        uint32_t line[kMaxWords];
        std::memcpy(line, from + row * row_bytes, static_cast<size_t>(4 * words));
        if (is_int4) {
            for (int64_t i = 0; i < words; ++i) tile[row][i] = interleaved(line[i]);
        } else {
            for (int64_t i = 0; i < words; ++i) tile[row][i] = line[i] ^ 0x80808080u;
        }
    }
}

// Some words of all rows, [rows, words] -> [words, rows].
void turn(const Tile& tile, int64_t first, int64_t words, uint8_t* to) {
    for (int64_t i = 0; i < words; ++i) {
        uint32_t column[kPanelRows];
        for (int64_t row = 0; row < kPanelRows; ++row) column[row] = tile[row][first + i];
        std::memcpy(to + i * static_cast<int64_t>(sizeof column), column, sizeof column);
    }
}

template <int kBits>
void pack_quantized(const uint8_t* codes, const GroupNumbers& numbers, int64_t rows, int64_t cols, int64_t group, uint8_t* out) {
    const int64_t groups = cols / group, row_bytes = cols * kBits / 8, code_bytes = group * kBits / 8;
    const int64_t number_bytes = kPanelRows * numbers.bytes, words = code_bytes / 4, at_once = kMaxWords / words;
    const int64_t group_bytes = kPanelRows * code_bytes + number_bytes * (numbers.minimum == nullptr ? 1 : 2);
    for_panels(rows, [&](int64_t panel, int64_t count) {
        uint8_t* to = out + panel * groups * group_bytes;
        const uint8_t* from = codes + panel * kPanelRows * row_bytes;
        Tile tile;
        for (int64_t row = count; row < kPanelRows; ++row) std::fill_n(tile[row], kMaxWords, kBits == 4 ? 0 : 0x80808080u);
        for (int64_t g = 0; g < groups; ++g, to += group_bytes) {
            if (g % at_once == 0) {
                change_words(from + g * code_bytes, row_bytes, count, std::min(at_once, groups - g) * words, kBits == 4, tile);
            }
            turn(tile, g % at_once * words, words, to);
            uint8_t* end = to + kPanelRows * code_bytes;
            pack_numbers(numbers.scale, numbers.bytes, groups, panel * kPanelRows, count, g, end);
            if (numbers.minimum != nullptr) {
                pack_numbers(numbers.minimum, numbers.bytes, groups, panel * kPanelRows, count, g, end + number_bytes);
            }
        }
    });
}

template <typename Element>
void pack_typed(const uint8_t* from, int64_t rows, int64_t cols, uint8_t* out) {
    for_panels(rows, [&](int64_t panel, int64_t count) {
        const auto* source = reinterpret_cast<const Element*>(from) + panel * kPanelRows * cols;
        auto* to = reinterpret_cast<Element*>(out) + panel * kPanelRows * cols;
        if (count < kPanelRows) std::memset(to, 0, static_cast<size_t>(kPanelRows * cols) * sizeof(Element));
        for (int64_t first = 0; first < cols; first += kTileColumns) {
            const int64_t end = std::min(cols, first + kTileColumns);
            for (int64_t row = 0; row < count; ++row) {
                for (int64_t col = first; col < end; ++col) to[col * kPanelRows + row] = source[row * cols + col];
            }
        }
    });
}

template <typename Bits, Bits kExponent>
bool is_finite_range(const Bits* from, int64_t count) {
    Bits found = 0;
    for (int64_t i = 0; i < count; ++i) found |= static_cast<Bits>((from[i] & kExponent) == kExponent ? 1 : 0);
    return found == 0;
}

bool is_finite_part(const void* from, int64_t first, int64_t count, Number type) {
    if (type == Number::e4m3) return is_finite_range<uint8_t, 0x7f>(static_cast<const uint8_t*>(from) + first, count);
    if (type == Number::f16) return is_finite_range<uint16_t, 0x7c00>(static_cast<const uint16_t*>(from) + first, count);
    if (type == Number::bf16) return is_finite_range<uint16_t, 0x7f80>(static_cast<const uint16_t*>(from) + first, count);
    return is_finite_range<uint32_t, 0x7f800000u>(static_cast<const uint32_t*>(from) + first, count);
}

}  // namespace

void pack_int4(const uint8_t* pairs, const GroupNumbers& numbers, int64_t rows, int64_t cols, int64_t group, uint8_t* out) {
    pack_quantized<4>(pairs, numbers, rows, cols, group, out);
}

void pack_int8(const uint8_t* codes, const GroupNumbers& numbers, int64_t rows, int64_t cols, int64_t group, uint8_t* out) {
    pack_quantized<8>(codes, numbers, rows, cols, group, out);
}

void pack_elements(const uint8_t* from, int64_t rows, int64_t cols, int32_t bytes, uint8_t* out) {
    if (bytes == 1) pack_typed<uint8_t>(from, rows, cols, out);
    else if (bytes == 2) pack_typed<uint16_t>(from, rows, cols, out);
    else pack_typed<uint32_t>(from, rows, cols, out);
}

bool all_finite(const void* from, int64_t count, Number type) {
    std::atomic<bool> is_finite{true};
    const int64_t pieces = (count + kCheckedAtOnce - 1) / kCheckedAtOnce;
    ThreadPool::instance().run(pieces, [&](int64_t piece, int) {
        const int64_t first = piece * kCheckedAtOnce;
        if (!is_finite_part(from, first, std::min(kCheckedAtOnce, count - first), type)) is_finite.store(false);
    });
    return is_finite.load();
}

}  // namespace sluicegate
