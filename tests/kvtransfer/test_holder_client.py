"""Calls to a holder are bounded, raise what the holder answered, and repeat a release whose answer got lost."""

import grpc
import pytest

from common.errors import FingerprintMismatch, HandleTaken, HandoverError, KVExpired, KVRelayError, WorkerLost
from common.rpc.channel import GrpcServer, open_channel
from common.rpc.pb import kv_pb2, kv_pb2_grpc, types_pb2
from kvtransfer.holder_client import HolderClient
from kvtransfer.lease import ROUTER
from tests.support.kv_fakes import EPOCH, FAST, FINGERPRINT, LAYOUT, running_holder


@pytest.fixture
async def holder():
    async with running_holder() as holder:
        yield holder


@pytest.fixture
async def client(holder):
    async with open_channel(holder.server.address, FAST) as channel:
        yield HolderClient(channel, holder.server.address, FAST)


async def test_the_router_renews_and_releases_without_a_connection_of_its_own(holder, client):
    handle = holder.hold()
    assert await client.renew(handle.id, handle.epoch, ROUTER) == FAST.lease_s
    assert await client.release(handle.id, handle.epoch, ROUTER)
    assert holder.freed == [3, 4, 9]


async def test_what_the_holder_refuses_is_raised_as_the_same_class(holder, client):
    handle = holder.hold()
    await client.renew(handle.id, EPOCH, 5)
    with pytest.raises(HandleTaken):
        await client.renew(handle.id, EPOCH, 6)
    with pytest.raises(HandleTaken):
        await client.release(handle.id, EPOCH, 6)
    with pytest.raises(KVExpired):
        await client.renew(b"?", EPOCH, 5)
    with pytest.raises(FingerprintMismatch):
        await client.connect(EPOCH, "model-b", LAYOUT.layout_id)
    assert [offer.name for offer in await client.connect(EPOCH, FINGERPRINT, LAYOUT.layout_id)] == ["shm"]


async def test_a_holder_that_does_not_answer_is_lost_after_the_deadline(holder, client):
    holder.service.hanging.add("Renew")
    with pytest.raises(WorkerLost, match="Renew failed: DEADLINE_EXCEEDED"):
        await client.renew(holder.hold().id, EPOCH, 5)


async def test_nobody_at_the_address_is_a_lost_worker():
    async with open_channel("127.0.0.1:1", FAST) as channel:
        client = HolderClient(channel, "127.0.0.1:1", FAST)
        with pytest.raises(WorkerLost, match=r"127\.0\.0\.1:1"):
            await client.release(bytes(16), EPOCH, 5)


async def test_a_closed_channel_is_a_lost_worker(holder):
    """As when the router has dropped the holder while a request still has a handle of it."""
    channel = open_channel(holder.server.address, FAST)
    client = HolderClient(channel, holder.server.address, FAST)
    await channel.close()
    with pytest.raises(WorkerLost, match="closed"):
        await client.renew(holder.hold().id, EPOCH, ROUTER)


class ScriptedHolder(kv_pb2_grpc.KVServicer):
    """Answers Release from a script; None: the answer gets lost."""

    def __init__(self, *script: kv_pb2.ReleaseReply | None) -> None:
        self.script = list(script)

    async def Release(self, request, context):
        reply = self.script.pop(0)
        if reply is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "lost")
        return reply

    async def Renew(self, request, context):
        return kv_pb2.RenewReply()


def refused(code: str) -> kv_pb2.ReleaseReply:
    return kv_pb2.ReleaseReply(error=types_pb2.Error(code=code, message="no"))


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        ([kv_pb2.ReleaseReply(held_until_now=True)], True),
        ([None, kv_pb2.ReleaseReply(held_until_now=True)], True),
        ([None, kv_pb2.ReleaseReply(held_until_now=False)], False),
        ([None, None], WorkerLost),
        ([None, refused("kv_expired")], KVExpired),
        ([refused("handle_taken")], HandleTaken),
        ([refused("of_the_future")], KVRelayError),
    ],
)
async def test_a_release_is_repeated_once_if_its_answer_is_lost(script, outcome):
    service, server = ScriptedHolder(*script), GrpcServer("127.0.0.1", 0, FAST)
    kv_pb2_grpc.add_KVServicer_to_server(service, server.server)
    await server.start()
    try:
        async with open_channel(server.address, FAST) as channel:
            client = HolderClient(channel, server.address, FAST)
            if isinstance(outcome, bool):
                assert await client.release(bytes(16), EPOCH, 5) is outcome
            else:
                with pytest.raises(outcome):
                    await client.release(bytes(16), EPOCH, 5)
            assert service.script == []
            with pytest.raises(HandoverError) as caught:
                await client.renew(bytes(16), EPOCH, 5)  # a lease of no seconds can't be renewed every third of it
            assert caught.value.field == "lease_s"
    finally:
        await server.stop()
