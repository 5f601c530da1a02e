"""A loop that should go on for ever does not die unnoticed."""

import asyncio

import pytest

from common.errors import KVRelayError
from common.tasks import end, until, watch


async def forever() -> None:
    await asyncio.Event().wait()


async def failing() -> None:
    await asyncio.sleep(0)
    raise ZeroDivisionError("by a defect")


async def returning() -> None:
    await asyncio.sleep(0)


@pytest.mark.parametrize(("work", "kind"), [(failing, ZeroDivisionError), (returning, RuntimeError)])
async def test_what_ends_a_watched_task_is_handed_over(work, kind):
    deaths: list[BaseException] = []
    task = watch(asyncio.create_task(work()), deaths.append)
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert [type(error) for error in deaths] == [kind]


async def test_a_watched_task_may_be_cancelled():
    deaths: list[BaseException] = []
    await end(watch(asyncio.create_task(forever()), deaths.append))
    await asyncio.sleep(0)
    assert deaths == []


@pytest.mark.parametrize("work", [failing, returning])
async def test_until_ends_with_the_first_loop_that_does(work):
    loops = [asyncio.create_task(forever()), asyncio.create_task(work(), name="the index")]
    with pytest.raises(KVRelayError, match="the loop of the index died"):
        await until(asyncio.Event(), *loops)
    await end(*loops)


async def test_until_ends_when_it_is_told_to():
    loop, stop = asyncio.create_task(forever()), asyncio.Event()
    asyncio.get_running_loop().call_soon(stop.set)
    await until(stop, loop)
    assert not loop.done()
    await end(loop)
