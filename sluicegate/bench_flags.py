"""Flags of `bench`."""

import argparse
from collections.abc import Callable
from typing import TypeAlias

from sluicegate.argument_types import seconds, whole
from sluicegate.model_store import DEFAULT_MODEL

Parsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Add = Callable[..., argparse.ArgumentParser]


def add_bench(commands: Parsers, add: Add) -> None:
    """All measurements. `add` makes a command's parser."""
    group = commands.add_parser("bench", help="measure speed and quality", description="Measurements on this machine.")
    actions = group.add_subparsers(metavar="ACTION", required=True)
    more = "\n\nWith --peers, other engines that are installed take turns with ours in every row (`bench peers` installs them)."
    parser = add(actions, "engine", "bench:engine", "time prompts and decoding beside the memory's bandwidth", more)
    _model_to_measure(parser)
    parser.add_argument("--rows", choices=("full", "quick", "tiny"), default="full", help="which rows")
    parser.add_argument("--rounds", type=whole(1, 100), metavar="N", help="rounds of each row (default: the row's own)")
    parser.add_argument("--peers", action="store_true", help="measure the peers too")
    _peers(parser)
    parser.add_argument("--no-worker", action="store_true", help="leave out the starts of real workers")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a goal is missed")
    more = "\n\nAll modes take turns over the same steps; compare ratios, not times."
    parser = add(
        actions, "integrity", "bench:integrity", "what checks of the KV cache cost, and what cached prefixes save", more
    )
    _model_to_measure(parser)
    parser.add_argument("--turns", type=whole(3, 10_000), metavar="N", default=30, help="turns of each mode and row")
    parser.add_argument(
        "--pairs", type=whole(1, 1000), metavar="N", default=5, help="prompts without and with a cached prefix"
    )
    only = "only what checks cost in a step, or in attention alone, or only what prefixes save"
    parser.add_argument("--only", choices=("decode", "attention", "reuse"), help=only)
    more = "\n\nFor those of a GPU there is `make bench-gpu`."
    parser = add(actions, "kernels", "bench:kernels", "time the CPU's matrix products alone", more)
    parser.add_argument("--kernels", choices=("cpu", "ref"), default="cpu", help="implementation")
    parser = add(actions, "quality", "bench:quality", "compare perplexity and logits with a float32 model's")
    _model_to_measure(parser)
    parser.add_argument("--tokens", type=whole(1, 1 << 20), metavar="N", default=4096, help="tokens of text")
    more = "\n\nWithout --model, a random INT4 checkpoint of half a gigabyte is made up in the temporary folder."
    parser = add(actions, "load", "bench:load", "time loading beside what dd takes to read the files", more)
    parser.add_argument("--model", metavar="NAME_OR_PATH", help="a known model's name, a file or a folder")
    parser.add_argument("--kernels", choices=("auto", "ref", "cpu", "gpu"), default="auto", help="implementation")
    parser.add_argument("--rounds", type=whole(1, 100), metavar="N", default=3, help="turns of dd and load")
    _peers(add(actions, "peers", "bench:peers", "install the engines that ours is compared with"))
    _add_service_benches(actions, add)


def _add_service_benches(actions: Parsers, add: Add) -> None:
    """Of gateway and queue, without a model."""
    parser = add(actions, "gateway", "bench_gateway:run", "CPU time of authentication and admission")
    parser.add_argument("--requests", type=whole(1, 1_000_000), metavar="N", default=2000, help="requests of each kind")
    more = "\n\nStarts synthetic workers of its own in a temporary folder; compare numbers of one run only."
    parser = add(actions, "queue", "bench:queue", "what gateway and queue cost, beside bare aiohttp", more)
    parser.add_argument(
        "--only",
        action="append",
        choices=("latency", "streams", "fairness", "routing", "scale"),
        help="only this part (repeatable)",
    )
    parser.add_argument("--seconds", type=seconds, metavar="S", default=6.0, help="how long each number is measured")
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
