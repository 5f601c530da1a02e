"""A reader's claim on one handle: keeps the lease alive, pulls the blocks, confirms with the holder."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from common.deadlines import Deadlines
from common.errors import HandoverError, KVExpired, KVRelayError, PullStalled, WorkerLost
from common.log import get_logger, log_event
from kvtransfer.connection import Connection
from kvtransfer.handle import KVHandle
from kvtransfer.transport import BlockMemory, Ticket

log = get_logger("kv")

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class PullStats:
    """What one pull moved; seconds from the first byte to the last."""

    bytes: int
    seconds: float
    transport: str


class Claim:
    """One reader's hold on one handle. A claim gets an id of its own, so the holder tells two of them apart."""

    def __init__(
        self,
        handle: KVHandle,
        connection: Connection,
        pool: BlockMemory,
        deadlines: Deadlines,
        clock: Clock,
        sleep: Sleep,
        copying: "CopyProgress",
    ) -> None:
        self.handle = handle
        self._connection = connection
        self._pool = pool
        self._deadlines = deadlines
        self._clock = clock
        self._sleep = sleep
        self._copying = copying
        self._ticket = Ticket(handle.id, handle.epoch, secrets.randbits(64) | 1)
        self._renewer: asyncio.Task[None] | None = None
        self._lease_s = handle.lease_s
        self._renewed_at = clock()
        self._broken_seen = False  # the connection's break has led to a renewal
        self._pulls = 0
        self._void: BaseException | None = None  # why what was copied can't be valid
        self._answered = False  # the holder has nothing to free any more

    async def pull(self, pairs: Sequence[tuple[int, int]]) -> PullStats:
        """Copies the holder's block (first of a pair) into this pool's (second).

        The destination blocks are the caller's, who may free them as soon as this returns or raises,
        not before. It doesn't raise before the last byte is written, however late a stuck copy ends.
        """
        self._check_valid()
        if not {source for source, _ in pairs} <= set(self.handle.block_ids):
            raise HandoverError("a source block is not the handle's", field="block_ids")
        if len({target for _, target in pairs}) != len(pairs):
            raise HandoverError("a destination block comes twice", field="block_ids")
        track = _Track(self._clock, self._copying)
        copying = asyncio.create_task(self._connection.transport.pull(self._ticket, pairs, self._pool, track.moved))
        self._pulls += 1
        try:
            await self._wait(copying, track)
            size = len(pairs) * self._pool.block_bytes
            if track.bytes != size:
                raise HandoverError(f"{track.bytes} of {size} bytes came")
        except BaseException as error:
            self._void = self._void or error
            await _end(copying)
            raise
        finally:
            self._pulls -= 1
        return PullStats(size, track.last_at - track.first_at, self._connection.transport_name)

    async def confirm(self) -> None:
        """Makes the copies valid, and the holder frees its blocks. Raises KVExpired unless it held them until now."""
        self._check_valid()
        if self._pulls:
            raise HandoverError("a pull is still running")
        self._stop_renewing()
        self._void = HandoverError("the claim has been released")
        try:
            held = await self._connection.client.release(*self._ticket)
        except KVRelayError as error:
            self._answered = True
            raise KVExpired(f"the holder did not confirm: {error.message}") from error
        self._answered = True
        if not held:
            raise KVExpired("the lease ended before the copy did")

    async def renew(self, block_ids: Sequence[int] = ()) -> None:
        """Renews once; the first time, with the blocks to be read, claims the handle."""
        asked_at = self._clock()
        try:
            self._lease_s = await self._connection.client.renew(*self._ticket, block_ids)
        except HandoverError as error:  # a refusal: there is nothing to release
            self._answered = True
            self._void = error
            raise
        self._renewed_at = asked_at

    def keep_renewing(self) -> None:
        """Starts to renew every third of the lease, and at once when the connection breaks."""
        self._renewer = asyncio.create_task(self._renew_until_void())

    @property
    def voided(self) -> asyncio.Task[None]:
        """Done when the claim has become void; of a claim that is kept renewed."""
        assert self._renewer is not None
        return self._renewer

    def stop(self) -> bool:
        """Ends the claim; False: the holder may still have the blocks, for this claim."""
        self._stop_renewing()
        self._void = self._void or HandoverError("the claim has ended")
        return self._answered

    async def give_up(self) -> None:
        """Tells the holder that it may free the blocks; if that fails, the lease ends by itself."""
        try:
            await self._connection.client.release(*self._ticket)
        except KVRelayError as error:
            log_event(log, logging.INFO, "claim left to expire", holder=self.handle.address, error=error.code)

    async def _renew_until_void(self) -> None:
        while self._void is None:
            await self._pause(self._lease_s / 3)
            try:
                await self.renew()
            except WorkerLost as error:  # once or twice does no harm: the holder has the last word
                if self._connection.retired or self._clock() - self._renewed_at >= self._lease_s:
                    self._void = error
            except Exception as error:  # a refusal, or a defect: either way nothing renews from here on
                self._void = error

    async def _pause(self, seconds: float) -> None:
        """Sleeps, but no longer than until the connection breaks."""
        if self._broken_seen:
            return await self._sleep(seconds)
        pause, broken = asyncio.ensure_future(self._sleep(seconds)), asyncio.ensure_future(self._connection.gone.wait())
        try:
            await asyncio.wait({pause, broken}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._broken_seen = self._connection.retired
            pause.cancel()
            broken.cancel()

    def _stop_renewing(self) -> None:
        if self._renewer is not None:
            self._renewer.cancel()

    def _check_valid(self) -> None:
        if self._void is not None:
            raise KVExpired(f"the claim is void: {self._void}") from self._void

    async def _wait(self, copying: asyncio.Task[None], track: "_Track") -> None:
        """Until the copy has ended, stalls, or the claim is void."""
        patience = self._deadlines.pull_progress_s
        waited_for: set[asyncio.Task[Any]] = {copying} if self._renewer is None else {copying, self._renewer}
        while True:
            left = max(0.0, track.heard_at + patience - self._clock())
            done, _ = await asyncio.wait(waited_for, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if copying in done:
                return copying.result()
            self._check_valid()
            if self._clock() - track.heard_at >= patience:
                raise PullStalled(f"no progress for {patience:g} s after {track.bytes} bytes")


class CopyProgress:
    """What all pulls of one reader, which share a thread, have moved; written by that thread, read by the loop."""

    def __init__(self, clock: Clock) -> None:
        self.bytes = 0
        self.last_at = clock()


class _Track:
    """How far a copy is; written by the copy's thread, read by the loop."""

    def __init__(self, clock: Clock, copying: CopyProgress) -> None:
        self._clock = clock
        self._copying = copying
        self._begun = False
        self.bytes = 0
        self.first_at = self.last_at = clock()

    @property
    def heard_at(self) -> float:
        """When it last got on. Before its first turn that is when any other did: the thread is busy, not stuck."""
        return self.last_at if self._begun else max(self.last_at, self._copying.last_at)

    def moved(self, total: int) -> None:
        self.last_at = self._copying.last_at = self._clock()
        if not self._begun:
            self.first_at, self._begun = self.last_at, True
        self._copying.bytes += total - self.bytes
        self.bytes = total


async def _end(task: asyncio.Task[None]) -> None:
    """Cancels the task and waits for its end, however often the caller is cancelled meanwhile."""
    task.cancel()
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if not task.cancelled():
        task.exception()  # seen: the caller raises its own
    if cancelled is not None:
        raise cancelled
