"""Proves that workers are found as they announced themselves, vanish by themselves, and outlive Redis's outages."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

import pytest
from redis.asyncio import Redis

from common.discovery.redis_client import connect
from common.discovery.registry import Registry, WorkerRecord
from common.errors import RedisUnreachable
from tests.support.redis_process import RedisServer
from tests.support.redis_tools import QUICK, a_record, eventually, lines_of

REMOVE: Any = type("Remove", (), {"__repr__": lambda self: "REMOVE"})()  # in test ids: the same in every process


def a_registry(redis: Redis, **deadlines: float) -> Registry:
    return Registry(redis, "test", replace(QUICK, **deadlines))


@asynccontextmanager
async def announcing(registry: Registry, record: WorkerRecord) -> AsyncIterator[None]:
    task = asyncio.create_task(registry.keep_announced(record))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task  # raises what ended it early


async def listed(registry: Registry, records: list[WorkerRecord]) -> None:
    """Waits until these records are there, and no others."""

    async def are_there() -> bool:
        return await registry.workers() == records

    await eventually(are_there)


@pytest.mark.parametrize("epoch", [0, 1, 2**63, 2**64 - 1])
def test_record_survives_json(epoch: int) -> None:
    record = a_record(epoch=epoch, leaving=True, served_model_name="mödel\n")
    assert WorkerRecord.from_json(record.to_json()) == record


def test_fields_of_a_newer_version_are_ignored_and_of_an_older_one_defaulted() -> None:
    data = asdict(a_record())
    del data["leaving"]
    assert WorkerRecord.from_json(json.dumps(data | {"zone": {"of": "later"}})) == a_record()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"role": "router"}, "role"),
        ({"role": REMOVE}, "role"),
        ({"worker_id": ""}, "worker_id"),
        ({"worker_id": "\ud800"}, "surrogates"),
        ({"address": "127.0.0.1"}, "address"),
        ({"address": ":4000"}, "address"),
        ({"address": "host:0"}, "address"),
        ({"address": "host:65536"}, "address"),
        ({"address": "host:١"}, "address"),
        ({"http_address": "host:"}, "http_address"),
        ({"epoch": -1}, "epoch"),
        ({"epoch": 2**64}, "epoch"),
        ({"epoch": 1.0}, "epoch"),
        ({"epoch": "7"}, "epoch"),
        ({"epoch": True}, "epoch"),
        ({"epoch": None}, "epoch"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"block_size": -16}, "block_size"),
        ({"max_model_len": REMOVE}, "max_model_len"),
        ({"fingerprint": ["x"]}, "fingerprint"),
        ({"leaving": 0}, "leaving"),
    ],
)
def test_malformed_record_names_its_field(changes: dict[str, Any], named: str) -> None:
    data = {name: value for name, value in (asdict(a_record()) | changes).items() if value is not REMOVE}
    with pytest.raises(ValueError, match=named):
        WorkerRecord.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "7", b"\xff", "[" * 100_000])
async def test_malformed_text_is_skipped_with_one_line(
    redis: Redis, caplog: pytest.LogCaptureFixture, text: str | bytes
) -> None:
    registry, record = a_registry(redis), a_record()
    await registry.announce(record)
    await redis.set("test:worker:bad", text)
    await redis.sadd("test:workers", "bad")
    for _ in range(3):
        assert await registry.workers() == [record]
    assert lines_of(caplog) == ["skipped a malformed record"]


async def test_malformed_record_is_reported_again_after_it_was_well(
    redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    registry, record = a_registry(redis), a_record()
    for _ in range(2):
        await registry.announce(record)
        assert await registry.workers() == [record]
        await redis.set(f"test:worker:{record.member}", "{}")
        assert await registry.workers() == []
    assert lines_of(caplog) == ["skipped a malformed record"] * 2


async def test_announced_workers_are_listed(redis: Redis) -> None:
    registry = a_registry(redis)
    assert await registry.workers() == []
    records = [a_record(worker_id=f"worker-{i}", address=f"host:{4000 + i}", epoch=i) for i in range(5)]
    for record in records:
        await registry.announce(record)
        await registry.announce(record)
    assert await registry.workers() == records


async def test_namespaces_are_apart(redis: Redis) -> None:
    await a_registry(redis).announce(a_record())
    assert await Registry(redis, "other", QUICK).workers() == []


async def test_record_that_is_not_refreshed_vanishes_with_all_its_keys(redis: Redis) -> None:
    registry = a_registry(redis, dead_s=0.05)
    await registry.announce(a_record())
    await listed(registry, [])

    async def is_empty() -> bool:
        return not await redis.keys("*")

    await eventually(is_empty)


async def test_kept_record_outlives_its_expiry(redis: Redis) -> None:
    registry = a_registry(redis, dead_s=0.4)
    async with announcing(registry, a_record()):
        await listed(registry, [a_record()])
        life_s = registry._life_ms / 1000
        for _ in range(12):
            await asyncio.sleep(life_s / 8)
            assert await registry.workers() == [a_record()]


async def test_goodbye_stays_said_while_the_worker_drains(redis: Redis) -> None:
    registry, record = a_registry(redis), a_record()
    async with announcing(registry, record):
        await listed(registry, [a_record()])
        await registry.goodbye(record)
        for _ in range(5):
            assert await registry.workers() == [replace(record, leaving=True)]
            await asyncio.sleep(QUICK.heartbeat_s)


@pytest.mark.parametrize(
    "earlier",
    [a_record(epoch=1, address="elsewhere:1"), a_record(epoch=1, worker_id="other"), a_record(epoch=1)],
    ids=["same worker", "same address", "both"],
)
async def test_start_clears_records_of_earlier_lives_and_no_others(redis: Redis, earlier: WorkerRecord) -> None:
    registry = a_registry(redis)
    neighbour = a_record(worker_id="neighbour", address="elsewhere:2", epoch=2)
    await registry.announce(earlier)
    await registry.announce(neighbour)
    await redis.sadd("test:workers", "expired")
    await redis.sadd("test:workers", "newer")
    await redis.set("test:worker:newer", json.dumps({"of": "a version to come"}))
    async with announcing(registry, a_record()):
        await listed(registry, [neighbour, a_record()])
    assert await redis.smembers("test:workers") == {
        neighbour.member.encode(),
        a_record().member.encode(),
        b"newer",
    }
    assert await redis.exists("test:worker:newer")
    assert not await redis.exists(f"test:worker:{earlier.member}")


async def test_announcing_survives_an_outage_with_one_line_each_way(
    own_redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    redis = await connect(own_redis_server.url, QUICK)
    registry = a_registry(redis)
    async with announcing(registry, a_record()):
        await listed(registry, [a_record()])
        own_redis_server.stop()
        await eventually(lambda: registry.outage.active)
        await asyncio.sleep(5 * QUICK.heartbeat_s)
        own_redis_server.start()
        await eventually(lambda: not registry.outage.active)
        await listed(registry, [a_record()])
    assert lines_of(caplog) == ["redis is gone, going on without", "redis is back"]
    await redis.aclose()


async def test_worker_that_starts_without_redis_is_announced_later(own_redis_server: RedisServer) -> None:
    redis = await connect(own_redis_server.url, QUICK)
    registry = a_registry(redis)
    own_redis_server.stop()
    async with announcing(registry, a_record()):
        await eventually(lambda: registry.outage.active)
        own_redis_server.start()
        await eventually(lambda: not registry.outage.active)
        await listed(registry, [a_record()])
    await redis.aclose()


async def test_single_calls_raise_when_redis_is_gone(own_redis_server: RedisServer) -> None:
    redis = await connect(own_redis_server.url, QUICK)
    registry = a_registry(redis)
    own_redis_server.stop()
    for call in (registry.announce(a_record()), registry.goodbye(a_record()), registry.workers()):
        with pytest.raises(RedisUnreachable):
            await call
    await redis.aclose()


async def test_listing_goes_on_after_an_outage_and_never_lists_nothing_for_it(own_redis_server: RedisServer) -> None:
    redis = await connect(own_redis_server.url, QUICK)
    registry = a_registry(redis)
    seen: list[list[WorkerRecord]] = []
    await registry.announce(a_record())
    task = asyncio.create_task(registry.keep_listed(seen.append))
    await eventually(lambda: seen)
    own_redis_server.stop()
    await eventually(lambda: registry.outage.active)
    assert set(map(tuple, seen)) == {(a_record(),)}
    own_redis_server.start()
    count = len(seen)
    await eventually(lambda: len(seen) > count)
    assert seen[-1] == []  # what that means is the router's to decide: nothing
    task.cancel()
    await redis.aclose()


@pytest.mark.parametrize("loop", ["announced", "listed"])
async def test_cancellation_at_any_moment_ends_the_loop(redis: Redis, loop: str) -> None:
    registry, rng = a_registry(redis, heartbeat_s=0.0), random.Random(0)
    for _ in range(50):
        run = registry.keep_announced(a_record()) if loop == "announced" else registry.keep_listed(lambda _: None)
        task = asyncio.create_task(run)
        for _ in range(rng.randint(0, 60)):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=20)
        assert done
        assert task.cancelled()


async def test_a_redis_that_refuses_writes_is_told_once_and_until_it_takes_them_again(
    own_redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    redis = await connect(own_redis_server.url, QUICK)
    registry, record = a_registry(redis), a_record()
    async with announcing(registry, record):
        await listed(registry, [record])
        assert registry.outage.told_with("ok") == "ok"
        await redis.config_set("maxmemory", 1)
        await eventually(lambda: registry.outage.active)
        assert registry.outage.told_with("ok") == "ok; redis refuses commands (OutOfMemoryError)"
        await redis.config_set("maxmemory", 0)
        await eventually(lambda: not registry.outage.active)
        await listed(registry, [record])
    assert registry.outage.told_with("ok") == "ok"
    assert lines_of(caplog) == ["redis refuses commands, going on without", "redis is back"]
    await redis.aclose()
