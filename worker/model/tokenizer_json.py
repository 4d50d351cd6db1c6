"""Tokenizers in the JSON form of Hugging Face's `tokenizers`, without added tokens and post-processing: text to ordinary tokens only."""

import json
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from worker.model.errors import ModelError

# What splits text before byte-level BPE, by the name that GGUF files use. GPT-2's own regex is built into `ByteLevel`.
_LLAMA3_REGEX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2_REGEX = _LLAMA3_REGEX.replace(r"\p{N}{1,3}", r"\p{N}")

BYTE_LEVEL_KINDS = ("gpt-2", "smollm", "llama-bpe", "llama3", "qwen2")


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def _pre_tokenizer(kind: str) -> dict[str, Any]:
    if kind == "gpt-2":
        return _byte_level(use_regex=True)
    if kind == "smollm":
        parts = [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)]
    else:
        regex = _QWEN2_REGEX if kind == "qwen2" else _LLAMA3_REGEX
        parts = [_split(regex), _byte_level(use_regex=False)]
    return {"type": "Sequence", "pretokenizers": parts}


def _document(model: dict[str, Any], **parts: Any) -> str:
    document = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": None, "post_processor": None, "decoder": None, "model": model, **parts,
    }  # fmt: skip
    return json.dumps(document, ensure_ascii=False)


def without_tokens(
    model: dict[str, Any], excluded: AbstractSet[str], *, kept: AbstractSet[str] = frozenset()
) -> dict[str, Any]:
    """A BPE model whose text can't become these tokens: no merge makes or takes one, and no lookup finds one that isn't in `kept`.

    Raises ValueError for a merge of or to a token that isn't there.
    """
    for left, right in model["merges"]:
        if not {left, right, left + right} <= model["vocab"].keys():
            raise ValueError(f"merge of {left[:50]!r} and {right[:50]!r}: not all are in the vocabulary")
    merges = [pair for pair in model["merges"] if not excluded & {*pair, "".join(pair)}]
    vocabulary = {token: index for token, index in model["vocab"].items() if token in kept or token not in excluded}
    return {**model, "vocab": vocabulary, "merges": merges}


def check_document(document: str, source: str) -> None:
    """Raise ModelError unless `tokenizers` can build the tokenizer: a gateway would find out too late."""
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_str(document)
    except BaseException as error:
        # The package raises plain Exception; a panic in its Rust code comes as a BaseException.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{source}: is no usable tokenizer: {reason}") from None


def byte_level_bpe(
    tokens: Sequence[str], merges: Sequence[tuple[str, str]], kind: str, *, excluded: AbstractSet[str] = frozenset()
) -> str:
    """A GPT-2 style tokenizer that never gives an `excluded` token; `kind` is one of BYTE_LEVEL_KINDS, ValueError otherwise."""
    if kind not in BYTE_LEVEL_KINDS:
        raise ValueError(f"pre-tokenizer {kind!r} is not supported ({', '.join(BYTE_LEVEL_KINDS)} are)")
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        # Llama 3 takes a whole word that is a token as it is, whatever the merges say.
        "ignore_merges": kind in ("llama-bpe", "llama3"),
        "vocab": {token: index for index, token in enumerate(tokens)},
        "merges": [list(pair) for pair in merges],
    }  # fmt: skip
    normalizer = {"type": "NFC"} if kind == "qwen2" else None
    return _document(without_tokens(model, excluded), pre_tokenizer=_pre_tokenizer(kind), normalizer=normalizer)


def sentencepiece_bpe(
    tokens: Sequence[str],
    scores: Sequence[float],
    unknown: str,
    *,
    add_space_prefix: bool,
    unmerged: AbstractSet[str] = frozenset(),
    excluded: AbstractSet[str] = frozenset(),
) -> str:
    """A SentencePiece BPE tokenizer (Llama 1 and 2): merges are all splits of tokens into tokens, the best score first.

    No merge makes or takes an `unmerged` token (bytes, unknown); text never becomes an `excluded` one either.
    """
    vocabulary = {token: index for index, token in enumerate(tokens)}
    ranked: list[tuple[float, int, str, str]] = []
    for index, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-scores[index], index, left, right))
    ranked.sort(key=lambda row: (row[0], vocabulary[row[2]], vocabulary[row[3]]))
    model = {
        "type": "BPE", "dropout": None, "unk_token": unknown, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
        "vocab": vocabulary, "merges": [[left, right] for _, _, left, right in ranked],
    }  # fmt: skip
    steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]
    if add_space_prefix:
        steps.insert(0, {"type": "Prepend", "prepend": "\u2581"})
    model = without_tokens(model, unmerged | excluded, kept=unmerged)
    return _document(model, normalizer={"type": "Sequence", "normalizers": steps})
