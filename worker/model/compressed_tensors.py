"""Weights in the formats of compressed-tensors: pack-quantized (4 or 8 bits in 32-bit words), int-quantized, float-quantized.

Format: https://github.com/vllm-project/compressed-tensors. A word's lowest bits hold its first column. Codes and zero points are stored
plus 2^(bits - 1); zero points are packed along the rows.
"""

import torch

from worker.model.column_order import column_order
from worker.model.errors import ModelError
from worker.model.quantization_config import Scheme
from worker.model.scaled_codes import columns_taken, quantized_rows
from worker.model.tensor_files import FLOATS, TensorFiles
from worker.model.tensors import QuantizedRows


def read_packed(files: TensorFiles, module: str, scheme: Scheme, shape: tuple[int, int]) -> QuantizedRows:
    """`weight_packed` int32 [N, K * bits / 32] with its scales. Raises ModelError."""
    source = f"{files.label}: tensor {module + '.weight_packed'!r}"
    if scheme.is_float:
        raise ModelError(f"{source} holds packed integers, config.json says floats")
    per_word, bits = 32 // scheme.num_bits, scheme.num_bits
    if f"{module}.weight_shape" in files:
        stated = files.read_checked(f"{module}.weight_shape", (2,), (torch.int64, torch.int32)).tolist()
        if stated != list(shape):
            raise ModelError(
                f"{files.label}: tensor {module + '.weight_shape'!r} says {stated}, expected {list(shape)}"
            )
    words = files.read_checked(f"{module}.weight_packed", (shape[0], -(-shape[1] // per_word)), (torch.int32,))
    if shape[1] % per_word:
        raise ModelError(f"{source}: {shape[1]} columns are not supported: a multiple of {per_word} is")
    codes = words.view(torch.uint8)
    group_size, scale = _scale(files, module, scheme, shape)
    zero_point = _packed_zero_point(files, module, scheme, (shape[0], scale.shape[1]))
    if bits == 8:
        codes = (codes ^ 0x80).view(torch.int8)
    return _in_groups(files, module, codes, scale, zero_point, group_size, source)


def read_plain(files: TensorFiles, module: str, scheme: Scheme, shape: tuple[int, int]) -> QuantizedRows:
    """`weight` int8 [N, K] with its scales. Raises ModelError."""
    source = f"{files.label}: tensor {module + '.weight'!r}"
    codes = files.read_checked(f"{module}.weight", shape, (torch.int8,))
    group_size, scale = _scale(files, module, scheme, shape)
    if scheme.num_bits == 4 and codes.numel() and not -8 <= int(codes.min()) <= int(codes.max()) <= 7:
        raise ModelError(f"{source} has codes outside -8..7")
    zero_point = _plain_zero_point(files, module, scheme, tuple(scale.shape))
    return _in_groups(files, module, codes, scale, zero_point, group_size, source)


def _in_groups(
    files: TensorFiles,
    module: str,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | int,
    group_size: int,
    source: str,
) -> QuantizedRows:
    name = f"{module}.weight_g_idx"
    if name in files and scale.shape[1] > 1:
        num_columns = scale.shape[1] * group_size
        groups = files.read_checked(name, (num_columns,), (torch.int32, torch.int64))
        if not bool((groups == -1).all()):  # never set
            order = column_order(groups, group_size, f"{files.label}: tensor {name!r}")
            if order.columns is not None:
                return quantized_rows(
                    columns_taken(codes, order.columns), scale, zero_point, group_size, source, order.columns
                )
            if order.groups is not None:
                scale = scale[:, order.groups]
                zero_point = zero_point if isinstance(zero_point, int) else zero_point[:, order.groups]
    return quantized_rows(codes, scale, zero_point, group_size, source)


def _scale(files: TensorFiles, module: str, scheme: Scheme, shape: tuple[int, int]) -> tuple[int, torch.Tensor]:
    """Columns that share a scale, and the scales [N, groups]."""
    name, (num_rows, num_columns) = f"{module}.weight_scale", shape
    if scheme.strategy == "block":
        raise ModelError(f"{files.label}: tensor {name!r}: blocks of integers are not supported")
    if scheme.strategy == "tensor":
        return num_columns, one_number(files, name).expand(num_rows, 1)
    group_size = scheme.group_size if scheme.strategy == "group" else num_columns
    if num_columns % group_size:
        raise ModelError(
            f"{files.label}: tensor {name!r}: {num_columns} columns are no multiple of group_size {group_size}"
        )
    wanted = (num_rows, num_columns // group_size)
    is_flat = wanted[1] == 1 and files.entry(name).shape == (num_rows,)
    return group_size, files.read_checked(name, (num_rows,) if is_flat else wanted, FLOATS).view(wanted)


def one_number(files: TensorFiles, name: str) -> torch.Tensor:
    """A tensor of one float as float32 [1, 1]."""
    shape = files.entry(name).shape
    if shape not in ((), (1,), (1, 1)):
        raise ModelError(f"{files.label}: tensor {name!r} has shape {list(shape)}, expected one number")
    return files.read_checked(name, shape, FLOATS).float().view(1, 1)


def _packed_zero_point(files: TensorFiles, module: str, scheme: Scheme, shape: tuple[int, int]) -> torch.Tensor | int:
    """[N, groups], or one for all: for 4 bits as the codes are, for 8 bits less 128."""
    middle = 8 if scheme.num_bits == 4 else 0
    if scheme.is_symmetric or scheme.strategy == "tensor":
        return _plain_zero_point(files, module, scheme, shape) + middle
    per_word = 32 // scheme.num_bits
    words = files.read_checked(f"{module}.weight_zero_point", (-(-shape[0] // per_word), shape[1]), (torch.int32,))
    shifts = torch.arange(per_word, dtype=torch.int32) * scheme.num_bits
    points = (words.unsqueeze(1) >> shifts.view(1, -1, 1)) & ((1 << scheme.num_bits) - 1)
    points = points.flatten(0, 1)[: shape[0]]
    return points if scheme.num_bits == 4 else points - 128


def _plain_zero_point(files: TensorFiles, module: str, scheme: Scheme, shape: tuple[int, ...]) -> torch.Tensor | int:
    """[N, groups] or one for all, of signed codes."""
    name = f"{module}.weight_zero_point"
    if name not in files:
        if scheme.is_symmetric:
            return 0
        raise ModelError(f"{files.label}: tensor {name!r} is missing")
    stored = files.entry(name).shape
    same = (
        stored == shape
        or (scheme.strategy == "tensor" and stored in ((), (1,)))
        or (shape[1] == 1 and stored == shape[:1])
    )
    points = files.read_checked(name, stored if same else shape, (torch.int8, torch.int32, torch.int64)).int()
    limit = 1 << (scheme.num_bits - 1)
    if points.numel() and not -limit <= int(points.min()) <= int(points.max()) < limit:
        raise ModelError(f"{files.label}: tensor {name!r} has zero points outside {-limit}..{limit - 1}")
    if scheme.is_symmetric and bool(points.any()):
        raise ModelError(f"{files.label}: tensor {name!r} has zero points, config.json says symmetric")
    return (
        0 if scheme.is_symmetric else points.view(-1, 1 if points.numel() == 1 else shape[1]).expand(shape[0], shape[1])
    )
