"""`sluicegate bench queue`: measures with a stack of its own in a temporary folder, which ends with it."""

import asyncio
import os
import signal
import tempfile
from argparse import Namespace
from collections.abc import Awaitable, Callable
from pathlib import Path

from bench.queue import fairness, latency, routing, scale, streams
from bench.queue.report import draw, table, write_json
from bench.queue.rows import Row
from bench.queue.setting import Setting

PARTS: dict[str, Callable[[Setting], Awaitable[list[Row]]]] = {
    "latency": latency.measure, "streams": streams.measure, "fairness": fairness.measure,
    "routing": routing.measure, "scale": scale.measure,
}  # fmt: skip


def run(arguments: Namespace, setting: Callable[[Path], Setting]) -> None:
    """Measure, print the table, write JSON and picture. `setting` makes a setting whose processes live in a folder."""
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="sluicegate-bench-") as folder:
        try:
            rows = asyncio.run(_measure(arguments.only or list(PARTS), setting(Path(folder))))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
    out = Path(arguments.out)
    write_json(rows, out / "queue.json", load_before)
    print(f"{os.cpu_count()} cores, load average {load_before[0]:.1f} before the run\n\n{table(rows)}")
    try:
        draw(rows, out / "queue.png")
    except ImportError:
        print("\nNo picture: matplotlib is not installed (sluicegate[bench]).")
        return
    print(f"\nNumbers in {out / 'queue.json'}, picture in {out / 'queue.png'}.")


async def _measure(names: list[str], setting: Setting) -> list[Row]:
    """One part after the other; SIGTERM ends the processes as Ctrl-C does."""
    measuring = asyncio.current_task()
    assert measuring is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, measuring.cancel)
    rows: list[Row] = []
    for name in names:
        print(f"measuring {name} ...", flush=True)
        rows += await PARTS[name](setting)
    return rows
