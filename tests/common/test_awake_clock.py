"""The clock that peers are judged by stands still while our own loop is stalled, and never runs backwards."""

import asyncio
from itertools import pairwise

import pytest

from common.awake_clock import AwakeClock
from common.tasks import end

TICK_S = 0.1


class Beneath:
    """The clock beneath, moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def beneath() -> Beneath:
    return Beneath()


def test_before_it_runs_it_is_the_clock_beneath(beneath: Beneath):
    clock = AwakeClock(beneath)
    beneath.now += 5.0
    assert clock() == 105.0


@pytest.mark.parametrize(("stall_s", "passed_s"), [(0.0, 0.0), (0.05, 0.05), (0.1, 0.1), (0.2, 0.1), (60.0, 0.1)])
async def test_a_stall_counts_as_one_tick_at_most(beneath: Beneath, stall_s: float, passed_s: float):
    clock = AwakeClock(beneath, TICK_S)
    task = asyncio.create_task(clock.run())
    await asyncio.sleep(0)
    began = clock()
    beneath.now += stall_s
    assert clock() - began == pytest.approx(passed_s)  # at once, before anything has noticed
    clock._tick()
    assert clock() - began == pytest.approx(passed_s)
    beneath.now += 0.03
    assert clock() - began == pytest.approx(passed_s + 0.03)
    await end(task)


async def test_it_never_runs_backwards_through_stalls_and_its_own_end(beneath: Beneath):
    clock = AwakeClock(beneath, TICK_S)
    seen = [clock()]
    for stall_s in (0.04, 3.0, 0.0, 0.1, 7.0):
        task = asyncio.create_task(clock.run())
        await asyncio.sleep(0)
        beneath.now += stall_s
        seen.append(clock())
        await end(task)
        seen.append(clock())
    assert all(before <= after for before, after in pairwise(seen))
