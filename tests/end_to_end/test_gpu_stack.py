"""A worker on the GPU's kernels through the front door; Triton's interpreter stands in for the GPU."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.synthetic_checkpoint import Shape, write_checkpoint

SHAPE = Shape(hidden=64, ffn=96, layers=1, heads=4, kv_heads=2, vocabulary=260, context=128, group=32)
PROMPT = [256, 84, 104, 101, 32]
NUM_TOKENS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny INT4 checkpoint of random numbers."""
    folder = tmp_path_factory.mktemp("models") / "tiny-int4"
    write_checkpoint(folder, SHAPE)
    return folder


@pytest.fixture(scope="module")
def served(folder: Path, start_stack: Callable, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """A stack whose worker was told to use the GPU."""
    flags = ("--kv-tokens", "128", "--max-sequences", "2", "--integrity", "full", "--kv-dtype", "fp8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLUICEGATE_KERNELS", "gpu")
        patch.setenv("SLUICEGATE_STEP_TOKENS", "8")
        yield from start_stack(tmp_path_factory.mktemp("stack"), "--model", str(folder), *flags)


def _expected(folder: Path) -> list[float]:
    """Log-probabilities of the reference's greedy tokens."""
    import torch

    from kernels.backend import Backend
    from kernels.kv_pool import KvPool
    from worker.model.load import load_model
    from worker.quantize.window_run import run_window

    loaded = load_model(folder, Backend.REF)
    tokens, found = list(PROMPT), []
    for _ in range(NUM_TOKENS):
        pool = KvPool.allocate(loaded.kv_layout(1, 16, "fp8"))
        scores = torch.log_softmax(run_window(loaded.model, pool, tokens, len(tokens) - 1)[0], dim=0)
        tokens.append(int(scores.argmax()))
        found.append(float(scores.max()))
    return found


def test_a_worker_on_the_gpus_kernels_answers(served, folder: Path) -> None:
    """Chat and completions, cold and again; what comes out is what the reference computes."""
    client = served.client()
    ask = {"model": served.model, "temperature": 0, "max_tokens": NUM_TOKENS, "extra_body": {"ignore_eos": True}}
    answers = [client.completions.create(**ask, prompt=PROMPT, logprobs=0) for _ in range(2)]
    chat = client.chat.completions.create(**ask, messages=[{"role": "user", "content": "Hello"}])
    assert pytest.approx(_expected(folder), abs=0.02) == answers[0].choices[0].logprobs.token_logprobs
    assert answers[0].choices == answers[1].choices
    assert NUM_TOKENS == chat.usage.completion_tokens
    assert 0 == served.metric("sluicegate_integrity_violations_total")


def test_its_log_says_what_computes(served) -> None:
    """The event of the loaded model names the kernels and the device."""
    lines = [line for path in served.data.rglob("*.log") for line in path.read_text().splitlines()]
    (event,) = [json.loads(line) for line in lines if '"model_loaded"' in line]
    assert ("gpu", "interpreter") == (event["kernels"], event["device"])
