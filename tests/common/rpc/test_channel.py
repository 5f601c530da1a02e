"""A server binds once, tells its health, stops cleanly, and a peer that hangs is noticed."""

import asyncio
import socket

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.deadlines import Deadlines
from common.errors import AddressInUse, ConfigError
from common.rpc.channel import (
    MAX_MESSAGE_BYTES,
    GrpcServer,
    channel_options,
    open_channel,
    server_options,
)

FAST = Deadlines().scaled(0.1)
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def server():
    server = GrpcServer("127.0.0.1", 0, FAST)
    await server.start()
    yield server
    await server.stop()


async def health(channel: grpc.aio.Channel) -> int:
    reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    return reply.status


async def test_any_free_port_is_bound_and_told(server):
    assert server.port > 0
    assert server.address == f"127.0.0.1:{server.port}"


async def test_a_server_may_bind_before_it_starts():
    server = GrpcServer("127.0.0.1", 0, FAST)
    server.bind()
    port = server.port
    assert port > 0
    await server.start()
    assert server.port == port
    async with open_channel(server.address, FAST) as channel:
        assert await health(channel) == NOT_SERVING
    await server.stop()


async def test_health_is_not_serving_until_told_and_again_when_told(server):
    async with open_channel(server.address, FAST) as channel:
        assert await health(channel) == NOT_SERVING
        await server.set_serving(True)
        assert await health(channel) == SERVING
        await server.set_serving(False)
        assert await health(channel) == NOT_SERVING


async def test_a_port_in_use_is_refused_whoever_has_it(server):
    with socket.create_server(("127.0.0.1", 0)) as other:
        for port in (server.port, other.getsockname()[1]):
            second = GrpcServer("127.0.0.1", port, FAST)
            with pytest.raises(AddressInUse) as caught:
                await second.start()
            assert caught.value.field == "port"
            assert str(port) in caught.value.message
            await second.stop()


async def test_a_port_is_free_again_after_stop():
    first = GrpcServer("127.0.0.1", 0, FAST)
    await first.start()
    await first.stop()
    second = GrpcServer("127.0.0.1", first.port, FAST)
    await second.start()
    assert second.port == first.port
    await second.stop()


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("no-such-host.invalid", 0),
        ("203.0.113.1", 0),
        ("127.0.0.1", 65536),
        ("127.0.0.1", -1),
        ("not a host", 1),
        ("", -5),
        ("a" * 70, 1),
    ],
)
async def test_an_impossible_address_is_a_config_error(host, port):
    server = GrpcServer(host, port, FAST)
    with pytest.raises(ConfigError):
        await server.start()
    await server.stop()


async def test_stop_says_not_serving_and_ends_a_stream_after_the_grace():
    server = GrpcServer("127.0.0.1", 0, FAST)
    await server.start()
    await server.set_serving(True)
    async with open_channel(server.address, FAST) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        stopping = asyncio.create_task(server.stop(0.2))
        assert (await asyncio.wait_for(watch.read(), 5)).status == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError):
            await asyncio.wait_for(watch.read(), 5)
        await asyncio.wait_for(stopping, 5)


async def test_a_message_as_long_as_the_limit_passes_and_a_longer_one_does_not(server):
    async with open_channel(server.address, FAST) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for size, code in [(5 * 2**20, "NOT_FOUND"), (MAX_MESSAGE_BYTES + 1, "RESOURCE_EXHAUSTED")]:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Check(health_pb2.HealthCheckRequest(service="x" * size), timeout=10)
            assert caught.value.code().name == code


async def test_a_peer_that_accepts_and_then_hangs_is_noticed():
    """The peer answers the connection's first frames, as a server does, and then nothing."""
    settings = bytes.fromhex("000000040000000000")  # an empty SETTINGS frame
    acknowledge = bytes.fromhex("000000040100000000")
    hung = asyncio.Event()

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(settings + acknowledge)
        while await reader.read(1024):
            hung.set()
        writer.close()

    listener = await asyncio.start_server(peer, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with listener, open_channel(f"127.0.0.1:{port}", FAST) as channel:
        channel.get_state(try_to_connect=True)
        await asyncio.wait_for(channel.channel_ready(), 5)
        assert hung.is_set()
        await asyncio.wait_for(channel.wait_for_state_change(grpc.ChannelConnectivity.READY), 5)


@pytest.mark.parametrize(("scale", "suspect_ms", "patience_ms"), [(1.0, 3000, 2000), (0.1, 300, 200), (1e-9, 1, 1)])
def test_a_hanging_peer_is_given_up_at_dead_s(scale, suspect_ms, patience_ms):
    deadlines = Deadlines().scaled(scale)
    for options in (dict(channel_options(deadlines)), dict(server_options(deadlines))):
        assert options["grpc.keepalive_time_ms"] == suspect_ms
        assert options["grpc.keepalive_timeout_ms"] == options["grpc.http2.ping_timeout_ms"] == patience_ms


@pytest.mark.parametrize("name", ["http_proxy", "https_proxy", "grpc_proxy"])
async def test_a_proxy_of_the_environment_is_not_for_calls_between_workers(name, server, monkeypatch):
    called = asyncio.Event()

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        called.set()
        writer.close()

    listener = await asyncio.start_server(proxy, "127.0.0.1", 0)
    monkeypatch.setenv(name, f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    async with listener, open_channel(server.address, FAST) as channel:
        assert await health(channel) == NOT_SERVING
    assert not called.is_set()
