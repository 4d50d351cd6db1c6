"""Whether a page table still leads to the lives of the pages that it was made for."""

import numpy as np
import numpy.typing as npt
import torch

from kernels.backend import Backend
from kernels.checks import check_tensor, sizes
from kernels.lease_check.ref import lease_check_ref


def lease_check(
    tags: torch.Tensor, page_table: torch.Tensor, expected: torch.Tensor, *, backend: Backend
) -> torch.Tensor:
    """Gather tags int64 [num_pages] through page_table int32 [S, P], the very one that attention reads, and compare with expected int64 [S, P].

    An expected tag of 0 stands for no page. Returns int64 [S]: the first place that is wrong, or -1. A place that leads outside of the pool is
    wrong, and nothing is read there.
    """
    num_sequences, max_pages = sizes("lease_check", "page_table", page_table, 2)
    check_tensor("lease_check", "tags", tags, torch.int64, (None,), backend)
    check_tensor("lease_check", "page_table", page_table, torch.int32, (None, None), backend)
    check_tensor("lease_check", "expected", expected, torch.int64, (num_sequences, max_pages), backend)
    if backend is Backend.REF:
        return lease_check_ref(tags, page_table, expected)
    if backend is Backend.GPU:
        if num_sequences == 0:
            return torch.empty(0, dtype=torch.int64, device=tags.device)
        from kernels.lease_check.gpu import lease_check_gpu

        return lease_check_gpu(tags, page_table, expected)
    from kernels import _native

    found = torch.empty(num_sequences, dtype=torch.int64)
    _native.lease_check(
        tags.data_ptr(),
        len(tags),
        page_table.data_ptr(),
        expected.data_ptr(),
        num_sequences,
        max_pages,
        found.data_ptr(),
    )
    return found


def leases_hold(tags: npt.NDArray[np.uint64], page_table: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether `lease_check` would find nothing, for contiguous numbers on the CPU: tags uint64 [num_pages], page_table int32 and expected int64 [S, P].

    Asked before each pass, so it doesn't look at types and shapes: that would take several times as long as the comparison.
    """
    from kernels import _native

    table, wanted = page_table.data_ptr(), expected.data_ptr()
    return _native.leases_hold(tags.__array_interface__["data"][0], len(tags), table, wanted, expected.numel())
