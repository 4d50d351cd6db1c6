"""Weights in AWQ's layout (its gemm version): `qweight` int32 [K, N / 8], packed along the rows of W, with scales and packed zero points.

A word holds eight rows of W in the order 0, 2, 4, 6, 1, 3, 5, 7, the first in the lowest bits. Format: AutoAWQ's WQLinear_GEMM.
"""

import torch

from worker.model.errors import ModelError
from worker.model.quantization_config import Scheme
from worker.model.scaled_codes import quantized_rows
from worker.model.tensor_files import TensorFiles
from worker.model.tensors import QuantizedRows

_PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # where in a word each of eight rows is


def read_awq(files: TensorFiles, module: str, scheme: Scheme, shape: tuple[int, int]) -> QuantizedRows:
    """The rows of W [N, K]. Raises ModelError."""
    num_rows, num_columns = shape
    source = f"{files.label}: tensor {module + '.qweight'!r}"
    group_size = scheme.group_size or num_columns
    if num_columns % group_size or num_columns % 2 or num_rows % 8:
        raise ModelError(
            f"{source}: {num_columns} columns are no multiple of group_size {group_size}, or {num_rows} rows none of 8"
        )
    groups = num_columns // group_size
    words = files.read_checked(f"{module}.qweight", (num_columns, num_rows // 8), (torch.int32,))
    scale = files.read_checked(f"{module}.scales", (groups, num_rows)).T
    zero_point: torch.Tensor | int = 8
    if not scheme.is_symmetric:
        points = files.read_checked(f"{module}.qzeros", (groups, num_rows // 8), (torch.int32,))
        zero_point = _nibbles(points.view(torch.uint8).view(groups, -1, 4)).flatten(1).T.int()
    elif f"{module}.qzeros" in files:
        raise ModelError(f"{files.label}: tensor {module + '.qzeros'!r} is there, config.json says zero_point false")
    return quantized_rows(_pairs(words.view(torch.uint8)), scale, zero_point, group_size, source)


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """Bytes of words uint8 [X, words, 4] -> their eight codes in order, uint8 [X, words, 8]."""
    return torch.stack([words & 15, words >> 4], dim=3).flatten(2)[:, :, _PLACES]


def _pairs(raw: torch.Tensor) -> torch.Tensor:
    """Bytes of words, uint8 [K, N / 2] -> codes of two neighbouring columns a byte, uint8 [N, K / 2]."""
    even, odd = raw[0::2], raw[1::2]
    low, high = (even & 15) | (odd << 4), (even >> 4) | (odd & 0xF0)
    both = torch.stack([low, high], dim=2).view(len(even), -1, 8)[:, :, _PLACES]
    return both.permute(1, 2, 0).reshape(-1, len(even))
