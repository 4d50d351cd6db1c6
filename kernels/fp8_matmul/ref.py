"""The truth is that of `int4_matmul` with float activations: it dequantizes whatever it is given."""

from kernels.int4_matmul.ref import matmul_float_activations

__all__ = ["matmul_float_activations"]
