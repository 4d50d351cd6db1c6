"""The tokenizer in a Hugging Face folder as a TokenizerSpec."""

import json
from pathlib import Path
from typing import Any

from protocol.model_card import TokenizerSpec
from worker.model.added_tokens import is_text
from worker.model.errors import ModelError
from worker.model.folder import inside, read_json
from worker.model.tokenizer_json import check_document, without_tokens

_MAX_TEMPLATE_BYTES = 1 << 20


def tokenizer_from_folder(folder: Path, vocab_size: int, config: dict[str, Any]) -> TokenizerSpec:
    """From tokenizer.json, tokenizer_config.json, chat_template.jinja, config.json and generation_config.json. Raises ModelError."""
    document = read_json(folder, "tokenizer.json")
    settings = _optional(folder, "tokenizer_config.json")
    generation = _optional(folder, "generation_config.json")
    source = str(folder / "tokenizer.json")
    try:
        control: dict[str, int] = {str(token["content"]): token["id"] for token in document.get("added_tokens") or []}
        model = _bpe_model(document, source)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ModelError(f"{source}: is not a tokenizer with a vocabulary") from None
    ids = {**model["vocab"], **control}
    _check_ids(ids, vocab_size, source)
    if isinstance(nested := config.get("text_config"), dict):  # a model of several parts
        config = config | nested
    first = _first_added(document.get("post_processor"))
    bos_text = _content(settings.get("bos_token")) or first
    eos_text = _content(settings.get("eos_token"))
    eos = _ids(config.get("eos_token_id")) | _ids(generation.get("eos_token_id"))
    if eos_text in ids:
        eos.add(ids[eos_text])
    bos = ids.get(bos_text) if bos_text else _one(config.get("bos_token_id"))
    if bos is not None and not 0 <= bos < vocab_size:
        raise ModelError(f"{folder / 'config.json'}: bos_token_id {bos} is outside the vocabulary of {vocab_size}")
    steering = {token for token, index in ids.items() if index == bos or index in eos}
    text = {token: control[token] for token in _not_special(document) if is_text(token, steering)}
    return TokenizerSpec(
        tokenizer_json=_plain(document, model, set(control), source),
        control_tokens=_sorted({token: index for token, index in control.items() if token not in text}),
        chat_template=_template(folder, settings),
        bos_token_id=bos,
        add_bos=bos is not None and (bos_text == first != "" or settings.get("add_bos_token") is True),
        # An id outside the vocabulary can't be sampled, so it can end nothing: some configs carry one along.
        eos_token_ids=tuple(sorted(token for token in eos if 0 <= token < vocab_size)),
        vocab_size=vocab_size,
        text_tokens=_sorted(text),
    )


def _sorted(tokens: dict[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(tokens.items(), key=lambda item: item[1]))


def _not_special(document: dict[str, Any]) -> list[str]:
    """Added tokens that the file calls ordinary text and that are found wherever they stand."""
    flags = ("special", "lstrip", "rstrip", "single_word")
    return [str(t["content"]) for t in document.get("added_tokens") or [] if not any(t.get(flag) for flag in flags)]


def _bpe_model(document: dict[str, Any], source: str) -> dict[str, Any]:
    """The tokenizer's model with merges as pairs: older files write "a b"."""
    model = document["model"]
    if model.get("type") != "BPE":
        raise ModelError(f"{source}: tokenizer model {str(model.get('type'))[:50]!r} is not supported (BPE is)")
    pairs = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
    if not all(len(pair) == 2 and all(isinstance(part, str) for part in pair) for pair in pairs):
        raise ModelError(f"{source}: a merge is not two tokens")
    return {**model, "vocab": dict(model["vocab"]), "merges": pairs}


def _plain(document: dict[str, Any], model: dict[str, Any], control: set[str], source: str) -> str:
    """The tokenizer for plain text: nothing that a user writes becomes a control token."""
    try:
        # The unknown token stays for characters that have no other; no merge leads to it.
        model = without_tokens(model, control, kept={str(model.get("unk_token"))})
    except ValueError as error:
        raise ModelError(f"{source}: {error}") from None
    plain = json.dumps({**document, "added_tokens": [], "post_processor": None, "model": model}, ensure_ascii=False)
    check_document(plain, source)
    return plain


def _check_ids(ids: dict[str, Any], vocab_size: int, source: str) -> None:
    for token, index in ids.items():
        if type(index) is not int or not 0 <= index < vocab_size:
            raise ModelError(
                f"{source}: token {token[:50]!r} has id {str(index)[:30]}, outside the vocabulary of {vocab_size}"
            )
    if len(set(ids.values())) != len(ids):
        raise ModelError(f"{source}: two tokens have the same id")


def _optional(folder: Path, name: str) -> dict[str, Any]:
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


def _first_added(processor: Any) -> str:
    """The token that the tokenizer's own post-processing puts before a text, or nothing."""
    if not isinstance(processor, dict):
        return ""
    if processor.get("type") == "Sequence":
        parts = processor.get("processors")
        return next(filter(None, map(_first_added, parts)), "") if isinstance(parts, list) else ""
    single = processor.get("single")
    first = single[0] if isinstance(single, list) and single else None
    special = first.get("SpecialToken") if isinstance(first, dict) else None
    return _content(special.get("id")) if isinstance(special, dict) else ""


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    path = inside(folder, "chat_template.jinja")
    if path.is_file():
        if path.stat().st_size > _MAX_TEMPLATE_BYTES:
            raise ModelError(f"{path}: is larger than {_MAX_TEMPLATE_BYTES} bytes")
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise ModelError(f"{path}: cannot be read as UTF-8 text") from None
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named ones: the default is the one for chat
        template = next(
            (t.get("template") for t in template if isinstance(t, dict) and t.get("name") == "default"), None
        )
    return template if isinstance(template, str) else None
