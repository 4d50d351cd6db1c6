"""Arguments and dispatch. What a sub-command needs is imported when it runs, so that `--help` is instant."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from protocol.faults import FAULT_KINDS
from sluicegate import __version__
from sluicegate.argument_types import seconds, whole
from sluicegate.bench_flags import add_bench
from sluicegate.configuration import COMMANDS, complete
from sluicegate.errors import CommandError
from sluicegate.model_store import DEFAULT_MODEL
from sluicegate.plan.flags import add_plan
from sluicegate.process_flags import add_config, add_data, add_processes, add_redis
from sluicegate.quality_flags import add_quality
from sluicegate.tenancy_flags import add_tenancy


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sub-command; returns the exit code: 0, 1 for a failure, 2 for wrong arguments."""
    given = None if arguments is None else list(arguments)
    parsed = make_parser().parse_args(given)
    module, _, function = parsed.run.partition(":")
    try:
        if parsed.command in COMMANDS:
            complete(make_parser, given, parsed)
        getattr(import_module(f"sluicegate.{module}"), function)(parsed)
    except CommandError as error:
        print(f"sluicegate: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has gone; Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"sluicegate: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Paragraphs kept apart, defaults shown where they say something."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(super(_Formatter, self)._fill_text(part, width, indent) for part in text.split("\n\n"))

    def _get_help_string(self, action: argparse.Action) -> str | None:
        says_nothing = action.default is None or action.default is False or action.default == []
        return action.help if says_nothing else super()._get_help_string(action)


class _Parser(argparse.ArgumentParser):
    """Wrong arguments are told in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _add(
    parsers: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, run: str, text: str, more: str = ""
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = parsers.add_parser(
        name, help=text, description=f"{text}.{more}", formatter_class=_Formatter, allow_abbrev=False
    )
    parser.set_defaults(run=run)
    return parser


def make_parser() -> argparse.ArgumentParser:
    """All commands and their flags."""
    parser = _Parser(
        prog="sluicegate",
        description="Self-hosted, multi-tenant inference for open-weight language models.\n\n"
        "`sluicegate up` starts everything on this machine; `sluicegate chat` talks to it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sluicegate {__version__}")
    commands: argparse._SubParsersAction[argparse.ArgumentParser] = parser.add_subparsers(
        metavar="COMMAND", dest="command", required=True, parser_class=_Parser
    )
    add_processes(commands, _add)
    add_tenancy(commands, _add, add_redis)
    _add_queue(commands)
    _add_models(commands)
    add_plan(commands, _add)
    add_quality(commands, _add)
    _add_chat(commands)
    _add_config(commands)
    _add_faults(commands)
    _add_doctor(commands)
    add_bench(commands, _add)
    return parser


def _add_queue(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    group = commands.add_parser(
        "queue", help="look at the queue, and at jobs that were given up", description="Queues of the models."
    )
    actions = group.add_subparsers(metavar="ACTION", required=True)
    parsers = [_add(actions, "inspect", "queue:inspect", "show what waits, what runs and what was given up")]
    parser = _add(actions, "requeue", "queue:requeue", "run a dead job again and tell how it ends")
    parser.add_argument("dead_id", help="its number, from `sluicegate queue inspect`")
    parser.add_argument(
        "--timeout", type=seconds, metavar="SECONDS", default=120.0, help="how long to wait for its end"
    )
    parsers.append(parser)
    parser = _add(actions, "purge", "queue:purge", "forget dead jobs")
    parser.add_argument("dead_id", nargs="?", help="only this one")
    parsers.append(parser)
    for each in parsers:
        each.add_argument("--model", metavar="NAME", help="only this model's")
        add_redis(each)


def _add_models(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    group = commands.add_parser("model", help="list, fetch and inspect models", description="Models on this machine.")
    actions = group.add_subparsers(metavar="ACTION", required=True)
    _add(actions, "list", "models:list_models", "show the models that can be fetched by name")
    parser = _add(actions, "pull", "models:pull_model", "fetch a model and print its path")
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="a known model's name")
    parser = _add(actions, "inspect", "models:inspect_model", "show what a model is, without loading it")
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="a known model's name, a file or a folder")
    add_data(parser)


def _add_chat(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    more = "\n\nOf a pipe, each line is a message. Ctrl-C stops an answer, Ctrl-D quits, /help lists commands."
    parser = _add(commands, "chat", "chat:chat", "chat with a running stack in the terminal", more)
    add_data(parser)
    parser.add_argument("--url", help="the gateway, if it's not the stack of the data folder")
    parser.add_argument("--key", help="API key (SLUICEGATE_API_KEY, or the stack's demo key)")
    parser.add_argument("--model", help="the model's name (default: the stack's)")
    parser.add_argument("--system", help="a system prompt")
    parser.add_argument("--max-tokens", type=whole(1, 1 << 30), metavar="N", help="longest answer")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 for the likeliest answer, up to 2")


def _add_config(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    group = commands.add_parser("config", help="show the settings in force", description="Settings of the processes.")
    actions = group.add_subparsers(metavar="ACTION", required=True)
    more = "\n\nSettings come from flags, the environment, a TOML file and defaults; docs/configuration.md lists them."
    parser = _add(actions, "show", "config_page:show", "print the settings that a process would have", more)
    parser.add_argument("process", nargs="?", choices=COMMANDS, default="up", help="whose settings")
    add_config(parser)


def _add_faults(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    group = commands.add_parser(
        "fault", help="damage the KV cache on purpose", description="Damage on demand, to see that it's found."
    )
    actions = group.add_subparsers(metavar="ACTION", required=True)
    _add(actions, "list", "faults:list_faults", "name the kinds of damage")
    more = "\n\nStrikes a page of a running request, in a worker that was started with --allow-fault-injection."
    parser = _add(actions, "inject", "faults:inject_fault", "damage a page", more)
    parser.add_argument("kind", choices=tuple(FAULT_KINDS), metavar="KIND", help="see `sluicegate fault list`")
    parser.add_argument("--tenant", metavar="T", help="of a request of this tenant")
    parser.add_argument("--layer", type=whole(0, 1 << 16), metavar="N", help="which layer (default: one in the middle)")
    parser.add_argument(
        "--page", type=whole(0, 1 << 20), metavar="N", default=0, help="which page of the request, from 0"
    )
    parser.add_argument("--model", help="the model's name, if several are served")
    parser.add_argument(
        "--wait", type=seconds, metavar="S", default=10.0, help="how long to wait for a request to strike"
    )
    add_redis(parser)


def _add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    group = commands.add_parser("doctor", help="examine what is promised", description="Examinations of promises.")
    actions = group.add_subparsers(metavar="WHAT", required=True)
    more = "\n\nStarts a stack for each mode in a temporary folder, damages its pages in every way, and prints what was found."
    parser = _add(actions, "integrity", "doctor:integrity", "every kind of damage in every mode", more)
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=("off", "lease", "seal", "full"),
        metavar="MODE",
        help="only these (off, lease, seal, full)",
    )
    parser.add_argument("--kinds", nargs="+", choices=tuple(FAULT_KINDS), metavar="KIND", help="only these")
    parser.add_argument("--model", metavar="NAME_OR_PATH", help="a known model's name, a file or a folder")
    parser.add_argument("--json", metavar="FILE", help="write every cell there too")
