"""Hostile chat templates: no code runs, no loop or giant string stops the gateway or the next request."""

import asyncio
import time

import pytest

ESCAPES = [
    "{{ lipsum.__globals__['os'].system('touch MARKER') }}",
    "{{ cycler.__init__.__globals__.os.system('touch MARKER') }}",
    "{{ joiner.__init__.__globals__['__builtins__'].open('MARKER', 'w') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__['json'].codecs.open('MARKER', 'w') }}",
    "{{ strftime_now.__globals__ }}",
    "{{ '%s'.format_map(messages) }}{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{% include 'MARKER' %}", "{% import 'os' as os %}{{ os.system('touch MARKER') }}", "{% extends 'x' %}",
    "{{ messages.append(1) }}", "{% set _ = messages[0].update({'role': 'x'}) %}", "{{ messages[0].pop('role') }}",
    "{% for x in %}", "{{ x.y.z }}", "{{ 1 / 0 }}", "{{ messages[9].content }}",
]  # fmt: skip
BOMBS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    "{{ messages[0].content * 10000000000 }}",
    "{{ (messages | length + 9) ** 999999999 }}",
]


@pytest.mark.parametrize("template", ESCAPES)
async def test_no_code_runs(gateway, worker, kit, template, tmp_path):
    """A template that reaches for more than text gets a client error or nothing, never a file; the process that renders goes on."""
    marker = tmp_path / "marker"
    await worker(spec=kit.spec(template.replace("MARKER", str(marker))))
    await worker(model="tiny/healthy")
    running = await gateway()
    status, body, _ = await running.chat()
    assert status in (400, 503), body
    assert not marker.exists()
    messages = [{"role": "user", "content": "Hi"}]
    assert 200 == (await running.post("/v1/chat/completions", {"model": "tiny/healthy", "messages": messages}))[0]


@pytest.mark.parametrize("template", BOMBS)
async def test_bombs_are_bounded(gateway, worker, kit, template):
    """Endless work and endless output end with an error within the limit, health answers meanwhile, the next request is fine."""
    await worker(spec=kit.spec(template))
    await worker(model="tiny/healthy")
    running = await gateway(intake_timeout_s=1.0)
    slowest_s = 0.0
    bomb = asyncio.create_task(running.chat())
    while not bomb.done():
        started_s = time.monotonic()
        assert 200 == (await running.get("/health/live"))[0]
        slowest_s = max(slowest_s, time.monotonic() - started_s)
        await asyncio.sleep(0.02)
    status, body, _ = bomb.result()
    assert (400, "invalid_request_error") == (status, body["error"]["type"])
    assert slowest_s < 0.25
    messages = [{"role": "user", "content": "Hi"}]
    assert 200 == (await running.post("/v1/chat/completions", {"model": "tiny/healthy", "messages": messages}))[0]


async def test_a_model_without_a_template(gateway, worker, kit):
    """Such a model has no chat, but text completions."""
    await worker(spec=kit.spec(None))
    running = await gateway()
    assert 400 == (await running.chat())[0]
    assert 200 == (await running.post("/v1/completions", {"model": kit.model, "prompt": "x"}))[0]
