"""What `sluicegate bench integrity` tells of cached prefixes: the right tokens are found, in a crowd too."""

import json

from bench import prefix_reuse


def test_a_prefix_is_found_among_others() -> None:
    """Lookups are timed of a whole known prefix; the crowd is really there."""
    seconds, num_nodes = prefix_reuse.lookups(200)
    assert prefix_reuse.NUM_LOOKUPS == len(seconds)
    assert 100 * 4 + 200 * 2 + prefix_reuse.CACHED_TOKENS // prefix_reuse.PAGE_SIZE == num_nodes


def test_a_real_model(smollm2_path, monkeypatch, tmp_path) -> None:
    """Short prompts: the second of each pair finds the first's whole pages, and the figures are written."""
    monkeypatch.setattr(prefix_reuse, "PROMPT_TOKENS", 150)
    monkeypatch.setattr(prefix_reuse, "CACHED_TOKENS", 100)
    monkeypatch.setattr(prefix_reuse, "NUM_PREFIXES", 100)
    reuse = prefix_reuse.measure(smollm2_path, 1)
    assert 96 == reuse.cached_tokens
    assert 0 < reuse.warm_s < reuse.cold_s
    prefix_reuse.write(reuse, tmp_path)
    assert reuse.ratio == json.loads((tmp_path / "prefix_reuse.json").read_text())["ratio"]
    assert f"{reuse.ratio:.1%} of the cold one" in (tmp_path / "prefix_reuse.md").read_text()
