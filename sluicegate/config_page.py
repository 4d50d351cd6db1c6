"""`sluicegate config show`, and the tables of docs/configuration.md (`python -m sluicegate.config_page` prints them)."""

import os
import re
from argparse import Namespace

from sluicegate.configuration import COMMANDS, ENVIRONMENT, PREFIX, complete, key_of, leaves, settings

_PASSWORD = re.compile(r"(?<=:)[^:@/]*(?=@)")


def show(arguments: Namespace) -> None:
    """Print the settings that a command would run with, where each comes from, and no secret."""
    from sluicegate.command import make_parser

    line = [arguments.process, *(["--config", arguments.config] if arguments.config else [])]
    for found in complete(make_parser, line, make_parser().parse_args(line)):
        value = "unset" if found.value is None else _shown(found.value)
        print(f"{found.key} = {value}  # {found.source}")
    for variable in ENVIRONMENT:
        given = os.environ.get(variable.name)
        value = "set, not shown" if variable.is_secret else f'"{given}"'
        print(f"{variable.key} = {value if given else variable.default}  # {variable.name if given else 'default'}")


def _shown(value: object) -> str:
    """As TOML would have it; a URL's password is left out."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{_PASSWORD.sub("***", value)}"' if isinstance(value, str) else str(value)


def tables() -> str:
    """Markdown: one table for the flags, one for what has none."""
    from sluicegate.command import make_parser

    found = leaves(make_parser())
    rows: dict[str, list[str]] = {}
    for command in COMMANDS:
        for action in settings(found[command]):
            key = key_of(action)
            default = "" if action.default is None else f"`{action.default}`"
            name = PREFIX + key.upper().replace("-", "_")
            row = rows.setdefault(key, [f"`{key}`", f"`{name}`", "", default, action.help or ""])
            row[2] = f"{row[2]}, {command}" if row[2] else command
    lines = ["| file and flag | environment | processes | default | meaning |", "|---|---|---|---|---|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in rows[key]) + " |" for key in sorted(rows)]
    lines += ["", "| environment | file | default | meaning |", "|---|---|---|---|"]
    for variable in ENVIRONMENT:
        key = "(a secret: never)" if variable.is_secret else f"`{variable.key}`"
        lines.append(f"| `{variable.name}` | {key} | {variable.default} | {variable.text} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(tables(), end="")
