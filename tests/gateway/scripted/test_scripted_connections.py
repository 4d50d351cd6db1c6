"""What the gateway remembers of connections ends with them."""

import asyncio
import json


async def test_lost_connections_are_forgotten(gateway, worker, soon):
    """Clients that leave before, while and after they are answered leave nothing in the tables of idle connections."""

    async def slow(one, job):
        await one.answer(job, ["x" * 100_000] * 5, pause_s=0.01)

    await worker(slow)
    running = await gateway()
    body = json.dumps({"model": "tiny/chat", "stream": True, "messages": [{"role": "user", "content": "Hi"}]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {running.key}\r\nContent-Type: application/json\r\n"
    raw = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def visit(number):
        reader, writer = await asyncio.open_connection(running.host, running.port)
        writer.write(raw[: len(raw) * (number % 4) // 3])
        if number % 4 == 3:
            await reader.read(100)
        await asyncio.sleep(number % 7 / 50)
        writer.transport.abort()

    await asyncio.gather(*(visit(number) for number in range(80)))
    await soon(lambda: not running.door.connections)
    assert [] == [*running.door._fresh, *running.door._served]
    assert 200 == (await running.chat())[0]
