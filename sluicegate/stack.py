"""`sluicegate up` and `sluicegate down`."""

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sluicegate.child import start_time
from sluicegate.environment import STACK_FILE, data_folder, read_stack
from sluicegate.errors import CommandError
from sluicegate.model_store import SYNTHETIC_MODEL, resolve
from sluicegate.stack_settings import StackSettings
from sluicegate.tenant_seed import read_seed

DETACH_TIMEOUT_S = 180.0
DOWN_TIMEOUT_S = 120.0


def up(arguments: Namespace) -> None:
    """Start a stack, in the foreground until Ctrl-C or in the background."""
    data = data_folder(arguments.data)
    try:
        data.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"cannot use the data folder {data}: {error.strerror}") from None
    _check_port(arguments.host, arguments.port)
    if is_running(data):
        raise CommandError(f"a stack is already running in {data}; stop it with: sluicegate down --data {data}")
    is_synthetic = arguments.engine == "synthetic"
    name, model = (SYNTHETIC_MODEL, None) if is_synthetic else resolve(arguments.model, data)
    if arguments.tenants is not None:
        read_seed(Path(arguments.tenants).expanduser())  # before anything is started
    if arguments.detach:
        _detach(data)
        return
    settings = StackSettings(
        data=data, host=arguments.host, port=arguments.port, model_name=arguments.name or name, model=model,
        workers=arguments.workers, kv_dtype=arguments.kv_dtype, kv_scales=arguments.kv_scales,
        activations_bits=arguments.activations_bits, integrity=arguments.integrity,
        allow_fault_injection=arguments.allow_fault_injection,
        kv_tokens=arguments.kv_tokens, page_size=arguments.page_size, max_sequences=arguments.max_sequences,
        drain_grace_s=arguments.drain_grace, prefill_rate=arguments.prefill_rate, decode_rate=arguments.decode_rate,
        context=arguments.context,
        tenants=None if arguments.tenants is None else Path(arguments.tenants).expanduser().resolve(),
    )  # fmt: skip
    with _exclusive(data):
        asyncio.run(_foreground(settings))


async def _foreground(settings: StackSettings) -> None:
    from sluicegate.supervisor import DEMO_TENANT, Supervisor

    first, second = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: second.set() if first.is_set() else first.set())
    supervisor = Supervisor(settings, _say)
    _say(f"Starting Sluicegate with {settings.model_name} ...")
    starting = asyncio.ensure_future(supervisor.start())
    if await _first(starting, first.wait()) == 1:
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        _say("Stopped before the stack was ready.")
        return
    await starting
    _say(_greeting(supervisor.url, DEMO_TENANT, supervisor.demo_key, settings))
    has_failed = await _first(supervisor.wait_for_failure(), first.wait()) == 0
    _say("Stopping: running answers may finish (Ctrl-C again to cut them off) ...")
    stopping = asyncio.ensure_future(supervisor.stop(hurry=has_failed))
    if await _first(stopping, second.wait()) == 1:
        stopping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await stopping
        await supervisor.stop(hurry=True)
    await asyncio.gather(stopping, return_exceptions=True)
    _say("Stopped.")
    if has_failed:
        raise CommandError("the stack failed; its logs are in " + str(settings.data / "logs"))


async def _first(*waits: Any) -> int:
    """The number of the first that is done; the others are cancelled unless they are tasks of the caller's."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    done = next(index for index, task in enumerate(tasks) if task.done())
    for task, wait in zip(tasks, waits, strict=True):
        if task is not wait and not task.done():
            task.cancel()
    return done


def _greeting(url: str, tenant: str, key: str, settings: StackSettings) -> str:
    body = (
        f'{{"model": "{settings.model_name}", "stream": true, "max_tokens": 200, "temperature": 0, '
        '"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
    )
    return (
        f"\nReady.\n\n  Base URL  {url}/v1\n  Tenant    {tenant}\n  API key   {key}\n\n"
        f"Try it:\n\n  curl -N {url}/v1/chat/completions -H 'Authorization: Bearer {key}' \\\n"
        f"    -H 'Content-Type: application/json' -d '{body}'\n\n"
        f"Or chat in another terminal: {_command()} chat --data {settings.data}\n"
        f"Logs are in {settings.data / 'logs'}. Ctrl-C stops the stack.\n"
    )


def _command() -> str:
    """What to type for this very command: its name if the shell finds it, else its path."""
    own = Path(sys.executable).with_name("sluicegate")
    found = shutil.which("sluicegate")
    return "sluicegate" if not own.is_file() or (found and Path(found).samefile(own)) else str(own)


def _say(line: str) -> None:
    print(line, flush=True)


@contextlib.contextmanager
def _exclusive(data: Path) -> Iterator[None]:
    """One stack for each data folder; a killed one lets go."""
    with (data / "stack.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(f"a stack is already starting or running in {data}") from None
        yield


def _check_port(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise CommandError(f"port {port} is in use; choose another with --port, or --port 0 for any") from None
            raise CommandError(f"cannot listen on {host}:{port}: {error.strerror}") from None


def _detach(data: Path) -> None:
    """Start the same command in the background and wait until it's ready."""
    flags = [flag for flag in sys.argv[1:] if flag != "--detach"]
    log = data / "logs" / "up.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        os.fchmod(output.fileno(), 0o600)
        process = subprocess.Popen(
            [sys.executable, "-m", "sluicegate", *flags],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        _wait_until_up(process, data, log)
    except BaseException:
        process.terminate()  # Ctrl-C, too, leaves nothing behind
        process.wait()
        raise
    print(log.read_text(encoding="utf-8", errors="replace").replace(" Ctrl-C stops the stack.", ""), end="")
    print(f"Stop it with: {_command()} down --data {data}")


def _wait_until_up(process: "subprocess.Popen[bytes]", data: Path, log: Path) -> None:
    end_s = time.monotonic() + DETACH_TIMEOUT_S
    while (read_stack(data) or {}).get("supervisor") != process.pid:
        if process.poll() is not None:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            raise CommandError((lines[-1] if lines else "the stack ended at once").removeprefix("sluicegate: "))
        if time.monotonic() > end_s:
            raise CommandError(f"the stack was not ready within {DETACH_TIMEOUT_S:g} seconds (log: {log})")
        time.sleep(0.05)


def is_running(data: Path) -> bool:
    """Whether a stack's supervisor is alive."""
    stack = read_stack(data)
    return stack is not None and _is_ours(stack, stack.get("supervisor"))


def _is_ours(stack: dict[str, Any], pid: Any) -> bool:
    """Whether a pid is still the process that the stack started."""
    started = stack.get("started")
    if type(pid) is not int or not isinstance(started, dict):
        return False
    return started.get(str(pid)) is not None and start_time(pid) == started[str(pid)]


def down(arguments: Namespace) -> None:
    """Stop the stack of a data folder."""
    data = data_folder(arguments.data)
    stack = read_stack(data)
    if stack is None:
        print(f"No stack is running in {data}.")
        return
    supervisor: Any = stack.get("supervisor")
    if _is_ours(stack, supervisor):
        os.kill(supervisor, signal.SIGTERM)
        _wait_until_gone(stack, [supervisor], DOWN_TIMEOUT_S)
    # Without a supervisor, what may be left was told to end by the kernel; make sure, in the same order.
    for group in _groups(stack):
        left = [pid for pid in group if _is_ours(stack, pid)]
        for pid in left:
            os.kill(pid, signal.SIGTERM)
        _wait_until_gone(stack, left, DOWN_TIMEOUT_S)
    (data / STACK_FILE).unlink(missing_ok=True)
    print(f"Stopped the stack in {data}.")


def _groups(stack: dict[str, Any]) -> list[list[Any]]:
    """Gateways, workers, Redis. The file may have been altered: what isn't a list of pids is none."""
    pids = stack.get("pids")
    named = pids if isinstance(pids, dict) else {}
    groups = [named.get("gateway"), named.get("workers"), [named.get("redis")]]
    return [group if isinstance(group, list) else [] for group in groups]


def _wait_until_gone(stack: dict[str, Any], pids: list[Any], timeout_s: float) -> None:
    end_s = time.monotonic() + timeout_s
    while any(_is_ours(stack, pid) for pid in pids):
        if time.monotonic() > end_s:
            raise CommandError(f"processes {pids} did not end within {timeout_s:g} seconds")
        time.sleep(0.05)
