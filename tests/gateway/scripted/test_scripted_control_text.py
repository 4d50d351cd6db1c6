"""Control tokens come only from the template, whatever the user writes; and nothing that the user wrote is lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.intake.control_text import ControlText
from gateway.intake.encoder import PromptEncoder

TOKENS = {
    "<|im_start|>": 256,
    "<|im_end|>": 257,
    "<|endoftext|>": 258,
    "<s>": 259,
    "｜x｜": 260,
    "aba": 261,
    "\u2402": 262,
}
FRAGMENTS = [
    *TOKENS,
    "<|im",
    "_end|>",
    "|>",
    "<",
    "<|",
    ">",
    "im_end",
    "｜",
    "a",
    "b",
    " ",
    "\n",
    "é",
    "\ue000",
    "\ue001",
    "1",
]


def _words():
    return st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)


@settings(max_examples=400, deadline=None)
@given(
    _words(),
    _words(),
    st.sampled_from(["{}{}", "<|{}|>{}", "<{}_end|>", "a{}a{}", "<|im_start|>u\n{}<|im_end|>{}", "{}b{}"]),
)
def test_no_control_token_out_of_user_text(first, second, template):
    """Whatever stands around user strings, exactly the template's own control tokens are found, and the text is the same."""
    control = ControlText(TOKENS)
    mark = control.new_mark()
    rendered = template.replace("{}", control.protect(first, mark), 1).replace("{}", control.protect(second, mark), 1)
    pieces = control.split(rendered, mark)
    assert [256, 257] * ("im_start" in template) == [piece for piece in pieces if isinstance(piece, int)]
    names = {index: text for text, index in TOKENS.items()}
    text = "".join(names[piece] if isinstance(piece, int) else piece for piece in pieces)
    assert template.replace("{}", first, 1).replace("{}", second, 1) == text


@pytest.mark.parametrize("change", [str.upper, str.lower, str.strip, str.title])
def test_marks_survive_what_templates_do(change):
    """A template may change the case of a string or strip it; what was protected stays so."""
    control = ControlText(TOKENS)
    mark = control.new_mark()
    pieces = control.split(change(control.protect(" <|im_end|> ", mark)), mark)
    assert 0 == sum(isinstance(piece, int) for piece in pieces)
    assert "IM_END" in str(pieces[0]).upper()


async def test_special_names_in_messages(gateway, worker, kit):
    """Each control token in content, in names, and split over parts encodes to ordinary ids; the turns are the template's."""
    template = kit.chatml.replace("{{ message.content }}", "{{ message.name }}:{{ message.content }}")
    one = await worker(spec=kit.spec(template))
    running = await gateway()
    for token in kit.control:
        for content in (
            token,
            [{"type": "text", "text": token[:3]}, {"type": "text", "text": token[3:]}],
            f"a{token * 2}b",
        ):
            messages = [{"role": "user", "content": content, "name": token}, {"role": "tool", "content": content}]
            status, _, _ = await running.post("/v1/chat/completions", {"model": kit.model, "messages": messages})
            ids = one.jobs[-1].prompt_token_ids
            assert (200, [256, 257, 256, 257, 256]) == (status, [index for index in ids if index >= 256])
            text = content if isinstance(content, str) else token
            expected = f"<|im_start|>user\n{token}:{text}<|im_end|>\n<|im_start|>tool\n:{text}<|im_end|>\n<|im_start|>assistant\n"
            assert expected == kit.plain_text(ids)


@pytest.mark.parametrize("template", ["{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"])
def test_one_bos(kit, template):
    """A prompt begins with exactly one BOS, whether the template writes it or the tokenizer adds it; a user's is text."""
    encoder = PromptEncoder(kit.spec(template, bos_token_id=259, add_bos=True))
    ids = encoder.chat([{"role": "user", "content": "<s><s>x"}])
    assert (259, 1) == (ids[0], ids.count(259))
    assert (259, 1) == (encoder.text("<s>x")[0], encoder.text("<s>x").count(259))


def test_template_features(kit):
    """Templates may use loop controls, tojson, namespaces, raise_exception, strftime_now, and test for absent tools."""
    template = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{% set ns.n = ns.n + 1 %}{{ m.content | trim | tojson }}{% endfor %}{{ ns.n }}"
        "{% if tools is not none %}TOOLS{% endif %}{{ strftime_now('%Y') | length }}"
        "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    )
    encoder = PromptEncoder(kit.spec(template))
    messages = [{"role": "user", "content": text} for text in (' é"', "b", "c")]
    assert '"é\\"""b"24' == kit.plain_text(encoder.chat(messages))
    with pytest.raises(ApiError, match="no tools here"):
        encoder.chat([{"role": "tool", "content": "x"}])


async def test_text_tokens_are_anybodys(gateway, worker, kit):
    """A user's `<think>` is the model's token, in chat and in plain completions; a control token beside it still isn't."""
    spec = kit.spec(text_tokens=(("<think>", 260),), vocab_size=261)
    one = await worker(spec=spec)
    running = await gateway()
    assert 200 == (await running.chat("a<think><|im_end|>"))[0]
    assert 200 == (await running.post("/v1/completions", {"model": kit.model, "prompt": "<think><|im_end|>"}))[0]
    chat, text = (job.prompt_token_ids for job in one.jobs)
    assert (1, 2, 1) == (chat.count(260), chat.count(256), chat.count(257))
    assert (260, 0) == (text[0], text.count(257))
