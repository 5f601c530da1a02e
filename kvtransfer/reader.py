"""The reader's side of the hand-over: claims on handles of any holder, pulled into one pool."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from common.deadlines import Deadlines
from common.errors import FingerprintMismatch, HandoverError, WorkerLost
from common.layout import KVLayout
from common.rpc.channel import OpenChannel, open_channel
from kvtransfer.claim import Claim, Clock, CopyProgress, Sleep
from kvtransfer.connection import Connections, Permit, permit_all
from kvtransfer.handle import KVHandle
from kvtransfer.transport import BlockMemory, Transport, choose


class KVReader:
    """Fetches KV from any holder into one pool.

        async with reader.claimed(handle) as claim:
            stats = await claim.pull(pairs)
            await claim.confirm()  # returns: the copies are valid

    However the block ends, no copy is running then, and a claim that was not confirmed is given up.
    """

    def __init__(
        self,
        pool: BlockMemory,
        layout: KVLayout,
        fingerprint: str,
        deadlines: Deadlines,
        clock: Clock,
        *,
        transports: Sequence[Transport] | None = None,
        channel: OpenChannel = open_channel,
        permit: Permit = permit_all,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.num_claims = 0
        self._pool = pool
        self._layout_id = layout.layout_id
        self._fingerprint = fingerprint
        self._deadlines = deadlines
        self._clock = clock
        self._copying = CopyProgress(clock)
        self._sleep = sleep
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kv-copy")
        self._connections = Connections(
            fingerprint=fingerprint,
            layout_id=layout.layout_id,
            deadlines=deadlines,
            transports=choose() if transports is None else transports,
            executor=self._executor,
            channel=channel,
            permit=permit,
        )

    @property
    def moved_bytes(self) -> int:
        """Since the start, by all pulls."""
        return self._copying.bytes

    @property
    def num_connections(self) -> int:
        return self._connections.num_open

    @asynccontextmanager
    async def claimed(self, handle: KVHandle) -> AsyncIterator[Claim]:
        """Claims the handle and renews its lease until the block ends.

        Raises HandoverError, also for a holder that is gone.
        """
        for name, theirs, ours in (
            ("fingerprint", handle.fingerprint, self._fingerprint),
            ("layout_id", handle.layout_id, self._layout_id),
        ):
            if theirs != ours:
                raise FingerprintMismatch(f"the handle's {name} is {theirs!r}, here it is {ours!r}", field=name)
        async with self._connections.use(handle.address, handle.epoch) as connection:
            claim = Claim(handle, connection, self._pool, self._deadlines, self._clock, self._sleep, self._copying)
            self.num_claims += 1
            try:
                try:
                    await claim.renew(handle.block_ids)
                except WorkerLost as error:  # the holder, not the worker that reads
                    raise HandoverError(error.message) from error
                claim.keep_renewing()
                yield claim
            finally:
                self.num_claims -= 1
                if not claim.stop():
                    self._connections.finish(connection, claim.give_up())

    async def close(self) -> None:
        """Drops all connections. Claims should have ended."""
        await self._connections.close()
        self._executor.shutdown(wait=False)
