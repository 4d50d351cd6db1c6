"""The short way for the message of each token takes nothing that the general way would not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.codec import decode_tagged, pack
from protocol.errors import DecodeError
from protocol.replies import _KINDS, decode_replies

_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.text(max_size=3),
    st.lists(st.one_of(st.integers(0, 9), st.booleans()), max_size=2),
)


@given(st.lists(_values, min_size=4, max_size=8).map(lambda fields: [3, *fields]))
def test_both_ways_agree_on_any_message(message: list) -> None:
    """The same delta, or an error from both."""
    try:
        expected = decode_tagged(_KINDS, message)
    except DecodeError:
        with pytest.raises(DecodeError):
            decode_replies(pack([["r", 1, 0, message]]))
    else:
        assert expected == decode_replies(pack([["r", 1, 0, message]]))[0].reply


def test_a_plain_token_and_one_with_everything() -> None:
    """Both decode."""
    entry = [5, b"x", -1.0, [[6, b"y", -2.0]]]
    rows = [["r", 1, 0, [3, 0, " badi", [300], [], None]], ["r", 1, 1, [3, 1, "x", [5, 6], [entry], "stop"]]]
    plain, full = decode_replies(pack(rows))
    assert (" badi", (300,), ()) == (plain.reply.text, plain.reply.token_ids, plain.reply.logprobs)
    assert ("stop", b"x") == (full.reply.finish_reason, full.reply.logprobs[0].token)
