"""Imports go downward only, each module stands alone, and nothing that carries code is ever decoded."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("sluicegate", "bench", "gateway", "worker", "protocol", "kernels")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if ".peers" not in path.parts)
# Imported by other engines' Pythons only.
IN_PEERS = {ROOT / "bench" / "engines" / f"{name}.py" for name in ("llamacpp", "openvino", "vllm")}

# Run by itself, so it composes what it measures.
COMPOSES = {ROOT / "bench" / "admission.py"}

# What each package may import of the other packages, and what it must never import at all.
ALLOWED = {
    "sluicegate": {"bench", "gateway", "worker", "protocol", "kernels"},
    "bench": {"gateway", "worker", "protocol", "kernels"},
    "gateway": {"protocol"},
    "worker": {"protocol", "kernels"},
    "protocol": set(),
    "kernels": set(),
}
FORBIDDEN = {
    "bench": set(),
    "gateway": {"torch", "triton", "gguf", "safetensors"},
    "protocol": {"torch", "redis", "aiohttp", "socket", "asyncio"},
    "kernels": {"redis", "aiohttp"},
    "worker": {"aiohttp", "jinja2", "transformers"},
    "sluicegate": {"torch", "transformers"},
}
TORCH_FREE = ("worker/scheduler.py", "worker/engine.py", "worker/executor.py", "worker/process.py", "worker/synthetic/executor.py", "worker/fairness.py", "worker/cache/page_pool.py", "worker/cache/prefix_index.py",
              "worker/cache/page_cache.py", "worker/cache/namespace.py")  # fmt: skip


def _imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_imports_go_downward(path: Path) -> None:
    """A package imports only what lies below it."""
    package = path.relative_to(ROOT).parts[0]
    roots = {name.partition(".")[0] for name in _imports(path)}
    allowed = ALLOWED[package] | ({"sluicegate"} if path in COMPOSES else set())
    assert (roots & set(PACKAGES)) - {package} <= allowed
    assert set() == roots & FORBIDDEN[package]


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_no_format_that_carries_code(path: Path) -> None:
    """No pickle, marshal, yaml, eval or torch.load."""
    assert set() == _imports(path) & {"pickle", "marshal", "shelve", "dill", "cloudpickle", "yaml"}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {"eval", "exec", "torch.load", "jinja2.Environment", "Environment", "jinja2.Template"}


@pytest.mark.parametrize("path", TORCH_FREE)
def test_bookkeeping_needs_no_torch(path: str) -> None:
    """Scheduler, pool and index are torch-free themselves."""
    assert "torch" not in {name.partition(".")[0] for name in _imports(ROOT / path)}


def test_the_gateway_runs_without_torch() -> None:
    """Importing the whole gateway loads neither torch nor numerical packages."""
    code = "import sys, gateway.app, gateway.intake.child; print([m for m in ('torch', 'kernels', 'worker') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "[]" == result.stdout.strip()


def test_help_is_instant() -> None:
    """The command's module imports nothing heavy."""
    code = "import sys, sluicegate.command; print([m for m in ('torch', 'aiohttp', 'redis', 'jinja2') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "[]" == result.stdout.strip()


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.name != "__main__.py" and path not in IN_PEERS], ids=_name
)
def test_modules_can_be_imported(path: Path) -> None:
    """Every module can be imported by its name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))


def test_our_kernels_package_is_the_one_imported() -> None:
    """Another distribution also imports as `kernels`; ours exports nothing that could be taken for it."""
    kernels = importlib.import_module("kernels")
    assert (ROOT / "kernels" / "__init__.py").samefile(kernels.__file__)
    assert not hasattr(kernels, "__version__")
    assert not hasattr(kernels, "get_kernel")


def test_every_package_lists_its_files() -> None:
    """A package's docstring names each of its modules, so that a reader knows where to go."""
    for package in (
        "gateway",
        "worker",
        "protocol",
        "sluicegate",
        "sluicegate/plan",
        "worker/cache",
        "worker/model",
        "worker/quantize",
        "worker/synthetic",
        "bench",
        "bench/engines",
        "worker/cache",
        "worker/model",
        "gateway/intake",
    ):
        text = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text())) or ""
        for path in (ROOT / package).glob("*.py"):
            if path.stem not in {"__init__", "__main__"}:
                assert path.stem in text, f"{package}/__init__.py does not mention {path.stem}"
