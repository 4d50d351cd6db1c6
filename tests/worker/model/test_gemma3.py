"""Gemma 3 270M (GGUF, Q4_K_M) against transformers' own implementation and SentencePiece, with the same weights and pieces.

Its terms are for whoever fetches it to accept, so it's not fetched here: these tests run where `sluicegate model pull gemma-3-270m` has.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gguf
import pytest
import sentencepiece
import torch
from sentencepiece import sentencepiece_model_pb2 as pieces_format
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from gateway.intake.encoder import PromptEncoder
from kernels.backend import Backend, resolve
from sluicegate.model_store import KNOWN_MODELS, model_path
from worker.model.gguf_header import read_header
from worker.model.load import LoadedModel, load_model

PATH = model_path(KNOWN_MODELS["gemma-3-270m"])
TEXT = "The quick brown fox jumps over the lazy dog.\n\n  In the beginning, there was <code>0</code> and 東京. " * 2
Make = Callable[..., Any]

pytestmark = pytest.mark.skipif(
    not PATH.is_file(), reason="Gemma 3 270M is not in the store: sluicegate model pull gemma-3-270m"
)


@pytest.fixture(scope="module")
def native() -> LoadedModel:
    """The model by the native kernels."""
    return load_model(PATH, resolve("cpu"))


@pytest.fixture(scope="module")
def encode(native: LoadedModel) -> Callable[[str], list[int]]:
    """Text to ids, as the gateway does it."""
    encoder = PromptEncoder(native.tokenizer)
    return lambda text: list(encoder.text(text))


@pytest.fixture(scope="module")
def reference() -> Gemma3ForCausalLM:
    """transformers' model with the file's weights, dequantized by the `gguf` package."""
    config = Gemma3TextConfig(
        vocab_size=262144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4, num_key_value_heads=1,
        head_dim=256, max_position_embeddings=32768, rms_norm_eps=1e-6, sliding_window=512, query_pre_attn_scalar=256,
    )  # fmt: skip
    config._attn_implementation = "eager"
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, 18)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(PATH).tensors}
    with torch.device("meta"):
        model = Gemma3ForCausalLM(config)
    state = {}
    for name, _ in model.named_parameters():
        tensor = tensors[f"{names.get_name(name.removesuffix('.weight'))}.weight"]
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        state[name] = values - 1.0 if "norm" in name else values  # stored with their 1
    model.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]}, assign=True)
    with torch.device("cpu"):
        fresh = Gemma3ForCausalLM._from_config(
            Gemma3TextConfig(**(config.to_dict() | {"vocab_size": 8, "num_hidden_layers": 1, "layer_types": None}))
        )
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are not part of the state
    model.model.embed_tokens.embed_scale = fresh.model.embed_tokens.embed_scale
    return model.eval()


def _logits(reference: Gemma3ForCausalLM, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = reference(torch.tensor([tokens])).logits[0]
    return logits


def test_logits_of_the_reference_kernels(
    reference: Gemma3ForCausalLM, encode: Make, paged_run: Make, relative_error: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a pool that rounds no keys and values, the logits of some text are the reference's, to float32's own noise."""
    run = paged_run(load_model(PATH, Backend.REF))
    run.pool = replace(run.pool, k=torch.zeros(run.pool.k.shape), v=torch.zeros(run.pool.v.shape))
    monkeypatch.setattr("kernels.kv_write.ref.encode", lambda values, *_: values)
    tokens = encode(TEXT)[:12]  # the reference dequantizes a quarter of a million rows of the head for each 16
    (logits,) = run.feed(("a", tokens))

    error = relative_error(logits, _logits(reference, tokens))
    print(f"relative error {error:.1e}")

    assert error < 1e-4


@pytest.mark.parametrize(("dtype", "bound"), [("fp16", 2e-3), ("bf16", 1.5e-2)])
def test_logits(native: LoadedModel, reference: Gemma3ForCausalLM, encode: Make, paged_run: Make, relative_error: Make, dtype: str, bound: float) -> None:  # fmt: skip
    """Logits of the native kernels: how activations, keys and values are rounded accounts for the distance."""
    tokens = encode(TEXT)
    (logits,) = paged_run(native, dtype).feed(("a", tokens))

    error = relative_error(logits, _logits(reference, tokens))
    print(f"relative error {dtype}: {error:.1e}")

    assert error < bound


def test_a_window_bites(
    native: LoadedModel, reference: Gemma3ForCausalLM, encode: Make, paged_run: Make, relative_error: Make
) -> None:
    """600 tokens, more than the window of 512: the last logits are the reference's."""
    tokens = (encode(TEXT) * 12)[:600]
    run = paged_run(native, "fp16")
    logits = run.forward([("a", tokens)], torch.tensor([598, 599]))

    assert relative_error(logits, _logits(reference, tokens)[-2:]) < 2e-3


def test_greedy(native: LoadedModel, reference: Gemma3ForCausalLM, encode: Make, paged_run: Make) -> None:
    """24 greedy tokens are the reference's choices after all before them, but for near ties."""
    run, tokens = paged_run(native, "fp16"), encode("The capital of France is")
    start = len(tokens)
    (logits,) = run.feed(("a", tokens))
    for _ in range(24):
        tokens.append(int(logits[-1].argmax()))
        (logits,) = run.feed(("a", tokens[-1:]))
    theirs = _logits(reference, tokens)[start - 1 : -1]
    chosen = theirs.gather(1, torch.tensor(tokens[start:]).unsqueeze(1)).squeeze(1)

    assert float((theirs.amax(dim=1) - chosen).max()) < 0.02


@pytest.fixture(scope="module")
def sentences() -> sentencepiece.SentencePieceProcessor:
    """SentencePiece itself, with the file's pieces and scores."""
    metadata = read_header(PATH).metadata
    model = pieces_format.ModelProto()
    model.trainer_spec.model_type = model.trainer_spec.BPE
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.unk_id, model.trainer_spec.bos_id, model.trainer_spec.eos_id, model.trainer_spec.pad_id = (
        3,
        2,
        1,
        0,
    )
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    rows = zip(*(metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type")), strict=True)
    for index, (token, score, kind) in enumerate(rows):
        # The file has spaces where SentencePiece has its mark, in user-defined pieces alone.
        piece = token.replace(" ", "▁") if kind == 4 else token
        model.pieces.add(piece=piece, score=score, type=2 if index == 3 else kind)
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


def test_tokenizer(
    sentences: sentencepiece.SentencePieceProcessor, encode: Make, texts: list[str], english: str
) -> None:
    """280 texts and a thousand lines get SentencePiece's own ids behind BOS, but for tags that could be taken for control tokens."""
    sample = [
        text for text in texts if "\x00" not in text and "<s>" not in text and "</s>" not in text and "▁" not in text
    ]
    sample += english.splitlines()[:1000]

    different = {
        text: (sentences.encode(text), encode(text)[1:])
        for text in sample
        if sentences.encode(text) != encode(text)[1:]
    }

    assert {} == different
