"""Typed msgpack: what goes in comes out, and nothing else gets through."""

import dataclasses

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.codec import decode, encode, pack
from protocol.errors import DecodeError, InvalidNameError, SignatureError
from protocol.ids import parse_model_name, parse_tenant_id
from protocol.job import Job, SamplingParams
from protocol.replies import (
    REPLY_ORDER,
    Delta,
    Done,
    Failed,
    PromptLogprobs,
    ReplyEnvelope,
    Started,
    TokenLogprob,
    decode_replies,
    encode_replies,
)
from protocol.signing import derive_key, open_job, seal_job
from protocol.tenancy import key_digest, new_api_key

KEY = derive_key(b"m" * 32, "job-signing")


def _job(**changes) -> Job:
    sampling = SamplingParams(max_tokens=5, seed=-3, stop=("\U0001fae0",), logit_bias=((7, -1.5),), logprobs=2)
    return Job("r", "g", "t", "m", (1, 2, 3), sampling, 10, 20, **changes)


text = st.text(max_size=20)
number = st.floats(allow_nan=False, allow_infinity=False)
logprob = st.builds(TokenLogprob, st.integers(0, 10**6), st.binary(max_size=8), number,
                    st.lists(st.tuples(st.integers(0, 99), st.binary(max_size=4), number), max_size=3).map(tuple))  # fmt: skip
reply = st.one_of(
    st.builds(Started, text),
    st.builds(PromptLogprobs, st.lists(st.binary(max_size=3), max_size=3).map(tuple),
              st.lists(st.none() | logprob, max_size=3).map(tuple)),
    st.builds(Delta, st.integers(0, 9), text, st.lists(st.integers(0, 99), max_size=4).map(tuple),
              st.lists(logprob, max_size=3).map(tuple), st.sampled_from([None, "stop", "length"])),
    st.builds(Done, st.integers(0, 99), st.integers(0, 99), st.integers(0, 99)),
    st.builds(Failed, st.sampled_from(["worker_lost", "internal_error"]), text, st.integers(0, 9)),
)  # fmt: skip


@given(st.lists(st.builds(ReplyEnvelope, text, st.integers(1, 9), st.integers(0, 99), reply), max_size=5))
def test_replies_survive_the_wire(envelopes) -> None:
    """Any replies decode to themselves."""
    assert envelopes == decode_replies(encode_replies(envelopes))


def test_a_job_survives_the_wire() -> None:
    """A job decodes to itself, signed or not."""
    assert _job() == decode(Job, encode(_job()))
    assert _job(n=3) == open_job(KEY, seal_job(KEY, _job(n=3)))


@given(st.binary(max_size=200))
def test_rubbish_is_a_decode_error(raw: bytes) -> None:
    """No bytes do anything but decode or raise DecodeError."""
    for call in (lambda: decode(Job, raw), lambda: decode_replies(raw), lambda: open_job(KEY, raw)):
        with pytest.raises(DecodeError):
            call()
            raise DecodeError("bytes that happen to be valid")


@given(st.integers(0, 11), st.sampled_from([None, True, 1.5, "x", b"x", [], {}, -1]))
def test_a_field_of_another_type_is_refused(place: int, value) -> None:
    """Each field of a job is checked: it decodes to an equal job, or not at all."""
    fields = msgpack.unpackb(encode(_job()), raw=False)
    fields[place] = value
    try:
        decoded = decode(Job, msgpack.packb(fields))
    except DecodeError:
        return
    assert [type(v) for v in dataclasses.astuple(decoded)] != [] and fields == msgpack.unpackb(
        encode(decoded), raw=False
    )


def test_old_senders_are_understood_and_newer_ones_refused() -> None:
    """Missing trailing fields take their defaults; an unknown one more is an error."""
    fields = msgpack.unpackb(encode(_job()), raw=False)
    assert _job() == decode(Job, pack(fields[:8]))
    with pytest.raises(DecodeError):
        decode(Job, pack([*fields, "new"]))


@pytest.mark.parametrize("place", range(3))
def test_an_altered_envelope_is_refused(place: int) -> None:
    """Version, body and signature are all covered."""
    parts = msgpack.unpackb(seal_job(KEY, _job()), raw=False)
    parts[place] = parts[place] + 1 if place == 0 else bytes([parts[place][0] ^ 1]) + parts[place][1:]
    with pytest.raises((SignatureError, DecodeError)):
        open_job(KEY, pack(parts))


def test_another_installation_cannot_sign() -> None:
    """Keys of different masters, and of different purposes, differ."""
    other = derive_key(b"n" * 32, "job-signing")
    assert len({KEY, other, derive_key(b"m" * 32, "api-key-pepper")}) == 3
    with pytest.raises(SignatureError):
        open_job(KEY, seal_job(other, _job()))
    with pytest.raises(ValueError, match="at least 32"):
        derive_key(b"short", "job-signing")


def test_terminal_replies_end_the_order() -> None:
    """From every state a terminal reply can be reached, and after it nothing comes."""
    for state, following in REPLY_ORDER.items():
        assert (following == frozenset()) == (state in (Done, Failed))
        assert state in (Done, Failed) or Failed in following


@pytest.mark.parametrize("name", ["", "a b", "a:b", "{a}", "\u00e9", "-a", "a" * 65, "a\n"])
def test_names_that_could_leave_their_key_are_refused(name: str) -> None:
    """Tenant and model names cannot hold separators of keys."""
    with pytest.raises(InvalidNameError):
        parse_tenant_id(name)
    with pytest.raises(InvalidNameError):
        parse_model_name(name * 2)
    assert "acme-1.x_y" == parse_tenant_id("acme-1.x_y")
    assert "org/model-1" == parse_model_name("org/model-1")


@pytest.mark.parametrize(
    "key", ["", "short", "sk-sg-\u00e9\u00e9\u00e9\u00e9\u00e9", "with space in it", "x" * 257, "line\nbreak-aaaaaa"]
)
def test_what_cannot_be_a_key_has_no_digest(key: str) -> None:
    """Odd strings are no keys; real ones have digests that depend on the pepper."""
    assert key_digest(b"p", key) is None
    real = new_api_key()
    assert key_digest(b"p", real) != key_digest(b"q", real)
