"""The exceptions of this package.

ProtocolError
|-- DecodeError          bytes from Redis are not the message they should be
|-- SignatureError       a job was not signed by a gateway of this installation
`-- InvalidNameError     a tenant or model name that cannot be part of a key
"""


class ProtocolError(ValueError):
    """Something that crossed Redis, or should, is not well-formed."""


class DecodeError(ProtocolError):
    """Bytes do not decode to the expected message."""


class SignatureError(ProtocolError):
    """A job's signature does not verify."""


class InvalidNameError(ProtocolError):
    """A name from outside that is not allowed."""

    def __init__(self, kind: str, text: str, rule: str) -> None:
        super().__init__(f"invalid {kind} name {text[:80]!r}: use {rule}")
