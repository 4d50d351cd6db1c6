// Softmax over one range of keys, and how ranges are merged.
#pragma once

#include <algorithm>
#include <limits>

#include "lanes.hpp"

namespace sluicegate {
namespace {

// One head's running result over the ranges seen so far: softmax(scores) @ V as (maximum, sum, weighted values).
struct Partial {
    float* maximum;
    float* sum;
    float* values;  // [head_dim]
};

// The largest score of keys [first, last), or NaN if one is; places around them, up to a multiple of 16, become -infinity.
inline float largest_score(float* scores, int64_t first, int64_t last) {
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    const int64_t end = (last + kLanes - 1) / kLanes * kLanes;
    std::fill(scores, scores + first, kNone);
    std::fill(scores + last, scores + end, kNone);
    V16 tops = V16::all(kNone);
    bool has_nan = false;
    for (int64_t i = 0; i < end; i += kLanes) {
        const V16 part = V16::load(scores + i);
        tops.raise(part);
        has_nan |= part.has_nan();
    }
    return has_nan ? std::numeric_limits<float>::quiet_NaN() : tops.largest();
}

// Turns scores of keys [0, last) into weights e^(score - maximum), and returns their sum, added lane by lane. Where all scores are
// -infinity there is nothing to weigh; scores, like a NaN maximum's, all become the maximum.
inline float soften(float* scores, int64_t last, float maximum) {
    const int64_t end = (last + kLanes - 1) / kLanes * kLanes;
    if (maximum != maximum || maximum == -std::numeric_limits<float>::infinity()) {
        std::fill(scores, scores + end, maximum);
        return maximum;
    }
    V16 total = V16::zero();
    for (int64_t i = 0; i < end; i += kLanes) {
        const V16 weight = exp_neg(V16::load(scores + i).minus(V16::all(maximum)));
        weight.store(scores + i);
        total.add(weight);
    }
    return sum_lanes(total);
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

}  // namespace
}  // namespace sluicegate
