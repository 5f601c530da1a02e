"""Keeping KV alive between its making and its fetching."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.errors import KVRelayError, WorkerLost
from kvtransfer.handle import KVHandle
from kvtransfer.lease import ROUTER
from router.fleet.worker_client import WorkerClient


class Held:
    """A handle that the router keeps alive until a decode worker has what it names."""

    def __init__(self, handle: KVHandle, numerics: str) -> None:
        self.handle = handle
        self.numerics = numerics  # of the holder
        self.taken = False


@asynccontextmanager
async def held(holder: WorkerClient, handle: KVHandle | None, lease_s: float) -> AsyncIterator[Held | None]:
    """Renews the handle until a decode worker has its KV; if none gets it, the blocks are free at once."""
    if handle is None:
        yield None
        return
    kept = Held(handle, holder.record.numerics)
    renewer = asyncio.create_task(_renew(holder, kept, lease_s))
    try:
        yield kept
    finally:
        renewer.cancel()
        if not kept.taken:
            holder.release_unread(handle.id, handle.epoch)


async def _renew(holder: WorkerClient, kept: Held, lease_s: float) -> None:
    while True:
        await asyncio.sleep(lease_s / 3)
        if kept.taken:
            return
        try:
            await holder.holder.renew(kept.handle.id, kept.handle.epoch, ROUTER)
        except WorkerLost:
            continue  # a cut connection may be back for the next one
        except KVRelayError:
            return  # it is released or expired: the decode worker finds out which
