"""The jobs that this worker has taken and not yet ended."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.ids import RequestId
from protocol.job import Job
from worker.job_queue import Holding
from worker.outgoing import Outgoing

# Jobs that the engine can't admit yet are better off in the queue, where any worker can take them and tenants are served fairly.
MAX_HELD_BACK = 2
LOOK_AGAIN_S = 0.05


@dataclass(frozen=True, slots=True)
class _Taken:
    job: Job = field(repr=False)
    holding: Holding


class InFlight:
    """Jobs by request. `num_held_back` tells how many sequences wait in the engine."""

    def __init__(self, max_sequences: int, num_held_back: Callable[[], int] = lambda: 0) -> None:
        self._max_sequences = max_sequences
        self._num_held_back = num_held_back
        self._taken: dict[RequestId, _Taken] = {}
        self._given_up: set[tuple[RequestId, int]] = set()
        self._num_sequences = 0
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._taken)

    @property
    def room(self) -> int:
        """How many more jobs could be taken, at least one once `wait_for_room` has returned."""
        return max(self._max_sequences - self._num_sequences, 1)

    def add(self, job: Job) -> Job | None:
        """A job was taken; returns the earlier attempt of it that this worker is still at, which doesn't count any more."""
        earlier = self._taken.pop(job.request_id, None)
        self._taken[job.request_id] = _Taken(job, Holding(job.request_id, job.attempt, job.line))
        if earlier is not None:
            self._given_up.discard((job.request_id, earlier.job.attempt))
        self._num_sequences += job.n - (earlier.job.n if earlier else 0)
        return earlier.job if earlier else None

    def ended(self, outgoing: Outgoing) -> None:
        """A job's terminal reply has left, or was refused."""
        taken = self._taken.get(outgoing.envelope.request_id)
        if taken is not None and taken.job.attempt == outgoing.envelope.attempt:
            del self._taken[outgoing.envelope.request_id]
            self._given_up.discard((outgoing.envelope.request_id, outgoing.envelope.attempt))
            self._num_sequences -= taken.job.n
            self._changed.set()

    def holdings(self) -> list[Holding]:
        """All that this worker holds."""
        return [taken.holding for taken in self._taken.values()]

    def give_up(self, request_id: RequestId, attempt: int) -> bool:
        """Note that a job isn't wanted from here any more; whether that's news."""
        taken = self._taken.get(request_id)
        if taken is None or taken.job.attempt != attempt or (request_id, attempt) in self._given_up:
            return False
        self._given_up.add((request_id, attempt))
        return True

    async def wait_for_room(self) -> None:
        """Until another job may be taken."""
        while self._num_sequences >= self._max_sequences:
            await self._change()
        while self._num_held_back() > MAX_HELD_BACK:
            await asyncio.sleep(LOOK_AGAIN_S)

    async def wait_until_empty(self) -> None:
        """Until all jobs have ended."""
        while self._taken:
            await self._change()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
