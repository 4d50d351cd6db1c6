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

    def prepare(self) -> None:
        """Compile what opens, rekeys and verifies pages on a GPU, by means of a page that isn't there: nothing is done to it."""
        if self._backend is Backend.GPU:
            nowhere = PageId(-1)
            self.carry_out(SealPlan(opened=[(nowhere, 0)], rekeyed=[(nowhere, 0, 0)]))
            self.verify([nowhere], [0])

    def carry_out(self, plan: SealPlan) -> None:
        """Open and rekey pages."""
        if plan.opened:
            open_pages(self._kv, *self._columns(plan.opened), backend=self._backend)
        if plan.rekeyed:
            rekey_pages(self._kv, *self._columns(plan.rekeyed), backend=self._backend)

    def verify(self, pages: ListLike[PageId], keys: ListLike[int]) -> list[int]:
        """The first layer of each whole page whose bytes aren't sealed with its key, or -1."""
        whole = self._kv.layout.page_size
        columns = self._columns([(page, key, whole) for page, key in zip(pages, keys, strict=True)])
        found: list[int] = verify_pages(self._kv, *columns, backend=self._backend).tolist()
        return found

    def check_for(self, chunks: ListLike[Chunk], page_table: torch.Tensor) -> SealCheck:
        """What a pass over the chunks, whose table this is, must find. It lies on the CPU."""
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

    def _columns(self, rows: ListLike[tuple[int, ...]]) -> tuple[torch.Tensor, ...]:
        """The columns of n > 0 rows of numbers, int64 [n] each, brought to the pool in one copy that nobody waits for."""
        columns, device = np.array(rows, dtype=np.int64).T, self._kv.k.device
        # Each at a multiple of 16 bytes: for other addresses a GPU's kernels would be compiled once more.
        shape = (len(columns), len(rows) + len(rows) % 2)
        spaced = torch.zeros(shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        spaced.numpy()[:, : len(rows)] = columns
        return spaced.to(device, non_blocking=True)[:, : len(rows)].unbind(dim=0)
