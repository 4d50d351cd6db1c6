"""What a measurement needs of whoever starts the processes: the command does, since it alone knows how they are composed."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

SYNTHETIC = ("--engine", "synthetic")


class Process(Protocol):
    """A running process."""

    @property
    def pid(self) -> int:
        """Its id."""
        ...


class Gateway(Protocol):
    """A gateway process and where it listens."""

    @property
    def child(self) -> Process:
        """The process."""
        ...

    @property
    def port(self) -> int:
        """Its port on this machine."""
        ...


class Fleet(Protocol):
    """Redis, gateways and workers of a measurement's own."""

    @property
    def redis(self) -> Process | None:
        """The server, unless it's somebody else's."""
        ...

    @property
    def gateways(self) -> Sequence[Gateway]:
        """At least one."""
        ...

    @property
    def workers(self) -> Sequence[Process]:
        """All that were started."""
        ...

    async def add_worker(self, *flags: str) -> Process:
        """Start one; it isn't ready yet."""
        ...

    async def wait_until_ready(self) -> None:
        """Until all are seen by the gateways."""
        ...

    async def new_key(self, tenant: str, *flags: str) -> str:
        """A new tenant's API key; raises RuntimeError with the command's words."""
        ...

    async def statuses(self) -> list[dict[str, Any]]:
        """The workers' own numbers."""
        ...

    async def metric(self, prefix: str) -> float:
        """The sum of the first gateway's samples whose line begins so."""
        ...

    def client(self) -> Any:
        """A client of the Redis, to be closed by the caller."""
        ...


class Setting(Protocol):
    """What every measurement starts from. `seconds` is how long one number is measured."""

    @property
    def seconds(self) -> float:
        """How long."""
        ...

    def fleet(
        self, name: str, workers: int, *flags: str, gateway_flags: Sequence[str] = ()
    ) -> AbstractAsyncContextManager[Fleet]:
        """One gateway and workers with these flags, ready; ended with the block."""
        ...

    def bare_server(self) -> AbstractAsyncContextManager[tuple[Process, int]]:
        """`bench.queue.bare`: the process and its port."""
        ...
