"""A server with the cluster's key serves nobody who hasn't proven it, on no method; and who has it calls as ever."""

import asyncio
import importlib
import pkgutil
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc

import common.rpc.pb
from common.cluster_key import ClusterKey
from common.deadlines import Deadlines
from common.rpc.channel import GrpcServer, open_channel
from common.rpc.handshake import HEADER, SESSION_S
from common.rpc.keyed_channel import KeyedChannel
from common.rpc.keyed_server import OPEN
from common.rpc.pb import cluster_pb2, cluster_pb2_grpc, kv_pb2
from common.rpc.security import Security
from tests.support.redis_tools import lines_of

FAST = Deadlines().scaled(0.1)
KEYED = Security(ClusterKey("the key of this cluster"))
OTHER = Security(ClusterKey("the key of another one"))
RENEW = "/kvrelay.v1.KV/Renew"


def all_methods() -> dict[str, tuple[Any, MethodDescriptor]]:
    """Every method of every service in common/rpc/pb, with its module: one added later is among them."""
    found = {}
    for info in pkgutil.iter_modules(common.rpc.pb.__path__):
        if not info.name.endswith("_pb2"):
            continue
        module = importlib.import_module(f"common.rpc.pb.{info.name}")
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                found[f"/{service.full_name}/{method.name}"] = (module, method)
    return found


METHODS = all_methods()
GUARDED = sorted(METHODS.keys() - set(OPEN))


class Everything(grpc.GenericRpcHandler):
    """Answers every method with one empty message, and says which was called."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        name = handler_call_details.method
        if name not in GUARDED:
            return None
        method = METHODS[name][1]

        async def stream(requests: Any, context: Any) -> None:
            self.called.append(name)
            if method.client_streaming:  # a call that ends while its message is on the way fails that write
                await anext(requests)
            await context.write(GetMessageClass(method.output_type)())

        async def unary(_: Any, context: Any) -> Any:
            self.called.append(name)
            return GetMessageClass(method.output_type)()

        kind = f"{_kind(method.client_streaming)}_{_kind(method.server_streaming)}_rpc_method_handler"
        return getattr(grpc, kind)(
            stream if method.server_streaming else unary,
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )


def _kind(streaming: bool) -> str:
    return "stream" if streaming else "unary"


@pytest.fixture
def services() -> Everything:
    return Everything()


@pytest.fixture
async def server(services: Everything) -> AsyncIterator[GrpcServer]:
    server = GrpcServer("127.0.0.1", 0, FAST, KEYED)
    server.server.add_generic_rpc_handlers([services])
    await server.start()
    await server.set_serving(True)
    yield server
    await server.stop()


async def call(channel: grpc.aio.Channel, name: str, *, writes: bool = True, **options: Any) -> Any:
    """One call with an empty message, as its stub would make it; the first answer. A stream may send nothing."""
    method = METHODS[name][1]
    kind = f"{_kind(method.client_streaming)}_{_kind(method.server_streaming)}"
    begin = getattr(channel, kind)(
        name,
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )
    request = GetMessageClass(method.input_type)()
    if not method.server_streaming:
        return await begin(request, timeout=5, **options)
    begun = begin(timeout=5, **options) if method.client_streaming else begin(request, timeout=5, **options)
    try:
        if method.client_streaming and writes:
            await begun.write(request)
        return await begun.read()
    finally:
        begun.cancel()


async def refusal(channel: grpc.aio.Channel, name: str = RENEW, **options: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, name, writes=False, **options)  # refused for its headers alone
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    return caught.value.details() or ""


def test_the_methods_are_those_that_matter() -> None:
    assert {RENEW, "/kvrelay.v1.Prefill/Relay", "/kvrelay.v1.Decode/Relay", "/kvrelay.v1.KV/Pull"} <= set(GUARDED)
    assert METHODS.keys() - set(GUARDED) == {"/kvrelay.v1.Cluster/Greet"}


@pytest.mark.parametrize("name", GUARDED)
async def test_only_who_has_the_key_is_served(server: GrpcServer, services: Everything, name: str) -> None:
    async with open_channel(server.address, FAST) as stranger, open_channel(server.address, FAST, OTHER) as another:
        assert await refusal(stranger, name) == "this worker asks for the cluster key"
        assert await refusal(stranger, name, metadata=((HEADER, b"x"),)) == "the proof is malformed"
        assert await refusal(another, name) == "the peer did not prove the cluster key"
    assert services.called == []
    async with open_channel(server.address, FAST, KEYED) as channel:
        for _ in range(2):
            assert await call(channel, name) == GetMessageClass(METHODS[name][1].output_type)()
    assert services.called == [name, name]


async def test_a_recorded_proof_opens_nothing_a_second_time(server: GrpcServer, services: Everything) -> None:
    async with open_channel(server.address, FAST, KEYED) as keyed, open_channel(server.address, FAST) as stranger:
        assert isinstance(keyed, KeyedChannel)
        recorded = await keyed.sign(RENEW)
        await call(stranger, RENEW, metadata=recorded)
        assert await refusal(stranger, RENEW, metadata=recorded) == "the proof was used before"
        other = await keyed.sign(RENEW)
        assert "the proof is wrong" in await refusal(stranger, "/kvrelay.v1.KV/Release", metadata=other)
    assert services.called == [RENEW]


async def test_health_is_open_to_all(server: GrpcServer) -> None:
    async with open_channel(server.address, FAST) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("nonce", [b"", bytes(31), bytes(2**20)])
async def test_a_greeting_without_a_nonce_is_refused(server: GrpcServer, nonce: bytes) -> None:
    async with open_channel(server.address, FAST) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster_pb2_grpc.ClusterStub(channel).Greet(cluster_pb2.Greeting(nonce=nonce), timeout=5)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_refusals_are_a_log_line_a_minute(server: GrpcServer, caplog: pytest.LogCaptureFixture) -> None:
    async with open_channel(server.address, FAST) as stranger:
        for name in GUARDED:
            await refusal(stranger, name)
    assert lines_of(caplog) == ["refused"]
    (values,) = (record.values for record in caplog.records if record.getMessage() == "refused")  # type: ignore[attr-defined]
    assert values["peer"].startswith("ipv4:127.0.0.1:")


async def test_a_listener_that_has_no_key_gets_no_call(caplog: pytest.LogCaptureFixture, services: Everything) -> None:
    server = GrpcServer("127.0.0.1", 0, FAST)
    server.server.add_generic_rpc_handlers([services])
    await server.start()
    async with open_channel(server.address, FAST, KEYED) as channel:
        for _ in range(2):
            assert await refusal(channel) == "the peer did not prove the cluster key"
    await server.stop()
    assert (services.called, lines_of(caplog)) == ([], ["no common cluster key"])


async def test_a_dialer_gives_a_fake_nothing_but_a_nonce() -> None:
    """A fake that answers the greeting with what it can make up."""
    heard: list[Any] = []

    class Fake(cluster_pb2_grpc.ClusterServicer):
        async def Greet(self, request: Any, context: Any) -> Any:
            heard.append(request)
            return cluster_pb2.Challenge(nonce=request.nonce, proof=request.nonce)

    server = GrpcServer("127.0.0.1", 0, FAST)
    cluster_pb2_grpc.add_ClusterServicer_to_server(Fake(), server.server)
    await server.start()
    async with open_channel(server.address, FAST, KEYED) as channel:
        await refusal(channel)
    await server.stop()
    assert [(len(one.nonce), one.ByteSize()) for one in heard] == [(32, 34)]


async def test_a_dialer_whose_session_is_forgotten_begins_another(server: GrpcServer) -> None:
    async with open_channel(server.address, FAST, KEYED) as channel:
        await call(channel, RENEW)
        assert server._keyed is not None
        server._keyed._verifier._proven.clear()
        assert "the session is over" in await refusal(channel)
        assert isinstance(await call(channel, RENEW), kv_pb2.RenewReply)


async def test_a_dialer_begins_another_session_when_the_first_is_old(
    server: GrpcServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_channel(server.address, FAST, KEYED) as channel:
        await call(channel, RENEW)
        now = channel._clock()  # type: ignore[attr-defined]
        monkeypatch.setattr(channel, "_clock", lambda: now + SESSION_S + 1)
        await call(channel, RENEW)
    assert server._keyed is not None
    assert server._keyed.num_sessions == 2


async def test_calls_that_begin_together_share_one_session(server: GrpcServer) -> None:
    async with open_channel(server.address, FAST, KEYED) as channel:
        await asyncio.gather(*(call(channel, name) for name in GUARDED * 3))
    assert server._keyed is not None
    assert server._keyed.num_sessions == 1


async def test_a_call_that_is_cancelled_before_it_begins_never_does(server: GrpcServer, services: Everything) -> None:
    async with open_channel(server.address, FAST, KEYED) as channel:
        begun = channel.stream_stream("/kvrelay.v1.Decode/Relay")()
        begun.cancel()
        with pytest.raises(asyncio.CancelledError):
            await begun.read()
        await call(channel, RENEW)
    assert services.called == [RENEW]
