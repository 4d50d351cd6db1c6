"""Names of prefixes by which a job finds the worker that has computed its beginning, without saying what the prompt is.

A prompt has landmarks: fixed lengths, four to an octave. The digest of a prompt up to a landmark is keyed by the namespace in which its pages are
shared, so equal prompts of two tenants have nothing in common, and nobody without the installation's secret can tell what a digest stands
for. Gateways compute the digests of a job, workers those of the pages that they hold; `docs/queue.md` has what is done with them. A wrong
digest can only send a job to a worker that has to compute more: what may be read of a page is decided by `worker/cache`.
"""

import hashlib
import hmac
import sys
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence

from protocol.codec import pack
from protocol.ids import ModelName, TenantId
from protocol.job import Job

DIGEST_BYTES = 8
MAX_LANDMARK = 1 << 20
MAX_SESSION_LENGTH = 256
_CHAIN_BYTES = 16
_MAX_CACHED = 4096


def _landmarks() -> tuple[int, ...]:
    found, octave = [32, 64, 96, 128], 128
    while octave < MAX_LANDMARK:
        found += [octave + octave * quarter // 4 for quarter in (1, 2, 3, 4)]
        octave *= 2
    return tuple(found)


LANDMARKS = _landmarks()  # tokens


class RoutingKeys:
    """Keys of the namespaces in which prefixes and sessions are named; those in use are kept."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._known: OrderedDict[bytes, bytes] = OrderedDict()

    def trail(self, job: Job) -> "Trail":
        """The landmarks of a job's tokens, in the namespace that its worker will share its pages in."""
        if job.share_group is None:
            owner: list[object] = [job.model, job.tenant, job.cache_salt, None, job.tenant_since_ms]
        else:
            owner = [job.model, "", job.cache_salt, job.share_group, 0]
        return Trail(self._key(b"prefix" + pack(owner)))

    def session(self, model: ModelName, tenant: TenantId, tenant_since_ms: int, name: str) -> bytes:
        """The digest of a session that a tenant has named."""
        key = self._key(b"session" + pack([model, tenant, tenant_since_ms]))
        return hashlib.blake2b(name.encode(), key=key, digest_size=DIGEST_BYTES).digest()

    def _key(self, purpose: bytes) -> bytes:
        found = self._known.get(purpose)
        if found is None:
            found = self._known[purpose] = hmac.digest(self._secret, purpose, hashlib.sha256)
            if len(self._known) > _MAX_CACHED:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(purpose)
        return found


class Trail:
    """Digests at the landmarks of one growing list of tokens, each computed once."""

    __slots__ = ("_digests", "_key", "_last")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._last = b""
        self._digests: list[bytes] = []

    def digests(self, tokens: Sequence[int], end: int) -> list[bytes]:
        """Those of the landmarks up to `end` tokens, the shortest first. All of these tokens must be known and stay as they are."""
        wanted = bisect_right(LANDMARKS, end)
        if wanted > len(self._digests):
            self._extend(tokens, wanted)
        return self._digests[:wanted]

    def between(self, tokens: Sequence[int], start: int, end: int) -> list[bytes]:
        """Those of the landmarks in (start, end]."""
        first = bisect_right(LANDMARKS, start)
        return self.digests(tokens, end)[first:] if bisect_right(LANDMARKS, end) > first else []

    def _extend(self, tokens: Sequence[int], wanted: int) -> None:
        start = LANDMARKS[len(self._digests) - 1] if self._digests else 0
        raw = array("i", tokens[start : LANDMARKS[wanted - 1]])
        if sys.byteorder == "big":
            raw.byteswap()
        content, size = memoryview(raw).cast("B"), raw.itemsize
        for number in range(len(self._digests), wanted):
            end = LANDMARKS[number]
            step = hashlib.blake2b(self._last, key=self._key, digest_size=_CHAIN_BYTES)
            step.update(content[: (end - start) * size])
            content, start = content[(end - start) * size :], end
            self._last = step.digest()
            self._digests.append(self._last[:DIGEST_BYTES])
