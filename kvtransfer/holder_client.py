"""Calls to one holder. What the holder refuses and what breaks on the way are raised as typed errors."""

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from common.deadlines import Deadlines
from common.errors import HandoverError, WorkerLost
from common.rpc.convert import error_from_proto
from common.rpc.pb import kv_pb2, kv_pb2_grpc
from kvtransfer.transport import Offer


class HolderClient:
    """The KV service at one address, as a reader or (with reader id ROUTER) the router sees it.

    Every call has a deadline, raises the error that the holder answered, or WorkerLost if it didn't.
    """

    def __init__(self, channel: grpc.aio.Channel, address: str, deadlines: Deadlines) -> None:
        self._stub: Any = kv_pb2_grpc.KVStub(channel)  # type: ignore[no-untyped-call]
        self._address = address
        self._deadlines = deadlines

    async def connect(self, epoch: int, fingerprint: str, layout_id: str) -> list[Offer]:
        request = kv_pb2.ConnectRequest(epoch=epoch, fingerprint=fingerprint, layout_id=layout_id)
        reply = await self._call(self._stub.Connect, request, self._deadlines.connect_s)
        return [Offer(offer.name, dict(offer.params)) for offer in reply.offers]

    async def prove(self, epoch: int, transport: str, proof: bytes) -> None:
        request = kv_pb2.ProveRequest(epoch=epoch, transport=transport, proof=proof)
        await self._call(self._stub.Prove, request, self._deadlines.rpc_s)

    async def renew(self, handle_id: bytes, epoch: int, reader_id: int, block_ids: Sequence[int] = ()) -> float:
        """The length of the lease that starts with this answer, seconds. A claim names the blocks to be read."""
        request = kv_pb2.RenewRequest(handle_id=handle_id, epoch=epoch, reader_id=reader_id, block_ids=block_ids)
        reply = await self._call(self._stub.Renew, request, self._deadlines.rpc_s)
        if not (math.isfinite(reply.lease_s) and reply.lease_s > 0):
            raise HandoverError(f"holder {self._address} answered a lease of {reply.lease_s} s", field="lease_s")
        return float(reply.lease_s)

    async def release(self, handle_id: bytes, epoch: int, reader_id: int) -> bool:
        """Whether the blocks were held until now. Asks twice if need be: the holder remembers its answer."""
        request = kv_pb2.ReleaseRequest(handle_id=handle_id, epoch=epoch, reader_id=reader_id)
        try:
            reply = await self._call(self._stub.Release, request, self._deadlines.rpc_s)
        except WorkerLost:
            reply = await self._call(self._stub.Release, request, self._deadlines.rpc_s)
        return bool(reply.held_until_now)

    async def _call(self, method: Callable[..., Awaitable[Any]], request: Any, timeout_s: float) -> Any:
        try:
            reply = await method(request, timeout=timeout_s)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:  # the latter: the channel is closed
            name = type(request).__name__.removesuffix("Request")
            reason = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else error
            raise WorkerLost(f"holder {self._address}: {name} failed: {reason}") from error
        if reply.HasField("error"):
            raise error_from_proto(reply.error)
        return reply
