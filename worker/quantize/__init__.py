"""Quantized folders from 16-bit ones: `sluicegate quantize`.

Reading order: `errors`, `rounding` (scales and codes), `packing` (as they lie in the file), `shard_writer`, `source` (what is read), `policy` (which
matrices, how many bits), `plan` (what will be written), `manifest` (what is finished), `run`; calibrated: `texts`, `windows`, `gptq`, `float_layers`, `layer_reader`,
`token_weights`, `calibrated`;
`gguf_source` for GGUF files, `job` (from options to a run); `window_run` and
`kv_calibration` (scales of an FP8 KV cache).
"""
