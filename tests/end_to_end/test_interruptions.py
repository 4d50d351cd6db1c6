"""Workers die, hang and leave in the middle of answers of the real model; clients see a pause."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import openai
import pytest
import redis

from protocol.job import Job, SamplingParams
from protocol.key_space import KeySpace
from protocol.signing import seal_job
from sluicegate.secrets import derived_keys

COMMAND = [sys.executable, "-m", "sluicegate"]
MESSAGES = [{"role": "user", "content": "Tell me a long story about a lighthouse."}]
ASKED = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 11, "frequency_penalty": 0.5, "logprobs": True, "top_logprobs": 2},
    "samples": {"temperature": 1.0, "seed": 3, "n": 2, "stop": [" never said"]},
}


def _ask(stack, name: str, **options):
    return {"model": stack.model, "messages": MESSAGES, "max_tokens": 300, **ASKED[name], **options}


def _collect(chunks) -> dict:
    """All that a client can tell apart of an answer, by choice."""
    found: dict = {"usage": None}
    for chunk in chunks:
        found["usage"] = chunk.usage or found["usage"]
        for choice in chunk.choices:
            text, entries, finish = found.setdefault(choice.index, ("", [], None))
            entries = entries + (choice.logprobs.content if choice.logprobs else [])
            found[choice.index] = (
                text + (choice.delta.content or ""), entries, choice.finish_reason or finish,
            )  # fmt: skip
    usage = found["usage"]
    found["usage"] = (usage.prompt_tokens, usage.completion_tokens)
    return found


def _stream(stack, name: str):
    return stack.client().chat.completions.create(
        **_ask(stack, name), stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}
    )


@pytest.mark.parametrize("name", ASKED)
def test_a_killed_worker_costs_only_time(fleet, name) -> None:
    """SIGKILL at different places of an answer: text, logprobs, finish reasons and usage are those of the undisturbed answer."""
    expected = _collect(_stream(fleet, name))
    for after in (2 if name == "seeded" else 30,):
        fleet.wait_for(lambda: fleet.metric("sluicegate_worker_max_sequences") == 64, 60)
        stream = iter(_stream(fleet, name))
        chunks = [next(stream) for _ in range(after)]
        os.kill(fleet.pid_of_busy_worker(), signal.SIGKILL)
        killed_s, pause_s = time.monotonic(), 0.0
        for chunk in stream:
            pause_s = max(pause_s, time.monotonic() - killed_s)
            killed_s = time.monotonic()
            chunks.append(chunk)
        assert expected == _collect(chunks), after
        print(f"{name}: longest pause {pause_s:.2f} s")


def test_a_stopped_worker_writes_nothing_when_it_wakes_up(fleet) -> None:
    """SIGSTOP until another has taken over, then SIGCONT: no token twice, and the woken worker serves on."""
    expected = _collect(_stream(fleet, "greedy"))
    fleet.wait_for(lambda: fleet.metric("sluicegate_worker_max_sequences") == 64, 60)
    stream = iter(_stream(fleet, "greedy"))
    chunks = [next(stream) for _ in range(10)]
    pid = fleet.pid_of_busy_worker()
    os.kill(pid, signal.SIGSTOP)
    try:
        for _ in range(20):  # some were on their way; these are not
            chunks.append(next(stream))
    finally:
        os.kill(pid, signal.SIGCONT)
    chunks += stream
    assert expected == _collect(chunks)
    fleet.wait_for(lambda: fleet.metric("sluicegate_worker_max_sequences") == 64, 30)
    fleet.wait_for(lambda: fleet.metric("sluicegate_worker_pages", state="held") == 0, 10)
    log = "".join(path.read_text() for path in (fleet.data / "logs").glob("worker-*.log"))
    assert '"taken_over"' in log


def test_a_rolling_restart_fails_no_request(fleet) -> None:
    """SIGTERM to one worker after the other while requests come in: all are answered, and each worker ends with exit code 0."""
    results: list[bool] = []
    is_over = threading.Event()

    def ask_on() -> None:
        while not is_over.is_set():
            answer = fleet.client().chat.completions.create(**_ask(fleet, "greedy", max_tokens=12))
            results.append(bool(answer.choices[0].message.content))

    threads = [threading.Thread(target=ask_on) for _ in range(3)]
    for thread in threads:
        thread.start()
    fleet.wait_for(lambda: fleet.metric("sluicegate_worker_max_sequences") == 64, 60)
    for pid in fleet.reread()["pids"]["workers"]:
        os.kill(pid, signal.SIGTERM)
        fleet.wait_for(lambda pid=pid: pid not in fleet.reread()["pids"]["workers"], 60)
        fleet.wait_for(lambda: fleet.metric("sluicegate_worker_max_sequences") == 64, 60)
    is_over.set()
    for thread in threads:
        thread.join()
    assert len(results) >= 6
    assert all(results)
    up_log = (fleet.data / "logs" / "up.log").read_text()
    assert up_log.count("ended with code 0;") >= 2


def test_a_worker_that_leaves_hands_its_answers_over(fleet) -> None:
    """Out of grace time, a worker lets go of what it's at: another one goes on, the leaving one ends well and leaves nothing pending."""
    fleet.wait_for(lambda: fleet.metric("sluicegate_worker_max_sequences") == 64, 60)
    expected = _collect(_stream(fleet, "greedy"))
    environment = {**os.environ, "SLUICEGATE_REDIS_URL": fleet.info["redis_url"], "SLUICEGATE_DATA": str(fleet.data)}
    for pid in fleet.reread()["pids"]["workers"]:
        os.kill(pid, signal.SIGSTOP)
    extra = None
    try:
        with (fleet.data / "logs" / "extra.log").open("wb") as log:
            extra = subprocess.Popen(
                [*COMMAND, "worker", "--kv-tokens", "4096", "--drain-grace", "0"], env=environment, stdout=log, stderr=log,
            )  # fmt: skip
        fleet.wait_for(lambda: "worker_ready" in (fleet.data / "logs" / "extra.log").read_text(), 90)
        fleet.wait_for(lambda: fleet.metric("sluicegate_worker_max_sequences") == 32, 60)
        stream = iter(_stream(fleet, "greedy"))
        chunks = [next(stream) for _ in range(10)]
        extra.send_signal(signal.SIGTERM)
        for pid in fleet.reread()["pids"]["workers"]:
            os.kill(pid, signal.SIGCONT)
        assert 0 == extra.wait(30)
        chunks += stream
        assert expected == _collect(chunks)
        assert "jobs_handed_over" in (fleet.data / "logs" / "extra.log").read_text()
    finally:
        for pid in fleet.reread()["pids"]["workers"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        if extra is not None and extra.poll() is None:
            extra.kill()
            extra.wait()


def test_a_dead_job_can_be_run_again(fleet) -> None:
    """`sluicegate queue requeue` runs it with the real model, tells how it ended, and it's no longer among the dead."""
    keys, signing_key = KeySpace(), derived_keys(fleet.data).job_signing
    job = Job(
        "r" * 32, "gone", "demo", fleet.model, (1, 2, 3), SamplingParams(max_tokens=5, seed=1, ignore_eos=True), 0, 1
    )
    with redis.Redis.from_url(fleet.info["redis_url"]) as client:
        fields = {
            "id": job.request_id,
            "line": job.line,
            "reason": "poisonous",
            "deliveries": 4,
            "job": seal_job(signing_key, job),
        }
        dead_id = client.xadd(keys.dead(fleet.model), fields).decode()
        assert dead_id in fleet.run("queue", "inspect")
        assert "The job ended well: 3 prompt tokens, 5 generated." in fleet.run("queue", "requeue", dead_id)
        assert not client.xlen(keys.dead(fleet.model))


def test_a_silent_redis_is_survived(fleet) -> None:
    """SIGSTOP of Redis in the middle of a stream: liveness on, readiness off, 503 in time; then the stream goes on and new requests are served."""
    fleet.wait_for(lambda: fleet.metric("sluicegate_worker_max_sequences") == 64, 60)
    expected = _collect(_stream(fleet, "greedy"))
    stream = iter(_stream(fleet, "greedy"))
    chunks = [next(stream) for _ in range(10)]
    pid = fleet.reread()["pids"]["redis"]
    os.kill(pid, signal.SIGSTOP)
    try:
        stopped_s = time.monotonic()
        fleet.wait_for(lambda: fleet.status("/health/ready") == 503, 10)
        with pytest.raises(openai.InternalServerError) as refused:
            fleet.client().chat.completions.create(**_ask(fleet, "greedy", max_tokens=2))
        assert 503 == refused.value.status_code
        assert 200 == fleet.status("/health/live")
        time.sleep(max(8 - (time.monotonic() - stopped_s), 0))
    finally:
        os.kill(pid, signal.SIGCONT)
    print(f"ready again after {fleet.wait_for(lambda: fleet.status('/health/ready') == 200, 10):.2f} s")
    chunks += stream
    assert expected == _collect(chunks)
    assert fleet.client().chat.completions.create(**_ask(fleet, "greedy", max_tokens=2)).choices[0].message.content
    log = (fleet.data / "logs" / "gateway.log").read_text()
    assert (1, 1) == (log.count("redis_unreachable"), log.count("redis_reachable_again"))
