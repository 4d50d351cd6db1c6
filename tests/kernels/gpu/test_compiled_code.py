"""What the compiler makes of the kernels for Ampere, Hopper and Blackwell, read from machine code. No GPU is needed for that."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(400)  # on a busy machine

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("compiled_code.py")
PRODUCT_INSTRUCTIONS = {80: {"HMMA.16816.F32"}, 90: {"HGMMA.64x64x16.F32"}, 100: {"UTCHMMA"}}
STREAMED = ("int4", "int8", "float16", "attention")
# 16-byte loads that a thread needs for one tile of weights, or of keys and values.
WIDE_LOADS = {"int4": 4, "int8": 4, "fp8": 4, "float16": 8, "attention decode": 8, "attention prefill": 4}


@pytest.fixture(scope="module", params=[80, 90, 100], ids=lambda capability: f"sm_{capability}")
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict]:
    """A capability, and what its kernels look like: call -> kernel -> description."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    # Compiling takes a second a kernel: everything for Hopper, what differs most for the others.
    some = [] if request.param == 90 else ["some"]
    command = [sys.executable, SCRIPT, str(request.param), *some]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return request.param, json.loads(result.stdout)


def test_no_register_is_spilled(compiled):
    """No kernel of any op keeps anything in local memory."""
    _, report = compiled
    spilled = {
        (call, kernel): found["stack_bytes"]
        for call, kernels in report.items()
        for kernel, found in kernels.items()
        if found["stack_bytes"] or any(name.startswith(("LDL", "STL")) for name in found["instructions"])
    }
    assert {} == spilled


def test_streams_are_read_16_bytes_at_a_time(compiled):
    """Weights, keys and values are copied to shared memory by loads of 16 bytes a thread, asynchronously."""
    _, report = compiled
    for call, kernels in report.items():
        for prefix, count in WIDE_LOADS.items():
            if call.startswith(prefix):
                [main] = [found for name, found in kernels.items() if name in ("_product", "_attend")]
                wide = sum(n for name, n in main["instructions"].items() if _is_wide_copy(name))
                assert wide >= count, call
    # What is narrower in attention are page numbers and, once a program, queries.
    for call in report:
        if call.startswith("attention"):
            copies = [name for name in report[call]["_attend"]["instructions"] if name.startswith("LDGSTS")]
            assert all(_is_wide_copy(name) or name == "LDGSTS.E" for name in copies), call


def _is_wide_copy(name: str) -> bool:
    return name.startswith("LDGSTS") and name.endswith(".128")


def test_products_are_tensor_core_products(compiled):
    """Each product's tile is multiplied by tensor cores, with float32 sums."""
    capability, report = compiled
    for call in report:
        if call.startswith(("int4", "int8", "fp8", "float16")):
            assert PRODUCT_INSTRUCTIONS[capability] <= set(report[call]["_product"]["products"]), call
        if call.startswith("attention"):
            wanted = "HMMA.16816.F32.BF16" if "bf16" in call else "HMMA.16816.F32"
            assert [wanted] == report[call]["_attend"]["products"], call
        if call.startswith(("latent", "indexer")):
            assert report[call]["_attend" if call.startswith("latent") else "_score"]["products"], call


def test_experts_products_are_tensor_core_products(compiled):
    """Grouped products run on the instructions of ordinary ones, the same for few rows and many."""
    capability, report = compiled
    for call in [name for name in report if name.startswith("experts")]:
        kernel = "_dense_product" if "float16" in call else "_quantized_product"
        assert PRODUCT_INSTRUCTIONS[capability] <= set(report[call][kernel]["products"]), call
    few, many = (report[f"experts int4 {count}"]["_quantized_product"]["products"] for count in ("few", "many"))
    assert few == many


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("dim", [64, 128])
def test_verifying_costs_a_few_instructions_a_byte(compiled, dtype, dim):
    """A decode step that verifies multiplies words two at a time, reads coefficients 16 bytes at a time, and keeps attention's products."""
    _, report = compiled
    call = f"attention decode sealed {dtype} {dim}"
    if call not in report:
        pytest.skip("compiled for Hopper only")
    plain, sealed = (report[name]["_attend"] for name in (call.replace(" sealed", ""), call))
    assert plain["products"] == sealed["products"]
    step_bytes = 32 * 2 * dim * (1 if dtype == "fp8" else 2)
    costs = [32 * found["num_warps"] * sum(found["loop"].values()) / step_bytes for found in (plain, sealed)]
    assert costs[1] - costs[0] < 2.6
    words_a_thread = step_bytes / 2 / (32 * sealed["num_warps"])
    dot_products = sum(count for name, count in sealed["loop"].items() if name.startswith("IDP.2A"))
    assert 2 * words_a_thread == dot_products  # two words by half of each of two coefficients
    assert words_a_thread / 8 == sealed["loop"]["LDG.E.128"]  # two pages share what is read of both sets
    assert not any(name.startswith("LDG.") and name != "LDG.E.128" for name in sealed["loop"])


def test_pages_are_verified_16_bytes_at_a_time(compiled):
    """So do the programs that verify whole pages."""
    _, report = compiled
    calls = [call for call in report if call.startswith(("verify_pages", "verify reads"))]
    assert calls
    for call in calls:
        [found] = [found for name, found in report[call].items() if name.startswith("_verify")]
        assert found["instructions"]["LDG.E.128"] >= 6, call


def test_a_wider_page_table_is_no_reason_to_compile(compiled):
    """A start tries the widest one: steps between find their kernels there."""
    _, report = compiled
    if "latent of any width" not in report:
        pytest.skip("compiled for Hopper only")
    assert 1 == report["latent of any width"]["_attend"]["num_variants"]


def test_one_row_and_thousands_run_on_one_instruction(compiled):
    """Few rows and many may take other tiles, but a row is multiplied by the same instruction of the same shape: its bits can't differ."""
    _, report = compiled
    pairs = [(call, call.replace("rows 1", "rows 2048")) for call in report if call.endswith("rows 1")]
    pairs += [(call, call.replace("decode", "prefill")) for call in report if "decode" in call]
    pairs = [(few, many) for few, many in pairs if many in report]
    assert len(pairs) >= 2
    for few, many in pairs:
        kernel = "_product" if "rows" in few else "_attend"
        assert report[few][kernel]["products"] == report[many][kernel]["products"], few
