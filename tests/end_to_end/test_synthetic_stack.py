"""A stack without a model: the same door, queue and streams, labelled as what it is."""

import json
import time
import urllib.request
from pathlib import Path

import openai
import pytest

MESSAGES = [{"role": "user", "content": "Tell me something."}]


@pytest.fixture
def synthetic_stack(new_stack):
    return new_stack("synthetic", "--engine", "synthetic", "--workers", "2", "--name", "made-up", "--context", "300")


def _ask(stack, **options):
    return stack.client().chat.completions.create(
        model="made-up", messages=MESSAGES, **{"temperature": 0, "max_tokens": 40, **options}
    )


def test_a_fleet_without_a_model(synthetic_stack) -> None:
    """Labelled in the list of models and in the log; no torch in its processes; answers as an engine's would be."""
    stack = synthetic_stack
    request = urllib.request.Request(stack.url + "/v1/models", headers={"Authorization": f"Bearer {stack.key}"})
    with urllib.request.urlopen(request, timeout=10) as response:
        (listed,) = json.load(response)["data"]
    assert ("made-up", True, 300) == (listed["id"], listed["synthetic"], listed["context_length"])
    for number, pid in enumerate(stack.info["pids"]["workers"]):
        log = stack.data / "logs" / f"worker-{number}.log"
        stack.wait_for(lambda log=log: "worker_ready" in log.read_text(), 20)
        assert "engine_is_synthetic" in log.read_text()
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()

    whole = _ask(stack, logprobs=True, top_logprobs=2)
    text = whole.choices[0].message.content
    assert 40 == whole.usage.completion_tokens == len(whole.choices[0].logprobs.content)
    with _ask(stack, stream=True) as stream:
        assert text == "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    word = text.split()[9]
    assert text[: text.index(word)] == _ask(stack, stop=[word]).choices[0].message.content
    seeded = [_ask(stack, temperature=1, seed=seed, n=2).choices for seed in (7, 7, 8)]
    assert [choice.message.content for choice in seeded[0]] == [choice.message.content for choice in seeded[1]]
    assert 4 == len({choice.message.content for choices in seeded for choice in choices})
    with pytest.raises(openai.BadRequestError, match="300"):
        _ask(stack, max_tokens=400)


def test_rates_deadlines_and_cancellation(new_stack) -> None:
    """A slow stream is cut at its deadline, and one that nobody reads any more frees its pages."""
    stack = new_stack("slow", "--engine", "synthetic", "--decode-rate", "20", "--prefill-rate", "2000")
    with stack.client().chat.completions.create(
        model="synthetic", messages=MESSAGES, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(stream)
        stack.wait_for(lambda: stack.metric("sluicegate_worker_running_sequences") == 1, 5)
    stack.wait_for(lambda: stack.metric("sluicegate_worker_running_sequences") == 0, 5)
    assert 0 == stack.metric("sluicegate_worker_pages", state="held")
    started_s = time.monotonic()
    with pytest.raises(openai.APIStatusError) as ended:
        stack.client().chat.completions.create(
            model="synthetic", messages=MESSAGES, max_tokens=2000, extra_body={"ignore_eos": True, "timeout": 1}
        )
    assert "deadline" in str(ended.value) or "time limit" in str(ended.value)
    assert time.monotonic() - started_s > 0.9
