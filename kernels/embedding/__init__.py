"""Look-up of embedding rows."""

import torch

from kernels.checks import check_tensor
from kernels.embedding.ref import embedding_ref
from kernels.errors import KernelError
from kernels.weights import Weight


def embedding(ids: torch.Tensor, w: Weight) -> torch.Tensor:
    """ids int64 [T] -> float32 [T, K]. A handful of rows: plain torch in every backend. Raises KernelError for an id outside W."""
    check_tensor("embedding", "ids", ids, torch.int64, (None,))
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < w.shape[0]:
        raise KernelError(f"embedding: ids must be in [0, {w.shape[0]})")
    return embedding_ref(ids, w)
