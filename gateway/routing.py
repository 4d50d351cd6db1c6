"""Which workers a job may be sent to in preference, and what Redis needs to choose among them: digests of the job's prefix and of its session.

The choice itself is made in the script that submits (`protocol.submit_script`), where what workers hold is known at that moment.
"""

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web

from gateway.errors import bad_request
from gateway.model_directory import ModelDirectory
from protocol.ids import ModelName, TenantId, WorkerId
from protocol.job import Job
from protocol.key_space import KeySpace
from protocol.routing import MAX_SESSION_LENGTH, RoutingKeys

SESSION_HEADER = "x-session-affinity"
OUTCOMES = ("held", "passed_over", "none")
# More workers than these are not asked, but always the same ones for one prefix.
MAX_ASKED = 64
MANY_TOKENS = 50_000  # that the event loop shouldn't spend its time on


@dataclass(frozen=True, slots=True)
class Route:
    """What the script gets beside the job itself; nothing if there's nothing to choose."""

    keys: list[str] = field(default_factory=list)
    arguments: list[bytes | str | int] = field(default_factory=list, repr=False)


NO_ROUTE = Route()


class Router:
    """Knows who is there. Without keys it routes nothing. `on_outcome` is told the model and one of OUTCOMES for each choice."""

    def __init__(
        self, keys: KeySpace, directory: ModelDirectory, secret: bytes, on_outcome: Callable[[str, str], None]
    ) -> None:
        self._keys = keys
        self._directory = directory
        self._digests = RoutingKeys(secret) if secret else None
        self.on_outcome = on_outcome

    def session(self, model: ModelName, tenant: TenantId, tenant_since_ms: int, name: str | None) -> bytes | None:
        """What a job carries of the session that its client has named."""
        if name is None or self._digests is None:
            return None
        return self._digests.session(model, tenant, tenant_since_ms, name)

    async def route(self, job: Job) -> Route:
        """For a job that's submitted now."""
        if self._digests is None:
            return NO_ROUTE
        workers = self._directory.fleet.live_workers(job.model)
        if len(workers) < 2:
            return NO_ROUTE
        # Its last token is computed in any case.
        trail, end = self._digests.trail(job), len(job.prompt_token_ids) - 1
        if end > MANY_TOKENS:
            landmarks = await asyncio.to_thread(trail.digests, job.prompt_token_ids, end)
        else:
            landmarks = trail.digests(job.prompt_token_ids, end)
        if not landmarks and job.session is None:
            return NO_ROUTE
        asked = _asked(workers, job.session or landmarks[0])
        keys = [key for w in asked for key in (self._keys.held(job.model, w), self._keys.bell(job.model, w))]
        return Route(keys, [job.session or b"", len(landmarks), *landmarks, *asked])


def _asked(workers: set[WorkerId], name: bytes) -> list[WorkerId]:
    """All, or of many the ones that rendezvous hashing (Thaler and Ravishankar, 1998) gives for this name."""
    if len(workers) <= MAX_ASKED:
        return sorted(workers)
    return sorted(workers, key=lambda worker: hashlib.blake2b(worker.encode(), key=name, digest_size=8).digest())[
        :MAX_ASKED
    ]


def session_of(request: web.Request) -> str | None:
    """The session that a request belongs to by its header; raises ApiError 400. Never logged: it may be a person's name."""
    values = request.headers.getall(SESSION_HEADER, [])
    if not values:
        return None
    name = values[0]
    if len(values) > 1 or not 1 <= len(name) <= MAX_SESSION_LENGTH or not all(" " < sign <= "~" for sign in name):
        raise bad_request(
            f"{SESSION_HEADER} must be one header of 1 to {MAX_SESSION_LENGTH} visible ASCII characters without spaces.",
            SESSION_HEADER,
        )
    return name
