"""Tokenizers from GGUF metadata give the ids that an independent reading of the same metadata gives."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import regex
import sentencepiece
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2

from protocol.model_card import TokenizerSpec
from worker.model.errors import ModelError
from worker.model.gguf_header import read_header
from worker.model.gguf_tokenizer import tokenizer_from_metadata
from worker.model.token_bytes import token_bytes

Metadata = dict[str, Any]
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = TikTokenConverter().pattern
PATTERNS = {"gpt-2": [GPT2], "smollm": [r"\p{N}", GPT2], "llama-bpe": [LLAMA3], "llama3": [LLAMA3], "qwen2": [QWEN2]}


class ReferenceBpe:
    """Byte-level BPE as first published: split by patterns, then merge the pair of the lowest rank until none is left."""

    def __init__(self, metadata: Metadata, kind: str, alphabet: Sequence[str]) -> None:
        self._ids = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        merges = metadata["tokenizer.ggml.merges"]
        self._ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self._patterns = [regex.compile(pattern) for pattern in PATTERNS[kind]]
        self._whole_words = kind in ("llama-bpe", "llama3")
        self._alphabet = alphabet

    def encode(self, text: str) -> list[int]:
        """Ids of plain text."""
        pieces = [text]
        for pattern in self._patterns:
            pieces = [part for piece in pieces for part in self._split(pattern, piece)]
        return [index for piece in pieces for index in self._word(piece)]

    @staticmethod
    def _split(pattern: Any, text: str) -> Iterator[str]:
        end = 0
        for match in pattern.finditer(text):
            if match.start() > end:
                yield text[end : match.start()]
            if match[0]:
                yield match[0]
            end = match.end()
        if end < len(text):
            yield text[end:]

    def _word(self, piece: str) -> list[int]:
        symbols = [self._alphabet[byte] for byte in piece.encode()]
        if self._whole_words and "".join(symbols) in self._ids:
            return [self._ids["".join(symbols)]]
        while len(symbols) > 1:
            ranked = [
                (self._ranks.get(pair, len(self._ranks)), i)
                for i, pair in enumerate(zip(symbols, symbols[1:], strict=False))
            ]
            rank, at = min(ranked)
            if rank == len(self._ranks):
                break
            symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
        return [self._ids[symbol] for symbol in symbols]


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Metadata:
    """SmolLM2's metadata."""
    return read_header(smollm2_path).metadata


def _encoder(spec: TokenizerSpec) -> Callable[[str], list[int]]:
    tokenizer = Tokenizer.from_str(spec.tokenizer_json)
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("kind", PATTERNS)
def test_byte_level_kinds(kind: str, smollm2: Metadata, texts: list[str], byte_alphabet: list[str]) -> None:
    """For each pre-tokenizer, 280 texts get the ids of the published algorithm, and none is a control token's."""
    metadata = smollm2 | {"tokenizer.ggml.pre": kind}
    spec = tokenizer_from_metadata(metadata, 49152, "test")
    encode, reference = _encoder(spec), ReferenceBpe(metadata, kind, byte_alphabet)
    control = {index for _, index in spec.control_tokens}
    if kind == "qwen2":  # which composes characters first
        import unicodedata

        texts = [unicodedata.normalize("NFC", text) for text in texts]

    different = {
        text: (reference.encode(text), encode(text)) for text in texts if reference.encode(text) != encode(text)
    }

    assert {} == different
    assert not control & {index for text in texts for index in encode(text)}


def test_smollm2_beside_transformers(smollm2_path: Path, smollm2: Metadata, texts: list[str]) -> None:
    """Texts without digits and control tokens get the ids that transformers gives (its reading of the file splits no digits)."""
    theirs = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    encode = _encoder(tokenizer_from_metadata(smollm2, 49152, "test"))
    control = [text for text, _ in tokenizer_from_metadata(smollm2, 49152, "test").control_tokens]
    plain = [text for text in texts if not regex.search(r"\p{N}", text) and not any(token in text for token in control)]

    assert len(plain) > 60
    assert [theirs.encode(text, add_special_tokens=False) for text in plain] == [encode(text) for text in plain]


def test_smollm2_specification(smollm2: Metadata) -> None:
    """Control tokens, ends of a turn and BOS policy of SmolLM2."""
    spec = tokenizer_from_metadata(smollm2, 49152, "test")

    assert {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}.items() <= dict(spec.control_tokens).items()
    assert 17 == len(spec.control_tokens)
    assert (2,) == spec.eos_token_ids
    assert (1, False, 49152) == (spec.bos_token_id, spec.add_bos, spec.vocab_size)
    assert spec.chat_template is not None
    assert "<|im_start|>" in spec.chat_template


def test_smollm2_token_bytes(smollm2: Metadata, texts: list[str], byte_alphabet: list[str]) -> None:
    """Every ordinary id's bytes are those of its stand-ins, control ids have none, and every text comes back exactly."""
    spec = tokenizer_from_metadata(smollm2, 49152, "test")
    table, encode = token_bytes(spec), _encoder(spec)
    byte_of = {character: byte for byte, character in enumerate(byte_alphabet)}
    control = {index for _, index in spec.control_tokens}
    expected = [
        b"" if index in control else bytes(byte_of[character] for character in token)
        for index, token in enumerate(smollm2["tokenizer.ggml.tokens"])
    ]

    assert expected == table
    assert [text.encode() for text in texts] == [b"".join(table[index] for index in encode(text)) for text in texts]


@pytest.mark.parametrize(
    ("kind", "stated", "adds"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("smollm", None, False), ("smollm", True, True)],
)
def test_bos_of_byte_level_kinds(kind: str, stated: bool | None, adds: bool, smollm2: Metadata) -> None:
    """Without a word about it in the file, Llama 3's kind begins with BOS (as in llama.cpp), others don't."""
    metadata = smollm2 | {"tokenizer.ggml.pre": kind, "tokenizer.ggml.add_bos_token": stated}

    assert adds is tokenizer_from_metadata(metadata, 49152, "test").add_bos


def test_no_pre_tokenizer(smollm2: Metadata) -> None:
    """A file that doesn't say how text is split is refused, not guessed at."""
    metadata = {key: value for key, value in smollm2.items() if key != "tokenizer.ggml.pre"}

    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre"):
        tokenizer_from_metadata(metadata, 49152, "test")


def test_ends_of_a_turn(smollm2: Metadata) -> None:
    """eos, eot and eom are all ends; so is a control token that chat formats end a turn with, even if the file names another."""
    named = smollm2 | {
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.eom_token_id": 6,
    }

    assert (0, 2, 5, 6) == tokenizer_from_metadata(named, 49152, "test").eos_token_ids


@pytest.mark.parametrize("kind", ["gpt-2", "llama-bpe"])
@pytest.mark.parametrize("token_type", [3, 4])
def test_words_that_are_control_tokens(kind: str, token_type: int, byte_alphabet: list[str]) -> None:
    """A control token's text never becomes its id, even where merges lead to it or it is a word by itself."""
    tokens = [*byte_alphabet, "<s", "<s>", "he", "hey"]
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": kind, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [1, token_type, 1, token_type],
        "tokenizer.ggml.merges": ["< s", "<s >", "h e", "he y"],
    }  # fmt: skip
    spec = tokenizer_from_metadata(metadata, len(tokens), "test")
    encode, table = _encoder(spec), token_bytes(spec)

    for text in ("<s>", "hey", " hey<s>hey", "<<s>>"):
        assert not {257, 259} & set(encode(text))
        assert text.encode() == b"".join(table[index] for index in encode(text))


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, english: str) -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece BPE model of 1,200 pieces, as Llama 1 and 2 have: byte fallback, nothing normalized away."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    lines = [line for line in english.splitlines() if line][:3000] + ["<s> </s> <0x41>", "          x"] * 60
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(folder / "model"), model_type="bpe", vocab_size=1200,
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True,
        split_by_unicode_script=False,
        allow_whitespace_only_pieces=True, user_defined_symbols=["<|turn|>"], minloglevel=2, num_threads=1,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "model.model"))


def _sentencepiece_metadata(model: sentencepiece.SentencePieceProcessor) -> Metadata:
    ids = range(model.get_piece_size())
    kinds = gguf.TokenType

    def kind(index: int) -> int:
        if model.is_unknown(index):
            return int(kinds.UNKNOWN)
        if model.is_control(index):
            return int(kinds.CONTROL)
        if model.is_byte(index):
            return int(kinds.BYTE)
        return int(kinds.USER_DEFINED) if model.id_to_piece(index) == "<|turn|>" else int(kinds.NORMAL)

    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": [model.id_to_piece(index) for index in ids],
        "tokenizer.ggml.scores": [model.get_score(index) for index in ids],
        "tokenizer.ggml.token_type": [kind(index) for index in ids],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip


def test_sentencepiece(trained: sentencepiece.SentencePieceProcessor, texts: list[str], english: str) -> None:
    """280 texts and a thousand lines of prose get SentencePiece's own ids, byte fallback and leading space included."""
    spec = tokenizer_from_metadata(_sentencepiece_metadata(trained), trained.get_piece_size(), "test")
    encode = _encoder(spec)
    sample = [text for text in texts if "\x00" not in text] + [line for line in english.splitlines() if line][3000:4000]

    different = {text: (trained.encode(text), encode(text)) for text in sample if trained.encode(text) != encode(text)}

    assert {} == different


def test_sentencepiece_token_bytes(trained: sentencepiece.SentencePieceProcessor, texts: list[str]) -> None:
    """Every text comes back exactly, behind the space that this kind puts first."""
    spec = tokenizer_from_metadata(_sentencepiece_metadata(trained), trained.get_piece_size(), "test")
    encode, table = _encoder(spec), token_bytes(spec)
    # A user's own ▁ is a space to SentencePiece.
    expected = [(" " + text).replace("▁", " ").encode() if text else b"" for text in texts]

    assert expected == [b"".join(table[index] for index in encode(text)) for text in texts]


def test_sentencepiece_control_tokens() -> None:
    """The text of a control, unknown, byte, unused or user-defined token never becomes its id, though merges could lead there."""
    kinds = gguf.TokenType
    special = {
        "<unk>": kinds.UNKNOWN, "<s>": kinds.CONTROL, "</s>": kinds.CONTROL, "<|t|>": kinds.USER_DEFINED, "<un>": kinds.UNUSED,
        **{f"<0x{byte:02X}>": kinds.BYTE for byte in range(256)},
    }  # fmt: skip
    parts = [
        "<s",
        "s>",
        "</s",
        "<u",
        "<un",
        "<unk",
        "k>",
        "n>",
        "<|",
        "<|t",
        "|>",
        "<0",
        "<0x",
        "<0x4",
        "<0x41",
        "1>",
        "▁a",
    ]
    tokens = [*special, *parts, *"▁<>/|0123456789ABCDEFsunktxa"]
    metadata = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(index) for index in range(len(tokens))],
        "tokenizer.ggml.token_type": [int(kind) for kind in special.values()] + [1] * (len(tokens) - len(special)),
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip
    spec = tokenizer_from_metadata(metadata, len(tokens), "test")
    encode, table = _encoder(spec), token_bytes(spec)

    for piece in ("<unk>", "<s>", "</s>", "<|t|>", "<un>", "<0x41>"):
        for text in (piece, f"a{piece}", f" {piece} {piece}", f"<{piece}>"):
            ids = encode(text)
            assert not set(range(len(special))) & set(ids)
            assert f" {text}".encode() == b"".join(table[index] for index in ids)
    assert [1, 2, 3] == sorted(index for _, index in spec.control_tokens)


def test_sentencepiece_without_leading_space(trained: sentencepiece.SentencePieceProcessor) -> None:
    """A file can say that no space is put first."""
    metadata = _sentencepiece_metadata(trained) | {"tokenizer.ggml.add_space_prefix": False}
    spec = tokenizer_from_metadata(metadata, trained.get_piece_size(), "test")
    table = token_bytes(spec)

    assert b"name of x" == b"".join(table[index] for index in _encoder(spec)("name of x"))


@pytest.mark.parametrize(("stated", "adds"), [(None, True), (False, False), (True, True)])
def test_bos_of_sentencepiece(stated: bool | None, adds: bool, trained: sentencepiece.SentencePieceProcessor) -> None:
    """This kind begins with BOS unless the file says otherwise."""
    metadata = _sentencepiece_metadata(trained) | {"tokenizer.ggml.add_bos_token": stated}
    spec = tokenizer_from_metadata(metadata, trained.get_piece_size(), "test")

    assert adds is spec.add_bos
    assert (2,) == spec.eos_token_ids


@pytest.mark.parametrize(
    ("token", "token_type", "is_text"),
    [
        ("<think>", 4, True),
        ("<think>", 3, False),
        ("<|user|>", 4, False),
        ("<start_of_turn>", 4, False),
        ("</s>", 4, False),
        ("\n\n", 4, True),
    ],
)
def test_user_defined_tokens(token: str, token_type: int, is_text: bool, byte_alphabet: list[str]) -> None:
    """A user-defined token that looks like markup is text, and no control token; any other steers and stays out of reach."""
    tokens = [*byte_alphabet, token]
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [token_type], "tokenizer.ggml.merges": [],
    }  # fmt: skip
    spec = tokenizer_from_metadata(metadata, len(tokens), "test")

    assert (((token, 256),), ()) == (
        (spec.text_tokens, spec.control_tokens) if is_text else (spec.control_tokens, spec.text_tokens)
    )
    assert (token.encode() if is_text else b"") == token_bytes(spec)[256]
