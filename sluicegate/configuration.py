"""Settings of the processes, from one of four places: a flag, the environment, a TOML file, or the default, in this order.

The flags of `up`, `gateway` and `worker` are the table of settings. `--port` is SLUICEGATE_PORT in the environment and `port` in the file; text
from anywhere is checked by the flag's own type. What has no flag (secrets, what all processes share) is in ENVIRONMENT. An unknown name or a bad
value, wherever it stands, stops the start with its name.
"""

import argparse
import difflib
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluicegate.errors import CommandError

COMMANDS = ("up", "gateway", "worker")
PREFIX = "SLUICEGATE_"
CONFIG_VARIABLE = "SLUICEGATE_CONFIG"
# Flags that say how to run a command, not what the process is like.
_NOT_SETTINGS = {"help", "config", "detach"}
# `environment` looks these up for every command, and names their source itself.
_LOOKED_UP_ELSEWHERE = {"SLUICEGATE_DATA", "SLUICEGATE_REDIS_URL"}
# What a flag without a value is in the environment, and as a text in the file.
_SWITCH = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, slots=True)
class Variable:
    """A setting without a flag. A secret can't be in the file: files are copied, shown and committed."""

    name: str
    text: str
    default: str
    is_secret: bool = False

    @property
    def key(self) -> str:
        """Its name in the file."""
        return self.name.removeprefix(PREFIX).lower().replace("_", "-")


ENVIRONMENT = (
    Variable("SLUICEGATE_HOME", "folder of fetched models, and of the stack where --data says nothing else", "~/.cache/sluicegate"),
    Variable("SLUICEGATE_LOG_LEVEL", "debug, info, warning or error", "info"),
    Variable("SLUICEGATE_ISA", "instruction set of the kernels: avx512, avx2 or portable", "detected"),
    Variable("SLUICEGATE_THREADS", "threads of the kernels", "detected"),
    Variable("SLUICEGATE_MASTER_KEY_FILE", "file with the master key", "none"),
    Variable("SLUICEGATE_MASTER_KEY", "the secret from which all others are derived, hexadecimal",
             "made in the data folder", is_secret=True),
    Variable("SLUICEGATE_ADMIN_KEY", "the operator's key", "made in the data folder", is_secret=True),
    Variable("SLUICEGATE_REDIS_PASSWORD", "only for docker-compose.yml", "none", is_secret=True),
    Variable("SLUICEGATE_API_KEY", "key of `sluicegate chat`", "the stack's demo key", is_secret=True),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Effective:
    """A setting as it is in force, and where it comes from."""

    key: str
    value: Any
    source: str


def complete(
    make_parser: Callable[[], argparse.ArgumentParser], arguments: list[str] | None, parsed: argparse.Namespace
) -> list[Effective]:
    """Fill in what no flag set, in place, for a command of COMMANDS. Raises CommandError."""
    path = getattr(parsed, "config", None) or os.environ.get(CONFIG_VARIABLE)
    values = _read(path) if path else {}
    known = leaves(make_parser())
    _check_names(known, values, path)
    if path:
        os.environ[CONFIG_VARIABLE] = str(Path(path).expanduser().resolve())  # a stack's processes read it too
    for variable in ENVIRONMENT:
        if variable.key in values:
            os.environ.setdefault(variable.name, _text(values[variable.key], f"{path}: {variable.key}"))
    explicit = _explicit(make_parser(), arguments)
    found = []
    for action in settings(known[parsed.command]):
        value, source = getattr(parsed, action.dest), "default"
        variable_name = PREFIX + key_of(action).upper().replace("-", "_")
        if action.dest in explicit:
            source = "flag"
        elif os.environ.get(variable_name):
            source = variable_name
            value = _convert(action, os.environ[variable_name], source)
        elif key_of(action) in values:
            source = f"{path}: {key_of(action)}"
            value = _from_file(action, values[key_of(action)], source)
        if source not in _LOOKED_UP_ELSEWHERE:
            setattr(parsed, action.dest, value)
        found.append(Effective(key_of(action), value, source))
    return found


def leaves(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of the commands that have settings."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {name: leaf for group in groups for name, leaf in group.choices.items() if name in COMMANDS}


def settings(leaf: argparse.ArgumentParser) -> list[argparse.Action]:
    """The flags that are settings."""
    return [action for action in leaf._actions if action.option_strings and action.dest not in _NOT_SETTINGS]


def key_of(action: argparse.Action) -> str:
    """A setting's name in the file: the flag's, without the dashes before it."""
    return next(flag for flag in action.option_strings if flag.startswith("--"))[2:]


def _check_names(known: Mapping[str, argparse.ArgumentParser], values: Mapping[str, Any], path: str | None) -> None:
    actions = [action for leaf in known.values() for action in settings(leaf)]
    keys = {key_of(action) for action in actions} | {variable.key for variable in ENVIRONMENT}
    for key, value in values.items():
        if key not in keys:
            raise CommandError(f"{path}: there is no setting {key!r}{_near(key, keys)}")
        if any(variable.key == key and variable.is_secret for variable in ENVIRONMENT):
            raise CommandError(f"{path}: {key} is a secret; it belongs in the environment")
        for action in actions:
            if key_of(action) == key:  # also those of the other commands: the file is for all
                _from_file(action, value, f"{path}: {key}")
    names = {PREFIX + key.upper().replace("-", "_") for key in keys} | {CONFIG_VARIABLE}
    for name in os.environ:
        if name.startswith(PREFIX) and name not in names:
            raise CommandError(f"{name}: there is no such setting{_near(name, names)}")


def _near(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {found[0]!r}?" if found else ""


def _read(path: str) -> dict[str, Any]:
    try:
        with Path(path).expanduser().open("rb") as file:
            return tomllib.load(file)
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise CommandError(f"{path}: is not valid TOML: {error}") from None


def _text(value: Any, source: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise CommandError(f"{source}: expected a number or a text")
    return str(value)


def _from_file(action: argparse.Action, value: Any, source: str) -> Any:
    if isinstance(action, argparse._StoreTrueAction) and isinstance(value, bool):
        return value
    return _convert(action, _text(value, source), source)


def _convert(action: argparse.Action, text: str, source: str) -> Any:
    if isinstance(action, argparse._StoreTrueAction):
        if text.lower() not in _SWITCH:
            raise CommandError(f"{source}: expected true or false, got {text[:50]!r}")
        return _SWITCH[text.lower()]
    kind: Callable[[str], Any] = action.type if callable(action.type) else str
    try:
        value = kind(text)
    except argparse.ArgumentTypeError as error:
        raise CommandError(f"{source}: {error}") from None
    except (ValueError, TypeError):
        raise CommandError(f"{source}: {text[:50]!r} is not a value of this setting") from None
    if action.choices is not None and value not in action.choices:
        raise CommandError(f"{source}: expected one of {', '.join(map(str, action.choices))}, got {text[:50]!r}")
    return value


def _explicit(parser: argparse.ArgumentParser, arguments: list[str] | None) -> set[str]:
    """What flags set."""
    for leaf in leaves(parser).values():
        for action in leaf._actions:
            action.default = argparse.SUPPRESS
    return set(vars(parser.parse_args(arguments)))
