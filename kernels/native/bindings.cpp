// The Python module kernels._native. Arguments are addresses and sizes that the Python side has checked: taking tensors as ndarrays
// would cost several microseconds each, in every op of every layer of every step.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <stdexcept>

#include "ops.hpp"
#include "thread_pool.hpp"

namespace nb = nanobind;
using namespace sluicegate;

namespace {

const Ops* current = nullptr;

const Ops& ops() {
    if (current == nullptr) throw std::logic_error("select an instruction set first");
    return *current;
}

template <typename T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

KvLayer layer(uintptr_t k, uintptr_t v, uintptr_t k_scale, uintptr_t v_scale, int64_t num_pages, int64_t num_kv_heads,
              int64_t page_size, int64_t head_dim, int type) {
    return {at<uint8_t>(k), at<uint8_t>(v), at<const float>(k_scale), at<const float>(v_scale), num_pages, num_kv_heads,
            page_size, head_dim, static_cast<KvType>(type)};
}

}  // namespace

NB_MODULE(_native, m) {
    m.def("select", [](const std::string& isa) {
        current = &choose_ops(isa.c_str());
        return std::string(current->name);
    });
    m.def("selected", [] { return std::string(ops().name); });
    m.def("set_num_threads", [](int count) { ThreadPool::instance().resize(count); });
    m.def("num_threads", [] { return ThreadPool::instance().size(); });
    m.def("quantized_matmul", [](uintptr_t x, int64_t rows, uintptr_t packed, int64_t n, int64_t k, int group, int bits,
                                 int scale_bytes, bool has_minimum, uintptr_t out) {
        const QuantizedMatrix w{at<const uint8_t>(packed), n, k, group, bits, scale_bytes, has_minimum};
        nb::gil_scoped_release unlocked;
        ops().quantized_matmul(at<const float>(x), rows, w, at<float>(out));
    });
    m.def("dense_matmul", [](uintptr_t x, int64_t rows, uintptr_t w, int type, int64_t n, int64_t k, uintptr_t out) {
        nb::gil_scoped_release unlocked;
        ops().dense_matmul(at<const float>(x), rows, at<const void>(w), static_cast<Dense>(type), n, k, at<float>(out));
    });
    m.def("rms_norm", [](uintptr_t x, uintptr_t residual, uintptr_t weight, float eps, int64_t rows, int64_t cols, uintptr_t out) {
        nb::gil_scoped_release unlocked;
        ops().rms_norm(at<const float>(x), at<float>(residual), at<const float>(weight), eps, rows, cols, at<float>(out));
    });
    m.def("rotary", [](uintptr_t x, uintptr_t positions, uintptr_t table, int64_t rows, int64_t heads, int64_t head_dim) {
        nb::gil_scoped_release unlocked;
        ops().rotary(at<float>(x), at<const int32_t>(positions), at<const float>(table), rows, heads, head_dim);
    });
    m.def("silu_mul", [](uintptr_t gate, uintptr_t up, int64_t stride, int64_t rows, int64_t cols, uintptr_t out) {
        nb::gil_scoped_release unlocked;
        ops().silu_mul(at<const float>(gate), at<const float>(up), stride, rows, cols, at<float>(out));
    });
    m.def("kv_write", [](uintptr_t k, uintptr_t v, uintptr_t slots, int64_t rows, uintptr_t pool_k, uintptr_t pool_v,
                         uintptr_t k_scale, uintptr_t v_scale, int64_t num_pages, int64_t num_kv_heads, int64_t page_size,
                         int64_t head_dim, int type) {
        const auto target = layer(pool_k, pool_v, k_scale, v_scale, num_pages, num_kv_heads, page_size, head_dim, type);
        nb::gil_scoped_release unlocked;
        ops().kv_write(at<const float>(k), at<const float>(v), at<const int64_t>(slots), rows, target);
    });
    m.def("paged_attention", [](uintptr_t q, uintptr_t out, uintptr_t page_table, uintptr_t row_sequence, uintptr_t row_position,
                                int64_t rows, int64_t heads, int64_t max_pages, int64_t window, float softmax_scale,
                                uintptr_t pool_k, uintptr_t pool_v, uintptr_t k_scale, uintptr_t v_scale, int64_t num_pages,
                                int64_t num_kv_heads, int64_t page_size, int64_t head_dim, int type) {
        const AttentionCall call{at<const float>(q), at<float>(out), at<const int32_t>(page_table),
                                 at<const int32_t>(row_sequence), at<const int32_t>(row_position), rows, heads, max_pages,
                                 window, softmax_scale};
        const auto source = layer(pool_k, pool_v, k_scale, v_scale, num_pages, num_kv_heads, page_size, head_dim, type);
        nb::gil_scoped_release unlocked;
        ops().paged_attention(call, source);
    });
}
