"""Deltas of several generators come as they are made, and leaving early closes every generator."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

import pytest

from common.errors import Cancelled, NoWorker
from router.pipeline.generation import Delta
from router.pipeline.merge import DEPTH, MergedDeltas
from tests.support.http_tools import delta, eventually


class Source:
    """Yields `count` deltas, each when `gate` is open, then ends or raises; knows whether it was closed."""

    def __init__(self, count: int = 3, *, error: BaseException | None = None, opened: bool = True) -> None:
        self.count = count
        self.error = error
        self.gate = asyncio.Event()
        if opened:
            self.gate.set()
        self.yielded = 0
        self.closed = False

    async def run(self) -> AsyncGenerator[Delta, None]:
        try:
            for number in range(self.count):
                await self.gate.wait()
                self.yielded += 1
                yield delta(str(number))
            if self.error is not None:
                raise self.error
        finally:
            try:
                await asyncio.sleep(0)
            finally:
                self.closed = True


async def test_all_deltas_come_in_each_sources_order() -> None:
    sources = [Source(5), Source(0), Source(40)]
    seen: dict[int, list[str]] = {}
    async with MergedDeltas([source.run() for source in sources]) as deltas:
        async for item in deltas.items():
            seen.setdefault(item[0], []).append(item[1].text)
    assert seen == {0: [str(n) for n in range(5)], 2: [str(n) for n in range(40)]}
    assert all(source.closed for source in sources)


async def test_a_blocked_source_does_not_hold_up_another() -> None:
    blocked, free = Source(opened=False), Source(1)
    async with MergedDeltas([blocked.run(), free.run()]) as deltas:
        items = deltas.items()
        assert await anext(items) == (1, delta("0"))
        blocked.gate.set()
        assert await anext(items) == (0, delta("0"))
    assert blocked.closed


@pytest.mark.parametrize("opened", [True, False], ids=["waiting for the reader", "waiting itself"])
async def test_leaving_closes_every_source(opened: bool) -> None:
    sources = [Source(100, opened=opened) for _ in range(3)]
    with suppress(RuntimeError):
        async with MergedDeltas([source.run() for source in sources]):
            await eventually(lambda: not opened or sum(source.yielded for source in sources) > DEPTH)
            await asyncio.sleep(0)
            raise RuntimeError
    assert all(source.closed for source in sources)


async def test_sources_run_ahead_of_the_reader_by_a_bounded_number() -> None:
    source = Source(1000)
    async with MergedDeltas([source.run()]):
        for _ in range(100):
            await asyncio.sleep(0)
        assert source.yielded == DEPTH + 1


@pytest.mark.parametrize(
    ("error", "raised"),
    [(NoWorker("gone"), NoWorker), (TimeoutError(), TimeoutError), (asyncio.CancelledError(), Cancelled)],
)
async def test_a_sources_error_is_raised_after_its_deltas(error: BaseException, raised: type[Exception]) -> None:
    failing, other = Source(2, error=error), Source(opened=False)
    async with MergedDeltas([failing.run(), other.run()]) as deltas:
        items = deltas.items()
        assert [await anext(items), await anext(items)] == [(0, delta("0")), (0, delta("1"))]
        with pytest.raises(raised):
            await anext(items)
    assert failing.closed
    assert other.closed
