"""Shared memory between simulated processes: copies block by block in virtual time, whatever happens to the holder."""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

from sim.loop import SimLoop
from sim.toy import BLOCK_BYTES, ToyPool

from common.errors import HandoverError, TransportUnavailable
from kvtransfer.transport import BlockMemory, Offer, Progress, Ticket, Transport

HALF = BLOCK_BYTES // 2


class Machine:
    """All memory of one host, and what is to be noticed of copies: on_read(ticket, holder, block), on_write(pool, block)."""

    def __init__(self, loop: SimLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.pools: dict[str, ToyPool] = {}  # by nonce; a killed process's too, for those who have mapped it
        self.piece_s = rng.choice([0.002, 0.002, 0.02, 0.2])  # a block takes up to so long
        self.stall = 0.0  # probability, of each copy
        self.stall_s = 0.0
        self.on_read: Callable[[Ticket, ToyPool, int], None] = lambda ticket, pool, block: None
        self.on_write: Callable[[Any, int], None] = lambda pool, block: None

    def transport(self) -> Transport:
        return Transport("shm", lambda pool: MachineHolder(self, pool), lambda executor, channel: MachineReader(self))  # type: ignore[arg-type,return-value]


class MachineHolder:
    name = "shm"

    def __init__(self, machine: Machine, pool: ToyPool) -> None:
        self._nonce = f"{machine.rng.getrandbits(64):016x}"
        machine.pools[self._nonce] = pool

    def offer(self) -> Offer:
        return Offer("shm", {"at": self._nonce})

    def verify(self, proof: bytes) -> bool:
        return proof == self._nonce.encode()


class MachineReader:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._source: ToyPool | None = None

    async def open(self, offer: Offer) -> bytes:
        self._source = self._machine.pools.get(offer.params["at"])
        if self._source is None:
            raise TransportUnavailable("the holder's memory is not there")
        return offer.params["at"].encode()

    async def pull(
        self, ticket: Ticket, pairs: Sequence[tuple[int, int]], pool: BlockMemory, progress: Progress
    ) -> None:
        if self._source is None:
            raise HandoverError("the holder's memory is not open")
        stop: list[bool] = []
        copying = asyncio.create_task(self._copy(self._source, ticket, pairs, pool, progress, stop))
        cancelled: asyncio.CancelledError | None = None
        while not copying.done():  # as a thread's end
            try:
                await asyncio.wait({copying})
            except asyncio.CancelledError as error:
                cancelled = error
                stop.append(True)
        if cancelled is not None:
            raise cancelled
        copying.result()

    async def _copy(
        self,
        source: ToyPool,
        ticket: Ticket,
        pairs: Sequence[tuple[int, int]],
        pool: BlockMemory,
        progress: Progress,
        stop: list[bool],
    ) -> None:
        """A thread's work: it is cut off by the process's end only, and looks at `stop` between two pieces."""
        machine, rng = self._machine, self._machine.rng
        stalls = rng.randrange(len(pairs)) if pairs and machine.stall and rng.random() < machine.stall else -1
        done = 0
        progress(done)
        for number, (theirs, ours) in enumerate(pairs):
            if stop:
                return
            await asyncio.sleep(machine.piece_s * rng.random())
            for half in (0, HALF):
                machine.on_read(ticket, source, theirs)
                read = bytes(source.memory[theirs * BLOCK_BYTES + half :][:HALF])
                if half and number == stalls:
                    await asyncio.sleep(machine.stall_s)
                elif half and rng.random() < 0.2:
                    await asyncio.sleep(machine.piece_s * rng.random())
                machine.on_write(pool, ours)
                pool.memory[ours * BLOCK_BYTES + half :][:HALF] = read
            done += BLOCK_BYTES
            progress(done)

    def close(self) -> None:
        self._source = None
