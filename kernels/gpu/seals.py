"""What the sums over a page must come to, for kernels that seal or verify. `docs/integrity.md` has the construction.

A seal is 64 bits whose halves are two sums modulo 2^32; no half ever carries into the other.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.kv_pool import KvPool
from kernels.seals import SealCheck


class SealArguments(NamedTuple):
    """A pool's seals and secret numbers as kernels take them: `PageSeals` and `SealKeys` say what they are.

    tags are int32 [num_layers, num_pages, num_kv_heads, 2]: both sums of a seal on their own.
    """

    tags: torch.Tensor
    factor: torch.Tensor
    offset: torch.Tensor
    scales: torch.Tensor
    rows: torch.Tensor
    k_words: torch.Tensor
    v_words: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    num_pages: int


class CheckArguments(NamedTuple):
    """A `SealCheck` as kernels take it."""

    page_keys: torch.Tensor
    num_tokens: torch.Tensor
    violations: torch.Tensor


def seal_arguments(pool: KvPool) -> SealArguments:
    """Those of a pool that has seals."""
    assert pool.seals is not None
    keys = pool.seals.keys
    return SealArguments(
        pool.seals.tags.view(torch.int32), keys.factor, keys.offset, keys.scales, keys.rows, keys.k_words, keys.v_words, pool.k_scale, pool.v_scale,
        pool.layout.num_pages,
    )  # fmt: skip


def check_arguments(check: SealCheck) -> CheckArguments:
    """Those of a check, which lies where the pool does."""
    return CheckArguments(check.page_keys, check.num_tokens, check.violations)


@triton.jit
def halves(number):
    """The lower and the upper half of int64, as int32."""
    return number.to(tl.int32), (number >> 32).to(tl.int32)


@triton.jit
def _bits(scale):
    """A float32's bits as int64, not negative."""
    return scale.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF


@triton.jit
def mask_of(seals, page_key, layer, head, HEADS: tl.constexpr):
    """What a page's key and its head's scales add to the seal: int64 of the shape of page_key, modulo 2^64."""
    at = layer * HEADS + head
    k_part = _bits(tl.load(seals.k_scale + at)) * tl.load(seals.scales)
    v_part = _bits(tl.load(seals.v_scale + at)) * tl.load(seals.scales + 1)
    return page_key * tl.load(seals.factor + at) + (tl.load(seals.offset + at) + k_part + v_part)


@triton.jit
def tag_place(seals, page, layer, head, HEADS: tl.constexpr):
    """Where the first sum of a page's part lies, the second one behind it; page is int64."""
    return seals.tags + 2 * ((layer.to(tl.int64) * seals.num_pages + page) * HEADS + head)


@triton.jit
def expected_sums(seals, page, page_key, num_rows, layer, head, is_there, HEADS: tl.constexpr):
    """What the words of pages int64 [...], with so many rows int32 [...] and this key, must add up to: int32 [...], twice."""
    mask_a, mask_b = halves(mask_of(seals, page_key, layer, head, HEADS))
    tag, rows = tag_place(seals, page, layer, head, HEADS), seals.rows + 2 * num_rows
    a = tl.load(tag, mask=is_there, other=0) - mask_a - tl.load(rows, mask=is_there, other=0)
    b = tl.load(tag + 1, mask=is_there, other=0) - mask_b - tl.load(rows + 1, mask=is_there, other=0)
    return a, b


@triton.jit
def num_rows_of(check, sequence, place, PAGE: tl.constexpr):
    """How many rows the pages at these places of a sequence's table must hold: int32 of the shape of place."""
    return tl.minimum(tl.maximum(tl.load(check.num_tokens + sequence) - place * PAGE, 0), PAGE)


@triton.jit
def report(check, sequence, layer, place, max_pages):
    """Note a page that failed, unless one of the sequence was noted before."""
    found = 1 + layer.to(tl.int64) * max_pages + place
    tl.atomic_cas(check.violations + sequence, tl.zeros_like(found), found)
