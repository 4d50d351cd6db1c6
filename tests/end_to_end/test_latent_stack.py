"""A model with latent attention through the front door."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from tokenizers import Tokenizer

PROMPT = "Pages of latent vectors, read by sixteen heads at once. " * 3
NUM_TOKENS = 24


def test_a_deepseek_folder_answers_as_transformers(
    tiny_models: ModuleType, tmp_path: Path, new_stack: Callable
) -> None:
    """Greedy text of a folder that a real gateway and worker serve, every page that is read verified, cold and from cached pages."""
    model = tiny_models.make("deepseek_v3")
    folder = tiny_models.save(model, tmp_path / "tiny")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = tokenizer.encode(PROMPT).ids
    prompt_size = len(tokens)
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            logits = model(torch.tensor([tokens])).logits[0, -1]
            logits[259] = -torch.inf  # the end, which the request forbids
            tokens.append(int(logits.argmax()))
    stack = new_stack("own", "--model", str(folder), "--kv-tokens", "1024", "--kv-dtype", "fp16", "--integrity", "full")

    answers = [
        stack.client().completions.create(
            model=stack.model, prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0, extra_body={"ignore_eos": True}
        )
        for _ in range(2)
    ]

    for answer in answers:
        assert tokenizer.decode(tokens[prompt_size:], skip_special_tokens=False) == answer.choices[0].text
        assert (prompt_size, NUM_TOKENS) == (answer.usage.prompt_tokens, answer.usage.completion_tokens)
    assert answers[1].usage.prompt_tokens_details.cached_tokens > 0
    assert 0 == stack.metric("sluicegate_integrity_violations_total")
