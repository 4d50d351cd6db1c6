"""A loaded model over one text at a time, in chunks over pages as the engine does it."""

from collections.abc import Sequence

import torch

from kernels.kv_pool import KvPool
from worker.model.model import Model
from worker.model.step import StepInput

CHUNK_TOKENS = 128
PAGE_SIZE = 16


def run_window(model: Model, pool: KvPool, tokens: Sequence[int], first_logit: int = 0) -> torch.Tensor:
    """Logits float32 [num_tokens - first_logit, vocab] after each token from `first_logit` on.

    Keys and values lie in the pool's first pages afterwards, in order.
    """
    num_pages = -(-len(tokens) // pool.layout.page_size)
    page_table = torch.arange(num_pages, dtype=torch.int32).view(1, -1)
    parts = []
    for start in range(0, len(tokens), CHUNK_TOKENS):
        chunk = tokens[start : start + CHUNK_TOKENS]
        positions = torch.arange(start, start + len(chunk), dtype=torch.int32)
        step = StepInput(
            token_ids=torch.tensor(chunk),
            positions=positions,
            slots=positions.long(),
            page_table=page_table,
            row_sequence=torch.zeros(len(chunk), dtype=torch.int32),
            logit_rows=torch.arange(min(len(chunk), max(0, first_logit - start)), len(chunk)),
        )
        parts.append(model.forward(step, pool).float().clone())
    return torch.cat(parts)
