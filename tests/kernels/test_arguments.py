"""What an op can't take is a KernelError that names op and argument, before any memory is touched."""

import pytest
import torch

from kernels.backend import Backend
from kernels.dense_matmul import dense_matmul
from kernels.embedding import embedding
from kernels.errors import KernelError
from kernels.int4_matmul import int4_matmul
from kernels.int8_matmul import int8_matmul
from kernels.kv_pool import AttentionRows, KvLayout, KvPool
from kernels.kv_write import kv_write
from kernels.paged_attention import paged_attention
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from kernels.silu_mul import silu_mul
from kernels.weights import DenseWeight

CPU = Backend.CPU
X = torch.zeros(3, 64)
NOT_ROWS = {
    "float64": X.double(),
    "bfloat16": X.bfloat16(),
    "too narrow": X[:, :32].contiguous(),
    "transposed": torch.zeros(64, 3).T,
    "every other column": torch.zeros(3, 128)[:, ::2],
    "three dimensions": torch.zeros(3, 1, 64),
    "on another device": torch.zeros(3, 64, device="meta"),
}
NOT_OUT = {
    "float64": torch.zeros(3, 20).double(),
    "too many rows": torch.zeros(4, 20),
    "transposed": torch.zeros(20, 3).T,
    "flat": torch.zeros(60),
}


@pytest.fixture(params=["int4_matmul", "int8_matmul", "dense_matmul"])
def product(request, backend, make_int4, make_int8):
    """The name of each product, and the product with a matrix [20, 64]."""
    dense = DenseWeight.from_matrix(torch.zeros(20, 64))
    op, weight = {
        "int4_matmul": (int4_matmul, make_int4(20, 64)),
        "int8_matmul": (int8_matmul, make_int8(20, 64)),
        "dense_matmul": (dense_matmul, dense),
    }[request.param]
    return request.param, lambda x, out=None: op(x, weight, out, backend=backend)


@pytest.mark.parametrize("x", NOT_ROWS.values(), ids=NOT_ROWS)
def test_products_check_x(product, x):
    """Activations of another type, width or layout."""
    name, multiply = product
    with pytest.raises(KernelError, match=f"^{name}: x "):
        multiply(x)


@pytest.mark.parametrize("out", NOT_OUT.values(), ids=NOT_OUT)
def test_products_check_out(product, out):
    """An output of another type, shape or layout."""
    name, multiply = product
    with pytest.raises(KernelError, match=f"^{name}: out "):
        multiply(X, out)


def test_products_check_the_kind_of_weight(make_int4, make_int8):
    """A matrix of another kind is not read as if it were the right one."""
    for name, op, weight in (
        ("int4_matmul", int4_matmul, make_int8(20, 64)),
        ("int8_matmul", int8_matmul, make_int4(20, 64)),
        ("dense_matmul", dense_matmul, make_int4(20, 64)),
    ):
        with pytest.raises(KernelError, match=f"^{name}: w must be"):
            op(X, weight, backend=CPU)


@pytest.mark.parametrize(
    ("word", "arguments"),
    [
        ("x", {"x": X.double()}),
        ("x", {"x": X[0]}),
        ("weight", {"weight": torch.ones(63)}),
        ("weight", {"weight": torch.ones(64).half()}),
        ("residual", {"residual": torch.zeros(2, 64)}),
        ("residual", {"residual": torch.zeros(64, 3).T}),
        ("out", {"out": torch.zeros(3, 63)}),
    ],
)
def test_rms_norm_checks(backend, word, arguments):
    """Each argument of the norm."""
    arguments = {"x": X, "weight": torch.ones(64)} | arguments
    with pytest.raises(KernelError, match=f"^rms_norm: {word} "):
        rms_norm(eps=1e-6, backend=backend, **arguments)


@pytest.mark.parametrize(
    ("word", "arguments"),
    [
        ("x", {"x": torch.zeros(3, 2, 8).half()}),
        ("x", {"x": torch.zeros(3, 2, 16)[:, :, ::2]}),
        ("x", {"x": torch.zeros(3, 2, 7), "table": torch.zeros(10, 2, 3)}),
        ("x", {"x": torch.zeros(3, 16)}),
        ("positions", {"positions": torch.zeros(3, dtype=torch.int64)}),
        ("positions", {"positions": torch.zeros(2, dtype=torch.int32)}),
        ("positions", {"positions": torch.tensor([0, -1, 0], dtype=torch.int32)}),
        ("positions", {"positions": torch.tensor([0, 10, 0], dtype=torch.int32)}),
        ("table", {"table": torch.zeros(10, 2, 3)}),
        ("table", {"table": torch.zeros(10, 8)}),
    ],
)
def test_rotary_checks(backend, word, arguments):
    """Each argument of the rotation; a position beyond the table is never read."""
    given = {"x": torch.zeros(3, 2, 8), "positions": torch.zeros(3, dtype=torch.int32), "table": torch.zeros(10, 2, 4)}
    with pytest.raises(KernelError, match=f"^rotary: {word} "):
        rotary(backend=backend, **(given | arguments))


@pytest.mark.parametrize(
    ("word", "gate_up", "out"),
    [
        ("gate_up", X.double(), None),
        ("gate_up", torch.zeros(3, 5), None),
        ("gate_up", torch.zeros(4), None),
        ("gate_up", torch.zeros(64, 4).T, None),
        ("out", X, torch.zeros(3, 64)),
    ],
)
def test_silu_mul_checks(backend, word, gate_up, out):
    """Each argument of the gated activation."""
    with pytest.raises(KernelError, match=f"^silu_mul: {word} "):
        silu_mul(gate_up, out, backend=backend)


@pytest.mark.parametrize(
    "ids", [torch.tensor([20]), torch.tensor([-1]), torch.tensor([0], dtype=torch.int32), torch.tensor([[0]])]
)
def test_embedding_checks_ids(backend, make_int4, ids):
    """Ids outside the matrix, of another type or shape."""
    with pytest.raises(KernelError, match=r"^embedding: ids "):
        embedding(ids, make_int4(20, 64), backend=backend)


@pytest.fixture
def pool():
    """Two layers of 4 pages of 8 tokens."""
    return KvPool.allocate(KvLayout(2, 4, 2, 16, 8, "bf16"))


KV = torch.zeros(3, 2, 16)


@pytest.mark.parametrize(
    ("word", "arguments"),
    [
        ("k", {"k": KV.half()}),
        ("k", {"k": torch.zeros(3, 1, 16)}),
        ("k", {"k": torch.zeros(())}),
        ("k", {"k": torch.zeros(3, 16, 2).transpose(1, 2)}),
        ("v", {"v": torch.zeros(2, 2, 16)}),
        ("v", {"v": torch.zeros(3, 2, 8)}),
        ("slots", {"slots": torch.zeros(3, dtype=torch.int32)}),
        ("slots", {"slots": torch.zeros(2, dtype=torch.int64)}),
        ("slots", {"slots": torch.tensor([0, 32, 1])}),
        ("layer", {"layer": 2}),
        ("layer", {"layer": -1}),
    ],
)
def test_kv_write_checks(backend, pool, word, arguments):
    """Each argument of the store, and nothing is stored."""
    given = {"k": KV, "v": KV, "slots": torch.arange(3), "layer": 0}
    with pytest.raises(KernelError, match=f"^kv_write: {word} "):
        kv_write(pool=pool, backend=backend, **(given | arguments))


@pytest.mark.parametrize(
    ("word", "arguments"),
    [
        ("q", {"q": torch.zeros(1, 4, 16).double()}),
        ("q", {"q": torch.zeros(2, 4, 16)}),
        ("q", {"q": torch.zeros(1, 16)}),
        ("q", {"q": torch.zeros(1, 4, 8)}),
        ("3 heads", {"q": torch.zeros(1, 3, 16)}),
        ("window", {"window": 0}),
        ("window", {"window": -4}),
        ("layer", {"layer": 2}),
        ("out", {"out": torch.zeros(1, 2, 16)}),
    ],
)
def test_paged_attention_checks(backend, pool, word, arguments):
    """Each argument of attention."""
    rows = AttentionRows(torch.zeros(1, 2, dtype=torch.int32), *torch.zeros(2, 1, dtype=torch.int32))
    given = {"q": torch.zeros(1, 4, 16), "layer": 0}
    with pytest.raises(KernelError, match=f"^paged_attention: {word} "):
        paged_attention(pool=pool, rows=rows, softmax_scale=1.0, backend=backend, **(given | arguments))


def int32(*numbers: object) -> torch.Tensor:
    """A small int32 tensor."""
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize(
    ("word", "table", "sequence", "position"),
    [
        ("page_table", int32([0, 4]), int32(0), int32(0)),
        ("page_table", int32([-1, 0]), int32(0), int32(0)),
        ("page_table", int32(0, 1), int32(0), int32(0)),
        ("page_table", int32([0, 1]).long(), int32(0), int32(0)),
        ("row_sequence", int32([0, 1]), int32(1), int32(0)),
        ("row_sequence", int32([0, 1]), int32(-1), int32(0)),
        ("row_sequence", int32([0, 1]), int32(0, 0), int32(0)),
        ("row_position", int32([0, 1]), int32(0), int32(16)),
        ("row_position", int32([0, 1]), int32(0), int32(-1)),
        ("row_position", int32([0, 1]), int32(0), int32(0).float()),
    ],
)
def test_rows_check(pool, word, table, sequence, position):
    """A row that could read outside the pool or its table is found before the first layer."""
    with pytest.raises(KernelError, match=f"^forward: {word}"):
        AttentionRows(table, sequence, position).check("forward", pool.layout)
