"""Folders of other architectures than the default model's, through the front door."""

from collections.abc import Iterator
from types import ModuleType

import pytest


@pytest.fixture(scope="module", params=["qwen3_moe", "gemma3"])
def served(request, start_stack, tiny_models: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """A stack that serves a tiny folder, and the model in transformers."""
    model = tiny_models.make(request.param, kv_dtype="fp16")
    folder = tiny_models.save(model, tmp_path_factory.mktemp("models") / f"tiny-{request.param}")
    flags = ("--model", str(folder), "--kv-dtype", "fp16", "--kv-tokens", "2048", "--integrity", "full")
    for stack in start_stack(tmp_path_factory.mktemp("stack"), *flags):
        yield stack, model


def test_the_folder_is_served(served) -> None:
    """Greedy tokens with their logprobs are transformers', streams equal whole answers, and the second time the prefix is cached."""
    import torch

    stack, model = served
    prompt = [258, *((37 * i + i * i) % 256 for i in range(60))]
    ask = {
        "model": stack.model,
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 12,
        "logprobs": 1,
        "extra_body": {"ignore_eos": True},
    }
    first = stack.client().completions.create(**ask)
    again = stack.client().completions.create(**ask)
    streamed = [
        chunk.choices[0].text for chunk in stack.client().completions.create(**ask, stream=True) if chunk.choices
    ]

    expected, tokens = [], list(prompt)
    with torch.no_grad():
        for _ in range(12):
            scores = model(torch.tensor([tokens])).logits[0, -1].log_softmax(dim=0)
            tokens.append(int(scores.argmax()))
            expected.append(float(scores.max()))
    assert stack.model.startswith("tiny-")
    assert pytest.approx(expected, abs=2e-3) == first.choices[0].logprobs.token_logprobs
    assert first.choices[0].text == again.choices[0].text == "".join(streamed)
    assert first.choices[0].logprobs.token_logprobs == again.choices[0].logprobs.token_logprobs
    assert again.usage.prompt_tokens_details.cached_tokens >= 48
