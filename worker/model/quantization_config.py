"""What config.json says about quantized weights: the method, and for each module how many bits, which groups, which scales.

Which modules are quantized at all is told by the tensors that are there: a checkpoint that mixes quantized and plain matrices is normal,
and a plain one explains itself.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from worker.model.errors import ModelError
from worker.model.module_patterns import ModulePattern, PatternError

Strategy = Literal["tensor", "channel", "group", "block"]
_STRATEGIES: tuple[Strategy, ...] = ("tensor", "channel", "group", "block")
_COMPRESSED_FORMATS = {
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
    "dense",
}
_MAX_TEXT = 500


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a module's weight is quantized. `group_size` counts columns that share a scale, `block` rows and columns."""

    num_bits: int
    is_float: bool
    is_symmetric: bool
    strategy: Strategy
    group_size: int = 0
    block: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Target:
    """Modules that a scheme is for: one by its name, some by a pattern, or all of a class."""

    text: str
    pattern: ModulePattern | None = None

    def rank(self, module: str) -> int:
        """How specific a match is: 0 by name, 1 by pattern, 2 by class; 3 for none. Every quantized module is a linear one. Raises PatternError."""
        if self.text == module:
            return 0
        if self.pattern is not None:
            return 1 if self.pattern.matches(module) else 3
        return 2 if self.text == "Linear" else 3


@dataclass(frozen=True, slots=True)
class Quantization:
    """The method, its schemes with the modules that they are for, and whether stored KV scales are for 8-bit floats."""

    method: str
    label: str
    schemes: tuple[tuple[tuple[Target, ...], Scheme], ...] = ()
    zero_point_offset: int = 0  # what must be added to a stored zero point: 1 for GPTQ's first format
    has_kv_scales: bool = True

    def scheme(self, module: str) -> Scheme:
        """The scheme for a module that has quantized tensors: that of the most specific match, of equals the first. Raises ModelError if there's none."""
        if len(self.schemes) == 1:  # it's meant whatever its targets, which may be names of classes
            return self.schemes[0][1]
        best, chosen = 3, None
        for targets, scheme in self.schemes:
            for target in targets:
                try:
                    rank = target.rank(module)
                except PatternError as error:
                    raise ModelError(f"{self.label}: pattern {target.text[:100]!r} {error} on {module!r}") from None
                if rank < best:
                    best, chosen = rank, scheme
        if chosen is None:
            raise ModelError(f"{self.label}: quantization_config does not say how {module!r} is quantized")
        return chosen


def quantization(raw: dict[str, Any], label: str) -> Quantization:
    """The quantization of a model given its config.json; `label` names the file. Raises ModelError."""
    text = raw.get("text_config")
    sources = (raw, text) if isinstance(text, dict) else (raw,)
    found = [s[key] for s in sources for key in ("quantization_config", "compression_config") if s.get(key) is not None]
    if not found:
        return Quantization("none", label)
    fields = _Fields(found[0], f"{label}: quantization_config")
    method = fields.text("quant_method")
    readers = {"compressed-tensors": _compressed_tensors, "gptq": _gptq, "awq": _awq, "fp8": _fp8}
    if method not in readers:
        raise ModelError(f"{label}: quant_method {method!r} is not supported ({', '.join(readers)} are)")
    return replace(readers[method](fields), label=label)


class _Fields:
    """Typed look-ups."""

    def __init__(self, raw: Any, label: str) -> None:
        if not isinstance(raw, dict):
            raise ModelError(f"{label} must be an object")
        self.raw, self.label = raw, label

    def text(self, name: str, default: str | None = None) -> str:
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, str) or len(value) > _MAX_TEXT:
            raise ModelError(f"{self.label}.{name} must be text")
        return value

    def number(self, name: str, default: int | None = None) -> int:
        value = self.raw.get(name)
        value = default if value is None else value
        if type(value) is not int or not -1 <= value <= 1 << 20:
            raise ModelError(f"{self.label}.{name} must be a number")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw.get(name)
        value = default if value is None else value
        if type(value) is not bool:
            raise ModelError(f"{self.label}.{name} must be true or false")
        return value

    def part(self, name: str) -> "_Fields":
        return _Fields(self.raw.get(name), f"{self.label}.{name}")

    def pair(self, name: str) -> tuple[int, int] | None:
        value = self.raw.get(name)
        if value is None:
            return None
        if (
            not isinstance(value, list)
            or len(value) != 2
            or any(type(n) is not int or not 1 <= n < 1 << 20 for n in value)
        ):
            raise ModelError(f"{self.label}.{name} must be two sizes")
        return value[0], value[1]


def _compressed_tensors(fields: _Fields) -> Quantization:
    _check_format(fields)
    if fields.raw.get("transform_config"):
        raise ModelError(
            f"{fields.label}.transform_config is not supported: activations would have to be turned as weights are"
        )
    groups = fields.part("config_groups")
    schemes = []
    for name in groups.raw:
        group = groups.part(name)
        if group.raw.get("weights") is None:
            continue
        _check_format(group)
        targets = group.raw.get("targets")
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            raise ModelError(f"{group.label}.targets must be a list of names")
        found = tuple(_target(target, group.label) for target in targets)
        schemes.append((found, _compressed_scheme(group.part("weights"))))
    cache = fields.raw.get("kv_cache_scheme")
    is_fp8 = not isinstance(cache, dict) or (cache.get("num_bits") == 8 and cache.get("type") == "float")
    return Quantization("compressed-tensors", "", tuple(schemes), has_kv_scales=is_fp8)


def _check_format(fields: _Fields) -> None:
    name = fields.text("format", "dense")
    if name not in _COMPRESSED_FORMATS:
        raise ModelError(
            f"{fields.label}.format {name!r} is not supported ({', '.join(sorted(_COMPRESSED_FORMATS))} are)"
        )


def _target(text: str, label: str) -> Target:
    try:
        return Target(text, ModulePattern(text.removeprefix("re:")) if text.startswith("re:") else None)
    except PatternError as error:
        raise ModelError(f"{label}: pattern {text[:100]!r} {error}") from None


def _compressed_scheme(weights: _Fields) -> Scheme:
    num_bits, kind = weights.number("num_bits", 8), weights.text("type", "int")
    group_size = weights.number("group_size", -1)
    strategy = weights.text("strategy", "group" if group_size > 0 else "channel" if group_size == -1 else "tensor")
    chosen = next((known for known in _STRATEGIES if known == strategy), None)
    if chosen is None:
        raise ModelError(f"{weights.label}.strategy {strategy!r} is not supported ({', '.join(_STRATEGIES)} are)")
    if (kind, num_bits) not in {("int", 4), ("int", 8), ("float", 8)}:
        raise ModelError(
            f"{weights.label}: {num_bits} bits of type {kind!r} are not supported (int 4, int 8 and float 8 are)"
        )
    block = weights.pair("block_structure") or (0, 0)
    if (chosen == "group" and group_size < 1) or (chosen == "block" and block == (0, 0)):
        raise ModelError(f"{weights.label}.strategy is {chosen!r} without a size")
    return Scheme(num_bits, kind == "float", weights.flag("symmetric", True), chosen, max(0, group_size), block)


def _gptq(fields: _Fields) -> Quantization:
    form = fields.text("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise ModelError(f"{fields.label}.checkpoint_format {form!r} is not supported (gptq and gptq_v2 are)")
    general = _gptq_scheme(fields, fields)
    schemes: list[tuple[tuple[Target, ...], Scheme]] = []
    dynamic = fields.part("dynamic") if fields.raw.get("dynamic") else _Fields({}, fields.label)
    for pattern in dynamic.raw:
        if not pattern.startswith("-:"):  # such modules are plain
            target = _target("re:" + pattern.removeprefix("+:"), dynamic.label)
            schemes.append(((target,), _gptq_scheme(dynamic.part(pattern), fields)))
    return Quantization(
        "gptq", "", (*schemes, ((Target("Linear"),), general)), zero_point_offset=1 if form == "gptq" else 0
    )


def _gptq_scheme(fields: _Fields, general: _Fields) -> Scheme:
    """`general` is asked for what `fields` leaves out."""
    num_bits = fields.number("bits", general.number("bits"))
    if num_bits not in (4, 8):
        raise ModelError(f"{fields.label}: {num_bits} bits are not supported (4 and 8 are)")
    group_size = fields.number("group_size", general.number("group_size", -1))
    is_symmetric = fields.flag("sym", general.flag("sym", True))
    return Scheme(num_bits, False, is_symmetric, "group" if group_size > 0 else "channel", max(0, group_size))


def _awq(fields: _Fields) -> Quantization:
    version = fields.text("version", "gemm").lower()
    if version != "gemm":
        raise ModelError(f"{fields.label}.version {version!r} is not supported (gemm is)")
    num_bits = fields.number("bits", fields.number("w_bit", 4))
    if num_bits != 4:
        raise ModelError(f"{fields.label}: {num_bits} bits are not supported (4 are)")
    group_size = fields.number("group_size", fields.number("q_group_size", 128))
    has_zero_points = fields.flag("zero_point", True)
    scheme = Scheme(4, False, not has_zero_points, "group" if group_size > 0 else "channel", max(0, group_size))
    return Quantization("awq", "", (((Target("Linear"),), scheme),))


def _fp8(fields: _Fields) -> Quantization:
    if fields.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise ModelError(f"{fields.label}.fmt {fields.raw['fmt']!r} is not supported (e4m3 is)")
    block = fields.pair("weight_block_size")
    scheme = Scheme(8, True, True, "block" if block else "tensor", 0, block or (0, 0))
    return Quantization("fp8", "", (((Target("Linear"),), scheme),))
