"""One proven connection for each life of a holder, shared by all, and dropped when the holder goes."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from common.errors import Draining, EpochMismatch, FingerprintMismatch, HandoverError, TransportUnavailable
from common.rpc.channel import open_channel
from kvtransfer.connection import Connections
from kvtransfer.transports import shm
from kvtransfer.transports.shm import TRANSPORT
from tests.support.kv_fakes import (
    EPOCH,
    FAST,
    FINGERPRINT,
    LAYOUT,
    GateHolder,
    gate_transport,
    memfds_mapped,
    running_holder,
    until,
)


def connections(executor, **changes) -> Connections:
    fields = {
        "fingerprint": FINGERPRINT,
        "layout_id": LAYOUT.layout_id,
        "deadlines": FAST,
        "transports": [TRANSPORT],
        "executor": executor,
        "channel": open_channel,
    }
    return Connections(**(fields | changes))


@pytest.fixture
def executor():
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture
async def pool(executor):
    pool = connections(executor)
    yield pool
    await pool.close()
    assert pool.num_open == 0


async def test_users_at_the_same_time_share_one_handshake(pool):
    async with running_holder() as holder:

        async def use():
            async with pool.use(holder.server.address, EPOCH) as connection:
                return connection

        first, *others = await asyncio.gather(*(use() for _ in range(5)))
        assert all(connection is first for connection in [*others, await use()])
        assert holder.service.calls == {"Connect": 1, "Prove": 1}
        assert first.transport_name == "shm"


async def test_a_cancelled_user_does_not_break_the_handshake_of_another(pool):
    async with running_holder() as holder:

        async def use():
            async with pool.use(holder.server.address, EPOCH):
                pass

        users = [asyncio.create_task(use()) for _ in range(2)]
        await asyncio.sleep(0)
        users[0].cancel()
        await users[1]
        assert users[0].cancelled()
        assert holder.service.calls["Connect"] == 1


@pytest.mark.parametrize(
    ("changes", "epoch", "error"),
    [
        ({"fingerprint": "model-b"}, EPOCH, FingerprintMismatch),
        ({"layout_id": "v2"}, EPOCH, FingerprintMismatch),
        ({}, EPOCH + 1, EpochMismatch),
        ({"transports": []}, EPOCH, TransportUnavailable),
    ],
)
async def test_a_failed_handshake_maps_nothing_and_is_tried_anew(executor, changes, epoch, error):
    pool, before = connections(executor, **changes), memfds_mapped()
    async with running_holder() as holder:
        for attempt in (1, 2):
            with pytest.raises(error):
                async with pool.use(holder.server.address, epoch):
                    pass
            assert holder.service.calls == {"Connect": attempt}
            assert pool.num_open == 0
        assert memfds_mapped() == before + 1  # the holder's own
    await pool.close()


async def test_a_wrong_proof_is_refused_and_its_map_closed(pool, monkeypatch):
    before = memfds_mapped()
    async with running_holder() as holder:
        monkeypatch.setattr(shm.ShmHolder, "verify", lambda self, proof: False)
        with pytest.raises(TransportUnavailable, match="proof is wrong"):
            async with pool.use(holder.server.address, EPOCH):
                pass
        assert memfds_mapped() == before + 1


async def test_the_readers_order_decides_and_what_cannot_be_proven_is_passed_over(executor):
    gate, log = asyncio.Event(), []
    bad, good = gate_transport(gate, log, proof=b"wrong"), gate_transport(gate, log)
    async with running_holder(transports=[GateHolder()]) as holder:
        for transports, expected in [([TRANSPORT, bad, good], ["open", "close", "open"]), ([good, bad], ["open"])]:
            log.clear()
            pool = connections(executor, transports=transports)
            async with pool.use(holder.server.address, EPOCH) as connection:
                assert connection.transport_name == "gate"
                assert log == expected
            await pool.close()
            assert log == [*expected, "close"]


async def test_nobody_there_is_a_handover_error_and_so_is_a_handshake_that_hangs(pool):
    with pytest.raises(HandoverError):
        async with pool.use("127.0.0.1:1", EPOCH):
            pass
    async with running_holder() as holder:
        for call in ("Connect", "Prove"):
            holder.service.hanging = {call}
            with pytest.raises(HandoverError):
                async with pool.use(holder.server.address, EPOCH):
                    pass
    assert pool.num_open == 0


async def test_a_dead_holder_is_dropped_and_its_memory_let_go(pool):
    before = memfds_mapped()
    async with running_holder() as holder:
        async with pool.use(holder.server.address, EPOCH):
            pass
        assert memfds_mapped() == before + 2
    await until(lambda: pool.num_open == 0)
    await until(lambda: memfds_mapped() == before)


async def test_a_connection_in_use_is_closed_by_its_last_user(pool):
    before = memfds_mapped()
    async with running_holder() as holder:
        async with pool.use(holder.server.address, EPOCH), pool.use(holder.server.address, EPOCH) as connection:
            await holder.server.stop()
            await until(lambda: pool.num_open == 0)
            assert connection.retired
            assert memfds_mapped() == before + 2
        await until(lambda: memfds_mapped() == before + 1)


async def test_a_new_epoch_at_the_address_drops_the_old_connection(pool):
    async def ask_old(holder) -> None:
        async with pool.use(holder.server.address, EPOCH) as connection:
            assert connection is old  # if it isn't noticed yet
            await connection.client.renew(bytes(16), EPOCH, 5)

    async with running_holder() as holder:
        port = holder.server.port
        async with pool.use(holder.server.address, EPOCH) as old:
            pass
    async with running_holder(epoch=EPOCH + 1, port=port) as holder:
        with pytest.raises(HandoverError):  # the old life is over
            await ask_old(holder)
        async with pool.use(holder.server.address, EPOCH + 1) as new:
            assert await new.client.connect(EPOCH + 1, FINGERPRINT, LAYOUT.layout_id)
        await until(lambda: old.retired)
        assert pool.num_open == 1


async def test_a_new_epoch_drops_the_old_connection_even_if_its_channel_holds(pool):
    async with running_holder() as holder, pool.use(holder.server.address, EPOCH) as old:
        holder.table.epoch = EPOCH + 1
        async with pool.use(holder.server.address, EPOCH + 1) as new:
            assert old.retired
            assert not new.retired
        assert pool.num_open == 1


async def test_an_old_handle_does_not_drop_the_connection_of_the_new_life(pool):
    async with running_holder(epoch=EPOCH + 1) as holder:
        async with pool.use(holder.server.address, EPOCH + 1) as new:
            pass
        with pytest.raises(EpochMismatch):
            async with pool.use(holder.server.address, EPOCH):
                pass
        async with pool.use(holder.server.address, EPOCH + 1) as again:
            assert again is new


async def test_closing_waits_for_background_work_and_refuses_new_users(executor):
    pool, done = connections(executor), []

    async def work() -> None:
        await asyncio.sleep(0.05)
        done.append(True)

    async with running_holder() as holder:
        async with pool.use(holder.server.address, EPOCH) as connection:
            pool.finish(connection, work())
        await pool.close()
        assert done == [True]
        assert pool.num_open == 0
        with pytest.raises(Draining):
            async with pool.use(holder.server.address, EPOCH):
                pass


async def test_closing_does_not_wait_for_a_user(executor):
    pool, before = connections(executor), memfds_mapped()
    async with running_holder() as holder:
        async with pool.use(holder.server.address, EPOCH) as connection:
            await asyncio.wait_for(pool.close(), 5)
            assert await connection.client.connect(EPOCH, FINGERPRINT, LAYOUT.layout_id)
        await until(lambda: memfds_mapped() == before + 1)
