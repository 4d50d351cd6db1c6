// The ops as plain functions over pointers, once for each instruction set. Shapes are those of the Python functions.
#pragma once

#include <cstdint>
#include <vector>

namespace sluicegate {

// A quantized matrix in panels of 16 rows: for each panel and group of columns, codes, then 16 scales, then 16 minima.
//   4 bits: 64-byte vectors, vector j holds in its low nibbles columns 8j..8j+3 of rows 0..15, in its high ones 8j+4..8j+7
//   8 bits: vector j holds columns 4j..4j+3 of rows 0..15, each code + 128
struct QuantizedMatrix {
    const uint8_t* packed;
    int64_t num_rows;
    int64_t num_cols;
    int32_t group_size;
    int32_t bits;        // 4 or 8
    int32_t scale_bytes; // 2 (float16) or 4 (float32)
    bool has_minimum;
    const int32_t* order;  // column i is multiplied with input order[i]; null: with input i
    int32_t planes;      // bytes of an activation's code: 2, or 1

    int64_t num_panels() const { return (num_rows + 15) / 16; }
    int64_t panel_bytes() const {
        return num_cols / group_size * 16 * (group_size * bits / 8 + scale_bytes * (has_minimum ? 2 : 1));
    }
};

// 8-bit floats (e4m3) in panels of 16 rows: for each panel the codes [cols, 16], then a scale for each row and group of 128 columns,
// float [groups, 16].
struct Fp8Matrix {
    const uint8_t* packed;
    int64_t num_rows;
    int64_t num_cols;
};

// The last is for experts alone: it has scales.
enum class Dense : int32_t { bf16 = 0, f16 = 1, f32 = 2, e4m3 = 3 };
enum class KvType : int32_t { bf16 = 0, fp8 = 1, fp16 = 2 };

// The seals of one layer; null where there are none. Sums are two times 32 bits, the first in the low half of a tag.
struct LayerSeals {
    uint64_t* tags;          // [num_pages, num_kv_heads]
    const uint64_t* factor;  // [num_kv_heads]
    const uint64_t* offset;  // [num_kv_heads]
    const uint64_t* scales;  // [2]
    const uint32_t* rows;    // [page_size + 1, 2]
    const int16_t* k_words;  // [2, words of a head's keys in a page]
    const int16_t* v_words;
};

struct KvLayer {
    uint8_t* k;  // [num_pages, num_kv_heads, head_dim, page_size], or with keys_by_token [.., page_size, head_dim]
    uint8_t* v;  // [num_pages, num_kv_heads, page_size, v_dim]
    const float* k_scale;  // [num_kv_heads]
    const float* v_scale;
    int64_t num_pages;
    int64_t num_kv_heads;
    int64_t page_size;
    int64_t head_dim;
    int64_t v_dim;  // 0: the layer has no values
    KvType type;
    bool keys_by_token;
    LayerSeals seals;
};

// All layers of a pool, which lie one behind the other from `first` on; so do the values of those that have any.
struct KvLayers {
    KvLayer first;
    std::vector<int64_t> value_index;  // for each layer the place of its values, or -1
};

struct AttentionCall {
    const float* q;  // rows of [num_heads, head_dim], q_stride apart
    int64_t q_stride;
    float* out;  // [num_rows, num_heads, head_dim]
    const int32_t* page_table;  // [num_sequences, max_pages]
    const int32_t* row_sequence;
    const int32_t* row_position;
    int64_t num_rows;
    int64_t num_heads;
    int64_t max_pages;
    int64_t window;  // 0: none
    float softmax_scale;
    // What the pages that are read must be sealed with; null if they aren't verified.
    int64_t layer;
    const uint64_t* page_keys;  // [num_sequences, max_pages]
    const int32_t* num_tokens;  // [num_sequences]
    int64_t* violations;        // [num_sequences]
};

// How a row chooses `top_k` experts, and what their results count.
struct Routing {
    const float* bias;  // [num_experts], added to the scores for the choice alone; null: none
    int64_t num_experts;
    int64_t top_k;
    int64_t num_groups;  // of neighbouring experts
    int64_t top_groups;  // that may be chosen from
    bool is_sigmoid;     // else softmax
    bool is_normalized;  // the chosen experts' scores are divided by their sum
    float scale;
};

// One matrix of each expert, all of one shape and format, one behind the other.
struct ExpertMatrices {
    const uint8_t* packed;
    int64_t expert_bytes;
    QuantizedMatrix one;  // sizes; of a dense matrix num_rows and num_cols alone
    bool is_dense;
    Dense type;
};

struct MoeCall {
    const float* x;       // [num_rows, hidden]
    const float* logits;  // [num_rows, num_experts]
    const float* added;   // [num_rows, hidden]; null: nothing
    float* out;           // [num_rows, hidden]
    int64_t num_rows;
    Routing routing;
    ExpertMatrices gate_up;  // [2 * size, hidden], gate in the first half
    ExpertMatrices down;     // [hidden, size]
};

// What the pages that an op reads must be sealed with; page_keys is null if they aren't verified.
struct SealExpectation {
    int64_t layer;
    const uint64_t* page_keys;  // [num_sequences, max_pages]
    const int32_t* num_tokens;  // [num_sequences]
    int64_t* violations;        // [num_sequences]
};

// Latent attention of rows over a layer whose keys lie by token, each being latent_dim elements and then rope_dim.
struct LatentCall {
    const float* q_latent;  // rows of [num_heads, latent_dim], latent_stride apart
    int64_t latent_stride;
    const float* q_rope;  // rows of [num_heads, rope_dim], rope_stride apart
    int64_t rope_stride;
    float* out;  // [num_rows, num_heads, latent_dim]
    const int32_t* page_table;  // [num_sequences, max_pages]
    const int32_t* row_sequence;
    const int32_t* row_position;
    const int32_t* selected;  // [num_rows, max_selected] ascending positions, the rest negative; null: all
    int64_t max_selected;
    int64_t num_rows;
    int64_t num_heads;
    int64_t latent_dim;
    int64_t rope_dim;
    int64_t max_pages;
    float softmax_scale;
    SealExpectation expected;
};

// The choice of positions for rows by the keys of an indexer, which are the layer's values.
struct IndexCall {
    const float* q;  // rows of [num_heads, v_dim], q_stride apart
    int64_t q_stride;
    const float* weights;  // rows of [num_heads], weights_stride apart
    int64_t weights_stride;
    int32_t* out;  // [num_rows, num_selected]
    int64_t num_selected;
    const int32_t* page_table;
    const int32_t* row_sequence;
    const int32_t* row_position;
    int64_t num_rows;
    int64_t num_heads;
    int64_t max_pages;
    SealExpectation expected;
};

struct Ops {
    const char* name;
    // out: rows that begin out_stride apart
    void (*quantized_matmul)(const float* x, int64_t num_rows, const QuantizedMatrix& w, float* out, int64_t out_stride);
    void (*dense_matmul)(const float* x, int64_t m, const void* w, Dense type, int64_t n, int64_t k, float* out, int64_t out_stride);
    void (*rms_norm)(const float* x, float* residual, const float* weight, float eps, int64_t rows, int64_t cols, float* out);
    void (*rotary)(float* x, int64_t row_stride, int64_t head_stride, const int32_t* positions, const float* table, int64_t rows, int64_t heads,
                   int64_t head_dim);
    void (*silu_mul)(const float* gate, const float* up, int64_t stride, int64_t rows, int64_t cols, float* out);
    // v is not looked at where the layer has no values.
    void (*kv_write)(const float* k, int64_t k_stride, const float* v, int64_t v_stride, const int64_t* slots, int64_t rows,
                     const KvLayer& layer);
    void (*paged_attention)(const AttentionCall& call, const KvLayer& layer);
    void (*mla_attention)(const LatentCall& call, const KvLayer& layer);
    void (*indexer_topk)(const IndexCall& call, const KvLayer& layer);
    // A matrix [n, k] in panels for each head: x rows of [heads, k], x_stride apart -> out [rows, heads, n].
    void (*head_matmul)(const float* x, int64_t x_stride, int64_t rows, const void* w, Dense type, int64_t heads, int64_t n, int64_t k,
                        float* out);
    void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int64_t rows, int64_t cols, float* out);
    void (*open_pages)(const int64_t* pages, const uint64_t* page_keys, int64_t count, const KvLayers& layers);
    void (*rekey_pages)(const int64_t* pages, const uint64_t* before, const uint64_t* after, int64_t count, const KvLayers& layers);
    void (*verify_pages)(const int64_t* pages, const uint64_t* page_keys, const int64_t* num_tokens, int64_t count, int64_t* found,
                         const KvLayers& layers);
    void (*quantized_rows)(const QuantizedMatrix& w, const int64_t* ids, int64_t count, float* out);
    void (*dense_rows)(const void* w, Dense type, int64_t k, const int64_t* ids, int64_t count, float* out);
    void (*head_norm)(float* x, int64_t row_stride, int64_t head_stride, const float* weight, float eps, int64_t rows, int64_t heads, int64_t dim);
    void (*add_bias)(float* x, int64_t stride, const float* bias, int64_t rows, int64_t cols);
    void (*gelu_mul)(const float* gate, const float* up, int64_t stride, int64_t rows, int64_t cols, float* out);
    void (*moe)(const MoeCall& call);
    void (*fp8_matmul)(const float* x, int64_t num_rows, const Fp8Matrix& w, float* out, int64_t out_stride);
    void (*fp8_rows)(const Fp8Matrix& w, const int64_t* ids, int64_t count, float* out);
};

const Ops& portable_ops();
#if defined(__x86_64__)
const Ops& avx2_ops();
const Ops& avx512_ops();
#endif

// What this processor can run, or what SLUICEGATE_ISA (portable, avx2, avx512) asks for; throws if it can't.
const Ops& choose_ops(const char* isa);

}  // namespace sluicegate
