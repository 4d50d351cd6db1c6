"""A stream rebuilt from its tokens."""

import pytest

from protocol.replies import TokenLogprob
from worker.text import Replayed, TextStream

PIECES = [b"He", b"", b"llo \xf0\x9f", b"\x98\x80 ", b"ST", b"A", b"\xff", b"S", b"T", b"OP", b"more"]


def entry(token_id):
    """A recognizable one."""
    return TokenLogprob(token_id, PIECES[token_id], -1.0 - token_id)


def stream():
    """A new one."""
    return TextStream(PIECES, ["STOP"], 0)


def push(to, token_id):
    """With its entry."""
    return to.push(token_id, entry(token_id), ends_text=False, is_full=False)


@pytest.mark.parametrize("num_before", range(10))
def test_a_replayed_stream_goes_on_as_the_first_one_would_have(num_before):
    """Text, entries and reason of all that follows, the entries that were held at the interruption included."""
    first = stream()
    released = [push(first, token_id) for token_id in range(num_before)]
    tokens = list(range(num_before))
    replayed = stream().replay(tokens)
    assert sum(len(each.text) for each in released) == replayed.num_characters
    assert sum(len(each.entries) for each in released) == replayed.num_settled
    second = stream()
    assert replayed == second.replay(tokens, [entry(token_id) for token_id in tokens[replayed.num_settled :]])
    for token_id in range(num_before, 10):
        assert push(first, token_id) == push(second, token_id)


def test_a_replay_that_ends_at_a_stop_says_so():
    """The worker died between the last text and the word that it is done."""
    assert Replayed(len("Hello \U0001f600 STA\ufffd"), 7, "stop") == stream().replay(list(range(10)))


def test_only_a_new_stream_replays():
    """A second replay would show text twice."""
    used = stream()
    push(used, 0)
    with pytest.raises(AssertionError):
        used.replay([0])
