"""What a Hugging Face folder says about its tokenizer, ends and template."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from kernels.backend import Backend
from protocol.model_card import TokenizerSpec
from worker.model.load import load_model
from worker.model.token_bytes import token_bytes

Make = Callable[..., Any]


def _edit(folder: Path, name: str, **fields: Any) -> None:
    """Set fields of a JSON file in the folder; None removes one."""
    path = folder / name
    value = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    value.update(fields)
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not None}), encoding="utf-8")


def _spec(folder: Path) -> TokenizerSpec:
    return load_model(folder, Backend.REF).tokenizer


@pytest.mark.parametrize(
    ("config", "generation", "text", "expected"),
    [
        (259, None, None, (259,)),
        ([259, 260], None, None, (259, 260)),
        (None, 260, None, (260,)),
        (None, [260, 5], None, (5, 260)),
        (7, [260, 5], "</s>", (5, 7, 259, 260)),
        (None, None, "</s>", (259,)),
        (None, None, {"content": "</s>"}, (259,)),
        (None, None, None, ()),
        ([259, 300, 128009], -1, None, (259,)),
        (259, 259, "</s>", (259,)),
    ],
    ids=str,
)
def test_ends(config: Any, generation: Any, text: Any, expected: tuple[int, ...], folder: Path) -> None:
    """The union of config, generation_config and tokenizer; an id outside the vocabulary can't be sampled and is left out."""
    _edit(folder, "config.json", eos_token_id=config)
    _edit(folder, "generation_config.json", eos_token_id=generation)
    _edit(folder, "tokenizer_config.json", eos_token=text)

    assert expected == _spec(folder).eos_token_ids


def _template(*first: str) -> dict[str, Any]:
    single: list[dict[str, Any]] = [{"SpecialToken": {"id": token, "type_id": 0}} for token in first]
    return {
        "type": "TemplateProcessing", "single": [*single, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [258], "tokens": [token]} for token in first},
    }  # fmt: skip


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BOS: dict[str, tuple[dict[str, Any] | None, dict[str, Any], tuple[int | None, bool]]] = {
    "post-processor": (_template("<s>"), {}, (258, True)),
    "sequence of post-processors": (
        {"type": "Sequence", "processors": [BYTE_LEVEL, _template("<s>")]},
        {},
        (258, True),
    ),
    "post-processor adds nothing": (_template(), {}, (258, False)),
    "none": (None, {}, (258, False)),
    "none, but the setting": (None, {"add_bos_token": True}, (258, True)),
    "post-processor, bos not named in the settings": (_template("<s>"), {"bos_token": None}, (258, True)),
}


@pytest.mark.parametrize("case", BOS)
def test_bos(case: str, folder: Path) -> None:
    """Whether a prompt begins with BOS is what the tokenizer itself would do, or what its settings say."""
    processor, settings, expected = BOS[case]
    _edit(folder, "tokenizer.json", post_processor=processor)
    _edit(folder, "tokenizer_config.json", **settings)
    spec = _spec(folder)

    assert expected == (spec.bos_token_id, spec.add_bos)


def test_ids_are_those_of_the_folder(folder: Path, texts: list[str]) -> None:
    """Plain texts get the ids that transformers gives with the same files; control tokens' texts stay plain."""
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    spec = _spec(folder)
    ours = Tokenizer.from_str(spec.tokenizer_json)
    control = dict(spec.control_tokens)
    plain = [text for text in texts if not any(token in text for token in control)]

    assert {"<s>": 258, "</s>": 259, "<|turn|>": 260} == control
    assert len(plain) > 150
    assert [theirs.encode(text, add_special_tokens=False) for text in plain] == [
        ours.encode(text).ids for text in plain
    ]
    assert not set(control.values()) & {index for text in texts for index in ours.encode(text).ids}


def test_bytes_of_tokens(folder: Path, texts: list[str]) -> None:
    """Every text comes back exactly; control tokens and ids without a token add nothing."""
    spec = _spec(folder)
    table = token_bytes(spec)
    tokenizer = Tokenizer.from_str(spec.tokenizer_json)

    assert 300 == len(table)
    assert [b""] * 42 == table[258:]
    assert [text.encode() for text in texts] == [
        b"".join(table[index] for index in tokenizer.encode(text).ids) for text in texts
    ]


def test_merges_that_lead_to_a_control_token(folder: Path) -> None:
    """Where the vocabulary holds control tokens and merges could build one, a user's text still doesn't become its id."""
    document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model = document["model"]
    model["vocab"] |= {"<s": 261, "<s>": 258}
    model["merges"] += [["<", "s"], ["<s", ">"]]
    _edit(folder, "tokenizer.json", model=model)
    spec = _spec(folder)

    ids = Tokenizer.from_str(spec.tokenizer_json).encode("<s>a<s>").ids

    assert 258 not in ids
    assert b"<s>a<s>" == b"".join(token_bytes(spec)[index] for index in ids)


def test_template_file_before_setting(folder: Path) -> None:
    """chat_template.jinja wins over tokenizer_config.json; of several named templates the default is taken; none is none."""
    assert "{{ messages[0].content }}" == _spec(folder).chat_template
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    _edit(folder, "tokenizer_config.json", chat_template=named)
    assert "D" == _spec(folder).chat_template
    (folder / "chat_template.jinja").write_text("J\n", encoding="utf-8")
    assert "J\n" == _spec(folder).chat_template
    (folder / "chat_template.jinja").unlink()
    _edit(folder, "tokenizer_config.json", chat_template=None)
    assert _spec(folder).chat_template is None


def test_digest(folder: Path) -> None:
    """The digest is stable, and another one when a weight, the configuration or the vocabulary changes."""
    digests = [load_model(folder, Backend.REF).digest, load_model(folder, Backend.REF).digest]
    raw = bytearray((folder / "model.safetensors").read_bytes())
    raw[-2] ^= 1
    (folder / "model.safetensors").write_bytes(raw)
    digests.append(load_model(folder, Backend.REF).digest)
    _edit(folder, "config.json", rms_norm_eps=1e-6)
    digests.append(load_model(folder, Backend.REF).digest)
    _edit(folder, "tokenizer.json", normalizer={"type": "NFC"})
    digests.append(load_model(folder, Backend.REF).digest)

    assert digests[0] == digests[1]
    assert 4 == len(set(digests))
    assert all(len(digest) == 64 for digest in digests)


ADDED = {
    "<think>": (261, {"special": False}),
    "</think>": (262, {"special": False}),
    "<｜User｜>": (263, {"special": False}),
    "<tool_call>": (264, {"special": True}),
    "<stripped>": (265, {"special": False, "lstrip": True}),
    "\n\n\n": (266, {"special": False}),
}


def _add_tokens(folder: Path) -> None:
    document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    plain = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    added = [{"id": index, "content": token, **plain, **flags} for token, (index, flags) in ADDED.items()]
    _edit(folder, "tokenizer.json", added_tokens=document["added_tokens"] + added)


def test_added_tokens_that_are_text(folder: Path) -> None:
    """Markup that the file calls not special is text; what separates turns is not, whatever the file calls it."""
    _add_tokens(folder)
    spec = _spec(folder)

    assert {"<think>": 261, "</think>": 262, "\n\n\n": 266} == dict(spec.text_tokens)
    assert {"<s>", "</s>", "<|turn|>", "<｜User｜>", "<tool_call>", "<stripped>"} == set(dict(spec.control_tokens))
    assert [b"<think>", b"</think>", b""] == token_bytes(spec)[261:264]


@pytest.mark.parametrize(
    "text", ["<think>a b</think>", "a<think><think>", "<thin<think>k>", "x\n\n\n\ny", "</think", "<think >"]
)
def test_text_tokens_have_the_ids_of_the_folder(text: str, folder: Path) -> None:
    """A user's `<think>` is the token that transformers makes of it, and comes back as its text."""
    from gateway.intake.encoder import PromptEncoder

    _add_tokens(folder)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    spec = _spec(folder)
    ids = [token for token in PromptEncoder(spec).text(text) if token != spec.bos_token_id]

    assert theirs.encode(text, add_special_tokens=False) == ids
    assert text.encode() == b"".join(token_bytes(spec)[index] for index in ids)
