"""Patterns of modules match what `re.match` matches, and none of them runs away."""

import random
import re

import pytest

from worker.model.errors import ModelError
from worker.model.module_patterns import MAX_LENGTH, ModulePattern, PatternError
from worker.model.quantization_config import quantization

NAMES = (
    "lm_head", "model.embed_tokens", "model.layers.0.self_attn.q_proj", "model.layers.12.mlp.gate_proj", "model.layers.7.mlp.gate",
    "model.layers.3.mlp.experts.127.down_proj", "language_model.model.layers.12.mlp.shared_experts.up_proj", "",
)  # fmt: skip
# As checkpoints have them.
PATTERNS = (
    ".*lm_head", ".*self_attn.(q|k|v|o)_proj$", r".*\.mlp\.gate.*", r".*\.1[0-9]\..*(?:gate|up|down).*", "^(?!.*lm_head).*$", r"^model\.layers\.\d+\.mlp\.up_proj$",
    r".*layers\.(?:[0-6]|1\d)\.(?!self_attn).*proj$", r"(model\.)?(layers|embed)", r"model\.layers\.(?:\d{1,2}\.){1}mlp", "", "$",
)  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_of_checkpoints(pattern: str) -> None:
    """On names of modules."""
    ours = ModulePattern(pattern)
    for name in NAMES:
        assert bool(re.match(pattern, name)) == ours.matches(name), name


def _random_pattern(source: random.Random, depth: int) -> str:
    kind = source.random()
    if depth == 0 or kind < 0.35:
        return source.choice(
            ["a", "b", ".", "[ab]", "[^a]", r"\.", r"\d", "^", "$", "1", "\n", "[]a]", r"[\d.]", r"[a\]]"]
        )
    if kind < 0.55:
        return _random_pattern(source, depth - 1) + _random_pattern(source, depth - 1)
    inner = _random_pattern(source, depth - 1)
    if kind < 0.7:
        return "(" + source.choice(["", "?:", f"?P<n{source.randrange(10**9)}>", "?=", "?!"]) + inner + ")"
    if kind < 0.8:
        return f"(?:{inner}|{_random_pattern(source, depth - 1)})"
    ending = source.choice(
        ["*", "+", "?", "{2}", "{1,2}", "{,2}", "{1,}", "*?", "+?", "??", "{0}", "{2}?", "{", "{,}", "{}", "{a}"]
    )
    return f"(?:{inner}){ending}"


def test_random_patterns_on_random_names() -> None:
    """The same answer as `re`, for the tenth name of a pattern as for the first."""
    source, num_matched = random.Random(3), 0
    for _ in range(3000):
        pattern = _random_pattern(source, 5)
        theirs, ours = re.compile(pattern), ModulePattern(pattern)
        for _ in range(10):
            name = "".join(source.choice("ab.1\n") for _ in range(source.randrange(7)))
            expected = bool(theirs.match(name))
            num_matched += expected
            assert expected == ours.matches(name), (pattern, name)
    assert 5_000 < num_matched < 25_000


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|a)*$", "(a*)*b", ".*.*.*.*.*.*.*.*.*.*.*b", "(?:a?){30}a{30}b", "(.*)*b", "(?=(a+)+$)b"]
)
def test_none_runs_away(pattern: str) -> None:
    """`re` would need hours, or longer than the world lasts, to say no."""
    assert not ModulePattern(pattern).matches("a" * 400 + "c")


def test_one_that_takes_too_long_is_told() -> None:
    """A look ahead at each place, each of them over the rest, in hundreds of states that no other name shares."""
    name = "".join(random.Random(1).choices("ab", k=500))
    with pytest.raises(PatternError, match="takes too long"):
        ModulePattern("(?:(?=.*a.{400}c)?.)*$").matches(name)


def test_configurations_are_read_with_them() -> None:
    """A pattern that would run away just doesn't match, and one that takes too long stops the load with its name."""
    name = "".join(random.Random(1).choices("ab", k=500))

    def num_bits(pattern: str) -> int:
        groups = {
            f"group_{bits}": {"targets": [target], "weights": {"num_bits": bits, "group_size": 32}}
            for bits, target in ((4, f"re:{pattern}"), (8, "Linear"))
        }
        raw = {
            "quantization_config": {
                "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups,
            }
        }  # fmt: skip
        return quantization(raw, "config.json").scheme(name).num_bits

    assert num_bits("([ab]+)+$") == 4
    assert num_bits("([ab]+)+c$") == 8
    with pytest.raises(ModelError, match=r"^config\.json: pattern 're:.*takes too long on 'a"):
        num_bits("(?:(?=.*a.{400}c)?.)*$")


REFUSED = {
    r"(a)\1": "not supported", "(?i)a": "not supported", "(?<=a)b": "not supported", r"a\b": "not supported", "a*+": "two quantifiers", "a**": "two quantifiers",
    "(": "without a '\\)'", ")": "without a '\\('", "[a": "not supported", "[b-a]": "no set", "*a": "repeats nothing", "^*": "repeats nothing", "a{3,2}": "more at least",
    "a{999999999}": "states", "(?:a{64}){65}": "states", "(" * 45 + ")" * 45: "deep", "a\\": "not supported", "a" * (MAX_LENGTH + 1): "characters", "[a--b]": "not supported",
}  # fmt: skip


@pytest.mark.parametrize("pattern", REFUSED, ids=lambda pattern: pattern[:16])
def test_refused(pattern: str) -> None:
    """With the part that can't be followed."""
    with pytest.raises(PatternError, match=REFUSED[pattern]):
        ModulePattern(pattern)
