"""Proves that the index ends up equal to what workers have, whatever is lost on the way, and counts expectations."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from common.discovery import cache_events
from common.discovery.cache_events import CacheEventPublisher, cache_keys, pack_snapshot
from common.discovery.redis_client import Outage, connect
from common.discovery.registry import WorkerRecord
from router.fleet import prefix_index as router_index
from router.fleet.prefix_index import PrefixIndex
from tests.support.redis_process import RedisServer
from tests.support.redis_tools import QUICK, Cache, a_hash, a_record, eventually, lines_of

LINGER_S = QUICK.cache_linger_s
RECORD = a_record()
KEYS = cache_keys("test", RECORD.worker_id, RECORD.epoch)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def an_index(redis: Redis, **options: Any) -> PrefixIndex:
    return PrefixIndex(redis, "test", QUICK, Outage(), **options)


def a_publisher(redis: Redis, cache: Cache, record: WorkerRecord = RECORD, **options: Any) -> CacheEventPublisher:
    deadlines = replace(QUICK, cache_flush_s=0.002)
    return CacheEventPublisher(
        redis, "test", record.worker_id, record.epoch, cache.snapshot, deadlines, Outage(), **options
    )


@asynccontextmanager
async def running(*parts: PrefixIndex | CacheEventPublisher) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(part.run()) for part in parts]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task  # raises what ended it early


def known(index: PrefixIndex, record: WorkerRecord = RECORD, blocks: int = 200) -> set[bytes]:
    """What the index believes of each of the first hashes, asked one by one."""
    hashes = map(a_hash, range(blocks))
    return {block for block in hashes if index.prefix_blocks(record.worker_id, [block]) == 1}


async def knows(index: PrefixIndex, hashes: Sequence[int] | set[bytes], record: WorkerRecord = RECORD) -> None:
    wanted = {block if isinstance(block, bytes) else a_hash(block) for block in hashes}
    blocks = max((int.from_bytes(block, "big") for block in wanted), default=0) + 200
    await eventually(lambda: known(index, record, blocks) == wanted)


async def write_snapshot(redis: Redis, number: int, hashes: Sequence[int]) -> None:
    await redis.set(KEYS.snapshot, pack_snapshot(number, [a_hash(block) for block in hashes]))


async def write_entry(redis: Redis, number: int, stored: Sequence[int] = (), removed: Sequence[int] = ()) -> None:
    parts = {"stored": b"".join(map(a_hash, stored)), "removed": b"".join(map(a_hash, removed))}
    await redis.xadd(KEYS.stream, parts, id=f"{number}-0")


@pytest.mark.parametrize(
    ("cached", "asked", "blocks"),
    [
        ([], [1, 2, 3], 0),
        ([1, 2, 3], [], 0),
        ([1], [1, 2, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2, 3, 4], [1, 2, 3], 3),
        ([2, 3], [1, 2, 3], 0),
        ([1, 3], [1, 2, 3], 1),
    ],
)
async def test_only_the_longest_unbroken_prefix_counts(
    redis: Redis, cached: list[int], asked: list[int], blocks: int
) -> None:
    await write_snapshot(redis, 1, cached)
    index = an_index(redis)
    index.follow(RECORD)
    async with running(index):
        await knows(index, cached)
        assert index.prefix_blocks(RECORD.worker_id, [a_hash(block) for block in asked]) == blocks


async def test_unknown_worker_has_nothing(redis: Redis) -> None:
    index = an_index(redis)
    assert index.prefix_blocks("nobody", [a_hash(1)]) == 0
    index.expect("nobody", [a_hash(1)]).answered()
    index.forget("nobody")
    assert index.prefix_blocks("nobody", [a_hash(1)]) == 0


@pytest.mark.parametrize("seed", range(3))
async def test_copy_ends_up_equal_to_every_workers_cache(
    redis: Redis, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Three workers with trims and overflows, two routers; one of them joins late."""
    monkeypatch.setattr(cache_events, "ENTRY_HASHES", 4)
    monkeypatch.setattr(cache_events, "TRIM_HASHES", 60)
    monkeypatch.setattr(router_index, "READ_ENTRIES", 3)
    rng = random.Random(seed)
    records = [a_record(worker_id=f"worker-{i}", epoch=rng.getrandbits(64)) for i in range(3)]
    caches = [Cache() for _ in records]
    publishers = [a_publisher(redis, c, r, max_pending=30) for c, r in zip(caches, records, strict=True)]
    early, late = an_index(redis), an_index(redis)
    for record in records:
        early.follow(record)
    async with running(early, *publishers):
        for step in range(300):
            for cache, publisher in zip(caches, publishers, strict=True):
                publisher.record(*cache.step(rng))
            if rng.random() < 0.3:
                await asyncio.sleep(rng.choice([0, 0.003]))
            if step % 100 == 99:
                for record, cache in zip(records, caches, strict=True):
                    await knows(early, set(cache.blocks), record)
        async with running(late):
            for record, cache in zip(records, caches, strict=True):
                late.follow(record)
                await knows(late, set(cache.blocks), record)


async def test_gap_reloads_that_one_worker(redis: Redis) -> None:
    other = a_record(worker_id="other")
    other_cache = Cache()
    other_cache.blocks = {a_hash(9): None}
    await write_snapshot(redis, 1, [1, 2])
    index = an_index(redis)
    index.follow(RECORD)
    index.follow(other)
    async with running(index, a_publisher(redis, other_cache, other)):
        await knows(index, [1, 2])
        await knows(index, [9], other)
        await write_entry(redis, 2, stored=[3])
        await knows(index, [1, 2, 3])
        await write_snapshot(redis, 5, [4])
        await write_entry(redis, 6, stored=[5])
        await knows(index, [4, 5])
        await knows(index, [9], other)


async def test_what_is_known_stays_until_the_snapshot_is_there(redis: Redis) -> None:
    await write_snapshot(redis, 1, [1])
    index = an_index(redis)
    index.follow(RECORD)
    async with running(index):
        await knows(index, [1])
        await redis.delete(KEYS.snapshot)
        await write_entry(redis, 3, stored=[3])  # the second is missing
        await asyncio.sleep(3 * QUICK.heartbeat_s)
        await knows(index, [1])
        await write_snapshot(redis, 2, [1, 2])
        await knows(index, [1, 2, 3])


async def test_worker_that_publishes_late_is_found(redis: Redis) -> None:
    index, cache = an_index(redis), Cache()
    cache.blocks = {a_hash(1): None}
    index.follow(RECORD)
    async with running(index):
        await asyncio.sleep(2 * QUICK.heartbeat_s)
        async with running(a_publisher(redis, cache)):
            await knows(index, [1])


async def test_new_epoch_starts_anew_and_an_old_expectation_does_not_touch_it(redis: Redis) -> None:
    clock = Clock()
    index = an_index(redis, clock=clock)
    index.follow(RECORD)
    old = index.expect(RECORD.worker_id, [a_hash(1)])
    index.follow(RECORD)
    assert index.prefix_blocks(RECORD.worker_id, [a_hash(1)]) == 1
    index.follow(a_record(epoch=8))
    assert index.prefix_blocks(RECORD.worker_id, [a_hash(1)]) == 0
    index.expect(RECORD.worker_id, [a_hash(1)])
    old.answered()
    clock.now += LINGER_S
    assert index.prefix_blocks(RECORD.worker_id, [a_hash(1)]) == 1


async def test_forgotten_worker_has_nothing_and_can_come_back(redis: Redis) -> None:
    await write_snapshot(redis, 1, [1])
    index = an_index(redis)
    index.follow(RECORD)
    async with running(index):
        await knows(index, [1])
        index.forget(RECORD.worker_id)
        await knows(index, [])
        await write_entry(redis, 2, stored=[2])
        index.follow(RECORD)
        await knows(index, [1, 2])


@pytest.mark.parametrize(
    ("since_answer", "expected"),
    [(None, 1), (0.0, 1), (LINGER_S - 0.001, 1), (LINGER_S, 0), (LINGER_S + 1, 0)],
)
async def test_expected_blocks_count_until_the_answer_and_two_seconds_more(
    redis: Redis, since_answer: float | None, expected: int
) -> None:
    clock = Clock()
    index = an_index(redis, clock=clock)
    index.follow(RECORD)
    expectation = index.expect(RECORD.worker_id, [a_hash(1)])
    clock.now += 5
    if since_answer is not None:
        expectation.answered()
        clock.now += since_answer
    expectation.answered()  # a second answer changes nothing
    assert index.prefix_blocks(RECORD.worker_id, [a_hash(1)]) == (expected if since_answer is not None else 1)


async def test_expectation_without_an_answer_ends_with_its_request(redis: Redis) -> None:
    clock = Clock()
    index = an_index(redis, clock=clock)
    index.follow(RECORD)
    expectation = index.expect(RECORD.worker_id, [a_hash(1)])
    clock.now += QUICK.request_s - 0.001
    assert index.prefix_blocks(RECORD.worker_id, [a_hash(1)]) == 1
    clock.now += 0.001
    assert index.prefix_blocks(RECORD.worker_id, [a_hash(1)]) == 0
    expectation.answered()
    clock.now += LINGER_S
    assert index.prefix_blocks(RECORD.worker_id, [a_hash(1)]) == 0


async def test_one_requests_answer_does_not_cancel_anothers_expectation(redis: Redis) -> None:
    clock = Clock()
    index = an_index(redis, clock=clock)
    index.follow(RECORD)
    hashes = [a_hash(block) for block in range(4)]
    first = index.expect(RECORD.worker_id, hashes[:2])
    second = index.expect(RECORD.worker_id, hashes)
    assert index.prefix_blocks(RECORD.worker_id, hashes) == 4
    second.answered()
    clock.now += LINGER_S
    assert index.prefix_blocks(RECORD.worker_id, hashes) == 2
    first.answered()
    clock.now += LINGER_S
    assert index.prefix_blocks(RECORD.worker_id, hashes) == 0


@pytest.mark.parametrize("seed", range(5))
async def test_expectations_equal_a_count_of_those_that_are_open(redis: Redis, seed: int) -> None:
    rng, clock = random.Random(seed), Clock()
    index = an_index(redis, clock=clock)
    index.follow(RECORD)
    opened: list[list[Any]] = []  # expectation, its hashes, when it ends
    for _ in range(400):
        clock.now += rng.choice([0.0, 0.1, 1.0])
        if rng.random() < 0.5:
            hashes = [a_hash(block) for block in range(rng.randrange(6))]
            opened.append([index.expect(RECORD.worker_id, hashes), hashes, clock.now + QUICK.request_s])
        elif opened:
            chosen = rng.choice(opened)
            chosen[0].answered()
            chosen[2] = min(chosen[2], clock.now + LINGER_S)
        opened = [item for item in opened if item[2] > clock.now]
        asked = [a_hash(block) for block in range(6)]
        assert index.prefix_blocks(RECORD.worker_id, asked) == max((len(item[1]) for item in opened), default=0)
    clock.now += QUICK.request_s
    assert index.prefix_blocks(RECORD.worker_id, [a_hash(0)]) == 0
    assert not index._views[RECORD.worker_id].expected
    assert not index._open
    assert not index._closing


async def test_expected_blocks_join_the_cached_ones(redis: Redis) -> None:
    await write_snapshot(redis, 1, [0, 1, 3])
    index = an_index(redis)
    index.follow(RECORD)
    async with running(index):
        await knows(index, [0, 1, 3])
        index.expect(RECORD.worker_id, [a_hash(0), a_hash(1), a_hash(2)])
        assert index.prefix_blocks(RECORD.worker_id, [a_hash(block) for block in range(6)]) == 4


async def test_expectations_are_bounded(redis: Redis) -> None:
    index = an_index(redis)
    index.follow(RECORD)
    limit = index._views[RECORD.worker_id].limit
    hashes = [a_hash(block) for block in range(limit + 10)]
    index.expect(RECORD.worker_id, hashes[:-20])
    index.expect(RECORD.worker_id, hashes[-20:])
    index.expect(RECORD.worker_id, [a_hash(limit + 11)])
    assert index.prefix_blocks(RECORD.worker_id, hashes) == limit
    assert len(index._views[RECORD.worker_id].expected) == limit


@pytest.mark.parametrize(
    "entry",
    [{"stored": b"short"}, {"removed": b"x" * 17}, {"reload": b""}],
    ids=["short", "long", "reload"],
)
async def test_entry_that_cannot_be_used_leads_to_the_snapshot(
    redis: Redis, caplog: pytest.LogCaptureFixture, entry: dict[str, bytes]
) -> None:
    await write_snapshot(redis, 1, [1])
    index = an_index(redis)
    index.follow(RECORD)
    async with running(index):
        await knows(index, [1])
        await redis.xadd(KEYS.stream, entry, id="2-0")
        await write_entry(redis, 3, stored=[3])
        await asyncio.sleep(3 * QUICK.heartbeat_s)
        await knows(index, [1])
        await write_snapshot(redis, 2, [1, 2])
        await knows(index, [1, 2, 3])
    assert lines_of(caplog) == ([] if "reload" in entry else ["a worker's cache events are malformed"])


@pytest.mark.parametrize("data", [b"", b"1234567", bytes(8 + 15), bytes(8 + 16 * 2000)], ids=len)
async def test_malformed_or_oversized_snapshot_is_not_taken(
    redis: Redis, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    await redis.set(KEYS.snapshot, data)
    index = an_index(redis)
    index.follow(RECORD)
    async with running(index):
        await eventually(lambda: lines_of(caplog))
        await asyncio.sleep(3 * QUICK.heartbeat_s)
        assert not index._views[RECORD.worker_id].cached
        await write_snapshot(redis, 1, [1])
        await knows(index, [1])
    assert lines_of(caplog) == ["a worker's cache events are malformed"]


async def test_cache_larger_than_its_worker_is_read_again(redis: Redis) -> None:
    await write_snapshot(redis, 1, [])
    index = an_index(redis)
    index.follow(RECORD)
    limit = index._views[RECORD.worker_id].limit
    async with running(index):
        await knows(index, [])
        await eventually(lambda: index._views[RECORD.worker_id].loaded)
        await write_entry(redis, 2, stored=range(limit + 1))
        await eventually(lambda: not index._views[RECORD.worker_id].cached)
        await write_snapshot(redis, 2, [1])
        await knows(index, [1])


async def test_copy_stays_through_an_outage_and_is_right_after_it(
    own_redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    redis = await connect(own_redis_server.url, QUICK)
    rng, cache, index = random.Random(0), Cache(), an_index(redis)
    publisher = a_publisher(redis, cache)
    index.follow(RECORD)
    async with running(index, publisher):
        publisher.record(*cache.step(rng, most=40))
        await knows(index, set(cache.blocks))
        before = set(cache.blocks)
        own_redis_server.stop()
        await eventually(lambda: index._outage.active and publisher._outage.active)
        publisher.record(*cache.step(rng, most=40))
        assert known(index) == before
        own_redis_server.start()
        await knows(index, set(cache.blocks))
        assert set(cache.blocks) != before
        await eventually(lambda: not (index._outage.active or publisher._outage.active))
    assert sorted(lines_of(caplog)) == ["redis is back"] * 2 + ["redis is gone, going on without"] * 2
    await redis.aclose()


@pytest.mark.parametrize("following", [False, True])
async def test_outage_is_told_once_though_no_snapshot_is_there(
    own_redis_server: RedisServer, caplog: pytest.LogCaptureFixture, following: bool
) -> None:
    redis = await connect(own_redis_server.url, QUICK)
    index = an_index(redis)
    index.follow(RECORD)
    own_redis_server.stop()
    async with running(index):
        await eventually(lambda: index._outage.active)
        if not following:
            index.forget(RECORD.worker_id)
        await asyncio.sleep(6 * QUICK.heartbeat_s)
        assert lines_of(caplog) == ["redis is gone, going on without"]
        own_redis_server.start()
        await eventually(lambda: not index._outage.active)
    await redis.aclose()


async def test_trimmed_beyond_an_absent_router_is_noticed_without_a_new_entry(
    redis: Redis, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the router was cut off: the worker has nothing to tell anew."""
    own = await connect(redis_server.url, replace(QUICK, rpc_s=2.0))
    await write_snapshot(redis, 1, [1])
    index = an_index(own)
    index.follow(RECORD)
    async with running(index):
        await knows(index, [1])
        with monkeypatch.context() as cut:

            async def refuse(*args: Any, **kwargs: Any) -> None:
                raise ConnectionError("cut off")

            cut.setattr(own, "xread", refuse)
            await eventually(lambda: index._outage.active)
            await write_snapshot(redis, 9, [2])
        await knows(index, [2])
    await own.aclose()


async def test_index_without_workers_waits_quietly(redis: Redis) -> None:
    index = an_index(redis)
    async with running(index):
        await asyncio.sleep(2 * QUICK.heartbeat_s)
        index.follow(RECORD)
        await write_snapshot(redis, 1, [1])
        await knows(index, [1])


async def test_cancellation_at_any_moment_ends_it(redis: Redis) -> None:
    rng = random.Random(0)
    await write_snapshot(redis, 1, [1])
    for _ in range(50):
        index = an_index(redis)
        index.follow(RECORD)
        task = asyncio.create_task(index.run())
        for _ in range(rng.randint(0, 60)):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=20)
        assert done
        assert task.cancelled()
