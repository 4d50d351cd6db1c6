"""Typed msgpack: frozen dataclasses to arrays and back, checked field by field.

A message is the array of its fields in order; one of a union is `[tag, field, ...]`. New fields go last and have
defaults, so an older sender's shorter array still decodes; extra trailing fields of a newer sender are refused, since a
field that is not understood may change the meaning of those that are. Nothing on the wire names a class.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast

import msgpack

from protocol.errors import DecodeError

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_ATOMS: frozenset[type] = frozenset({int, float, str, bytes, bool, type(None)})
_ITEMS = _ATOMS - {type(None)}  # a list of these has nothing else in it

T = TypeVar("T")
Check = Callable[[Any, str], Any]


def encode(message: object) -> bytes:
    """Pack a dataclass made of the types that `decode` knows."""
    return cast("bytes", msgpack.packb(_plain(message), use_bin_type=True))


def decode(kind: type[T], raw: bytes) -> T:
    """Unpack and check a `kind`; raises DecodeError."""
    return cast("T", _checker(cast("Any", kind))(_unpack(raw), kind.__name__))


def encode_tagged(tags: Mapping[type, int], message: object) -> list[Any]:
    """`[tag, field, ...]` of one message of a closed union, still unpacked so that many fit one array."""
    return [tags[type(message)], *cast("list[Any]", _plain(message))]


def decode_tagged(kinds: Mapping[int, type], value: Any) -> Any:
    """The message behind `[tag, field, ...]`; raises DecodeError."""
    if not isinstance(value, list) or not value or type(value[0]) is not int or value[0] not in kinds:
        raise DecodeError("not a message of this union")
    kind = kinds[value[0]]
    return _checker(kind)(value[1:], kind.__name__)


def pack(value: object) -> bytes:
    """Pack plain lists, numbers, strings and bytes."""
    return cast("bytes", msgpack.packb(value, use_bin_type=True))


def unpack_list(raw: bytes) -> list[Any]:
    """Unpack an array; raises DecodeError."""
    value = _unpack(raw)
    if not isinstance(value, list):
        raise DecodeError("expected an array")
    return value


def _unpack(raw: bytes) -> Any:
    if len(raw) > MAX_MESSAGE_BYTES:
        raise DecodeError(f"message of {len(raw)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    try:
        return msgpack.unpackb(raw, raw=False, strict_map_key=True)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise DecodeError(f"not msgpack: {type(error).__name__}") from None


def _plain(value: object) -> object:
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is tuple or kind is list:
        items = cast("list[object]", value)
        # Token id lists are long: one look at the first item spares a call for each.
        if items and type(items[0]) in _ITEMS:
            return items if kind is list else list(items)
        return [_plain(item) for item in items]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = [getattr(value, name) for name in _field_names(type(value))]
        return [item if type(item) in _ATOMS else _plain(item) for item in found]
    return value


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


@cache
def _checker(kind: Any) -> Check:
    """The function `(value, path) -> checked value` for a type."""
    while hasattr(kind, "__supertype__"):  # NewType
        kind = kind.__supertype__
    if kind in _SCALARS:
        return _SCALARS[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return _optional(arguments)
    if origin is tuple:
        return _tuple(arguments)
    if origin is Literal:
        return _literal(arguments)
    if dataclasses.is_dataclass(kind):
        return _dataclass(cast("type", kind))
    raise TypeError(f"{kind!r} has no wire form")


def _fail(path: str, wanted: str, value: object) -> DecodeError:
    # Only the type is named: the value may be a prompt.
    return DecodeError(f"{path}: expected {wanted}, got {type(value).__name__}")


def _int(value: Any, path: str) -> int:
    if type(value) is not int:
        raise _fail(path, "an integer", value)
    return value


def _float(value: Any, path: str) -> float:
    if type(value) not in (float, int) or not math.isfinite(value):
        raise _fail(path, "a finite number", value)
    return float(value)


def _exact(kind: type, wanted: str) -> Check:
    def check(value: Any, path: str) -> Any:
        if type(value) is not kind:
            raise _fail(path, wanted, value)
        return value

    return check


_SCALARS: dict[Any, Check] = {
    int: _int,
    float: _float,
    str: _exact(str, "a string"),
    bytes: _exact(bytes, "bytes"),
    bool: _exact(bool, "a boolean"),
}


def _optional(arguments: tuple[Any, ...]) -> Check:
    inner = [argument for argument in arguments if argument is not type(None)]
    if len(inner) != 1 or len(inner) == len(arguments):
        raise TypeError("the wire knows `X | None` as its only untagged union")
    check = _checker(inner[0])
    return lambda value, path: None if value is None else check(value, path)


def _tuple(arguments: tuple[Any, ...]) -> Check:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        item = _checker(arguments[0])
        only = {int: int, str: str}.get(arguments[0])

        def check_many(value: Any, path: str) -> tuple[Any, ...]:
            if not isinstance(value, list):
                raise _fail(path, "an array", value)
            if only is not None and set(map(type, value)) <= {only}:
                return tuple(value)
            return tuple(item(entry, f"{path}[{index}]") for index, entry in enumerate(value))

        return check_many
    checks = [_checker(argument) for argument in arguments]

    def check_fixed(value: Any, path: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(checks):
            raise _fail(path, f"an array of {len(checks)}", value)
        return tuple(check(entry, path) for check, entry in zip(checks, value, strict=True))

    return check_fixed


def _literal(allowed: tuple[Any, ...]) -> Check:
    def check(value: Any, path: str) -> Any:
        if type(value) is not str or value not in allowed:
            raise _fail(path, f"one of {allowed}", value)
        return value

    return check


def _dataclass(kind: type) -> Check:
    hints = typing.get_type_hints(kind)
    fields = [(field.name, _checker(hints[field.name])) for field in dataclasses.fields(kind)]
    required = sum(
        field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        for field in dataclasses.fields(kind)
    )

    def check(value: Any, path: str) -> Any:
        if not isinstance(value, list) or not required <= len(value) <= len(fields):
            raise _fail(path, f"an array of {required} to {len(fields)} fields", value)
        pairs = zip(fields, value, strict=False)
        checked = [check_field(entry, f"{path}.{name}") for (name, check_field), entry in pairs]
        try:
            return kind(*checked)
        except ValueError as error:
            raise DecodeError(f"{path}: {error}") from None

    return check
