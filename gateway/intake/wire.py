"""Frames between the gateway and an intake process: a 4-byte little-endian length, then msgpack."""

from typing import Any, BinaryIO

import msgpack

HEADER_BYTES = 4


def frame(value: list[Any]) -> bytes:
    """One frame."""
    raw: bytes = msgpack.packb(value, use_bin_type=True)
    return len(raw).to_bytes(HEADER_BYTES, "little") + raw


def unframe(raw: bytes) -> list[Any]:
    """The list in a frame's content."""
    value: list[Any] = msgpack.unpackb(raw, raw=False)
    return value


def read_frame(stream: BinaryIO) -> list[Any] | None:
    """The next frame of a blocking stream, or None at its end."""
    header = stream.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    return unframe(stream.read(int.from_bytes(header, "little")))
