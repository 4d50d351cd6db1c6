"""A fleet of real processes on this machine, each of which can be stopped, killed and replaced: Redis, gateways, workers.

`sluicegate up` keeps a stack alive; this one does as it's told. Everything lies in one folder and ends with the process that opened it.
"""

import asyncio
import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.exceptions import RedisError

from protocol.redis_url import cluster_node_url
from sluicegate.child import Child
from sluicegate.secrets import admin_key
from sluicegate.valkey import embedded_valkey, free_port

START_S = 180.0  # 32 workers that start at once on two busy cores take their time
END_S = 15.0


class Gateway:
    """One gateway process and its address."""

    def __init__(self, child: Child, port: int) -> None:
        self.child = child
        self.port = port
        self.url = f"http://127.0.0.1:{port}"


class Fleet:
    """Redis is started here unless a URL is given. Processes that were killed stay listed until `reap`."""

    def __init__(self, folder: Path, redis_url: str | None = None) -> None:
        self.folder = folder
        self.redis_url = redis_url or ""
        self.redis: Child | None = None
        self.gateways: list[Gateway] = []
        self.workers: list[Child] = []
        self._num_started = 0

    async def start_redis(self) -> None:
        """The embedded server, with its data in the folder."""
        server = embedded_valkey(self.folder)
        self.redis_url = server.url
        self.redis = await Child.start("redis", server.command, self._log("redis"), os.environ)
        async with asyncio.timeout(START_S):
            while not await self._redis_answers():
                await asyncio.sleep(0.02)

    async def add_gateway(self, *flags: str, port: int | None = None) -> Gateway:
        """Start one; it isn't ready yet."""
        port = port or free_port()
        child = await self._start("gateway", ["--port", str(port), *flags])
        gateway = Gateway(child, port)
        self.gateways.append(gateway)
        return gateway

    async def add_worker(self, *flags: str) -> Child:
        """Start a worker; it isn't ready yet."""
        child = await self._start("worker", list(flags))
        self.workers.append(child)
        return child

    async def run(self, *arguments: str) -> str:
        """A sub-command to its end; returns what it printed."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "sluicegate", *arguments, env=self._environment(),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
        if process.returncode:
            raise RuntimeError(f"sluicegate {' '.join(arguments)}: {err.decode().strip()}")
        return out.decode().strip()

    async def new_key(self, tenant: str, *flags: str) -> str:
        """A new tenant's API key."""
        await self.run("tenant", "create", tenant, *flags)
        return (await self.run("key", "create", tenant)).split()[-1]

    async def wait_until_ready(self) -> None:
        """Until every gateway takes requests and sees all workers; those that died may still be listed beside them."""
        wanted = {worker.pid for worker in self.workers}
        end_s = asyncio.get_running_loop().time() + START_S
        for gateway in self.gateways:
            while not await asyncio.to_thread(self._sees, gateway, wanted):
                self._check_alive()
                if asyncio.get_running_loop().time() > end_s:
                    raise RuntimeError(f"{gateway.url} did not see all {len(wanted)} workers within {START_S:g} s")
                await asyncio.sleep(0.05)

    async def statuses(self) -> list[dict[str, Any]]:
        """The workers' own numbers, as the first gateway sees them now."""
        return await asyncio.to_thread(self._statuses, self.gateways[0])

    async def metric(self, prefix: str) -> float:
        """The sum of the samples whose line begins so, of the first gateway."""
        url, key = self.gateways[0].url + "/metrics", admin_key(self.folder)
        lines = (await asyncio.to_thread(_read, url, key)).decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(prefix))

    def client(self) -> Any:
        """A client of the fleet's Redis, to be closed by the caller."""
        node_url = cluster_node_url(self.redis_url)
        kind: Any = Redis if node_url is None else RedisCluster
        return kind.from_url(node_url or self.redis_url, socket_timeout=5, socket_connect_timeout=5)

    @staticmethod
    def kill(child: Child, number: signal.Signals = signal.SIGKILL) -> None:
        """A signal to a process of this fleet."""
        if child.is_running:
            os.kill(child.pid, number)

    async def reap(self) -> None:
        """Forget the workers and gateways that have ended."""
        self.workers = [worker for worker in self.workers if worker.is_running]
        self.gateways = [gateway for gateway in self.gateways if gateway.child.is_running]

    async def close(self) -> None:
        """End everything, in the order in which it needs each other."""
        for children in ([g.child for g in self.gateways], self.workers, [self.redis] if self.redis else []):
            for child in children:
                self.kill(child, signal.SIGCONT)  # one that's stopped would not hear
            await asyncio.gather(*(child.end(END_S) for child in children))

    def _check_alive(self) -> None:
        for child in (*(gateway.child for gateway in self.gateways), *self.workers):
            if not child.is_running:
                raise RuntimeError(f"{child.name} ended: {child.last_words()}")

    async def _start(self, kind: str, flags: list[str]) -> Child:
        self._num_started += 1
        name = f"{kind}-{self._num_started}"
        command = [sys.executable, "-m", "sluicegate", kind, *flags]
        return await Child.start(name, command, self._log(name), self._environment())

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "SLUICEGATE_REDIS_URL": self.redis_url, "SLUICEGATE_DATA": str(self.folder)}

    def _log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    async def _redis_answers(self) -> bool:
        client = self.client()
        try:
            return bool(await client.ping())
        except (RedisError, OSError):
            return False
        finally:
            await client.aclose()

    def _sees(self, gateway: Gateway, pids: set[int]) -> bool:
        try:
            _read(f"{gateway.url}/health/ready")
            return pids <= {status["pid"] for status in self._statuses(gateway)}
        except (urllib.error.URLError, OSError):
            return False

    def _statuses(self, gateway: Gateway) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(_read(f"{gateway.url}/admin/v1/workers", admin_key(self.folder)))[
            "data"
        ]
        return found


@asynccontextmanager
async def open_fleet(folder: Path, redis_url: str | None = None) -> AsyncIterator[Fleet]:
    """A fleet with a Redis and nothing else yet; all of it ends with the block."""
    fleet = Fleet(folder, redis_url)
    try:
        if redis_url is None:
            await fleet.start_redis()
        yield fleet
    finally:
        await fleet.close()


def _read(url: str, key: str = "") -> bytes:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})  # noqa: S310 - our own URL
    with urllib.request.urlopen(request, timeout=5) as response:  # noqa: S310
        body: bytes = response.read()
    return body
