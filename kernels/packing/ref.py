"""Laying out matrices in panels of 16 rows, in plain torch.

Rows are padded with zeros to whole panels. For each panel and group of columns a quantized matrix has the codes, then 16 scales, then 16
minima if there are any. 4 bits: 64-byte vector j holds in its low halves columns 8j..8j+3 of rows 0..15, in its high ones 8j+4..8j+7;
8 bits: vector j holds columns 4j..4j+3, each code + 128.
"""

import torch

PANEL_ROWS = 16
QUAD = 4  # neighbouring columns that share a 32-bit lane


def pack_int4_ref(
    pairs: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor | None, group_size: int
) -> torch.Tensor:
    """Codes two a byte uint8 [N, K / 2], the lower column in the lower half -> uint8 [panels, groups, bytes]."""
    quads = _panels(pairs).view(-1, PANEL_ROWS, 2 * pairs.shape[1] // group_size, group_size // 8, QUAD)
    low, high = quads & 15, quads >> 4  # columns 0, 2, 4, 6 and 1, 3, 5, 7 of eight
    first, second = (torch.stack([low[..., half], high[..., half]], dim=-1) for half in (slice(0, 2), slice(2, 4)))
    vectors = (first | (second << 4)).flatten(4).permute(0, 2, 3, 1, 4)  # [panel, group, vector, row, column]
    return _with_numbers(vectors.flatten(2), scale, minimum)


def pack_int8_ref(
    codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor | None, group_size: int
) -> torch.Tensor:
    """Codes int8 [N, K] -> uint8 [panels, groups, bytes]."""
    unsigned = _panels(codes).view(torch.uint8) ^ 0x80
    grouped = unsigned.view(-1, PANEL_ROWS, codes.shape[1] // group_size, group_size // QUAD, QUAD)
    return _with_numbers(grouped.permute(0, 2, 3, 1, 4).flatten(2), scale, minimum)


def pack_elements_ref(matrix: torch.Tensor) -> torch.Tensor:
    """[N, K] of any type -> [panels, K, 16]."""
    return _panels(matrix).view(-1, PANEL_ROWS, matrix.shape[1]).permute(0, 2, 1).contiguous()


def all_finite_ref(numbers: torch.Tensor) -> bool:
    """Whether no number is NaN or infinite."""
    return bool(torch.isfinite(numbers.float() if numbers.itemsize == 1 else numbers).all())


def _with_numbers(codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor | None) -> torch.Tensor:
    numbers = [scale] if minimum is None else [scale, minimum]
    return torch.cat([codes, *map(_number_bytes, numbers)], dim=2).contiguous()


def _number_bytes(numbers: torch.Tensor) -> torch.Tensor:
    """[N, groups] -> uint8 [panels, groups, 16 * bytes of one]."""
    by_panel = _panels(numbers).view(-1, PANEL_ROWS, numbers.shape[1]).permute(0, 2, 1).contiguous()
    return by_panel.view(torch.uint8)


def _panels(matrix: torch.Tensor) -> torch.Tensor:
    missing = -matrix.shape[0] % PANEL_ROWS
    if not missing:
        return matrix.contiguous()
    return torch.cat([matrix, matrix.new_zeros(missing, matrix.shape[1])])
