"""Seals: keyed sums over the stored bytes of a page, per layer and kv head, that only the page's own reader can check.

`kv_write` keeps them up to date, `paged_attention` verifies what it reads if it is given a `SealCheck`; here is the rest: opening pages,
giving them another key, verifying them as a whole.
"""

import torch

from kernels.backend import Backend
from kernels.checks import check_tensor
from kernels.errors import KernelError
from kernels.kv_pool import KvPool, check_pool
from kernels.native_pool import native_pool
from kernels.page_seal.ref import open_pages_ref, rekey_ref, seal_ref
from kernels.seals import PageSeals


def open_pages(pool: KvPool, pages: torch.Tensor, page_keys: torch.Tensor, *, backend: Backend) -> None:
    """Zero pages int64 [n] in all layers, and seal them as empty under page_keys int64 [n]. No page is named twice."""
    seals = _checked("open_pages", pool, pages, page_keys, backend)
    if backend is Backend.REF:
        open_pages_ref(pool, seals, pages, page_keys)
        return
    if backend is Backend.GPU:
        if len(pages):
            from kernels.page_seal.gpu import open_pages_gpu

            open_pages_gpu(pool, pages, page_keys)
        return
    from kernels import _native

    _native.open_pages(pages.data_ptr(), page_keys.data_ptr(), len(pages), *native_pool(pool))


def rekey_pages(pool: KvPool, pages: torch.Tensor, old: torch.Tensor, new: torch.Tensor, *, backend: Backend) -> None:
    """Exchange the keys old int64 [n] of pages int64 [n] for others. A page whose seal was wrong before has a wrong one afterwards.

    No page is named twice.
    """
    seals = _checked("rekey_pages", pool, pages, old, backend)
    check_tensor("rekey_pages", "new", new, torch.int64, (len(pages),), backend)
    if backend is Backend.REF:
        rekey_ref(pool, seals, pages, old, new)
        return
    if backend is Backend.GPU:
        if len(pages):
            from kernels.page_seal.gpu import rekey_pages_gpu

            rekey_pages_gpu(pool, pages, old, new)
        return
    from kernels import _native

    _native.rekey_pages(pages.data_ptr(), old.data_ptr(), new.data_ptr(), len(pages), *native_pool(pool))


def verify_pages(
    pool: KvPool, pages: torch.Tensor, page_keys: torch.Tensor, num_tokens: torch.Tensor, *, backend: Backend
) -> torch.Tensor:
    """Compare the seals of pages int64 [n] with what their bytes, page_keys int64 [n] and num_tokens int64 [n] give.

    Returns int64 [n]: the first layer with a wrong seal, or -1.
    """
    seals = _checked("verify_pages", pool, pages, page_keys, backend)
    check_tensor("verify_pages", "num_tokens", num_tokens, torch.int64, (len(pages),), backend)
    if not _lie_within(num_tokens, pool.layout.page_size, backend):
        raise KernelError("verify_pages: num_tokens must lie within a page")
    found = torch.empty(len(pages), dtype=torch.int64, device=pages.device)
    if backend is Backend.GPU:
        if len(pages):
            from kernels.page_seal.gpu import verify_pages_gpu

            found = verify_pages_gpu(pool, pages, page_keys, num_tokens)
        return found
    if backend is Backend.REF:
        for i, page in enumerate(pages.tolist()):
            wanted = seal_ref(pool, seals, page, page_keys[i], int(num_tokens[i]))
            wrong = (wanted != seals.tags[:, page]).any(dim=1).nonzero()
            found[i] = int(wrong[0]) if len(wrong) else -1
        return found
    from kernels import _native

    _native.verify_pages(
        pages.data_ptr(), page_keys.data_ptr(), num_tokens.data_ptr(), len(pages), found.data_ptr(),
        *native_pool(pool),
    )  # fmt: skip
    return found


def _checked(op: str, pool: KvPool, pages: torch.Tensor, page_keys: torch.Tensor, backend: Backend) -> PageSeals:
    if pool.seals is None:
        raise KernelError(f"{op}: the pool has no seals")
    check_pool(op, pool, backend)
    check_tensor(op, "pages", pages, torch.int64, (None,), backend)
    check_tensor(op, "page_keys", page_keys, torch.int64, (len(pages),), backend)
    if not _lie_within(pages, pool.layout.num_pages - 1, backend):
        raise KernelError(f"{op}: pages name one outside the pool")
    return pool.seals


def _lie_within(numbers: torch.Tensor, last: int, backend: Backend) -> bool:
    """Whether all are from 0 to last. A look at a GPU's numbers would wait for it: there kernels do nothing, or find fault, where one isn't."""
    if backend is Backend.GPU or not len(numbers):
        return True
    lowest, highest = numbers.aminmax()
    return 0 <= int(lowest) <= int(highest) <= last
