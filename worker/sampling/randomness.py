"""Counter-based randomness: a function of seed, sample and position, whatever the batch and the preemptions."""

import hashlib
import struct

_MASK = (1 << 64) - 1


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits for the token at `position` of sample `index`."""
    message = struct.pack("<QQQ", seed & _MASK, index, position)
    digest = hashlib.blake2b(message, digest_size=8, person=b"sampling").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
