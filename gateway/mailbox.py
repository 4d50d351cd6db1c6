"""Replies on their way from the readers of this process to the request that waits for them."""

import asyncio
from dataclasses import replace

from protocol.replies import Delta, Reply

# More than a model's context; a client that lets as many tokens pile up is not reading at all.
MAX_WAITING_REPLIES = 1 << 17


class Mailbox:
    """What has arrived for one HTTP request, over all its jobs: (job number, reply) in order of arrival."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Reply]] = []
        self._arrived = asyncio.Event()

    def put(self, slot: int, reply: Reply) -> None:
        """Add a reply."""
        self._waiting.append((slot, reply))
        self._arrived.set()

    @property
    def is_empty(self) -> bool:
        """Whether all that has come was taken."""
        return not self._waiting

    @property
    def is_overfull(self) -> bool:
        """Whether nobody seems to read."""
        return len(self._waiting) > MAX_WAITING_REPLIES

    async def take(self) -> list[tuple[int, Reply]]:
        """All that's there, waiting for something if there is nothing."""
        await self._arrived.wait()
        self._arrived.clear()
        waiting, self._waiting = self._waiting, []
        return waiting if len(waiting) < 2 else _joined(waiting)


def _joined(waiting: list[tuple[int, Reply]]) -> list[tuple[int, Reply]]:
    """The same replies with all that waited of one sample as one delta, at the place of its first: who is behind writes less."""
    joined: list[tuple[int, Reply]] = []
    deltas: dict[tuple[int, int], list[Delta]] = {}
    for slot, reply in waiting:
        if isinstance(reply, Delta):
            found = deltas.get((slot, reply.index))
            if found is not None:
                found.append(reply)
                continue
            deltas[slot, reply.index] = [reply]
        joined.append((slot, reply))
    for place, (slot, reply) in enumerate(joined):
        if isinstance(reply, Delta) and len(parts := deltas[slot, reply.index]) > 1:
            joined[place] = (slot, _sum(parts))
    return joined


def _sum(parts: list[Delta]) -> Delta:
    return replace(
        parts[0],
        text="".join(part.text for part in parts),
        token_ids=tuple(token for part in parts for token in part.token_ids),
        logprobs=tuple(entry for part in parts for entry in part.logprobs),
        finish_reason=parts[-1].finish_reason,
    )
