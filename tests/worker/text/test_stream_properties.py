"""Random bytes in random tokens with random stops, against an oracle that looks at the whole text."""

import codecs
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from worker.text.utf8 import num_bytes

# Parts of characters, whole ones, bytes that are none, and letters that make stops resemble themselves and each other.
PIECES = st.sampled_from(
    [
        b"", b"a", b"b", b"ab", b"ba", b"aab", b"c", b"\xf0", b"\x9f", b"\x98\x80", b"\xf0\x9f\x98\x80", b"\xc3",
        b"\xa9", b"\xe2\x82", b"\xac", b"\xff", b"\xed\xa0", b"\xef\xbf\xbd", b"a\xf0\x9f\x98\x80b", b"b\xc3",
    ]
)  # fmt: skip
ANY_BYTES = st.binary(max_size=4)
STOPS = st.text(st.sampled_from("aaabbc\U0001f600\xe9\u20ac\ufffd"), min_size=1, max_size=6)
CASES = {
    "pieces": st.lists(st.one_of(PIECES, PIECES, ANY_BYTES), min_size=1, max_size=30),
    "stops": st.lists(STOPS, max_size=4),
    "min_tokens": st.one_of(st.just(0), st.integers(0, 30)),
    "has_end_token": st.booleans(),
}


def so_far(pieces):
    """The text of which no byte to come can change anything."""
    return codecs.utf_8_decode(b"".join(pieces), "replace", False)[0]


def first_match(pieces, text, stops, min_tokens):
    """Where the earliest stop begins that is not complete before min_tokens, or None."""
    not_counted = len(so_far(pieces[: max(0, min_tokens - 1)]))
    starts = [
        start
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start) and start + len(stop) > not_counted
    ]
    return min(starts, default=None)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(**CASES)
def test_all_deltas_together_are_the_whole_text_up_to_the_earliest_stop(
    write, pieces, stops, min_tokens, has_end_token
):
    """However the text is cut into tokens, and whatever ends it."""
    text = b"".join(pieces).decode("utf-8", "replace")
    # An end token counts like any other, and may be what decides about the last character.
    num_tokens = len(pieces) + has_end_token
    cut = first_match(pieces, text, stops, min_tokens) if num_tokens >= min_tokens else None
    written = write([*pieces, None] if has_end_token else pieces, stops=stops, min_tokens=min_tokens)
    if cut is None:
        assert (text, "stop" if has_end_token else "length") == written.outcome
    else:
        assert (text[:cut], "stop") == written.outcome


@settings(max_examples=400, deadline=None, derandomize=True)
@given(**CASES)
def test_entries_together_are_the_bytes_of_what_is_shown(write, pieces, stops, min_tokens, has_end_token):
    """In the order of the tokens, none left out; only the last may be cut."""
    written = write([*pieces, None] if has_end_token else pieces, stops=stops, min_tokens=min_tokens)
    tokens = written.shown_tokens
    shown = b"".join(token for _, token in tokens)
    assert written.text == shown.decode("utf-8", "replace")
    assert list(range(len(tokens))) == [token_id for token_id, _ in tokens]
    assert [token for _, token in tokens[:-1]] == pieces[: len(tokens) - 1] if tokens else True
    raw = b"".join(pieces)
    assert raw.startswith(shown)
    # The cut is between two characters, also where those are replaced bytes.
    assert raw.decode("utf-8", "replace") == written.text + raw[len(shown) :].decode("utf-8", "replace")


@settings(max_examples=400, deadline=None, derandomize=True)
@given(pieces=CASES["pieces"], stops=CASES["stops"], min_tokens=CASES["min_tokens"])
def test_after_each_token_all_is_shown_that_can_be(write, pieces, stops, min_tokens):
    """What is held is the beginning of a stop, up to the last whole character; entries wait for their text only."""
    written = write(pieces, stops=stops, min_tokens=min_tokens, is_full=False)
    num_running = len(written.deltas) - (written.finish_reason is not None)
    ends = list(itertools.accumulate(map(len, pieces)))
    for count in range(1, num_running + 1):
        decoded = so_far(pieces[:count])
        shown = "".join(written.deltas[:count])
        assert decoded.startswith(shown)
        held = decoded[len(shown) :]
        assert not held or any(len(held) < len(stop) and stop.startswith(held) for stop in stops)
        num_shown_bytes = num_bytes(b"".join(pieces[:count]), len(shown))
        num_entries = sum(map(len, written.entries[:count]))
        assert num_entries == sum(end <= num_shown_bytes for end in ends[:count])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(pieces=CASES["pieces"], stops=CASES["stops"])
def test_the_cut_into_tokens_does_not_change_the_text(write, pieces, stops):
    """Byte by byte it is the same text as in one token."""
    raw = b"".join(pieces)
    expected = write([raw], stops=stops).outcome
    assert expected == write([raw[i : i + 1] for i in range(len(raw))] or [b""], stops=stops).outcome
