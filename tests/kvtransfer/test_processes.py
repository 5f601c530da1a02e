"""Between two real processes a hand-over arrives byte for byte, and a killed holder costs its copy and nothing more."""

import asyncio
import time

import pytest

from common.errors import EpochMismatch, HandoverError, KVExpired
from kvtransfer.handle import KVHandle
from kvtransfer.reader import KVReader
from tests.support.kv_fakes import EPOCH, FAST, FINGERPRINT, LAYOUT, FakePool, memfds_mapped, until
from tests.support.kv_processes import PATIENCE_S, HolderProcess, digest, holder_process

pytestmark = pytest.mark.slow

PAIRS = [(3, 0), (4, 1), (9, 5)]


@pytest.fixture
async def pool():
    mapped = memfds_mapped()
    pool = FakePool()
    yield pool
    pool.close()
    assert memfds_mapped() == mapped


@pytest.fixture
async def reader(pool):
    reader = KVReader(pool, LAYOUT, FINGERPRINT, FAST, time.monotonic)
    yield reader
    await reader.close()
    assert (reader.num_claims, reader.num_connections) == (0, 0)


def uint8():
    import torch

    return torch.uint8


async def test_blocks_arrive_byte_for_byte_and_the_holder_is_free_again(reader, pool):
    async with holder_process() as holder:
        for _ in range(2):
            async with reader.claimed(await holder.hold()) as claim:
                assert (await holder.ask("state"))["held_blocks"] == 3
                await claim.pull(PAIRS)
                await claim.confirm()
            for source, target in PAIRS:
                assert digest(pool.block(target)) == holder.digests[source]
        assert await holder.ask("state") == {"held": 0, "held_blocks": 0, "freed": [3, 4, 9] * 2}


async def test_the_engines_own_pools_hand_over_byte_for_byte():
    from common.engine.kv_pool import HostKVPool  # imports torch

    pool = HostKVPool(LAYOUT, 16, shared=False)
    reader = KVReader(pool, LAYOUT, FINGERPRINT, FAST, time.monotonic)
    size = LAYOUT.block_bytes
    async with holder_process(kind="shared") as holder:
        async with reader.claimed(await holder.hold()) as claim:
            assert (await claim.pull(PAIRS)).bytes == 3 * size
            await claim.confirm()
        assert (await holder.ask("state"))["held"] == 0
        for source, target in PAIRS:
            assert digest(bytes(pool.blocks[target].view(-1).view(dtype=uint8()).numpy())) == holder.digests[source]
    await reader.close()
    pool.close()


async def test_a_lease_is_kept_alive_past_its_length(reader, pool):
    async with holder_process(lease_s=0.9) as holder:
        unclaimed = await holder.hold(1, 2)
        async with reader.claimed(await holder.hold()) as claim:
            while (await holder.ask("state"))["freed"] != [1, 2]:  # the lease that nobody keeps is over
                await asyncio.sleep(0.02)
            await claim.pull(PAIRS)
            await claim.confirm()
        with pytest.raises(KVExpired):
            async with reader.claimed(unclaimed):
                pass


@pytest.mark.parametrize("when", ["before the claim", "before the pull", "after the pull"])
async def test_a_killed_holder_makes_the_copy_void_and_its_memory_is_let_go(reader, pool, when):
    mapped = memfds_mapped()

    async def hand_over(holder: HolderProcess, handle: KVHandle) -> None:
        if when == "before the claim":
            await holder.kill()
        async with reader.claimed(handle) as claim:
            if when == "before the pull":
                await holder.kill()
            await claim.pull(PAIRS)
            if when == "after the pull":
                await holder.kill()
            await claim.confirm()

    async with holder_process() as holder:
        handle = await holder.hold()
        with pytest.raises(HandoverError):
            await hand_over(holder, handle)
    await until(lambda: (reader.num_connections, memfds_mapped()) == (0, mapped))


async def test_an_idle_connection_to_a_killed_holder_does_not_keep_its_memory(reader):
    mapped = memfds_mapped()
    async with holder_process() as holder:
        async with reader.claimed(await holder.hold()) as claim:
            await claim.confirm()
        assert (reader.num_connections, memfds_mapped()) == (1, mapped + 1)
        await holder.kill()
        await until(lambda: (reader.num_connections, memfds_mapped()) == (0, mapped))


async def test_a_frozen_holder_is_noticed_by_the_deadline(reader):
    async with holder_process() as holder:
        handle = await holder.hold()
        async with reader.claimed(handle) as claim:
            await claim.pull(PAIRS)
            holder.freeze()
            with pytest.raises(KVExpired):
                await claim.confirm()
        await until(lambda: reader.num_connections == 0)


async def test_a_new_life_at_the_same_address_does_not_honour_the_old_handle(reader, pool):
    async with holder_process() as holder:
        old = await holder.hold()
        async with reader.claimed(await holder.hold()) as claim:
            await claim.confirm()
        await holder.kill()
        port = holder.port
    async with holder_process(port=port, epoch=EPOCH + 1) as holder:
        with pytest.raises(HandoverError):
            async with reader.claimed(old):
                pass
        with pytest.raises(EpochMismatch):
            async with reader.claimed(old):
                pass
        async with reader.claimed(await holder.hold()) as claim:
            await claim.pull(PAIRS)
            await claim.confirm()
        assert digest(pool.block(0)) == holder.digests[3]
        assert (await holder.ask("state"))["held"] == 0


async def test_a_cancelled_hand_over_frees_the_holder_at_once(reader):
    async with holder_process() as holder:
        handle, claimed = await holder.hold(), asyncio.Event()

        async def wait_for_blocks() -> None:
            async with reader.claimed(handle):
                claimed.set()
                await asyncio.sleep(60)

        task = asyncio.create_task(wait_for_blocks())
        await asyncio.wait_for(claimed.wait(), PATIENCE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await reader.close()
        assert await holder.ask("state") == {"held": 0, "held_blocks": 0, "freed": [3, 4, 9]}


async def test_the_holder_is_not_asked_for_blocks_that_are_not_the_handles(reader, pool):
    before = pool.blocks()
    async with holder_process() as holder, reader.claimed(await holder.hold()) as claim:
        with pytest.raises(HandoverError):
            await claim.pull([(5, 0)])
    assert pool.blocks() == before
