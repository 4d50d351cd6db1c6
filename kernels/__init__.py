"""Numerical ops, one folder each: `ref.py` is the truth in plain torch, `__init__.py` the one public function.

Reading order: `errors`, `backend` (which implementation), `checks`, `packing` (laying out matrices), `weights` (matrices as they lie in memory), `huge_pages` (where weights and pages lie), `kv_layout`, `kv_pool`, `seals` (keys of the pages' seals), `native_pool`, `seal_arguments`, `recording` (op calls run again in one), then
`int4_matmul`, `int8_matmul`, `fp8_matmul`, `dense_matmul`, `embedding`, `take_rows`, `rms_norm`, `head_norm`, `add_bias`, `rotary`, `silu_mul`, `gelu_mul`, `expert_weights` and `moe`, `kv_write`, `paged_attention`, `page_seal`, `lease_check`; for latent attention `head_matmul`, `layer_norm`, `indexer_topk`, `mla_attention`; and `native/` (C++).

For GPUs: `gpu_weights` and `placement` (matrices as Triton reads them), `gpu/` (what kernels share) and each op's `gpu.py`.

Each op keeps one promise in every backend: the bits of a row of its result depend on that row's inputs alone, not on how many rows
share the call, on their content, or on the number of threads.
"""
