"""Transport between processes of one host and user: the reader maps the holder's memfd and copies.

The reader opens /proc/<pid>/fd/<fd> of the holder, read-only, and proves it by the nonce in the
memory's header. Nothing has a name in a file system, so nothing is left behind after a kill.
"""

import fcntl
import hmac
import mmap
import os
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Executor

import grpc
import numpy as np

from common.errors import HandoverError, TransportUnavailable
from kvtransfer.copying import check_pairs, in_turns
from kvtransfer.transport import BlockMemory, HolderPool, HolderTransport, Offer, OnMoved, Ticket, Transport

NAME = "shm"
SLICE_BYTES = 4 * 2**20  # copied between two looks at the stop flag, about 1 ms
TURN_SLICES = 16  # before the next pull has its turn
MAX_NONCE_BYTES = 4096
PARAMS = ("pid", "started", "fd", "size", "nonce_bytes", "blocks_offset", "block_bytes", "num_blocks")


class ShmHolder(HolderTransport):
    """Offers a pool in a memfd."""

    name = NAME

    def __init__(self, pool: HolderPool) -> None:
        if pool.fd is None:
            raise TransportUnavailable("the KV pool is not shared memory")
        self._pool = pool
        self._fd = pool.fd

    def offer(self) -> Offer:
        pool, pid = self._pool, os.getpid()
        values = (
            pid,
            _start_time(pid),
            self._fd,
            os.fstat(self._fd).st_size,
            len(pool.nonce),
            pool.blocks_offset,
            pool.block_bytes,
            pool.num_blocks,
        )
        return Offer(NAME, {name: str(value) for name, value in zip(PARAMS, values, strict=True)})

    def verify(self, proof: bytes) -> bool:
        return hmac.compare_digest(proof, self._pool.nonce)


class ShmReader:
    """Copies blocks out of one holder's memfd."""

    def __init__(self, executor: Executor, channel: grpc.aio.Channel) -> None:
        self._executor = executor
        self._map: mmap.mmap | None = None
        self._blocks_offset = self._block_bytes = self._num_blocks = 0

    async def open(self, offer: Offer) -> bytes:
        values = offer.integers(*PARAMS)
        size, blocks_offset = values["size"], values["blocks_offset"]
        block_bytes, num_blocks = values["block_bytes"], values["num_blocks"]
        nonce_bytes = values["nonce_bytes"]
        if not 0 < nonce_bytes <= min(MAX_NONCE_BYTES, blocks_offset) or not block_bytes:
            raise TransportUnavailable("the offer's header makes no sense", field="offer")
        if blocks_offset + num_blocks * block_bytes > size:
            raise TransportUnavailable("the offer names more blocks than bytes", field="offer")
        self._map = _map_memfd(values["pid"], values["started"], values["fd"], size)
        self._blocks_offset, self._block_bytes, self._num_blocks = blocks_offset, block_bytes, num_blocks
        return self._map[:nonce_bytes]

    async def pull(
        self, ticket: Ticket, pairs: Sequence[tuple[int, int]], pool: BlockMemory, progress: OnMoved
    ) -> None:
        if self._map is None:
            raise HandoverError("the holder's memory is not open")
        check_pairs(pairs, self._num_blocks, self._block_bytes, pool)
        stop = threading.Event()
        copy = _copy(self._map, self._blocks_offset, tuple(pairs), pool, stop, progress)
        await in_turns(self._executor, copy, on_cancel=stop.set)

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None


def _runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(first source, first target, count) of blocks that lie side by side on both sides."""
    start = 0
    for end in range(1, len(pairs) + 1):
        source, target = pairs[start]
        if end == len(pairs) or pairs[end] != (source + end - start, target + end - start):
            yield source, target, end - start
            start = end


def _copy(
    mapped: mmap.mmap,
    blocks_offset: int,
    pairs: Sequence[tuple[int, int]],
    pool: BlockMemory,
    stop: threading.Event,
    progress: OnMoved,
) -> Generator[None]:
    """Runs in the copy thread, a turn at a time; numpy lets go of the interpreter lock while it copies."""
    source = np.frombuffer(mapped, np.uint8, offset=blocks_offset)
    target = np.frombuffer(pool.memory, np.uint8)
    try:
        done = slices = 0
        progress(done)
        for first_source, first_target, count in _runs(pairs):
            source_at, target_at = first_source * pool.block_bytes, first_target * pool.block_bytes
            for start in range(0, count * pool.block_bytes, SLICE_BYTES):
                if stop.is_set():
                    return
                size = min(SLICE_BYTES, count * pool.block_bytes - start)
                np.copyto(target[target_at + start :][:size], source[source_at + start :][:size])
                done += size
                slices += 1
                progress(done)
                if slices % TURN_SLICES == 0:
                    yield
    finally:
        del source, target  # even in a traceback no view may keep the map from closing


def _map_memfd(pid: int, started: int, fd: int, size: int) -> mmap.mmap:
    """Maps another process's memfd read-only. Raises TransportUnavailable if it isn't that, or not reachable."""
    path = f"/proc/{pid}/fd/{fd}"
    try:
        if not os.readlink(path).startswith("/memfd:"):  # before open(), which may have effects on a device
            raise TransportUnavailable(f"{path} is not a memfd")
        own_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if _start_time(pid) != started:  # after open(): it was that process's fd
                raise TransportUnavailable(f"process {pid} is not the holder any more, or not on this host")
            if not fcntl.fcntl(own_fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise TransportUnavailable(f"{path} could be cut short, which would kill its readers")
            if os.fstat(own_fd).st_size != size:
                raise TransportUnavailable(f"{path} has not the {size} bytes of the offer")
            return mmap.mmap(own_fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        finally:
            os.close(own_fd)
    except (OSError, ValueError, OverflowError) as error:
        raise TransportUnavailable(f"the holder's memory is not reachable here: {error}") from error


def _start_time(pid: int) -> int:
    """Clock ticks from boot to the start of a process; with the pid, names a process for good (proc(5))."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


TRANSPORT = Transport(NAME, ShmHolder, ShmReader)
