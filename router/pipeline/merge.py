"""Deltas of several generations in one stream, as they come."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType

from common.errors import Cancelled
from router.pipeline.generation import Delta

DEPTH = 16  # deltas that wait for a slow client, a request; the generators wait with it


class MergedDeltas:
    """Runs the generators while it is entered; however it is left, they are closed by then."""

    def __init__(self, generators: Sequence[AsyncGenerator[Delta, None]]) -> None:
        self._generators = generators
        self._queue: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue(DEPTH)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "MergedDeltas":
        self._tasks = [asyncio.create_task(self._pump(number, one)) for number, one in enumerate(self._generators)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def items(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """(number of the generator, delta); raises what a generator raises."""
        running = len(self._tasks)
        while running:
            number, item = await self._queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield number, item

    async def _pump(self, number: int, generator: AsyncGenerator[Delta, None]) -> None:
        end: Exception | None = None
        try:
            async with aclosing(generator):
                async for delta in generator:
                    await self._queue.put((number, delta))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            end = Cancelled("the generation was cancelled")  # by somebody below
        except Exception as error:
            end = error
        await self._queue.put((number, end))
