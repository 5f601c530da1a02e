"""Builders for hand-over tests: a pool in a plain memfd, a holder behind real gRPC, a transport with a gate."""

import asyncio
import fcntl
import mmap
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from common.deadlines import Deadlines
from common.layout import KVLayout
from common.rpc.channel import GrpcServer
from common.rpc.pb import kv_pb2_grpc, types_pb2
from kvtransfer.handle import KVHandle
from kvtransfer.holder import KVHolder
from kvtransfer.lease import LeaseTable
from kvtransfer.transport import Offer, ReaderTransport, Transport
from kvtransfer.transports.shm import ShmHolder

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=64, dtype="bfloat16")  # 8 KiB a block
FINGERPRINT = "model-a"
EPOCH = 77
FAST = Deadlines().scaled(0.1)  # lease 3 s, rpc 0.5 s, pull without progress 0.5 s


class FakePool:
    """A pool in a memfd: a header page with the nonce, then blocks of random bytes."""

    blocks_offset = 4096

    def __init__(self, num_blocks: int = 16, block_bytes: int = LAYOUT.block_bytes, *, sealed: bool = True) -> None:
        self.num_blocks, self.block_bytes = num_blocks, block_bytes
        self.nonce = secrets.token_bytes(32)
        self.fd = os.memfd_create("kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.blocks_offset + num_blocks * block_bytes)
        self._map = mmap.mmap(self.fd, 0)
        self._map[:32] = self.nonce
        if sealed:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.memory = memoryview(self._map)[self.blocks_offset :]
        self.memory[:] = secrets.token_bytes(len(self.memory))

    def block(self, block_id: int) -> bytes:
        return bytes(self.memory[block_id * self.block_bytes : (block_id + 1) * self.block_bytes])

    def blocks(self) -> list[bytes]:
        return [self.block(i) for i in range(self.num_blocks)]

    def close(self) -> None:
        self.memory.release()
        self._map.close()
        os.close(self.fd)


@dataclass
class ManualClock:
    """A clock that a test moves; with `running` real time is added."""

    offset: float = 0.0
    running: bool = True

    def __call__(self) -> float:
        return self.offset + (time.monotonic() if self.running else 0.0)


class GateReader:
    """A reader's half whose pulls move one byte count, then wait for the gate, even when cancelled."""

    def __init__(self, gate: asyncio.Event, log: list[str], proof: bytes = b"proof") -> None:
        self.gate, self.log, self.proof = gate, log, proof

    async def open(self, offer: Offer) -> bytes:
        self.log.append("open")
        return self.proof

    async def pull(self, ticket, pairs, pool, progress) -> None:
        progress(0)
        self.log.append("begin")
        cancelled = False
        while not self.gate.is_set():
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.log.append("cancelled")
                cancelled = True
        self.log.append("end")
        if cancelled:
            raise asyncio.CancelledError
        progress(len(pairs) * pool.block_bytes)

    def close(self) -> None:
        self.log.append("close")


class BlockedCopy:
    """A progress callback that holds the copy thread after its first bytes."""

    def __init__(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        self.last = 0

    def __call__(self, done: int) -> None:
        self.last = done
        if done:
            self.reached.set()
            assert self.go.wait(30)


class HeldReader:
    """A reader's half whose copies tell `copy`, too, how far they are."""

    def __init__(self, inner: ReaderTransport, copy: BlockedCopy) -> None:
        self.inner, self.copy = inner, copy
        self.open, self.close = inner.open, inner.close

    async def pull(self, ticket, pairs, pool, progress) -> None:
        def both(done: int) -> None:
            progress(done)
            self.copy(done)

        await self.inner.pull(ticket, pairs, pool, both)


def held_back(transport: Transport, copy: BlockedCopy) -> Transport:
    return replace(transport, reader=lambda executor, channel: HeldReader(transport.reader(executor, channel), copy))


class GateHolder:
    name = "gate"

    def offer(self) -> Offer:
        return Offer("gate", {})

    def verify(self, proof: bytes) -> bool:
        return proof == b"proof"


def gate_transport(gate: asyncio.Event, log: list[str], proof: bytes = b"proof") -> Transport:
    return Transport("gate", lambda pool: GateHolder(), lambda executor, channel: GateReader(gate, log, proof))


@dataclass
class RunningHolder:
    """One holder in this process; `calls` counts the RPCs that came."""

    pool: FakePool
    table: LeaseTable
    clock: ManualClock
    service: "CountingHolder"
    server: GrpcServer
    freed: list[int] = field(default_factory=list)

    def hold(self, block_ids: Sequence[int] = (3, 4, 9)) -> KVHandle:
        lease = self.table.hold("sequence", block_ids, 16 * len(block_ids) - 3)
        key = types_pb2.AttemptKey(request_id="r1", attempt=1)
        return KVHandle.from_proto(self.service.handle(lease, address=self.server.address, key=key))


class CountingHolder(KVHolder):
    """Counts calls, and can be told to hang."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.calls: dict[str, int] = {}
        self.hanging: set[str] = set()

    async def _count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        if name in self.hanging:
            await asyncio.sleep(60)

    async def Connect(self, request, context):
        await self._count("Connect")
        return await super().Connect(request, context)

    async def Prove(self, request, context):
        await self._count("Prove")
        return await super().Prove(request, context)

    async def Renew(self, request, context):
        await self._count("Renew")
        return await super().Renew(request, context)

    async def Release(self, request, context):
        await self._count("Release")
        return await super().Release(request, context)


@asynccontextmanager
async def running_holder(
    *,
    epoch: int = EPOCH,
    port: int = 0,
    fingerprint: str = FINGERPRINT,
    layout: KVLayout = LAYOUT,
    deadlines: Deadlines = FAST,
    transports: Sequence[object] | None = None,
    expiry: bool = False,
) -> AsyncIterator[RunningHolder]:
    """Ends by proving that no lease is left and every block came back once."""
    pool, clock, freed = FakePool(), ManualClock(), []
    table = LeaseTable(clock, deadlines, epoch, freed.extend)
    service = CountingHolder(
        table,
        fingerprint=fingerprint,
        layout_id=layout.layout_id,
        transports=[ShmHolder(pool)] if transports is None else transports,
        deadlines=deadlines,
        clock=clock,
    )
    server = GrpcServer("127.0.0.1", port, deadlines)
    kv_pb2_grpc.add_KVServicer_to_server(service, server.server)
    await server.start()
    expiring = asyncio.create_task(service.run()) if expiry else None
    try:
        yield RunningHolder(pool, table, clock, service, server, freed)
    finally:
        if expiring is not None:
            expiring.cancel()
        await server.stop()
        table.close()
        pool.close()
        assert (table.num_held, table.held_blocks) == (0, 0)


async def until(condition, timeout_s: float = 5.0) -> None:
    """Waits until the condition holds; bounded."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def memfds_mapped() -> int:
    """Maps of memfds in this process: its own pools, and those that it reads."""
    with open("/proc/self/maps") as file:
        return sum("/memfd:kv" in line for line in file)
