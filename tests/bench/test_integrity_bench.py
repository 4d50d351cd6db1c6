"""What `sluicegate bench integrity` tells of checks: each mode is timed over the same steps, nothing sound is found bad, and the figures are written."""

import json

from bench import integrity, sealed_attention


def test_every_mode_is_timed(smollm2_path, monkeypatch, tmp_path) -> None:
    """One stream and two, few turns: steps took time in each mode, and `off` is its own measure."""
    monkeypatch.setattr(integrity, "ROWS", ((1, 32), (2, 16)))
    costs = integrity.measure(smollm2_path, 3)
    assert [(1, 32), (2, 16)] == [(cost.num_streams, cost.context) for cost in costs]
    for cost in costs:
        assert set(integrity.MODES) == set(cost.step_ms) == set(cost.ratio) == set(cost.error)
        assert min(cost.step_ms.values()) > 0.1
        assert (1.0, 0.0) == (cost.ratio["off"], cost.error["off"])
    integrity.write(costs, tmp_path)
    assert costs[1].ratio == json.loads((tmp_path / "integrity.json").read_text())[1]["ratio"]
    assert "| 2 streams at 16 |" in (tmp_path / "integrity.md").read_text()


def test_attention_alone(monkeypatch, tmp_path) -> None:
    """A small pool, and turns enough that a pause of the machine doesn't count: a check makes it slower or no faster by much, and the table has each row."""
    monkeypatch.setattr(sealed_attention, "ROWS", (("fp16", 1, 70), ("fp8", 3, 40)))
    monkeypatch.setattr(sealed_attention, "POOL_BYTES", 1_000_000)
    found = sealed_attention.measure(60)
    assert all(one.layer_us > 0 and one.ratio > 0.5 for one in found)
    sealed_attention.write(found, tmp_path)
    lines = (tmp_path / "sealed_attention.md").read_text().splitlines()
    assert ["| 1 row at 70, fp16 ", "| 3 rows at 40, fp8 "] == [line[: line.index("|", 1)] for line in lines[2:]]
