"""What transports have in common: pairs that make sense, blocks that lie side by side, threads awaited to their end."""

import asyncio
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

from common.errors import HandoverError
from kvtransfer.transport import BlockMemory

Returned = TypeVar("Returned")


def check_pairs(pairs: Sequence[tuple[int, int]], num_blocks: int, block_bytes: int, pool: BlockMemory) -> None:
    """Raises HandoverError unless the pairs are (block of a holder's pool of that shape, block of this pool)."""
    if pool.block_bytes != block_bytes:
        raise HandoverError(f"blocks have {pool.block_bytes} bytes here, {block_bytes} there", field="block_bytes")
    for source, target in pairs:
        if not 0 <= source < num_blocks:
            raise HandoverError(f"block {source} is beyond the holder's {num_blocks}", field="block_ids")
        if not 0 <= target < pool.num_blocks:
            raise HandoverError(f"block {target} is beyond this pool's {pool.num_blocks}", field="block_ids")


def pieces(block_ids: Sequence[int], block_bytes: int, offset: int, size: int) -> Iterator[tuple[int, int]]:
    """(start in the pool, length) of `size` bytes from `offset` on in these blocks, in order; neighbours are joined."""
    start, length, end = 0, 0, offset + size
    while offset < end:
        index, inside = divmod(offset, block_bytes)
        at = block_ids[index] * block_bytes + inside
        step = min(block_bytes - inside, end - offset)
        if at != start + length:
            if length:
                yield start, length
            start, length = at, 0
        length += step
        offset += step
    if length:
        yield start, length


async def in_thread(
    executor: Executor, work: Callable[[], Returned], on_cancel: Callable[[], object] = lambda: None
) -> Returned:
    """Runs it in the executor. Returns or raises, however often it is cancelled meanwhile, only after it has ended.

    Work that is cancelled before it begins never does; `on_cancel` may ask work that runs to end.
    """
    running = executor.submit(work)
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    running.add_done_callback(lambda _: loop.call_soon_threadsafe(ended.set))
    cancelled: asyncio.CancelledError | None = None
    while not ended.is_set():
        try:
            await ended.wait()
        except asyncio.CancelledError as error:
            cancelled = error
            on_cancel()
            running.cancel()
    if cancelled is not None:
        raise cancelled
    return running.result()


async def in_turns(executor: Executor, work: Generator[None], on_cancel: Callable[[], object] = lambda: None) -> None:
    """Runs a generator in the executor, a turn of it at a time: others' work gets its turns in between.

    Returns or raises as in_thread() does; however it ends, the generator is closed.
    """
    ended = object()
    try:
        while await in_thread(executor, partial(next, work, ended), on_cancel) is not ended:
            pass
    finally:
        work.close()
