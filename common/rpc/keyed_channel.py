"""A client's half of the cluster key: before its first call a channel asks the peer to prove the key, then signs.

Calls are what stubs expect of grpc.aio, as far as it is used here: the proof is made when they really begin.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self, cast

import grpc

from common.cluster_key import ClusterKey
from common.deadlines import Deadlines
from common.log import get_logger, log_event
from common.rpc.handshake import HEADER, NONCE_BYTES, SESSION_S, CallSigner
from common.rpc.pb import cluster_pb2, cluster_pb2_grpc

log = get_logger("key")
Metadata = tuple[tuple[str, bytes], ...]


class KeyedChannel(grpc.aio.Channel):
    """Another channel, all of whose calls carry a proof. Who can't prove the key gets nothing but a nonce."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        address: str,
        key: ClusterKey,
        deadlines: Deadlines,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel = channel
        self._address = address
        self._key = key
        self._deadlines = deadlines
        self._clock = clock
        self._stub: Any = cluster_pb2_grpc.ClusterStub(channel)  # type: ignore[no-untyped-call]
        self._signer: CallSigner | None = None
        self._greeting = asyncio.Lock()
        self._told = False  # a refusal is in the log

    async def sign(self, method: str) -> Metadata:
        """The proof for one call. Raises AioRpcError for a peer that can't be reached or can't prove the key."""
        async with self._greeting:
            if self._signer is None or self._clock() - self._signer.began_s > SESSION_S:
                self._signer = await self._meet()
            return ((HEADER, self._signer.header(method)),)

    def forget(self, error: grpc.aio.AioRpcError) -> None:
        """What a call failed with: a session that the peer doesn't know is begun anew by the next one."""
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            self._signer = None

    async def _meet(self) -> CallSigner:
        nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            reply = await self._stub.Greet(cluster_pb2.Greeting(nonce=nonce), timeout=self._deadlines.connect_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            signer = None
        else:
            signer = CallSigner.meet(self._key, nonce, reply.nonce, reply.proof, self._clock())
        if signer is None:
            problem = "the peer did not prove the cluster key"
            self._tell(problem)
            none = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAUTHENTICATED, none, none, details=problem)
        return signer

    def _tell(self, problem: str) -> None:
        if not self._told:
            log_event(log, logging.WARNING, "no common cluster key", peer=self._address, reason=problem)
            self._told = True

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Any:
        begin = self._channel.unary_unary(method, *args, **options)

        async def call(request: Any, *, timeout: float | None = None) -> Any:
            metadata = await self.sign(method)
            try:
                return await begin(request, timeout=timeout, metadata=grpc.aio.Metadata(*metadata))
            except grpc.aio.AioRpcError as error:
                self.forget(error)
                raise

        return call

    def unary_stream(self, method: str, *args: Any, **options: Any) -> Any:
        begin: Callable[..., Any] = self._channel.unary_stream(method, *args, **options)

        def call(request: Any, *, timeout: float | None = None) -> KeyedCall:
            return KeyedCall(self, method, lambda metadata: begin(request, timeout=timeout, metadata=metadata))

        return call

    def stream_stream(self, method: str, *args: Any, **options: Any) -> Any:
        begin: Callable[..., Any] = self._channel.stream_stream(method, *args, **options)

        def call(*, timeout: float | None = None) -> KeyedCall:
            return KeyedCall(self, method, lambda metadata: begin(timeout=timeout, metadata=metadata))

        return call

    def stream_unary(self, method: str, *args: Any, **options: Any) -> Any:
        raise NotImplementedError("no service here has such a method")

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class KeyedCall:
    """A streaming call, which begins when its proof is made; reads and writes wait for that."""

    def __init__(self, channel: KeyedChannel, method: str, begin: Callable[[grpc.aio.Metadata], Any]) -> None:
        self._channel = channel
        self._method = method
        self._begin = begin
        self._call: Any = None
        self._beginning = asyncio.ensure_future(self._sign())
        self._beginning.add_done_callback(lambda task: task.cancelled() or task.exception())  # told by who waits

    async def _sign(self) -> None:
        self._call = self._begin(grpc.aio.Metadata(*await self._channel.sign(self._method)))

    async def _begun(self) -> Any:
        if self._call is None:
            await asyncio.shield(self._beginning)
        return self._call

    async def read(self) -> Any:
        """The next message, or grpc.aio.EOF."""
        return await self._watched((await self._begun()).read())

    async def write(self, message: Any) -> None:
        await self._watched((await self._begun()).write(message))

    def cancel(self) -> bool:
        self._beginning.cancel()
        return self._call is not None and cast(bool, self._call.cancel())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        if (message := await self.read()) is grpc.aio.EOF:
            raise StopAsyncIteration
        return message

    async def _watched(self, work: Awaitable[Any]) -> Any:
        try:
            return await work
        except grpc.aio.AioRpcError as error:
            self._channel.forget(error)
            raise
