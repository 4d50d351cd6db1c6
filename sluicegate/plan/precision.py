"""Bytes of a tensor in each weight format, and policies: which tensors are kept in which."""

from dataclasses import dataclass

from sluicegate.errors import CommandError
from sluicegate.plan.parts import Part
from sluicegate.plan.shape import ModelShape


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """`bits` for each weight and `scale_bytes` for each tile of `tile_rows` x `tile_columns` (0: the whole row)."""

    name: str
    bits: int
    tile_rows: int = 1
    tile_columns: int = 0
    scale_bytes: int = 0

    def num_bytes(self, rows: int, columns: int) -> int:
        """Of one [rows, columns] tensor, scales included."""
        tiles = -(-rows // self.tile_rows) * (-(-columns // self.tile_columns) if self.tile_columns else 1)
        return -(-rows * columns * self.bits // 8) + tiles * self.scale_bytes


FORMATS = {
    each.name: each
    for each in (
        WeightFormat("bf16", 16),
        WeightFormat("fp8", 8, 128, 128, 4),  # DeepSeek's: a float32 scale for each 128 x 128 weights
        WeightFormat("int8", 8, 1, 0, 2),  # a 16-bit scale for each row
        WeightFormat("int4-g32", 4, 1, 32, 2),  # symmetric: a 16-bit scale for each group
        WeightFormat("int4-g64", 4, 1, 64, 2),
        WeightFormat("int4-g128", 4, 1, 128, 2),
        WeightFormat("int4-g32-min", 4, 1, 32, 4),  # a 16-bit scale and minimum for each group
        WeightFormat("int4-g64-min", 4, 1, 64, 4),
        WeightFormat("int4-g128-min", 4, 1, 128, 4),
    )
}
_FLOAT32 = WeightFormat("f32", 32)
SHOWN_OF_EXPERTS = ("bf16", "fp8", "int4-g32/bf16", "int4-g32/fp8", "int4-g128/fp8")
SHOWN_OF_DENSE = ("bf16", "fp8", "int8", "int4-g32", "int4-g128")


@dataclass(frozen=True, slots=True)
class Policy:
    """One format for routed experts, one for all other matrices. Embedding, head, router, norms and biases keep 16 bits or more."""

    name: str
    experts: WeightFormat
    others: WeightFormat

    def num_bytes(self, part: Part) -> int:
        """Of a part, all its tensors."""
        form = {"expert": self.experts, "matrix": self.others, "plain": FORMATS["bf16"], "float32": _FLOAT32}[part.kind]
        return part.count * form.num_bytes(part.rows, part.columns)


def parse_policy(text: str, shape: ModelShape) -> Policy:
    """`FORMAT`, or `EXPERTS/OTHERS` for a model with experts. Raises CommandError."""
    if text == "unknown":
        raise CommandError(
            f"{shape.name}: its quantization_config is not known here; say --weights ({', '.join(FORMATS)})"
        )
    first, slash, second = text.partition("/")
    for each in (first, second) if slash else (first,):
        if each not in FORMATS:
            raise CommandError(f"--weights {text}: no format {each!r} ({', '.join(FORMATS)}; EXPERTS/OTHERS for two)")
    if slash and shape.experts is None:
        raise CommandError(f"--weights {text}: {shape.name} has no routed experts, so one format is enough")
    return Policy(text, FORMATS[first], FORMATS[second if slash else first])


def shown_policies(shape: ModelShape, chosen: Policy) -> list[Policy]:
    """Policies worth comparing, the chosen one among them."""
    names = SHOWN_OF_EXPERTS if shape.experts else SHOWN_OF_DENSE
    return [parse_policy(name, shape) for name in names] + ([] if chosen.name in names else [chosen])
