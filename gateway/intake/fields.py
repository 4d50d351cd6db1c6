"""Checked access to the fields of a JSON object. Every error names the field.

null means absent. true is not 1, "0.5" is not 0.5, and a number must be finite: the value is tested, since 1e999 is valid JSON.
"""

import json
import math
from collections import Counter
from typing import Any

from gateway.errors import bad_request
from gateway.intake.field_table import Boolean, Integer, Number, Text


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body; raises ApiError."""
    if not body.strip():
        raise bad_request("The request body is empty; send a JSON object.")
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError:
        raise bad_request("The request body is not valid UTF-8.") from None
    except json.JSONDecodeError as error:
        raise bad_request(f"The request body is not valid JSON: {error.msg} at character {error.pos}.") from None
    except (ValueError, RecursionError):
        raise bad_request(
            "The request body is not acceptable JSON: nested too deeply, or a number is too long."
        ) from None
    if not isinstance(value, dict):
        raise bad_request("The request body must be a JSON object.")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names are unique: of two values with one name, a proxy may have judged the other."""
    value = dict(pairs)
    if len(value) != len(pairs):
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        shown = name[:64].encode("utf-8", "replace").decode()
        raise bad_request(f"The request body has '{shown}' twice in one object.", shown)
    return value


def _name(value: object) -> str:
    names = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "an array",
        dict: "an object",
    }
    return names.get(type(value), "null")


class Fields:
    """One object's fields; `path` is what stands before their names in errors."""

    def __init__(self, raw: dict[str, Any], path: str = "") -> None:
        self._raw = raw
        self._path = path

    def param(self, name: str) -> str:
        """The field's full name."""
        return f"{self._path}.{name}" if self._path else name

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._raw.get(name) is not None

    def raw(self, name: str) -> Any:
        """The field's value, unchecked."""
        return self._raw.get(name)

    def wrong(self, name: str, wanted: str) -> Exception:
        """The error for a value of the wrong type or range."""
        got = _name(self._raw.get(name))
        return bad_request(f"Invalid '{self.param(name)}': expected {wanted}, got {got}.", self.param(name))

    def string(self, row: Text) -> str | None:
        """A string of valid Unicode."""
        value, param = self._raw.get(row.name), self.param(row.name)
        if value is None:
            return None
        if type(value) is not str:
            raise self.wrong(row.name, "a string")
        if len(value) > row.max_length:
            raise bad_request(f"Invalid '{param}': longer than {row.max_length} characters.", param)
        return checked_text(value, param)

    def boolean(self, row: Boolean) -> bool:
        """true or false."""
        value = self._raw.get(row.name)
        if value is None:
            return False
        if type(value) is not bool:
            raise self.wrong(row.name, "a boolean")
        return value

    def integer(self, row: Integer) -> int | None:
        """An integer in the row's range; 1.0 is one, 1.5 isn't."""
        value = self._raw.get(row.name)
        if value is None:
            return None
        if type(value) is float and math.isfinite(value) and value.is_integer() and abs(value) < 2**53:
            value = int(value)
        if type(value) is not int:
            raise self.wrong(row.name, "an integer")
        if not row.low <= value <= row.high:
            param = self.param(row.name)
            raise bad_request(f"Invalid '{param}': must be between {row.low} and {row.high}.", param)
        return value

    def number(self, row: Number) -> float:
        """A finite number in the row's range."""
        value, low, high = self._raw.get(row.name), row.low, row.high
        if value is None:
            return row.default
        if type(value) not in (int, float):
            raise self.wrong(row.name, "a number")
        if not is_finite(value) or not low <= value <= high or (row.open_low and value == low):
            bounds = f"greater than {low:g} and at most {high:g}" if row.open_low else f"between {low:g} and {high:g}"
            raise bad_request(f"Invalid '{self.param(row.name)}': must be {bounds}.", self.param(row.name))
        return float(value)

    def refuse(self, *names: str) -> None:
        """Raise for any of these that is set: what isn't supported must not be ignored."""
        for name in names:
            value = self._raw.get(name)
            if value is not None and value != [] and value is not False:
                raise bad_request(f"'{self.param(name)}' is not supported.", self.param(name), "unsupported_parameter")


def is_finite(value: int | float) -> bool:
    """Whether a number of JSON is one that a float can be."""
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond any float
        return False


def checked_text(value: str, param: str) -> str:
    """A string without lone surrogates: they have no UTF-8 form."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise bad_request(f"Invalid '{param}': holds a lone surrogate, which is not valid Unicode.", param) from None
    return value
