"""The weights of tokens are what transformers' own derivatives give."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from worker.quantize.job import Options, prepare
from worker.quantize.layer_reader import LayerReader
from worker.quantize.token_weights import draw, token_weights

Make = Callable[..., Path]
MODULES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}  # fmt: skip


def _reader(folder: Path) -> LayerReader:
    reader = prepare(folder, Options(method="gptq")).reader
    assert reader is not None
    return reader


@pytest.mark.parametrize("is_tied", [False, True], ids=["head", "tied"])
def test_weights_are_mean_squares_of_derivatives(is_tied: bool, make_folder: Make, tmp_path: Path) -> None:
    """Of the loss of the drawn tokens by each matrix' output, from one pass through the whole model; the file in between is gone afterwards."""
    folder = make_folder(dtype=torch.float32, tie_word_embeddings=is_tied)
    reader, told = _reader(folder), []
    windows = torch.randint(384, (2, 512), generator=torch.Generator().manual_seed(2))
    found = token_weights(reader, windows, tmp_path, lambda: told.append(1))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    outputs: dict[tuple[int, str], torch.Tensor] = {}
    for layer, role in [(layer, role) for layer in range(3) for role in MODULES]:
        module = model.get_submodule(f"model.layers.{layer}.{MODULES[role]}")
        module.register_forward_hook(lambda module, given, made, key=(layer, role): outputs.__setitem__(key, made))
    x = model.model(windows).last_hidden_state
    drawn, _ = draw(reader, x.detach())
    loss = torch.nn.functional.cross_entropy(model.lm_head(x).flatten(0, 1), drawn.flatten(), reduction="sum")
    derivatives = torch.autograd.grad(loss, list(outputs.values()))

    assert len(told) == 6
    assert not list(tmp_path.glob("*.part"))
    for (layer, role), derivative in zip(outputs, derivatives, strict=True):
        expected = derivative.square().mean(dim=2)
        # What layers are given lies in 16 bits meanwhile.
        error = (found[layer][role] - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        assert float(error) < 0.02, (layer, role)


def test_tokens_are_drawn_from_the_model(make_folder: Make) -> None:
    """As often as their probability says, within what chance allows; and the same ones each time."""
    reader = _reader(make_folder(dtype=torch.float32, tie_word_embeddings=False, initializer_range=0.05))
    hidden = torch.randn(128, generator=torch.Generator().manual_seed(3)).expand(40, 500, 128)
    drawn, total = draw(reader, hidden)
    logits = torch.cat([hidden[0, 0] @ rows.t() for _, rows in reader.head()])
    counts = drawn.flatten().bincount(minlength=384)
    expected = logits.softmax(dim=0) * counts.sum()

    assert torch.equal(drawn, draw(reader, hidden)[0])
    assert torch.allclose(total, logits.logsumexp(dim=0).expand(40, 500), atol=1e-4)
    distance = float(((counts - expected).square() / expected).sum())  # chi squared of 383 degrees of freedom
    assert 250 < distance < 540
