"""Ending asyncio tasks, and noticing those that end by themselves."""

import asyncio
from collections.abc import Callable
from typing import Any

from common.errors import KVRelayError


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancels the tasks and waits until they have ended, however they do."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def watch(task: asyncio.Task[Any], on_death: Callable[[BaseException], None]) -> asyncio.Task[Any]:
    """The task, which should go on until it is cancelled; what else ends it goes to on_death."""

    def ended(task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            on_death(task.exception() or RuntimeError("it came to its end"))

    task.add_done_callback(ended)
    return task


async def until(stop: asyncio.Event, *loops: asyncio.Task[Any]) -> None:
    """Waits for stop. Raises KVRelayError when one of the loops, which go on until they are cancelled, ends before."""
    waiting = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([waiting, *loops], return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end(waiting)
    for loop in loops:
        if loop.done():
            error = loop.exception()
            raise KVRelayError(f"the loop of {loop.get_name()} died: {error}") from error
