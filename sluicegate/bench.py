"""`sluicegate bench`: hands over to the package of measurements."""

from argparse import Namespace


def queue(arguments: Namespace) -> None:
    """What gateway and queue cost."""
    from bench.queue.command import run

    run(arguments)
