"""Arguments and dispatch. What a sub-command needs is imported when it runs, so that `--help` is instant."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from protocol.faults import FAULT_KINDS
from sluicegate import __version__
from sluicegate.argument_types import kv_scales as _kv_scales
from sluicegate.argument_types import seconds as _seconds
from sluicegate.argument_types import whole as _whole
from sluicegate.configuration import COMMANDS, complete
from sluicegate.environment import DEFAULT_REDIS_URL
from sluicegate.errors import CommandError
from sluicegate.gateway_flags import add_limits
from sluicegate.model_store import DEFAULT_MODEL
from sluicegate.plan.flags import add_plan
from sluicegate.quality_flags import add_quality
from sluicegate.tenancy_flags import add_tenancy

PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


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


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected tokens a second, got {text!r}") from None
    if not (value == 0 or 0.1 <= value <= 1e9):
        raise argparse.ArgumentTypeError(f"must be 0 or 0.1 to 1e9 tokens a second, got {text}")
    return value


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
    _add_stack(commands)
    _add_processes(commands)
    add_tenancy(commands, _add, _redis)
    _add_queue(commands)
    _add_models(commands)
    add_plan(commands, _add)
    add_quality(commands, _add)
    _add_chat(commands)
    _add_config(commands)
    _add_faults(commands)
    _add_doctor(commands)
    _add_bench(commands)
    return parser


def _data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="folder of the stack: secrets, database, logs (SLUICEGATE_DATA, or stack in SLUICEGATE_HOME)",
    )


def _config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings (SLUICEGATE_CONFIG)")


def _redis(parser: argparse.ArgumentParser) -> None:
    _data(parser)
    parser.add_argument(
        "--redis-url", metavar="URL",
        help=f"Redis or Valkey (SLUICEGATE_REDIS_URL, the running stack's, or {DEFAULT_REDIS_URL})",
    )  # fmt: skip


def _model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="NAME_OR_PATH", default=DEFAULT_MODEL,
        help="a known model's name, a GGUF file, or a Hugging Face folder",
    )  # fmt: skip
    parser.add_argument("--name", help="the name that clients use for the model (default: from --model)")


def _engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kv-dtype", choices=("bf16", "fp16", "fp8"), default="fp16", help="precision of the KV cache")
    parser.add_argument(
        "--kv-scales", type=_kv_scales, metavar="WHICH", default="auto",
        help="scales of an fp8 KV cache: 1, checkpoint (the model's own), a file of `sluicegate calibrate`, or auto: the file beside the model, else the "
        "model's own, else 1",
    )  # fmt: skip
    parser.add_argument(
        "--activations-bits", type=int, choices=(16, 8), default=16,
        help="what products with quantized weights round activations to; 8 makes prompts cheaper and answers less exact",
    )  # fmt: skip
    parser.add_argument(
        "--integrity", choices=("off", "lease", "seal", "full"), default="seal",
        help="how far the KV cache is checked. off: not; lease: page tables, before each step; seal: and prefixes, before their first use, and the "
        "pool, in the background; full: and every page, in the pass that reads it",
    )  # fmt: skip
    parser.add_argument(
        "--allow-fault-injection", action="store_true", help="obey `sluicegate fault inject`: never for real requests"
    )
    parser.add_argument(
        "--kv-tokens", type=_whole(64, 1 << 30), metavar="N", default=16384, help="tokens that the KV cache holds"
    )
    parser.add_argument(
        "--page-size", type=int, choices=PAGE_SIZES, metavar="N", default=16, help="tokens in a KV page, a power of two"
    )
    parser.add_argument(
        "--max-sequences", type=_whole(1, 256), metavar="N", default=32, help="sequences in a worker's batch"
    )


def _synthetic(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine", choices=("model", "synthetic"), default="model",
        help="what answers: a model, or made-up text at set rates, for rehearsals",
    )  # fmt: skip
    group = parser.add_argument_group("with --engine synthetic")
    group.add_argument(
        "--prefill-rate", type=_rate, metavar="R", default=0.0, help="prompt tokens a second, 0 for no wait"
    )
    group.add_argument(
        "--decode-rate", type=_rate, metavar="R", default=0.0, help="tokens a second of each stream, 0 for no wait"
    )
    group.add_argument(
        "--context", type=_whole(2, 1 << 24), metavar="N", default=8192, help="longest prompt with its answer"
    )


def _drain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--drain-grace", type=_seconds, metavar="SECONDS", default=30.0, help="time for running answers when stopping"
    )


def _trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace-endpoint",
        metavar="URL",
        help="send traces to this OpenTelemetry collector, http://HOST:4318/v1/traces",
    )


def _listen(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument(
        "--port", type=_whole(0, 65535), metavar="P", default=8080, help="port to listen on, 0 for any free one"
    )


def _add_stack(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    more = "\n\nStarts an embedded Valkey, a gateway and workers, makes a demo tenant, and prints how to use them."
    parser = _add(commands, "up", "stack:up", "start a whole stack on this machine", more)
    _config(parser)
    _listen(parser)
    _data(parser)
    _model(parser)
    parser.add_argument("--workers", type=_whole(1, 64), metavar="N", default=1, help="worker processes")
    _engine(parser)
    _synthetic(parser)
    _drain(parser)
    parser.add_argument("--tenants", metavar="FILE", help="TOML file of tenants, keys, limits and prices to set up")
    parser.add_argument("--detach", action="store_true", help="return when the stack is ready and leave it running")
    _data(_add(commands, "down", "stack:down", "stop the stack of a data folder, letting running answers finish"))


def _add_processes(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = _add(commands, "gateway", "processes:gateway", "run one gateway process: HTTP in, jobs out")
    _config(parser)
    _listen(parser)
    _redis(parser)
    add_limits(parser)
    _drain(parser)
    _trace(parser)
    more = "\n\nA worker joins the stack behind its Redis and takes work; start as many as you like."
    parser = _add(commands, "worker", "processes:worker", "run one worker process: a model that takes jobs", more)
    _config(parser)
    _redis(parser)
    _model(parser)
    _engine(parser)
    parser.add_argument(
        "--step-tokens", type=_whole(1, 65536), metavar="N", default=256, help="most tokens in one engine step"
    )
    parser.add_argument(
        "--kernels", choices=("auto", "ref", "cpu", "gpu"), default="auto",
        help="implementation of the numerical kernels",
    )  # fmt: skip
    _synthetic(parser)
    parser.add_argument(
        "--lease",
        type=_seconds,
        metavar="SECONDS",
        default=2.0,
        help="silence after which others take over a worker's jobs",
    )
    parser.add_argument(
        "--stall", type=_seconds, metavar="SECONDS", default=30.0, help="longest step before the engine counts as stuck"
    )
    parser.add_argument(
        "--max-deliveries", type=_whole(1, 100), metavar="N", default=3, help="workers that one job may take down"
    )
    _drain(parser)
    _trace(parser)


def _add_queue(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    group = commands.add_parser(
        "queue", help="look at the queue, and at jobs that were given up", description="Queues of the models."
    )
    actions = group.add_subparsers(metavar="ACTION", required=True)
    parsers = [_add(actions, "inspect", "queue:inspect", "show what waits, what runs and what was given up")]
    parser = _add(actions, "requeue", "queue:requeue", "run a dead job again and tell how it ends")
    parser.add_argument("dead_id", help="its number, from `sluicegate queue inspect`")
    parser.add_argument(
        "--timeout", type=_seconds, metavar="SECONDS", default=120.0, help="how long to wait for its end"
    )
    parsers.append(parser)
    parser = _add(actions, "purge", "queue:purge", "forget dead jobs")
    parser.add_argument("dead_id", nargs="?", help="only this one")
    parsers.append(parser)
    for each in parsers:
        each.add_argument("--model", metavar="NAME", help="only this model's")
        _redis(each)


def _add_models(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    group = commands.add_parser("model", help="list, fetch and inspect models", description="Models on this machine.")
    actions = group.add_subparsers(metavar="ACTION", required=True)
    _add(actions, "list", "models:list_models", "show the models that can be fetched by name")
    parser = _add(actions, "pull", "models:pull_model", "fetch a model and print its path")
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="a known model's name")
    parser = _add(actions, "inspect", "models:inspect_model", "show what a model is, without loading it")
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="a known model's name, a file or a folder")
    _data(parser)


def _add_chat(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    more = "\n\nOf a pipe, each line is a message. Ctrl-C stops an answer, Ctrl-D quits, /help lists commands."
    parser = _add(commands, "chat", "chat:chat", "chat with a running stack in the terminal", more)
    _data(parser)
    parser.add_argument("--url", help="the gateway, if it's not the stack of the data folder")
    parser.add_argument("--key", help="API key (SLUICEGATE_API_KEY, or the stack's demo key)")
    parser.add_argument("--model", help="the model's name (default: the stack's)")
    parser.add_argument("--system", help="a system prompt")
    parser.add_argument("--max-tokens", type=_whole(1, 1 << 30), metavar="N", help="longest answer")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 for the likeliest answer, up to 2")


def _add_config(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    group = commands.add_parser("config", help="show the settings in force", description="Settings of the processes.")
    actions = group.add_subparsers(metavar="ACTION", required=True)
    more = "\n\nSettings come from flags, the environment, a TOML file and defaults; docs/configuration.md lists them."
    parser = _add(actions, "show", "config_page:show", "print the settings that a process would have", more)
    parser.add_argument("process", nargs="?", choices=COMMANDS, default="up", help="whose settings")
    _config(parser)


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
    parser.add_argument(
        "--layer", type=_whole(0, 1 << 16), metavar="N", help="which layer (default: one in the middle)"
    )
    parser.add_argument(
        "--page", type=_whole(0, 1 << 20), metavar="N", default=0, help="which page of the request, from 0"
    )
    parser.add_argument("--model", help="the model's name, if several are served")
    parser.add_argument(
        "--wait", type=_seconds, metavar="S", default=10.0, help="how long to wait for a request to strike"
    )
    _redis(parser)


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


def _add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    group = commands.add_parser("bench", help="measure speed and quality", description="Measurements on this machine.")
    actions = group.add_subparsers(metavar="ACTION", required=True)
    more = "\n\nWith --peers, other engines that are installed take turns with ours in every row (`bench peers` installs them)."
    parser = _add(actions, "engine", "bench:engine", "time prompts and decoding beside the memory's bandwidth", more)
    _model_to_measure(parser)
    parser.add_argument("--rows", choices=("full", "quick", "tiny"), default="full", help="which rows")
    parser.add_argument(
        "--rounds", type=_whole(1, 100), metavar="N", help="rounds of each row (default: the row's own)"
    )
    parser.add_argument("--peers", action="store_true", help="measure the peers too")
    _peers(parser)
    parser.add_argument("--no-worker", action="store_true", help="leave out the starts of real workers")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a goal is missed")
    more = "\n\nAll modes take turns over the same steps; compare ratios, not times."
    parser = _add(
        actions, "integrity", "bench:integrity", "what checks of the KV cache cost, and what cached prefixes save", more
    )
    _model_to_measure(parser)
    parser.add_argument("--turns", type=_whole(3, 10_000), metavar="N", default=30, help="turns of each mode and row")
    parser.add_argument(
        "--pairs", type=_whole(1, 1000), metavar="N", default=5, help="prompts without and with a cached prefix"
    )
    parser.add_argument("--only", choices=("decode", "reuse"), help="only what checks cost, or only what prefixes save")
    parser = _add(actions, "kernels", "bench:kernels", "time the matrix products alone")
    parser.add_argument("--kernels", choices=("auto", "ref", "cpu", "gpu"), default="auto", help="implementation")
    parser = _add(actions, "quality", "bench:quality", "compare perplexity and logits with a float32 model's")
    _model_to_measure(parser)
    parser.add_argument("--tokens", type=_whole(1, 1 << 20), metavar="N", default=4096, help="tokens of text")
    more = "\n\nWithout --model, a random INT4 checkpoint of half a gigabyte is made up in the temporary folder."
    parser = _add(actions, "load", "bench:load", "time loading beside what dd takes to read the files", more)
    parser.add_argument("--model", metavar="NAME_OR_PATH", help="a known model's name, a file or a folder")
    parser.add_argument("--kernels", choices=("auto", "ref", "cpu", "gpu"), default="auto", help="implementation")
    parser.add_argument("--rounds", type=_whole(1, 100), metavar="N", default=3, help="turns of dd and load")
    _peers(_add(actions, "peers", "bench:peers", "install the engines that ours is compared with"))
    parser = _add(actions, "gateway", "bench_gateway:run", "CPU time of authentication and admission")
    parser.add_argument(
        "--requests", type=_whole(1, 1_000_000), metavar="N", default=2000, help="requests of each kind"
    )
    more = "\n\nStarts synthetic workers of its own in a temporary folder; compare numbers of one run only."
    parser = _add(actions, "queue", "bench:queue", "what gateway and queue cost, beside bare aiohttp", more)
    parser.add_argument(
        "--only",
        action="append",
        choices=("latency", "streams", "fairness", "routing", "scale"),
        help="only this part (repeatable)",
    )
    parser.add_argument("--seconds", type=_seconds, metavar="S", default=6.0, help="how long each number is measured")
    parser.add_argument("--out", metavar="DIR", default="bench/results", help="where the numbers and the picture go")


def _model_to_measure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="NAME_OR_PATH", default=DEFAULT_MODEL, help="a known model's name, or a GGUF file"
    )
    parser.add_argument("--out", metavar="DIR", default="bench/results", help="folder for the results")


def _peers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peers-dir", metavar="DIR", help="folder of the peers (default: .peers beside the bench package)"
    )
    parser.add_argument("--only", metavar="NAME", nargs="+", help="only these engines")
