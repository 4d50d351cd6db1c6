"""Flags of `sluicegate plan`. Imported for every `--help`, so nothing but argparse."""

import argparse
import math
from collections.abc import Callable

from sluicegate.argument_types import whole

# With it the plan gives the 1.37 million tokens that were published for Kimi K2.6 on 8 H200: docs/planning.md.
DEFAULT_MEMORY_FRACTION = 0.825
_MORE = """

Arithmetic from a config.json alone: parameters, checkpoint sizes, bytes of KV, what fits, the floor of a decode step, the price of a token. MODEL is a
folder with a config.json, or a built-in name (glm-5.2, kimi-k2.6, qwen3-8b, ...; a wrong one lists them all). docs/planning.md tells what is counted."""


def add_plan(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", add: Callable[..., argparse.ArgumentParser]
) -> None:
    """`plan`, with `add` making the parser."""
    parser = add(
        commands, "plan", "plan.command:run", "tell what a model needs and what GPUs give, before you buy", _MORE
    )
    parser.add_argument("model", help="a folder with a config.json, or a built-in name")
    parser.add_argument(
        "--gpu",
        metavar="CARD",
        default="h200",
        help="h200, h100, b200, a100-80g, l40s, rtx-4090, ... or GIB:GB/S of another",
    )
    parser.add_argument("--count", type=whole(1, 4096), metavar="N", default=1, help="GPUs")
    parser.add_argument(
        "--tp", type=whole(1, 1024), metavar="N", help="GPUs that share one copy of the weights (default: all)"
    )
    parser.add_argument(
        "--weights",
        metavar="FORMAT",
        help="bf16, fp8, int8, int4-g32, int4-g64, int4-g128, or EXPERTS/OTHERS, as int4-g32/fp8 (default: as shipped)",
    )
    parser.add_argument("--kv", choices=("bf16", "fp16", "fp8"), default="bf16", help="precision of the KV cache")
    parser.add_argument(
        "--context",
        type=whole(1, 1 << 30),
        metavar="N",
        help="tokens of a request, prompt and answer (default: 8192, or what the model allows)",
    )
    parser.add_argument(
        "--concurrency", type=whole(1, 1 << 20), metavar="N", help="requests at the same time (default: as many as fit)"
    )
    parser.add_argument(
        "--memory-fraction",
        type=_fraction,
        metavar="F",
        default=DEFAULT_MEMORY_FRACTION,
        help="of each GPU's memory for weights and KV",
    )
    parser.add_argument("--page-size", type=whole(1, 256), metavar="N", default=16, help="tokens in a KV page")
    parser.add_argument("--mtp", action="store_true", help="hold the multi-token prediction layer on the GPUs too")
    parser.add_argument("--gpu-hour", type=_price, metavar="PRICE", help="of one GPU, for the cost of a million tokens")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--picture", metavar="FILE", help="draw the memory of one GPU (PNG, SVG or PDF; needs matplotlib)"
    )


def _number(text: str, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None
    if not (math.isfinite(value) and 0 < value <= high):
        raise argparse.ArgumentTypeError(f"must be above 0 and at most {high:g}, got {text}")
    return value


def _fraction(text: str) -> float:
    return _number(text, 1)


def _price(text: str) -> float:
    return _number(text, 1e6)
