"""One model's stream of replies to this process: read from its beginning, and emptied as it's read."""

import asyncio

from gateway.redis_lane import Lane
from gateway.redis_link import BLOCK_MS, RedisLink

MAX_ENTRIES = 200

_Entry = tuple[bytes, list[bytes]]


class ReplyStream:
    """Where a stream was read to. What was read is deleted with the next look, in one exchange on a connection that's the stream's own."""

    def __init__(self, link: RedisLink, key: str) -> None:
        self.key = key
        self.is_open = False
        self._link = link
        self._lane = link.new_lane()
        self._last_id = b"0"
        self._read_ids: list[bytes] = []

    async def read(self) -> list[bytes]:
        """The payloads that have come, in order; none if none comes for a while. Raises NETWORK_ERRORS."""
        read_ids = list(self._read_ids)
        entries = await (self._look(read_ids) if self._lane is None else self._look_on(self._lane, read_ids))
        del self._read_ids[: len(read_ids)]
        if entries:
            self._last_id = entries[-1][0]
            self._read_ids += [entry_id for entry_id, _ in entries]
        return [payload for _, payloads in entries for payload in payloads]

    def begin_anew(self) -> None:
        """The stream was made again."""
        self._last_id = b"0"
        self._read_ids.clear()

    async def close(self) -> None:
        """Close its connection."""
        if self._lane is not None:
            await self._lane.aclose()

    async def _look_on(self, lane: Lane, read_ids: list[bytes]) -> list[_Entry]:
        look = ("XREAD", "COUNT", MAX_ENTRIES, "BLOCK", BLOCK_MS, "STREAMS", self.key, self._last_id)
        commands = [("XDEL", self.key, *read_ids), look] if read_ids else [look]
        found = (await asyncio.gather(*(lane.execute(*command) for command in commands)))[-1] or []
        streams = found.values() if isinstance(found, dict) else [rows for _, rows in found]
        return [(entry_id, fields[1::2]) for rows in streams for entry_id, fields in rows]

    async def _look(self, read_ids: list[bytes]) -> list[_Entry]:
        """By a client, whose answers have a shape for each protocol."""
        if read_ids:
            await self._link.commands.xdel(self.key, *read_ids)
        found = await self._link.blocking.xread({self.key: self._last_id}, count=MAX_ENTRIES, block=BLOCK_MS) or []
        streams = found.values() if isinstance(found, dict) else [rows for _, rows in found]
        # RESP3 wraps a stream's entries once more.
        flat = (rows[0] if rows and isinstance(rows[0], list) else rows for rows in streams)
        return [(entry_id, list(fields.values())) for rows in flat for entry_id, fields in rows]
