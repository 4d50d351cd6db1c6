"""The measurement of loading, on a checkpoint of a few kilobytes."""

import pytest

from bench.load import LoadError, measure, table
from bench.synthetic_checkpoint import Shape, write_checkpoint


def test_load_takes_turns_with_dd(tmp_path) -> None:
    """Both are timed from the disk and from the page cache, on the same bytes; the table names the ratio and the memory."""
    folder = tmp_path / "tiny"
    write_checkpoint(
        folder, Shape(hidden=64, ffn=96, layers=2, heads=4, kv_heads=2, vocabulary=300, context=256, group=32)
    )

    times = measure(folder, "ref", 1)

    assert times.num_bytes == sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert 0 < times.weight_bytes
    for place in ("disk", "cache"):
        assert len(times.dd_s[place]) == len(times.load_s[place]) == 1
        assert 0 < times.ratio(place)
    assert "| the disk |" in table(times)
    assert "of the weights at most" in table(times)


def test_a_checkpoint_that_does_not_load_is_one_line(tmp_path) -> None:
    """What the loading process said last, without its traceback."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"nothing")

    with pytest.raises(LoadError, match=r"^[^\n]*the load failed: [^\n]*x\.safetensors[^\n]*$"):
        measure(path, "ref", 1)
