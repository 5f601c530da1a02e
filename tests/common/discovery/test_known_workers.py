"""A worker may call whom the registry lists or has listed; Redis is asked seldom, never for long, and can be gone."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from common.discovery import known_workers
from common.discovery.known_workers import KnownWorkers
from common.discovery.redis_client import Outage
from common.discovery.registry import Registry, WorkerRecord
from common.errors import EpochMismatch, HandoverError, RedisUnreachable
from common.tasks import end
from tests.support.redis_tools import QUICK, a_record, eventually

HERE, EPOCH = "10.0.0.1:1", 7


class ScriptedRegistry:
    """Lists what it is told to, when it is let."""

    def __init__(self, *records: WorkerRecord) -> None:
        self.outage = Outage()
        self.records: Sequence[WorkerRecord] = records
        self.error: Exception | None = None
        self.reads = 0
        self.answering = asyncio.Event()
        self.answering.set()

    async def workers(self) -> list[WorkerRecord]:
        self.reads += 1
        records = list(self.records)
        await self.answering.wait()
        if self.error is not None:
            raise self.error
        return records


@asynccontextmanager
async def following(registry: ScriptedRegistry) -> AsyncIterator[KnownWorkers]:
    known = KnownWorkers()
    task = asyncio.create_task(known.follow(cast(Registry, registry), QUICK))
    await eventually(lambda: registry.reads == 1)
    try:
        yield known
    finally:
        await end(task)


def at(address: str = HERE, epoch: int = EPOCH) -> WorkerRecord:
    return a_record(address=address, epoch=epoch)


async def refused(known: KnownWorkers, address: str = HERE, epoch: int = EPOCH) -> HandoverError:
    with pytest.raises(HandoverError) as caught:
        await known.check(address, epoch)
    return caught.value


async def test_who_follows_no_registry_calls_nobody() -> None:
    assert (await refused(KnownWorkers())).field == "handle.address"


async def test_who_is_listed_at_the_start_is_known_without_a_question() -> None:
    registry = ScriptedRegistry(at())
    async with following(registry) as known:
        await known.check(HERE, EPOCH)
    assert registry.reads == 1


async def test_who_came_since_is_asked_for_once() -> None:
    registry = ScriptedRegistry()
    async with following(registry) as known:
        registry.records = [at()]
        for _ in range(3):
            await known.check(HERE, EPOCH)
    assert registry.reads == 2


async def test_a_stranger_is_refused_and_another_life_is_told_as_such() -> None:
    async with following(ScriptedRegistry(at())) as known:
        stranger, earlier = await refused(known, "10.0.0.9:1"), await refused(known, HERE, EPOCH + 1)
    assert (type(stranger), stranger.field) == (HandoverError, "handle.address")
    assert (type(earlier), earlier.field) == (EpochMismatch, "epoch")


async def test_a_flood_of_questions_is_one_read_at_a_time_and_one_for_all_who_wait() -> None:
    registry = ScriptedRegistry(at())
    async with following(registry) as known:
        registry.answering.clear()
        asking: list[asyncio.Task[Any]] = [asyncio.create_task(known.check("10.0.0.9:1", n)) for n in range(100)]
        await eventually(lambda: registry.reads == 2)
        registry.answering.set()
        results = await asyncio.gather(*asking, return_exceptions=True)
    assert {type(result) for result in results} == {HandoverError}
    assert registry.reads == 3  # at the start, for the first who asked, for all who came during that one


async def test_a_question_is_answered_by_a_read_that_began_after_it() -> None:
    registry = ScriptedRegistry()
    async with following(registry) as known:
        registry.answering.clear()
        first = asyncio.create_task(known.check("10.0.0.9:1", 1))
        await eventually(lambda: registry.reads == 2)
        registry.records = [at()]  # after the read that is under way has looked
        second = asyncio.create_task(known.check(HERE, EPOCH))
        registry.answering.set()
        await second
        assert isinstance((await asyncio.gather(first, return_exceptions=True))[0], HandoverError)
    assert registry.reads == 3


@pytest.mark.parametrize("how", ["gone", "frozen", "known to be gone"])
async def test_without_redis_known_workers_stay_and_others_are_refused_soon(how: str) -> None:
    registry = ScriptedRegistry(at())
    async with following(registry) as known:
        registry.records = [at("10.0.0.2:1")]
        if how == "gone":
            registry.error = RedisUnreachable("gone")
        elif how == "frozen":
            registry.answering.clear()
        else:
            registry.outage._failing.add("registry")
        await known.check(HERE, EPOCH)
        async with asyncio.timeout(QUICK.suspect_s + 5):
            await refused(known, "10.0.0.2:1")
    assert registry.reads == (1 if how == "known to be gone" else 2)


async def test_what_was_listed_stays_known_when_it_is_listed_no_more() -> None:
    registry = ScriptedRegistry(at())
    async with following(registry) as known:
        registry.records = []
        await refused(known, "10.0.0.9:1")
        await known.check(HERE, EPOCH)


async def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_workers, "MOST_KNOWN", 2)
    registry = ScriptedRegistry(*(at(epoch=epoch) for epoch in (1, 2, 3)))
    async with following(registry) as known:
        registry.records = []
        assert isinstance(await refused(known, epoch=1), EpochMismatch)
        await known.check(HERE, 2)
        await known.check(HERE, 3)
