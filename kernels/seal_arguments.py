"""A pass' rows and its seal check as the native module takes them."""

import torch

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


def native_check(
    op: str, check: SealCheck | None, layer: int, rows: AttentionRows, pool: KvPool
) -> tuple[int, int, int, int]:
    """The layer, and addresses of page keys, numbers of tokens and violations: 0 without a check. Raises KernelError."""
    if check is None:
        return (layer, 0, 0, 0)
    if pool.seals is None:
        raise KernelError(f"{op}: the pool has no seals to check")
    num_sequences = len(rows.page_table)
    check_tensor(op, "page_keys", check.page_keys, torch.int64, tuple(rows.page_table.shape))
    check_tensor(op, "num_tokens", check.num_tokens, torch.int32, (num_sequences,))
    check_tensor(op, "violations", check.violations, torch.int64, (num_sequences,))
    return (layer, check.page_keys.data_ptr(), check.num_tokens.data_ptr(), check.violations.data_ptr())
