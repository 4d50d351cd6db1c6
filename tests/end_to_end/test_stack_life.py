"""Stacks start, run side by side, lose clients and processes, and end."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import redis

COMMAND = [sys.executable, "-m", "sluicegate"]
LONG = {"messages": [{"role": "user", "content": "Tell me a very long story."}], "max_tokens": 4000}

CLIENT = """
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1], api_key=sys.argv[2], max_retries=0)
stream = client.chat.completions.create(model=sys.argv[3], stream=True, max_tokens=4000, extra_body={"ignore_eos": True},
    messages=[{"role": "user", "content": "Tell me a very long story."}])
for number, chunk in enumerate(stream):
    if number == 5:
        print("streaming", flush=True)
"""


def _held(stack) -> float:
    return stack.metric("sluicegate_worker_pages", state="held")


def _keys(stack) -> set[str]:
    """Keys in Redis, less those that only say who is alive, how fast work gets done, or that have a short life."""
    passing = (":cancels", ":doorbell", ":pace", ":replies:")
    with redis.Redis.from_url(stack.info["redis_url"]) as client:
        keys = {key.decode() for key in client.keys("*")}
    return {key for key in keys if not any(part in key for part in passing)}


def _pending(stack) -> int:
    with redis.Redis.from_url(stack.info["redis_url"]) as client:
        return client.hlen(f"sg:{{{stack.model}}}:live") + len(list(client.scan_iter(f"sg:{{{stack.model}}}:line:*")))


def test_a_killed_client_frees_its_pages_within_a_second(stack) -> None:
    """kill -9 of a client in the middle of a stream: pages, slot and job are gone at once."""
    stack.wait_for(lambda: _held(stack) == 0, 10)
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, f"{stack.url}/v1", stack.key, stack.model], stdout=subprocess.PIPE, text=True
    )
    try:
        assert "streaming" == client.stdout.readline().strip()
        stack.wait_for(lambda: _held(stack) > 0, 5)
    finally:
        client.kill()
    assert stack.wait_for(lambda: _held(stack) == 0, 5) < 1.0
    client.wait()
    client.stdout.close()
    stack.wait_for(lambda: _pending(stack) == 0, 2)
    assert 0 == stack.metric("sluicegate_worker_running_sequences")


def test_a_client_that_leaves_without_streaming_is_noticed(stack) -> None:
    """A plain request whose connection closes is cancelled too, at once."""
    stack.wait_for(lambda: _held(stack) == 0, 10)
    body = json.dumps({"model": stack.model, **LONG, "ignore_eos": True}).encode()
    host, _, port = stack.url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        + f"Authorization: Bearer {stack.key}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    stack.wait_for(lambda: _held(stack) > 0, 10)
    connection.close()
    assert stack.wait_for(lambda: _held(stack) == 0, 5) < 1.0


def test_nothing_is_left_in_redis(stack) -> None:
    """After answers, errors and aborts the keys are the same as before."""
    client = stack.client()
    client.chat.completions.create(model=stack.model, messages=LONG["messages"], max_tokens=2)
    # Usage and the key's last use are written a moment after the answer.
    stack.wait_for(lambda: {"rows", "last_used"} <= {key.rpartition(":")[2] for key in _keys(stack)}, 5)
    before = _keys(stack)
    for _ in range(5):
        client.chat.completions.create(model=stack.model, messages=LONG["messages"], max_tokens=3)
        with client.chat.completions.create(model=stack.model, stream=True, **LONG) as stream:
            next(iter(stream))
    stack.wait_for(lambda: _pending(stack) == 0, 5)
    stack.wait_for(lambda: before == _keys(stack), 5)


def test_two_stacks_run_side_by_side_and_keep_their_state(new_stack, stack) -> None:
    """A second stack has its own keys; after down and up its tenants, keys and usage are still there."""
    other = new_stack("other", "--kv-dtype", "fp8", "--kv-tokens", "2048", "--page-size", "32", "--integrity", "off")
    assert other.url != stack.url
    assert other.key != stack.key
    other.run("tenant", "create", "acme")
    key = other.run("key", "create", "acme").strip()
    answer = other.client(key).chat.completions.create(
        model=other.model, messages=[{"role": "user", "content": "What is the capital of France?"}], max_tokens=20,
        temperature=0,
    )  # fmt: skip
    assert "Paris" in answer.choices[0].message.content
    pids = other.info["pids"]
    other.run("down")
    for pid in (pids["redis"], *pids["gateway"], *pids["workers"]):
        assert not Path(f"/proc/{pid}").exists()
    assert not (other.data / "stack.json").exists()
    again = new_stack("other", "--kv-tokens", "2048")
    assert other.key == again.key
    assert [other.model] == [model.id for model in again.client(key).models.list()]
    line = next(line for line in again.run("tenant", "list").splitlines() if line.startswith("acme"))
    assert str(answer.usage.prompt_tokens) in line.split()
    assert 0o600 == (again.data / "stack.json").stat().st_mode & 0o777


def test_a_worker_joins_by_hand_and_a_dead_one_is_replaced(new_stack) -> None:
    """A second worker takes work; a killed worker's stream goes on when the stack has replaced it."""
    own = new_stack("fleet", "--kv-tokens", "4096")
    environment = {**os.environ, "SLUICEGATE_REDIS_URL": own.info["redis_url"], "SLUICEGATE_DATA": str(own.data)}
    with (own.data / "extra.log").open("wb") as log:
        extra = subprocess.Popen([*COMMAND, "worker", "--kv-tokens", "4096"], env=environment, stdout=log, stderr=log)
    own.wait_for(lambda: own.metric("sluicegate_worker_max_sequences") == 64, 30)
    extra.send_signal(signal.SIGTERM)
    assert 0 == extra.wait(20)
    own.wait_for(lambda: own.metric("sluicegate_worker_max_sequences") == 32, 10)
    ask = {"model": own.model, "messages": LONG["messages"], "temperature": 0, "max_tokens": 60}
    expected = own.client().chat.completions.create(**ask, extra_body={"ignore_eos": True}).choices[0].message.content
    stream = own.client().chat.completions.create(**ask, stream=True, extra_body={"ignore_eos": True})
    iterator = iter(stream)
    parts = [next(iterator) for _ in range(5)]
    os.kill(own.info["pids"]["workers"][0], signal.SIGKILL)
    parts += iterator
    assert expected == "".join(choice.delta.content or "" for part in parts for choice in part.choices)
    own.wait_for(lambda: own.metric("sluicegate_worker_max_sequences") == 32, 30)
    answer = own.client().chat.completions.create(model=own.model, messages=LONG["messages"], max_tokens=2)
    assert 2 == answer.usage.completion_tokens


def test_sigterm_lets_running_answers_finish(new_stack) -> None:
    """`down` while an answer streams: it is complete."""
    own = new_stack("draining", "--kv-tokens", "2048")
    stream = own.client().chat.completions.create(
        model=own.model, stream=True, messages=LONG["messages"], max_tokens=120, extra_body={"ignore_eos": True}
    )
    iterator = iter(stream)
    next(iterator)
    down = subprocess.Popen([*COMMAND, "down", "--data", str(own.data)], stdout=subprocess.DEVNULL)
    finishes = [choice.finish_reason for chunk in iterator for choice in chunk.choices if choice.finish_reason]
    assert ["length"] == finishes
    assert 0 == down.wait(60)


def test_a_supervisor_that_is_killed_takes_its_children_along(new_stack) -> None:
    """kill -9 of `sluicegate up` leaves no process behind, and the data folder can be used again."""
    own = new_stack("orphaned", "--kv-tokens", "2048")
    pids = own.info["pids"]
    os.kill(own.info["supervisor"], signal.SIGKILL)
    everyone = [pids["redis"], *pids["gateway"], *pids["workers"]]
    own.wait_for(lambda: not any(_is_alive(pid) for pid in everyone), 45)
    again = new_stack("orphaned", "--kv-tokens", "2048")
    assert own.key == again.key


def _is_alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_chat_answers_lines_of_a_pipe(stack) -> None:
    """`sluicegate chat` works without a terminal."""
    result = subprocess.run(
        [*COMMAND, "chat", "--data", str(stack.data), "--temperature", "0"],
        input="What is the capital of France?\n", capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "Paris" in result.stdout


def test_secrets_and_prompts_are_in_no_log(stack) -> None:
    """Neither keys nor what clients say appear in any log."""
    canary = "canary-7f3a-sentence"
    stack.client().chat.completions.create(
        model=stack.model, messages=[{"role": "user", "content": canary}], max_tokens=3
    )
    for log in (stack.data / "logs").glob("*.log"):
        if log.name == "up.log":
            continue  # what `up` told its user, key included; readable by its owner only
        text = log.read_text(errors="replace")
        assert canary not in text
        assert stack.key not in text
    assert 0o600 == (stack.data / "logs" / "up.log").stat().st_mode & 0o777
