"""Whom a worker may call for KV: a submission names an address, and the registry says whether a worker is there.

Redis is asked for a worker that is not known yet, with a deadline, and read every now and then, so that its loss finds
most workers known. Who was listed once stays known: that a record is missing says nothing (see registry.py).
"""

import asyncio
import contextlib
from collections import OrderedDict

from common.deadlines import Deadlines
from common.discovery.redis_client import raise_if_cancelled
from common.discovery.registry import Registry
from common.errors import EpochMismatch, HandoverError, RedisUnreachable

MOST_KNOWN = 4096  # lives of workers; who was listed the longest time ago goes first


class KnownWorkers:
    """Knows nobody until it follows a registry."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._registry: Registry | None = None
        self._patience_s = 0.0
        self._reading = asyncio.Lock()
        self._reads = 0  # that have begun

    async def follow(self, registry: Registry, deadlines: Deadlines) -> None:
        """Reads the registry every dead_s until it is cancelled, and for whoever asks in between."""
        self._registry, self._patience_s = registry, deadlines.suspect_s
        while True:
            raise_if_cancelled()
            with contextlib.suppress(RedisUnreachable):  # the outage has logged it
                async with self._reading:
                    await self._read(registry)
            await asyncio.sleep(deadlines.dead_s)

    async def check(self, address: str, epoch: int) -> None:
        """Raises HandoverError unless this life of a worker is, or was, listed at this address."""
        if (address, epoch) not in self._known:
            await self._look()
        if (address, epoch) in self._known:
            return
        if any(known == address for known, _ in self._known):
            raise EpochMismatch(f"the handle is of another life of the worker at {address}", field="epoch")
        raise HandoverError(f"the registry lists no worker at {address}", field="handle.address")

    async def _look(self) -> None:
        """One read that begins after this call, shared by all who wait; none while Redis is gone."""
        registry = self._registry
        if registry is None or registry.outage.active:
            return
        asked = self._reads
        with contextlib.suppress(RedisUnreachable, TimeoutError):
            async with asyncio.timeout(self._patience_s), self._reading:
                if self._reads == asked:
                    await self._read(registry)

    async def _read(self, registry: Registry) -> None:
        self._reads += 1
        for record in await registry.workers():
            life = (record.address, record.epoch)
            self._known[life] = None
            self._known.move_to_end(life)
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
