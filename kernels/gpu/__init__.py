"""What the Triton versions of several ops share: `launch` (how kernels are compiled and started), `rows` (rounding rows of activations),
`codes` (quantized weights in registers), `ranges` (adding up parts of a product in order), `narrow_floats` (bfloat16 and e4m3 in integer arithmetic), `seals` (what the sums over a page must come to), `word_sums` (sums over stored words in registers)
and `range_seals` (verifying pages with these).

Nothing outside the ops' `gpu.py` imports from here, so that a worker without a GPU needs no Triton.
"""
