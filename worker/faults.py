"""Faults on demand: every kind of damage that the integrity layer must notice, done to live pages.

Only a worker that was started to allow it obeys. Each function leaves behind what the fault would: damage that a real one would not
notice itself, such as a seal that was valid for other contents, keeps that seal.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.backend import Backend
from kernels.kv_pool import KvPool
from kernels.kv_write import kv_write
from kernels.page_seal import rekey_pages
from kernels.page_seal.ref import seal_ref
from protocol.ids import TenantId
from worker.cache.namespace import NamespaceFields
from worker.engine import Engine
from worker.errors import WorkerError
from worker.model_executor import ModelExecutor
from worker.sequence import Sequence


class FaultError(WorkerError):
    """The fault can't be had here: no such kind, nothing to strike, nothing that this kind needs."""


@dataclass(frozen=True, slots=True)
class Target:
    """A page of a running sequence."""

    engine: Engine
    kv: KvPool
    sequence: Sequence
    place: int
    layer: int

    @property
    def page(self) -> int:
        """Its number in the pool."""
        return self.sequence.table.leases[self.place].page

    @property
    def key(self) -> int:
        """What it is sealed with."""
        return int(self.sequence.table.keys[self.place])

    @property
    def backend(self) -> Backend:
        """Whose kernels change the pool: the reference's where they reach it, in any order in which keys may lie."""
        return Backend.REF if self.kv.k.is_cpu else Backend.GPU

    @property
    def num_tokens(self) -> int:
        """Rows that are in it."""
        size = self.kv.layout.page_size
        return max(0, min(size, self.sequence.num_computed - self.place * size))

    def needs_seals(self) -> torch.Tensor:
        """The pool's seals."""
        if self.kv.seals is None:
            raise FaultError(
                "this fault copies or forges seals, and this worker has none: start it with --integrity seal or full"
            )
        return self.kv.seals.tags


def _flip(stored: torch.Tensor) -> None:
    """One bit in the middle of a page's part."""
    raw = stored.view(torch.uint8).view(-1)
    raw[len(raw) // 2 - 1] ^= 0x10


def _flip_k(at: Target) -> None:
    _flip(at.kv.stored_k[at.layer, at.page, 0])


def _flip_v(at: Target) -> None:
    values = at.kv.values_of(at.layer)
    if values is None:
        raise FaultError(f"layer {at.layer} of this model keeps no values")
    _flip(values[at.page, 0])


def _flip_scale(at: Target) -> None:
    at.kv.k_scale.view(torch.int32)[at.layer, 0] ^= 1 << 20


def _flip_seal(at: Target) -> None:
    at.needs_seals()[at.layer, at.page, 0] ^= 1 << 33


def _flip_lease(at: Target) -> None:
    at.engine.cache.pool.tags[at.page] ^= 1 << 7


def _copy_page(at: Target, source: int) -> None:
    for part in (at.kv.k, at.kv.v, at.needs_seals()):
        part[:, at.page] = part[:, source]


def _swap_pages(at: Target) -> None:
    at.needs_seals()
    other = _other_page(at)
    for part in (at.kv.k, at.kv.v, at.needs_seals()):
        part[:, [at.page, other]] = part[:, [other, at.page]]


def _other_page(at: Target) -> int:
    """Another page of the same sequence."""
    pages = [lease.page for lease in at.sequence.table.leases[: at.sequence.table.num_opened] if lease.page != at.page]
    if not pages:
        raise FaultError("the request has one page only")
    return pages[0]


def _wrong_position(at: Target) -> None:
    at.needs_seals()
    _copy_page(at, _other_page(at))


def _foreign_page(at: Target) -> None:
    at.needs_seals()
    others = (s for s in at.engine.scheduler.running if s.tenant != at.sequence.tenant and s.table.num_opened)
    source = next(others, None)
    if source is None:
        raise FaultError("no other tenant's request is running")
    _copy_page(at, source.table.leases[0].page)


def _rekey(at: Target, key: int) -> None:
    at.needs_seals()
    numbers = (torch.tensor([n], dtype=torch.int64, device=at.kv.k.device) for n in (at.page, at.key, key))
    rekey_pages(at.kv, *numbers, backend=at.backend)


def _replayed(at: Target) -> None:
    """The same bytes with the seal of the page's life before this one."""
    namespace, lease = at.sequence.request.namespace, at.sequence.table.leases[at.place]
    before = namespace.lease_tag(lease.page, at.engine.cache.pool.generation(lease.page) - 1)
    _rekey(at, namespace.page_key(_digest(at), before, is_whole=_is_whole(at)))


def _is_whole(at: Target) -> bool:
    return at.place < at.sequence.table.num_whole


def _digest(at: Target) -> bytes:
    return at.sequence.digest(at.place if _is_whole(at) else at.place - 1, at.kv.layout.page_size)


def _other_namespace(at: Target, fields: NamespaceFields) -> None:
    """The same tokens at the same place, sealed in another namespace with its own digests."""
    namespace = at.engine.namespaces.derive(fields)
    digest, size = namespace.root, at.kv.layout.page_size
    for place in range(at.place + _is_whole(at)):
        digest = namespace.chain(digest, at.sequence.tokens[place * size : (place + 1) * size])
    tag = at.sequence.table.leases[at.place].tag
    _rekey(at, namespace.page_key(digest, tag, is_whole=_is_whole(at)))


def _wrong_model(at: Target) -> None:
    ring, job = at.engine.namespaces, at.sequence.request.job
    _other_namespace(at, NamespaceFields(job.tenant, "another model", ring.kv_format, job.cache_salt))


def _wrong_dtype(at: Target) -> None:
    ring, job = at.engine.namespaces, at.sequence.request.job
    _other_namespace(at, NamespaceFields(job.tenant, ring.model_digest, "another format", job.cache_salt))


def _table_off_by_one(at: Target) -> None:
    pages = at.sequence.table.pages
    pages[at.place] = (pages[at.place] + 1) % at.kv.layout.num_pages


def _freed_page(at: Target) -> None:
    at.engine.cache.pool.tags[at.page] = 0  # what the last release of a page does


def _missing_row(at: Target) -> None:
    """The last row of the page was never written."""
    last, seals = at.num_tokens - 1, at.kv.seals
    if last < 0:
        raise FaultError("nothing was written to the page yet")
    at.kv.k_rows[:, at.page, :, last] = 0
    at.kv.v[:, at.page, :, last] = 0
    if seals is not None:
        seals.tags[:, at.page] = seal_ref(at.kv, seals, at.page, torch.tensor(at.key), last)


def _write_after_free(at: Target) -> None:
    """Somebody who held the page in another life writes a row of his into it."""
    layout, device = at.kv.layout, at.kv.k.device
    key = torch.full((1, layout.num_kv_heads, layout.head_dim), 0.5, device=device)
    value = torch.full((1, layout.num_kv_heads, layout.v_dim), 0.5, device=device)
    slots = torch.tensor([at.page * layout.page_size], device=device)
    has_values = at.kv.values_of(at.layer) is not None
    kv_write(key, value if has_values else None, slots, at.kv, at.layer, backend=at.backend)


KINDS: dict[str, Callable[[Target], None]] = {
    "flip-k": _flip_k,
    "flip-v": _flip_v,
    "flip-scale": _flip_scale,
    "flip-seal": _flip_seal,
    "flip-lease": _flip_lease,
    "swap-pages": _swap_pages,
    "foreign-page": _foreign_page,
    "replayed-page": _replayed,
    "wrong-position": _wrong_position,
    "wrong-model": _wrong_model,
    "wrong-kv-format": _wrong_dtype,
    "table-off-by-one": _table_off_by_one,
    "freed-page": _freed_page,
    "missing-row": _missing_row,
    "write-after-free": _write_after_free,
}


def inject(
    engine: Engine, kind: str, *, tenant: TenantId | None = None, layer: int | None = None, place: int = 0
) -> Target:
    """Strike page `place` of the first running request (of a tenant); returns what was struck. Raises FaultError."""
    executor = engine.executor
    if not isinstance(executor, ModelExecutor):
        raise FaultError("a synthetic worker stores nothing that could be damaged")
    if kind not in KINDS:
        raise FaultError(f"unknown kind {kind!r}; there are {', '.join(KINDS)}")
    layout = executor.kv.layout
    layer = layout.num_layers // 2 if layer is None else layer
    if not 0 <= layer < layout.num_layers:
        raise FaultError(f"layer must be 0 to {layout.num_layers - 1}")
    for sequence in engine.scheduler.running:
        if tenant in (None, sequence.tenant) and place < -(-sequence.num_computed // layout.page_size):
            target = Target(engine, executor.kv, sequence, place, layer)
            KINDS[kind](target)
            return target
    raise FaultError("no running request has such a page; send one first")
