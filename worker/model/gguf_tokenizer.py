"""The tokenizer in a GGUF file's metadata as a TokenizerSpec."""

from typing import Any

from protocol.model_card import TokenizerSpec
from worker.model.added_tokens import is_text
from worker.model.errors import ModelError
from worker.model.tokenizer_json import byte_level_bpe, check_document, sentencepiece_bpe

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
# Tokens that end a turn in chat formats whose files name only one end-of-text token.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|eom_id|>")
# Where the file doesn't say whether a prompt begins with BOS, these kinds do, as in llama.cpp.
_ADDS_BOS = ("llama-bpe", "llama3")


class _Metadata:
    """Checked access to `tokenizer.*` metadata."""

    def __init__(self, metadata: dict[str, Any], vocab_size: int, label: str) -> None:
        self._metadata = metadata
        self.vocab_size = vocab_size
        self.label = label

    def error(self, problem: str) -> ModelError:
        return ModelError(f"{self.label}: {problem}")

    def optional(self, name: str, kind: type) -> Any:
        value = self._metadata.get("tokenizer." + name)
        if value is not None and type(value) is not kind:
            raise self.error(f"metadata 'tokenizer.{name}' must be {kind.__name__}, got {type(value).__name__}")
        return value

    def items(self, name: str, kind: type, count: int | None) -> list[Any]:
        values = self.optional(name, list)
        if values is None:
            raise self.error(f"metadata 'tokenizer.{name}' is missing")
        if count is not None and len(values) != count:
            raise self.error(f"metadata 'tokenizer.{name}' has {len(values)} entries, expected {count}")
        if any(type(value) is not kind for value in values):
            raise self.error(f"metadata 'tokenizer.{name}' must hold {kind.__name__} only")
        return list(values)

    def token_id(self, name: str) -> int | None:
        value = self.optional(name, int)
        if value is not None and not 0 <= value < self.vocab_size:
            raise self.error(f"metadata 'tokenizer.{name}' {value} is outside the vocabulary")
        return None if value is None else int(value)


def tokenizer_from_metadata(metadata: dict[str, Any], vocab_size: int, label: str) -> TokenizerSpec:
    """Convert; raises ModelError for a kind of tokenizer that isn't known here."""
    fields = _Metadata(metadata, vocab_size, label)
    model = fields.optional("ggml.model", str)
    tokens = fields.items("ggml.tokens", str, vocab_size)
    if len(set(tokens)) != len(tokens):
        raise fields.error("the vocabulary has a token twice")
    types = fields.items("ggml.token_type", int, vocab_size)
    if model == "gpt2":
        document = _byte_level(fields, tokens, types)
    elif model == "llama":
        document = _sentencepiece(fields, tokens, types)
    else:
        raise fields.error(f"tokenizer model {model!r} is not supported (gpt2 and llama are)")
    check_document(document, label)
    add_bos = fields.optional("ggml.add_bos_token", bool)
    by_default = model == "llama" or fields.optional("ggml.pre", str) in _ADDS_BOS
    bos = fields.token_id("ggml.bos_token_id")
    eos = _eos(fields, tokens, types)
    control, text = _added_tokens(tokens, types, {tokens[index] for index in (bos, *eos) if index is not None})
    return TokenizerSpec(
        tokenizer_json=document,
        control_tokens=control,
        chat_template=fields.optional("chat_template", str),
        bos_token_id=bos,
        add_bos=bos is not None and (by_default if add_bos is None else add_bos),
        eos_token_ids=eos,
        vocab_size=vocab_size,
        text_tokens=text,
    )


_Tokens = tuple[tuple[str, int], ...]


def _added_tokens(tokens: list[str], types: list[int], steering: set[str]) -> tuple[_Tokens, _Tokens]:
    """Control tokens, and those that are text."""
    rows = [(token, index, kind) for index, (token, kind) in enumerate(zip(tokens, types, strict=True)) if token]
    text = tuple((t, index) for t, index, kind in rows if kind == _USER_DEFINED and is_text(t, steering))
    added = ((t, index) for t, index, kind in rows if kind in (_CONTROL, _USER_DEFINED))
    return tuple(row for row in added if row not in set(text)), text


def _eos(fields: _Metadata, tokens: list[str], types: list[int]) -> tuple[int, ...]:
    named = {fields.token_id(f"ggml.{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
    turns = {i for i, token in enumerate(tokens) if token in _END_OF_TURN and types[i] in (_CONTROL, _USER_DEFINED)}
    return tuple(sorted({index for index in named if index is not None} | turns))


def _byte_level(fields: _Metadata, tokens: list[str], types: list[int]) -> str:
    kind = fields.optional("ggml.pre", str)
    if kind is None:
        raise fields.error("metadata 'tokenizer.ggml.pre' is missing: it says how text is split")
    merges = []
    for merge in fields.items("ggml.merges", str, None):
        left, space, right = merge.partition(" ")
        if not space or not left or not right:
            raise fields.error("a tokenizer merge is not two tokens")
        merges.append((left, right))
    try:
        return byte_level_bpe(tokens, merges, kind, excluded=_of_types(tokens, types, _CONTROL, _USER_DEFINED))
    except ValueError as error:
        raise fields.error(str(error)) from None


def _sentencepiece(fields: _Metadata, tokens: list[str], types: list[int]) -> str:
    scores = fields.items("ggml.scores", float, len(tokens))
    unknown = types.index(_UNKNOWN) if _UNKNOWN in types else fields.token_id("ggml.unknown_token_id")
    if unknown is None:
        raise fields.error("the vocabulary has no unknown token")
    prefix = fields.optional("ggml.add_space_prefix", bool)
    excluded = _of_types(tokens, types, _CONTROL, _USER_DEFINED) - {tokens[unknown]}
    return sentencepiece_bpe(
        tokens,
        scores,
        tokens[unknown],
        add_space_prefix=prefix is not False,
        unmerged=set(tokens) - excluded - _of_types(tokens, types, _NORMAL),
        excluded=excluded,
    )


def _of_types(tokens: list[str], types: list[int], *wanted: int) -> set[str]:
    return {token for token, kind in zip(tokens, types, strict=True) if kind in wanted}
