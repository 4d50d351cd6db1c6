"""Flags of the commands that make models smaller and tell what that costs: `quantize`, `calibrate`, `eval`."""

import argparse
from collections.abc import Callable

from sluicegate.argument_types import kv_scales, whole

Add = Callable[..., argparse.ArgumentParser]


def add_quality(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", add: Add) -> None:
    """The three commands."""
    _add_quantize(commands, add)
    more = (
        "\n\nRuns a text through the model and stores scales for each layer and KV head beside it, for `--kv-dtype fp8`. "
        "A worker uses them by itself, for this very model only."
    )
    parser = add(commands, "calibrate", "quality:calibrate", "find scales for an FP8 KV cache", more)
    parser.add_argument("model", metavar="MODEL", help="a known model's name, a GGUF file, or a Hugging Face folder")
    parser.add_argument("--out", metavar="FILE", help="where to store them (default: beside the model)")
    _calibration_tokens(parser, 8192)
    _add_eval(commands, add)


def _add_quantize(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", add: Add) -> None:
    more = (
        "\n\nSRC is a Hugging Face folder (bf16, f16, f32, or FP8 in blocks) or a GGUF file. DST becomes a folder in compressed-tensors format, which "
        "vLLM and SGLang read too. A run that was killed goes on where it was when it's started again with the same settings."
    )
    parser = add(commands, "quantize", "quantize:quantize", "make a model smaller: INT4 and INT8 weights", more)
    parser.add_argument("source", metavar="SRC", help="a known model's name, a GGUF file, or a Hugging Face folder")
    parser.add_argument("result", metavar="DST", help="a folder that isn't there yet, or that a run left unfinished")
    parser.add_argument(
        "--method", choices=("rtn", "gptq"), default="rtn",
        help="rtn: each group rounded to nearest, with the best scale; gptq: errors made up for, by a calibration text (dense models)",
    )  # fmt: skip
    parser.add_argument(
        "--policy", choices=("auto", "linear", "experts", "experts-only", "none"), default="auto",
        help="what gets 4 bits: linear: all linear layers; experts: routed experts, other linear layers 8 bits; experts-only: others as they are; "
        "none: nothing, weights are only copied; auto: by the family",
    )  # fmt: skip
    parser.add_argument(
        "--group-size", type=int, choices=(32, 64, 128), default=32, help="neighbouring columns that share a scale"
    )
    parser.add_argument("--asymmetric", action="store_true", help="INT4 with a zero point for each group")
    parser.add_argument(
        "--set", action="append", type=_override, metavar="PATTERN=BITS", default=[],
        help="4, 8 or 16 bits (as they are) for modules of these names, for example '*.down_proj=8' (repeatable, the first that matches counts)",
    )  # fmt: skip
    parser.add_argument(
        "--shard-size", type=_size, metavar="SIZE", default="2GB",
        help="size of the result's files for gptq and GGUF; otherwise they are as the source's",
    )  # fmt: skip
    _calibration_tokens(parser, 32768)
    parser.add_argument("--dry-run", action="store_true", help="only print what would be done")


def _add_eval(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", add: Add) -> None:
    more = "\n\nThe text is Python's language reference. With --reference, both models run over the same tokens and are compared token by token."
    parser = add(commands, "eval", "quality:evaluate", "tell a model's quality, and what quantizing cost", more)
    parser.add_argument("model", metavar="MODEL", help="a known model's name, a GGUF file, or a Hugging Face folder")
    parser.add_argument(
        "--reference", metavar="OTHER", help="the model to compare with, for example the one in 16 bits"
    )
    parser.add_argument("--tokens", type=whole(512, 1 << 20), metavar="N", default=4096, help="tokens of text")
    for prefix, default in (("", "fp16"), ("reference-", "fp16")):
        whose = "the reference's" if prefix else "the"
        parser.add_argument(
            f"--{prefix}kv-dtype",
            choices=("bf16", "fp16", "fp8"),
            default=default,
            help=f"precision of {whose} KV cache",
        )
    parser.add_argument(
        "--kv-scales", type=kv_scales, metavar="WHICH", default="auto", help="as of `sluicegate worker`"
    )
    parser.add_argument(
        "--needle-tokens", type=whole(0, 1 << 20), metavar="N", default=1024,
        help="length of the texts in which a fact is to be found again, 0 for none",
    )  # fmt: skip
    parser.add_argument(
        "--kernels", choices=("auto", "ref", "cpu"), default="auto", help="implementation of the kernels"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    parser.add_argument("--picture", metavar="FILE", help="draw them into a PNG there (needs matplotlib)")


def _calibration_tokens(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument(
        "--calibration-tokens", type=whole(512, 1 << 20), metavar="N", default=default,
        help="tokens of the calibration text: docstrings of Python's standard library",
    )  # fmt: skip


def _override(text: str) -> tuple[str, int]:
    pattern, _, bits = text.rpartition("=")
    if not pattern or bits not in {"4", "8", "16"}:
        raise argparse.ArgumentTypeError(f"expected PATTERN=4, =8 or =16, got {text!r}")
    return pattern, int(bits)


def _size(text: str) -> int:
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
    number, unit = text[:-2], text[-2:].upper()
    try:
        size = int(float(number) * units[unit])
    except (KeyError, ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"expected a size like 500MB or 2GB, got {text!r}") from None
    if not 1 << 10 <= size <= 1 << 40:
        raise argparse.ArgumentTypeError(f"must be 1KB to 1000GB, got {text!r}")
    return size
