"""`sluicegate queue` against a real Valkey."""

import secrets
import time

import pytest
import redis

from protocol.job import Job, SamplingParams
from protocol.key_space import KeySpace
from protocol.signing import seal_job
from protocol.submit_script import SUBMIT
from sluicegate.secrets import derived_keys

MODEL = "tests/queue-model"
KEYS = KeySpace()


@pytest.fixture
def client(valkey_url):
    with redis.Redis.from_url(valkey_url) as opened:
        yield opened
        for key in opened.keys(f"sg:{{{MODEL}}}:*"):
            opened.delete(key)


@pytest.fixture
def queue(sluicegate, valkey_url, data):
    """`sluicegate queue ...` for this test's model."""
    return lambda *words: sluicegate("queue", *words, "--model", MODEL, "--redis-url", valkey_url, "--data", str(data))


def _job(**changes) -> Job:
    fields = {"request_id": secrets.token_hex(8), "gateway_id": "g", "tenant": "acme", "model": MODEL, "prompt_token_ids": (1, 2, 3),
              "sampling": SamplingParams(max_tokens=4, seed=1), "created_ms": 0, "deadline_ms": 1}  # fmt: skip
    return Job(**{**fields, **changes})


def _bury(client, envelope: bytes, reason: str = "poisonous") -> str:
    fields = {"id": "r1", "line": "interactive/acme", "gw": "g", "reason": reason, "deliveries": 4, "job": envelope}
    return client.xadd(KEYS.dead(MODEL), fields).decode()


def test_inspect_shows_lines_and_the_dead(queue, client, data) -> None:
    """What waits by line, with weight, and who was given up and why; never a prompt."""
    client.zadd(KEYS.workers(MODEL), {"w1": (time.time() + 60) * 1000})
    for number, line in enumerate(["interactive/acme", "interactive/acme", "batch/beta"]):
        keys = [*KEYS.queue(MODEL).all(), KEYS.line(MODEL, line), KEYS.workers(MODEL)]
        most = 1 << 40
        client.eval(
            SUBMIT.text, len(keys), *keys, f"r{number}", "x", line, "g", 1, 10, 5, 2.5, most, most, most, most, 0
        )
    dead = _bury(client, b"canary prompt")
    shown = queue("inspect")
    assert 0 == shown.returncode, shown.stderr
    assert f"{MODEL}: 1 worker, 3 jobs wait (60 weighted tokens), 0 run" in shown.stdout
    acme = next(line for line in shown.stdout.splitlines() if "interactive/acme" in line and "waiting" in line)
    assert ["interactive/acme", "2", "waiting", "2.5", "0"] == acme.split()
    assert all(word in shown.stdout for word in (dead, "poisonous", "batch/beta"))
    assert "canary" not in shown.stdout


def test_purge_forgets_one_or_all(queue, client, data) -> None:
    """By number, or the lot; the stream goes with the last."""
    first, *_ = [_bury(client, b"x") for _ in range(3)]
    assert "Removed 1 dead job." in queue("purge", first).stdout
    assert 2 == client.xlen(KEYS.dead(MODEL))
    assert "Removed 2 dead jobs." in queue("purge").stdout
    assert not client.exists(KEYS.dead(MODEL))


def test_requeue_says_why_it_cannot(queue, client, data) -> None:
    """No such job, a job that doesn't verify, no worker: one clear line each, and the job stays among the dead."""
    assert "there is no dead job" in queue("requeue", "1-1").stderr
    forged = _bury(client, seal_job(b"x" * 32, _job()), "signature")
    assert "does not verify" in queue("requeue", forged).stderr
    signed = _bury(client, seal_job(derived_keys(data).job_signing, _job()))
    assert f"no worker serves {MODEL}" in queue("requeue", signed).stderr
    assert 2 == client.xlen(KEYS.dead(MODEL))
    assert set(client.keys(f"sg:{{{MODEL}}}:*")) == {KEYS.dead(MODEL).encode()}


def test_redis_that_is_away_is_one_line(sluicegate, data) -> None:
    """Like any other command's."""
    result = sluicegate("queue", "inspect", "--redis-url", "redis://127.0.0.1:1/0", "--data", str(data))
    assert (1, 1) == (result.returncode, len(result.stderr.splitlines()))
