"""Ends running requests whose tenant was disabled or deleted, or whose key was revoked. A key that merely expires lets them finish."""

import time

import structlog

from gateway.auth import Authenticator, Principal
from gateway.generation import Generation, Generations
from protocol.replies import Failed

_log = structlog.get_logger(__name__)

FORGOTTEN_GRACE_S = 10.0


class AccessGuard:
    """Looks a running request's caller up again after each change, once for each key."""

    def __init__(self, auth: Authenticator, generations: Generations) -> None:
        self._auth = auth
        self._generations = generations
        self._revision = 0
        self._patient_until_s = 0.0

    async def check(self, revision: int) -> None:
        """Check what was begun before a revision; errors of Redis pass through, and what they left unchecked is checked next time."""
        if revision < self._revision:
            # Redis came back without what it knew. That revokes nobody: whoever runs the stack has time to bring the tenants back.
            self._patient_until_s = time.monotonic() + FORGOTTEN_GRACE_S
            _log.warning("tenants_forgotten", revision=revision)
        self._revision = revision
        if time.monotonic() < self._patient_until_s:
            return
        by_key: dict[str, list[Generation]] = {}
        for generation in self._generations.unchecked(revision):
            by_key.setdefault(generation.caller.digest, []).append(generation)
        for digest, generations in by_key.items():
            caller = await self._auth.find(digest, revision)
            for generation in generations:
                if not _is_welcome(caller):
                    _log.warning("access_revoked", tenant=generation.caller.tenant, key_id=generation.caller.key_id)
                    failed = Failed(
                        "access_revoked", "this tenant or API key was disabled while the answer was written"
                    )
                    self._generations.fail(generation, failed)
                generation.checked_revision = revision


def _is_welcome(caller: Principal | None) -> bool:
    return caller is not None and caller.record.status == "active"
