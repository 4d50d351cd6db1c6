"""Models and the files they come from.

Reading order: `errors`, `config`, `rope`, `tensors` (a tensor between file and kernel), `scaled_codes` (quantized ones), `digest`, `checkpoint` (what the loader asks of any
format), `opened_file`; GGUF: `gguf_header`, `gguf_config`, `gguf_quants`, `gguf_tokenizer`, `gguf_file`; Hugging Face folders: `folder`, `hf_fields`, `folder_tokenizer`, `safetensors_header`,
`tensor_files`, `module_patterns`, `quantization_config`, `column_order`, the formats of weights (`compressed_tensors`, `gptq`, `awq`, `fp8`), `stored_kv_scales`, `stored_weights`, `safetensors_file`; then `tokenizer_json`, `added_tokens`,
`token_bytes`. Forward passes: `step` (one pass' input), `workspace` (its memory), `recorded_steps` (on a CPU), `device_steps` (on a GPU) with `step_memory` and `cuda_graphs`, `model` (what the engine asks),
`decoder` (layers, and what they consist of), `projection`, `attention`, `latent_attention` with `indexer`, `feed_forward`, `mixture`. Each architecture puts these together in one file: `llama`, `qwen2`, `qwen3`, `qwen3_moe`, `gemma3`, `glm4_moe`, `deepseek` (with Kimi), `glm_dsa`; `architectures` is the table of them,
and `load` the way from a path to a model; `heap` gives back what loading leaves free.
"""
