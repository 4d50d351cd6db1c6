"""Logprob entries line up with the text."""

from protocol.replies import TokenLogprob
from worker.text import TextStream


def test_an_entry_comes_with_the_text_of_its_token(write):
    """Held back with it, released with it."""
    written = write([b"A", b"D", b"E", b"X"], stops=["DEF"])
    assert written.deltas == ["A", "", "", "DEX"]
    assert [[entry.token_id for entry in entries] for entries in written.entries] == [[0], [], [], [1, 2, 3]]


def test_an_entry_is_handed_on_as_it_was_given():
    """Logprob and alternatives are not touched."""
    entry = TokenLogprob(0, b"A", -0.25, ((0, b"A", -0.25), (1, b"B", -9.0)))
    released = TextStream([b"A"], [], 0).push(0, entry, ends_text=False, is_full=False)
    assert [entry] == released.entries


def test_tokens_of_one_character_come_together_and_keep_their_own_bytes(write):
    """No entry holds the bytes of a replacement character."""
    written = write([b"a", b"\xf0\x9f", b"\x98\x80", b"b"])
    assert [[entry.token_id for entry in entries] for entries in written.entries] == [[0], [], [1, 2], [3]]
    assert b"".join(token for _, token in written.shown_tokens).decode() == "a\U0001f600b"


def test_entries_of_the_stop_and_after_it_are_dropped(write):
    """Tokens wholly inside it too."""
    written = write([b"x", b"ST", b"OP", b"y"], stops=["STOP"])
    assert written.shown_tokens == [(0, b"x")]


def test_an_entry_that_reaches_into_the_stop_is_cut_to_what_is_shown(write):
    """Its logprob is still the token's."""
    written = write([b"x", b"y\xc3\xa9S", b"TOP"], stops=["STOP"])
    assert written.shown_tokens == [(0, b"x"), (1, b"y\xc3\xa9")]
    assert written.entries[-1][-1].logprob == -0.5


def test_entries_are_cut_at_the_bytes_of_replaced_characters(write):
    """Bytes that are no character count as they are, not as the replacement's own encoding."""
    written = write([b"a\xff", b"\xe2\x82", b"S", b"TOP"], stops=["STOP"])
    assert written.outcome == ("a\ufffd\ufffd", "stop")
    assert written.shown_tokens == [(0, b"a\xff"), (1, b"\xe2\x82")]


def test_tokens_without_bytes_keep_their_place(write):
    """A control token sampled because EOS is ignored has an entry with no bytes, in order."""
    written = write([b"", b"A", b"", b"D", b"", b"X", b""], stops=["DE"])
    assert [[entry.token_id for entry in entries] for entries in written.entries] == [
        [0],
        [1],
        [2],
        [],
        [],
        [3, 4, 5],
        [6],
    ]


def test_tokens_without_bytes_inside_a_stop_are_dropped(write):
    """One right before it stays."""
    written = write([b"A", b"", b"S", b"", b"T"], stops=["ST"])
    assert written.shown_tokens == [(0, b"A"), (1, b"")]


def test_an_end_token_has_no_entry_and_held_entries_are_released(write):
    """Its text is not part of the content."""
    written = write([b"A", b"D", None], stops=["DE"])
    assert [[entry.token_id for entry in entries] for entries in written.entries] == [[0], [], [1]]


def test_all_entries_are_released_at_the_limit(write):
    """Those of an unfinished character too."""
    written = write([b"A", b"\xf0", b"\x9f"])
    assert written.shown_tokens == [(0, b"A"), (1, b"\xf0"), (2, b"\x9f")]


def test_without_logprobs_there_are_no_entries():
    """And the text is the same."""
    stream = TextStream([b"a", b"b"], ["bc"], 0)
    released = [stream.push(token, None, ends_text=False, is_full=token == 1) for token in (0, 1)]
    assert [(each.text, each.entries) for each in released] == [("a", []), ("b", [])]
