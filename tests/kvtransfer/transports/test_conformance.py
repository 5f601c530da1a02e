"""Every transport moves exactly the blocks asked for from another process, and whatever fails, no copy is believed."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import pytest_asyncio

from common.deadlines import Deadlines
from common.errors import HandoverError, KVExpired
from common.rpc.channel import open_channel
from kvtransfer.reader import KVReader
from kvtransfer.transport import MODULES, Ticket, Transport, choose
from tests.faults.proxy import Proxy
from tests.support.kv_fakes import FAST, FINGERPRINT, LAYOUT, BlockedCopy, FakePool, held_back, until
from tests.support.kv_processes import PATIENCE_S, HolderProcess, digest, holder_process

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

Pairs = list[tuple[int, int]]
SHAPES = {"small": (1024, 8192), "odd": (700, 5003), "larger than a frame": (4, 5 * 2**19 + 1)}  # blocks, bytes
PATIENT = Deadlines()


def scattered(n: int) -> Pairs:
    sources, targets = (random.Random(seed).sample(range(n), n // 2) for seed in (1, 2))
    return list(zip(sources, targets, strict=True))


PAIRS: dict[str, Callable[[int], Pairs]] = {
    "contiguous": lambda n: [(i, i - 1) for i in range(1, n)],
    "scattered": scattered,
    "reversed": lambda n: [(i, n - 1 - i) for i in range(n)],
    "single": lambda n: [(n - 1, 0)],
    "none": lambda n: [],
    "all": lambda n: [(i, i) for i in range(n)],
    "one several times": lambda n: [(2, 0), (2, 3), (2, 1)],
}


@pytest.fixture(scope="module", params=list(MODULES))
def transport(request) -> Transport:
    [transport] = choose(request.param)
    return transport


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(SHAPES))
async def shaped(request, transport) -> AsyncIterator[tuple[HolderProcess, int, int]]:
    num_blocks, block_bytes = SHAPES[request.param]
    async with patient_holder(transport, num_blocks=num_blocks, block_bytes=block_bytes) as holder:
        yield holder, num_blocks, block_bytes


@pytest_asyncio.fixture(loop_scope="module")
async def holder(transport) -> AsyncIterator[HolderProcess]:
    """Of a pool that no transport copies at once."""
    async with patient_holder(transport) as holder:
        yield holder


def patient_holder(transport: Transport, **options):
    num_blocks, block_bytes = SHAPES["small"]
    defaults = {"num_blocks": num_blocks, "block_bytes": block_bytes, "scale": 1.0, "lease_s": PATIENT.lease_s}
    return holder_process(transport=transport.name, **(defaults | options))


@asynccontextmanager
async def reading(transport: Transport, shape: tuple[int, int] = SHAPES["small"], deadlines: Deadlines = PATIENT):
    """A reader with its pool; ends by proving that no claim and no connection is left."""
    pool = FakePool(*shape)
    reader = KVReader(pool, LAYOUT, FINGERPRINT, deadlines, asyncio.get_running_loop().time, transports=[transport])
    try:
        yield reader, pool
    finally:
        await reader.close()
        pool.close()
        assert (reader.num_claims, reader.num_connections) == (0, 0)


async def state(holder: HolderProcess) -> tuple[int, int]:
    """Leases held, and streams of blocks that run."""
    return (await holder.ask("state"))["held"], await holder.ask("pulls")


async def settled(holder: HolderProcess) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await state(holder) != (0, 0):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", list(PAIRS))
async def test_the_named_blocks_arrive_and_no_others_are_touched(transport, shaped, kind):
    holder, num_blocks, block_bytes = shaped
    pairs, moved = PAIRS[kind](num_blocks), []
    async with reading(transport, (num_blocks, block_bytes)) as (reader, pool):
        expected = [digest(block) for block in pool.blocks()]
        async with reader.claimed(await holder.hold(*range(num_blocks))) as claim:
            await claim._connection.transport.pull(claim._ticket, pairs, pool, moved.append)
            await claim.confirm()
        for source, target in pairs:
            expected[target] = holder.digests[source]
        assert [digest(block) for block in pool.blocks()] == expected
    assert (moved[0], moved[-1]) == (0, len(pairs) * block_bytes)
    assert all(before < after for before, after in itertools.pairwise(moved))
    await settled(holder)


async def test_pulls_at_once_share_a_connection_and_none_gets_anothers_blocks(transport, holder):
    num_blocks, _ = SHAPES["small"]
    async with reading(transport) as (reader, pool):

        async def hand_over(start: int) -> None:
            handle = await holder.hold(*range(start, start + num_blocks // 8))
            async with reader.claimed(handle) as claim:
                stats = await claim.pull([(block, num_blocks - 1 - block) for block in handle.block_ids])
                assert (stats.transport, stats.bytes) == (transport.name, len(handle.block_ids) * pool.block_bytes)
                await claim.confirm()

        lock, ask = asyncio.Lock(), holder.ask

        async def ask_in_turn(line: str):
            async with lock:
                return await ask(line)

        holder.ask = ask_in_turn
        await asyncio.gather(*(hand_over(start) for start in range(0, num_blocks, num_blocks // 8)))
        assert reader.num_connections == 1
        assert [digest(block) for block in pool.blocks()] == holder.digests[::-1]
    await settled(holder)


@pytest.mark.parametrize("pair", [(1024, 0), (0, 1024), (-1, 0), (0, -1), (2**32, 0), (0, 2**64)])
async def test_a_block_beyond_either_pool_is_refused_before_a_byte_moves(transport, holder, pair):
    async with reading(transport) as (reader, pool):
        before = digest(pool.memory)
        async with reader.claimed(await holder.hold(0, 1)) as claim:
            with pytest.raises(HandoverError) as caught:
                await claim._connection.transport.pull(claim._ticket, [(1, 1), pair], pool, BlockedCopy())
            assert caught.value.field == "block_ids"
        assert digest(pool.memory) == before


async def test_blocks_of_another_size_are_refused(transport, holder):
    async with reading(transport, (16, 4096)) as (reader, pool):
        before = digest(pool.memory)
        async with reader.claimed(await holder.hold(0, 1)) as claim:
            with pytest.raises(HandoverError, match="4096") as caught:
                await claim.pull([(0, 0)])
            assert caught.value.field == "block_bytes"
        assert digest(pool.memory) == before


@pytest.mark.parametrize("cancellations", [1, 3])
async def test_a_cancelled_pull_ends_after_its_last_write_and_the_holder_is_free(transport, holder, cancellations):
    copy, (num_blocks, block_bytes) = BlockedCopy(), SHAPES["small"]
    async with reading(held_back(transport, copy)) as (reader, pool):
        before = [digest(block) for block in pool.blocks()]

        async def hand_over() -> None:
            async with reader.claimed(await holder.hold(*range(num_blocks))) as claim:
                await claim.pull(PAIRS["all"](num_blocks))

        task = asyncio.create_task(hand_over())
        await until(copy.reached.is_set, PATIENCE_S)
        for _ in range(cancellations):
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done()
        copy.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        whole, begun = copy.last // block_bytes, -(-copy.last // block_bytes)
        after = [digest(block) for block in pool.blocks()]
        assert 0 < copy.last < num_blocks * block_bytes
        assert (after[:whole], after[begun:]) == (holder.digests[:whole], before[begun:])
        await settled(holder)
        assert [digest(block) for block in pool.blocks()] == after


async def test_a_pull_cancelled_while_it_waits_for_another_never_copies(transport, holder):
    copy = BlockedCopy()
    async with reading(held_back(transport, copy)) as (reader, pool):
        before = [digest(block) for block in pool.blocks()]
        async with (
            reader.claimed(await holder.hold(0)) as first,
            reader.claimed(await holder.hold(1)) as second,
        ):
            running = asyncio.create_task(first.pull([(0, 0)]))
            await until(copy.reached.is_set, PATIENCE_S)
            waiting = asyncio.create_task(second.pull([(1, 1)]))
            await asyncio.sleep(0.05)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not running.done()
            copy.go.set()
            await running
        assert [digest(block) for block in pool.blocks()] == [holder.digests[0], *before[1:]]
    await settled(holder)


Fault = Callable[[HolderProcess, Proxy], Awaitable[object]]


async def expire(holder: HolderProcess, proxy: Proxy) -> None:
    assert await holder.ask("expire") == 0


async def kill(holder: HolderProcess, proxy: Proxy) -> None:
    await holder.kill()


async def freeze(holder: HolderProcess, proxy: Proxy) -> None:
    holder.freeze()


async def cut(holder: HolderProcess, proxy: Proxy) -> None:
    proxy.refuse()


@asynccontextmanager
async def faulty_way(transport: Transport, copy: BlockedCopy):
    """A claim on all of a holder's blocks, through a proxy; its pull waits after its first bytes."""
    async with (
        patient_holder(transport) as holder,
        reading(held_back(transport, copy), deadlines=FAST) as (reader, pool),
    ):
        proxy = Proxy(holder.port)
        await proxy.open()
        try:
            handle = replace(await holder.hold(*range(pool.num_blocks)), address=f"127.0.0.1:{proxy.port}")
            yield holder, proxy, reader, pool, handle
        finally:
            await proxy.close()


@pytest.mark.parametrize(
    ("fault", "error"), [(expire, KVExpired), (kill, HandoverError), (freeze, HandoverError), (cut, HandoverError)]
)
@pytest.mark.parametrize("when", ["before the pull", "while pulling"])
async def test_no_copy_is_believed_once_the_holder_may_have_freed_its_blocks(transport, fault: Fault, error, when):
    copy = BlockedCopy()
    async with faulty_way(transport, copy) as (holder, proxy, reader, pool, handle):
        pairs = PAIRS["all"](pool.num_blocks)

        async def hand_over() -> None:
            async with reader.claimed(handle) as claim:
                if when == "before the pull":
                    await fault(holder, proxy)
                    copy.go.set()
                pull = asyncio.create_task(claim.pull(pairs))
                if when == "while pulling":
                    await until(copy.reached.is_set, PATIENCE_S)
                    await fault(holder, proxy)
                    copy.go.set()
                await pull
                await claim.confirm()

        with pytest.raises(error):
            await asyncio.wait_for(hand_over(), PATIENCE_S)
        after = digest(pool.memory)
        if fault in (freeze, cut):
            await proxy.heal()
            holder.thaw()
            await holder.ask("expire")  # where the claim could not be given up
            await settled(holder)
        assert digest(pool.memory) == after


async def test_a_reader_that_is_stuck_does_not_keep_the_holder_from_others(transport, holder):
    copy = BlockedCopy()
    async with reading(held_back(transport, copy)) as (stuck, _), reading(transport) as (other, pool):
        pairs = PAIRS["all"](pool.num_blocks)

        async def hand_over(reader: KVReader) -> None:
            async with reader.claimed(await holder.hold(*range(pool.num_blocks))) as claim:
                await claim.pull(pairs)
                await claim.confirm()

        first = asyncio.create_task(hand_over(stuck))
        await until(copy.reached.is_set, PATIENCE_S)
        for _ in range(2):
            await asyncio.wait_for(hand_over(other), PATIENCE_S)
        assert not first.done()
        assert [digest(block) for block in pool.blocks()] == holder.digests
        copy.go.set()
        await first
    await settled(holder)


async def test_a_pull_without_an_open_way_is_refused(transport):
    pool, channel = FakePool(2), open_channel("127.0.0.1:1", FAST)
    with ThreadPoolExecutor(1) as executor:
        reader = transport.reader(executor, channel)
        with pytest.raises(HandoverError):
            await reader.pull(Ticket(bytes(16), 1, 5), [(0, 0)], pool, BlockedCopy())
        reader.close()
    await channel.close()
    pool.close()
