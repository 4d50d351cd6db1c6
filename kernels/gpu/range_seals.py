"""Verifying pages in the pass that reads them: a decode program sums up the words that attention has in registers anyway.

Each step of keys is of one page or of two. The sums of a range's steps are kept, and compared when the range is through. Words of slots
that the row doesn't see, in the last page and with a window in the first one, belong to their pages too.
"""

import triton
import triton.language as tl

from kernels.gpu.seals import expected_sums, num_rows_of, report
from kernels.gpu.word_sums import tile_products

_NO_PLACE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def step_sums(
    k_a, k_b, v_a, v_b, seals, first_key, HALF: tl.constexpr, PAGE: tl.constexpr, TYPE: tl.constexpr
):  # fmt: skip
    """The sums of the pages of a step, whose keys begin at first_key, from the words int16 [KEYS, PADDED] of all halves: int32 [pages, 2]."""
    d = tl.arange(0, k_a.shape[1])
    row: tl.constexpr = HALF if TYPE == "fp8" else 2 * HALF
    first_slot = first_key % PAGE
    products = tile_products(k_a, seals.k_words, first_slot, d, d < HALF, row, PAGE)
    if TYPE != "fp8":
        products += tile_products(k_b, seals.k_words, first_slot, HALF + d, d < HALF, row, PAGE)
    products += tile_products(v_a, seals.v_words, first_slot, d, d < HALF, row, PAGE)
    if TYPE != "fp8":
        products += tile_products(v_b, seals.v_words, first_slot, HALF + d, d < HALF, row, PAGE)
    flat = tl.reshape(products, (products.shape[0] * products.shape[1], products.shape[2], 2))
    return tl.sum(flat, axis=0)


@triton.jit
def kept(sums, step, which):
    """Sums of a range, int32 [steps * pages * 2], with those of one more step, int32 [pages, 2], added at its place."""
    index = tl.arange(0, sums.shape[0])
    pages: tl.constexpr = step.shape[0]
    a, b = tl.split(step)
    if pages == 1:
        value = tl.where(index % 2 == 0, tl.sum(a, axis=0), tl.sum(b, axis=0))
    else:
        a_0, a_1 = tl.split(a)
        b_0, b_1 = tl.split(b)
        value = tl.where(index % 4 < 2, tl.where(index % 2 == 0, a_0, b_0), tl.where(index % 2 == 0, a_1, b_1))
    return tl.where(index // (2 * pages) == which, sums + value, sums)


@triton.jit
def check_range(
    sums, seals, check, pages, sequence, layer, head, index, first_place, last_place, max_pages,
    HEADS: tl.constexpr, PAGE: tl.constexpr, RANGE: tl.constexpr,
):  # fmt: skip
    """Report the first page of a range, from first_place to last_place of the sequence's table, whose sums int32 [steps * pages * 2] are wrong."""
    count: tl.constexpr = RANGE // PAGE
    a, b = tl.split(tl.sum(tl.reshape(sums, (count, sums.shape[0] // (2 * count), 2)), axis=1))
    place = index * count + tl.arange(0, count)
    is_read = (place >= first_place) & (place <= last_place)
    page = tl.load(pages + place, mask=is_read, other=0).to(tl.int64)
    page_key = tl.load(check.page_keys + sequence * max_pages + place, mask=is_read, other=0)
    num_rows = num_rows_of(check, sequence, place, PAGE)
    wanted_a, wanted_b = expected_sums(seals, page, page_key, num_rows, layer, head, is_read, HEADS)
    wrong = tl.where(is_read & ((a != wanted_a) | (b != wanted_b)), place, _NO_PLACE)
    first_wrong = tl.min(wrong, axis=0)
    if first_wrong != _NO_PLACE:
        report(check, sequence, layer, first_wrong, max_pages)
