"""Synthetic engines, driven step by step, with invariants checked after each step."""

from collections.abc import Callable

import pytest

from protocol.ids import GatewayId, ModelName, RequestId, TenantId
from protocol.job import Job, SamplingParams
from protocol.replies import Delta, Reply
from worker.engine import Engine
from worker.settings import SyntheticSettings, WorkerSettings
from worker.synthetic.engine import preparation

NEVER_MS = 2**60


class Lab:
    """Makes engines and jobs, and runs them."""

    def __init__(self) -> None:
        self._num_jobs = 0

    def settings(self, synthetic: SyntheticSettings, **changes) -> WorkerSettings:
        options = {
            "model_path": None,
            "model_name": ModelName("m"),
            "job_signing_key": b"j" * 32,
            "namespace_secret": b"n" * 32,
        }
        return WorkerSettings(redis_url="redis://nowhere", synthetic=synthetic, **{**options, **changes})

    def engine(self, context: int = 4096, **changes) -> Engine:
        return preparation(self.settings(SyntheticSettings(context_length=context), **changes))().engine

    def job(
        self,
        prompt: tuple[int, ...] = (72, 105),
        n: int = 1,
        echo: int | None = None,
        deadline_ms: int = NEVER_MS,
        **options,
    ) -> Job:
        self._num_jobs += 1
        sampling = SamplingParams(**{"max_tokens": 24, "seed": 1, "temperature": 0.0, **options})
        return Job(
            RequestId(f"r{self._num_jobs}"), GatewayId("g"), TenantId("t"), ModelName("m"), prompt, sampling, 0, deadline_ms, n=n,
            prompt_logprobs=echo,
        )  # fmt: skip

    def run(self, engine: Engine, *jobs: Job) -> list[list[Reply]]:
        """Submit together and step until all have ended; each one's replies."""
        replies: dict[str, list[Reply]] = {job.request_id: [] for job in jobs}
        for job in jobs:
            engine.submit(job)
        while engine.has_work:
            for outgoing in engine.step():
                replies[outgoing.envelope.request_id].append(outgoing.envelope.reply)
            engine.check_invariants()
        for outgoing in engine.take_replies():
            replies[outgoing.envelope.request_id].append(outgoing.envelope.reply)
        return [replies[job.request_id] for job in jobs]


@pytest.fixture
def lab() -> Lab:
    return Lab()


@pytest.fixture
def tokens_of() -> Callable[..., list[int]]:
    """The tokens of one sample in a request's replies."""

    def of(replies: list[Reply], index: int = 0) -> list[int]:
        return [t for reply in replies if isinstance(reply, Delta) and reply.index == index for t in reply.token_ids]

    return of
