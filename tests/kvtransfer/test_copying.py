"""Pieces of the pool are the bytes asked for, in order and as long as they can be; copies of one thread take turns."""

import asyncio
import itertools
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.copying import in_turns, pieces


@given(data=st.data(), block_ids=st.lists(st.integers(0, 9), min_size=1, max_size=8), block_bytes=st.integers(1, 7))
def test_pieces_are_the_bytes_asked_for_and_neighbours_are_joined(data, block_ids, block_bytes):
    places = [block * block_bytes + i for block in block_ids for i in range(block_bytes)]
    offset = data.draw(st.integers(0, len(places)))
    size = data.draw(st.integers(0, len(places) - offset))
    found = list(pieces(block_ids, block_bytes, offset, size))
    assert [at for start, length in found for at in range(start, start + length)] == places[offset : offset + size]
    assert all(length > 0 for _, length in found)
    assert all(start + length != after for (start, length), (after, _) in itertools.pairwise(found))


def copying(name: str, turns: int, log: list[str]) -> Generator[None]:
    try:
        for turn in range(turns):
            log.append(f"{name}{turn}")
            if turn < turns - 1:
                yield
    finally:
        log.append(f"{name} closed")


async def test_copies_of_one_thread_take_turns():
    """A small one doesn't wait for a large one before it to end."""
    log: list[str] = []
    with ThreadPoolExecutor(1) as executor:
        large = asyncio.create_task(in_turns(executor, copying("large", 1000, log)))
        while not log:
            await asyncio.sleep(0)
        await in_turns(executor, copying("small", 2, log))
        assert not large.done()
        await large
    assert log.index("small closed") < log.index("large999") < log.index("large closed")


async def test_a_copy_that_fails_or_is_cancelled_between_turns_is_closed():
    log: list[str] = []

    def failing() -> Generator[None]:
        try:
            yield
            raise ValueError("broken")
        finally:
            log.append("closed")

    with ThreadPoolExecutor(1) as executor:
        with pytest.raises(ValueError, match="broken"):
            await in_turns(executor, failing())
        task = asyncio.create_task(in_turns(executor, copying("x", 10**6, log)))
        while "x1" not in log:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert log[0] == "closed"
    assert log[-1] == "x closed"
    assert "x999999" not in log
