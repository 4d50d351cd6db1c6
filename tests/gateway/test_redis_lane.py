"""Many scripts at once over one connection to a real server: everybody gets his own answer, or an error in time."""

import asyncio
import random
import secrets
import time

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import DataError, NoScriptError, RedisError, ResponseError

from gateway.redis_lane import Lane
from gateway.redis_link import open_redis
from gateway.reply_stream import ReplyStream
from gateway.scripts import run_script

ECHO = "return ARGV[1]"


@pytest.fixture
async def client(valkey_url):
    opened = Redis.from_url(valkey_url)
    yield opened
    await opened.aclose()


@pytest.fixture
async def lane(client):
    opened = Lane(client.connection_pool.make_connection, 0.5)
    yield opened
    await opened.aclose()


async def test_everybody_gets_his_own_answer_whoever_leaves(lane) -> None:
    """Hundreds at once, of all sizes, a third of whose callers are cancelled, errors among them."""
    rng = random.Random(3)

    async def ask(number: int) -> None:
        is_error = number % 5 == 0
        text = f"{number} " + "x" * rng.choice([0, 10, 1000] if is_error else [0, 10, 1000, 300_000])
        script = "return redis.error_reply('ERR ' .. ARGV[1])" if is_error else ECHO
        asking = asyncio.ensure_future(run_script(lane, script, [], [text]))
        if number % 3 == 0:
            await asyncio.sleep(rng.random() * 0.002)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            return
        if is_error:
            with pytest.raises(ResponseError) as caught:
                await asking
            assert text == str(caught.value).removeprefix("ERR ")
        else:
            assert text.encode() == await asking

    await asyncio.gather(*(ask(number) for number in range(400)))


async def test_a_forgotten_script_is_sent_again(lane, client) -> None:
    """And so is one that was never there."""
    script = f"return '{secrets.token_hex(4)}' .. ARGV[1]"
    with pytest.raises(NoScriptError):
        await lane.evalsha("0" * 40, 0)
    for _ in range(2):
        answers = await asyncio.gather(*(run_script(lane, script, [], [n]) for n in range(20)))
        assert [str(n).encode() for n in range(20)] == [answer[8:] for answer in answers]
        await client.script_flush()


async def test_a_silent_server_costs_its_time_once(lane, client) -> None:
    """All that wait fail together within the time, those that connect anew too; afterwards all is well."""
    assert b"1" == await lane.eval(ECHO, 0, 1)
    loop = asyncio.get_running_loop()
    paused_at_s = loop.time()
    await client.client_pause(6000)
    for _ in range(2):  # on the connection that's open, and on one that can't be opened
        started_s = loop.time()
        found = await asyncio.gather(*(lane.eval(ECHO, 0, n) for n in range(50)), return_exceptions=True)
        assert all(isinstance(error, (TimeoutError, RedisError, OSError)) for error in found)
        assert 0.4 < loop.time() - started_s < 2.5  # one after the other they'd take 25
    await asyncio.sleep(paused_at_s + 6.3 - loop.time())
    assert b"2" == await lane.eval(ECHO, 0, 2)


async def test_a_loop_that_stood_still_finds_its_answers(lane) -> None:
    """They have lain in the socket for longer than the server had to give them."""
    assert b"1" == await lane.eval(ECHO, 0, 1)
    asking = asyncio.gather(*(lane.eval(ECHO, 0, n) for n in range(50)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # what was put is on its way
    time.sleep(0.8)
    assert [str(n).encode() for n in range(50)] == await asking


async def test_a_slow_server_is_no_silent_one(lane, client) -> None:
    """Answers that come one after the other are all waited for, though the last takes longer than the time for one."""
    name = f"lane-nobody-{secrets.token_hex(4)}"
    assert [None] * 4 == await asyncio.gather(*(lane.execute("BLPOP", name, "0.3") for _ in range(4)))


async def test_a_broken_connection_fails_what_was_under_way_and_is_replaced(lane, client) -> None:
    """Nothing is sent twice."""
    key = "lane-" + secrets.token_hex(4)
    await lane.eval("return redis.call('SET', KEYS[1], 0)", 1, key)
    wait = asyncio.gather(*(lane.execute("BLPOP", f"{key}-none", 5) for _ in range(3)), return_exceptions=True)
    await asyncio.sleep(0.1)
    await client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert all(isinstance(error, RedisConnectionError) for error in await wait)
    counts = await asyncio.gather(*(lane.execute("INCR", key) for _ in range(20)))
    assert list(range(1, 21)) == sorted(counts)
    await client.delete(key)


async def test_what_cannot_be_sent_harms_nobody(lane) -> None:
    """A value of a wrong type is refused before anything of it is on its way."""
    good = [asyncio.ensure_future(lane.eval(ECHO, 0, n)) for n in range(3)]
    with pytest.raises(DataError):
        await lane.eval(ECHO, 0, object())
    assert [b"0", b"1", b"2"] == await asyncio.gather(*good)


async def test_closing_ends_what_waits(client) -> None:
    """With an error, and without a task that is left."""
    lane = Lane(client.connection_pool.make_connection, 5)
    waiting = asyncio.ensure_future(lane.execute("BLPOP", "lane-nobody-" + secrets.token_hex(4), 5))
    await asyncio.sleep(0.1)
    await lane.aclose()
    with pytest.raises(RedisConnectionError):
        await waiting
    assert 1 == len(asyncio.all_tasks())


async def test_a_stream_of_replies_is_emptied_as_it_is_read(valkey_url, client) -> None:
    """On a lane and by a client alike: all payloads in order, again from the beginning when the stream was made anew, and nothing is left."""
    async with open_redis(valkey_url, "sg") as link:
        for has_lane in (True, False):
            key = "replies-" + secrets.token_hex(4)
            stream = ReplyStream(link, key)
            if not has_lane:
                await stream.close()
                stream._lane = None
            for start in range(0, 9, 3):
                for number in range(start, start + 3):
                    await client.xadd(key, {f"a{number}": f"{number}", f"b{number}": f"{number}'"})
                read = await stream.read()
                assert [f"{n}{mark}".encode() for n in range(start, start + 3) for mark in ("", "'")] == read
                assert 3 == await client.xlen(key)
            assert [] == await stream.read()
            assert 0 == await client.xlen(key)
            await client.delete(key)
            stream.begin_anew()
            await client.xadd(key, {"c": "again"}, id="1-1")
            assert [b"again"] == await stream.read()
            await stream.close()
            await client.delete(key)


async def test_a_server_that_hangs_up_at_once_costs_no_time() -> None:
    """It answers what opens a connection and closes it, as one that's full or going down does: an error comes long before the time is up."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4096)
        writer.write(b"+OK\r\n" * 2)
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    client = Redis(port=server.sockets[0].getsockname()[1], protocol=2)
    lane = Lane(client.connection_pool.make_connection, 20)
    async with asyncio.timeout(5):
        for _ in range(3):
            found = await asyncio.gather(*(lane.eval(ECHO, 0, n) for n in range(9)), return_exceptions=True)
            assert all(isinstance(error, RedisConnectionError) for error in found)
    await lane.aclose()
    await client.aclose()
    server.close()
    await server.wait_closed()
