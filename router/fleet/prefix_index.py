"""Which worker has which prefix: a router's own copy of all workers' caches.

One task reads all workers' streams (common/discovery/cache_events.py). It is a hint and may lag; a wrong one costs
time, never an answer. Without Redis it stays as it is.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import cast

from redis.asyncio import Redis

from common.block_hash import HASH_BYTES
from common.deadlines import Deadlines
from common.discovery.cache_events import (
    NUMBER_BYTES,
    RELOAD,
    REMOVED,
    STORED,
    CacheKeys,
    cache_keys,
    snapshot_number,
    unpack_hashes,
)
from common.discovery.redis_client import Outage, raise_if_cancelled
from common.discovery.registry import WorkerRecord
from common.errors import RedisUnreachable
from common.log import get_logger, log_event

LOGGER = get_logger("index")
LOAD_HASHES = 8192  # of a snapshot between two turns of the loop
READ_ENTRIES = 16  # of each stream at once
SLACK_HASHES = 1024  # over twice a worker's blocks


@dataclass(eq=False, slots=True)
class _View:
    """One life of one worker."""

    epoch: int
    keys: CacheKeys
    limit: int  # hashes it can hold, generously
    number: int = 0  # of the last entry applied
    loaded: bool = False  # else its snapshot is to be read; until then what is known stays
    retry_at: float = 0.0
    complained: bool = False
    cached: set[bytes] = field(default_factory=set)
    expected: dict[bytes, int] = field(default_factory=dict)  # hash: expectations that count on it


class Expectation:
    """Blocks that a worker will have once it has answered a prompt."""

    def __init__(self, index: "PrefixIndex", view: _View | None, hashes: Sequence[bytes]) -> None:
        self._index = index
        self._view = view
        self._hashes = hashes

    def answered(self) -> None:
        """The prefill has answered, or failed: cache_linger_s more. A second call does nothing."""
        self._index._answered(self)

    def _withdraw(self) -> None:
        view, self._view = self._view, None
        if view is None:
            return
        for block in self._hashes:
            view.expected[block] -= 1
            if not view.expected[block]:
                del view.expected[block]
        self._hashes = ()


class PrefixIndex:
    """Everything but run() is called on run()'s event loop and never waits."""

    def __init__(
        self,
        redis: Redis,
        namespace: str,
        deadlines: Deadlines,
        outage: Outage | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = redis
        self._namespace = namespace
        self._outage = outage or Outage()
        self._clock = clock
        self._heartbeat_s = deadlines.heartbeat_s
        self._retry_s = deadlines.retry_s
        self._linger_s = deadlines.cache_linger_s
        self._block_ms = max(1, round(min(deadlines.heartbeat_s, deadlines.rpc_s / 2) * 1000))
        self._longest_s = deadlines.request_s  # that a prefill may go without an answer
        self._views: dict[str, _View] = {}
        self._followed = asyncio.Event()
        # Both in order of their deadlines, which lie a constant time after the entry.
        self._open: dict[Expectation, float] = {}
        self._closing: deque[tuple[float, Expectation]] = deque()

    @property
    def num_hashes(self) -> int:
        """Block hashes known of all workers, expected ones not counted."""
        return sum(len(view.cached) for view in self._views.values())

    def follow(self, record: WorkerRecord) -> None:
        """Keeps a copy of this worker's cache from now on; a new epoch starts anew."""
        view = self._views.get(record.worker_id)
        if view is None or view.epoch != record.epoch:
            keys = cache_keys(self._namespace, record.worker_id, record.epoch)
            self._views[record.worker_id] = _View(record.epoch, keys, 2 * record.num_blocks + SLACK_HASHES)
            self._followed.set()

    def forget(self, worker_id: str) -> None:
        self._views.pop(worker_id, None)

    def prefix_blocks(self, worker_id: str, hashes: Sequence[bytes]) -> int:
        """How many of the first hashes this worker has, up to the first one that it has not."""
        self._withdraw_expired()
        view = self._views.get(worker_id)
        if view is None:
            return 0
        for count, block in enumerate(hashes):
            if block not in view.cached and block not in view.expected:
                return count
        return len(hashes)

    def expect(self, worker_id: str, hashes: Sequence[bytes]) -> Expectation:
        """Counts a prompt's blocks as there from now on, until the answer and cache_linger_s more."""
        self._withdraw_expired()
        view = self._views.get(worker_id)
        if view is None:
            return Expectation(self, None, ())
        hashes = tuple(hashes[: max(0, view.limit - len(view.expected))])
        for block in hashes:
            view.expected[block] = view.expected.get(block, 0) + 1
        expectation = Expectation(self, view, hashes)
        self._open[expectation] = self._clock() + self._longest_s
        return expectation

    def _answered(self, expectation: Expectation) -> None:
        if self._open.pop(expectation, None) is not None:
            self._closing.append((self._clock() + self._linger_s, expectation))

    def _withdraw_expired(self) -> None:
        now = self._clock()
        while self._closing and self._closing[0][0] <= now:
            self._closing.popleft()[1]._withdraw()
        while self._open and self._open[oldest := next(iter(self._open))] <= now:
            del self._open[oldest]
            oldest._withdraw()

    async def run(self) -> None:
        """Follows until it is cancelled, whatever happens to Redis."""
        delay = self._retry_s
        while True:
            raise_if_cancelled()
            try:
                with self._outage.noticed("prefix index"):
                    if delay > self._retry_s:
                        await self._find_missed()
                    await self._load_snapshots()
                    await self._read_streams()
                delay = self._retry_s
            except RedisUnreachable:  # logged by the outage
                delay = min(2 * delay, max(self._heartbeat_s, 2 * self._retry_s))
                await asyncio.sleep(delay)

    async def _find_missed(self) -> None:
        """After an outage: is Redis back, and whose stream has been trimmed beyond what is known here?"""
        await self._redis.ping()
        views = [view for view in self._views.values() if view.loaded]
        async with self._redis.pipeline(transaction=False) as pipe:
            for view in views:
                pipe.getrange(view.keys.snapshot, 0, NUMBER_BYTES - 1)
            for view, start in zip(views, await pipe.execute(), strict=True):
                if snapshot_number(start) > view.number:
                    view.loaded = False

    async def _load_snapshots(self) -> None:
        for view in list(self._views.values()):
            if view.loaded or view.retry_at > self._clock():
                continue
            view.retry_at = self._clock() + self._heartbeat_s
            data = cast(bytes | None, await self._redis.get(view.keys.snapshot))
            if data is None:  # not there yet, or Redis was emptied: its worker will notice
                continue
            try:
                hashes = unpack_hashes(data, NUMBER_BYTES)
                if len(data) > NUMBER_BYTES + view.limit * HASH_BYTES:
                    raise ValueError(f"a snapshot of {len(data)} bytes, for {view.limit} hashes at most")
            except ValueError as error:
                self._complain(view, str(error))
                continue
            cached: set[bytes] = set()
            while part := tuple(islice(hashes, LOAD_HASHES)):
                cached.update(part)
                await asyncio.sleep(0)  # a large one must not block the loop
            view.cached, view.number, view.loaded = cached, snapshot_number(data), True

    async def _read_streams(self) -> None:
        views = {view.keys.stream.encode(): view for view in self._views.values() if view.loaded}
        if not views:
            self._followed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_s):
                    await self._followed.wait()
            return
        after = {key: f"{view.number}-0" for key, view in views.items()}
        reply = await self._redis.xread(after, count=READ_ENTRIES, block=self._block_ms)  # type: ignore[arg-type]
        for key, entries in cast(list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]], reply):
            for entry_id, entry in entries:
                if not self._apply(views[key], entry_id, entry):
                    break
            await asyncio.sleep(0)

    def _apply(self, view: _View, entry_id: bytes, entry: Mapping[bytes, bytes]) -> bool:
        """False when only the snapshot can help."""
        try:
            number = int(entry_id.partition(b"-")[0])
            if number == view.number + 1 and RELOAD not in entry:
                view.cached.difference_update(unpack_hashes(entry.get(REMOVED, b"")))
                view.cached.update(unpack_hashes(entry.get(STORED, b"")))
                view.number = number
                view.loaded = len(view.cached) <= view.limit
            else:
                view.loaded = False
        except ValueError as error:
            self._complain(view, str(error))
            view.loaded = False
        return view.loaded

    def _complain(self, view: _View, reason: str) -> None:
        if not view.complained:
            view.complained = True
            log_event(
                LOGGER, logging.WARNING, "a worker's cache events are malformed", key=view.keys.stream, reason=reason
            )
