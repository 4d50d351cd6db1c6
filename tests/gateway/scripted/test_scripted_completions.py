"""POST /v1/completions: prompts as text and as tokens, several at once, echo, and logprobs of both APIs."""

import pytest

from gateway.token_text import LegacyLogprobs
from protocol.replies import Delta, Done, PromptLogprobs, Started, TokenLogprob


def _entry(raw, logprob, *top):
    return TokenLogprob(1, raw, logprob, tuple((2, other, value) for other, value in top))


async def _post(running, kit, prompt, **fields):
    return await running.post("/v1/completions", {"model": kit.model, "prompt": prompt, **fields})


async def test_prompts(gateway, worker, kit):
    """A string, strings, ids and lists of ids become a job each; indexes follow the order of the prompts."""

    async def echo_prompt(one, job):
        await one.answer(job, [kit.plain_text(job.prompt_token_ids)])

    await worker(echo_prompt)
    running = await gateway()
    for prompt, expected in (
        ("ab", ["ab", "ab"]),
        (["ab", "c"], ["ab", "ab", "c", "c"]),
        ([65, 66, 259], [kit.plain_text((65, 66, 259))] * 2),
        ([[65], [66]], [kit.plain_text((65,))] * 2 + [kit.plain_text((66,))] * 2),
    ):
        status, body, _ = await _post(running, kit, prompt, n=2)
        assert (200, expected) == (status, [choice["text"] for choice in body["choices"]])
        assert list(range(len(expected))) == [choice["index"] for choice in body["choices"]]


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        5,
        "",
        [],
        {},
        [True],
        [260],
        [-1],
        [2**70],
        [1.5],
        [[]],
        [["a"]],
        [[260]],
        ["a", 5],
        [1, "a"],
        ["a"] * 65,
        True,
    ],
    ids=str,
)
async def test_bad_prompts(gateway, worker, kit, prompt):
    """Anything else is a 400 that names the prompt."""
    await worker()
    status, body, _ = await _post(await gateway(), kit, prompt)
    assert (400, "prompt") == (status, body["error"]["param"][:6])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix", "x"), ("best_of", 3), ("logprobs", 21), ("logprobs", True), ("logprobs", -1), ("echo", 1),
        ("max_tokens", 0), ("max_tokens", -1), ("response_format", {"type": "json_object"}),
    ],
)  # fmt: skip
async def test_bad_fields(gateway, worker, kit, name, value):
    """What this route doesn't support, or is out of range, is a 400 that names the field."""
    await worker()
    status, body, _ = await _post(await gateway(), kit, "x", **{name: value})
    assert (400, name) == (status, body["error"]["param"])


async def test_best_of_equal_to_n(gateway, worker, kit):
    """best_of that asks for nothing beyond n is accepted."""
    await worker()
    assert 200 == (await _post(await gateway(), kit, "x", n=2, best_of=2))[0]


async def test_control_tokens_in_plain_text(gateway, worker, kit):
    """The names of control tokens are ordinary text in a text prompt."""
    one = await worker()
    await _post(await gateway(), kit, "".join(kit.control))
    ids = one.jobs[0].prompt_token_ids
    assert (True, "".join(kit.control)) == (max(ids) < 256, kit.plain_text(ids))


async def _scored(one, job):
    await one.send(job, Started(one.worker_id))
    if job.prompt_logprobs is not None:
        await one.send(job, PromptLogprobs((b"a", b" b"), (None, _entry(b" b", -1.0, (b" c", -0.5)))))
    if job.sampling.max_tokens:
        logprobs = (_entry(b"!", -9999.0, (b"?", -0.25)),) if job.sampling.logprobs is not None else ()
        await one.send(job, Delta(0, "!", (1,), logprobs, "length"))
    else:
        await one.send(job, Delta(0, "", (), (), "length"))
    await one.send(job, Done(2, 0, job.sampling.max_tokens))


async def test_echo_with_logprobs(gateway, worker, kit):
    """Scoring a prompt (lm-eval): the lists have prompt + 1 entries, the first is null, the chosen token is among the top ones."""
    await worker(_scored)
    _, body, _ = await _post(await gateway(), kit, [64, 65], echo=True, max_tokens=1, logprobs=1)
    choice = body["choices"][0]
    assert ("a b!", "length") == (choice["text"], choice["finish_reason"])
    assert {
        "tokens": ["a", " b", "!"],
        "token_logprobs": [None, -1.0, -9999.0],
        "top_logprobs": [None, {" c": -0.5, " b": -1.0}, {"?": -0.25, "!": -9999.0}],
        "text_offset": [0, 1, 3],
    } == choice["logprobs"]


async def test_echo_without_output(gateway, worker, kit):
    """max_tokens 0 with echo gives the prompt alone."""
    await worker(_scored)
    _, body, _ = await _post(await gateway(), kit, [64, 65], echo=True, max_tokens=0, logprobs=1)
    choice = body["choices"][0]
    assert ("a b", "length", [None, -1.0]) == (
        choice["text"], choice["finish_reason"], choice["logprobs"]["token_logprobs"]
    )  # fmt: skip


async def test_echo_without_logprobs(gateway, worker, kit):
    """echo alone shows the prompt's text and no logprobs."""
    await worker(_scored)
    _, body, _ = await _post(await gateway(), kit, [64, 65], echo=True, max_tokens=1)
    assert ("a b!", None) == (body["choices"][0]["text"], body["choices"][0]["logprobs"])


async def test_streamed_echo_joins_to_the_whole(gateway, worker, kit):
    """Streamed, the lists of all chunks joined are those of the whole answer, offsets included."""
    await worker(_scored)
    running = await gateway()
    fields = {"prompt": [64, 65], "echo": True, "max_tokens": 1, "logprobs": 1}
    _, body, _ = await running.post("/v1/completions", {"model": kit.model, **fields})
    whole = body["choices"][0]
    chunks = [event["choices"][0] for event in kit.events(await running.stream("/v1/completions", **fields))[:-1]]
    assert whole["text"] == "".join(chunk["text"] for chunk in chunks)
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert whole["logprobs"][name] == [item for chunk in chunks for item in chunk["logprobs"][name]]


async def test_chat_logprobs(gateway, worker, kit):
    """Chat logprobs: one entry a token with its bytes, in both modes; a token that is no text is written out as bytes."""
    pieces = [b"\xf0\x9f", b"\xab\xa0"]

    async def split(one, job):
        await one.send(job, Started(one.worker_id), Delta(0, "", (1,)))
        entries = tuple(_entry(raw, -0.5, (b"z", -1.5)) for raw in pieces)
        await one.send(job, Delta(0, "\U0001fae0", (2,), entries, "stop"), Done(1, 0, 2))

    await worker(split)
    running = await gateway()
    _, body, _ = await running.chat(logprobs=True, top_logprobs=1)
    content = body["choices"][0]["logprobs"]["content"]
    assert "\U0001fae0" == b"".join(bytes(entry["bytes"]) for entry in content).decode()
    assert {
        "token": "bytes:\\xf0\\x9f", "logprob": -0.5, "bytes": [0xF0, 0x9F],
        "top_logprobs": [{"token": "z", "logprob": -1.5, "bytes": [0x7A]}],
    } == content[0]  # fmt: skip
    chunks = kit.events(await running.stream(logprobs=True, top_logprobs=1))[:-1]
    streamed = [entry for c in chunks for entry in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert content == streamed


async def test_no_logprobs_unasked(gateway, worker):
    """Without the field there is none."""
    await worker()
    _, body, _ = await (await gateway()).chat()
    assert body["choices"][0]["logprobs"] is None


def test_offsets_after_a_split_character():
    """A character split over tokens counts once in text_offset."""
    lists = LegacyLogprobs().lists([b"\xf0\x9f", b"\xab\xa0", b"!", b"?"], [None] * 4)
    assert [0, 0, 1, 2] == lists["text_offset"]
