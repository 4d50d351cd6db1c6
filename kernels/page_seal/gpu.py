"""Opening, rekeying and verifying pages on GPUs: one program for each page, layer and kv head.

And verifying each page that a pass over pages will read, by programs of their own that are started ahead of the pass: for passes whose
programs would verify the same pages many times, such as the tiles of a prompt, or can't.
"""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import EXACT
from kernels.gpu.seals import (
    check_arguments,
    expected_sums,
    halves,
    mask_of,
    num_rows_of,
    report,
    seal_arguments,
    tag_place,
)
from kernels.kv_pool import AttentionRows, KvPool
from kernels.seals import SealCheck

_STEP = 1024  # words at a time: 16 bytes a thread
_SELECTED_AT_ONCE = 256
_MOST_PROGRAMS = 256  # that share the pages of an item of a plan, for each kv head


@triton.jit
def _zero(part, WORDS: tl.constexpr, STEP: tl.constexpr):
    for first in range(0, WORDS, STEP):
        place = first + tl.arange(0, STEP)
        tl.store(part + place, tl.zeros((STEP,), dtype=tl.int16), mask=place < WORDS)


@triton.jit
def _words_of_part(part, keys, WORDS: tl.constexpr, STEP: tl.constexpr):
    """The sums over one side of a page's part: int32 [STEP], twice, to be added up."""
    a, b = tl.zeros((STEP,), dtype=tl.int32), tl.zeros((STEP,), dtype=tl.int32)
    for first in range(0, WORDS, STEP):
        place = first + tl.arange(0, STEP)
        words = tl.load(part + place, mask=place < WORDS, other=0).to(tl.int32)
        a += words * tl.load(keys + place, mask=place < WORDS, other=0).to(tl.int32)
        b += words * tl.load(keys + WORDS + place, mask=place < WORDS, other=0).to(tl.int32)
    return a, b


@triton.jit
def _part_sums(
    seals, k, v, part, value_part, K_WORDS: tl.constexpr, V_WORDS: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """The sums over the words of a page's part, int32 twice; a negative value_part means that the layer has no values.

    k and v are int16; parts are counted from the pool's first.
    """
    a, b = _words_of_part(k + part * K_WORDS, seals.k_words, K_WORDS, STEP)
    if V_WORDS > 0:
        if value_part >= 0:
            v_a, v_b = _words_of_part(v + value_part * V_WORDS, seals.v_words, V_WORDS, STEP)
            a += v_a
            b += v_b
    return tl.sum(a, axis=0), tl.sum(b, axis=0)


@triton.jit
def _value_part(value_layers, page, layer, head, num_pages, HEADS: tl.constexpr):
    """The number of a page's part among the values, negative if the layer has none."""
    place = tl.load(value_layers + layer).to(tl.int64)
    return tl.where(place >= 0, (place * num_pages + page) * HEADS + head, -1)


@triton.jit
def _open(
    pages, page_keys, k, v, value_layers, seals,
    HEADS: tl.constexpr, K_WORDS: tl.constexpr, V_WORDS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    index, layer, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    page = tl.load(pages + index)
    if (page >= 0) & (page < seals.num_pages):
        part = (layer.to(tl.int64) * seals.num_pages + page) * HEADS + head
        _zero(k + part * K_WORDS, K_WORDS, STEP)
        if V_WORDS > 0:
            value_part = _value_part(value_layers, page, layer, head, seals.num_pages, HEADS)
            if value_part >= 0:
                _zero(v + value_part * V_WORDS, V_WORDS, STEP)
        a, b = halves(mask_of(seals, tl.load(page_keys + index), layer, head, HEADS))
        tag = tag_place(seals, page, layer, head, HEADS)
        tl.store(tag, a)
        tl.store(tag + 1, b)


@triton.jit
def _rekey(pages, old, new, seals, HEADS: tl.constexpr):
    index, layer, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    page = tl.load(pages + index)
    if (page >= 0) & (page < seals.num_pages):
        before_a, before_b = halves(mask_of(seals, tl.load(old + index), layer, head, HEADS))
        after_a, after_b = halves(mask_of(seals, tl.load(new + index), layer, head, HEADS))
        tag = tag_place(seals, page, layer, head, HEADS)
        tl.store(tag, tl.load(tag) + (after_a - before_a))
        tl.store(tag + 1, tl.load(tag + 1) + (after_b - before_b))


@triton.jit
def _verify(
    pages, page_keys, num_tokens, found, k, v, value_layers, seals,
    HEADS: tl.constexpr, K_WORDS: tl.constexpr, V_WORDS: tl.constexpr, PAGE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Lowers found int32 to the lowest layer whose part has a wrong seal; what lies outside of the pool or of a page fails in the first."""
    index, layer, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    page, num_rows = tl.load(pages + index), tl.load(num_tokens + index).to(tl.int32)
    is_wrong = True
    if (page >= 0) & (page < seals.num_pages) & (num_rows >= 0) & (num_rows <= PAGE):
        part = (layer.to(tl.int64) * seals.num_pages + page) * HEADS + head
        value_part = _value_part(value_layers, page, layer, head, seals.num_pages, HEADS)
        a, b = _part_sums(seals, k, v, part, value_part, K_WORDS, V_WORDS, STEP)
        wanted_a, wanted_b = expected_sums(seals, page, tl.load(page_keys + index), num_rows, layer, head, True, HEADS)
        is_wrong = (a != wanted_a) | (b != wanted_b)
    if is_wrong:
        tl.atomic_min(found + index, layer)


@triton.jit(do_not_specialize=["layer", "value_layer", "window", "fewest"])
def _verify_reads(
    items, sequences, positions, table, needed, k, v, seals, check, layer, value_layer, window, fewest, max_pages,
    HEADS: tl.constexpr, K_WORDS: tl.constexpr, V_WORDS: tl.constexpr, PAGE: tl.constexpr, HAS_NEEDED: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Pages of a sequence that an item's rows read and the item before it, if it's of the same sequence, doesn't."""
    item, head = tl.program_id(1), tl.program_id(2)
    row, count = tl.load(items + 2 * item), tl.load(items + 2 * item + 1)
    sequence = tl.load(sequences + row).to(tl.int64)
    has_before = (row > 0) & (tl.load(sequences + row - 1, mask=row > 0, other=-1) == sequence)
    before = tl.load(positions + row - 1, mask=has_before, other=-1)
    first, last = tl.load(positions + row), tl.load(positions + row + count - 1)
    place = tl.maximum(first + 1 - window, 0) // PAGE
    if (before >= 0) & (before + 1 >= fewest):
        place = tl.maximum(place, before // PAGE + 1)
    end = tl.where(last + 1 >= fewest, (last + PAGE) // PAGE, 0)
    place += tl.program_id(0)
    while place < end:
        is_read = True
        if HAS_NEEDED:
            is_read = tl.load(needed + sequence * max_pages + place) != 0
        if is_read:
            page = tl.load(table + sequence * max_pages + place).to(tl.int64)
            part = (layer.to(tl.int64) * seals.num_pages + page) * HEADS + head
            value_part = (value_layer.to(tl.int64) * seals.num_pages + page) * HEADS + head
            a, b = _part_sums(seals, k, v, part, tl.where(value_layer >= 0, value_part, -1), K_WORDS, V_WORDS, STEP)
            page_key = tl.load(check.page_keys + sequence * max_pages + place)
            num_rows = num_rows_of(check, sequence, place, PAGE)
            wanted_a, wanted_b = expected_sums(seals, page, page_key, num_rows, layer, head, True, HEADS)
            if (a != wanted_a) | (b != wanted_b):
                report(check, sequence, layer, place, max_pages)
        place += tl.num_programs(0)


@triton.jit
def _mark_selected(
    selected, sequences, positions, needed, max_selected, max_pages, PAGE: tl.constexpr, STEP: tl.constexpr
):
    """Set needed uint8 [num_sequences, max_pages] to 1 for the pages of a row's selected positions."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * STEP + tl.arange(0, STEP)
    key = tl.load(selected + row * max_selected + number, mask=number < max_selected, other=-1)
    is_key = (key >= 0) & (key <= tl.load(positions + row))
    place = tl.load(sequences + row).to(tl.int64) * max_pages + key // PAGE
    tl.store(needed + place, tl.full((STEP,), 1, dtype=tl.uint8), mask=is_key)


def _words_of(pool: KvPool) -> tuple[torch.Tensor, torch.Tensor, dict[str, int]]:
    """All keys and values as words of 16 bits, int16, in the order in which they lie; heads, and words of a part."""
    layout = pool.layout
    k = pool.k_rows.view(torch.int16)
    v = pool.v.view(torch.int16) if layout.num_value_layers else k
    row_bytes = layout.page_size * layout.element_bytes
    sizes = {
        "HEADS": layout.num_kv_heads,
        "K_WORDS": row_bytes * layout.head_dim // 2,
        "V_WORDS": row_bytes * layout.v_dim // 2 if layout.num_value_layers else 0,
    }
    return k, v, sizes


def _grid(pool: KvPool, pages: torch.Tensor) -> tuple[int, int, int]:
    return len(pages), pool.layout.num_layers, pool.layout.num_kv_heads


def open_pages_gpu(pool: KvPool, pages: torch.Tensor, page_keys: torch.Tensor) -> None:
    """Zero pages and seal them as empty; arguments have been checked, n > 0."""
    assert pool.seals is not None
    k, v, sizes = _words_of(pool)
    _open[_grid(pool, pages)](
        pages, page_keys, k, v, pool.seals.value_layers, seal_arguments(pool), **sizes, STEP=_STEP, num_warps=4, **EXACT
    )


def rekey_pages_gpu(pool: KvPool, pages: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> None:
    """Exchange the keys of pages, each of which is named once; arguments have been checked, n > 0."""
    heads = pool.layout.num_kv_heads
    _rekey[_grid(pool, pages)](pages, old, new, seal_arguments(pool), HEADS=heads, num_warps=1, **EXACT)


def verify_pages_gpu(
    pool: KvPool, pages: torch.Tensor, page_keys: torch.Tensor, num_tokens: torch.Tensor
) -> torch.Tensor:
    """int64 [n]: the first layer with a wrong seal, or -1; arguments have been checked, n > 0."""
    assert pool.seals is not None
    k, v, sizes = _words_of(pool)
    num_layers = pool.layout.num_layers
    found = torch.full((len(pages),), num_layers, dtype=torch.int32, device=pages.device)
    _verify[_grid(pool, pages)](
        pages, page_keys, num_tokens, found, k, v, pool.seals.value_layers, seal_arguments(pool),
        **sizes, PAGE=pool.layout.page_size, STEP=_STEP, num_warps=4, **EXACT,
    )  # fmt: skip
    return torch.where(found == num_layers, -1, found.long())


def verify_reads_gpu(
    pool: KvPool,
    layer: int,
    rows: AttentionRows,
    items: torch.Tensor,
    check: SealCheck,
    *,
    window: int | None = None,
    fewest: int = 0,
    needed: torch.Tensor | None = None,
) -> None:
    """Note violations in the pages that the rows of a plan's items read in a layer; arguments have been checked, `rows` placed, n > 0.

    Rows read all positions that they see or the last `window` of them; of these pages only those that are marked in needed uint8
    [num_sequences, max_pages]. Items whose last row sees less than `fewest` read nothing. Items of one sequence follow each other.
    """
    max_pages, size = rows.page_table.shape[1], pool.layout.page_size
    k, v, sizes = _words_of(pool)
    _verify_reads[(min(max_pages, _MOST_PROGRAMS), len(items), pool.layout.num_kv_heads)](
        items, rows.row_sequence, rows.row_position, rows.page_table, rows.page_table if needed is None else needed, k, v,
        seal_arguments(pool), check_arguments(check), layer, pool.layout.value_index(layer), window or max_pages * size, fewest, max_pages,
        **sizes, PAGE=size, HAS_NEEDED=needed is not None, STEP=_STEP, num_warps=4, **EXACT,
    )  # fmt: skip


def verify_all_reads_gpu(
    pool: KvPool,
    layer: int,
    rows: AttentionRows,
    check: SealCheck,
    *,
    fewest: int = 0,
    selected: torch.Tensor | None = None,
) -> None:
    """The same for all rows; with selected int32 [T, k] these read the positions there, up to their own, and no others."""
    assert rows.plan is not None
    needed = None
    if selected is not None:
        needed = torch.zeros(rows.page_table.shape, dtype=torch.uint8, device=selected.device)
        _mark_selected[(len(selected), triton.cdiv(selected.shape[1], _SELECTED_AT_ONCE))](
            selected, rows.row_sequence, rows.row_position, needed, selected.shape[1], rows.page_table.shape[1],
            PAGE=pool.layout.page_size, STEP=_SELECTED_AT_ONCE, num_warps=4, **EXACT,
        )  # fmt: skip
    for items in (rows.plan.singles, rows.plan.tiles):
        if len(items):
            verify_reads_gpu(pool, layer, rows, items, check, fewest=fewest, needed=needed)
