"""What `sluicegate bench queue` measures with: a folder for its processes, how long to measure, and the server to compare with."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.queue.setting import SYNTHETIC
from bench.queue.wire import connect
from sluicegate.child import Child
from sluicegate.fleet import Fleet, open_fleet
from sluicegate.valkey import free_port


@dataclass(frozen=True, slots=True)
class QueueSetting:
    """`seconds` is how long one number is measured; `folder` is the run's own."""

    folder: Path
    seconds: float

    @asynccontextmanager
    async def fleet(
        self, name: str, workers: int, *flags: str, gateway_flags: Sequence[str] = ()
    ) -> AsyncIterator[Fleet]:
        """One gateway and synthetic workers, ready."""
        async with open_fleet(self.folder / name) as fleet:
            await fleet.add_gateway(*gateway_flags)
            for _ in range(workers):
                await fleet.add_worker(*SYNTHETIC, *flags)
            await fleet.wait_until_ready()
            yield fleet

    @asynccontextmanager
    async def bare_server(self) -> AsyncIterator[tuple[Child, int]]:
        """aiohttp and nothing else: the process and its port."""
        port = free_port()
        command = [sys.executable, "-m", "bench.queue.bare", str(port)]
        child = await Child.start("bare", command, self.folder / "bare.log", os.environ)
        try:
            async with asyncio.timeout(20):
                while not await _listens(port):
                    await asyncio.sleep(0.05)
            yield child, port
        finally:
            await child.end(5)


async def _listens(port: int) -> bool:
    try:
        (await connect(port)).close()
    except OSError:
        return False
    return True
