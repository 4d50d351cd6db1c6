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
constexpr int64_t kPieceProducts = 800'000;  // some 10 us

// out [num_rows, stride]: the first w.num_rows columns are written.
void quantized_matmul(const float* x, int64_t num_rows, const QuantizedMatrix& w, float* out, int64_t stride) {
    thread_local Activations act;
    quantize_rows(x, num_rows, w.num_cols, w.order, w.group_size, w.planes, act);
    const Activations& activations = act;  // the caller's, not each pool thread's own
    const int64_t panels = w.num_panels();
    // Each piece costs several exchanges of cache lines between cores: pieces of some microseconds, one for each thread at least, and not
    // more weights in one than the second-level cache holds.
    const int64_t threads = ThreadPool::instance().size();
    const int64_t by_work = num_rows * w.num_rows * w.num_cols / kPieceProducts / threads * threads;
    const int64_t wanted = std::max({threads, std::min(by_work, threads * 8), num_rows < 4 ? 0 : panels * w.panel_bytes() / kPieceBytes});
    const int64_t pieces = std::min<int64_t>((panels + kPanels - 1) / kPanels, wanted);
    const auto first_panel = [&](int64_t piece) { return std::min(panels, (panels + kPanels - 1) / kPanels * piece / pieces * kPanels); };
    ThreadPool::instance().run(pieces, [&](int64_t piece, int) {
        for (int64_t row = 0; row < num_rows;) {
            const int64_t count = Activations::tile_rows(row, num_rows);
            const uint8_t* tile = activations.tile(row);
            multiply_tile(w, first_panel(piece), first_panel(piece + 1), w.planes, tile, count, out + row * stride, stride);
            row += count;
        }
    });
}

}  // namespace
}  // namespace sluicegate
