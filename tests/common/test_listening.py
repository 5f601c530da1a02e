"""Whatever form --host has, HTTP and gRPC serve all of its addresses on one port, or the start says why not."""

import socket
from contextlib import ExitStack

import aiohttp
import pytest
from aiohttp import web
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.address import join_address
from common.deadlines import Deadlines
from common.errors import AddressInUse, ConfigError
from common.listening import check_bindable, listen
from common.rpc.channel import GrpcServer, open_channel
from tests.support.ipv6 import ipv6

FORMS = [
    pytest.param("127.0.0.1", ["127.0.0.1", "localhost"], id="IPv4"),
    pytest.param("0.0.0.0", ["127.0.0.1"], id="any IPv4"),
    pytest.param("localhost", ["localhost", "127.0.0.1"], id="name"),
    pytest.param("::1", ["::1", "[::1]"], id="IPv6", marks=ipv6),
    pytest.param("[::1]", ["::1"], id="brackets", marks=ipv6),
    pytest.param("::", ["127.0.0.1", "::1", "localhost"], id="any", marks=ipv6),
    pytest.param("[::]", ["127.0.0.1", "::1"], id="any, in brackets", marks=ipv6),
]


@pytest.mark.parametrize(("host", "callable_as"), FORMS)
async def test_http_is_reached(host: str, callable_as: list[str]) -> None:
    runner = web.AppRunner(web.Application())
    await runner.setup()
    for one in listen(host, 0):
        await web.SockSite(runner, one).start()
    try:
        async with aiohttp.ClientSession() as session:
            for name in callable_as:
                async with session.get(f"http://{join_address(name, runner.addresses[0][1])}/") as reply:
                    assert reply.status == 404
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(("host", "callable_as"), FORMS)
async def test_grpc_is_reached(host: str, callable_as: list[str]) -> None:
    server = GrpcServer(host, 0, Deadlines())
    await server.start()
    try:
        for name in callable_as:
            async with open_channel(join_address(name, server.port), Deadlines()) as channel:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    finally:
        await server.stop()


@pytest.mark.parametrize(
    "host",
    [
        "",
        "[127.0.0.1]",
        "[localhost]",
        "127.0.0.1:80",
        "10.0.0.300",
        "203.0.113.1",
        "::ffff:127.0.0.1",
        "no-such-host.invalid",
    ],
)
def test_a_host_that_cant_be_bound_is_refused_by_its_flag(host: str) -> None:
    for refuse in (listen, check_bindable):
        with pytest.raises(ConfigError, match="--host") as caught:
            refuse(host, 0)
        assert caught.value.field == "host"


def test_a_port_in_use_is_refused_by_its_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(AddressInUse, match=f"--metrics-port: can't listen on 127.0.0.1:{port}") as caught:
            listen("127.0.0.1", port, flag="metrics-port")
    assert caught.value.field == "metrics_port"


def test_several_addresses_of_a_host_get_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first choice is taken on the second address: another one is found, and nothing is left open."""
    looked_up = socket.getaddrinfo

    def two_addresses(host: str, port: int, **options: object) -> list[tuple[object, ...]]:
        if host != "two.hosts":
            return looked_up(host, port, **options)  # type: ignore[arg-type, return-value]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in ("127.0.0.1", "127.0.0.2")]

    monkeypatch.setattr(socket, "getaddrinfo", two_addresses)
    with ExitStack() as stack:
        sockets = [stack.enter_context(one) for one in listen("two.hosts", 0)]
        names = [one.getsockname() for one in sockets]
        assert [ip for ip, _ in names] == ["127.0.0.1", "127.0.0.2"]
        assert len({port for _, port in names}) == 1
        with pytest.raises(AddressInUse):
            listen("127.0.0.2", names[0][1])
