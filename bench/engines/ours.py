"""Sluicegate's own engine: what a worker runs, without Redis. The KV pool is a worker's, made once; each measurement has a fresh engine.

A fresh engine has an empty prefix cache, so no prompt finds another's pages; what the engine does to fill that cache is part of the time.
"""

import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch

from bench.bandwidth import read_bandwidth
from bench.engines.serve import LoadRequest, memory, serve
from kernels.backend import describe, resolve
from kernels.kv_pool import KvPool
from protocol.ids import GatewayId, ModelName, RequestId, TenantId, WorkerId
from protocol.job import Job, SamplingParams
from protocol.replies import Delta, Failed
from worker.cache.namespace import NamespaceRing
from worker.engine import Engine, EngineParts
from worker.model.load import load_model
from worker.model.token_bytes import token_bytes
from worker.model_executor import ModelExecutor

PAGE_SIZE = 16
STEP_TOKENS = 256
FAR_MS = 2**60
WATCH_S = 0.002


class _Peak:
    """Watches what the process holds itself, without mapped files, while something runs."""

    def __enter__(self) -> Self:
        self.before_bytes = self.most_bytes = memory()["anonymous"]
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._done.wait(WATCH_S):
            self.most_bytes = max(self.most_bytes, memory()["anonymous"])


class Sluicegate:
    """The engine with a worker's defaults."""

    def load(self, wanted: LoadRequest) -> dict[str, str]:
        """Load the file and make the KV pool, with its memory touched as after hours of service."""
        backend = self._backend = resolve("cpu", wanted.options.get("activations_bits", 16))
        with _Peak() as peak:
            self._loaded = load_model(Path(wanted.model), backend)
        self._threads = wanted.threads
        self._kv_dtype = wanted.options["kv_dtype"]
        self._max_streams = wanted.max_streams
        num_pages = -(-wanted.options["kv_tokens"] // PAGE_SIZE) + wanted.max_streams
        self._pool = KvPool.allocate(
            self._loaded.kv_layout(num_pages, PAGE_SIZE, self._kv_dtype), seal_secret=secrets.token_bytes(32)
        )
        for page in range(num_pages):
            self._pool.scrub(page)
        self._sizes = {
            "weights": self._loaded.model.weight_bytes,
            "kv": self._pool.nbytes,
            "before_loading": peak.before_bytes,
            "peak_of_loading": peak.most_bytes,
        }
        self._new_engine()
        return {
            "version": "this build",
            "weights": "the file's",
            "kv": self._kv_dtype,
            "settings": f"{wanted.threads} threads, {STEP_TOKENS} tokens a step, pages of {PAGE_SIZE}, pages sealed (the default), "
            + ", ".join(f"{key} {value}" for key, value in describe(backend).items()),
        }

    def prepare(self, num_streams: int, num_tokens: int) -> None:
        """An engine with nothing cached."""
        self._new_engine()

    def submit(self, prompts: Sequence[Sequence[int]], num_new: int) -> None:
        """One job for each prompt, each of its own request."""
        sampling = SamplingParams(max_tokens=num_new, seed=0, temperature=0.0, ignore_eos=True)
        for stream, tokens in enumerate(prompts):
            self._engine.submit(
                Job(
                    RequestId(str(stream)), GatewayId("g"), TenantId("t"), ModelName("m"), tuple(tokens), sampling, 0, FAR_MS
                )
            )  # fmt: skip

    def step(self) -> list[tuple[int, int]]:
        """One step of the engine."""
        produced = []
        for outgoing in self._engine.step():
            reply, stream = outgoing.envelope.reply, int(outgoing.envelope.request_id)
            if isinstance(reply, Delta):
                produced += [(stream, token) for token in reply.token_ids]
            elif isinstance(reply, Failed):
                raise RuntimeError(f"a request failed: {reply.message}")  # noqa: TRY004
        return produced

    def end(self) -> None:
        """Drop the engine and all that it runs."""
        self._new_engine()

    def sizes(self) -> dict[str, int]:
        """Bytes of weights and KV pool, and what the process held before and at most while the weights were loaded."""
        return self._sizes

    def bandwidth(self) -> dict[str, float]:
        """Bytes a second that this process, with all threads, reads from memory."""
        torch.set_num_threads(self._threads)  # it's torch that reads
        try:
            return {"bytes_per_s": read_bandwidth()}
        finally:
            torch.set_num_threads(1)

    def _new_engine(self) -> None:
        loaded = self._loaded
        parts = EngineParts(
            executor=ModelExecutor(loaded.model, self._pool, self._backend),
            namespaces=NamespaceRing(b"b" * 32, loaded.digest, self._kv_dtype),
            token_bytes=tuple(token_bytes(loaded.tokenizer)),
            eos_token_ids=frozenset(loaded.tokenizer.eos_token_ids),
            max_request_tokens=self._pool.layout.num_pages * PAGE_SIZE,
            worker_id=WorkerId("bench"),
            checks_leases=True,
            now=time.monotonic,
            now_ms=lambda: 0,
        )
        self._engine = Engine(parts, self._max_streams, max(STEP_TOKENS, self._max_streams))


if __name__ == "__main__":
    serve(Sluicegate())
