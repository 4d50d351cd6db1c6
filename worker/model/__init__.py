"""Models and the files they come from.

Reading order: `errors`, `config`, `rope`, `tensors` (a tensor between file and kernel), `gguf_header` and `gguf_quants` (the GGUF format), `gguf_file`,
`safetensors_file` (checkpoints to tensors), `tokenizer`, `token_bytes`, `step` (one forward pass' input), `llama`, `load`.
"""
