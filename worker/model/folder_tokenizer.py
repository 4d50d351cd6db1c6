"""The tokenizer in a Hugging Face folder as a TokenizerSpec."""

import json
from pathlib import Path
from typing import Any

from protocol.model_card import TokenizerSpec
from worker.model.errors import ModelError

_MAX_TEMPLATE_BYTES = 1 << 20


def tokenizer_from_folder(folder: Path, vocab_size: int, config: dict[str, Any]) -> TokenizerSpec:
    """From tokenizer.json, tokenizer_config.json, chat_template.jinja, config.json and generation_config.json. Raises ModelError."""
    from worker.model.safetensors_file import read_json

    document = read_json(folder, "tokenizer.json")
    settings = _optional(folder, "tokenizer_config.json")
    generation = _optional(folder, "generation_config.json")
    added = document.get("added_tokens") or []
    try:
        control = {str(token["content"]): int(token["id"]) for token in added}
        model_vocabulary: dict[str, int] = document["model"]["vocab"]
    except (KeyError, TypeError, ValueError):
        raise ModelError(f"{folder / 'tokenizer.json'}: is not a tokenizer with a vocabulary") from None
    largest = max([*model_vocabulary.values(), *control.values()], default=-1)
    if largest >= vocab_size:
        raise ModelError(f"{folder / 'tokenizer.json'}: has token id {largest}, outside the vocabulary of {vocab_size}")
    ids = {**model_vocabulary, **control}
    bos_text = _content(settings.get("bos_token"))
    eos_text = _content(settings.get("eos_token"))
    eos = _ids(config.get("eos_token_id")) | _ids(generation.get("eos_token_id"))
    if eos_text in ids:
        eos.add(ids[eos_text])
    bos = ids.get(bos_text) if bos_text else _one(config.get("bos_token_id"))
    adds_bos = bos is not None and _post_processor_adds(document.get("post_processor"), bos, bos_text)
    return TokenizerSpec(
        tokenizer_json=json.dumps({**document, "added_tokens": [], "post_processor": None}, ensure_ascii=False),
        control_tokens=tuple(sorted(control.items(), key=lambda item: item[1])),
        chat_template=_template(folder, settings),
        bos_token_id=bos,
        add_bos=adds_bos or (bos is not None and settings.get("add_bos_token") is True),
        # An id outside the vocabulary can't be sampled, so it can end nothing: some configs carry one along.
        eos_token_ids=tuple(sorted(token for token in eos if 0 <= token < vocab_size)),
        vocab_size=vocab_size,
    )


def _optional(folder: Path, name: str) -> dict[str, Any]:
    from worker.model.safetensors_file import read_json

    return read_json(folder, name) if (folder / name).exists() else {}


def _content(token: Any) -> str:
    """The text of a token given as a string or as an object."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else ""


def _ids(value: Any) -> set[int]:
    """An id, a list of ids or nothing."""
    values = value if isinstance(value, list) else [value]
    return {item for item in values if type(item) is int}


def _one(value: Any) -> int | None:
    return min(_ids(value), default=None)


def _post_processor_adds(processor: Any, bos: int, bos_text: str) -> bool:
    """Whether the tokenizer's own post-processing puts the BOS token before a text."""
    if not isinstance(processor, dict):
        return False
    if processor.get("type") == "Sequence":
        return any(_post_processor_adds(part, bos, bos_text) for part in processor.get("processors", []))
    single = processor.get("single") or []
    first = single[0] if single and isinstance(single[0], dict) else {}
    return bool(bos_text) and first.get("SpecialToken", {}).get("id") == bos_text


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    from worker.model.safetensors_file import inside

    path = inside(folder, "chat_template.jinja")
    if path.is_file():
        if path.stat().st_size > _MAX_TEMPLATE_BYTES:
            raise ModelError(f"{path}: is larger than {_MAX_TEMPLATE_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named ones: the default is the one for chat
        template = next(
            (t.get("template") for t in template if isinstance(t, dict) and t.get("name") == "default"), None
        )
    return template if isinstance(template, str) else None
