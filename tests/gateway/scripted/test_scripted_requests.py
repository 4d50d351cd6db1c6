"""What a request may hold: every field's type and range over HTTP, and a healthy request right after."""

import json

import pytest

NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
BAD_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", '"0.5"', "true", "[]", "{}", "1" + "0" * 400)
BAD_FIELDS = [
    *((name, text) for name in NUMBERS for text in BAD_NUMBERS),
    ("temperature", "-0.1"), ("temperature", "2.01"), ("top_p", "0"), ("top_p", "1.1"), ("min_p", "-1"),
    ("presence_penalty", "2.1"), ("frequency_penalty", "-2.1"), ("repetition_penalty", "0"),
    *(("max_tokens", text) for text in ("1.5", "1e18", "-1", "0", str(2**63), '"5"', "true", "NaN", "[1]")),
    *(("max_completion_tokens", text) for text in ("1.5", "0", "true", "1e999")),
    *(("seed", text) for text in ("1.5", str(2**64), str(-(2**63) - 1), '"1"', "true", "NaN")),
    *(("n", text) for text in ("0", "17", "-1", "true", "1.5", '"2"')),
    *(("top_k", text) for text in ("-2", "1.5", "true", '"3"')),
    *(("min_tokens", text) for text in ("-1", "true", "1.5")),
    *(("top_logprobs", text) for text in ("21", "-1", "true", "1.5", "3")),
    *(("logprobs", text) for text in ("1", '"yes"', "[]")),
    *(("stop", text) for text in ("5", '""', '["a", ""]', '["a","b","c","d","e"]', "[1]", "true", "{}")),
    *(("stop_token_ids", text) for text in ("5", "[-1]", "[100000]", "[true]", '["1"]', "[1.5]")),
    *(("logit_bias", text) for text in (
        "[]", '{"1": 101}', '{"1": -101}', '{"1": NaN}', '{"1": 1e999}', '{"1": "5"}', '{"1": true}', '{"x": 1}',
        '{"-1": 1}', '{"100000": 1}', '{"1.0": 1}', '{"\\u0661": 1}',
    )),
    *(("stream", text) for text in ("1", '"true"', "[]")),
    *(("ignore_eos", text) for text in ("1", '"true"')),
    *(("cache_salt", text) for text in ("5", json.dumps("x" * 129), "[]")),
    *(("timeout", text) for text in ("0", "-1", "NaN", "1e999", "true", '"5"')),
    *(("stream_options", text) for text in ("5", "[]", '{"include_usage": 1}', '{"include_usage": true}')),
    *(("tools", text) for text in ('[{"type": "function"}]', "{}", "5")),
    ("tool_choice", '"required"'), ("tool_choice", '{"type": "function"}'),
    ("functions", '[{"name": "f"}]'), ("function_call", '"auto"'), ("audio", '{"voice": "x"}'),
    ("modalities", '["text", "audio"]'),
    *(("response_format", text) for text in (
        '{"type": "json_object"}', '{"type": "json_schema", "json_schema": {}}', '{"type": "zzz"}', "{}", "5", '"text"',
    )),
    *(("chat_template", text) for text in ('"x"', '"{% for i in range(10000000000) %}x{% endfor %}"')),
    *(("chat_template_kwargs", text) for text in (
        '{"chat_template": "x"}', '{"tokenize": true}', '{"messages": []}', '{"add_generation_prompt": false}',
    )),
    *(("messages", text) for text in ("5", "[]", "{}", '"hi"', "[5]", "[null]", "[[]]")),
    *(("model", text) for text in ("5", '""', "[]", "true", json.dumps("m" * 300))),
]  # fmt: skip
GOOD_FIELDS = [
    *((name, "null") for name in (*NUMBERS, "max_tokens", "seed", "n", "top_k", "stop", "logit_bias", "stream", "tools",
                                  "logprobs", "top_logprobs", "cache_salt", "timeout", "stream_options", "response_format",
                                  "tool_choice", "chat_template", "functions")),
    ("temperature", "0"), ("temperature", "2"), ("top_p", "1"), ("top_k", "-1"), ("top_k", "0"), ("seed", "-1"),
    ("seed", str(2**63 - 1)), ("seed", str(-(2**63))), ("n", "16"), ("stop", '"x"'), ("stop", "[]"),
    ("stop", '["a","b","c","d"]'), ("logit_bias", '{"1": -100, "2": 100, "3": 0.5}'), ("tools", "[]"),
    ("tool_choice", '"none"'), ("response_format", '{"type": "text"}'), ("stop_token_ids", "[0, 259]"),
    ("user", '"u"'), ("metadata", '{"a": "b"}'), ("some_unknown_field", '{"x": [1]}'), ("ignore_eos", "true"),
    ("cache_salt", json.dumps("x" * 128)), ("timeout", "5.5"), ("min_tokens", "3"), ("max_completion_tokens", "7"),
]  # fmt: skip


def _body(name, text):
    fields = {"model": '"tiny/chat"', "messages": '[{"role": "user", "content": "Hi"}]', name: text}
    return ("{" + ",".join(f'"{key}": {value}' for key, value in fields.items()) + "}").encode()


async def test_bad_fields(gateway, worker):
    """Each bad value is a 400 (404 for a model's name) that names the field in strict JSON; a healthy request then succeeds."""
    one = await worker()
    running = await gateway()
    wrong = []
    for name, text in BAD_FIELDS:
        status, body, _ = await running.post("/v1/chat/completions", _body(name, text))
        param = (body.get("error") or {}).get("param") or ""
        expected = {400, 404} if name == "model" else {400}
        if status not in expected or not param.startswith(name):
            wrong.append((name, text, status, body))
        elif (await running.chat())[0] != 200:
            wrong.append((name, text, "then unhealthy"))
    assert [] == wrong
    assert len(BAD_FIELDS) == len(one.jobs)


async def test_good_fields(gateway, worker):
    """null is the default, limits are inclusive, unknown fields are ignored."""
    await worker()
    running = await gateway()
    answers = [
        (name, text, await running.post("/v1/chat/completions", _body(name, text))) for name, text in GOOD_FIELDS
    ]
    assert [] == [(name, text, body) for name, text, (status, body, _) in answers if status != 200]


async def test_values_reach_the_worker(gateway, worker):
    """What was asked for is what is signed and submitted."""
    one = await worker()
    running = await gateway()
    status, _, _ = await running.chat(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, presence_penalty=0.3, frequency_penalty=-0.4,
        repetition_penalty=1.2, logit_bias={"5": -100}, stop="END", stop_token_ids=[3], min_tokens=2, max_tokens=9,
        seed=-5, ignore_eos=True, logprobs=True, top_logprobs=4, n=2, cache_salt="salt",
    )  # fmt: skip
    job = one.jobs[0]
    s = job.sampling
    assert 200 == status
    assert (0.5, 0.9, 7, 0.1, 0.3, -0.4, 1.2) == (
        s.temperature, s.top_p, s.top_k, s.min_p, s.presence_penalty, s.frequency_penalty, s.repetition_penalty
    )  # fmt: skip
    assert (((5, -100.0),), ("END",), (3,), 2, 9, -5, True, 4) == (
        s.logit_bias, s.stop, s.stop_token_ids, s.min_tokens, s.max_tokens, s.seed, s.ignore_eos, s.logprobs
    )  # fmt: skip
    assert (2, "acme", None) == (job.n, job.tenant, job.prompt_logprobs)


async def test_a_salt_is_not_sent_as_it_is(gateway, worker):
    """The worker gets a keyed digest: the same for the same tenant and salt, another for another of either."""
    one = await worker()
    acme, other = await gateway("acme"), await gateway("other")
    for running, salt in ((acme, "pepper"), (acme, "pepper"), (acme, "mint"), (other, "pepper"), (acme, None)):
        await running.chat(cache_salt=salt)
    first, second, mint, others, none = (job.cache_salt for job in one.jobs)
    assert first == second
    assert 3 == len({first, mint, others} - {"pepper", "mint", None})
    assert none is None


async def test_no_seed_means_another_each_time(gateway, worker):
    """Requests without a seed do not repeat each other."""
    one = await worker()
    running = await gateway()
    for _ in range(3):
        await running.chat()
    assert 3 == len({job.sampling.seed for job in one.jobs})


async def test_both_token_limits(gateway, worker):
    """max_tokens and max_completion_tokens may both be given if they agree."""
    one = await worker()
    running = await gateway()
    assert 200 == (await running.chat(max_tokens=5, max_completion_tokens=5))[0]
    status, body, _ = await running.chat(max_tokens=5, max_completion_tokens=6)
    assert (400, "max_tokens") == (status, body["error"]["param"])
    assert [5] == [job.sampling.max_tokens for job in one.jobs]


async def test_min_tokens_over_max_tokens(gateway, worker):
    """min_tokens above max_tokens cannot be met."""
    await worker()
    status, body, _ = await (await gateway()).chat(min_tokens=6, max_tokens=5)
    assert (400, "min_tokens") == (status, body["error"]["param"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_context_limit(gateway, worker, kit, path):
    """limit-1 leaves one token, limit and limit+1 are refused with the true numbers, and a short request then runs."""
    one = await worker(max_request_tokens=100, spec=kit.spec("{{ messages[0].content }}"))
    running = await gateway()

    def ask(num_prompt, **fields):
        prompt = (
            {"messages": [{"role": "user", "content": "x" * num_prompt}]}
            if "chat" in path
            else {"prompt": "x" * num_prompt}
        )
        return running.post(path, {"model": kit.model, **prompt, **fields})

    assert [200, 200] == [(await ask(99, max_tokens=1))[0], (await ask(60, max_tokens=40))[0]]
    assert [1, 40] == [job.sampling.max_tokens for job in one.jobs]
    for size, fields in ((100, {"max_tokens": 1}), (101, {}), (60, {"max_tokens": 41}), (99, {"max_tokens": 2})):
        status, body, _ = await ask(size, **fields)
        assert (400, "context_length_exceeded") == (status, body["error"]["code"])
        assert "100 tokens" in body["error"]["message"]
        assert f"{size} tokens" in body["error"]["message"]
    assert 200 == (await ask(1, max_tokens=1))[0]


async def test_no_max_tokens_means_all_that_fits(gateway, worker, kit):
    """A chat request without a limit may use the rest of the context."""
    one = await worker(max_request_tokens=100, spec=kit.spec("{{ messages[0].content }}"))
    running = await gateway()
    assert [200, 200] == [(await running.chat("x" * 30))[0], (await running.chat("x" * 99))[0]]
    assert [70, 1] == [job.sampling.max_tokens for job in one.jobs]


BAD_CONTENTS = [
    ("null", None, "messages[0].content"),
    ("absent", ..., "messages[0].content"),
    ("no parts", [], "messages[0].content"),
    ("a number", 5, "messages[0].content"),
    ("an object", {"type": "text", "text": "x"}, "messages[0].content"),
    (
        "an image",
        [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "u"}}],
        "messages[0].content[1]",
    ),
    ("a part without text", [{"type": "text"}], "messages[0].content[0].text"),
    ("a part with null", [{"type": "text", "text": None}], "messages[0].content[0].text"),
    ("a part of another type", ["x"], "messages[0].content[0]"),
]


async def test_contents(gateway, worker, kit):
    """String and parts give the same prompt in every role; anything else is a 400 that names the place."""
    one = await worker()
    running = await gateway()
    for role in ("system", "developer", "user", "assistant", "tool"):
        for content in (
            "canary!",
            [{"type": "text", "text": "canary!"}],
            [{"type": "text", "text": x} for x in ("can", "ary!")],
        ):
            body = {"model": kit.model, "messages": [{"role": role, "content": content}]}
            assert 200 == (await running.post("/v1/chat/completions", body))[0]
        prompts = {job.prompt_token_ids for job in one.jobs[-3:]}
        shown = "system" if role == "developer" else role
        assert [f"<|im_start|>{shown}\ncanary!<|im_end|>\n<|im_start|>assistant\n"] == [
            kit.plain_text(ids) for ids in prompts
        ]
        for name, content, param in BAD_CONTENTS:
            message = {"role": role} if content is ... else {"role": role, "content": content}
            status, body, _ = await running.post("/v1/chat/completions", {"model": kit.model, "messages": [message]})
            assert (name, 400, param) == (name, status, body["error"]["param"])


@pytest.mark.parametrize("message", [{"content": "x"}, {"role": "root", "content": "x"}, {"role": 5, "content": "x"}])
async def test_roles(gateway, worker, kit, message):
    """A role is one of five."""
    await worker()
    status, body, _ = await (await gateway()).post("/v1/chat/completions", {"model": kit.model, "messages": [message]})
    assert (400, True) == (status, body["error"]["param"].startswith("messages[0].role"))


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400), (b"   ", 400), (b"{", 400), (b"[]", 400), (b"null", 400), (b'"x"', 400), (b"\xff\xfe{}", 400),
        (b"[" * 100_000, 400), (b'{"model": "tiny/chat", "n": ' + b"9" * 5000 + b"}", 400), (b'{"model": "tiny/chat"}', 400),
        (b'{"model": "tiny/chat", "messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        (b'{"model": "\\ud800"}', 400),
        (b'{"model": "tiny/chat", "stop": "\\ud800", "messages": [{"role": "user", "content": "x"}]}', 400), (b"{}", 400), (b'{"a": 1} x', 400),
    ],
    ids=str,
)  # fmt: skip
async def test_bodies_that_are_no_request(gateway, worker, body, status):
    """Anything that is not a JSON object with the needed fields is a 400, and the process that parses goes on."""
    await worker()
    running = await gateway()
    assert status == (await running.post("/v1/chat/completions", body))[0]
    assert 200 == (await running.chat())[0]


async def test_text_completions_default(gateway, worker, kit):
    """Without max_tokens a text completion has 16 tokens, or what still fits."""
    one = await worker(max_request_tokens=100)
    running = await gateway()
    for size in (10, 90, 99):
        assert 200 == (await running.post("/v1/completions", {"model": kit.model, "prompt": "x" * size}))[0]
    assert [16, 10, 1] == [job.sampling.max_tokens for job in one.jobs]
