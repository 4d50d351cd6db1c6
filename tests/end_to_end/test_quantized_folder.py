"""An INT4 folder in compressed-tensors' format, served by real processes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from bench.synthetic_checkpoint import Shape, write_checkpoint

SHAPE = Shape(hidden=64, ffn=96, layers=2, heads=4, kv_heads=2, vocabulary=300, context=256, group=32)
PROMPT = "The gate opens slowly."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny checkpoint of random numbers."""
    write_checkpoint(tmp_path / "tiny-int4", SHAPE)
    return tmp_path / "tiny-int4"


def _reference(folder: Path) -> LlamaForCausalLM:
    """The same model in float32, its matrices unpacked straight from the format's definition."""
    config = LlamaConfig.from_pretrained(folder)
    del config.quantization_config
    model = LlamaForCausalLM(config).eval()
    stored = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for name, parameter in model.named_parameters():
        packed = stored.get(name.removesuffix("weight") + "weight_packed")
        if packed is None:
            parameter.data = stored[name].float()
            continue
        words = packed.numpy().view(np.uint32)
        codes = np.stack([(words >> np.uint32(4 * i)) & np.uint32(15) for i in range(8)], axis=2).reshape(
            len(words), -1
        )
        scale = stored[name + "_scale"].double().numpy().repeat(SHAPE.group, axis=1)
        parameter.data = torch.from_numpy((codes.astype(np.float64) - 8) * scale).float()
    return model


def test_int4_folder_through_the_front_door(new_stack, folder: Path) -> None:
    """Listed, and answering with the tokens and log-probabilities that the reference gives, streamed and whole alike."""
    stack = new_stack("int4", "--model", str(folder))
    client = stack.client()
    assert "tiny-int4" == stack.model
    options = {
        "model": stack.model,
        "prompt": PROMPT,
        "temperature": 0,
        "max_tokens": 12,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.completions.create(**options, logprobs=1)
    with client.completions.create(**options, stream=True) as stream:
        assert whole.choices[0].text == "".join(chunk.choices[0].text for chunk in stream)

    assert 12 == whole.usage.completion_tokens
    with torch.no_grad():
        tokens = torch.tensor([[256, *PROMPT.encode()]])
        first = torch.log_softmax(_reference(folder)(tokens[:, -whole.usage.prompt_tokens :]).logits[0, -1], dim=0)
    assert abs(float(first.max()) - whole.choices[0].logprobs.token_logprobs[0]) < 0.02


def test_a_spoilt_shard_is_named_before_the_stack_is_ready(new_stack, folder: Path) -> None:
    """A shard that was cut stops the worker with one line that names it."""
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])

    with pytest.raises(AssertionError, match=shard.name):
        new_stack("spoilt", "--model", str(folder))
