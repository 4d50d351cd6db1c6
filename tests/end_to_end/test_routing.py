"""Three workers: conversations and sessions find the one that knows them, and none of it can be read in Redis."""

import itertools
import os
import signal
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import redis

from protocol.ids import TenantId
from protocol.job import Job, SamplingParams
from protocol.routing import DIGEST_BYTES, RoutingKeys
from sluicegate.secrets import derived_keys

CONVERSATIONS, TURNS = 9, 5
WORDS = "A long question about lighthouses, their keepers and the sea that they look at all day long. "


@pytest.fixture(scope="module")
def trio(start_stack, tmp_path_factory):
    flags = ("--engine", "synthetic", "--workers", "3", "--prefill-rate", "20000", "--decode-rate", "200",
             "--max-sequences", "4", "--kv-tokens", "65536")  # fmt: skip
    for stack in start_stack(tmp_path_factory.mktemp("trio"), *flags):
        stack.wait_for(lambda stack=stack: len(_workers(stack)) == 3, 60)
        yield stack


def _workers(stack) -> list[dict]:
    """The workers' own numbers."""
    return stack.client(stack.info["admin_key"]).get("/../admin/v1/workers", cast_to=object)["data"]


def _ask(stack, messages: list[dict], key: str | None = None, session: str | None = None, **options):
    headers = {} if session is None else {"x-session-affinity": session}
    return stack.client(key).chat.completions.create(
        model=stack.model, messages=messages, extra_headers=headers,
        **{"max_tokens": 16, "extra_body": {"ignore_eos": True}, **options},
    )  # fmt: skip


def _cached(answer) -> int:
    return answer.usage.prompt_tokens_details.cached_tokens


def _new_key(stack, tenant: str) -> str:
    stack.run("tenant", "create", tenant)
    return stack.run("key", "create", tenant).split()[-1]


def _served_by(stack, ask) -> set[int]:
    """The pids of the workers that answer four times; their numbers are 0.75 s old at most."""
    time.sleep(1)
    before = {worker["pid"]: worker["generated_tokens"] for worker in _workers(stack)}
    for _ in range(4):
        ask()
    time.sleep(1)
    return {w["pid"] for w in _workers(stack) if w["generated_tokens"] > before.get(w["pid"], 0)}


def _holds(stack) -> dict[bytes, set[bytes]]:
    """What Redis knows of the workers' caches."""
    with redis.Redis.from_url(stack.info["redis_url"]) as client:
        return {key: client.smembers(key) - {b"-"} for key in client.scan_iter("sg:*:held:*")}


def _talk(stack, number: int, turns: int, length: int = 1, **options) -> list[bool]:
    """Whether each later turn of a conversation found what was said before."""
    messages, hits = [{"role": "user", "content": f"{number}. {WORDS * length}"}], []
    for turn in range(turns):
        answer = _ask(stack, messages, **options)
        if turn:
            hits.append(_cached(answer) >= 32)
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content},
            {"role": "user", "content": "Go on. " * (turn + 1)},
        ]
        time.sleep(0.02 * (number % 3))
    return hits


def test_turns_of_a_conversation_go_where_its_prefix_is(trio) -> None:
    """Of nine conversations at a time, 95% of the later turns find what was said before; and not all are on one worker."""
    with ThreadPoolExecutor(CONVERSATIONS) as pool:
        found = pool.map(lambda number: _talk(trio, number, TURNS, 3), range(CONVERSATIONS))
        hits = list(itertools.chain.from_iterable(found))
    assert CONVERSATIONS * (TURNS - 1) == len(hits)
    assert sum(hits) >= 0.95 * len(hits)
    trio.wait_for(lambda: all(worker["generated_tokens"] for worker in _workers(trio)), 5)
    assert trio.metric("sluicegate_routed_jobs_total", outcome="held") >= 0.95 * len(hits)


def test_the_same_with_a_model(fleet) -> None:
    """Two workers that compute, four conversations that overlap; one turn may be sent to the worker that's less busy."""
    fleet.wait_for(lambda: len(_workers(fleet)) == 2, 60)
    with ThreadPoolExecutor(4) as pool:
        hits = list(itertools.chain.from_iterable(pool.map(lambda n: _talk(fleet, n, 3, 3, max_tokens=6), range(4))))
    assert 8 == len(hits)
    assert sum(hits) >= 7
    assert 7 <= fleet.metric("sluicegate_routed_jobs_total", outcome="held")


def test_a_session_sticks_to_a_worker_and_moves_when_it_dies(trio) -> None:
    """By the header alone: each request has a namespace of its own. Killed, its worker is replaced by another for good, within the time of a lease."""
    asked = [{"role": "user", "content": "Hm?"}]

    def ask() -> None:
        _ask(trio, asked, session="one", extra_body={"ignore_eos": True, "cache_salt": uuid.uuid4().hex})

    ask()
    first = _served_by(trio, ask)
    assert 1 == len(first)
    os.kill(first.pop(), signal.SIGKILL)
    started_s = time.monotonic()
    ask()
    assert time.monotonic() - started_s < 3
    assert 1 == len(_served_by(trio, ask))
    trio.wait_for(lambda: len(_workers(trio)) == 3, 60)


def test_a_full_worker_is_passed_over(trio) -> None:
    """All its slots are taken by a session: the next request of the session is answered elsewhere, now."""
    asked = [{"role": "user", "content": WORDS}]
    _ask(trio, asked, session="crowd")
    with ThreadPoolExecutor(4) as pool:
        long = [pool.submit(_ask, trio, asked, session="crowd", max_tokens=600) for _ in range(4)]
        trio.wait_for(lambda: any(worker["running_sequences"] == 4 for worker in _workers(trio)), 5)
        started_s = time.monotonic()
        _ask(trio, asked, session="crowd")
        assert time.monotonic() - started_s < 1.5
        assert not any(future.done() for future in long)
        for future in long:
            future.result()


def test_redis_tells_nothing_of_prompts_sessions_and_tenants(trio) -> None:
    """Two tenants ask the same in sessions of one name: other digests, none of them computable without the secret, and no hit or choice for the second."""
    text, name = f"{uuid.uuid4().hex} {WORDS * 3}", "canary-" + uuid.uuid4().hex
    keys = {tenant: _new_key(trio, tenant) for tenant in ("quince", "medlar")}
    before = set().union(*_holds(trio).values())
    told = {}
    for tenant, key in keys.items():
        passed = trio.metric("sluicegate_routed_jobs_total", outcome="none")
        answer = _ask(trio, [{"role": "user", "content": text}], key, name)
        assert 0 == _cached(answer)
        assert passed + 1 == trio.metric("sluicegate_routed_jobs_total", outcome="none")
        trio.wait_for(lambda known=before: len(set().union(*_holds(trio).values()) - known) > 5, 5)
        time.sleep(0.2)
        after = set().union(*_holds(trio).values())
        told[tenant], before = after - before, after
    assert not told["quince"] & told["medlar"]
    assert {DIGEST_BYTES} == {len(digest) for digest in before}
    assert 0 < _cached(_ask(trio, [{"role": "user", "content": text}], keys["quince"], name))
    secret = derived_keys(trio.data).routing
    with redis.Redis.from_url(trio.info["redis_url"]) as client:
        for raw in client.scan_iter("*"):
            assert name.encode() not in raw + (client.dump(raw) or b"")
    logs = "".join(path.read_text() for path in (trio.data / "logs").glob("*.log"))
    assert name not in logs
    assert not any(digest.hex() in logs for digest in before)
    tokens = tuple(text.encode())  # a token a byte
    guess = Job("r", "g", TenantId("quince"), trio.model, tokens, SamplingParams(max_tokens=1, seed=1), 0, 1)
    for wrong in (b"", b"k" * 32, secret[::-1]):
        assert not told["quince"] & set(RoutingKeys(wrong).trail(guess).digests(tokens, len(tokens)))


@pytest.mark.parametrize("value", ["", "x" * 257, "two words", "tab\tbed"])
def test_a_bad_session_is_named(trio, value) -> None:
    """A clear 400 with the header's name as `param`."""
    with pytest.raises(openai.BadRequestError) as caught:
        _ask(trio, [{"role": "user", "content": "Hm?"}], session=value)
    assert "x-session-affinity" == caught.value.param
    assert value not in caught.value.message or not value
