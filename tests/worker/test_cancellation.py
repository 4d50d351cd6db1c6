"""Ending a process' tasks, even one that loses a cancellation, as asyncio.wait_for of Python 3.11 can."""

import asyncio

from worker import process


async def test_a_lost_cancellation_is_repeated() -> None:
    """A task that swallows the first one is ended by the next."""
    lost = asyncio.Event()

    async def forgetful() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            lost.set()
        await asyncio.Event().wait()

    tasks = [asyncio.create_task(forgetful()), asyncio.create_task(asyncio.Event().wait())]
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await process._cancel(tasks)
    assert lost.is_set()
    assert all(task.cancelled() for task in tasks)


async def test_tasks_that_have_ended_are_no_trouble() -> None:
    """Nothing to cancel, and a task that failed before."""

    async def failing() -> None:
        raise RuntimeError("before")

    failed = asyncio.create_task(failing())
    await asyncio.wait([failed])
    await process._cancel([])
    await process._cancel([failed])
    assert isinstance(failed.exception(), RuntimeError)
