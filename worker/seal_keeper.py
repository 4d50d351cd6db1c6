"""The executor's side of sealing: from plans and page keys to the kernels that do it."""

from collections.abc import Sequence as ListLike

import numpy as np
import torch

from kernels.backend import Backend
from kernels.kv_pool import KvPool
from kernels.page_seal import open_pages, rekey_pages, verify_pages
from kernels.seals import SealCheck
from worker.cache.page_pool import PageId
from worker.scheduler import Chunk
from worker.sealing import SealPlan


class SealKeeper:
    """Keeps the seals of a pool, and a copy of its scales, which seals cover but cannot bring back."""

    def __init__(self, kv: KvPool, backend: Backend) -> None:
        self._kv = kv
        self._backend = backend
        self._k_scale, self._v_scale = kv.k_scale.clone(), kv.v_scale.clone()

    def carry_out(self, plan: SealPlan) -> None:
        """Open and rekey pages."""
        if plan.opened:
            pages, keys = (_numbers(column) for column in zip(*plan.opened, strict=True))
            open_pages(self._kv, pages, keys, backend=self._backend)
        if plan.rekeyed:
            pages, before, after = (_numbers(column) for column in zip(*plan.rekeyed, strict=True))
            rekey_pages(self._kv, pages, before, after, backend=self._backend)

    def verify(self, pages: ListLike[PageId], keys: ListLike[int]) -> list[int]:
        """The first layer of each whole page whose bytes aren't sealed with its key, or -1."""
        num_tokens = torch.full((len(pages),), self._kv.layout.page_size, dtype=torch.int64)
        found = verify_pages(self._kv, _numbers(pages), _numbers(keys), num_tokens, backend=self._backend)
        return [int(layer) for layer in found]

    def check_for(self, chunks: ListLike[Chunk], page_table: torch.Tensor) -> SealCheck:
        """What a pass over the chunks, whose table this is, must find."""
        keys = np.zeros(tuple(page_table.shape), dtype=np.int64)
        for row, chunk in enumerate(chunks):
            own = chunk.sequence.table.keys[: keys.shape[1]]
            keys[row, : len(own)] = own
        num_tokens = torch.tensor([chunk.start + chunk.count for chunk in chunks], dtype=torch.int32)
        return SealCheck(torch.from_numpy(keys), num_tokens, torch.zeros(len(chunks), dtype=torch.int64))

    def mend_scales(self) -> bool:
        """Write the scales anew that the pool was made with; True if they had changed."""
        kv = self._kv
        if torch.equal(kv.k_scale, self._k_scale) and torch.equal(kv.v_scale, self._v_scale):
            return False
        kv.k_scale.copy_(self._k_scale)
        kv.v_scale.copy_(self._v_scale)
        return True


def _numbers(values: ListLike[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64)
