"""How KV moves between simulated processes: memory that they share, or the real frames over the simulated network.

Copies take virtual time, block by block or frame by frame, and go on whatever happens to the holder.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

from common.errors import HandoverError, TransportUnavailable
from kvtransfer.transport import BlockMemory, HolderTransport, Offer, OnMoved, Ticket, Transport
from kvtransfer.transports.grpc import GrpcHolder, GrpcReader, Incoming
from sim.toy import BLOCK_BYTES, ToyPool
from sim.virtual_time import SimLoop

HALF = BLOCK_BYTES // 2


class Machine:
    """All memory of one host, and who is told of each read (ticket, holder, block) and each write (pool, block)."""

    def __init__(self, loop: SimLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.kind = rng.choice(["shm", "shm", "grpc", "both"])
        self.frame_bytes = rng.choice([100, 300, 2**20])
        self.last_ticket: Ticket | None = None  # that a holder has checked
        self.pulls_over_grpc = 0
        self.cut_off = 0  # copies, by a cancellation
        self.pools: dict[str, ToyPool] = {}  # by nonce; a killed process's too, for those who have mapped it
        self.piece_s = rng.choice([0.002, 0.002, 0.02, 0.2])  # a block takes up to so long
        self.stall = 0.0  # probability, of each copy
        self.stall_s = 0.0
        self.on_read: Callable[[Ticket, ToyPool, int], None] = lambda ticket, pool, block: None
        self.on_write: Callable[[Any, int], None] = lambda pool, block: None

    def transports(self) -> list[Transport]:
        """As a worker would choose them."""
        shm = Transport("shm", lambda pool: MachineHolder(self, pool), lambda executor, channel: MachineReader(self))  # type: ignore[arg-type,return-value]
        frames = Transport(
            "grpc", lambda pool: FramesHolder(self, pool), lambda executor, channel: FramesReader(self, channel)
        )  # type: ignore[arg-type]
        return {"shm": [shm], "grpc": [frames], "both": [shm, frames]}[self.kind]


class MachineHolder(HolderTransport):
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
        self, ticket: Ticket, pairs: Sequence[tuple[int, int]], pool: BlockMemory, progress: OnMoved
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
            self._machine.cut_off += 1
            raise cancelled
        copying.result()

    async def _copy(
        self,
        source: ToyPool,
        ticket: Ticket,
        pairs: Sequence[tuple[int, int]],
        pool: BlockMemory,
        progress: OnMoved,
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


class SimExecutor(Executor):
    """One thread of the node that submits: work begins in order, each after a delay, and runs at one moment."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._free_at = 0.0

    def submit(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        machine, future = self._machine, Future[Any]()
        self._free_at = max(self._free_at, machine.loop.time()) + machine.piece_s * machine.rng.random()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(*args, **options))
                except Exception as error:
                    future.set_exception(error)

        machine.loop.call_at(self._free_at, run)
        return future


class FramesHolder(GrpcHolder):
    """The real one, whose reads are noticed."""

    def __init__(self, machine: Machine, pool: ToyPool) -> None:
        super().__init__(pool)
        self._machine = machine
        self._memory = pool
        self._executor = SimExecutor(machine)  # type: ignore[assignment]

    async def send(self, block_ids: Sequence[int], check: Any, write: Any) -> None:
        machine, memory, ticket = self._machine, self._memory, self._machine.last_ticket
        assert ticket is not None
        machine.pulls_over_grpc += 1

        def check_after_read() -> None:  # the frame was made at this moment
            for block in block_ids:
                machine.on_read(ticket, memory, block)
            check()

        await super().send(block_ids, check_after_read, write)


class FramesReader(GrpcReader):
    """The real one, whose writes are noticed."""

    def __init__(self, machine: Machine, channel: Any) -> None:
        super().__init__(_NoticedWrites(machine), channel)


class _NoticedWrites(SimExecutor):
    def submit(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        def noticed() -> Any:
            incoming: Incoming = work.func.__self__  # type: ignore[attr-defined]
            for block in incoming._block_ids:
                self._machine.on_write(incoming._pool, block)
            return work(*args, **options)

        return super().submit(noticed)
