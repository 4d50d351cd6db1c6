"""Requests against a server on this machine: at a set rate, or as many at a time as there are clients."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from bench.queue.wire import Answer, connect, request

MODEL = "synthetic"
PATH = "/v1/chat/completions"


def chat(key: str, max_tokens: int, *, stream: bool, text: str = "Hello there.", **options: Any) -> bytes:
    """A chat request whose answer has exactly `max_tokens` tokens."""
    body: dict[str, Any] = {
        "model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0, "ignore_eos": True,
        "max_tokens": max_tokens, "stream": stream, **options,
    }  # fmt: skip
    if stream:
        body["stream_options"] = {"include_usage": True}
    return request(PATH, json.dumps(body).encode(), key)


async def at_rate(port: int, raw: bytes, rate: float, seconds: float, num_connections: int = 64) -> list[Answer]:
    """Send at fixed times whatever the answers take (an open loop); a connection is used by one request at a time."""
    idle: asyncio.Queue[Any] = asyncio.Queue()
    for _ in range(num_connections):
        idle.put_nowait(await connect(port))
    answers: list[Answer] = []

    async def one() -> None:
        connection = await idle.get()
        try:
            answers.append(await connection.ask(raw))
        finally:
            idle.put_nowait(connection)

    started_s = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, started_s + number / rate - time.perf_counter()))
            tasks.create_task(one())
    while not idle.empty():
        idle.get_nowait().close()
    return answers


async def closed_loop(
    port: int, make: Callable[[int], bytes], num_clients: int, seconds: float
) -> tuple[list[Answer], float]:
    """Each client sends its next request when it has its answer; returns the answers and the seconds until the last one."""
    answers: list[Answer] = []
    started_s = time.perf_counter()

    async def client(number: int) -> None:
        connection = await connect(port)
        while time.perf_counter() - started_s < seconds:
            answers.append(await connection.ask(make(number)))
        connection.close()

    async with asyncio.TaskGroup() as tasks:
        for number in range(num_clients):
            tasks.create_task(client(number))
    return answers, time.perf_counter() - started_s
