// Matrix products with 4- and 8-bit weights: exact integer dot products for each group, scaled and summed in the order of the groups.
#pragma once

#include <algorithm>

#include "activations.hpp"
#include "ops.hpp"
#include "quantized_panels.hpp"
#include "thread_pool.hpp"

namespace sluicegate {
namespace {

constexpr int64_t kPieceBytes = 256 * 1024;
constexpr int64_t kManyRows = 4;
constexpr int64_t kPieceProducts = 800'000;  // some 10 us
// Rows of a thread for which it's worth unpacking all weights: without AVX-512 that takes longer.
#if defined(__AVX512F__)
constexpr int64_t kRowsToDivide = 4;
#else
constexpr int64_t kRowsToDivide = 8;
#endif

// How a product is cut into pieces: blocks of rows, and panels within them. Rows belong to the same thread in each op of a layer (the pool's
// shares), so that what one op wrote is in the next one's caches; with panels alone each thread would fetch half of everything from another
// core, which costs as much as the products.
struct Division {
    Division(int64_t num_rows, const QuantizedMatrix& w) {
        const int64_t threads = ThreadPool::instance().size();
        blocks = std::clamp<int64_t>(num_rows / kRowsToDivide, 1, threads);
        const int64_t least = divided(num_rows, Activations::kTile);
        tiles = divided(least, blocks) * blocks;
        tile_size = divided(num_rows, tiles);
        tiles = divided(num_rows, tile_size);
        blocks = std::min(blocks, tiles);
        // Each piece costs several exchanges of cache lines between cores: pieces of some microseconds, one for each thread at least, and
        // not more weights in one than the second-level cache holds.
        const int64_t by_work = num_rows * w.num_rows * w.num_cols / kPieceProducts / threads * threads;
        const int64_t by_bytes = num_rows < kManyRows ? 0 : w.num_panels() * w.panel_bytes() / kPieceBytes;
        const int64_t each = divided(std::max(threads, std::min(by_work, threads * 8)), blocks);
        groups = divided(w.num_panels(), kPanels);
        pieces = std::min(groups, std::max(each, by_bytes));
    }

    static int64_t divided(int64_t count, int64_t by) { return (count + by - 1) / by; }

    int64_t blocks, tiles, tile_size;
    int64_t pieces, groups;  // of panels; the former of each block
};

// out [num_rows, stride]: the first w.num_rows columns are written.
void quantized_matmul(const float* x, int64_t num_rows, const QuantizedMatrix& w, float* out, int64_t stride) {
    if (num_rows == 0) return;
    const Division cut(num_rows, w);
    thread_local Activations act;
    quantize_rows(x, num_rows, cut.tile_size, w, act);
    const Activations& activations = act;  // the caller's, not each pool thread's own
    const auto first_panel = [&](int64_t piece) { return std::min(w.num_panels(), cut.groups * piece / cut.pieces * kPanels); };
    ThreadPool::instance().run(cut.blocks * cut.pieces, [&](int64_t number, int) {
        const int64_t block = number / cut.pieces;
        // Blocks begin at different panels: threads that all read the same ones at once would wait for the same lines.
        const int64_t piece = (number + cut.pieces * block / cut.blocks) % cut.pieces;
        for (int64_t tile = cut.tiles * block / cut.blocks; tile < cut.tiles * (block + 1) / cut.blocks; ++tile) {
            const int64_t row = tile * cut.tile_size;
            const int64_t count = Activations::tile_rows(row, num_rows, cut.tile_size);
            multiply_tile(w, first_panel(piece), first_panel(piece + 1), w.planes, activations.tile(row), count, out + row * stride, stride);
        }
    });
}

}  // namespace
}  // namespace sluicegate
