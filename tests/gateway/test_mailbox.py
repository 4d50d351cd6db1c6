"""What waits for a slow reader: joined, complete, and in order."""

import json

from gateway.mailbox import Mailbox
from protocol.ids import ModelName
from protocol.replies import Delta, Done, PromptLogprobs, Started, TokenLogprob

CHAT = {"model": ModelName("toy/model-1"), "messages": [{"role": "user", "content": "Hi"}]}


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


async def test_fast_tokens_become_few_events(door, script) -> None:
    """100 tokens that come at once are not 100 events, and nothing of them is missing."""
    door.worker.script = lambda job: [
        Started("w1"),
        *script.words(job, *(f"w{number} " for number in range(100))),
        script.done(job, 100),
    ]
    status, text, _ = await door.post({**CHAT, "stream": True})
    assert 200 == status
    deltas = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    words = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in deltas)
    assert "".join(f"w{number} " for number in range(100)) == words
    assert len(deltas) < 60


async def test_slow_tokens_are_not_held_back(door, script) -> None:
    """A token after a pause leaves at once: the client has it before the next one is made."""
    door.worker.script = lambda job: [Started("w1"), Delta(0, "first", (1,))]
    async with door.session.post(
        door.url + "/v1/chat/completions", json={**CHAT, "stream": True}, headers=door.headers
    ) as response:
        for text in ("first", "second"):
            async for line in response.content:
                if text.encode() in line:
                    break
            if text == "first":
                await door.worker.reply(door.worker.jobs[-1], Delta(0, "second", (2,)))
        await door.worker.reply(door.worker.jobs[-1], Delta(0, "", (3,), (), "stop"))
        await door.worker.reply(door.worker.jobs[-1], script.done(door.worker.jobs[-1], 3))
        assert (await response.content.read()).endswith(b"data: [DONE]\n\n")
