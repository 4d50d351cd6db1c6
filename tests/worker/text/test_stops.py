"""Stop strings: absent when they match, shown when they do not."""

import pytest


def letters(text):
    """One token for each character."""
    return [character.encode() for character in text]


def test_no_part_of_a_stop_over_several_tokens_is_shown(write):
    """Nothing of it leaks while it grows."""
    written = write(letters("ABCDEFGHIJKL"), stops=["DEFGHIJ"])
    assert written.deltas == ["A", "B", "C", "", "", "", "", "", "", ""]
    assert written.outcome == ("ABC", "stop")


def test_what_turns_out_to_be_no_stop_is_shown_at_once(write):
    """All that was held, and not later."""
    written = write(letters("ABCDEFXY"), stops=["DEFGHIJ"])
    assert written.deltas == ["A", "B", "C", "", "", "", "DEFX", "Y"]
    assert written.finish_reason == "length"


def test_what_is_held_at_the_last_token_is_shown(write):
    """max_tokens within a partial match."""
    assert write(letters("ADEF"), stops=["DEFGHIJ"]).deltas == ["A", "", "", "DEF"]


def test_what_is_held_at_an_end_token_is_shown(write):
    """The reason is the end token's; the end token's own bytes are not."""
    assert write([*letters("ADEF"), None], stops=["DEFGHIJ"]).outcome == ("ADEF", "stop")


def test_a_stop_that_is_complete_with_the_last_token_stops(write):
    """A match counts before the limit does."""
    assert write(letters("ADE"), stops=["DE"]).outcome == ("A", "stop")


@pytest.mark.parametrize("pieces", [[b"say wor", b"ld no"], [b"say world no"], [b"say ", b"w", b"orld", b" no"]])
def test_a_stop_within_tokens_cuts_them(write, pieces):
    """Beginning and end may be anywhere in a token."""
    assert write(pieces, stops=["world"]).outcome == ("say ", "stop")


@pytest.mark.parametrize("stops", [["ab", "abc"], ["abc", "ab"]])
@pytest.mark.parametrize("pieces", [[b"xabcd"], [b"xa", b"b", b"c"], [b"x", b"abc"]])
def test_of_a_stop_and_its_beginning_either_cuts_in_the_same_place(write, stops, pieces):
    """Whatever their order in the request."""
    assert write(pieces, stops=stops).outcome == ("x", "stop")


@pytest.mark.parametrize("text", ["aaab", "aaaab", "aabaab", "xaaab"])
def test_a_stop_that_resembles_itself_is_found_wherever_it_begins(write, text):
    """'aab' in 'aaab' is not missed by starting over too far on."""
    assert (text[: text.index("aab")], "stop") == write(letters(text), stops=["aab"]).outcome


@pytest.mark.parametrize("pieces", [[b"xabcdy"], [b"xab", b"cd", b"y"], [b"x", b"a", b"b", b"c", b"d"]])
def test_the_stop_that_begins_first_wins_over_one_inside_it(write, pieces):
    """However the text is cut into tokens, although the inner one is complete earlier."""
    assert write(pieces, stops=["bc", "abcd"]).outcome == ("x", "stop")


@pytest.mark.parametrize("rest", [[b"z"], [None], []], ids=["another_token", "end_token", "limit"])
def test_a_complete_stop_stops_once_none_can_begin_before_it(write, rest):
    """Nothing of the text after it is shown, whatever settles the matter."""
    assert write([b"x", b"a", b"bc", *rest], stops=["bc", "abcd"]).outcome == ("xa", "stop")


def test_a_stop_of_rare_characters_matches_byte_by_byte(write):
    """Its characters come in pieces of their own."""
    raw = "a\U0001fae0\U0001f979b".encode()
    pieces = [raw[i : i + 1] for i in range(len(raw))]
    assert write(pieces, stops=["\U0001fae0\U0001f979"]).outcome == ("a", "stop")
    assert (raw.decode(), "length") == write(pieces, stops=["\U0001fae0\U0001f97a"]).outcome


def test_a_stop_of_the_replacement_character_matches_what_is_shown_as_one(write):
    """The text is what the client sees, also if only the end decides what that is."""
    assert write([b"a", b"\xff", b"b"], stops=["\ufffd"]).outcome == ("a", "stop")
    assert write([b"a", b"\xf0\x9f"], stops=["\ufffd"]).outcome == ("a", "stop")


def test_stops_that_no_text_can_hold_never_match(write):
    """A lone surrogate, an empty string."""
    assert write(letters("abc"), stops=["", "\ud83e"]).outcome == ("abc", "length")


def test_a_stop_that_is_complete_before_min_tokens_is_shown(write):
    """One that is complete with the token number min_tokens counts, even if it began before."""
    assert write(letters("ababxabab"), stops=["ab"], min_tokens=5).outcome == ("ababx", "stop")
    assert write(letters("ababxabab"), stops=["ab"], min_tokens=4).outcome == ("ab", "stop")
    assert write(letters("ababxabab"), stops=["ab"], min_tokens=2).outcome == ("", "stop")
    assert write(letters("aaaa"), stops=["aa"], min_tokens=3).outcome == ("a", "stop")


def test_an_early_stop_is_shown_when_it_is_complete(write):
    """It is held while it may still be longer than the tokens that do not count, and no longer."""
    assert write(letters("abcd"), stops=["bc"], min_tokens=9).deltas == ["a", "", "bc", "d"]


def test_tokens_without_text_count_for_min_tokens(write):
    """A control token is a token."""
    assert write([b"a", b"", b"bc"], stops=["bc"], min_tokens=3).outcome == ("a", "stop")
    assert write([b"a", b"bc", b""], stops=["bc"], min_tokens=3).outcome == ("abc", "length")
