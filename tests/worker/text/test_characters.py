"""Characters that come in pieces."""

import pytest

from worker.text import TextStream
from worker.text.utf8 import num_bytes

RARE = [
    "\U0001fae0",
    "\U0001f979\u9f9c",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",
    "\U0001f1f3\U0001f1ff",
    "\u0928\u092e\u0938\u094d\u0924\u0947",
    "e\u0301\u00df\u20ac",
]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("text", RARE, ids=ascii)
def test_a_character_is_shown_once_it_is_whole(write, text, size):
    """However its bytes are cut into tokens: no delta holds a replacement, together they are the text."""
    raw = text.encode()
    pieces = [raw[i : i + size] for i in range(0, len(raw), size)]
    written = write(pieces)
    assert (text, "length") == written.outcome
    for count in range(1, len(pieces) + 1):
        shown = "".join(written.deltas[:count])
        assert b"".join(pieces[:count]).decode("utf-8", "ignore") == shown


def test_a_character_that_max_tokens_cuts_is_replaced_as_in_the_whole_text(write):
    """Its bytes are neither lost nor shown early."""
    assert write([b"a", b"\xf0", b"\x9f", b"\xab"]).deltas == ["a", "", "", "\ufffd"]


def test_a_character_that_an_end_token_cuts_is_replaced_too(write):
    """The end token itself adds nothing."""
    assert write([b"a", b"\xf0\x9f", None]).deltas == ["a", "", "\ufffd"]


@pytest.mark.parametrize(
    "raw",
    [
        b"a\xffb", b"\x80\x80", b"\xc3(", b"\xe2\x82a", b"\xf0\x9f\x98a", b"\xed\xa0\x80x", b"\xf8\x88\x80\x80\x80",
        b"\xc0\xaf", b"\xe2\x82", b"\xf4\x90\x80\x80", b"\xef\xbf\xbd", b"\xe2\xe2\x82\xac", b"\xf0\x9f\xc3\xa9",
    ],
    ids=bytes.hex,
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 2, 3])
def test_invalid_bytes_are_replaced_as_in_the_whole_text(write, raw, size):
    """Byte by byte or in larger pieces."""
    written = write([raw[i : i + size] for i in range(0, len(raw), size)])
    assert raw.decode("utf-8", "replace") == written.text
    assert raw == b"".join(token for _, token in written.shown_tokens)


@pytest.mark.parametrize("raw", [b"ab\xc3\xa9\xe2\x82\xac", b"\xed\xa0\x80x\xf0\x9f\x98\xff\xf0\x9f\x98\x80", b"\xc3"])
def test_the_bytes_of_a_start_of_the_text_decode_to_it(raw):
    """Whole characters and replaced ones are told apart from their bytes."""
    text = raw.decode("utf-8", "replace")
    ends = [num_bytes(raw, count) for count in range(len(text) + 1)]
    assert [text[:count] for count in range(len(text) + 1)] == [raw[:end].decode("utf-8", "replace") for end in ends]
    assert [text[count:] for count in range(len(text) + 1)] == [raw[end:].decode("utf-8", "replace") for end in ends]
    assert (0, len(raw)) == (ends[0], ends[-1])


def test_nothing_is_taken_after_the_end():
    """A push to a text that has ended is our own mistake."""
    stream = TextStream([b"a"], [], 0)
    stream.push(0, None, ends_text=False, is_full=True)
    with pytest.raises(AssertionError):
        stream.push(0, None, ends_text=False, is_full=False)
