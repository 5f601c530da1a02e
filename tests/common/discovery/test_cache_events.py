"""Proves that snapshot and stream together always tell what is in the cache, through overflows and outages."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from common.discovery import cache_events
from common.discovery.cache_events import CacheEventPublisher, cache_keys, unpack_hashes
from common.discovery.redis_client import Outage, connect
from tests.support.redis_process import RedisServer
from tests.support.redis_tools import QUICK, Cache, a_hash, eventually, lines_of

KEYS = cache_keys("test", "worker", 7)


def a_publisher(
    redis: Redis, cache: Cache, epoch: int = 7, dead_s: float = 1.0, flush_s: float = 0.002, **options: Any
) -> CacheEventPublisher:
    deadlines = replace(QUICK, dead_s=dead_s, cache_flush_s=flush_s)
    return CacheEventPublisher(redis, "test", "worker", epoch, cache.snapshot, deadlines, Outage(), **options)


@asynccontextmanager
async def publishing(publisher: CacheEventPublisher) -> AsyncIterator[None]:
    task = asyncio.create_task(publisher.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task  # raises what ended it early


def numbered(entries: list[tuple[bytes, dict[bytes, bytes]]]) -> list[tuple[int, dict[bytes, bytes]]]:
    return [(int(entry_id.split(b"-")[0]), entry) for entry_id, entry in entries]


async def stream(redis: Redis) -> list[tuple[int, dict[bytes, bytes]]]:
    return numbered(await redis.xrange(KEYS.stream))


async def snapshot_and_stream(redis: Redis) -> tuple[bytes | None, list[tuple[int, dict[bytes, bytes]]]]:
    """Both at one moment."""
    async with redis.pipeline(transaction=True) as pipe:
        data, entries = await pipe.get(KEYS.snapshot).xrange(KEYS.stream).execute()
    return data, numbered(entries)


async def told(redis: Redis) -> set[bytes] | None:
    """The cache as a newcomer reads it: the snapshot, then all entries after it; they must have no gap."""
    data, entries = await snapshot_and_stream(redis)
    if data is None:
        return None
    number = int.from_bytes(data[:8], "little")
    blocks = {data[i : i + 16] for i in range(8, len(data), 16)}
    for entry_number, entry in entries:
        if entry_number <= number:
            continue
        assert entry_number == number + 1
        number = entry_number
        removed, stored = entry.get(b"removed", b""), entry.get(b"stored", b"")
        blocks -= {removed[i : i + 16] for i in range(0, len(removed), 16)}
        blocks |= {stored[i : i + 16] for i in range(0, len(stored), 16)}
    return blocks


async def tells(redis: Redis, cache: Cache) -> None:
    async def is_told() -> bool:
        return await told(redis) == set(cache.blocks)

    await eventually(is_told)


async def test_start_publishes_what_is_there(redis: Redis) -> None:
    cache = Cache()
    cache.blocks = dict.fromkeys(map(a_hash, range(3)))
    async with publishing(a_publisher(redis, cache)):
        await tells(redis, cache)


@pytest.mark.parametrize("seed", range(4))
async def test_snapshot_and_stream_tell_the_cache(redis: Redis, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """With entries of few hashes, many trims and some overflows."""
    monkeypatch.setattr(cache_events, "ENTRY_HASHES", 4)
    monkeypatch.setattr(cache_events, "TRIM_HASHES", 60)
    rng, cache = random.Random(seed), Cache()
    publisher = a_publisher(redis, cache, max_pending=30)
    async with publishing(publisher):
        for step in range(300):
            publisher.record(*cache.step(rng))
            if rng.random() < 0.3:
                await asyncio.sleep(rng.choice([0, 0.003]))
            if step % 50 == 49:
                await tells(redis, cache)
        await tells(redis, cache)
    assert publisher.number > 10


async def test_snapshot_ahead_of_the_events_ends_up_right(redis: Redis) -> None:
    """The engine's thread may be steps ahead of what record() was told."""
    rng, cache = random.Random(0), Cache()
    late: list[tuple[Sequence[bytes], Sequence[bytes]]] = []
    publisher = a_publisher(redis, cache, max_pending=30)
    async with publishing(publisher):
        for _ in range(300):
            late.append(cache.step(rng))
            if len(late) > 5:
                publisher.record(*late.pop(0))
            await asyncio.sleep(rng.choice([0, 0, 0.003]))
        for events in late:
            publisher.record(*events)
        await tells(redis, cache)


async def test_many_hashes_are_packed_into_one_entry(redis: Redis) -> None:
    cache = Cache()
    publisher = a_publisher(redis, cache)
    async with publishing(publisher):
        await tells(redis, cache)
        for number in range(1000):
            cache.blocks[a_hash(number)] = None
            publisher.record([a_hash(number)], [])
        await tells(redis, cache)
        reload, entry = await stream(redis)
    assert reload == (1, {b"reload": b""})
    assert entry == (2, {b"stored": b"".join(map(a_hash, range(1000)))})


async def test_block_that_came_and_went_between_flushes_is_told_by_its_last_state(redis: Redis) -> None:
    cache = Cache()
    publisher = a_publisher(redis, cache)
    async with publishing(publisher):
        await tells(redis, cache)
        publisher.record([a_hash(1), a_hash(2)], [])
        publisher.record([], [a_hash(1)])
        publisher.record([a_hash(3)], [a_hash(3)])  # removed, then stored again
        cache.blocks = dict.fromkeys([a_hash(2), a_hash(3)])
        await tells(redis, cache)
        assert (await stream(redis))[-1] == (2, {b"stored": a_hash(2) + a_hash(3), b"removed": a_hash(1)})


@pytest.mark.parametrize("count", [2047, 2048, 2049, 4097])
async def test_entries_have_at_most_their_size(redis: Redis, count: int) -> None:
    cache = Cache()
    publisher = a_publisher(redis, cache)
    async with publishing(publisher):
        await tells(redis, cache)
        cache.blocks = dict.fromkeys(map(a_hash, range(count)))
        publisher.record(cache.snapshot(), [])
        await tells(redis, cache)
        sizes = [len(entry[b"stored"]) // 16 for _, entry in await stream(redis) if b"stored" in entry]
    assert sum(sizes) == count
    assert max(sizes) == min(count, cache_events.ENTRY_HASHES)


async def test_large_change_does_not_wait_for_the_flush(redis: Redis) -> None:
    cache = Cache()
    publisher = a_publisher(redis, cache, flush_s=3600.0)
    async with publishing(publisher):
        await tells(redis, cache)
        cache.blocks = dict.fromkeys(map(a_hash, range(cache_events.ENTRY_HASHES)))
        publisher.record(cache.snapshot(), [])
        await tells(redis, cache)


async def test_idle_cache_writes_no_entries(redis: Redis) -> None:
    cache = Cache()
    publisher = a_publisher(redis, cache)
    async with publishing(publisher):
        await tells(redis, cache)
        for _ in range(10):
            publisher.record([], [])
            await asyncio.sleep(QUICK.heartbeat_s / 2)
        assert len(await stream(redis)) == 1


async def test_stream_is_trimmed_and_only_up_to_the_snapshot(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_events, "TRIM_HASHES", 100)
    rng, cache = random.Random(1), Cache()
    publisher = a_publisher(redis, cache)
    longest = 0
    async with publishing(publisher):
        for _ in range(400):
            publisher.record(*cache.step(rng))
            await asyncio.sleep(0.001)
            data, entries = await snapshot_and_stream(redis)
            if data is None:
                continue
            included = int.from_bytes(data[:8], "little")
            numbers = [number for number, _ in entries]
            later = [number for number in numbers if number > included]
            assert later == list(range(included + 1, included + 1 + len(later)))
            longest = max(longest, len(numbers))
        await tells(redis, cache)
    assert publisher.number > 2 * longest


async def test_entries_alone_cause_a_snapshot_too(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_events, "TRIM_ENTRIES", 5)
    cache = Cache()
    publisher = a_publisher(redis, cache)
    async with publishing(publisher):
        for number in range(40):
            cache.blocks[a_hash(number)] = None
            publisher.record([a_hash(number)], [])
            await tells(redis, cache)
            assert len(await stream(redis)) <= 6


async def test_overflow_becomes_a_snapshot_that_followers_are_sent_to(redis: Redis) -> None:
    cache = Cache(num_blocks=1000)
    publisher = a_publisher(redis, cache, max_pending=10)
    async with publishing(publisher):
        await tells(redis, cache)
        cache.blocks = dict.fromkeys(map(a_hash, range(11)))
        publisher.record(cache.snapshot(), [])
        await tells(redis, cache)
        assert await stream(redis) == [(2, {b"reload": b""})]
        cache.blocks[a_hash(11)] = None
        publisher.record([a_hash(11)], [])
        await tells(redis, cache)
        assert await stream(redis) == [(2, {b"reload": b""}), (3, {b"stored": a_hash(11)})]


async def test_restarted_redis_gets_everything_again(
    own_redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    redis = await connect(own_redis_server.url, QUICK)
    rng, cache = random.Random(2), Cache()
    publisher = a_publisher(redis, cache, max_pending=20)
    async with publishing(publisher):
        publisher.record(*cache.step(rng))
        await tells(redis, cache)
        before = publisher.number
        own_redis_server.stop()
        await eventually(lambda: publisher._outage.active)
        for _ in range(1000):
            publisher.record(*cache.step(rng))
            assert len(publisher._pending) <= 20
        own_redis_server.start()
        await tells(redis, cache)
        await eventually(lambda: not publisher._outage.active)
        publisher.record(*cache.step(rng))
        await tells(redis, cache)
    assert publisher.number > before
    assert lines_of(caplog) == ["redis is gone, going on without", "redis is back"]
    await redis.aclose()


@pytest.mark.parametrize("command", ["flushall", "drop snapshot", "drop stream"])
async def test_emptied_redis_gets_everything_again_without_a_change(redis: Redis, command: str) -> None:
    cache = Cache()
    cache.blocks = dict.fromkeys(map(a_hash, range(5)))
    publisher = a_publisher(redis, cache)
    async with publishing(publisher):
        await tells(redis, cache)
        if command == "flushall":
            await redis.flushall()
        else:
            await redis.delete(KEYS.snapshot if "snapshot" in command else KEYS.stream)
        await eventually(lambda: publisher.number == 2)
        await tells(redis, cache)
        assert await stream(redis) == [(2, {b"reload": b""})]


async def test_entry_never_makes_a_stream_that_nobody_would_expire(redis: Redis) -> None:
    cache = Cache()
    publisher = a_publisher(redis, cache)
    async with publishing(publisher):
        await tells(redis, cache)
        await redis.delete(KEYS.stream)
        cache.blocks[a_hash(1)] = None
        publisher.record([a_hash(1)], [])
        await tells(redis, cache)
        assert b"reload" in (await stream(redis))[0][1]
        assert await redis.pttl(KEYS.stream) > 0


async def test_frozen_redis_never_blocks_recording(own_redis_server: RedisServer) -> None:
    redis = await connect(own_redis_server.url, replace(QUICK, rpc_s=0.5))
    rng, cache = random.Random(3), Cache()
    publisher = a_publisher(redis, cache, max_pending=20)
    assert own_redis_server.pid is not None
    async with publishing(publisher):
        await tells(redis, cache)
        os.kill(own_redis_server.pid, signal.SIGSTOP)
        while not publisher._outage.active:
            publisher.record(*cache.step(rng))
            await asyncio.sleep(0.002)
        os.kill(own_redis_server.pid, signal.SIGCONT)
        await tells(redis, cache)
    await redis.aclose()


async def test_foreign_keys_in_the_way_are_replaced(redis: Redis) -> None:
    await redis.set(KEYS.stream, "no stream")
    await redis.lpush(KEYS.snapshot, "no string")
    await redis.set("test:cache:v1:worker:epoch", "no number")
    cache = Cache()
    cache.blocks = dict.fromkeys(map(a_hash, range(5)))

    async def is_replaced() -> bool:
        return await redis.type(KEYS.stream) == b"stream"

    async with publishing(a_publisher(redis, cache)):
        await eventually(is_replaced)
        await tells(redis, cache)


async def test_start_deletes_the_keys_of_the_epoch_before(redis: Redis) -> None:
    cache, earlier = Cache(), cache_keys("test", "worker", 3)
    async with publishing(a_publisher(redis, cache, epoch=3)):
        await eventually(lambda: redis.exists(earlier.snapshot))
    async with publishing(a_publisher(redis, cache)):
        await tells(redis, cache)
    assert not await redis.exists(earlier.snapshot, earlier.stream)


async def test_keys_live_while_the_worker_does_and_vanish_after_it(redis: Redis) -> None:
    cache = Cache()
    publisher = a_publisher(redis, cache, dead_s=0.2)
    life_s = publisher._life_ms / 1000
    async with publishing(publisher):
        await tells(redis, cache)
        await asyncio.sleep(1.5 * life_s)
        assert len(await redis.keys("*")) == 3
        assert publisher.number == 1

    async def is_empty() -> bool:
        return not await redis.keys("*")

    await eventually(is_empty)


async def test_close_deletes_snapshot_and_stream(redis: Redis) -> None:
    cache = Cache()
    publisher = a_publisher(redis, cache)
    async with publishing(publisher):
        await tells(redis, cache)
    await publisher.close()
    assert not await redis.exists(KEYS.snapshot, KEYS.stream)


async def test_close_without_redis_is_quiet(own_redis_server: RedisServer) -> None:
    redis = await connect(own_redis_server.url, QUICK)
    own_redis_server.stop()
    await a_publisher(redis, Cache()).close()
    await redis.aclose()


async def test_cancellation_at_any_moment_ends_it(redis: Redis) -> None:
    """Also when a command of redis-py swallows it, which happens in one of ten on Python 3.11."""
    rng, cache = random.Random(0), Cache()
    for epoch in range(100):
        publisher = a_publisher(redis, cache, epoch, flush_s=0.0)
        task = asyncio.create_task(publisher.run())
        for _ in range(rng.randint(0, 60)):
            publisher.record(*cache.step(rng))
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=20)
        assert done
        assert task.cancelled()


@pytest.mark.parametrize(("size", "start"), [(15, 0), (17, 0), (7, 8), (23, 8), (25, 8)])
def test_broken_hashes_are_refused(size: int, start: int) -> None:
    with pytest.raises(ValueError, match=f"{size} bytes"):
        unpack_hashes(bytes(size), start)


@pytest.mark.parametrize(("size", "start", "count"), [(0, 0, 0), (16, 0, 1), (8, 8, 0), (40, 8, 2)])
def test_whole_hashes_are_unpacked(size: int, start: int, count: int) -> None:
    assert list(unpack_hashes(bytes(size), start)) == [bytes(16)] * count
