"""A copy counts only if the holder held the blocks until it was confirmed; no pull returns while bytes still move."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from common.errors import HandleTaken, HandoverError, KVExpired, PullStalled, WorkerLost
from kvtransfer.claim import CopyProgress, _Track
from kvtransfer.lease import ROUTER
from kvtransfer.reader import KVReader
from tests.support.kv_fakes import (
    FAST,
    FINGERPRINT,
    LAYOUT,
    FakePool,
    GateHolder,
    ManualClock,
    RunningHolder,
    gate_transport,
    running_holder,
    until,
)

PAIRS = [(3, 0), (4, 1), (9, 5)]


@asynccontextmanager
async def running_reader(**changes):
    """Ends by proving that no claim and no connection is left."""
    pool = FakePool()
    fields = {"pool": pool, "layout": LAYOUT, "fingerprint": FINGERPRINT, "deadlines": FAST, "clock": ManualClock()}
    reader = KVReader(**(fields | changes))
    try:
        yield reader, pool
    finally:
        await reader.close()
        pool.close()
        assert (reader.num_claims, reader.num_connections) == (0, 0)


@pytest.fixture
async def holder():
    async with running_holder() as holder:
        yield holder


@pytest.fixture
async def reader_and_pool(holder):
    async with running_reader() as both:
        yield both


@pytest.fixture
def reader(reader_and_pool):
    return reader_and_pool[0]


@pytest.fixture
def pool(reader_and_pool):
    return reader_and_pool[1]


@dataclass
class Gated:
    """A holder and a reader whose pulls wait for a gate, and whose renewals for a turn."""

    holder: RunningHolder
    reader: KVReader
    gate: asyncio.Event
    log: list[str]
    turn: asyncio.Semaphore


@pytest.fixture
async def gated():
    gate, log, turn = asyncio.Event(), [], asyncio.Semaphore(0)

    async def sleep(seconds: float) -> None:
        await turn.acquire()

    async with (
        running_holder(transports=[GateHolder()]) as holder,
        running_reader(transports=[gate_transport(gate, log)], sleep=sleep) as (reader, _),
    ):
        yield Gated(holder, reader, gate, log, turn)
        gate.set()


async def test_blocks_arrive_where_they_should_and_the_holder_gets_its_own_back(holder, reader, pool):
    before = pool.blocks()
    async with reader.claimed(holder.hold()) as claim:
        stats = await claim.pull(PAIRS)
        assert holder.freed == []
        await claim.confirm()
    assert holder.freed == [3, 4, 9]
    assert stats.bytes == 3 * LAYOUT.block_bytes
    assert stats.transport == "shm"
    assert stats.seconds >= 0
    moved = {target: holder.pool.block(source) for source, target in PAIRS}
    assert pool.blocks() == [moved.get(i, block) for i, block in enumerate(before)]
    assert holder.service.calls == {"Connect": 1, "Prove": 1, "Renew": 1, "Release": 1}


async def test_a_part_of_the_blocks_may_be_pulled_or_none(holder, reader, pool):
    for pairs in ([(4, 0)], []):
        async with reader.claimed(holder.hold()) as claim:
            assert (await claim.pull(pairs)).bytes == len(pairs) * LAYOUT.block_bytes
            await claim.confirm()
    assert pool.block(0) == holder.pool.block(4)


@pytest.mark.parametrize("pairs", [[(5, 0)], [(3, 0), (0, 1)], [(3, 0), (4, 0)], [(3, 16)], [(3, -1)]])
async def test_blocks_that_are_not_the_handles_or_not_this_pools_are_refused(holder, reader, pool, pairs):
    before = pool.blocks()
    async with reader.claimed(holder.hold()) as claim:
        with pytest.raises(HandoverError):
            await claim.pull(pairs)
    assert pool.blocks() == before
    await until(lambda: holder.freed == [3, 4, 9])


async def test_a_claim_that_ends_without_release_is_given_up_at_the_holder(holder, reader):
    async def fail() -> None:
        async with reader.claimed(holder.hold()) as claim:
            await claim.pull(PAIRS)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    await until(lambda: holder.freed == [3, 4, 9])
    assert holder.table.num_released == 1


async def test_a_second_reader_is_refused_and_the_first_goes_on(holder, reader):
    handle = holder.hold()
    async with reader.claimed(handle) as claim, running_reader() as (other, _):
        for second in (other, reader):  # a claim of the same reader is another claim
            with pytest.raises(HandleTaken):
                async with second.claimed(handle):
                    pass
        await claim.pull(PAIRS)
        assert holder.freed == []
        await claim.confirm()


async def test_a_reader_that_froze_until_its_lease_ended_gets_kv_expired(holder, reader):
    async with reader.claimed(holder.hold()) as claim:
        await claim.pull(PAIRS)
        holder.clock.offset += FAST.lease_s
        with pytest.raises(KVExpired):
            await claim.confirm()
    assert holder.freed == [3, 4, 9]
    assert holder.table.num_expired == 1


async def test_a_copy_that_a_release_by_the_router_overtook_is_void(holder, reader):
    handle = holder.hold()
    async with reader.claimed(handle) as claim:
        await claim.pull(PAIRS)
        assert holder.table.release(handle.id, handle.epoch, ROUTER)
        with pytest.raises(KVExpired):
            await claim.confirm()


async def test_an_expired_or_released_handle_cannot_be_claimed(holder, reader):
    expired, released = holder.hold((1,)), holder.hold((2,))
    holder.table.release(released.id, released.epoch, ROUTER)
    holder.clock.offset += FAST.lease_s
    for handle in (expired, released):
        with pytest.raises(KVExpired):
            async with reader.claimed(handle):
                pass
    assert holder.service.calls.get("Release", 0) == 0  # there is nothing to give up


async def test_what_follows_a_release_is_refused(holder, reader):
    async with reader.claimed(holder.hold()) as claim:
        await claim.pull(PAIRS)
        await claim.confirm()
        with pytest.raises(KVExpired):
            await claim.confirm()
        with pytest.raises(KVExpired):
            await claim.pull(PAIRS)
    with pytest.raises(KVExpired):
        await claim.pull([])
    assert holder.service.calls["Release"] == 1


async def test_the_lease_is_renewed_every_third_until_release(holder):
    sleeps, turn = [], asyncio.Semaphore(0)

    async def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        await turn.acquire()

    async with running_reader(sleep=sleep) as (reader, _):
        async with reader.claimed(holder.hold()) as claim:
            for renewals in range(1, 6):
                assert holder.service.calls["Renew"] == renewals
                await until(lambda count=renewals: len(sleeps) == count)
                holder.clock.offset += FAST.lease_s / 3
                turn.release()
                await until(lambda count=renewals: holder.service.calls["Renew"] == count + 1)
            await claim.pull(PAIRS)
            await claim.confirm()
        turn.release()
        await asyncio.sleep(0.05)
        assert holder.service.calls["Renew"] == 6
    assert set(sleeps) == {FAST.lease_s / 3}


async def test_a_refused_renewal_ends_a_running_pull_and_the_claim(gated):
    handle = gated.holder.hold()
    async with gated.reader.claimed(handle) as claim:
        pull = asyncio.create_task(claim.pull(PAIRS))
        await until(lambda: "begin" in gated.log)
        gated.holder.table.release(handle.id, handle.epoch, ROUTER)
        gated.turn.release()
        await until(lambda: "cancelled" in gated.log)
        assert not pull.done()  # the copy has not ended yet
        gated.gate.set()
        with pytest.raises(KVExpired):
            await pull
        with pytest.raises(KVExpired):
            await claim.confirm()
    assert gated.holder.service.calls.get("Release", 0) == 0


async def test_a_holder_that_dies_voids_the_claim_at_once_and_not_a_lease_later(gated):
    """The renewer sleeps for ever here: it is the broken connection that wakes it."""
    async with gated.reader.claimed(gated.holder.hold()) as claim:
        await gated.holder.server.stop()
        await asyncio.wait_for(asyncio.shield(claim.voided), 5.0)
        with pytest.raises(KVExpired):
            await claim.pull(PAIRS)


async def test_a_cut_connection_to_a_living_holder_leaves_the_claim_as_it_is(gated):
    async with gated.reader.claimed(gated.holder.hold()) as claim:
        renewals = gated.holder.service.calls["Renew"]
        gated.reader._connections._retire(claim._connection)  # as its watch does when the channel breaks
        await until(lambda: gated.holder.service.calls["Renew"] == renewals + 1)
        gated.turn.release()  # from then on in its usual time
        await until(lambda: gated.holder.service.calls["Renew"] == renewals + 2)
        await asyncio.sleep(0.05)
        assert gated.holder.service.calls["Renew"] == renewals + 2
        gated.gate.set()
        await claim.pull(PAIRS)
        await claim.confirm()


async def test_renewals_that_fail_for_a_lease_make_the_claim_void_even_if_the_holder_comes_back(holder):
    clock, turn = ManualClock(running=False), asyncio.Semaphore(0)

    async def sleep(seconds: float) -> None:
        await turn.acquire()
        clock.offset += seconds

    deadlines = replace(FAST, rpc_s=0.05)
    async with (
        running_reader(sleep=sleep, clock=clock, deadlines=deadlines) as (reader, _),
        reader.claimed(holder.hold()) as claim,
    ):
        for renewals in (2, 3, 4):  # a whole lease of successes before the first failure
            turn.release()
            await until(lambda count=renewals: holder.service.calls["Renew"] == count)
            await until(lambda: claim._renewed_at == clock())  # the answer is here, too
        holder.service.hanging.add("Renew")
        for failures in (1, 2):
            turn.release()
            await until(lambda count=failures: holder.service.calls["Renew"] == 4 + count)
            await asyncio.sleep(0.1)
            await claim.pull([(3, 0)])  # the holder still has the last word
        turn.release()
        await until(lambda: claim._void is not None)
        for ask in (lambda: claim.pull(PAIRS), claim.confirm):
            with pytest.raises(KVExpired):
                await ask()
    await until(lambda: holder.freed == [3, 4, 9])


async def test_a_pull_without_progress_is_stalled_but_ends_only_with_its_copy(gated):
    async with gated.reader.claimed(gated.holder.hold()) as claim:
        pull = asyncio.create_task(claim.pull(PAIRS))
        await until(lambda: "cancelled" in gated.log)
        await asyncio.sleep(0.02)
        assert not pull.done()
        gated.gate.set()
        with pytest.raises(PullStalled):
            await pull
        with pytest.raises(KVExpired):
            await claim.confirm()
    assert gated.log == ["open", "begin", "cancelled", "end"]
    await until(lambda: gated.holder.freed == [3, 4, 9])


def test_a_pull_that_waits_for_its_turn_is_as_alive_as_those_before_it():
    """Four pulls of 0.6 times the patience each, behind one thread: the last waits 1.8 times, and none stalls."""
    clock = ManualClock(running=False)
    shared = CopyProgress(clock)
    tracks = [_Track(clock, shared) for _ in range(4)]
    for turn, track in enumerate(tracks):
        track.moved(0)
        clock.offset += 0.6
        track.moved(100)
        waiting = tracks[turn + 1 :]
        assert all(clock() - other.heard_at < 1.0 for other in waiting)
    assert shared.bytes == 400
    tracks[0].moved(150)  # others' progress is no excuse once it has begun
    clock.offset += 0.9
    tracks[1].moved(200)
    clock.offset += 0.2
    assert clock() - tracks[0].heard_at > 1.0


def test_a_pull_that_waits_behind_a_stuck_thread_is_stalled_with_it():
    clock = ManualClock(running=False)
    shared = CopyProgress(clock)
    stuck, waiting = _Track(clock, shared), _Track(clock, shared)
    stuck.moved(0)
    clock.offset += 1.1
    assert clock() - waiting.heard_at > 1.0


@pytest.mark.parametrize("cancellations", [1, 3])
async def test_a_cancelled_pull_waits_for_its_copy_and_then_the_holder_is_told(gated, cancellations):
    async def hand_over() -> None:
        async with gated.reader.claimed(gated.holder.hold()) as claim:
            await claim.pull(PAIRS)

    task = asyncio.create_task(hand_over())
    await until(lambda: "begin" in gated.log)
    for _ in range(cancellations):
        task.cancel()
        await asyncio.sleep(0.02)
        assert not task.done()
    assert gated.holder.freed == []
    gated.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: gated.holder.freed == [3, 4, 9])


async def test_a_transport_that_moves_too_little_is_not_believed(gated, monkeypatch):
    async def short(self, ticket, pairs, pool, progress) -> None:
        progress(0)

    async with gated.reader.claimed(gated.holder.hold()) as claim:
        monkeypatch.setattr(type(claim._connection.transport), "pull", short)
        with pytest.raises(HandoverError, match="0 of 24576 bytes"):
            await claim.pull(PAIRS)


async def test_a_release_during_a_pull_is_refused(gated):
    async with gated.reader.claimed(gated.holder.hold()) as claim:
        pull = asyncio.create_task(claim.pull(PAIRS))
        await until(lambda: "begin" in gated.log)
        with pytest.raises(HandoverError, match="still running"):
            await claim.confirm()
        gated.gate.set()
        await pull
        await claim.confirm()


async def test_a_pull_that_outlives_its_claim_is_ended(gated):
    async with gated.reader.claimed(gated.holder.hold()) as claim:
        pull = asyncio.create_task(claim.pull(PAIRS))
        await until(lambda: "begin" in gated.log)
    await until(lambda: "cancelled" in gated.log)
    gated.gate.set()
    with pytest.raises(KVExpired):
        await pull


async def test_a_release_cancelled_half_way_is_asked_again(holder, reader):
    holder.service.hanging.add("Release")

    async def hand_over() -> None:
        async with reader.claimed(holder.hold()) as claim:
            await claim.pull(PAIRS)
            await claim.confirm()

    task = asyncio.create_task(hand_over())
    await until(lambda: holder.service.calls.get("Release"))
    holder.service.hanging.clear()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: holder.freed == [3, 4, 9])


async def test_a_holder_that_is_gone_at_release_makes_the_copy_void(reader):
    async with running_holder() as holder, reader.claimed(holder.hold()) as claim:
        await claim.pull(PAIRS)
        await holder.server.stop()
        with pytest.raises(KVExpired) as caught:
            await claim.confirm()
        assert isinstance(caught.value.__cause__, WorkerLost)


async def test_a_claim_whose_answer_is_lost_is_given_up(holder, reader):
    holder.service.hanging.add("Renew")
    with pytest.raises(HandoverError, match="Renew failed"):
        async with reader.claimed(holder.hold()):
            pass
    await until(lambda: holder.freed == [3, 4, 9])
