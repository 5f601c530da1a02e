"""Proves that no command waits for ever, that a bad start is one clear line, and that no password is ever shown."""

import asyncio
import os
import signal
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest
import uvloop
from redis.asyncio import Redis
from redis.exceptions import ConnectionError, RedisError

from common.discovery.redis_client import Outage, connect, endpoint_of, raise_if_cancelled
from common.errors import ConfigError, RedisUnreachable, StartupError
from tests.support.ipv6 import ipv6
from tests.support.redis_process import RedisServer
from tests.support.redis_tools import QUICK, lines_of

IMPATIENT = replace(QUICK, connect_s=1.0, rpc_s=1.0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_connected_client_works(redis: Redis) -> None:
    assert await redis.set("key", b"\x00\xff")
    assert await redis.get("key") == b"\x00\xff"


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
async def test_unreachable_redis_is_one_line_without_its_password(scheme: str) -> None:
    port = free_port()
    with pytest.raises(RedisUnreachable) as caught:
        await connect(f"{scheme}://user:s3cret@127.0.0.1:{port}/1", QUICK)
    assert f"{scheme}://127.0.0.1:{port}/1" in caught.value.message
    assert "\n" not in caught.value.message
    assert "s3cret" not in caught.value.message
    assert "user" not in caught.value.message
    assert caught.value.field == "redis_url"


async def test_missing_unix_socket_is_one_line_without_its_password(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    with pytest.raises(RedisUnreachable) as caught:
        await connect(f"unix://user@{path}?password=s3cret", QUICK)
    assert f"no usable Redis at unix://{path}: " in caught.value.message
    assert "s3cret" not in caught.value.message


@ipv6
async def test_a_redis_is_reached_over_ipv6_and_named_in_brackets() -> None:
    with RedisServer(options=["--bind", "127.0.0.1", "::1"]) as server:
        url = server.url.replace("127.0.0.1", "[::1]")
        client = await connect(url.replace("//", "//:@"), QUICK)
        assert await client.ping()
        await client.aclose()
        assert endpoint_of(url) == url


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("redis://", "redis://localhost:6379"),
        ("redis://h", "redis://h:6379"),
        ("rediss://u:p@h:1/2", "rediss://h:1/2"),
        ("redis://:a@b@h/0", "redis://h:6379/0"),
    ],
)
def test_what_is_left_out_of_a_url_has_its_default(url: str, endpoint: str) -> None:
    assert endpoint_of(url) == endpoint


async def test_wrong_password_is_not_shown(own_redis_server: RedisServer) -> None:
    client = await connect(own_redis_server.url, QUICK)
    await client.config_set("requirepass", "the right one")
    await client.aclose()
    with pytest.raises(RedisUnreachable) as caught:
        await connect(own_redis_server.url.replace("//", "//:s3cret@"), QUICK)
    assert "s3cret" not in caught.value.message
    right = await connect(own_redis_server.url.replace("//", f"//:{quote('the right one')}@"), QUICK)
    await right.aclose()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:6379",
        "http://127.0.0.1:6379/0",
        "redis://127.0.0.1:99999/0",
        "redis://127.0.0.1:x/0",
        "redis://127.0.0.1:6379/one",
        "redis://[::1/0",
        "redis://fd00::1:6379/0",
        "redis://[10.0.0.5]:6379/0",
        "redis://10.0.0.300:6379/0",
        "redis://host:0/0",
        "unix://",
        "redis://:s3cret/t@127.0.0.1:6379/0",
        "unix://:1/s3cret@/tmp/redis.sock",
        "unix://:1#s3cret@/tmp/redis.sock",
        "redis://:1/s3cret@127.0.0.1:6379/0",
        "redis://:1#s3cret@127.0.0.1:6379/0",
        "redis://:1?s3cret@127.0.0.1:6379/0",
        "redis://:s3cret@127.0.0.1:6379/0?socket_timeout=s3cret",
        "redis://:s3cret@127.0.0.1:6379/0?s3cret=1",
    ],
)
async def test_bad_url_is_refused_without_being_quoted(url: str) -> None:
    with pytest.raises(StartupError) as caught:
        await connect(url, QUICK)
    assert isinstance(caught.value, ConfigError)
    assert caught.value.field == "redis_url"
    assert "s3cret" not in caught.value.message


async def test_port_without_redis_is_one_line() -> None:
    async def answer_nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer_nonsense, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        with pytest.raises(RedisUnreachable) as caught:
            await connect(f"redis://127.0.0.1:{port}", QUICK)
    assert "\n" not in caught.value.message


async def test_silent_port_ends_at_the_deadline() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(RedisUnreachable):
            await connect(f"redis://127.0.0.1:{silent.getsockname()[1]}", IMPATIENT)


@pytest.mark.parametrize(
    ("version", "accepted"), [("5.0.7", False), ("6.0.16", False), ("6.2.0", True), ("7.4.1", True)]
)
async def test_redis_before_6_2_is_refused(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, version: str, accepted: bool
) -> None:
    async def info(self: Redis, section: str) -> dict[str, str]:
        return {"redis_version": version}

    monkeypatch.setattr(Redis, "info", info)
    if accepted:
        await (await connect(redis_server.url, QUICK)).aclose()
    else:
        with pytest.raises(RedisUnreachable, match=f"version {version} is too old"):
            await connect(redis_server.url, QUICK)


async def test_command_to_a_frozen_redis_ends_at_its_deadline(own_redis_server: RedisServer) -> None:
    client = await connect(own_redis_server.url, IMPATIENT)
    assert own_redis_server.pid is not None
    os.kill(own_redis_server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(RedisUnreachable), Outage().noticed("test"):
            await client.get("key")
    finally:
        os.kill(own_redis_server.pid, signal.SIGCONT)
        await client.aclose()


def test_outage_is_logged_once_when_it_begins_and_once_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage()

    def fail(part: str, error: Exception) -> None:
        with pytest.raises(RedisUnreachable), outage.noticed(part):
            raise error

    def work(part: str) -> None:
        with outage.noticed(part):
            pass

    work("one")
    assert lines_of(caplog) == []
    fail("one", ConnectionError("refused"))
    fail("two", RedisError("frozen"))
    fail("one", OSError("broken"))
    assert outage.active
    work("one")
    assert outage.active
    work("two")
    work("two")
    assert not outage.active
    assert lines_of(caplog) == ["redis is gone, going on without", "redis is back"]


async def test_loop_ends_though_its_command_swallows_the_cancellation() -> None:
    started = asyncio.Event()

    async def loop() -> None:
        while True:
            raise_if_cancelled()
            started.set()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    task = asyncio.create_task(loop())
    await started.wait()
    task.cancel()
    await asyncio.wait([task], timeout=20)
    assert task.cancelled()


@pytest.mark.parametrize("error", [ZeroDivisionError(), RuntimeError("a defect of ours")])
def test_outage_lets_other_errors_through(error: Exception) -> None:
    outage = Outage()
    with pytest.raises(type(error)), outage.noticed("test"):
        raise error
    assert not outage.active


def test_connections_reset_by_the_network_are_an_outage(redis_server: RedisServer) -> None:
    """With the roles' event loop, which has an error of its own for them; the client then connects again."""

    async def main() -> None:
        client = await connect(redis_server.url, QUICK)
        try:
            for _ in range(3):
                connection = await client.connection_pool.get_connection()
                connection._writer.transport.abort()
                await client.connection_pool.release(connection)
                with pytest.raises(RedisUnreachable), Outage().noticed("test"):
                    await connection.send_command("PING")
                with Outage().noticed("test"):
                    assert await client.ping()
        finally:
            await client.aclose()

    uvloop.run(main())
