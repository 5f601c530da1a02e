"""Transport between any two hosts: a stream of checksummed frames over the KV service's own connection.

The blocks asked for are one stream of bytes, cut into frames. HTTP/2 flow control holds the holder back: it makes a
frame of a pull when the one before is on its way, so its memory doesn't depend on how slow readers are.
"""

import asyncio
import hmac
import secrets
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from common.errors import HandoverError, TransportUnavailable
from common.rpc.convert import error_from_proto
from common.rpc.pb import kv_pb2
from kvtransfer.copying import check_pairs, in_thread, pieces
from kvtransfer.transport import BlockMemory, HolderTransport, Offer, OnMoved, Ticket, Transport, WriteFrame

NAME = "grpc"
PULL = "/kvrelay.v1.KV/Pull"
MAX_FRAME_BYTES = 2**20  # of data, that a reader takes
FRAME_BYTES = MAX_FRAME_BYTES  # that a holder sends
NONCE_BYTES = 32


class GrpcHolder(HolderTransport):
    """Offers any pool. The nonce shows that a reader's calls reach the process that made the offer."""

    name = NAME

    def __init__(self, pool: BlockMemory) -> None:
        self._pool = pool
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kv-frames")  # its thread ends with this object

    def offer(self) -> Offer:
        shape = {"block_bytes": str(self._pool.block_bytes), "num_blocks": str(self._pool.num_blocks)}
        return Offer(NAME, {**shape, "nonce": self._nonce.hex()})

    def verify(self, proof: bytes) -> bool:
        return hmac.compare_digest(proof, self._nonce)

    async def send(self, block_ids: Sequence[int], check: Callable[[], None], write: WriteFrame) -> None:
        """Writes the blocks as frames. None leaves that was made after its blocks were freed: check raises."""
        total = len(block_ids) * self._pool.block_bytes
        for offset in range(0, total, FRAME_BYTES):
            size = min(FRAME_BYTES, total - offset)
            frame = await in_thread(self._executor, partial(make_frame, self._pool, block_ids, offset, size))
            check()
            await write(frame)


class GrpcReader:
    """Asks one holder for blocks, and writes the frames that are right into the pool."""

    def __init__(self, executor: Executor, channel: grpc.aio.Channel) -> None:
        self._executor = executor
        # Frames stay bytes here: the copy thread decodes them.
        self._pull: Any = channel.unary_stream(PULL, kv_pb2.PullRequest.SerializeToString)
        self._block_bytes = self._num_blocks = 0

    async def open(self, offer: Offer) -> bytes:
        shape = offer.integers("block_bytes", "num_blocks")
        try:
            nonce = bytes.fromhex(offer.params.get("nonce", ""))
        except ValueError as error:
            raise TransportUnavailable("the offer's nonce is not hexadecimal", field="offer.nonce") from error
        self._block_bytes, self._num_blocks = shape["block_bytes"], shape["num_blocks"]
        return nonce

    async def pull(
        self, ticket: Ticket, pairs: Sequence[tuple[int, int]], pool: BlockMemory, progress: OnMoved
    ) -> None:
        check_pairs(pairs, self._num_blocks, self._block_bytes, pool)
        request = kv_pb2.PullRequest(
            handle_id=ticket.handle_id,
            epoch=ticket.epoch,
            reader_id=ticket.reader_id,
            block_ids=[source for source, _ in pairs],
            transport=NAME,
        )
        incoming = Incoming([target for _, target in pairs], pool, progress)
        progress(0)
        try:
            call = self._pull(request)  # the claim ends it when nothing comes, the holder when its lease ends
        except grpc.aio.UsageError as error:
            raise HandoverError("the stream of blocks broke: the channel is closed") from error
        cancellations = _cancellations()
        try:
            while (frame := await _next(call, cancellations)) is not None:
                await in_thread(self._executor, partial(incoming.take, frame))
        finally:
            call.cancel()
        incoming.check_complete()

    def close(self) -> None:
        """The channel is the connection's."""


async def _next(call: Any, cancellations: int) -> bytes | None:
    """The next frame; None: the stream has ended well. Raises HandoverError for a stream that breaks.

    gRPC takes a closed channel for a cancellation, and may lose one that coincides with a failing connection; so this
    task's own count of them, since there were `cancellations`, is what counts.
    """
    try:
        frame: Any = await call.read()
    except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
        reason = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else error
        raise HandoverError(f"the stream of blocks broke: {reason}") from error
    except asyncio.CancelledError as error:
        if _cancellations() > cancellations:
            raise
        raise HandoverError("the stream of blocks broke: the channel was closed") from error
    if _cancellations() > cancellations:
        raise asyncio.CancelledError
    return None if frame is grpc.aio.EOF else frame


def _cancellations() -> int:
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


class Incoming:
    """A stream of frames on its way into blocks, `done` bytes of it so far. Works in the copy thread."""

    def __init__(self, block_ids: Sequence[int], pool: BlockMemory, progress: OnMoved) -> None:
        self._block_ids = block_ids
        self._pool = pool
        self._progress = progress
        self._total = len(block_ids) * pool.block_bytes
        self._done = 0

    def take(self, message: bytes) -> None:
        """Copies the next frame's data; of a frame that is wrong, nothing."""
        try:
            frame = kv_pb2.Frame.FromString(message)
        except DecodeError as error:
            raise HandoverError("a frame can't be decoded", field="frame") from error
        if frame.HasField("error"):
            cause = error_from_proto(frame.error)
            raise cause if isinstance(cause, HandoverError) else HandoverError(f"the holder failed: {cause.message}")
        data, left = frame.data, self._total - self._done
        if frame.offset != self._done:
            raise HandoverError(f"a frame is at {frame.offset}, not at {self._done}", field="frame.offset")
        if not 0 < len(data) <= min(MAX_FRAME_BYTES, left):
            raise HandoverError(f"a frame has {len(data)} bytes where {left} are left", field="frame.data")
        if frame.checksum != checksum(self._done, data):
            raise HandoverError(f"the frame at {self._done} is corrupt", field="frame.checksum")
        source, target, at = np.frombuffer(data, np.uint8), np.frombuffer(self._pool.memory, np.uint8), 0
        for start, length in pieces(self._block_ids, self._pool.block_bytes, self._done, len(data)):
            np.copyto(target[start : start + length], source[at : at + length])  # without the interpreter lock
            at += length
        self._done += at
        self._progress(self._done)

    def check_complete(self) -> None:
        if self._done != self._total:
            raise HandoverError(f"the stream of blocks ended after {self._done} of {self._total} bytes")


def make_frame(pool: BlockMemory, block_ids: Sequence[int], offset: int, size: int) -> kv_pb2.Frame:
    """Copies out of the pool."""
    memory = pool.memory
    data = b"".join(memory[at : at + length] for at, length in pieces(block_ids, pool.block_bytes, offset, size))
    return kv_pb2.Frame(offset=offset, data=data, checksum=checksum(offset, data))


def checksum(offset: int, data: bytes) -> int:
    """CRC-32 of a frame; zlib lets go of the interpreter lock."""
    return zlib.crc32(data, zlib.crc32(offset.to_bytes(8, "little")))


TRANSPORT = Transport(NAME, GrpcHolder, GrpcReader)
