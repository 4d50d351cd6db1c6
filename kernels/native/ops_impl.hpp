// All ops, compiled once for each instruction set; SLUICEGATE_OPS names the function that returns their table.
//
// Every result row is computed by the same sequence of operations whatever the number of rows, threads and tiles: integer sums
// are exact, and floating-point sums run in an order fixed by the row's own length. All multiply-adds are written as fmaf, so that
// each instruction set rounds at the same places and gives the same bits. What is not written with `V16` is left to the vectorizer.

#include "attention.hpp"
#include "dense_matmul.hpp"
#include "fp8_matmul.hpp"
#include "head_matmul.hpp"
#include "indexer_topk.hpp"
#include "mla_attention.hpp"
#include "moe.hpp"
#include "ops.hpp"
#include "page_seal.hpp"
#include "quantized_matmul.hpp"
#include "small_ops.hpp"

namespace sluicegate {

const Ops& SLUICEGATE_OPS() {
    static const Ops ops{SLUICEGATE_OPS_NAME, quantized_matmul, dense_matmul, rms_norm, rotary,
                         silu_mul, kv_write, paged_attention, mla_attention, indexer_topk, head_matmul, layer_norm, open_pages, rekey_pages,
                         verify_pages, quantized_rows, dense_rows, head_norm, add_bias, gelu_mul, moe, fp8_matmul, fp8_rows};
    return ops;
}

}  // namespace sluicegate
