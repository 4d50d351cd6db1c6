"""What waits for a slow reader: joined, complete, and in order."""

from gateway.mailbox import Mailbox
from protocol.replies import Delta, Done, PromptLogprobs, TokenLogprob


def _entry(token: int) -> TokenLogprob:
    return TokenLogprob(token, b"x", -1.0)


async def test_what_waits_of_a_sample_becomes_one_delta() -> None:
    """Texts, tokens and logprobs in order, the last finish reason; samples and prompts stay apart, the end stays the end."""
    mailbox = Mailbox()
    prompt, done = PromptLogprobs((b"a",), (None,)), Done(1, 0, 5)
    for slot, reply in (
        (0, prompt),
        (0, Delta(0, "a", (1,), (_entry(1),))),
        (1, Delta(0, "other", (9,))),
        (0, Delta(1, "b", (2,))),
        (0, Delta(0, "", (3,), (), None)),
        (0, Delta(0, "c", (4,), (_entry(3), _entry(4)), "stop")),
        (0, Delta(1, "d", (5,), (), "length")),
        (0, done),
    ):
        mailbox.put(slot, reply)
    expected = [
        (0, prompt),
        (0, Delta(0, "ac", (1, 3, 4), (_entry(1), _entry(3), _entry(4)), "stop")),
        (1, Delta(0, "other", (9,))),
        (0, Delta(1, "bd", (2, 5), (), "length")),
        (0, done),
    ]
    assert expected == await mailbox.take()
    assert mailbox.is_empty


async def test_one_reply_is_taken_as_it_is() -> None:
    """A reader that keeps up gets token by token."""
    mailbox, reply = Mailbox(), Delta(0, "a", (1,))
    mailbox.put(0, reply)
    assert reply is (await mailbox.take())[0][1]
