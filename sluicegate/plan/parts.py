"""Every tensor of a checkpoint, by what it is for: its size, how it is quantized, divided among GPUs, and read."""

from dataclasses import dataclass
from typing import Literal

from sluicegate.plan.shape import GroupedAttention, Indexer, LatentAttention, ModelShape

EMBEDDING, ATTENTION, DENSE, ROUTED, SHARED, ROUTER, NORMS, INDEXER, HEAD, MTP = (
    "embedding", "attention", "dense FFN", "routed experts", "shared experts", "router", "norms", "indexer", "head", "prediction layer",
)  # fmt: skip
GROUPS = (EMBEDDING, ATTENTION, INDEXER, DENSE, ROUTED, SHARED, ROUTER, NORMS, HEAD, MTP)


@dataclass(frozen=True, slots=True)
class Part:
    """`count` tensors of [rows, columns].

    `kind`: an expert's or another layer's matrix may be quantized; `plain` ones keep 16 bits, `float32` ones 32.
    `share`: among the GPUs of a group each holds an even share, one for each kv head it has, or a copy.
    `reads`: for a step each token reads all of it, an expert's share, or a row.
    """

    group: str
    rows: int
    columns: int
    count: int
    kind: Literal["expert", "matrix", "plain", "float32"] = "matrix"
    share: Literal["even", "kv", "copy"] = "even"
    reads: Literal["all", "experts", "row"] = "all"
    is_mtp: bool = False

    @property
    def num_parameters(self) -> int:
        return self.rows * self.columns * self.count


def parts(shape: ModelShape) -> list[Part]:
    """All tensors, those of prediction layers (MTP) last and under a group of their own."""
    hidden, vocabulary = shape.hidden, shape.vocabulary
    found = [Part(EMBEDDING, vocabulary, hidden, 1, "plain", reads="all" if shape.is_tied else "row")]
    found += _attention(shape, shape.num_layers)
    if shape.indexer:
        found += _indexer(shape.indexer, shape, shape.indexer.num_owners)
    if shape.num_dense_layers:
        found += _feed_forward(DENSE, hidden, shape.dense_size, shape.num_dense_layers)
    if shape.experts:
        found += _experts(shape, shape.experts.num_layers)
    found.append(Part(NORMS, hidden, 1, shape.norms_per_layer * shape.num_layers + 1, "plain", "copy"))
    if not shape.is_tied:
        found.append(Part(HEAD, vocabulary, hidden, 1, "plain"))
    return found + _prediction(shape)


def _attention(shape: ModelShape, count: int) -> list[Part]:
    if isinstance(shape.attention, LatentAttention):
        return _latent(shape.attention, shape.hidden, count)
    return _grouped(shape.attention, shape.hidden, count)


def _grouped(attention: GroupedAttention, hidden: int, count: int) -> list[Part]:
    queries = attention.num_heads * attention.head_dim
    keys = attention.num_kv_heads * attention.head_dim
    found = [
        Part(ATTENTION, queries, hidden, count),
        Part(ATTENTION, keys, hidden, 2 * count, share="kv"),
        Part(ATTENTION, hidden, queries, count),
    ]
    if attention.has_qkv_bias:
        found += [Part(ATTENTION, queries, 1, count, "plain"), Part(ATTENTION, keys, 1, 2 * count, "plain", "kv")]
    if attention.has_out_bias:
        found.append(Part(ATTENTION, hidden, 1, count, "plain", "copy"))
    if attention.has_head_norms:
        found.append(Part(NORMS, attention.head_dim, 1, 2 * count, "plain", "copy"))
    return found


def _latent(attention: LatentAttention, hidden: int, count: int) -> list[Part]:
    """Down-projections are small and feed every head, so that each GPU keeps a copy; the others are divided by heads."""
    heads = attention.num_heads
    queries = heads * (attention.nope_dim + attention.rope_dim)
    found = [
        Part(ATTENTION, attention.kv_rank + attention.rope_dim, hidden, count, share="copy"),
        Part(ATTENTION, heads * (attention.nope_dim + attention.value_dim), attention.kv_rank, count),
        Part(ATTENTION, hidden, heads * attention.value_dim, count),
        Part(NORMS, attention.kv_rank, 1, count, "plain", "copy"),
    ]
    if attention.q_rank is None:
        return [*found, Part(ATTENTION, queries, hidden, count)]
    return [
        *found,
        Part(ATTENTION, attention.q_rank, hidden, count, share="copy"),
        Part(ATTENTION, queries, attention.q_rank, count),
        Part(NORMS, attention.q_rank, 1, count, "plain", "copy"),
    ]


def _indexer(indexer: Indexer, shape: ModelShape, count: int) -> list[Part]:
    assert isinstance(shape.attention, LatentAttention)
    source = shape.attention.q_rank or shape.hidden
    return [
        Part(INDEXER, indexer.num_heads * indexer.head_dim, source, count, share="copy"),
        Part(INDEXER, indexer.head_dim, shape.hidden, count, share="copy"),
        Part(INDEXER, indexer.num_heads, shape.hidden, count, "plain", "copy"),
        Part(INDEXER, indexer.head_dim, 1, 2 * count, "plain", "copy"),
    ]


def _feed_forward(group: str, hidden: int, size: int, count: int) -> list[Part]:
    return [Part(group, size, hidden, 2 * count), Part(group, hidden, size, count)]


def _experts(shape: ModelShape, num_layers: int) -> list[Part]:
    experts, hidden = shape.experts, shape.hidden
    assert experts is not None
    count = experts.num_experts * num_layers
    found = [
        Part(ROUTED, experts.size, hidden, 2 * count, "expert", reads="experts"),
        Part(ROUTED, hidden, experts.size, count, "expert", reads="experts"),
        Part(ROUTER, experts.num_experts, hidden, num_layers, "plain", "copy"),
    ]
    if experts.has_correction_bias:
        found.append(Part(ROUTER, experts.num_experts, 1, num_layers, "float32", "copy"))
    if experts.shared_size:
        found += _feed_forward(SHARED, hidden, experts.shared_size, num_layers)
    return found


def _prediction(shape: ModelShape) -> list[Part]:
    """A layer like the last one, with a projection of two hidden states to one, and three norms."""
    count, hidden = shape.num_mtp, shape.hidden
    if not count:
        return []
    layer = _attention(shape, count) + (_indexer(shape.indexer, shape, count) if shape.indexer else [])
    layer += _experts(shape, count) if shape.experts else _feed_forward(DENSE, hidden, shape.dense_size, count)
    layer += [
        Part(NORMS, hidden, 1, (shape.norms_per_layer + 3) * count, "plain", "copy"),
        Part(MTP, hidden, 2 * hidden, count, "plain", "copy"),
    ]
    if shape.mtp_copies:
        layer.append(Part(MTP, shape.vocabulary, hidden, 2 * count, "plain"))
    return [Part(MTP, p.rows, p.columns, p.count, p.kind, p.share, p.reads, is_mtp=True) for p in layer]
