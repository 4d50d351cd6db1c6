"""Weights in GPTQ's layout: `qweight` int32 [K * bits / 32, N], packed along the columns of W, with scales and packed zero points.

Two formats differ in the zero points: the first (AutoGPTQ's) stores them less one, `gptq_v2` as they are. A first-format zero point of all
ones stands for 0 or for 16 depending on who reads it; it is refused. Where `g_idx` scatters the columns of a group (act-order), columns
are sorted by group and the weight remembers their order.
"""

import torch

from worker.model.column_order import column_order
from worker.model.errors import ModelError
from worker.model.quantization_config import Scheme
from worker.model.scaled_codes import columns_taken, quantized_rows
from worker.model.tensor_files import TensorFiles
from worker.model.tensors import QuantizedRows


def read_gptq(files: TensorFiles, module: str, scheme: Scheme, offset: int, shape: tuple[int, int]) -> QuantizedRows:
    """The rows of W [N, K]; `offset` is what is added to stored zero points. Raises ModelError."""
    num_rows, num_columns = shape
    source = f"{files.label}: tensor {module + '.qweight'!r}"
    per_word, group_size = 32 // scheme.num_bits, scheme.group_size or num_columns
    if num_columns % group_size or num_columns % per_word:
        raise ModelError(f"{source}: {num_columns} columns are no multiple of group_size {group_size}")
    words = files.read_checked(f"{module}.qweight", (num_columns // per_word, num_rows), (torch.int32,))
    codes = words.T.contiguous().view(torch.uint8)
    scale = files.read_checked(f"{module}.scales", (num_columns // group_size, num_rows)).T
    zero_point = _zero_point(files, module, scheme, offset, (num_columns // group_size, num_rows))
    if scheme.num_bits == 8:
        codes, zero_point = (codes ^ 0x80).view(torch.int8), zero_point - 128
    columns = None
    if f"{module}.g_idx" in files:
        groups = files.read_checked(f"{module}.g_idx", (num_columns,), (torch.int32, torch.int64))
        order = column_order(groups, group_size, f"{files.label}: tensor {module + '.g_idx'!r}")
        columns = order.columns
        if columns is not None:
            codes = columns_taken(codes, columns)
        if order.groups is not None:
            scale = scale[:, order.groups]
            zero_point = zero_point if isinstance(zero_point, int) else zero_point[:, order.groups]
    return quantized_rows(codes, scale, zero_point, group_size, source, columns)


def _zero_point(
    files: TensorFiles, module: str, scheme: Scheme, offset: int, shape: tuple[int, int]
) -> torch.Tensor | int:
    """[N, groups], or one for all, as unsigned codes have it."""
    name, (num_groups, num_rows) = f"{module}.qzeros", shape
    per_word, middle = 32 // scheme.num_bits, 1 << (scheme.num_bits - 1)
    words = files.read_checked(name, (num_groups, -(-num_rows // per_word)), (torch.int32,))
    shifts = torch.arange(per_word, dtype=torch.int32) * scheme.num_bits
    stored = ((words.unsqueeze(2) >> shifts) & (2 * middle - 1)).flatten(1)[:, :num_rows].T
    if scheme.is_symmetric:
        # Writers of the first format exist that store the middle itself; with symmetric codes nothing else can be meant.
        if not (bool((stored == middle).all()) or bool((stored == middle - 1).all())):
            raise ModelError(
                f"{files.label}: tensor {name!r} has other zero points than {middle}, config.json says symmetric"
            )
        return middle
    if offset and bool((stored == 2 * middle - 1).any()):
        raise ModelError(
            f"{files.label}: tensor {name!r} has zero points out of range: {2 * middle - 1} in the first GPTQ format; save it as gptq_v2"
        )
    return stored + offset
