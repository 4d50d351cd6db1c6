"""Tenants of a whole stack: a seed file, limits, usage and audit with the real model, and what kills leave behind."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import openai
import pytest

SEED = """
[prices."smollm2-135m-instruct"]
input = 1.0
cached_input = 0.25
output = 4.0

[[tenants]]
id = "acme"
limits = { concurrent_requests = 2, output_tokens = 3000 }

[[tenants.keys]]
name = "app"
secret = "sk-sg-the-seeds-own-key"
"""
KEY = "sk-sg-the-seeds-own-key"
LONG = {"messages": [{"role": "user", "content": "Tell me a very long story."}], "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def seeded(tmp_path_factory, smollm2_path: Path, start_stack):
    """One stack with the seed's tenant for this file."""
    folder = tmp_path_factory.mktemp("seeded")
    (folder / "tenants.toml").write_text(SEED)
    yield from start_stack(folder / "data", "--tenants", str(folder / "tenants.toml"))


def _rows(stack) -> list[dict]:
    return json.loads(stack.run("usage", "acme", "--by", "request", "--format", "json"))["data"]


class Reader(threading.Thread):
    """A long answer that is read in the background until it ends, however it does."""

    def __init__(self, stack) -> None:
        super().__init__(daemon=True)
        self._stack = stack
        self.num_chunks = 0
        self.end = ""
        self.start()

    def run(self) -> None:
        try:
            client = self._stack.client(KEY)
            for _ in client.chat.completions.create(model=self._stack.model, stream=True, max_tokens=3000, **LONG):
                self.num_chunks += 1
            self.end = "done"
        except openai.APIError as error:
            self.end = type(error).__name__

    @property
    def is_running(self) -> bool:
        return self.is_alive() and self.num_chunks > 2


def _is_refused(stack) -> bool:
    try:
        stack.client(KEY).chat.completions.create(model=stack.model, max_tokens=1, messages=LONG["messages"])
    except openai.RateLimitError:
        return True
    except openai.APIError:
        pass
    return False


def test_usage_is_what_the_answer_said(seeded) -> None:
    """Rows, sums and cost of a request are those in its `usage`, the cached part at its discount."""
    messages = [{"role": "user", "content": "What is the capital of France? " * 10}]
    answers = [
        seeded.client(KEY).chat.completions.create(model=seeded.model, max_tokens=5, messages=messages)
        for _ in range(2)
    ]
    seeded.wait_for(lambda: len(_rows(seeded)) == 2, 5)
    for answer, row in zip(answers, _rows(seeded), strict=True):
        usage = answer.usage
        cached = usage.prompt_tokens_details.cached_tokens
        assert (usage.prompt_tokens, cached, usage.completion_tokens) == tuple(
            row[name] for name in ("prompt_tokens", "cached_tokens", "completion_tokens")
        )
        nanos = (usage.prompt_tokens - cached) * 1000 + cached * 250 + usage.completion_tokens * 4000
        assert nanos == round(row["cost"] * 1e9)
    assert answers[1].usage.prompt_tokens_details.cached_tokens > 0
    assert 2 == json.loads(seeded.run("usage", "acme", "--format", "json"))["totals"]["requests"]


def test_an_answer_is_no_longer_than_allowed(seeded) -> None:
    """The seed's output limit holds."""
    with pytest.raises(openai.BadRequestError, match="at most 3000"):
        seeded.client(KEY).chat.completions.create(model=seeded.model, max_tokens=3001, messages=LONG["messages"])


def test_disabling_ends_running_answers_at_once(seeded) -> None:
    """The worker stops computing for them, and enabling lets new ones in."""
    reader = Reader(seeded)
    seeded.wait_for(lambda: reader.is_running, 20)
    seeded.run("tenant", "disable", "acme")
    disabled_s = time.monotonic()
    reader.join(5)
    assert "APIError" == reader.end
    seeded.wait_for(lambda: seeded.metric("sluicegate_worker_running_sequences") == 0, 5)
    assert time.monotonic() - disabled_s < 2.0
    with pytest.raises(openai.PermissionDeniedError):
        seeded.client(KEY).models.list()
    seeded.run("tenant", "enable", "acme")
    seeded.wait_for(lambda: not _is_refused(seeded), 5)
    kinds = [entry["kind"] for entry in json.loads(seeded.run("audit", "--tenant", "acme", "--format", "json"))["data"]]
    assert ["tenant.created", "key.created", "tenant.disabled", "tenant.enabled"] == kinds


def test_a_killed_worker_keeps_its_slots_until_its_answers_end(seeded) -> None:
    """kill -9 with both slots in use: the answers go on elsewhere in the same slots, which are free once they have ended, one row each."""
    before = len(_rows(seeded))
    readers = [Reader(seeded) for _ in range(2)]
    seeded.wait_for(lambda: all(reader.num_chunks > 50 for reader in readers), 60)
    os.kill(seeded.pid_of_busy_worker(), signal.SIGKILL)
    counts = [reader.num_chunks for reader in readers]
    seeded.wait_for(lambda: all(r.num_chunks > count + 50 for r, count in zip(readers, counts, strict=True)), 60)
    assert _is_refused(seeded)
    seeded.run("tenant", "disable", "acme")
    for reader in readers:
        reader.join(20)
        assert reader.end not in ("", "done")
    seeded.run("tenant", "enable", "acme")
    seeded.wait_for(lambda: not _is_refused(seeded), 20)
    seeded.wait_for(lambda: 2 == sum(row["completion_tokens"] > 50 for row in _rows(seeded)[before:]), 20)
    rows = _rows(seeded)
    assert len(rows) == len({row["request"] for row in rows})


@pytest.mark.parametrize("victim", ["gateway"])
def test_a_killed_process_leaves_no_slot_locked(seeded, victim: str) -> None:
    """kill -9 with both slots in use: they are free again within the lease time, and each request has its one row."""
    before = len(_rows(seeded))
    readers = [Reader(seeded) for _ in range(2)]
    seeded.wait_for(lambda: all(reader.is_running for reader in readers), 30)
    assert _is_refused(seeded)
    seeded.wait_for(lambda: all(reader.num_chunks > 150 for reader in readers), 30)
    info = json.loads((seeded.data / "stack.json").read_text())
    os.kill(info["pids"][victim][0], signal.SIGKILL)
    killed_s = time.monotonic()
    for reader in readers:
        reader.join(60)
        assert reader.end not in ("", "done")

    def both_run() -> bool:
        for place, reader in enumerate(readers):
            if not reader.is_alive():
                readers[place] = Reader(seeded)
        time.sleep(0.2)
        return all(reader.is_running for reader in readers)

    seeded.wait_for(both_run, 60)
    assert time.monotonic() - killed_s < 15.0 + 20.0  # the lease, and the time that a new process needs to start
    seeded.run("tenant", "disable", "acme")
    for reader in readers:
        reader.join(10)
    seeded.run("tenant", "enable", "acme")
    outcome = "lost"

    def both_are_told() -> bool:
        found = [row for row in _rows(seeded)[before:] if row["outcome"] == outcome and row["code"] != "access_revoked"]
        return 2 == len([row for row in found if row["completion_tokens"] > 0])

    seeded.wait_for(both_are_told, 30)
    rows = _rows(seeded)
    assert len(rows) == len({row["request"] for row in rows})
