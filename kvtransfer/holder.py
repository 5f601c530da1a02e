"""The holder's side of the hand-over: the KV service over a lease table, and the task that lets leases expire."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from common.deadlines import Deadlines
from common.errors import EpochMismatch, FingerprintMismatch, KVRelayError, TransportUnavailable
from common.rpc.convert import error_to_proto
from common.rpc.pb import kv_pb2, kv_pb2_grpc, types_pb2
from kvtransfer.lease import KVLease, LeaseTable
from kvtransfer.transport import HolderTransport, Ticket, WriteFrame


class KVHolder(kv_pb2_grpc.KVServicer):
    """Answers readers and the router. Errors travel inside the replies, so that they keep their class."""

    def __init__(
        self,
        table: LeaseTable,
        *,
        fingerprint: str,
        layout_id: str,
        transports: Sequence[HolderTransport],
        deadlines: Deadlines,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._table = table
        self._fingerprint = fingerprint
        self._layout_id = layout_id
        self._transports = {transport.name: transport for transport in transports}
        self._deadlines = deadlines
        self._clock = clock
        self._sleep = sleep

    def handle(self, lease: KVLease, *, address: str, key: types_pb2.AttemptKey) -> kv_pb2.KVHandle:
        """What a reader needs to fetch the lease's blocks; `address` is where this service is reached."""
        return kv_pb2.KVHandle(
            id=lease.id,
            address=address,
            epoch=self._table.epoch,
            fingerprint=self._fingerprint,
            layout_id=self._layout_id,
            block_ids=lease.block_ids,
            num_tokens=lease.num_tokens,
            lease_s=self._table.lease_s,
            key=key,
        )

    async def run(self) -> None:
        """Frees what expires, until cancelled. A lease begun during a sleep ends after it: none is shorter."""
        while True:
            now = self._clock()
            self._table.expire(now)
            due = self._table.next_expiry()
            await self._sleep(self._table.lease_s if due is None else due - now)

    async def Connect(self, request: kv_pb2.ConnectRequest, context: Any) -> kv_pb2.ConnectReply:
        try:
            self._check_epoch(request.epoch)
            if request.fingerprint != self._fingerprint:
                raise FingerprintMismatch("the reader's model is another one than the holder's", field="fingerprint")
            if request.layout_id != self._layout_id:
                raise FingerprintMismatch(
                    f"the reader's KV layout is {request.layout_id!r}, the holder's {self._layout_id!r}",
                    field="layout_id",
                )
            offers = [transport.offer() for transport in self._transports.values()]
        except KVRelayError as error:
            return kv_pb2.ConnectReply(error=error_to_proto(error))
        return kv_pb2.ConnectReply(
            offers=[kv_pb2.TransportOffer(name=offer.name, params=offer.params) for offer in offers]
        )

    async def Prove(self, request: kv_pb2.ProveRequest, context: Any) -> kv_pb2.ProveReply:
        try:
            self._check_epoch(request.epoch)
            if not self._transport(request.transport).verify(request.proof):
                raise TransportUnavailable("the proof is wrong: that was not this holder's memory", field="proof")
        except KVRelayError as error:
            return kv_pb2.ProveReply(error=error_to_proto(error))
        return kv_pb2.ProveReply()

    async def Renew(self, request: kv_pb2.RenewRequest, context: Any) -> kv_pb2.RenewReply:
        try:
            lease_s = self._table.renew(request.handle_id, request.epoch, request.reader_id, request.block_ids)
        except KVRelayError as error:
            return kv_pb2.RenewReply(error=error_to_proto(error))
        return kv_pb2.RenewReply(lease_s=lease_s)

    async def Release(self, request: kv_pb2.ReleaseRequest, context: Any) -> kv_pb2.ReleaseReply:
        try:
            held = self._table.release(request.handle_id, request.epoch, request.reader_id)
        except KVRelayError as error:
            return kv_pb2.ReleaseReply(error=error_to_proto(error))
        return kv_pb2.ReleaseReply(held_until_now=held)

    async def Pull(self, request: kv_pb2.PullRequest, context: Any) -> None:
        """Streams the blocks, as long as the lease is held and the reader takes them."""

        async def write(frame: kv_pb2.Frame) -> None:
            async with asyncio.timeout(self._deadlines.pull_progress_s):
                await context.write(frame)

        with contextlib.suppress(TimeoutError):
            await self._send(request, write)
            return
        # What was written last is still on its way: gRPC ends the call when it is read, or at the call's deadline.
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the reader took no frame for too long")

    async def _send(self, request: kv_pb2.PullRequest, write: WriteFrame) -> None:
        ticket = Ticket(request.handle_id, request.epoch, request.reader_id)
        try:
            self._table.check_reader(*ticket, request.block_ids)
            transport = self._transport(request.transport)
            await transport.send(request.block_ids, lambda: self._table.check_reader(*ticket), write)
        except KVRelayError as error:
            await write(kv_pb2.Frame(error=error_to_proto(error)))

    def _transport(self, name: str) -> HolderTransport:
        if name not in self._transports:
            raise TransportUnavailable(f"this holder has no transport {name[:40]!r}", field="transport")
        return self._transports[name]

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self._table.epoch:
            raise EpochMismatch("the handle is from an earlier life of this worker", field="epoch")
