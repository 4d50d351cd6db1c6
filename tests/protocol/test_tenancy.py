"""Stored tenants and keys: what is sealed counts only where it was written, as it was written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.codec import decode, encode
from protocol.errors import ProtocolError
from protocol.ids import TenantId
from protocol.limits import MAX_AMOUNT, Budget, Limits, Price, money_to_nanos, nanos_to_price, price_to_nanos
from protocol.tenancy import ApiKey, Tenant, key_digest, open_record, record_key, seal_record

KEY = record_key(b"p" * 32)
TENANT = Tenant(
    TenantId("acme"), "Acme", 5, "disabled", 2.5, ("a/b", "c"), Limits(samples=3),
    (Budget("day", "tokens", 7), Budget("month", "money", 9)), (("team", "x"),),
)  # fmt: skip


def test_a_record_comes_back_as_it_was() -> None:
    """All fields survive."""
    assert TENANT == open_record(KEY, "here", Tenant, seal_record(KEY, "here", TENANT))


def test_the_first_version_of_a_tenant_can_still_be_read() -> None:
    """A shorter, older record gets the defaults."""
    assert Tenant(TenantId("a"), "A", 1) == decode(Tenant, b"\x93\xa1a\xa1A\x01")


@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_changed_bit_is_seen(place: int, bit: int) -> None:
    """Wherever it is."""
    raw = bytearray(seal_record(KEY, "here", TENANT))
    raw[place % len(raw)] ^= 1 << bit
    with pytest.raises(ProtocolError):
        open_record(KEY, "here", Tenant, bytes(raw))


def test_a_record_counts_in_its_place_only() -> None:
    """Another field, another hash and another installation refuse it."""
    raw = seal_record(KEY, "here", TENANT)
    for key, place in ((KEY, "there"), (record_key(b"q" * 32), "here")):
        with pytest.raises(ProtocolError):
            open_record(key, place, Tenant, raw)


def test_no_key_can_pose_as_the_seal() -> None:
    """The seal's key is none that a client's key could be digested to."""
    assert key_digest(b"p" * 32, "sluicegate/v1 stored record") is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: Limits(samples=0), lambda: Limits(queued_jobs=MAX_AMOUNT + 1), lambda: Budget("day", "tokens", 0),
        lambda: Price(-1, 0, 0), lambda: Tenant(TenantId("a"), "a", 0, weight=0), lambda: Tenant(TenantId("a"), "a", 0, weight=float("nan")),
        lambda: Tenant(TenantId("a"), "a", 0, budgets=(Budget("day", "tokens", 1),) * 2),
        lambda: Tenant(TenantId("a"), "a", 0, metadata=(("a", "1"), ("a", "2"))), lambda: ApiKey("k", TenantId("a"), "n", 0, ()),
        lambda: ApiKey("k", TenantId("a"), "n", 0, ("admin", "admin")),
    ],
)  # fmt: skip
def test_what_cannot_be_is_not_made(make) -> None:
    """Neither here nor by decoding."""
    with pytest.raises(ValueError, match=r"must|needs|can be|may have"):
        make()


def test_a_key_expires_at_its_time() -> None:
    """Not a millisecond later."""
    key = ApiKey("k", TenantId("a"), "n", 0, expires_ms=100)
    assert [False, True] == [key.is_expired(now) for now in (99, 100)]
    assert not ApiKey("k", TenantId("a"), "n", 0).is_expired(2**60)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6))
def test_costs_are_whole_and_add_up(fresh: int, cached: int, output: int, price: int) -> None:
    """Cached tokens are among the prompt's, and the discount is theirs alone."""
    cost = Price(2 * price, price, 3 * price).cost(fresh + cached, cached, output)
    assert (2 * fresh + cached + 3 * output) * price == cost


def test_money_has_a_resolution() -> None:
    """A thousandth for a million tokens is one nano-unit a token."""
    assert (1, 0.001, 12_500_000_000) == (price_to_nanos(0.001), nanos_to_price(1), money_to_nanos(12.5))
    assert encode(Price(1, 2, 3)) == b"\x93\x01\x02\x03"
