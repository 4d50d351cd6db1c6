"""Connections that wait in a pool while Redis restarts, of gateways and of workers."""

import asyncio

import pytest

import gateway.redis_link
import worker.redis_link

NUM_CONNECTIONS = 8


@pytest.mark.parametrize("module", [gateway.redis_link, worker.redis_link], ids=["gateway", "worker"])
async def test_connections_to_the_server_that_was_fail_nobody_later(own_valkey, soon, module, capfd):
    """After a restart all commands succeed, also those that need more connections than the first ones did; the outage is told once."""
    server = own_valkey()
    url, port = server.connection_url, server.port
    async with module.open_redis(url, "t") as link:

        async def is_answered() -> bool:
            try:
                await link.commands.get("x")
            except module.NETWORK_ERRORS as error:
                link.failed(error)
                return False
            link.answered()
            return True

        async def all_are_answered() -> bool:
            return all(await asyncio.gather(*(is_answered() for _ in range(NUM_CONNECTIONS))))

        assert await all_are_answered()
        server.stop()
        assert not await is_answered()
        own_valkey(port)
        await soon(is_answered)
        await asyncio.sleep(1.5)  # longer than an outage's edges are smoothed
        await is_answered()
        assert await all_are_answered()
    assert 1 == capfd.readouterr().out.count("redis_unreachable")
