"""The bytes that each token adds to the text."""

import json
import re
from collections.abc import Iterator

from protocol.model_card import TokenizerSpec
from worker.model.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(spec: TokenizerSpec) -> list[bytes]:
    """Bytes by token id; control tokens and ids without a token add nothing."""
    document = json.loads(spec.tokenizer_json)
    vocabulary: dict[str, int] = document["model"]["vocab"]
    is_byte_level = '"ByteLevel"' in json.dumps(document["pre_tokenizer"])
    control = {index for _, index in spec.control_tokens}
    table = [b""] * spec.vocab_size
    alphabet = byte_level_alphabet()
    for token, index in vocabulary.items():
        if not 0 <= index < spec.vocab_size:
            raise ModelError(f"the tokenizer has token id {index}, outside its vocabulary of {spec.vocab_size}")
        if index in control:
            continue
        table[index] = _byte_level(token, alphabet) if is_byte_level else _sentencepiece(token)
    for token, index in spec.text_tokens:
        table[index] = token.encode("utf-8")
    return table


def _byte_level(token: str, alphabet: dict[str, int]) -> bytes:
    try:
        return bytes(alphabet[character] for character in token)
    except KeyError:
        return token.encode("utf-8")  # an added token: plain text


def _sentencepiece(token: str) -> bytes:
    if (match := _BYTE_TOKEN.fullmatch(token)) is not None:
        return bytes([int(match[1], 16)])
    return token.replace("\u2581", " ").encode("utf-8")


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    return {character: byte for byte, character in zip(range(256), _stand_ins(), strict=True)}


def _stand_ins() -> Iterator[str]:
    num_shifted = 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF:
            yield chr(byte)
        else:
            yield chr(256 + num_shifted)
            num_shifted += 1
