"""The KV service answers with typed errors, offers nothing to another kind of reader, and expires leases on time."""

import asyncio

import pytest

from common.deadlines import Deadlines
from common.rpc.pb import kv_pb2, types_pb2
from kvtransfer.handle import KVHandle
from kvtransfer.holder import KVHolder
from kvtransfer.lease import ROUTER, LeaseTable
from kvtransfer.transports.shm import ShmHolder
from tests.support.kv_fakes import EPOCH, FINGERPRINT, LAYOUT, FakePool, until

LEASE_S = 30.0
READER, OTHER = 5, 6


class Stage:
    """A holder whose clock moves only by its own sleeps."""

    def __init__(self) -> None:
        self.now, self.freed, self.sleeps = 0.0, [], []
        self.pool = FakePool(2)
        self.freed_at: list[float] = []
        self.table = LeaseTable(lambda: self.now, Deadlines(lease_s=LEASE_S), EPOCH, self.give_back)
        self.service = KVHolder(
            self.table,
            fingerprint=FINGERPRINT,
            layout_id=LAYOUT.layout_id,
            transports=[ShmHolder(self.pool)],
            deadlines=Deadlines(lease_s=LEASE_S),
            clock=lambda: self.now,
            sleep=self.sleep,
        )

    def give_back(self, block_ids) -> None:
        self.freed.extend(block_ids)
        self.freed_at.append(self.now)

    async def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.sleeps.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


@pytest.fixture
def stage():
    stage = Stage()
    yield stage
    stage.table.close()
    stage.pool.close()
    assert stage.table.num_held == 0


async def connect(stage, **changes) -> kv_pb2.ConnectReply:
    fields = {"epoch": EPOCH, "fingerprint": FINGERPRINT, "layout_id": LAYOUT.layout_id}
    return await stage.service.Connect(kv_pb2.ConnectRequest(**(fields | changes)), None)


async def test_a_reader_of_the_same_kind_gets_the_offers(stage):
    reply = await connect(stage)
    assert not reply.HasField("error")
    assert [offer.name for offer in reply.offers] == ["shm"]
    assert dict(reply.offers[0].params) == ShmHolder(stage.pool).offer().params


@pytest.mark.parametrize(
    ("changes", "code", "field"),
    [
        ({"epoch": EPOCH + 1}, "epoch_mismatch", "epoch"),
        ({"epoch": 0}, "epoch_mismatch", "epoch"),
        ({"fingerprint": "model-b"}, "fingerprint_mismatch", "fingerprint"),
        ({"fingerprint": ""}, "fingerprint_mismatch", "fingerprint"),
        ({"layout_id": "v2"}, "fingerprint_mismatch", "layout_id"),
    ],
)
async def test_a_reader_of_another_kind_gets_no_offer(stage, changes, code, field):
    reply = await connect(stage, **changes)
    assert (reply.error.code, reply.error.field) == (code, field)
    assert not reply.offers


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, ""),
        ({"epoch": EPOCH + 1}, "epoch_mismatch"),
        ({"transport": "pigeon"}, "transport_unavailable"),
        ({"transport": ""}, "transport_unavailable"),
        ({"proof": bytes(32)}, "transport_unavailable"),
        ({"proof": b""}, "transport_unavailable"),
    ],
)
async def test_only_the_right_proof_is_accepted(stage, changes, code):
    fields = {"epoch": EPOCH, "transport": "shm", "proof": stage.pool.nonce}
    reply = await stage.service.Prove(kv_pb2.ProveRequest(**(fields | changes)), None)
    assert reply.error.code == code
    assert reply.HasField("error") == bool(code)


async def test_renew_and_release_carry_the_tables_answers_and_errors(stage):
    lease = stage.table.hold("s", [1], 16)

    def renew(reader, epoch=EPOCH):
        return stage.service.Renew(kv_pb2.RenewRequest(handle_id=lease.id, epoch=epoch, reader_id=reader), None)

    def release(reader, epoch=EPOCH):
        return stage.service.Release(kv_pb2.ReleaseRequest(handle_id=lease.id, epoch=epoch, reader_id=reader), None)

    assert (await renew(READER)).lease_s == LEASE_S
    assert (await renew(ROUTER)).lease_s == LEASE_S
    assert (await renew(OTHER)).error.code == "handle_taken"
    assert (await renew(READER, EPOCH + 1)).error.code == "epoch_mismatch"
    assert (await release(OTHER)).error.code == "handle_taken"
    assert (await release(READER, EPOCH + 1)).error.code == "epoch_mismatch"
    assert stage.freed == []
    for _ in range(2):
        reply = await release(READER)
        assert reply.held_until_now
        assert not reply.HasField("error")
    assert not (await release(ROUTER)).held_until_now
    assert (await renew(READER)).error.code == "kv_expired"
    assert stage.freed == [1]


def test_a_handle_says_all_that_a_reader_needs(stage):
    lease = stage.table.hold("s", [1, 0], 20)
    key = types_pb2.AttemptKey(request_id="r1", attempt=3)
    handle = KVHandle.from_proto(stage.service.handle(lease, address="127.0.0.1:9", key=key))
    assert (handle.id, handle.block_ids, handle.num_tokens) == (lease.id, (1, 0), 20)
    assert (handle.epoch, handle.fingerprint, handle.layout_id) == (EPOCH, FINGERPRINT, LAYOUT.layout_id)
    assert (handle.address, handle.request_id, handle.attempt) == ("127.0.0.1:9", "r1", 3)
    assert handle.lease_s == LEASE_S


async def test_leases_expire_at_their_end_even_those_begun_while_the_task_slept(stage):
    plans = {0.0: 1, 7.5: 2, 50.0: 3}  # time: block held then

    async def sleep(seconds: float) -> None:
        """Sleeps as long as asked, and holds what is planned meanwhile."""
        end = stage.now + seconds
        for at in [at for at in plans if stage.now <= at < end]:
            stage.now = at
            stage.table.hold("s", [plans.pop(at)], 16)
        stage.now = end
        await asyncio.sleep(0)

    stage.service._sleep = sleep
    task = asyncio.create_task(stage.service.run())
    await until(lambda: len(stage.freed) == 3)
    task.cancel()
    assert stage.freed == [1, 2, 3]
    assert stage.freed_at == [LEASE_S, 7.5 + LEASE_S, 50.0 + LEASE_S]


async def test_the_expiry_task_sleeps_exactly_until_the_next_end(stage):
    stage.table.hold("s", [1], 16)
    stage.now = 12.0
    stage.table.hold("s", [0], 16)
    task = asyncio.create_task(stage.service.run())
    await until(lambda: len(stage.sleeps) >= 3)
    task.cancel()
    assert stage.sleeps[:3] == [18.0, 12.0, LEASE_S]
    assert stage.freed == [1, 0]
