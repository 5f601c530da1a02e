"""Who gets blocks next: submissions wait in order, under their leases, until the engine has room."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from collections.abc import Sequence as Sequenced
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from common.engine.block_table import Reservation
from common.engine.engine import Engine
from common.engine.sequence import Sequence
from common.errors import KVExpired


@dataclass(eq=False, slots=True)
class QueuedForks:
    forks: Sequenced[Sequence]
    granted: asyncio.Future[Reservation]


class Admission:
    """First come, first served. All methods belong to one event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiters: deque[QueuedForks] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    @asynccontextmanager
    async def reserved(
        self, forks: Sequenced[Sequence], voided: asyncio.Future[None] | None = None
    ) -> AsyncIterator[Reservation]:
        """Blocks for the forks' common tokens, to be filled in the body: afterwards the forks run.

        If the body fails, or the wait is cancelled, the blocks are free again. Raises KVExpired if the
        claim on what would fill them is voided meanwhile.
        """
        reservation = await self._reserve(forks, voided)
        try:
            yield reservation
        except BaseException:
            self._engine.cancel(reservation)
            self.poll()
            raise
        self._engine.admit(reservation)

    async def _reserve(self, forks: Sequenced[Sequence], voided: asyncio.Future[None] | None) -> Reservation:
        waiter = QueuedForks(forks, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self.poll()
        try:
            ends: set[asyncio.Future[Any]] = {waiter.granted} if voided is None else {waiter.granted, voided}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not waiter.granted.done():
                raise KVExpired("the holder was lost while the request waited for blocks")
        except BaseException:
            self._withdraw(waiter)
            raise
        return waiter.granted.result()

    def _withdraw(self, waiter: QueuedForks) -> None:
        if waiter.granted.done():  # in the same turn of the loop
            self._engine.cancel(waiter.granted.result())
        else:
            self._waiters.remove(waiter)
        self.poll()

    def poll(self) -> None:
        """Grants what there is room for now; to be called whenever blocks or places may have become free."""
        while self._waiters:
            waiter = self._waiters[0]
            reservation = self._engine.reserve(waiter.forks)
            if reservation is None:
                return
            self._waiters.popleft()
            waiter.granted.set_result(reservation)
