"""`sluicegate quantize`: shows what will be done, and does it."""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sluicegate.errors import CommandError
from sluicegate.model_store import resolve


def quantize(arguments: Namespace) -> None:
    """Print the plan, then write the result."""
    from worker.quantize.errors import QuantizeError
    from worker.quantize.job import Options, prepare
    from worker.quantize.plan import shown

    _, source = resolve(arguments.source)
    result = Path(arguments.result).expanduser()
    options = Options(
        method=arguments.method,
        policy=arguments.policy,
        group_size=arguments.group_size,
        is_symmetric=not arguments.asymmetric,
        overrides=tuple(arguments.set),
        shard_bytes=arguments.shard_size,
        calibration_tokens=arguments.calibration_tokens,
    )
    try:
        job = prepare(source, options)
        print(shown(job.plan.totals), flush=True)
        if arguments.dry_run:
            return
        with progress_bar(f"{arguments.method}", job.work_bytes) as progress:
            job.run(result, progress)
    except QuantizeError as error:
        raise CommandError(str(error)) from None
    print(f"\n{result}: complete. `sluicegate eval {result} --reference {source}` tells what it cost.")


@contextmanager
def progress_bar(title: str, total: int, *, is_bytes: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar with the time left, on a terminal; silence elsewhere. What is given is told how much more is done."""
    if not sys.stderr.isatty():
        yield lambda more: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    amount = DownloadColumn() if is_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total)
        yield lambda more: progress.advance(task, more)
