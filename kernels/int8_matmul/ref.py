"""The truth is that of `int4_matmul`: it dequantizes whatever it is given."""

from kernels.int4_matmul.ref import matmul_float_activations, matmul_rounded_activations

__all__ = ["matmul_float_activations", "matmul_rounded_activations"]
