"""Runs Lua scripts by their digest: their text crosses only when Redis doesn't know them yet."""

import hashlib
from functools import cache
from typing import Any

from redis.exceptions import NoScriptError


async def run_script(client: Any, script: str, keys: list[str], arguments: list[Any]) -> Any:
    """The script's result; errors of the client pass through."""
    try:
        return await client.evalsha(_digest(script), len(keys), *keys, *arguments)
    except NoScriptError:
        return await client.eval(script, len(keys), *keys, *arguments)


@cache
def _digest(script: str) -> str:
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
