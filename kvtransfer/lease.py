"""Leases on a holder's blocks: a state machine with no threads, no timers and no network.

filling (the sequence owns the blocks) → held → released or expired. A held lease owns one reference
on each of its blocks. Every operation first expires what is due by its own reading of the clock, so
no release is called good because a timer came late.

A lease is released in one place, LeaseTable.release, by one call, HolderClient.release. Who asks for it: a reader, to
make its copies count (Claim.confirm) or because it has left (Claim.give_up); the router, when nobody will read
(WorkerClient.release_unread). Without a word from either, expire() frees it.
"""

import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from common.deadlines import Deadlines
from common.errors import Draining, EpochMismatch, HandleTaken, HandoverError, KVExpired

HANDLE_ID_BYTES = 16
ROUTER = 0  # the reader id of the router, which renews and releases but never reads


@dataclass(frozen=True, slots=True)
class KVLease:
    """Blocks held for one reader, until `ends_at`."""

    id: bytes = field(repr=False)
    key: str  # the sequence that filled the blocks
    block_ids: tuple[int, ...]
    num_tokens: int  # whose KV is in the blocks
    ends_at: float
    reader_id: int = ROUTER  # who claimed it; ROUTER: nobody yet


@dataclass(frozen=True, slots=True)
class _Ended:
    """What is remembered of a lease for as long as a lease lasts."""

    forget_at: float
    reader_id: int
    released_by: int | None  # None: it expired


class LeaseTable:
    """All leases of one holder; lives on one event loop. Times are those of `clock`, in seconds."""

    def __init__(
        self,
        clock: Callable[[], float],
        deadlines: Deadlines,
        epoch: int,
        free_blocks: Callable[[Sequence[int]], None],
    ) -> None:
        self.epoch = epoch
        self.lease_s = deadlines.lease_s
        self.num_granted = 0
        self.num_released = 0
        self.num_expired = 0
        self._clock = clock
        self._free_blocks = free_blocks
        self._closed = False
        # All leases last equally long and renewal moves a lease to the end: both are in order of time.
        self._held: dict[bytes, KVLease] = {}
        self._ended: dict[bytes, _Ended] = {}
        self._references: Counter[int] = Counter()  # leases on each block

    @property
    def num_held(self) -> int:
        """Leases held now."""
        return len(self._held)

    @property
    def held_blocks(self) -> int:
        """Blocks under at least one lease."""
        return len(self._references)

    def hold(self, key: str, block_ids: Sequence[int], num_tokens: int) -> KVLease:
        """Takes over one reference on each block. Raises Draining after close(); the caller then keeps them."""
        if self._closed:
            raise Draining("this worker is stopping and holds no more blocks")
        now = self._expire_due()
        lease = KVLease(
            secrets.token_bytes(HANDLE_ID_BYTES), key, tuple(block_ids), num_tokens, ends_at=now + self.lease_s
        )
        self._held[lease.id] = lease
        self._references.update(lease.block_ids)
        self.num_granted += 1
        return lease

    def renew(self, handle_id: bytes, epoch: int, reader_id: int, block_ids: Sequence[int] = ()) -> float:
        """Starts the lease anew and returns its length; a reader's first renewal claims the handle.

        Blocks, where some are named, must be the lease's: a handle opens no others.
        """
        self._check_epoch(epoch)
        now = self._expire_due()
        lease = self._find(handle_id)
        owner = _owner(lease.reader_id, reader_id)
        if block_ids and tuple(block_ids) != lease.block_ids:
            raise HandoverError("the lease is on other blocks than these", field="block_ids")
        del self._held[handle_id]
        self._held[handle_id] = replace(lease, reader_id=owner, ends_at=now + self.lease_s)
        return self.lease_s

    def check_reader(self, handle_id: bytes, epoch: int, reader_id: int, block_ids: Sequence[int] = ()) -> None:
        """Raises unless the lease is held now, for this reader, and on all of these blocks."""
        self._check_epoch(epoch)
        self._expire_due()
        lease = self._find(handle_id)
        if reader_id == ROUTER or _owner(lease.reader_id, reader_id) != lease.reader_id:
            raise HandoverError("the handle is not claimed by who wants to read", field="reader_id")
        if block_ids and not set(block_ids) <= set(lease.block_ids):
            raise HandoverError("the lease is on other blocks than these", field="block_ids")

    def release(self, handle_id: bytes, epoch: int, reader_id: int) -> bool:
        """Ends the lease. True: it was held until now, so what this reader has copied is valid.

        Asking again gets the same answer; anybody else who asks later gets False.
        """
        self._check_epoch(epoch)
        now = self._expire_due()
        lease = self._held.get(handle_id)
        if lease is not None:
            owner = _owner(lease.reader_id, reader_id)
            self.num_released += 1
            self._end(lease, _Ended(now + self.lease_s, owner, released_by=reader_id))
            return True
        ended = self._ended.get(handle_id)
        if ended is None:
            raise KVExpired("the lease ended long ago, or this handle is unknown")
        _owner(ended.reader_id, reader_id)
        return ended.released_by == reader_id

    def expire(self, now: float) -> None:
        """Frees every lease that has reached its end, whoever may be reading."""
        while self._held and (lease := next(iter(self._held.values()))).ends_at <= now:
            self.num_expired += 1
            self._end(lease, _Ended(now + self.lease_s, lease.reader_id, released_by=None))
        while self._ended and next(iter(self._ended.values())).forget_at <= now:
            del self._ended[next(iter(self._ended))]

    def next_expiry(self) -> float | None:
        """When the first lease ends, if nobody renews it; None: nothing is held."""
        return next(iter(self._held.values())).ends_at if self._held else None

    def close(self) -> None:
        """Frees all; nothing is held from now on, and every later release is answered False."""
        self._closed = True
        now = self._expire_due()
        for lease in list(self._held.values()):
            self._end(lease, _Ended(now + self.lease_s, lease.reader_id, released_by=None))

    def _find(self, handle_id: bytes) -> KVLease:
        lease = self._held.get(handle_id)
        if lease is None:
            raise KVExpired("the lease has ended, or this handle is unknown")
        return lease

    def _expire_due(self) -> float:
        now = self._clock()
        self.expire(now)
        return now

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise EpochMismatch("the handle is from an earlier life of this worker", field="epoch")

    def _end(self, lease: KVLease, ended: _Ended) -> None:
        del self._held[lease.id]
        self._ended[lease.id] = ended
        self._references.subtract(lease.block_ids)
        for block_id in lease.block_ids:
            if not self._references[block_id]:
                del self._references[block_id]
        self._free_blocks(lease.block_ids)


def _owner(claimed_by: int, reader_id: int) -> int:
    """Whose handle it is once reader_id has asked. Raises HandleTaken."""
    if claimed_by == ROUTER:
        return reader_id
    if reader_id not in (ROUTER, claimed_by):
        raise HandleTaken("another reader has claimed this handle", field="reader_id")
    return claimed_by
