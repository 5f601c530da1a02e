"""A reader takes nothing from a holder of another model, layout or life, and nothing is left of what it refused."""

from dataclasses import replace

import pytest

from common.errors import EpochMismatch, FingerprintMismatch, HandoverError, TransportUnavailable
from kvtransfer.reader import KVReader
from kvtransfer.transports import shm
from tests.support.kv_fakes import (
    EPOCH,
    FAST,
    FINGERPRINT,
    LAYOUT,
    FakePool,
    ManualClock,
    memfds_mapped,
    running_holder,
    until,
)

OTHER_LAYOUT = replace(LAYOUT, num_kv_heads=2, head_dim=32)  # as many bytes, in another order


def reader(pool: FakePool, **changes) -> KVReader:
    fields = {"layout": LAYOUT, "fingerprint": FINGERPRINT, "deadlines": FAST, "clock": ManualClock()}
    return KVReader(pool, **(fields | changes))


@pytest.mark.parametrize(
    ("reader_side", "handle_side", "error", "field"),
    [
        ({"fingerprint": "model-b"}, {}, FingerprintMismatch, "fingerprint"),
        ({"layout": OTHER_LAYOUT}, {}, FingerprintMismatch, "layout_id"),
        ({}, {"fingerprint": "model-b"}, FingerprintMismatch, "fingerprint"),
        ({"fingerprint": "model-b"}, {"fingerprint": "model-b"}, FingerprintMismatch, "fingerprint"),
        (
            {"layout": OTHER_LAYOUT},
            {"layout_id": OTHER_LAYOUT.layout_id},
            FingerprintMismatch,
            "layout_id",
        ),
        ({}, {"epoch": EPOCH + 1}, EpochMismatch, "epoch"),
        ({}, {"address": "127.0.0.1:1"}, HandoverError, None),
    ],
)
async def test_a_mismatch_is_refused_before_a_byte_and_nothing_is_left(reader_side, handle_side, error, field):
    pool = FakePool()
    before, mapped, reads = pool.blocks(), memfds_mapped(), reader(pool, **reader_side)
    async with running_holder() as holder:
        handle = replace(holder.hold(), **handle_side)
        with pytest.raises(error) as caught:
            async with reads.claimed(handle):
                pass
        assert caught.value.field == field
        assert "Renew" not in holder.service.calls  # the handle is still free for another reader
        assert memfds_mapped() == mapped + 1
        assert (reads.num_claims, reads.num_connections) == (0, 0)
    await reads.close()
    assert pool.blocks() == before
    pool.close()


async def test_memory_without_the_right_nonce_is_refused(monkeypatch):
    pool, mapped = FakePool(), memfds_mapped()
    reads = reader(pool)
    async with running_holder() as holder:
        holder.pool.memory.obj[31] ^= 1
        with pytest.raises(TransportUnavailable, match="proof is wrong"):
            async with reads.claimed(holder.hold()):
                pass
        assert memfds_mapped() == mapped + 1
    await reads.close()
    pool.close()


async def test_memory_that_cannot_be_reached_is_refused_with_the_reason(monkeypatch):
    pool = FakePool()
    reads = reader(pool)

    def other_host(pid: int, started: int, fd: int, size: int):
        raise TransportUnavailable("the holder's memory is not reachable here: no such process")

    monkeypatch.setattr(shm, "_map_memfd", other_host)
    async with running_holder() as holder:
        with pytest.raises(TransportUnavailable, match=r"shm: .*no such process"):
            async with reads.claimed(holder.hold()):
                pass
    await reads.close()
    pool.close()


async def test_one_reader_fetches_from_many_holders_at_once_over_one_connection_each():
    pool = FakePool()
    reads = reader(pool)
    async with running_holder() as first, running_holder() as second:
        for _ in range(2):
            async with reads.claimed(first.hold((1,))) as one, reads.claimed(second.hold((1,))) as two:
                assert (reads.num_claims, reads.num_connections) == (2, 2)
                await two.pull([(1, 2)])
                await one.pull([(1, 1)])
                await two.confirm()
                await one.confirm()
            assert (pool.block(1), pool.block(2)) == (first.pool.block(1), second.pool.block(1))
        assert first.service.calls == {"Connect": 1, "Prove": 1, "Renew": 2, "Release": 2}
        await reads.close()
    assert (reads.num_claims, reads.num_connections) == (0, 0)
    pool.close()


async def test_a_holder_that_ends_during_a_claim_is_dropped():
    pool = FakePool()
    reads = reader(pool)
    async with running_holder() as holder, reads.claimed(holder.hold()) as claim:
        await claim.pull([(3, 3)])
        await holder.server.stop()
        await until(lambda: reads.num_connections == 0)
    await reads.close()
    pool.close()
