"""Runs a local stack: starts Valkey, gateway and workers in order, starts again what dies, ends all in order.

What is running is written to DATA/stack.json when the stack is ready, and again whenever a process was replaced.
"""

import asyncio
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.tenant_store import TenantStore, TenantStoreError
from protocol.ids import TenantId
from protocol.key_space import KeySpace
from protocol.tenancy import new_api_key
from sluicegate.child import Child, start_time
from sluicegate.environment import STACK_FILE
from sluicegate.errors import CommandError
from sluicegate.redis_access import stores_of
from sluicegate.secrets import DEMO_FILE, admin_key, derived_keys, replaced, stored
from sluicegate.stack_settings import StackSettings
from sluicegate.tenant_seed import apply_seed, read_seed
from sluicegate.valkey import embedded_valkey, free_port

DEMO_TENANT = TenantId("demo")
REDIS_START_S = 15.0
READY_S = 120.0
RESTART_DELAYS_S = (0.5, 1.0, 2.0, 5.0, 10.0)
STABLE_S = 60.0
EXTRA_GRACE_S = 10.0


class Supervisor:
    """One stack. `say` prints a line for the user."""

    def __init__(self, settings: StackSettings, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._say = say
        self._redis: Child | None = None
        self._gateway: Child | None = None
        self._workers: list[Child | None] = [None] * settings.workers
        self._watchers: list[asyncio.Task[None]] = []
        self._failed = asyncio.Event()
        self._port = settings.port or free_port(settings.host)
        self._redis_url = ""
        self._demo_key = ""
        self.url = f"http://{_url_host(settings.host)}:{self._port}"

    async def start(self) -> None:
        """Until a request would be served; raises CommandError (with nothing left running) if that can't be reached."""
        try:
            await self._start_redis()
            self._demo_key = await self._prepare_tenants()
            self._gateway = await self._start("gateway", self._settings.gateway_flags(self._port))
            for index in range(self._settings.workers):
                self._workers[index] = await self._start_worker(index)
            await self._wait_until_ready()
        except BaseException:
            await self.stop()
            raise
        self._write_stack()
        self._watchers = [asyncio.create_task(self._keep_gateway())]
        self._watchers += [asyncio.create_task(self._keep_worker(index)) for index in range(self._settings.workers)]
        self._watchers.append(asyncio.create_task(self._watch_redis()))

    async def wait_for_failure(self) -> None:
        """Until the stack can't go on: its Redis has ended."""
        await self._failed.wait()

    async def stop(self, *, hurry: bool = False) -> None:
        """End all, in the order in which they need each other."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        grace_s = 1.0 if hurry else self._settings.drain_grace_s + EXTRA_GRACE_S
        if self._gateway is not None:
            await self._gateway.end(grace_s)
        await asyncio.gather(*(worker.end(grace_s) for worker in self._workers if worker is not None))
        if self._redis is not None:
            await self._redis.end(grace_s)
        (self._settings.data / STACK_FILE).unlink(missing_ok=True)

    @property
    def demo_key(self) -> str:
        """The demo tenant's key."""
        return self._demo_key

    # -- start -------------------------------------------------------------------------------------------------------

    async def _start_redis(self) -> None:
        server = embedded_valkey(self._settings.data)
        self._redis_url = server.url
        self._redis = await Child.start("redis", server.command, self._log("redis"), os.environ)
        end_s = time.monotonic() + REDIS_START_S
        while not await _answers(server.url):
            if not self._redis.is_running or time.monotonic() > end_s:
                raise CommandError(f"the embedded Valkey did not start: {self._redis.last_words()}")
            await asyncio.sleep(0.05)

    async def _prepare_tenants(self) -> str:
        """A demo tenant whose key is the same at each start, unless it was revoked."""
        data = self._settings.data
        secret = stored(data, DEMO_FILE, new_api_key)
        client = Redis.from_url(self._redis_url)
        try:
            store = TenantStore(client, KeySpace(), derived_keys(data).key_pepper)
            try:
                await store.create_tenant(DEMO_TENANT, "Demo")
            except TenantStoreError:  # it is there since an earlier start
                if await store.find_key(secret) is None:
                    secret = replaced(data, DEMO_FILE, new_api_key())
            await store.adopt_key(secret, DEMO_TENANT, "demo")
            if self._settings.tenants is not None:
                stores = stores_of(client, derived_keys(data).key_pepper, "seed")
                for line in await apply_seed(stores, read_seed(self._settings.tenants), data):
                    self._say(line)
        finally:
            await client.aclose()
        return secret

    async def _start(self, name: str, flags: list[str]) -> Child:
        kind = name.partition("-")[0]
        environment = {
            **os.environ,
            "SLUICEGATE_REDIS_URL": self._redis_url,
            "SLUICEGATE_DATA": str(self._settings.data),
            "SLUICEGATE_ADMIN_KEY": admin_key(self._settings.data),
        }
        command = [sys.executable, "-m", "sluicegate", kind, *flags]
        return await Child.start(name, command, self._log(name), environment)

    async def _start_worker(self, index: int) -> Child:
        return await self._start(f"worker-{index}", self._settings.worker_flags())

    async def _wait_until_ready(self) -> None:
        end_s = time.monotonic() + READY_S
        while not await asyncio.to_thread(_is_ready, self.url + "/health/ready"):
            for child in (self._redis, self._gateway, *self._workers):
                if child is not None and not child.is_running:
                    raise CommandError(f"{child.name} did not start: {_plain(child.last_words())} (log: {child.log})")
            if time.monotonic() > end_s:
                raise CommandError(
                    f"the stack was not ready within {READY_S:g} seconds (logs: {self._log('x').parent})"
                )
            await asyncio.sleep(0.1)

    # -- keep --------------------------------------------------------------------------------------------------------

    async def _keep_gateway(self) -> None:
        async def again() -> Child:
            self._gateway = await self._start("gateway", self._settings.gateway_flags(self._port))
            return self._gateway

        assert self._gateway is not None
        await self._keep(self._gateway, again)

    async def _keep_worker(self, index: int) -> None:
        async def again() -> Child:
            worker = await self._start_worker(index)
            self._workers[index] = worker
            return worker

        worker = self._workers[index]
        assert worker is not None
        await self._keep(worker, again)

    async def _keep(self, child: Child, again: Callable[[], Any]) -> None:
        """Start a process again whenever it ends, waiting longer each time that it ends soon."""
        num_quick = 0
        while True:
            started_s = time.monotonic()
            code = await child.wait()
            num_quick = 0 if time.monotonic() - started_s > STABLE_S else num_quick + 1
            delay_s = RESTART_DELAYS_S[min(max(num_quick - 1, 0), len(RESTART_DELAYS_S) - 1)]
            self._say(f"{child.name} ended with code {code}; starting it again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            child = await again()
            self._write_stack()

    async def _watch_redis(self) -> None:
        assert self._redis is not None
        code = await self._redis.wait()
        self._say(f"the embedded Valkey ended with code {code}; the stack stops")
        self._failed.set()

    def _log(self, name: str) -> Path:
        return self._settings.data / "logs" / f"{name}.log"

    def _write_stack(self) -> None:
        assert self._redis is not None
        assert self._gateway is not None
        pids = {
            "redis": self._redis.pid,
            "gateway": [self._gateway.pid],
            "workers": [worker.pid for worker in self._workers if worker is not None],
        }
        everyone = [os.getpid(), self._redis.pid, self._gateway.pid, *(w.pid for w in self._workers if w)]
        stack = {
            "url": self.url,
            "tenant": DEMO_TENANT,
            "key": self._demo_key,
            "admin_key": admin_key(self._settings.data),
            "redis_url": self._redis_url,
            "model": self._settings.model_name,
            "pids": pids,
            "supervisor": os.getpid(),
            # A pid alone may have become somebody else's.
            "started": {str(pid): start_time(pid) for pid in everyone},
        }
        path = self._settings.data / STACK_FILE
        temporary = path.with_suffix(".tmp")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(stack, file, indent=2)
        temporary.replace(path)


def _plain(line: str) -> str:
    """The message in a log line."""
    try:
        record = json.loads(line)
    except ValueError:
        return line
    return str(record.get("error") or record.get("event") or line) if isinstance(record, dict) else line


def _url_host(host: str) -> str:
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared with, not listened on
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


async def _answers(url: str) -> bool:
    client = Redis.from_url(url, socket_timeout=1.0, socket_connect_timeout=1.0)
    try:
        await client.ping()
    except (RedisError, OSError):
        return False
    finally:
        await client.aclose()
    return True


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:  # noqa: S310 - our own http URL
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
