"""Mixed traffic over a short pool with every check on: no alarm, since nothing is wrong; then one fault, so that the silence means something.

Preemption, eviction, aborts, samples that share a prompt, salts, a share group and passed deadlines, in all formats of the cache.
SOAK_INTEGRITY_MINUTES (`make soak-integrity`) says how long, in CPU time, instead of 20 seconds.
"""

import dataclasses
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import pytest

from protocol.job import Job
from protocol.replies import Delta, Done, Failed
from worker.engine import Engine
from worker.faults import inject

SECONDS = float(os.environ.get("SOAK_INTEGRITY_MINUTES", "0")) * 60 or 20.0
DTYPES = ("fp8", "fp16", "bf16")
TENANTS = ("a", "b", "c", "d")
NUM_PAGES = 48
PAGE_SIZE = 8
MOST_LIVE = 24
NUM_QUESTIONS = 150

pytestmark = pytest.mark.timeout(120 + 6 * SECONDS)


@dataclass
class Traffic:
    """Random requests from a fixed set of questions, so that each is asked often: the same question must get the same answer."""

    engine: Engine
    lab: object
    rng: random.Random
    live: dict[str, tuple] = field(default_factory=dict)
    told: dict[str, list] = field(default_factory=dict)
    answers: dict[tuple, tuple] = field(default_factory=dict)
    counts: Counter = field(default_factory=Counter)
    questions: list[tuple] = field(default_factory=list)

    def __post_init__(self) -> None:
        documents = [self._tokens(20, 90) for _ in range(10)]
        for number in range(NUM_QUESTIONS):
            document = self.rng.choice(documents)
            prompt = document[: self.rng.randrange(8, len(document) + 1)] + self._tokens(1, 20)
            options = {
                "max_tokens": self.rng.randrange(1, 40),
                "temperature": self.rng.choice((0.0, 0.8)),
                "seed": number,
            }
            self.questions.append((prompt, self.rng.choice((1, 1, 1, 2, 3)), tuple(options.items())))

    def _tokens(self, low: int, high: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(256) for _ in range(self.rng.randrange(low, high)))

    def step(self) -> None:
        """Some arrive, some leave, the engine goes on."""
        while len(self.live) < MOST_LIVE and self.rng.random() < 0.4:
            self._arrive()
        if self.live and self.rng.random() < 0.03:
            self.engine.cancel(self.rng.choice(sorted(self.live)))
        self.lab.now_ms += 1
        for outgoing in self.engine.step():
            self._take(outgoing.envelope.request_id, outgoing.envelope.reply)
        self.engine.check_invariants()
        self.counts["steps"] += 1
        self.counts["page reads"] += sum(len(sequence.table) for sequence in self.engine.scheduler.running)

    def _arrive(self) -> None:
        question = self.rng.choice(self.questions)
        prompt, num_samples, options = question
        job: Job = self.lab.job(
            prompt,
            tenant=self.rng.choice(TENANTS),
            n=num_samples,
            salt=self.rng.choice((None, None, None, "s")),
            **dict(options),
        )
        changes = {"share_group": self.rng.choice((None, None, "group")), "deadline_ms": job.deadline_ms}
        if self.rng.random() < 0.02:
            changes["deadline_ms"] = self.lab.now_ms + self.rng.randrange(1, 60)
        job = dataclasses.replace(job, **changes)
        self.live[job.request_id], self.told[job.request_id] = question, []
        self.engine.submit(job)
        self.counts["requests"] += 1
        self.counts["forks"] += num_samples > 1

    def _take(self, request_id: str, reply: object) -> None:
        if isinstance(reply, Delta):
            self.told[request_id] += [(reply.index, token) for token in reply.token_ids]
        elif isinstance(reply, Failed):
            assert reply.code in ("cancelled", "deadline_exceeded"), reply
            self.counts[reply.code] += 1
            del self.live[request_id], self.told[request_id]
        elif isinstance(reply, Done):
            self.counts["answers"] += 1
            self.counts["hits"] += reply.cached_tokens > 0
            question, answer = (
                self.live.pop(request_id),
                tuple(sorted(self.told.pop(request_id), key=lambda one: one[0])),
            )
            assert answer == self.answers.setdefault(question, answer), "another answer to the same question"

    def finish(self) -> None:
        """Let all end."""
        while self.engine.has_work:
            for outgoing in self.engine.step():
                self._take(outgoing.envelope.request_id, outgoing.envelope.reply)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_false_alarm(small_lab, dtype: str) -> None:
    """A third of the time in each format."""
    engine = small_lab.engine(
        kv_tokens=NUM_PAGES * PAGE_SIZE, page_size=PAGE_SIZE, kv_dtype=dtype, integrity="full", step_tokens=64
    )
    traffic = Traffic(engine, small_lab, random.Random(dtype))
    end_s, started_s = time.process_time() + SECONDS / len(DTYPES), time.monotonic()
    while time.process_time() < end_s:
        traffic.step()
    traffic.finish()
    counts = Counter(
        traffic.counts,
        preemptions=engine.scheduler.num_preemptions,
        verified=engine.integrity.totals.pages_checked,
        allocations=sum(engine.cache.pool.generation(page) for page in range(NUM_PAGES)),
    )
    print(
        f"{dtype}, {SECONDS / len(DTYPES):.0f} s of CPU time in {time.monotonic() - started_s:.0f} s: {dict(counts)}; {engine.integrity.totals.num_violations} alarms"
    )
    assert 0 == engine.integrity.totals.num_violations
    assert [] == engine.integrity.take_events()
    assert 0 == engine.cache.pool.num_held == engine.cache.pool.num_quarantined
    for what in ("forks", "cancelled", "deadline_exceeded", "hits", "preemptions", "page reads"):
        assert counts[what] > 0, what
    assert counts["allocations"] > 20 * NUM_PAGES, "pages were evicted and used again"
    _strike(engine, small_lab)


def _strike(engine: Engine, lab) -> None:
    """The same engine finds damage."""
    engine.submit(lab.job(tuple(range(60)), max_tokens=8))
    while not any(sequence.num_output for sequence in engine.scheduler.running):
        engine.step()
    inject(engine, "flip-v", place=1)
    engine.step()
    assert 1 == engine.integrity.totals.num_violations
    while engine.has_work:
        engine.step()
