// Seals: keyed sums over the stored bytes of a page and kv head. See docs/integrity.md.
#pragma once

#include <atomic>
#include <cstring>

#include "lanes.hpp"
#include "ops.hpp"
#include "thread_pool.hpp"

namespace sluicegate {
namespace {

// Two sums modulo 2^32.
struct Sums {
    uint32_t first = 0, second = 0;
    void operator+=(const Sums& other) {
        first += other.first;
        second += other.second;
    }
    bool operator==(const Sums&) const = default;
};

inline Sums halves(uint64_t tag) { return {static_cast<uint32_t>(tag), static_cast<uint32_t>(tag >> 32)}; }

inline int64_t element_bytes(const KvLayer& layer) { return layer.type == KvType::fp8 ? 1 : 2; }
inline int64_t k_bytes(const KvLayer& layer) { return layer.page_size * layer.head_dim * element_bytes(layer); }
inline int64_t v_bytes(const KvLayer& layer) { return layer.page_size * layer.v_dim * element_bytes(layer); }

// sum of words[i] * keys[i] and of words[i] * keys[stride + i], words and keys being signed numbers of 16 bits.
inline Sums sum_words(const uint8_t* from, const int16_t* keys, int64_t stride, int64_t count) {
    Sums sums;
    int64_t i = 0;
#if defined(__AVX512VNNI__)
    __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
    for (; i + 64 <= count; i += 64) {
        const __m512i first = _mm512_loadu_si512(from + 2 * i), second = _mm512_loadu_si512(from + 2 * i + 64);
        a = _mm512_dpwssd_epi32(a, first, _mm512_loadu_si512(keys + i));
        b = _mm512_dpwssd_epi32(b, first, _mm512_loadu_si512(keys + stride + i));
        c = _mm512_dpwssd_epi32(c, second, _mm512_loadu_si512(keys + i + 32));
        d = _mm512_dpwssd_epi32(d, second, _mm512_loadu_si512(keys + stride + i + 32));
    }
    sums.first = static_cast<uint32_t>(_mm512_reduce_add_epi32(_mm512_add_epi32(a, c)));
    sums.second = static_cast<uint32_t>(_mm512_reduce_add_epi32(_mm512_add_epi32(b, d)));
#elif defined(__AVX2__)
    __m256i a = _mm256_setzero_si256(), b = a;
    const auto load = [](const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); };
    for (; i + 16 <= count; i += 16) {
        const __m256i words = load(from + 2 * i);
        a = _mm256_add_epi32(a, _mm256_madd_epi16(words, load(keys + i)));
        b = _mm256_add_epi32(b, _mm256_madd_epi16(words, load(keys + stride + i)));
    }
    alignas(32) uint32_t lanes[16];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), a);
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes + 8), b);
    for (int lane = 0; lane < 8; ++lane) sums += {lanes[lane], lanes[8 + lane]};
#endif
    for (; i < count; ++i) {
        int16_t word;
        std::memcpy(&word, from + 2 * i, 2);
        sums.first += static_cast<uint32_t>(int32_t{word} * keys[i]);
        sums.second += static_cast<uint32_t>(int32_t{word} * keys[stride + i]);
    }
    return sums;
}

#if defined(__AVX512VNNI__)
// The sum of the lanes of each of four vectors.
inline __m128i sums_of_lanes(__m512i a, __m512i b, __m512i c, __m512i d) {
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}
#endif

// The same for four runs of words, added to their sums: they share each load of a key.
inline void sum_words_of_4(const uint8_t* const* from, const int16_t* keys, int64_t stride, int64_t count, Sums* sums) {
    int64_t i = 0;
#if defined(__AVX512VNNI__)
    // Not in arrays: GCC 12 keeps those in memory, or moves them about in each turn.
    __m512i a0 = _mm512_setzero_si512(), a1 = a0, a2 = a0, a3 = a0, b0 = a0, b1 = a0, b2 = a0, b3 = a0;
    const auto load = [](const void* at) { return _mm512_loadu_si512(at); };
    for (; i + 32 <= count; i += 32) {
        const __m512i first = load(keys + i), second = load(keys + stride + i);
        const auto add = [=](__m512i& a, __m512i& b, const uint8_t* words) {
            const __m512i loaded = load(words + 2 * i);
            a = _mm512_dpwssd_epi32(a, loaded, first);
            b = _mm512_dpwssd_epi32(b, loaded, second);
        };
        add(a0, b0, from[0]);
        add(a1, b1, from[1]);
        add(a2, b2, from[2]);
        add(a3, b3, from[3]);
        asm("" : "+v"(a0), "+v"(a1), "+v"(a2), "+v"(a3), "+v"(b0), "+v"(b1), "+v"(b2), "+v"(b3));
    }
    alignas(16) uint32_t totals[8];
    _mm_store_si128(reinterpret_cast<__m128i*>(totals), sums_of_lanes(a0, a1, a2, a3));
    _mm_store_si128(reinterpret_cast<__m128i*>(totals + 4), sums_of_lanes(b0, b1, b2, b3));
    for (int p = 0; p < 4; ++p) sums[p] += {totals[p], totals[4 + p]};
#endif
    for (int p = 0; i < count && p < 4; ++p) sums[p] += sum_words(from[p] + 2 * i, keys + i, stride, count - i);
}

// What the key of a page and its head's scales add to the sums.
inline uint64_t seal_mask(const KvLayer& layer, int64_t head, uint64_t page_key) {
    uint32_t k_bits, v_bits;
    std::memcpy(&k_bits, layer.k_scale + head, 4);
    std::memcpy(&v_bits, layer.v_scale + head, 4);
    const LayerSeals& seals = layer.seals;
    return page_key * seals.factor[head] + seals.offset[head] + k_bits * seals.scales[0] + v_bits * seals.scales[1];
}

// A page as a reader expects it.
struct ExpectedPage {
    int64_t page;
    uint64_t key;
    int64_t num_tokens;
};

// What one head's part of each page must add up to, summed up bit by bit: all of a page is added while it's in the nearest cache.
struct PageSums {
    const KvLayer& layer;
    int64_t head;
    int64_t count = 0;
    ExpectedPage pages[kRange];
    Sums sums[kRange];

    PageSums(const KvLayer& in, int64_t of_head) : layer(in), head(of_head) {}

    void expect(const ExpectedPage& page) {
        const uint32_t* rows = layer.seals.rows + 2 * page.num_tokens;
        pages[count] = page;
        sums[count] = halves(seal_mask(layer, head, page.key));
        sums[count++] += {rows[0], rows[1]};
        __builtin_prefetch(layer.seals.tags + part_of(count - 1));
    }

    void add_keys() { add(layer.k, layer.seals.k_words, k_bytes(layer) / 2); }
    void add_values() {
        if (layer.v_dim > 0) add(layer.v, layer.seals.v_words, v_bytes(layer) / 2);
    }

    // Calls bad(i) for each page that has another seal.
    template <typename Bad>
    void judge(const Bad& bad) const {
        for (int64_t i = 0; i < count; ++i) {
            // A tag is written with two atomic additions, of other rows' threads too, but never while it is read.
            uint64_t tag;
            std::memcpy(&tag, layer.seals.tags + part_of(i), 8);
            if (sums[i] != halves(tag)) bad(i);
        }
    }

private:
    int64_t part_of(int64_t i) const { return pages[i].page * layer.num_kv_heads + head; }

    void add(const uint8_t* parts, const int16_t* coefficients, int64_t words) {
        const auto at = [&](int64_t i) { return parts + 2 * part_of(i) * words; };
        int64_t i = 0;
        for (; i + 4 <= count; i += 4) {
            const uint8_t* from[] = {at(i), at(i + 1), at(i + 2), at(i + 3)};
            sum_words_of_4(from, coefficients, words, words, sums + i);
        }
        for (; i < count; ++i) sums[i] += sum_words(at(i), coefficients, words, words);
    }
};

// Whether one head's part of a page has the seal that it must have.
inline bool is_sealed(const KvLayer& layer, int64_t head, const ExpectedPage& page) {
    PageSums sums(layer, head);
    bool is_sound = true;
    sums.expect(page);
    sums.add_keys();
    sums.add_values();
    sums.judge([&](int64_t) { is_sound = false; });
    return is_sound;
}

inline void add_to_tag(const KvLayer& layer, int64_t page, int64_t head, const Sums& sums) {
    auto* tag = reinterpret_cast<uint32_t*>(layer.seals.tags + page * layer.num_kv_heads + head);
    std::atomic_ref<uint32_t>(tag[0]).fetch_add(sums.first, std::memory_order_relaxed);
    std::atomic_ref<uint32_t>(tag[1]).fetch_add(sums.second, std::memory_order_relaxed);
}

// What one stored element adds to the sums over its part of the page: of 16 bits it is a word, of 8 bits the low or high byte of one.
template <typename Stored>
inline Sums product(Stored stored, int64_t index, const int16_t* keys, int64_t words) {
    if constexpr (sizeof(Stored) == 2) {
        const auto word = static_cast<int16_t>(stored);
        return {static_cast<uint32_t>(int32_t{word} * keys[index]), static_cast<uint32_t>(int32_t{word} * keys[words + index])};
    } else {
        const int32_t word = index % 2 ? int32_t{static_cast<int8_t>(stored)} * 256 : int32_t{stored};
        return {static_cast<uint32_t>(word * keys[index / 2]), static_cast<uint32_t>(word * keys[words + index / 2])};
    }
}

// The sums of a row that lies by token: dim elements, always whole words, at `offset` in a part whose words have these keys.
template <typename Stored>
inline Sums token_sums(const Stored* part, int64_t dim, int64_t page_size, int64_t offset, const int16_t* keys) {
    const int64_t words = dim * static_cast<int64_t>(sizeof(Stored)) / 2;
    return sum_words(reinterpret_cast<const uint8_t*>(part + offset * dim), keys + offset * words, page_size * words, words);
}

// Writes a row's key among keys that lie by dimension; returns by how much that changes the sums.
template <typename Stored>
inline Sums write_column(const KvLayer& layer, const Stored* key, int64_t offset, Stored* keys) {
    const int64_t words = k_bytes(layer) / 2;
    Sums change;
    for (int64_t i = 0; i < layer.head_dim; ++i) {
        const int64_t at = i * layer.page_size + offset;
        const Sums before = product(keys[at], at, layer.seals.k_words, words), after = product(key[i], at, layer.seals.k_words, words);
        change += {after.first - before.first, after.second - before.second};
        keys[at] = key[i];
    }
    return change;
}

inline KvLayer layer_at(const KvLayers& layers, int64_t index) {
    const KvLayer& first = layers.first;
    KvLayer layer = first;
    const int64_t heads = first.num_kv_heads, parts = first.num_pages * heads, value = layers.value_index[index];
    layer.k += index * parts * k_bytes(first);
    if (value < 0) layer.v_dim = 0;
    else layer.v += value * parts * v_bytes(first);
    layer.k_scale += index * heads;
    layer.v_scale += index * heads;
    layer.seals.tags += index * first.num_pages * heads;
    layer.seals.factor += index * heads;
    layer.seals.offset += index * heads;
    return layer;
}

inline int64_t num_layers(const KvLayers& layers) { return static_cast<int64_t>(layers.value_index.size()); }

void open_pages(const int64_t* pages, const uint64_t* page_keys, int64_t count, const KvLayers& layers) {
    const int64_t heads = layers.first.num_kv_heads;
    for (int64_t index = 0; index < num_layers(layers); ++index) {
        const KvLayer layer = layer_at(layers, index);
        const int64_t key_bytes = heads * k_bytes(layer), value_bytes = heads * v_bytes(layer);
        for (int64_t i = 0; i < count; ++i) {
            std::memset(layer.k + pages[i] * key_bytes, 0, static_cast<size_t>(key_bytes));
            if (value_bytes > 0) std::memset(layer.v + pages[i] * value_bytes, 0, static_cast<size_t>(value_bytes));
            for (int64_t head = 0; head < heads; ++head) layer.seals.tags[pages[i] * heads + head] = seal_mask(layer, head, page_keys[i]);
        }
    }
}

void rekey_pages(const int64_t* pages, const uint64_t* before, const uint64_t* after, int64_t count, const KvLayers& layers) {
    for (int64_t index = 0; index < num_layers(layers); ++index) {
        const KvLayer layer = layer_at(layers, index);
        for (int64_t i = 0; i < count; ++i) {
            for (int64_t head = 0; head < layer.num_kv_heads; ++head) {
                const Sums from = halves(seal_mask(layer, head, before[i])), to = halves(seal_mask(layer, head, after[i]));
                add_to_tag(layer, pages[i], head, {to.first - from.first, to.second - from.second});
            }
        }
    }
}

void verify_pages(const int64_t* pages, const uint64_t* page_keys, const int64_t* num_tokens, int64_t count, int64_t* found,
                  const KvLayers& layers) {
    ThreadPool::instance().run(count, [&](int64_t i, int) {
        const ExpectedPage expected{pages[i], page_keys[i], num_tokens[i]};
        found[i] = -1;
        for (int64_t index = 0; index < num_layers(layers) && found[i] < 0; ++index) {
            const KvLayer layer = layer_at(layers, index);
            for (int64_t head = 0; head < layer.num_kv_heads; ++head) {
                if (!is_sealed(layer, head, expected)) found[i] = index;
            }
        }
    });
}

}  // namespace
}  // namespace sluicegate
