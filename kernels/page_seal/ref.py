"""Seals in plain torch. Sums are modulo 2^32, products with a page's key modulo 2^64."""

import torch

from kernels.kv_pool import KvPool
from kernels.seals import PageSeals

_LOW = 0xFFFFFFFF


def words(stored: torch.Tensor) -> torch.Tensor:
    """A head's stored keys or values in a page as signed 16-bit numbers: int64 [words]."""
    return stored.contiguous().view(torch.uint8).flatten().view(torch.int16).to(torch.int64)


def _sums(page: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """int64 [2], each modulo 2^32."""
    return (words(page).unsqueeze(0) * keys.to(torch.int64)).sum(dim=1) & _LOW


def _lanes(tag: torch.Tensor) -> torch.Tensor:
    """The two halves of 64 bits: int64 [..., 2]."""
    return torch.stack([tag & _LOW, (tag >> 32) & _LOW], dim=-1)


def _joined(lanes: torch.Tensor) -> torch.Tensor:
    lanes = lanes & _LOW
    return lanes[..., 0] | (lanes[..., 1] << 32)


def mask_ref(pool: KvPool, seals: PageSeals, page_key: torch.Tensor) -> torch.Tensor:
    """What is added to the sums of a page with this key: int64 [num_layers, num_kv_heads] from int64 []."""
    keys = seals.keys
    scales = (
        pool.k_scale.view(torch.int32).to(torch.int64) & _LOW,
        pool.v_scale.view(torch.int32).to(torch.int64) & _LOW,
    )
    return page_key * keys.factor + keys.offset + scales[0] * keys.scales[0] + scales[1] * keys.scales[1]


def seal_ref(pool: KvPool, seals: PageSeals, page: int, page_key: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The seal that a page with so many rows must have: int64 [num_layers, num_kv_heads]."""
    layout, keys = pool.layout, seals.keys
    lanes = torch.empty(layout.num_layers, layout.num_kv_heads, 2, dtype=torch.int64, device=pool.k.device)
    for layer in range(layout.num_layers):
        for head in range(layout.num_kv_heads):
            lanes[layer, head] = _sums(pool.stored_k[layer, page, head], keys.k_words)
            if (values := pool.values_of(layer)) is not None:
                lanes[layer, head] += _sums(values[page, head], keys.v_words)
    lanes += keys.rows[num_tokens].to(torch.int64) & _LOW
    return _joined(lanes + _lanes(mask_ref(pool, seals, page_key)))


def open_pages_ref(pool: KvPool, seals: PageSeals, pages: torch.Tensor, page_keys: torch.Tensor) -> None:
    """Zero pages and give them the seal of an empty page."""
    for page, page_key in zip(pages.tolist(), page_keys, strict=True):
        pool.scrub(page)
        seals.tags[:, page] = _joined(_lanes(mask_ref(pool, seals, page_key)))


def rekey_ref(pool: KvPool, seals: PageSeals, pages: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> None:
    """Exchange the keys of pages, whatever is in them."""
    for page, before, after in zip(pages.tolist(), old, new, strict=True):
        masks = _lanes(mask_ref(pool, seals, after)) - _lanes(mask_ref(pool, seals, before))
        seals.tags[:, page] = _joined(_lanes(seals.tags[:, page]) + masks)


def add_rows_ref(
    pool: KvPool,
    seals: PageSeals,
    layer: int,
    slots: torch.Tensor,
    before: list[tuple[int, torch.Tensor, torch.Tensor]],
) -> None:
    """Bring the seals of a layer up to date after rows were written; `before` are `words_of_pages` before the writing."""
    size, keys = pool.layout.page_size, seals.keys
    written = slots[slots >= 0].tolist()
    after = words_of_pages(pool, layer, slots)
    for (page, k_old, v_old), (_, k_new, v_new) in zip(before, after, strict=True):
        rows = sum(
            (keys.rows[s % size + 1] - keys.rows[s % size]).to(torch.int64) for s in written if s // size == page
        )
        for head in range(pool.layout.num_kv_heads):
            change = ((k_new - k_old)[head].unsqueeze(0) * keys.k_words.to(torch.int64)).sum(dim=1)
            if v_new.shape[1]:
                change += ((v_new - v_old)[head].unsqueeze(0) * keys.v_words.to(torch.int64)).sum(dim=1)
            seals.tags[layer, page, head] = _joined(_lanes(seals.tags[layer, page, head]) + change + rows)


def words_of_pages(pool: KvPool, layer: int, slots: torch.Tensor) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """For each page that slots name: its number, and all heads' words of keys and of values; none of values that the layer doesn't have."""
    pages = sorted({slot // pool.layout.page_size for slot in slots.tolist() if slot >= 0})
    heads, values = range(pool.layout.num_kv_heads), pool.values_of(layer)
    nothing = torch.empty(len(heads), 0, dtype=torch.int64)
    return [
        (
            page,
            torch.stack([words(pool.stored_k[layer, page, head]) for head in heads]),
            nothing if values is None else torch.stack([words(values[page, head]) for head in heads]),
        )
        for page in pages
    ]
