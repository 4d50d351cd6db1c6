"""Engines of the real model, driven step by step, with invariants checked after each step."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from kernels.backend import resolve
from kernels.kv_pool import KvPool
from protocol.job import Job, SamplingParams
from protocol.replies import Delta, PromptLogprobs
from worker.cache.namespace import NamespaceRing
from worker.engine import Engine, EngineParts
from worker.model.load import LoadedModel, load_model
from worker.model.token_bytes import token_bytes
from worker.model_executor import ModelExecutor

NEVER_MS = 2**60


class Lab:
    """Makes engines and jobs, and runs them."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.token_bytes = tuple(token_bytes(loaded.tokenizer))
        self._tokenizer = Tokenizer.from_str(loaded.tokenizer.tokenizer_json)
        self._num_jobs = 0
        self.now_ms = 0

    def engine(
        self, kv_tokens: int = 4096, page_size: int = 16, kv_dtype: str = "bf16", max_sequences: int = 32, step_tokens: int = 256,
        checks_leases: bool = True, integrity: str = "lease",
    ) -> Engine:  # fmt: skip
        num_pages = kv_tokens // page_size
        secret = b"seal" * 8 if integrity in ("seal", "full") else None
        layout, backend = self.loaded.kv_layout(num_pages, page_size, kv_dtype), self.loaded.backend
        kv = KvPool.allocate(layout, seal_secret=secret, backend=backend)
        parts = EngineParts(
            executor=ModelExecutor(self.loaded.model, kv, backend, checks_reads=integrity == "full"),
            namespaces=NamespaceRing(b"s" * 32, self.loaded.digest, kv_dtype),
            token_bytes=self.token_bytes,
            eos_token_ids=frozenset(self.loaded.tokenizer.eos_token_ids),
            max_request_tokens=num_pages * page_size,
            worker_id="w",
            checks_leases=checks_leases,
            now=lambda: 0.0,
            now_ms=lambda: self.now_ms,
        )
        return Engine(parts, max_sequences, step_tokens)

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def job(self, prompt: str | tuple[int, ...], tenant: str = "t", n: int = 1, salt: str | None = None, echo: int | None = None,
            **options) -> Job:  # fmt: skip
        self._num_jobs += 1
        sampling = SamplingParams(**{"max_tokens": 16, "seed": 1, "temperature": 0.0, **options})
        ids = self.ids(prompt) if isinstance(prompt, str) else prompt
        return Job(
            f"r{self._num_jobs}",
            "g",
            tenant,
            "m",
            ids,
            sampling,
            0,
            NEVER_MS,
            n=n,
            cache_salt=salt,
            prompt_logprobs=echo,
        )

    def run(self, engine: Engine, *jobs: Job, on_step: Callable[[int], None] = lambda number: None) -> list[list]:
        """Submit jobs together and step until all have ended; each one's replies."""
        replies: dict[str, list] = {job.request_id: [] for job in jobs}
        for job in jobs:
            engine.submit(job)
        number = 0
        while engine.has_work:
            number += 1
            assert number < 5000, "the engine makes no progress"
            on_step(number)
            for outgoing in engine.step():
                replies.setdefault(outgoing.envelope.request_id, []).append(outgoing.envelope.reply)
            engine.check_invariants()
        for outgoing in engine.take_replies():
            replies.setdefault(outgoing.envelope.request_id, []).append(outgoing.envelope.reply)
        return [replies[job.request_id] for job in jobs]


def outcome(replies: list) -> list:
    """What a client could tell apart: per sample the text, tokens, logprobs and finish reason, and the prompt's logprobs."""
    deltas = [reply for reply in replies if isinstance(reply, Delta)]
    prompts = [reply for reply in replies if isinstance(reply, PromptLogprobs)]
    return prompts + [
        (
            index,
            "".join(delta.text for delta in deltas if delta.index == index),
            [token for delta in deltas if delta.index == index for token in delta.token_ids],
            [entry for delta in deltas if delta.index == index for entry in delta.logprobs],
            [delta.finish_reason for delta in deltas if delta.index == index and delta.finish_reason],
        )
        for index in sorted({delta.index for delta in deltas})
    ]


@pytest.fixture(scope="session")
def lab(smollm2_path: Path) -> Lab:
    return Lab(load_model(smollm2_path, resolve("cpu")))


@pytest.fixture(scope="session")
def lab_of() -> type[Lab]:
    """Makes a lab of any loaded model."""
    return Lab


@pytest.fixture(scope="session")
def small_lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A lab with a small random model: 256 tokens, one for each byte."""
    folder = tmp_path_factory.mktemp("small")
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1,
        max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: place for place, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return Lab(load_model(folder, resolve("cpu")))


@pytest.fixture(scope="session")
def result_of() -> Callable[[list], list]:
    return outcome
