"""Which key each page of a sequence is sealed with, as its tokens fill them. No torch.

allocated --open (key of the prefix before)--> filling --rekey (key of its own prefix)--> whole
        \\--open (key of its own prefix), if a prompt's chunk fills it at once--> whole
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from worker.cache.page_pool import PageId, PagePool
from worker.scheduler import Chunk


@dataclass(slots=True)
class SealPlan:
    """What has to be done to pages before a step's rows are written."""

    opened: list[tuple[PageId, int]] = field(default_factory=list)  # (page, key)
    rekeyed: list[tuple[PageId, int, int]] = field(default_factory=list)  # (page, key before, key from now on)


def plan_seals(chunks: Iterable[Chunk], pool: PagePool, page_size: int) -> SealPlan:
    """Give the pages that the chunks reach their keys, in their tables, and say what that means for their seals."""
    plan = SealPlan()
    for chunk in chunks:
        _plan_chunk(plan, chunk, pool, page_size)
    return plan


def _plan_chunk(plan: SealPlan, chunk: Chunk, pool: PagePool, page_size: int) -> None:
    sequence = chunk.sequence
    table, namespace, end = sequence.table, sequence.request.namespace, chunk.start + chunk.count
    for place in range(table.num_whole, -(-end // page_size)):
        lease, is_whole = table.leases[place], (place + 1) * page_size <= end
        if not is_whole and place < table.num_opened:
            return  # it goes on filling under the key that it has
        digest = sequence.digest(place if is_whole else place - 1, page_size)
        key = namespace.page_key(digest, lease.tag, is_whole=is_whole)
        if place < table.num_opened:
            plan.rekeyed.append((lease.page, int(table.keys[place]), key))
        else:
            plan.opened.append((lease.page, key))
            table.num_opened = place + 1
        table.keys[place] = key
        if is_whole:
            table.num_whole = place + 1
            pool.set_whole(lease.page, key)
