"""Every field of text completions, and the inner fields of chat, with every wrong type and the values next to its range."""

import json

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NO_NUMBERS = ('"1"', "true", "[]", "[1]", "{}", '""')
NOT_FINITE = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 400)
NO_INTEGERS = (*NO_NUMBERS, "1.5", "1e999", "NaN", "1e-9", str(2**64), "9" * 400)
NO_BOOLEANS = ("1", "0", '"true"', "[]", "{}", "1.0")
NO_STRINGS = ("5", "true", "[]", "{}", "1.5")
VOCABULARY = 260  # of the scripted worker's tokenizer

# field of /v1/completions -> raw JSON that is refused with this field's name
FIELDS: dict[str, tuple[str, ...]] = {
    "temperature": (*NO_NUMBERS, *NOT_FINITE, "-0.001", "2.001"),
    "top_p": (*NO_NUMBERS, *NOT_FINITE, "0", "-0.0", "1.0001"),
    "min_p": (*NO_NUMBERS, *NOT_FINITE, "-1e-9", "1.0001"),
    "presence_penalty": (*NO_NUMBERS, *NOT_FINITE, "-2.1", "2.1"),
    "frequency_penalty": (*NO_NUMBERS, *NOT_FINITE, "-2.1", "2.1"),
    "repetition_penalty": (*NO_NUMBERS, *NOT_FINITE, "0", "-1", "10.1"),
    "max_tokens": (*NO_INTEGERS, "0", "-1", str(2**31)),
    "min_tokens": (*NO_INTEGERS, "-1", str(2**31), "17"),
    "n": (*NO_INTEGERS, "0", "-1", "17"),
    "best_of": (*NO_INTEGERS, "0", "2"),
    "top_k": (*NO_INTEGERS, "-2", str(2**31)),
    "seed": (*NO_INTEGERS, str(2**63), str(-(2**63) - 1)),
    "logprobs": (*NO_INTEGERS, "-1", "21"),
    "echo": NO_BOOLEANS,
    "stream": NO_BOOLEANS,
    "ignore_eos": NO_BOOLEANS,
    "cache_salt": (*NO_STRINGS, json.dumps("x" * 129)),
    "service_tier": (*NO_STRINGS, json.dumps("x" * 33)),
    "model": (*NO_STRINGS, "null", json.dumps("m" * 257)),
    "timeout": (*NO_NUMBERS, *NOT_FINITE, "0", "-1", "3601"),
    "stop": ("5", "true", "{}", '""', '["a", ""]', '["a", 1]', '["a", null]', '[["a"]]', '["a","b","c","d","e"]', json.dumps("x" * 1001)),
    "stop_token_ids": ("5", '"1"', "true", "{}", "[-1]", f"[{VOCABULARY}]", "[1.5]", "[true]", "[null]", "[[1]]", '["1"]', "[1e999]"),
    "logit_bias": ("5", '"1"', "[]", "[[1, 1]]", '{"x": 1}', '{"": 1}', '{"-1": 1}', f'{{"{VOCABULARY}": 1}}', '{"1": 101}', '{"1": -100.1}',
                   '{"1": NaN}', '{"1": 1e999}', '{"1": "1"}', '{"1": true}', '{"1": [1]}', '{"1.0": 1}', '{"01e1": 1}', '{"99999999999999": 1}'),
    "prompt": ("5", "true", "{}", "null", "[]", "[null]", "[true]", "[{}]", "[1.5]", "[1, \"a\"]", '["a", 1]', '["a", null]', "[[1], [true]]", "[-1]",
               f"[{VOCABULARY}]", "[[[1]]]", '""', '["a", ""]', "[[]]", "[1e999]", json.dumps(["x"] * 65), json.dumps("x" * 1000), json.dumps([1] * 1000)),
    "stream_options": ("5", "[]", '"x"', "true", "{}", '{"include_usage": true}'),
    "suffix": ('"x"', "5", "{}"),
    "response_format": ('{"type": "json_object"}', '"text"', "5"),
    "prompt_embeds": ('"AAAA"', "5"), "guided_json": ("{}", '"x"'), "guided_regex": ('"(a+)+$"',), "guided_choice": ('["a"]',),
    "use_beam_search": ("true", "1"),
}  # fmt: skip

# raw JSON of the messages -> the place that the error names
MESSAGES = [
    ("5", "messages"), ("null", "messages"), ("{}", "messages"), ('""', "messages"), ("[]", "messages"), ("true", "messages"),
    ("[5]", "messages[0]"), ("[null]", "messages[0]"), ("[[]]", "messages[0]"), ('["x"]', "messages[0]"),
    ("[{}]", "messages[0].role"), ('[{"role": null, "content": "x"}]', "messages[0].role"), ('[{"role": 5, "content": "x"}]', "messages[0].role"),
    ('[{"role": [], "content": "x"}]', "messages[0].role"), ('[{"role": "System", "content": "x"}]', "messages[0].role"),
    ('[{"role": "user ", "content": "x"}]', "messages[0].role"), ('[{"role": "", "content": "x"}]', "messages[0].role"),
    (f'[{{"role": "{"r" * 100}", "content": "x"}}]', "messages[0].role"),
    *((f'[{{"role": "user", "content": {text}}}]', "messages[0].content") for text in ("5", "true", "{}", "null", "[]", "1e999")),
    *((f'[{{"role": "user", "content": [{text}]}}]', "messages[0].content[0]") for text in (
        "5", "null", '"x"', "[]", "{}", '{"type": "image_url"}', '{"type": 5}', '{"type": ["text"]}', '{"type": "Text", "text": "x"}')),
    *((f'[{{"role": "user", "content": [{{"type": "text", "text": {text}}}]}}]', "messages[0].content[0].text") for text in ("5", "null", "[]", "{}", "true")),
    *((f'[{{"role": "user", "content": "x", "name": {text}}}]', "messages[0].name") for text in ("5", "[]", "{}", "true", json.dumps("n" * 65))),
    ('[{"role": "assistant", "content": "x", "tool_calls": [{}]}]', "messages[0].tool_calls"),
    ('[{"role": "assistant", "content": null, "function_call": {}}]', "messages[0].function_call"),
    ('[{"role": "assistant", "content": "x", "audio": {"id": "x"}}]', "messages[0].audio"),
    ('[{"role": "user", "content": "x"}, 5]', "messages[1]"), ('[{"role": "user", "content": "x"}, {"role": "user"}]', "messages[1].content"),
]  # fmt: skip

# fields of chat that are known and not supported, or wrong in a way of their own
CHAT_FIELDS = [
    *((name, text) for name in ("tools", "functions") for text in ('[{"type": "function"}]', "{}", "5", '"x"', "true")),
    *(("tool_choice", text) for text in ('"required"', '"x"', "5", "{}", "[]", "true")),
    *(("response_format", text) for text in ('{"type": "json_object"}', '{"type": "json_schema"}', '{"type": null}', '{"type": 5}', "[]", "true", '"text"')),
    *(("modalities", text) for text in ('["audio"]', '"text"', "[]", "5", "{}", '["text", "text"]')),
    *(("logprobs", text) for text in NO_BOOLEANS),
    *(("top_logprobs", text) for text in (*NO_INTEGERS, "-1", "21", "5")),
    *(("max_completion_tokens", text) for text in (*NO_INTEGERS, "0", "-1")),
    *((name, '"x"') for name in ("audio", "prediction", "web_search_options", "chat_template", "chat_template_kwargs", "documents", "structured_outputs")),
]  # fmt: skip

IGNORED = (
    "user",
    "metadata",
    "store",
    "parallel_tool_calls",
    "__proto__",
    "constructor",
    "",
    "a.b",
    "a[0]",
    "é",
    "\u0000",
    "x" * 5000,
)


def _body(**fields: str) -> bytes:
    return ("{" + ",".join(f"{json.dumps(name)}: {text}" for name, text in fields.items()) + "}").encode()


async def _wrong_rows(front, path, rows) -> list:
    """Rows, (body, expected statuses, field), whose answer is another one."""
    wrong = []
    for body, statuses, name in rows:
        error = (answer := await front.send(front.request(body, path=path))).error
        if answer.status not in statuses or not error or not (error["param"] or "").startswith(name):
            wrong.append((body[:200], answer.status, answer.body[:200]))
    return wrong


def _statuses(name: str) -> set[int]:
    return {400, 404} if name == "model" else {400}


async def test_fields_of_text_completions(front, unharmed):
    """Every wrong value is a 400 that names its field."""
    running = await front()
    good = {"model": '"tiny/chat"', "prompt": '"Hi"'}
    rows = [(_body(**{**good, name: text}), _statuses(name), name) for name, texts in FIELDS.items() for text in texts]
    assert 250 < len(rows)
    async with unharmed(running):
        assert [] == await _wrong_rows(running, COMPLETIONS, rows)
        missing = [(_body(prompt='"x"'), {400}, "model"), (_body(model='"tiny/chat"'), {400}, "prompt")]
        assert [] == await _wrong_rows(running, COMPLETIONS, missing)


async def test_fields_of_chat(front, unharmed):
    """Messages in every wrong form, and what isn't supported."""
    running = await front()
    model, messages = '"tiny/chat"', '[{"role": "user", "content": "x"}]'
    rows = [(_body(model=model, messages=text), {400}, place) for text, place in MESSAGES]
    rows += [(_body(model=model, messages=messages, **{name: text}), {400}, name) for name, text in CHAT_FIELDS]
    async with unharmed(running):
        assert [] == await _wrong_rows(running, CHAT, rows)


async def test_unknown_fields_are_of_no_consequence(front, unharmed):
    """A field that nobody knows, whatever it is called and holds, changes nothing."""
    running = await front()
    async with unharmed(running):
        for name in IGNORED:
            for text in ("null", "5", '"x"', "[[[]]]", '{"a": {"b": 1e400}}', "NaN"):
                body = _body(model='"tiny/chat"', prompt='"Hi"', **{name: text})
                assert 200 == (await running.send(running.request(body, path=COMPLETIONS))).status, (name, text)
