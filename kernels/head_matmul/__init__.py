"""Products with a small matrix for each head: how the key and value matrices of latent attention meet queries and results."""

from dataclasses import dataclass

import torch

from kernels.backend import Backend, device_of
from kernels.checks import check_rows, output, sizes
from kernels.dense_matmul import NATIVE_TYPES
from kernels.errors import KernelError
from kernels.head_matmul.ref import head_matmul_ref
from kernels.packing import PANEL_ROWS


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """W[h, n, k] in bfloat16, float16 or float32: for a CPU in panels of 16 outputs, [heads, panels, K, 16]; for a GPU as they are, [heads, N, K]."""

    stored: torch.Tensor
    shape: tuple[int, int, int]

    @classmethod
    def from_matrices(cls, matrices: torch.Tensor, backend: Backend) -> "HeadWeights":
        """Pack matrices [heads, N, K] where the backend reads them."""
        if matrices.ndim != 3 or matrices.dtype not in NATIVE_TYPES:
            raise KernelError(
                f"HeadWeights: expected bf16, f16 or f32 matrices, got {matrices.dtype} {list(matrices.shape)}"
            )
        heads, num_out, num_in = matrices.shape
        shape = (int(heads), int(num_out), int(num_in))
        if backend is Backend.GPU:
            return cls(matrices.contiguous().to(device_of(backend)), shape)
        padded = torch.nn.functional.pad(matrices, (0, 0, 0, -num_out % PANEL_ROWS))
        panels = padded.view(heads, -1, PANEL_ROWS, num_in).transpose(2, 3)
        return cls(panels.contiguous(), shape)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, padding included."""
        return self.stored.nbytes

    def matrices(self) -> torch.Tensor:
        """float32 [heads, N, K], exact."""
        if self.stored.ndim == 3:
            return self.stored.float()
        heads, num_out, num_in = self.shape
        return self.stored.transpose(2, 3).reshape(heads, -1, num_in)[:, :num_out].float()


def head_matmul(x: torch.Tensor, w: HeadWeights, out: torch.Tensor | None = None, *, backend: Backend) -> torch.Tensor:
    """x float32 [T, heads, K] -> float32 [T, heads, N], out[t, h] = W[h] @ x[t, h]. Rows of x may lie further apart than they are long."""
    heads, num_out, num_in = w.shape
    if (w.stored.ndim == 3) != (backend is Backend.GPU):
        raise KernelError(f"head_matmul: w is not laid out for {backend}")
    num_rows = sizes("head_matmul", "x", x, 3)[0]
    stride = check_rows("head_matmul", "x", x, (num_rows, heads, num_in), backend)
    result = output("head_matmul", out, (num_rows, heads, num_out), backend)
    if backend is Backend.REF:
        return result.copy_(head_matmul_ref(x, w.matrices()))
    if backend is Backend.GPU:
        if result.numel():
            from kernels.head_matmul.gpu import head_matmul_gpu

            head_matmul_gpu(x, w.stored, result)
        return result
    from kernels import _native

    _native.head_matmul(
        x.data_ptr(), stride, num_rows, w.stored.data_ptr(), NATIVE_TYPES[w.stored.dtype], heads, num_out, num_in,
        result.data_ptr(),
    )  # fmt: skip
    return result
