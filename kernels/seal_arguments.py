"""A pass' seal check, looked at; and it and the pass' rows as the native module takes them."""

import torch

from kernels.backend import Backend
from kernels.checks import check_tensor
from kernels.errors import KernelError
from kernels.kv_pool import AttentionRows, KvPool
from kernels.seals import SealCheck


def native_rows(rows: AttentionRows) -> tuple[int, int, int, int, int]:
    """Addresses of page table, sequences and positions; number of rows; width of the table."""
    table = rows.page_table
    return (
        table.data_ptr(), rows.row_sequence.data_ptr(), rows.row_position.data_ptr(), len(rows.row_sequence), table.shape[1],
    )  # fmt: skip


def check_seals(op: str, check: SealCheck | None, rows: AttentionRows, pool: KvPool, backend: Backend) -> None:
    """Raise KernelError for a check that this pool, these rows or the backend can't take."""
    if check is None:
        return
    if pool.seals is None:
        raise KernelError(f"{op}: the pool has no seals to check")
    num_sequences = len(rows.page_table)
    check_tensor(op, "page_keys", check.page_keys, torch.int64, tuple(rows.page_table.shape), backend)
    check_tensor(op, "num_tokens", check.num_tokens, torch.int32, (num_sequences,), backend)
    check_tensor(op, "violations", check.violations, torch.int64, (num_sequences,), backend)


def native_check(
    op: str, check: SealCheck | None, layer: int, rows: AttentionRows, pool: KvPool
) -> tuple[int, int, int, int]:
    """The layer, and addresses of page keys, numbers of tokens and violations: 0 without a check. Raises KernelError."""
    check_seals(op, check, rows, pool, Backend.CPU)
    if check is None:
        return (layer, 0, 0, 0)
    return (layer, check.page_keys.data_ptr(), check.num_tokens.data_ptr(), check.violations.data_ptr())
