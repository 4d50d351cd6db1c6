"""The same request gives the same tokens and logprobs, however it is run."""

import random

import pytest

LONG = "The history of the lighthouse begins with fires on hills. " * 12
REQUESTS = [
    {"prompt": "The capital of France is", "logprobs": 3},
    {"prompt": "Once upon a time", "temperature": 0.8, "seed": 42, "logprobs": 2},
    {"prompt": LONG, "temperature": 1.0, "seed": -7, "top_p": 0.9, "presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"prompt": LONG + "Then", "repetition_penalty": 1.3, "min_tokens": 10, "logprobs": 0},
    {"prompt": "1, 2, 3, 4,", "stop": (" 9",), "max_tokens": 30},
    {"prompt": "A list of colours: red,", "temperature": 0.7, "seed": 3, "n": 3, "top_k": 20, "min_p": 0.02},
    {"prompt": "Echo this", "echo": 1, "logprobs": 1},
    {"prompt": "Bias", "logit_bias": ((400, 100.0),), "max_tokens": 4},
]


@pytest.fixture(scope="module", params=["fp16", "fp8"])
def kv_dtype(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def alone(lab, result_of, kv_dtype):
    """Each request's outcome when it runs by itself, cold."""
    return [result_of(lab.run(lab.engine(kv_dtype=kv_dtype), lab.job(**request))[0]) for request in REQUESTS]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"step_tokens": 33},
        {"step_tokens": 64, "page_size": 1},
        {"page_size": 64},
        {"kv_tokens": 256},
        {"kv_tokens": 224, "page_size": 8, "step_tokens": 40},
        {"max_sequences": 2},
    ],
    ids=str,
)
def test_together_equals_alone(lab, result_of, kv_dtype, alone, options) -> None:
    """In one batch, in chunks, with small pages, in a pool so small that sequences are preempted."""
    engine = lab.engine(kv_dtype=kv_dtype, **options)
    order = list(range(len(REQUESTS)))
    random.Random(str(options)).shuffle(order)
    together = lab.run(engine, *(lab.job(**REQUESTS[i]) for i in order))
    if options.get("kv_tokens"):
        assert engine.scheduler.num_preemptions > 0
    for i, replies in zip(order, together, strict=True):
        assert alone[i] == result_of(replies), REQUESTS[i]
    assert 0 == engine.cache.pool.num_held


def test_warm_equals_cold(lab, result_of, kv_dtype, alone) -> None:
    """From the prefix cache, the second and third time."""
    engine = lab.engine(kv_dtype=kv_dtype)
    for _ in range(3):
        for expected, request in zip(alone, REQUESTS, strict=True):
            assert expected == result_of(lab.run(engine, lab.job(**request))[0])
    assert engine.totals.cached_tokens > 100


def test_comings_and_goings_change_nothing(lab, result_of, kv_dtype, alone) -> None:
    """Neighbours that join and are cancelled in the middle."""
    engine, rng = lab.engine(kv_dtype=kv_dtype, kv_tokens=1024), random.Random(5)
    visitors = []

    def visit(number: int) -> None:
        if number % 3 == 0 and len(visitors) < 20:
            visitor = lab.job(
                f"Visitor {number} says", tenant=f"v{number % 2}", temperature=1.0, seed=number, max_tokens=50
            )
            engine.submit(visitor)
            visitors.append(visitor)
        if visitors and rng.random() < 0.4:
            engine.cancel(rng.choice(visitors).request_id)

    jobs = [lab.job(**request) for request in REQUESTS]
    for expected, replies in zip(alone, lab.run(engine, *jobs, on_step=visit), strict=True):
        assert expected == result_of(replies)
