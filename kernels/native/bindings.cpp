// The Python module kernels._native. Arguments are addresses and sizes that the Python side has checked: taking tensors as ndarrays
// would cost several microseconds each, in every op of every layer of every step.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <functional>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "ops.hpp"
#include "packing.hpp"
#include "thread_pool.hpp"

namespace nb = nanobind;
using namespace sluicegate;

namespace {

const Ops* current = nullptr;
int activations_bits = 16;  // of the quantized products

// The op calls of a forward pass, with their addresses and sizes: made once by running the model's Python code while it records, and run
// again as often as wanted in one call.
struct Program {
    std::vector<std::function<void()>> calls;
};

thread_local Program* recording = nullptr;

// Run an op now, without the interpreter's lock, or note it down.
template <typename Call>
void submit(Call call) {
    if (recording != nullptr) {
        recording->calls.emplace_back(std::move(call));
        return;
    }
    nb::gil_scoped_release unlocked;
    call();
}

const Ops& ops() {
    if (current == nullptr) throw std::logic_error("select an instruction set first");
    return *current;
}

template <typename T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// The first of `count` places of a table whose page hasn't the tag that it must have (0 stands for no page), or `count`.
int64_t first_stale(const uint64_t* tags, int64_t num_pages, const int32_t* page_table, const uint64_t* expected, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        const bool is_outside = page_table[i] < 0 || page_table[i] >= num_pages;
        if (expected[i] != 0 && (is_outside || tags[page_table[i]] != expected[i])) return i;
    }
    return count;
}

// A layer as `native_pool.py` describes it: addresses of keys, values, their scales; sizes; element type; whether keys lie by token;
// addresses of the seals.
using LayerTuple = std::tuple<uintptr_t, uintptr_t, uintptr_t, uintptr_t, int64_t, int64_t, int64_t, int64_t, int64_t, int, bool, uintptr_t,
                              uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t>;

KvLayer layer_of(const LayerTuple& numbers) {
    const auto& [k, v, k_scale, v_scale, num_pages, num_kv_heads, page_size, head_dim, v_dim, type, keys_by_token, tags, factor, offset,
                 scales, rows, k_words, v_words] = numbers;
    return {at<uint8_t>(k), at<uint8_t>(v), at<const float>(k_scale), at<const float>(v_scale), num_pages, num_kv_heads,
            page_size, head_dim, v_dim, static_cast<KvType>(type), keys_by_token,
            {at<uint64_t>(tags), at<const uint64_t>(factor), at<const uint64_t>(offset), at<const uint64_t>(scales),
             at<const uint32_t>(rows), at<const int16_t>(k_words), at<const int16_t>(v_words)}};
}

void scale_rows(float* numbers, int64_t count, float factor) {
    if (factor == 1.0f) return;
    for (int64_t i = 0; i < count; ++i) numbers[i] *= factor;
}

// Addresses of page table, sequences and positions; number of rows; pages of a line of the table.
using RowsTuple = std::tuple<uintptr_t, uintptr_t, uintptr_t, int64_t, int64_t>;
// The layer's number; addresses of page keys, of numbers of tokens and of violations.
using SealTuple = std::tuple<int64_t, uintptr_t, uintptr_t, uintptr_t>;

SealExpectation expectation(const SealTuple& numbers) {
    const auto& [layer, page_keys, num_tokens, violations] = numbers;
    return {layer, at<const uint64_t>(page_keys), at<const int32_t>(num_tokens), at<int64_t>(violations)};
}

QuantizedMatrix matrix(uintptr_t packed, int64_t n, int64_t k, int group, int bits, int scale_bytes, bool has_minimum,
                       uintptr_t order) {
    return {at<const uint8_t>(packed), n, k, group, bits, scale_bytes, has_minimum, at<const int32_t>(order), activations_bits / 8};
}

// Experts as `moe/native.py` describes them: address and bytes of one; sizes; group, bits (0: dense), scale bytes, minimum; dense type.
using ExpertsTuple = std::tuple<uintptr_t, int64_t, int64_t, int64_t, int, int, int, bool, int>;

ExpertMatrices experts_of(const ExpertsTuple& numbers) {
    const auto& [packed, expert_bytes, n, k, group, bits, scale_bytes, has_minimum, type] = numbers;
    return {at<const uint8_t>(packed), expert_bytes, matrix(0, n, k, group, bits, scale_bytes, has_minimum, 0), bits == 0, static_cast<Dense>(type)};
}

// Bias, number of experts, top_k, groups, top groups; sigmoid, normalized; scale.
using RoutingTuple = std::tuple<uintptr_t, int64_t, int64_t, int64_t, int64_t, bool, bool, float>;

Routing routing_of(const RoutingTuple& numbers) {
    const auto& [bias, num_experts, top_k, num_groups, top_groups, is_sigmoid, is_normalized, scale] = numbers;
    return {at<const float>(bias), num_experts, top_k, num_groups, top_groups, is_sigmoid, is_normalized, scale};
}

}  // namespace

NB_MODULE(_native, m) {
    nb::class_<Program>(m, "Program")
        .def(nb::init<>())
        .def("__len__", [](const Program& program) { return program.calls.size(); })
        .def("run", [](const Program& program) {
            nb::gil_scoped_release unlocked;
            for (const auto& call : program.calls) call();
        });
    m.def("record", [](Program* program) { recording = program; }, nb::arg("program").none());
    m.def("select", [](const std::string& isa, int bits) {
        if (bits != 16 && bits != 8) throw std::invalid_argument("activations have 16 or 8 bits, not " + std::to_string(bits));
        current = &choose_ops(isa.c_str());
        activations_bits = bits;
        return std::string(current->name);
    }, nb::arg("isa"), nb::arg("activations_bits") = 16);
    m.def("selected", [] { return std::string(ops().name); });
    m.def("activations_bits", [] { return activations_bits; });
    m.def("set_num_threads", [](int count) { ThreadPool::instance().resize(count); });
    m.def("num_threads", [] { return ThreadPool::instance().size(); });
    // Packing happens at load, and is never part of a recording.
    m.def("pack_int4", [](uintptr_t pairs, uintptr_t scale, uintptr_t minimum, int bytes, int64_t rows, int64_t cols, int64_t group,
                          uintptr_t out) {
        nb::gil_scoped_release unlocked;
        pack_int4(at<const uint8_t>(pairs), {at<const uint8_t>(scale), at<const uint8_t>(minimum), bytes}, rows, cols, group,
                  at<uint8_t>(out));
    });
    m.def("pack_int8", [](uintptr_t codes, uintptr_t scale, uintptr_t minimum, int bytes, int64_t rows, int64_t cols, int64_t group,
                          uintptr_t out) {
        nb::gil_scoped_release unlocked;
        pack_int8(at<const uint8_t>(codes), {at<const uint8_t>(scale), at<const uint8_t>(minimum), bytes}, rows, cols, group,
                  at<uint8_t>(out));
    });
    m.def("pack_elements", [](uintptr_t from, int64_t rows, int64_t cols, int bytes, uintptr_t out) {
        nb::gil_scoped_release unlocked;
        pack_elements(at<const uint8_t>(from), rows, cols, bytes, at<uint8_t>(out));
    });
    m.def("all_finite", [](uintptr_t from, int64_t count, int type) {
        nb::gil_scoped_release unlocked;
        return all_finite(at<const void>(from), count, static_cast<Number>(type));
    });
    m.def("quantized_matmul", [](uintptr_t x, int64_t rows, uintptr_t packed, int64_t n, int64_t k, int group, int bits,
                                 int scale_bytes, bool has_minimum, uintptr_t order, uintptr_t out, int64_t stride) {
        const auto w = matrix(packed, n, k, group, bits, scale_bytes, has_minimum, order);
        submit([=, run = ops().quantized_matmul] { run(at<const float>(x), rows, w, at<float>(out), stride); });
    });
    m.def("quantized_rows", [](uintptr_t packed, int64_t n, int64_t k, int group, int bits, int scale_bytes, bool has_minimum,
                               uintptr_t order, uintptr_t ids, int64_t count, float factor, uintptr_t out) {
        const auto w = matrix(packed, n, k, group, bits, scale_bytes, has_minimum, order);
        submit([=, run = ops().quantized_rows] {
            run(w, at<const int64_t>(ids), count, at<float>(out));
            scale_rows(at<float>(out), count * k, factor);
        });
    });
    m.def("dense_matmul", [](uintptr_t x, int64_t rows, uintptr_t w, int type, int64_t n, int64_t k, uintptr_t out, int64_t stride) {
        submit([=, run = ops().dense_matmul] {
            run(at<const float>(x), rows, at<const void>(w), static_cast<Dense>(type), n, k, at<float>(out), stride);
        });
    });
    m.def("dense_rows", [](uintptr_t w, int type, int64_t k, uintptr_t ids, int64_t count, float factor, uintptr_t out) {
        submit([=, run = ops().dense_rows] {
            run(at<const void>(w), static_cast<Dense>(type), k, at<const int64_t>(ids), count, at<float>(out));
            scale_rows(at<float>(out), count * k, factor);
        });
    });
    m.def("fp8_matmul", [](uintptr_t x, int64_t rows, uintptr_t packed, int64_t n, int64_t k, uintptr_t out, int64_t stride) {
        const Fp8Matrix w{at<const uint8_t>(packed), n, k};
        submit([=, run = ops().fp8_matmul] { run(at<const float>(x), rows, w, at<float>(out), stride); });
    });
    m.def("fp8_rows", [](uintptr_t packed, int64_t k, uintptr_t ids, int64_t count, float factor, uintptr_t out) {
        const Fp8Matrix w{at<const uint8_t>(packed), 0, k};
        submit([=, run = ops().fp8_rows] {
            run(w, at<const int64_t>(ids), count, at<float>(out));
            scale_rows(at<float>(out), count * k, factor);
        });
    });
    m.def("take_rows", [](uintptr_t x, uintptr_t rows, int64_t count, int64_t cols, uintptr_t out) {
        submit([=] {
            for (int64_t i = 0; i < count; ++i) {
                std::memcpy(at<float>(out) + i * cols, at<const float>(x) + at<const int64_t>(rows)[i] * cols, cols * sizeof(float));
            }
        });
    });
    m.def("rms_norm", [](uintptr_t x, uintptr_t residual, uintptr_t weight, float eps, int64_t rows, int64_t cols, uintptr_t out) {
        submit([=, run = ops().rms_norm] {
            run(at<const float>(x), at<float>(residual), at<const float>(weight), eps, rows, cols, at<float>(out));
        });
    });
    m.def("layer_norm", [](uintptr_t x, uintptr_t weight, uintptr_t bias, float eps, int64_t rows, int64_t cols, uintptr_t out) {
        submit([=, run = ops().layer_norm] {
            run(at<const float>(x), at<const float>(weight), at<const float>(bias), eps, rows, cols, at<float>(out));
        });
    });
    m.def("head_matmul", [](uintptr_t x, int64_t x_stride, int64_t rows, uintptr_t w, int type, int64_t heads, int64_t n, int64_t k,
                            uintptr_t out) {
        submit([=, run = ops().head_matmul] {
            run(at<const float>(x), x_stride, rows, at<const void>(w), static_cast<Dense>(type), heads, n, k, at<float>(out));
        });
    });
    m.def("rotary", [](uintptr_t x, int64_t row_stride, int64_t head_stride, uintptr_t positions, uintptr_t table, int64_t rows,
                       int64_t heads, int64_t head_dim) {
        submit([=, run = ops().rotary] {
            run(at<float>(x), row_stride, head_stride, at<const int32_t>(positions), at<const float>(table), rows, heads, head_dim);
        });
    });
    m.def("silu_mul", [](uintptr_t gate, uintptr_t up, int64_t stride, int64_t rows, int64_t cols, uintptr_t out) {
        submit([=, run = ops().silu_mul] { run(at<const float>(gate), at<const float>(up), stride, rows, cols, at<float>(out)); });
    });
    m.def("gelu_mul", [](uintptr_t gate, uintptr_t up, int64_t stride, int64_t rows, int64_t cols, uintptr_t out) {
        submit([=, run = ops().gelu_mul] { run(at<const float>(gate), at<const float>(up), stride, rows, cols, at<float>(out)); });
    });
    m.def("add_bias", [](uintptr_t x, int64_t stride, uintptr_t bias, int64_t rows, int64_t cols) {
        submit([=, run = ops().add_bias] { run(at<float>(x), stride, at<const float>(bias), rows, cols); });
    });
    m.def("head_norm", [](uintptr_t x, int64_t row_stride, int64_t head_stride, uintptr_t weight, float eps, int64_t rows, int64_t heads,
                          int64_t dim) {
        submit([=, run = ops().head_norm] { run(at<float>(x), row_stride, head_stride, at<const float>(weight), eps, rows, heads, dim); });
    });
    m.def("moe", [](uintptr_t x, uintptr_t logits, uintptr_t added, uintptr_t out, int64_t rows, const RoutingTuple& routing,
                    const ExpertsTuple& gate_up, const ExpertsTuple& down) {
        const MoeCall call{at<const float>(x), at<const float>(logits), at<const float>(added), at<float>(out), rows,
                           routing_of(routing), experts_of(gate_up), experts_of(down)};
        submit([=, run = ops().moe] { run(call); });
    });
    m.def("kv_write", [](uintptr_t k, int64_t k_stride, uintptr_t v, int64_t v_stride, uintptr_t slots, int64_t rows,
                         const LayerTuple& pool) {
        submit([=, target = layer_of(pool), run = ops().kv_write] {
            run(at<const float>(k), k_stride, at<const float>(v), v_stride, at<const int64_t>(slots), rows, target);
        });
    });
    m.def("paged_attention", [](uintptr_t q, int64_t q_stride, uintptr_t out, uintptr_t page_table, uintptr_t row_sequence,
                                uintptr_t row_position, int64_t rows, int64_t heads, int64_t max_pages, int64_t window,
                                float softmax_scale, int64_t layer, uintptr_t page_keys, uintptr_t num_tokens, uintptr_t violations,
                                const LayerTuple& pool) {
        const AttentionCall call{at<const float>(q), q_stride, at<float>(out), at<const int32_t>(page_table),
                                 at<const int32_t>(row_sequence), at<const int32_t>(row_position), rows, heads, max_pages,
                                 window, softmax_scale, layer, at<const uint64_t>(page_keys), at<const int32_t>(num_tokens),
                                 at<int64_t>(violations)};
        submit([=, source = layer_of(pool), run = ops().paged_attention] { run(call, source); });
    });
    m.def("mla_attention", [](uintptr_t q_latent, int64_t latent_stride, uintptr_t q_rope, int64_t rope_stride, uintptr_t out,
                              const RowsTuple& rows, int64_t num_heads, int64_t latent_dim, int64_t rope_dim, uintptr_t selected,
                              int64_t max_selected, float softmax_scale, const SealTuple& expected, const LayerTuple& pool) {
        const auto& [page_table, row_sequence, row_position, num_rows, max_pages] = rows;
        const LatentCall call{at<const float>(q_latent), latent_stride, at<const float>(q_rope), rope_stride, at<float>(out),
                              at<const int32_t>(page_table), at<const int32_t>(row_sequence), at<const int32_t>(row_position),
                              at<const int32_t>(selected), max_selected, num_rows, num_heads, latent_dim, rope_dim, max_pages,
                              softmax_scale, expectation(expected)};
        submit([=, source = layer_of(pool), run = ops().mla_attention] { run(call, source); });
    });
    m.def("indexer_topk", [](uintptr_t q, int64_t q_stride, uintptr_t weights, int64_t weights_stride, uintptr_t out, int64_t num_selected,
                             const RowsTuple& rows, int64_t num_heads, const SealTuple& expected, const LayerTuple& pool) {
        const auto& [page_table, row_sequence, row_position, num_rows, max_pages] = rows;
        const IndexCall call{at<const float>(q), q_stride, at<const float>(weights), weights_stride, at<int32_t>(out), num_selected,
                             at<const int32_t>(page_table), at<const int32_t>(row_sequence), at<const int32_t>(row_position),
                             num_rows, num_heads, max_pages, expectation(expected)};
        submit([=, source = layer_of(pool), run = ops().indexer_topk] { run(call, source); });
    });
    m.def("open_pages", [](uintptr_t pages, uintptr_t page_keys, int64_t count, const LayerTuple& pool,
                           const std::vector<int64_t>& value_index) {
        submit([=, layers = KvLayers{layer_of(pool), value_index}, run = ops().open_pages] {
            run(at<const int64_t>(pages), at<const uint64_t>(page_keys), count, layers);
        });
    });
    m.def("rekey_pages", [](uintptr_t pages, uintptr_t before, uintptr_t after, int64_t count, const LayerTuple& pool,
                            const std::vector<int64_t>& value_index) {
        submit([=, layers = KvLayers{layer_of(pool), value_index}, run = ops().rekey_pages] {
            run(at<const int64_t>(pages), at<const uint64_t>(before), at<const uint64_t>(after), count, layers);
        });
    });
    m.def("verify_pages", [](uintptr_t pages, uintptr_t page_keys, uintptr_t num_tokens, int64_t count, uintptr_t found,
                             const LayerTuple& pool, const std::vector<int64_t>& value_index) {
        submit([=, layers = KvLayers{layer_of(pool), value_index}, run = ops().verify_pages] {
            run(at<const int64_t>(pages), at<const uint64_t>(page_keys), at<const int64_t>(num_tokens), count, at<int64_t>(found), layers);
        });
    });
    m.def("lease_check", [](uintptr_t tags, int64_t num_pages, uintptr_t page_table, uintptr_t expected, int64_t sequences,
                            int64_t max_pages, uintptr_t found) {
        submit([=] {
            for (int64_t i = 0; i < sequences; ++i) {
                const int64_t place = first_stale(at<const uint64_t>(tags), num_pages, at<const int32_t>(page_table) + i * max_pages,
                                                  at<const uint64_t>(expected) + i * max_pages, max_pages);
                at<int64_t>(found)[i] = place < max_pages ? place : -1;
            }
        });
    });
    m.def("leases_hold", [](uintptr_t tags, int64_t num_pages, uintptr_t page_table, uintptr_t expected, int64_t count) {
        return first_stale(at<const uint64_t>(tags), num_pages, at<const int32_t>(page_table), at<const uint64_t>(expected), count) == count;
    });
}
