// Laying out matrices in panels of 16 rows, once at load. See kernels/packing/ref.py for what each does.
#pragma once

#include <cstdint>

namespace sluicegate {

// Scales and minima of a quantized matrix, [rows, groups] of 2 or 4 bytes each; no minima: null.
struct GroupNumbers {
    const uint8_t* scale;
    const uint8_t* minimum;
    int32_t bytes;
};

enum class Number : int32_t { bf16 = 0, f16 = 1, f32 = 2, e4m3 = 3 };

// pairs: [rows, cols / 2], the lower column in the lower half
void pack_int4(const uint8_t* pairs, const GroupNumbers& numbers, int64_t rows, int64_t cols, int64_t group, uint8_t* out);
void pack_int8(const uint8_t* codes, const GroupNumbers& numbers, int64_t rows, int64_t cols, int64_t group, uint8_t* out);
// [rows, cols] of 1, 2 or 4 bytes each -> [panels, cols, 16]
void pack_elements(const uint8_t* from, int64_t rows, int64_t cols, int32_t bytes, uint8_t* out);
bool all_finite(const void* from, int64_t count, Number type);

}  // namespace sluicegate
