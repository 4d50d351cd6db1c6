"""Flags of the processes, `gateway` and `worker`, of `up`, which starts both, and of `down`; and those that say which stack is meant."""

import argparse
from collections.abc import Callable
from typing import TypeAlias

from sluicegate.argument_types import kv_scales, rate, seconds, whole
from sluicegate.environment import DEFAULT_REDIS_URL
from sluicegate.gateway_flags import add_limits
from sluicegate.model_store import DEFAULT_MODEL

Parsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Add = Callable[..., argparse.ArgumentParser]
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def add_processes(commands: Parsers, add: Add) -> None:
    """The four commands. `add` makes a command's parser."""
    _add_stack(commands, add)
    _add_gateway_and_worker(commands, add)


def add_data(parser: argparse.ArgumentParser) -> None:
    """Which stack."""
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="folder of the stack: secrets, database, logs (SLUICEGATE_DATA, or stack in SLUICEGATE_HOME)",
    )


def add_config(parser: argparse.ArgumentParser) -> None:
    """Which file of settings."""
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings (SLUICEGATE_CONFIG)")


def add_redis(parser: argparse.ArgumentParser) -> None:
    """Where Redis is."""
    add_data(parser)
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
        "--kv-scales", type=kv_scales, metavar="WHICH", default="auto",
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
        "--kv-tokens", type=whole(64, 1 << 30), metavar="N", default=16384, help="tokens that the KV cache holds"
    )
    parser.add_argument(
        "--page-size", type=int, choices=PAGE_SIZES, metavar="N", default=16, help="tokens in a KV page, a power of two"
    )
    parser.add_argument(
        "--max-sequences", type=whole(1, 256), metavar="N", default=32, help="sequences in a worker's batch"
    )


def _synthetic(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine", choices=("model", "synthetic"), default="model",
        help="what answers: a model, or made-up text at set rates, for rehearsals",
    )  # fmt: skip
    group = parser.add_argument_group("with --engine synthetic")
    group.add_argument(
        "--prefill-rate", type=rate, metavar="R", default=0.0, help="prompt tokens a second, 0 for no wait"
    )
    group.add_argument(
        "--decode-rate", type=rate, metavar="R", default=0.0, help="tokens a second of each stream, 0 for no wait"
    )
    group.add_argument(
        "--context", type=whole(2, 1 << 24), metavar="N", default=8192, help="longest prompt with its answer"
    )


def _drain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--drain-grace", type=seconds, metavar="SECONDS", default=30.0, help="time for running answers when stopping"
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
        "--port", type=whole(0, 65535), metavar="P", default=8080, help="port to listen on, 0 for any free one"
    )


def _add_stack(commands: Parsers, add: Add) -> None:
    more = "\n\nStarts an embedded Valkey, a gateway and workers, makes a demo tenant, and prints how to use them."
    parser = add(commands, "up", "stack:up", "start a whole stack on this machine", more)
    add_config(parser)
    _listen(parser)
    add_data(parser)
    _model(parser)
    parser.add_argument("--workers", type=whole(1, 64), metavar="N", default=1, help="worker processes")
    _engine(parser)
    _synthetic(parser)
    _drain(parser)
    parser.add_argument("--tenants", metavar="FILE", help="TOML file of tenants, keys, limits and prices to set up")
    parser.add_argument("--detach", action="store_true", help="return when the stack is ready and leave it running")
    add_data(add(commands, "down", "stack:down", "stop the stack of a data folder, letting running answers finish"))


def _add_gateway_and_worker(commands: Parsers, add: Add) -> None:
    parser = add(commands, "gateway", "processes:gateway", "run one gateway process: HTTP in, jobs out")
    add_config(parser)
    _listen(parser)
    add_redis(parser)
    add_limits(parser)
    _drain(parser)
    _trace(parser)
    more = "\n\nA worker joins the stack behind its Redis and takes work; start as many as you like."
    parser = add(commands, "worker", "processes:worker", "run one worker process: a model that takes jobs", more)
    add_config(parser)
    add_redis(parser)
    _model(parser)
    _engine(parser)
    parser.add_argument(
        "--step-tokens", type=whole(1, 65536), metavar="N", default=256, help="most tokens in one engine step"
    )
    parser.add_argument(
        "--kernels", choices=("auto", "ref", "cpu", "gpu"), default="auto",
        help="what computes; auto is the GPU where torch sees one, else the CPU",
    )  # fmt: skip
    _synthetic(parser)
    parser.add_argument(
        "--lease",
        type=seconds,
        metavar="SECONDS",
        default=2.0,
        help="silence after which others take over a worker's jobs",
    )
    parser.add_argument(
        "--stall", type=seconds, metavar="SECONDS", default=30.0, help="longest step before the engine counts as stuck"
    )
    parser.add_argument(
        "--max-deliveries", type=whole(1, 100), metavar="N", default=3, help="workers that one job may take down"
    )
    _drain(parser)
    _trace(parser)
