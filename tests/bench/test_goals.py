"""Goals are judged by the figures of one run."""

import pytest

from bench.contenders import OURS, OURS_8_BITS, OURS_FP8
from bench.goals import judged, slower_than_a_peer
from bench.results import Cell, EngineResult, Results, Row, WorkerResult


@pytest.fixture
def results() -> Results:
    """A run with a few figures: ours three times llama.cpp, half of the floor."""
    ours = EngineResult(OURS, "ours", rows={"decode-1x512": Cell([90.0, 100.0, 110.0]), "prefill-512": Cell([500.0])})
    fp8 = EngineResult(OURS_FP8, "ours, FP8", rows={"decode-1x512": Cell([100.0]), "decode-1x8000": Cell([40.0])})
    peer = EngineResult("llama.cpp", "llama.cpp", rows={"decode-1x512": Cell([50.0]), "prefill-512": Cell([600.0])})
    plain = EngineResult("llama.cpp-plain", "llama.cpp, plain", rows={"decode-1x512": Cell([40.0])})
    rows = [Row("decode-1x512", "decode", 1, 512, 16, 3), Row("prefill-512", "prefill", 1, 512, 0, 1)]
    return Results(
        "now", {}, "m", weight_bytes=100_000_000, bandwidth=[20e9], rows=rows, engines=[ours, fp8, plain, peer],
        worker=WorkerResult(ready_s=[5.0, 7.0, 5.5], resident_bytes=500, torch_bytes=200, kv_bytes=100_000_000),
    )  # fmt: skip


def test_figures_decide(results: Results) -> None:
    """Medians, ratios to a peer's best variant, shares of the floor, limits from above and below."""
    states = {goal["goal"]: (goal["state"], goal["shown"]) for goal in judged(results)}

    assert ("reached", "2.00x") == states["decode, 1 stream at 512, over llama.cpp"]
    assert ("missed", "50.00%") == states["decode, 1 stream at 512, of the bandwidth floor"]
    assert ("missed", "0.83x") == states["prefill of 512, over llama.cpp"]
    assert ("missed", "2.50x") == states["a decode step at 8,000 tokens over one at 512, FP8 KV"]
    assert ("reached", "5.50 s") == states["`sluicegate worker` to ready, warm file cache"]
    assert ("not measured", "-") == states["prefill of 512, over OpenVINO"]


def test_activations_of_8_bits_have_goals_of_their_own(results: Results) -> None:
    """They are judged beside OpenVINO, which computes so, and never count as the default."""
    results.engines += [
        EngineResult(OURS_8_BITS, "ours, 8 bits", rows={"prefill-512": Cell([1200.0])}),
        EngineResult("openvino", "OpenVINO", rows={"prefill-512": Cell([1000.0])}),
    ]
    states = {goal["goal"]: (goal["state"], goal["shown"]) for goal in judged(results)}

    assert ("missed", "0.50x") == states["prefill of 512, over OpenVINO"]
    title = "prefill of 512 with 8-bit activations, as OpenVINO computes, over OpenVINO"
    assert ("reached", "1.20x") == states[title]
    assert "prefill: OpenVINO is 2.00 times as fast" in slower_than_a_peer(results)


def test_rows_that_are_lost_are_named(results: Results) -> None:
    """A peer that is faster than both of ours is told with its factor."""
    assert ["prefill: llama.cpp is 1.20 times as fast"] == slower_than_a_peer(results)


def test_json_has_medians(results: Results) -> None:
    """Readers of the file need not compute them."""
    cell = results.as_json()["engines"][0]["rows"]["decode-1x512"]

    assert 100.0 == cell["median"]
    assert 0.05 == cell["spread"]
