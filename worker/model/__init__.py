"""Models and the files they come from.

Reading order: `errors`, `config`, `rope`, `tensors` (a tensor between file and kernel), `checkpoint` (what the loader asks of any format); GGUF:
`gguf_header`, `gguf_quants`, `gguf_tokenizer`, `gguf_file`; Hugging Face folders: `hf_config`, `safetensors_file`, `folder_tokenizer`; then `tokenizer_json`, `added_tokens`,
`token_bytes`, `step` (one forward pass' input and memory), `recorded_steps` (on a CPU), `cuda_graphs` (on a GPU), `llama`, `load`.
"""
