"""The scripts of tenants' accounts against a real Valkey: windows, periods, and books that always balance."""

import calendar
import itertools
import secrets
import time
from collections import defaultdict
from datetime import date, timedelta

import msgpack
import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.limits.account import Counts, Note
from gateway.limits.settlement import Settlement
from protocol.account_scripts import _CHARGES, ADMIT, EXPIRED, RENEW
from protocol.codec import pack, unpack_list
from protocol.ids import ModelName, TenantId
from protocol.key_space import KeySpace
from protocol.usage import SUMMED, row_from_fields

TENANT = TenantId("acme")
LEASE_MS = 60_000


@pytest.fixture
def client(valkey_url: str):
    with redis.Redis.from_url(valkey_url) as one:
        yield one


@pytest.fixture
def keys(client) -> KeySpace:
    space = KeySpace("t" + secrets.token_hex(6))
    yield space
    for name in client.scan_iter(space.prefix + ":*"):
        client.delete(name)


def admit(client, keys, request, charges, places):
    all_keys = [keys.open_requests(TENANT), keys.leases(TENANT), keys.deleted(TENANT), *places]
    return unpack_list(client.eval(ADMIT, len(all_keys), *all_keys, request, LEASE_MS, "note", pack(charges), 0))


def window(limit: int, amount: int) -> list:
    return ["window", limit, amount, "", []]


def test_months_are_those_of_the_calendar(client) -> None:
    """Every day of 80 years has the month and the number of days left that it should have."""
    script = (
        _CHARGES + "local r = {} for i, day in ipairs(cmsgpack.unpack(ARGV[1])) do r[i] = month_of(day) end return r"
    )
    first = date(1999, 12, 1)
    days = [first + timedelta(days=n) for n in range(365 * 80)]
    numbers = [(day - date(1970, 1, 1)).days for day in days]
    found = list(itertools.chain.from_iterable(
        client.eval(script, 0, pack(numbers[start : start + 5000])) for start in range(0, len(numbers), 5000)
    ))  # fmt: skip
    assert [day.year * 12 + day.month for day in days] == found


def test_a_period_ends_with_its_day_or_month(client, keys) -> None:
    """The wait of an exhausted budget is the time to midnight, or to the first of the next month."""
    now = time.gmtime(client.time()[0])
    left_today = 86_400 - (now.tm_hour * 3600 + now.tm_min * 60 + now.tm_sec)
    days_left = calendar.monthrange(now.tm_year, now.tm_mon)[1] - now.tm_mday
    for period, left in (("day", left_today), ("month", left_today + days_left * 86_400)):
        place = keys.account(TENANT, period)
        charge = ["budget", 10, 6, period, []]
        assert 1 == admit(client, keys, "a", [charge], [place])[0]
        is_admitted, *_, number, wait_s = admit(client, keys, "b", [charge], [place])
        assert (0, 1) == (is_admitted, number)
        assert abs(wait_s - left) <= 2


def test_a_new_period_begins_with_nothing(client, keys) -> None:
    """What was used yesterday doesn't count today, and settling a request of yesterday doesn't touch today."""
    place = keys.account(TENANT, "budget")
    client.hset(place, mapping={"period": 1, "used": 10})
    assert 6 == admit(client, keys, "a", [["budget", 10, 6, "day", []]], [place])[2]


def test_any_sixty_seconds_are_covered(client, keys) -> None:
    """There's no edge of a minute at which twice the limit fits: what was used 60 seconds ago still counts, what's older doesn't."""
    place = keys.account(TENANT, "window")
    now_s = client.time()[0]
    client.hset(place, mapping={"oldest": now_s - 90, "sum": 10, now_s - 90: 4, now_s - 30: 3, now_s - 1: 3})
    is_admitted, _, used, reset_s = admit(client, keys, "a", [window(10, 4)], [place])
    assert (1, 10) == (is_admitted, used)
    assert 60 <= reset_s <= 61
    *_, number, wait_s = admit(client, keys, "b", [window(10, 3)], [place])
    assert 1 == number
    assert 29 <= wait_s <= 31
    assert not client.hexists(place, now_s - 90)


def test_the_edge_of_a_minute(client, keys) -> None:
    """What was used 60 seconds ago counts, 61 seconds ago doesn't."""
    for attempt in range(100):
        place = keys.account(TENANT, f"window{attempt}")
        now_s = client.time()[0]
        client.hset(place, mapping={"oldest": now_s - 90, "sum": 9, now_s - 61: 5, now_s - 60: 4})
        reply = admit(client, keys, "a", [window(10, 1)], [place])
        if client.time()[0] == now_s:  # or the second has changed meanwhile
            assert [1, 5] == [reply[0], reply[2]]
            return
    raise AssertionError("every attempt met the end of a second")


def test_a_clock_that_was_set_back(client, keys) -> None:
    """Another server may take over whose clock is behind: what is taken then stops counting after a minute as all else does."""
    place = keys.account(TENANT, "window")
    ahead_s = client.time()[0] + 30
    client.hset(place, mapping={"oldest": ahead_s, "sum": 4, ahead_s: 4})
    is_admitted, _, used, _ = admit(client, keys, "a", [window(10, 3)], [place])
    assert (1, 7) == (is_admitted, used)
    aged = {}
    for name, value in client.hgetall(place).items():  # a hundred seconds later
        is_time = name in (b"oldest", b"newest")
        aged[str(int(name) - 100) if name.isdigit() else name] = int(value) - 100 if is_time else int(value)
    client.delete(place)
    client.hset(place, mapping=aged)
    is_admitted, _, used, _ = admit(client, keys, "b", [window(10, 1)], [place])
    assert (1, 1) == (is_admitted, used)


def test_waits_are_right(client, keys) -> None:
    """A refused request is told the first second in which it would have fitted, and -1 if there is none."""
    place = keys.account(TENANT, "window")
    now_s = client.time()[0]
    client.hset(place, mapping={"oldest": now_s - 50, "sum": 10, now_s - 50: 5, now_s - 20: 5})
    for amount, expected_s in ((5, 11), (6, 41), (10, 41), (11, -1)):
        *_, wait_s = admit(client, keys, "a", [window(10, amount)], [place])
        assert abs(wait_s - expected_s) <= 1, amount


def test_all_or_nothing(client, keys) -> None:
    """One limit that's full takes nothing of the others, and the longest wait is told."""
    places = [keys.account(TENANT, name) for name in ("one", "two", "three")]
    client.hset(places[1], mapping={"oldest": client.time()[0], "sum": 5, client.time()[0]: 5})
    charges = [window(10, 1), window(5, 1), ["lease", 10, 1, "", ["x"]]]
    reply = admit(client, keys, "a", charges, places)
    assert (0, 2) == (reply[0], reply[-2])
    assert [0, 0, 0] == [client.exists(places[0]), client.exists(places[2]), client.exists(keys.open_requests(TENANT))]


def test_leases_run_out_by_themselves(client, keys) -> None:
    """A lease that nobody renews is free when its time is over, without anybody settling it."""
    place = keys.account(TENANT, "slots")
    charge = ["lease", 1, 1, "", ["a"]]
    assert 1 == admit(client, keys, "a", [charge], [place])[0]
    assert 0 == admit(client, keys, "b", [["lease", 1, 1, "", ["b"]]], [place])[0]
    client.zadd(place, {"a": client.time()[0] * 1000 - 1})
    assert 1 == admit(client, keys, "b", [["lease", 1, 1, "", ["b"]]], [place])[0]


def test_a_renewal_brings_nothing_back(client, keys) -> None:
    """Renewing renews what's there: neither a settled request nor a released member returns."""
    place = keys.account(TENANT, "queued")
    admit(client, keys, "a", [["lease", 5, 2, "", ["a1", "a2"]]], [place])
    client.zrem(place, "a1")
    all_keys = [keys.open_requests(TENANT), keys.leases(TENANT), keys.progress(TENANT), place]
    entries = [["a", "text", [[1, "a1", "a2"]]], ["gone", "text", [[1, "b1"]]]]
    assert 1 == client.eval(RENEW, 4, *all_keys, LEASE_MS, pack(entries))
    assert [b"a2"] == client.zrange(place, 0, -1)
    assert {b"a": b"text"} == client.hgetall(keys.progress(TENANT))


class Books(RuleBasedStateMachine):
    """Requests are admitted, settled once or twice, refused late, or lose their gateway; a model keeps the same books."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.client = redis.Redis.from_url(self.url)
        self.loop = _Awaitable(self.client)
        self.keys = KeySpace("t" + secrets.token_hex(6))
        self.limits = [
            ("window", 1000, ""),
            ("window", 40, ""),
            ("lease", 6, ""),
            ("budget", 5000, "day"),
            ("budget", 90_000, "month"),
        ]
        whats = ("tokens", "requests", "concurrent", "budget_tokens", "budget_money")
        self.places = [self.keys.account(TENANT, f"tenant:{what}") for what in whats]
        self.note = Note("key_1", ModelName("m"), 1, (10, 5, 20), whats)
        self.open: dict[str, list[int]] = {}
        self.used = [0] * 5
        self.rows: list[dict[str, int]] = []
        self.numbers = itertools.count()

    def teardown(self) -> None:
        for name in self.client.scan_iter(self.keys.prefix + ":*"):
            self.client.delete(name)
        self.client.close()

    @rule(prompt=st.integers(0, 300), output=st.integers(0, 300))
    def admit(self, prompt: int, output: int) -> None:
        name = f"r{next(self.numbers)}"
        amounts = [prompt + output, 1, 1, prompt + output, prompt * 10 + output * 20]
        charges = [
            [kind, limit, amount, period, [name] if kind == "lease" else []]
            for (kind, limit, period), amount in zip(self.limits, amounts, strict=True)
        ]
        all_keys = [self.keys.open_requests(TENANT), self.keys.leases(TENANT), self.keys.deleted(TENANT), *self.places]
        reply = self.client.eval(ADMIT, len(all_keys), *all_keys, name, LEASE_MS, self.note.to_text(), pack(charges), 0)
        fits = all(
            used + amount <= limit for used, amount, (_, limit, _) in zip(self.used, amounts, self.limits, strict=True)
        )
        assert fits == bool(unpack_list(reply)[0])
        if fits:
            self.open[name] = amounts
            self.used = [used + amount for used, amount in zip(self.used, amounts, strict=True)]

    @precondition(lambda self: self.open)
    @rule(
        data=st.data(), part=st.floats(0, 1), outcome=st.sampled_from(["completed", "cancelled", "failed", "refused"])
    )
    def settle(self, data, part: float, outcome: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        counts = Counts(int(self.open[name][0] * part), 0, 0, 1, 2, 3)
        settlement = self._settlement(name, counts, outcome)
        assert [True, False, False] == [self._write(settlement) for _ in range(3)]

    @precondition(lambda self: self.open)
    @rule(data=st.data(), reported=st.integers(0, 50))
    def lose_gateway(self, data, reported: int) -> None:
        """Its lease runs out, two gateways find it, and its own comes back too late."""
        name = data.draw(st.sampled_from(sorted(self.open)))
        counts = Counts(min(reported, self.open[name][0]))
        assert not self._write(self._settlement(name, counts, "lost", is_model=False), only_if_expired=True)
        self.client.zadd(self.keys.leases(TENANT), {name: 1})
        places = [self.keys.open_requests(TENANT), self.keys.leases(TENANT), self.keys.progress(TENANT)]
        found = self.client.eval(EXPIRED, 3, *places, 0, 10)
        assert [name.encode()] == [row[0] for row in found]
        record = msgpack.unpackb(found[0][1], raw=False)
        assert (self.note, self.places) == (Note.from_text(record[2]), record[4])
        settlement = self._settlement(name, counts, "lost")
        assert [True, False] == [self._write(settlement, only_if_expired=True) for _ in range(2)]
        assert not self._write(settlement)

    def _settlement(self, name: str, counts: Counts, outcome: str, *, is_model: bool = True) -> Settlement:
        now_ms = int(time.time() * 1000)
        is_refused = outcome == "refused"
        row = None if is_refused else self.note.row(name, TENANT, counts, outcome, "", now_ms - 3, now_ms)
        if is_model:
            amounts = self.open.pop(name)
            true = [0] * 5 if row is None else [counts.prompt_tokens, 1, 0, counts.prompt_tokens, row.cost_nanos]
            self.used = [used - amount + real for used, amount, real in zip(self.used, amounts, true, strict=True)]
            if row is not None:
                self.rows.append({"requests": 1, outcome: 1, **{field: getattr(row, field) for field in SUMMED}})
        return Settlement(TENANT, name, self.note, self.places, row, now_ms)

    def _write(self, settlement: Settlement, *, only_if_expired: bool = False) -> bool:
        return self.loop.run(settlement.write(self.loop, self.keys, 86_400, only_if_expired=only_if_expired))

    @invariant()
    def books_balance(self) -> None:
        found = [
            int(self.client.hget(self.places[0], "sum") or 0), int(self.client.hget(self.places[1], "sum") or 0),
            self.client.zcard(self.places[2]), int(self.client.hget(self.places[3], "used") or 0),
            int(self.client.hget(self.places[4], "used") or 0),
        ]  # fmt: skip
        assert self.used == found
        assert set(self.open) == {name.decode() for name in self.client.hkeys(self.keys.open_requests(TENANT))}
        assert len(self.open) == self.client.zcard(self.keys.leases(TENANT))
        assert all(used <= limit for used, (_, limit, _) in zip(self.used, self.limits, strict=True))
        self._sums_agree()

    def _sums_agree(self) -> None:
        expected: dict[str, int] = defaultdict(int)
        for row in self.rows:
            for name, amount in row.items():
                expected[name] += amount
        stored = [row_from_fields(fields) for _, fields in self.client.xrange(self.keys.usage_rows(TENANT))]
        assert len(self.rows) == len({row.request for row in stored}) == len(stored)
        for pattern in ("hours:*", "days:*"):
            sums: dict[str, int] = defaultdict(int)
            for place in self.client.scan_iter(self.keys.account(TENANT, pattern)):
                for field, amount in self.client.hgetall(place).items():
                    sums[field.decode().split("|")[3]] += int(amount)
            assert {name: amount for name, amount in expected.items() if amount} == sums
        totals = {name.decode(): int(amount) for name, amount in self.client.hgetall(self.keys.usage(TENANT)).items()}
        assert all(amount == expected.get(name, 0) for name, amount in totals.items())
        assert expected["requests"] == totals.get("requests", 0)


class _Awaitable:
    """The blocking client as the store's code awaits it."""

    def __init__(self, client) -> None:
        self._client = client

    async def evalsha(self, *arguments):
        return self._client.evalsha(*arguments)

    async def eval(self, *arguments):
        return self._client.eval(*arguments)

    def run(self, coroutine):
        try:
            coroutine.send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError("nothing here waits")


def test_books_balance(valkey_url: str) -> None:
    """Rows, sums, totals, windows, budgets and leases agree with a model after any order of ends."""
    machine = type("BooksHere", (Books,), {"url": valkey_url})
    budget = settings(max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
    machine.TestCase.settings = budget
    machine.TestCase().runTest()
