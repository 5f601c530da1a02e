"""What a worker's prefix cache holds, told to routers through Redis.

    <namespace>:cache:v1:<worker id>:<epoch>:snapshot   number (8 bytes, little-endian), then 16 bytes a hash
    <namespace>:cache:v1:<worker id>:<epoch>:stream     entries <number>-0, numbered without gaps
    <namespace>:cache:v1:<worker id>:epoch              the newest epoch, so that the next one can clear up

An entry is the net change since the one before it: `removed` and `stored`, disjoint, 16 bytes a hash. A snapshot
numbered n holds everything up to entry n, and perhaps more, which is harmless: whoever applies the entries after
n ends up right. The stream is trimmed only up to a snapshot. After a loss (an overflow, Redis away or emptied) a
new snapshot takes a number of its own, and an entry of that number, `reload`, sends followers to it.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from redis.asyncio import Redis

from common.block_hash import HASH_BYTES
from common.deadlines import Deadlines
from common.discovery.redis_client import Outage, raise_if_cancelled
from common.errors import RedisUnreachable

NUMBER_BYTES = 8
STORED, REMOVED, RELOAD = b"stored", b"removed", b"reload"
ENTRY_HASHES = 2048  # of each kind in one entry, at most
TRIM_HASHES = 32_768  # between two snapshots, at least
TRIM_ENTRIES = 4096  # between two snapshots, at most
KEY_LIFE = 6  # times dead_s


@dataclass(frozen=True, slots=True)
class CacheKeys:
    """Where one life of one worker tells of its cache."""

    snapshot: str
    stream: str


def cache_keys(namespace: str, worker_id: str, epoch: int) -> CacheKeys:
    prefix = f"{namespace}:cache:v1:{worker_id}:{epoch:016x}"
    return CacheKeys(f"{prefix}:snapshot", f"{prefix}:stream")


def pack_snapshot(number: int, hashes: Sequence[bytes]) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "little") + b"".join(hashes)


def snapshot_number(data: bytes) -> int:
    """The last entry that a snapshot (or its first 8 bytes) includes."""
    return int.from_bytes(data[:NUMBER_BYTES], "little")


def unpack_hashes(data: bytes, start: int = 0) -> Iterator[bytes]:
    """The hashes from byte `start` on. Raises ValueError when that is not a whole number of them."""
    if len(data) < start or (len(data) - start) % HASH_BYTES:
        raise ValueError(f"{len(data)} bytes are not {start} and some hashes of {HASH_BYTES}")
    return (data[i : i + HASH_BYTES] for i in range(start, len(data), HASH_BYTES))


class CacheEventPublisher:
    """Publishes one worker's cache. Everything happens on the event loop that run() runs on.

    `snapshot` returns all hashes in the cache now: at least as new as what record() was told last. It may be newer.
    """

    def __init__(
        self,
        redis: Redis,
        namespace: str,
        worker_id: str,
        epoch: int,
        snapshot: Callable[[], Sequence[bytes]],
        deadlines: Deadlines,
        outage: Outage | None = None,
        *,
        max_pending: int = 65_536,  # hashes
    ) -> None:
        self.number = 0  # of the last entry
        self._redis = redis
        self._namespace = namespace
        self._worker_id = worker_id
        self._epoch = epoch
        self._snapshot = snapshot
        self._heartbeat_s = deadlines.heartbeat_s
        self._life_ms = max(1, round(deadlines.dead_s * KEY_LIFE * 1000))
        self._outage = outage or Outage()
        self._flush_s = deadlines.cache_flush_s
        self._max_pending = max_pending
        self._keys = cache_keys(namespace, worker_id, epoch)
        self._pending: dict[bytes, bool] = {}  # hash: stored (or removed) since the last entry
        self._reload = True  # only a snapshot can tell what is in the cache
        self._started = False
        self._changed, self._full = asyncio.Event(), asyncio.Event()
        self._refresh_at = 0.0
        self._snapshot_hashes = self._hashes_since = self._entries_since = 0  # of and since the last snapshot

    def record(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Notes what one step changed; a hash in both is in the cache now. Never waits, never grows."""
        if self._reload or not (stored or removed):
            return
        self._pending.update(dict.fromkeys(removed, False))
        self._pending.update(dict.fromkeys(stored, True))
        self._changed.set()
        if len(self._pending) > self._max_pending:
            self._lose()
        elif len(self._pending) >= ENTRY_HASHES:
            self._full.set()

    async def run(self) -> None:
        """Writes until it is cancelled, whatever happens to Redis."""
        delay = self._flush_s
        while True:
            raise_if_cancelled()
            try:
                with self._outage.noticed("cache events"):
                    await self._write()
            except RedisUnreachable:  # logged by the outage
                self._lose()
                await asyncio.sleep(delay)
                delay = min(2 * delay, self._heartbeat_s)
            else:
                delay = self._flush_s
                await _wait(self._changed, self._heartbeat_s)
                if self._changed.is_set():
                    await _wait(self._full, self._flush_s)

    async def close(self) -> None:
        """Takes the worker's cache out of Redis, once run() has ended. Without Redis the keys expire."""
        with contextlib.suppress(RedisUnreachable), self._outage.noticed("cache events"):
            await self._redis.delete(self._keys.snapshot, self._keys.stream)

    def _lose(self) -> None:
        """What was pending or on its way is lost to followers: only a snapshot helps."""
        self._pending.clear()
        self._reload = True
        self._changed.set()
        self._full.set()

    async def _write(self) -> None:
        self._changed.clear()
        self._full.clear()
        if not self._started:
            await self._clear_earlier_epoch()
            self._started = True
        if self._reload:
            await self._write_snapshot(reload=True)
        elif self._pending:
            await self._write_entries()
        enough = max(TRIM_HASHES, 2 * self._snapshot_hashes)
        if not self._reload and (self._hashes_since >= enough or self._entries_since >= TRIM_ENTRIES):
            await self._write_snapshot(reload=False)
        now = asyncio.get_running_loop().time()
        if now >= self._refresh_at:
            await self._refresh()
            self._refresh_at = now + self._heartbeat_s

    async def _write_entries(self) -> None:
        pending, self._pending = self._pending, {}
        entries = list(_entries(pending))
        async with self._redis.pipeline(transaction=False) as pipe:
            for entry in entries:
                self.number += 1
                pipe.xadd(self._keys.stream, entry, id=f"{self.number}-0", nomkstream=True)  # type: ignore[arg-type]
            written = await pipe.execute()
        self._hashes_since += len(pending)
        self._entries_since += len(entries)
        if None in written:  # the stream is gone: Redis lost its data
            self._lose()

    async def _write_snapshot(self, *, reload: bool) -> None:
        if reload:
            self._pending.clear()  # the snapshot has it
            self._reload = False
            self.number += 1
        hashes = self._snapshot()
        async with self._redis.pipeline(transaction=True) as pipe:
            if reload:
                pipe.delete(self._keys.stream)
                pipe.xadd(self._keys.stream, {RELOAD: b""}, id=f"{self.number}-0")
            else:
                pipe.xtrim(self._keys.stream, minid=f"{self.number + 1}-0", approximate=False)
            pipe.set(self._keys.snapshot, pack_snapshot(self.number, hashes), px=self._life_ms)
            pipe.pexpire(self._keys.stream, self._life_ms)
            await pipe.execute()
        self._snapshot_hashes, self._hashes_since, self._entries_since = len(hashes), 0, 0

    async def _refresh(self) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.pexpire(self._keys.snapshot, self._life_ms)
            pipe.pexpire(self._keys.stream, self._life_ms)
            pipe.pexpire(self._epoch_key, self._life_ms)
            snapshot, stream, _ = await pipe.execute()
        if not (snapshot and stream):
            self._lose()

    @property
    def _epoch_key(self) -> str:
        return f"{self._namespace}:cache:v1:{self._worker_id}:epoch"

    async def _clear_earlier_epoch(self) -> None:
        earlier = await self._redis.set(self._epoch_key, f"{self._epoch:016x}", px=self._life_ms, get=True)
        with contextlib.suppress(TypeError, ValueError):  # nothing there, or nothing of ours
            epoch = int(earlier, 16)  # type: ignore[arg-type]
            if epoch != self._epoch:
                keys = cache_keys(self._namespace, self._worker_id, epoch)
                await self._redis.delete(keys.snapshot, keys.stream)


def _entries(pending: Mapping[bytes, bool]) -> Iterator[dict[bytes, bytes]]:
    stored = [block for block, is_stored in pending.items() if is_stored]
    removed = [block for block, is_stored in pending.items() if not is_stored]
    for start in range(0, max(len(stored), len(removed)), ENTRY_HASHES):
        parts = {STORED: stored[start : start + ENTRY_HASHES], REMOVED: removed[start : start + ENTRY_HASHES]}
        yield {name: b"".join(hashes) for name, hashes in parts.items() if hashes}


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
