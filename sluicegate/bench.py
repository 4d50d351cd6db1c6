"""`sluicegate bench`: composes the measurements in the `bench` package."""

import contextlib
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from sluicegate.errors import CommandError
from sluicegate.model_store import resolve
from sluicegate.valkey import embedded_valkey

VALKEY_READY_S = 10.0


def engine(arguments: Namespace) -> None:
    """Our engine alone, or in turns with its peers."""
    _require_worker()
    from bench.contenders import DEFAULT_PEERS
    from bench.goals import MISSED
    from bench.run import RunOptions, chosen_rows, run
    from bench.table import markdown

    # Engines, workers and the queue are ended on the way out, of SIGTERM as of Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    name, path = resolve(arguments.model)
    peers = Path(arguments.peers_dir) if arguments.peers_dir else DEFAULT_PEERS
    options = RunOptions(
        model_name=name,
        model=path,
        rows=chosen_rows(arguments.rows, arguments.rounds),
        peers=peers if arguments.peers else None,
        only=frozenset(arguments.only or ()),
        out=Path(arguments.out),
        name="peers" if arguments.peers else "engine",
        queue=None if arguments.no_worker else _queue,
        num_starts=1 if arguments.rows == "tiny" else 3,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    results = run(options)
    print(markdown(results))
    if arguments.strict and any(goal["state"] == MISSED for goal in results.goals):
        raise CommandError("a goal was missed")


def queue(arguments: Namespace) -> None:
    """What gateway and queue cost."""
    from bench.queue.command import run
    from sluicegate.queue_setting import QueueSetting

    run(arguments, lambda folder: QueueSetting(folder, arguments.seconds))


def integrity(arguments: Namespace) -> None:
    """What the integrity modes cost, and what a cached prefix saves."""
    _require_worker()
    from bench import integrity, prefix_reuse, sealed_attention

    _, path = resolve(arguments.model)
    if arguments.only in (None, "decode"):
        costs = integrity.measure(path, arguments.turns)
        integrity.write(costs, Path(arguments.out))
        print(integrity.table(costs))
    if arguments.only in (None, "attention"):
        attention = sealed_attention.measure(arguments.turns)
        sealed_attention.write(attention, Path(arguments.out))
        print(sealed_attention.table(attention))
    if arguments.only in (None, "reuse"):
        reuse = prefix_reuse.measure(path, arguments.pairs)
        prefix_reuse.write(reuse, Path(arguments.out))
        print(prefix_reuse.table(reuse))


def kernels(arguments: Namespace) -> None:
    """The products alone."""
    _require_worker()
    from bench.bandwidth import read_bandwidth
    from bench.kernels import products
    from kernels.backend import describe, resolve

    backend = resolve(arguments.kernels)
    print(f"{describe(backend)}, read bandwidth {read_bandwidth() / 1e9:.1f} GB/s\n\n{products(backend)}")


def load(arguments: Namespace) -> None:
    """Loading a checkpoint beside reading its files."""
    _require_worker()
    from bench.load import LoadError, measure, table

    path = resolve(arguments.model)[1] if arguments.model else None
    try:
        print(table(measure(path, arguments.kernels, arguments.rounds)))
    except LoadError as error:
        raise CommandError(str(error)) from None


def peers(arguments: Namespace) -> None:
    """Install the peers."""
    _require_worker()
    from bench.contenders import DEFAULT_PEERS
    from bench.setup_peers import set_up

    set_up(Path(arguments.peers_dir) if arguments.peers_dir else DEFAULT_PEERS, frozenset(arguments.only or ()))


def quality(arguments: Namespace) -> None:
    """Perplexity and divergence from float32."""
    _require_worker()
    from bench.quality import QualityError, report

    name, path = resolve(arguments.model)
    try:
        print(report(name, path, arguments.tokens, Path(arguments.out)))
    except QualityError as error:
        raise CommandError(str(error)) from None


@contextlib.contextmanager
def _queue(folder: Path) -> Iterator[str]:
    """A Valkey of our own for as long as the measurement takes."""
    import redis

    server = embedded_valkey(folder)
    process = subprocess.Popen(server.command, stdout=subprocess.DEVNULL)
    try:
        with redis.Redis.from_url(server.url) as client:
            deadline_s = time.monotonic() + VALKEY_READY_S
            while True:
                try:
                    client.ping()
                    break
                except redis.ConnectionError:
                    if process.poll() is not None or time.monotonic() > deadline_s:
                        raise CommandError("the embedded Valkey does not start") from None
                    time.sleep(0.02)
        yield server.url
    finally:
        process.terminate()
        process.wait(VALKEY_READY_S)


def _require_worker() -> None:
    try:
        import worker.model.load
    except ImportError as error:
        raise CommandError(f"benchmarks need sluicegate[stack]: {error}") from None
    assert worker.model.load is not None
