"""Digests of prefixes, and what the queue makes of them: preference within a line, never between tenants."""

import random
import time
from dataclasses import replace

import pytest
import redis

from protocol.job import Job, SamplingParams
from protocol.routing import LANDMARKS, RoutingKeys
from protocol.scripts import HOLD_PREFIXES

BOTH = ("w1", "w2")
A = b"digest-a"
LONG = tuple(bytes([number]) * 8 for number in range(12))
TOKENS = tuple(random.Random(1).randrange(30_000) for _ in range(3000))


def _job(**changes) -> Job:
    fields = {"request_id": "r", "gateway_id": "g", "tenant": "acme", "model": "m", "prompt_token_ids": TOKENS,
              "sampling": SamplingParams(max_tokens=4, seed=1), "created_ms": 0, "deadline_ms": 1}  # fmt: skip
    return Job(**{**fields, **changes})


def _digests(keys: RoutingKeys | None = None, end: int = 3000, **changes) -> list[bytes]:
    job = _job(**changes)
    return (keys or RoutingKeys(b"k" * 32)).trail(job).digests(job.prompt_token_ids, end)


def test_equal_beginnings_have_equal_digests_however_they_are_computed() -> None:
    """In one go, token by token, with another tail: up to where the tokens differ."""
    whole = _digests()
    assert sum(mark <= 3000 for mark in LANDMARKS) == len(whole) == len(set(whole))
    job = _job()
    trail = RoutingKeys(b"k" * 32).trail(job)
    found = [d for end in range(3000) for d in trail.between(list(job.prompt_token_ids), end, end + 1)]
    assert whole == found
    changed = (*TOKENS[:700], 5, *TOKENS[701:])
    same = sum(mark <= 700 for mark in LANDMARKS)
    other = _digests(prompt_token_ids=changed)
    assert whole[:same] == other[:same]
    assert not set(whole[same:]) & set(other[same:])
    assert [] == _digests(end=LANDMARKS[0] - 1)


def test_nothing_but_the_same_namespace_gives_the_same_digests() -> None:
    """Not another tenant, a tenant made later, a salt, a group, a model, or a secret; within a group its tenants are one."""
    mine = set(_digests())
    others = [
        _digests(tenant="beta"), _digests(tenant_since_ms=7), _digests(cache_salt="s"), _digests(share_group="acme"),
        _digests(model="n"), _digests(RoutingKeys(b"x" * 32)),
    ]  # fmt: skip
    assert 7 * len(mine) == len(mine.union(*map(set, others)))
    assert _digests(share_group="g", tenant="acme") == _digests(share_group="g", tenant="beta", tenant_since_ms=9)
    keys = RoutingKeys(b"k" * 32)
    sessions = {keys.session("m", "acme", 0, "s"), keys.session("m", "beta", 0, "s"), keys.session("m", "acme", 1, "s"),
                keys.session("m", "acme", 0, "t"), keys.session("n", "acme", 0, "s")}  # fmt: skip
    assert 5 == len(sessions)
    assert not sessions & mine


def _say_room(queue, *workers: str, busy: int = 0) -> None:
    for worker in workers:
        assert queue.pull(worker, busy=busy) is None


def test_the_longest_match_is_preferred_while_it_is_not_too_busy(queue) -> None:
    """And the one that isn't chosen gets nothing until the preferred worker has had its chance."""
    queue.hold("w1", *LONG[:4])
    queue.hold("w2", *LONG[:7])
    _say_room(queue, *BOTH)
    assert b"held" == queue.submit("j", landmarks=LONG, among=BOTH)[2]
    assert "w2" == queue.record("j")[1]
    kind, wait_ms = queue.look("w1")
    assert (b"none", True) == (kind, 0 < wait_ms <= 100)
    assert (1, 0) == tuple(queue.client.llen(key) for key in (queue.keys.bell("m/1", "w2"), queue.fixed.doorbell))
    assert "j" == queue.pull("w2")["id"]
    # 96 tokens more are worth one job, not two.
    for busy, owner in ((1, "w2"), (2, "w1")):
        _say_room(queue, "w1")
        _say_room(queue, "w2", busy=busy)
        queue.submit(f"k{busy}", landmarks=LONG, among=BOTH)
        assert owner == queue.record(f"k{busy}")[1]
        assert f"k{busy}" == queue.pull(owner)["id"]


def test_a_burst_is_spread(queue) -> None:
    """Jobs that are on their way to a worker count before it has taken them."""
    queue.hold("w1", *LONG[:4])
    _say_room(queue, *BOTH)
    choices = [queue.submit(f"j{number}", landmarks=LONG, among=BOTH)[2] for number in range(6)]
    assert [b"held", b"held", *[b"passed_over"] * 4] == choices


def test_a_full_or_silent_worker_is_not_waited_for(queue) -> None:
    """Whatever it holds: its last word was that it has no room, or is too long ago, or it has left."""
    queue.hold("w1", *LONG)
    assert b"passed_over" == queue.submit("j0", landmarks=LONG, among=BOTH)[2]
    assert "j0" == queue.pull("w1", room=1)["id"]
    assert b"passed_over" == queue.submit("j1", landmarks=LONG, among=BOTH)[2]
    assert "j1" == queue.pull("w2")["id"]
    _say_room(queue, "w1")
    queue.client.zadd(queue.fixed.room, {"w1": (time.time() - 1) * 1e6})
    assert b"passed_over" == queue.submit("j2", landmarks=LONG, among=BOTH)[2]
    assert "j2" == queue.pull("w2")["id"]
    _say_room(queue, "w1")
    assert b"held" == queue.submit("j3", landmarks=LONG, among=BOTH)[2]
    queue.client.zrem(queue.fixed.room, "w1")
    assert "j3" == queue.pull("w2")["id"]


def test_what_was_kept_for_a_worker_that_filled_up_is_anybodys(queue) -> None:
    """And somebody is rung for it."""
    queue.hold("w1", A)
    _say_room(queue, *BOTH)
    for number in range(2):
        assert b"held" == queue.submit(f"j{number}", session=A, among=BOTH)[2]
    assert queue.look("w2")[0] == b"none"
    assert "j0" == queue.pull("w1", room=1)["id"]
    assert 1 == queue.client.llen(queue.fixed.doorbell)
    assert "j1" == queue.pull("w2")["id"]


def test_a_job_is_kept_for_a_tenth_of_a_second(queue) -> None:
    """A worker that seems to have room and doesn't come loses it."""
    queue.hold("w1", A)
    _say_room(queue, *BOTH)
    queue.submit("j", session=A, among=BOTH)
    _, wait_ms = queue.look("w2")
    time.sleep(wait_ms / 1000 + 0.005)
    assert "j" == queue.pull("w2")["id"]


def test_tenants_are_served_in_their_order_whatever_workers_hold(queue) -> None:
    """Two workers, each of which holds one tenant's prefix: shares are those of the virtual times, not of the cache, with one worker or both."""
    for tenant, worker in (("a", "w1"), ("b", "w2")):
        queue.hold(worker, *LONG)
        _say_room(queue, worker)
        for number in range(30):
            queue.submit(f"{tenant}{number}", f"interactive/{tenant}", landmarks=LONG, among=(worker,))
    both = [queue.pull(worker)["line"] for _ in range(10) for worker in BOTH]
    assert ["interactive/a", "interactive/b"] * 10 == both
    queue.client.delete(queue.fixed.room)
    alone = [queue.pull("w1", room=1)["line"] for _ in range(20)]
    assert 10 == alone.count("interactive/a")


def test_a_worker_takes_its_own_from_a_line_but_overtaking_is_bounded(queue) -> None:
    """Within two seconds of the oldest job; what was skipped is next."""
    queue.hold("w2", A)
    _say_room(queue, *BOTH)
    queue.submit("old")
    queue.submit("new", session=A, among=BOTH)
    assert ["new", "old"] == [queue.pull("w2")["id"], queue.pull("w2")["id"]]
    for job_id in ("new", "old"):
        queue.publish(job_id, "w2", end="interactive/a")
    queue.submit("old2")
    _age(queue, "old2", 2500)
    _say_room_beside(queue, "w2")
    queue.submit("new2", session=A, among=BOTH)
    assert "w2" == queue.record("new2")[1]
    assert ["old2", "new2"] == [queue.pull("w2")["id"], queue.pull("w2")["id"]]


def _say_room_beside(queue, worker: str) -> None:
    queue.client.zadd(queue.fixed.room, {worker: int((time.time() + 1) * 1000) * 1000})


def _age(queue, job_id: str, ms: int) -> None:
    """As if a waiting job had been submitted so much earlier: its entry and all that names it."""
    record = queue.record(job_id)
    stream, (number, rest) = queue.line(record[4]), record[5].split("-")
    entry = f"{int(number) - ms}-{rest}"
    (old,) = queue.client.xrange(stream, record[5], record[5])
    queue.client.delete(stream)
    queue.client.xadd(stream, old[1], id=entry)
    (place,) = queue.client.zrange(queue.fixed.waiting, 0, -1)
    queue.client.zrem(queue.fixed.waiting, place)
    queue.client.zadd(queue.fixed.waiting, {place.decode().replace(number, str(int(number) - ms)): 0})
    queue.client.hset(queue.fixed.live, job_id, "|".join([*record[:5], entry, *record[6:]]))


def test_held_jobs_of_many_tenants_do_not_hide_the_rest(queue) -> None:
    """A pull looks past them, and is told to come back soon if it looked at nothing else."""
    queue.hold("w1", A)
    _say_room(queue, *BOTH)
    for number in range(4):
        queue.submit(f"h{number}", f"interactive/t{number}", prompt=1, session=A, among=BOTH)
    queue.submit("free", "interactive/z", prompt=10_000)
    assert "free" == queue.pull("w2")["id"]
    for number in range(4, 8):
        queue.submit(f"h{number}", f"interactive/t{number}", prompt=1, session=A, among=BOTH)
    queue.submit("late", "interactive/z", prompt=10_000)
    kind, wait_ms = queue.look("w2", *(f"interactive/t{n}" for n in range(8)), "interactive/z")
    assert kind == b"none"
    assert 0 < wait_ms <= 100
    taken = [queue.pull("w1", room=99)["id"] for _ in range(9)]
    assert {"late", *(f"h{n}" for n in range(8))} == set(taken)


def test_a_session_weighs_more_than_a_short_match_and_less_than_a_crowd(queue) -> None:
    """It sticks to its worker until that has eight jobs more than another."""
    queue.hold("w1", A)
    queue.hold("w2", LONG[0])
    for busy, owner in ((0, "w1"), (7, "w1"), (8, "w2")):
        _say_room(queue, "w2")
        _say_room(queue, "w1", busy=busy)
        queue.submit(f"j{busy}", session=A, landmarks=LONG[:1], among=BOTH)
        assert owner == queue.record(f"j{busy}")[1]
        assert f"j{busy}" == queue.pull(owner)["id"]


def test_ended_jobs_make_a_worker_less_busy_at_once(queue) -> None:
    """Not only when it asks for work again."""
    _say_room(queue, "w1")
    for number in range(3):
        queue.submit(f"j{number}")
    for number in range(3):
        assert queue.pull("w1", busy=number)["id"] == f"j{number}"
    busy = [int(queue.client.zscore(queue.fixed.room, "w1")) % 1000]
    for number in range(3):
        queue.publish(f"j{number}", "w1", end="interactive/a")
        busy.append(int(queue.client.zscore(queue.fixed.room, "w1")) % 1000)
    assert [3, 2, 1, 0] == busy


def test_what_a_worker_holds_is_written_by_changes_and_anew_if_it_has_gone(queue) -> None:
    """A set with a time to live; a change to one that isn't there is refused."""
    key = queue.keys.held("m/1", "w1")
    assert 0 == queue.run_plain(HOLD_PREFIXES, [key], 1000, 0, 1, A)
    assert 1 == queue.run_plain(HOLD_PREFIXES, [key], 1000, 1, 2500, *(b"%08d" % n for n in range(2500)))
    assert 1 == queue.run_plain(HOLD_PREFIXES, [key], 1000, 0, 1, A, b"%08d" % 7, b"%08d" % 8)
    members = queue.client.smembers(key)
    assert 2500 == len(members)  # one more, two less, and the mark of an empty set
    assert {A, b"-"} <= members
    assert 0 < queue.client.pttl(key) <= 1000
    assert 1 == queue.run_plain(HOLD_PREFIXES, [key], 1000, 1, 0)
    assert {b"-"} == queue.client.smembers(key)


@pytest.mark.parametrize("count", [0, 1, len(LANDMARKS)])
def test_any_number_of_landmarks_can_be_asked_for(queue, count) -> None:
    """From none to those of the longest prompt, with and without a session."""
    digests = tuple(b"%08d" % number for number in range(count))
    queue.hold("w1", *digests, A)
    for job_id, session in (("s", A), ("n", b"")):
        _say_room(queue, *BOTH)
        expected = b"held" if count or session else b"none"
        assert expected == queue.submit(job_id, session=session, landmarks=digests, among=BOTH)[2]
        assert job_id == queue.pull("w1")["id"]


def test_old_jobs_decode_without_a_session() -> None:
    """The field is the last one and has a default."""
    assert _job().session is None
    assert b"12345678" == replace(_job(), session=b"12345678").session


def test_a_clock_that_went_back_keeps_nobody_waiting(queue) -> None:
    """Redis goes on from the largest time that a line has seen; a worker is told to look again soon all the same."""
    queue.hold("w1", A)
    _say_room(queue, *BOTH)
    queue.submit("first")
    line = queue.line("interactive/a")
    ahead_ms = int(time.time() * 1000) + 3_600_000
    queue.client.xdel(line, queue.client.xadd(line, {"x": ""}, id=f"{ahead_ms}-0"))
    queue.submit("j", session=A, among=BOTH)
    assert "first" == queue.pull("w2")["id"]
    kind, wait_ms = queue.look("w2")
    assert b"none" == kind
    assert 0 < wait_ms <= 100
    assert "j" == queue.pull("w1")["id"]


def test_a_damaged_set_refuses_a_job_whole(queue) -> None:
    """Somebody wrote text where a worker's digests are: nothing of the job is left behind."""
    _say_room(queue, *BOTH)
    before = set(queue.client.keys(f"{queue.keys.prefix}:*"))
    queue.client.set(queue.keys.held("m/1", "w1"), "text", ex=60)
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        queue.submit("j", session=A, among=BOTH)
    assert before | {queue.keys.held("m/1", "w1").encode()} == set(queue.client.keys(f"{queue.keys.prefix}:*"))
