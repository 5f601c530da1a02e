"""The proxy of the fault tests does to connections what it says, and only to those it is told to."""

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.faults.proxy import BLACKHOLE, Proxy, Traffic, owner_of
from tests.support.process_tools import linux
from tests.support.redis_tools import eventually

pytestmark = linux
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest_asyncio.fixture
async def proxy() -> AsyncIterator[Proxy]:
    """Before a server that sends back what it gets."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1024):
                writer.write(data)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    proxy = Proxy(server.sockets[0].getsockname()[1], lambda: {"me": os.getpid()})
    await proxy.open()
    yield proxy
    await proxy.close()
    server.close()


async def connected(proxy: Proxy) -> Streams:
    return await asyncio.open_connection("127.0.0.1", proxy.port)


async def echoed(streams: Streams, data: bytes) -> bytes:
    streams[1].write(data)
    async with asyncio.timeout(10):
        return await streams[0].readexactly(len(data))


async def test_bytes_pass_and_are_counted_under_their_owners_name(proxy: Proxy) -> None:
    streams = await connected(proxy)
    assert await echoed(streams, b"hello") == b"hello"
    await eventually(lambda: (proxy.moved["me", "up"], proxy.moved["me", "down"]) == (5, 5))
    assert (proxy.links("me"), proxy.links("other")) == (1, 0)
    streams[1].close()


async def test_a_local_port_is_its_owners_only_towards_one_far_end(proxy: Proxy) -> None:
    """Sockets to different far ends may share their local port."""
    streams = await connected(proxy)
    port = streams[1].get_extra_info("sockname")[1]
    me = {"me": os.getpid()}
    assert (owner_of(port, proxy.port, me), owner_of(port, proxy.port - 1, me)) == ("me", "")
    streams[1].close()


@pytest.mark.parametrize("traffic", [BLACKHOLE, Traffic(up=False), Traffic(down=False)])
async def test_held_bytes_come_when_the_way_is_open_again(proxy: Proxy, traffic: Traffic) -> None:
    streams = await connected(proxy)
    await echoed(streams, b"a")
    proxy.shape(traffic, owner="me")
    streams[1].write(b"held")
    await eventually(lambda: proxy.held["me", "down" if traffic.up else "up"] == 4)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(streams[0].read(1), 0.05)
    await proxy.heal()
    assert await streams[0].readexactly(4) == b"held"
    streams[1].close()


async def test_a_rule_of_another_owner_does_not_count(proxy: Proxy) -> None:
    proxy.shape(BLACKHOLE, owner="other")
    streams = await connected(proxy)
    assert await echoed(streams, b"free") == b"free"
    proxy.cut("other")
    assert await echoed(streams, b"still") == b"still"
    streams[1].close()


async def test_a_slow_way_takes_its_time_and_loses_nothing(proxy: Proxy) -> None:
    proxy.shape(Traffic(delay_s=0.01, bytes_per_s=100_000))
    streams, loop = await connected(proxy), asyncio.get_running_loop()
    began, data = loop.time(), bytes(range(250)) * 40
    assert await echoed(streams, data) == data
    assert loop.time() - began >= len(data) / 100_000  # at the least: sleeps are never shorter
    streams[1].close()


async def test_what_is_cut_is_reset_and_may_connect_again(proxy: Proxy) -> None:
    streams = await connected(proxy)
    await echoed(streams, b"a")
    proxy.cut("me")
    with pytest.raises(ConnectionResetError):
        await streams[0].read(1)
    again = await connected(proxy)
    assert await echoed(again, b"b") == b"b"
    for _, writer in (streams, again):
        writer.close()


async def test_who_is_refused_may_connect_to_the_same_port_when_it_is_healed(proxy: Proxy) -> None:
    port = proxy.port
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        await connected(proxy)
    await proxy.heal()
    assert proxy.port == port
    streams = await connected(proxy)
    assert await echoed(streams, b"back") == b"back"
    streams[1].close()
