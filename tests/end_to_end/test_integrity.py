"""The integrity of the KV cache from the outside: damage is healed unseen and audited, groups share and tenants don't, a deleted tenant's pages go."""

import json
import subprocess
import sys
import threading

import openai
import pytest

PROMPT = "Integrity means that what is read is what was written, where it was written and by whom. " * 6


@pytest.fixture(scope="module")
def guarded(tmp_path_factory, start_stack):
    """A stack that verifies all that it reads, and may be damaged."""
    yield from start_stack(
        tmp_path_factory.mktemp("guarded"), "--integrity", "full", "--allow-fault-injection", "--kv-tokens", "4096"
    )


def _complete(stack, key: str | None = None, prompt: str = PROMPT, **options):
    options = {"max_tokens": 8, "temperature": 0, **options}
    return stack.client(key).completions.create(model=stack.model, prompt=prompt, **options)


def _cached(answer) -> int:
    return answer.usage.prompt_tokens_details.cached_tokens


def test_damage_is_healed_and_audited(guarded) -> None:
    """A page of a streaming request is struck by the command: the client gets what it would have got, the operator an event and a count."""
    options = {"max_tokens": 700, "stream": True, "extra_body": {"ignore_eos": True}}
    clean = "".join(
        c.choices[0].text
        for c in _complete(guarded, **options | {"extra_body": {"ignore_eos": True, "cache_salt": "x"}})
    )
    pieces, struck = [], []
    for chunk in _complete(guarded, **options):
        pieces.append(chunk.choices[0].text)
        if not struck:
            struck.append(guarded.run("fault", "inject", "flip-v", "--page", "2"))
    assert "struck page" in struck[0]
    assert clean == "".join(pieces)
    guarded.wait_for(lambda: guarded.metric("sluicegate_integrity_violations_total", kind="read", mode="full") >= 1, 10)
    guarded.wait_for(lambda: "integrity.seal" in guarded.run("audit", "--kind", "integrity.seal"), 10)
    assert guarded.metric("sluicegate_worker_integrity_total", count="healed") >= 1


def test_a_group_shares_and_tenants_do_not(guarded) -> None:
    """Two tenants, one prompt: nothing in common by themselves, all whole pages in their group, and nothing of it outside."""
    keys = {}
    for tenant in ("red", "blue", "green"):
        guarded.run("tenant", "create", tenant)
        keys[tenant] = guarded.run("key", "create", tenant).split()[-1]
    guarded.run("share", "create", "team", "--tenants", "red,blue")
    group = {"extra_body": {"share_group": "team"}}

    def is_known() -> bool:
        try:
            _complete(guarded, keys["blue"], "warm up", **group)
        except openai.PermissionDeniedError:
            return False
        return True

    guarded.wait_for(is_known, 5)
    assert 0 == _cached(_complete(guarded, keys["red"]))
    assert 0 == _cached(_complete(guarded, keys["blue"]))
    assert _cached(_complete(guarded, keys["red"])) >= 64
    assert 0 == _cached(_complete(guarded, keys["red"], **group))
    assert _cached(_complete(guarded, keys["blue"], **group)) >= 64
    with pytest.raises(openai.PermissionDeniedError, match="in no share group") as caught:
        _complete(guarded, keys["green"], **group)
    assert "share_group" == caught.value.param


def test_a_deleted_tenants_pages_are_gone(guarded) -> None:
    """Its running request ends, its pages are zeroed, and a tenant of the same name starts from nothing."""
    guarded.run("tenant", "create", "gone")
    key = guarded.run("key", "create", "gone").split()[-1]
    assert 0 == _cached(_complete(guarded, key))
    assert _cached(_complete(guarded, key)) >= 64
    before = guarded.metric("sluicegate_worker_integrity_total", count="scrubbed")
    ended = []

    def read() -> None:
        try:
            for _ in _complete(guarded, key, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}):
                ended.append("chunk")
        except openai.APIError as error:
            ended.append(type(error).__name__)

    reader = threading.Thread(target=read)
    reader.start()
    guarded.wait_for(lambda: len(ended) > 3, 20)
    guarded.run("tenant", "delete", "gone")
    reader.join(10)
    assert not reader.is_alive()
    guarded.wait_for(lambda: guarded.metric("sluicegate_worker_integrity_total", count="scrubbed") >= before + 4, 10)
    guarded.run("tenant", "create", "gone")
    again = guarded.run("key", "create", "gone").split()[-1]
    assert 0 == _cached(_complete(guarded, again))


def test_faults_need_leave(stack) -> None:
    """A worker that was not started for it obeys nobody."""
    command = [
        sys.executable,
        "-m",
        "sluicegate",
        "fault",
        "inject",
        "flip-k",
        "--data",
        str(stack.data),
        "--wait",
        "0",
    ]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert 1 == refused.returncode
    assert "--allow-fault-injection" in refused.stderr


def test_the_doctor_finds_what_modes_claim(tmp_path) -> None:
    """Its matrix over some kinds and modes, and its exit status, on stacks that it starts and stops."""
    kinds = ["flip-v", "table-off-by-one"]
    command = [sys.executable, "-m", "sluicegate", "doctor", "integrity", "--json", str(tmp_path / "cells.json")]
    done = subprocess.run(
        [*command, "--modes", "lease", "full", "--kinds", *kinds],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    cells = {(cell["mode"], cell["kind"]): cell for cell in json.loads((tmp_path / "cells.json").read_text())}
    assert len(cells) == 4
    assert all(cell["is_as_claimed"] and cell["neighbour_is_right"] for cell in cells.values())
    assert all(cells["full", kind]["struck_request_is_right"] and cells["full", kind]["found"] for kind in kinds)
    assert ["lease"] == cells["lease", "table-off-by-one"]["found"]
    assert [] == cells["lease", "flip-v"]["found"]
    assert done.stdout.startswith("| fault | lease | full |")
