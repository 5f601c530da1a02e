"""The server's half of grpc.aio, as far as it is used, so that generated servicers work unchanged."""

import asyncio
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc

from sim.network import Link, Network, rpc_error, send_message, unavailable
from sim.virtual_time import Node


class ServerStream:
    """The server's half of a stream: requests in, context.write() out."""

    def __init__(self, link: Link, call: Any) -> None:
        self._link = link
        self._call = call
        self._incoming: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._eof = False
        self._cancelled = False
        self.task: asyncio.Task[Any] | None = None
        self.deserializer: Callable[[bytes], Any] = bytes
        self.serializer: Callable[[Any], bytes] = bytes
        link.streams[self] = None

    def take(self, data: bytes | None) -> None:
        if data is None:
            self._eof = True
        else:
            self._incoming.append(data)
        self._wake()

    def end(self) -> None:
        self._eof = True
        self._wake()

    def cancel(self) -> None:
        self._cancelled = True
        self.end()
        if self.task is not None:
            self.task.cancel()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def __aiter__(self) -> "ServerStream":
        return self

    async def __anext__(self) -> Any:
        while not self._incoming:
            if self._eof:
                raise StopAsyncIteration
            self._waiter = self._link.network.loop.create_future()
            await self._waiter
        return self.deserializer(self._incoming.popleft())

    async def write(self, message: Any) -> None:
        if self._cancelled or self._link.broken[True]:
            raise asyncio.CancelledError  # as grpc.aio does to a handler whose call is gone
        send_message(self._link, False, self.serializer(message), self._call.take)

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise _Abort(code, details)

    async def run(self, handler: Any) -> None:
        self.deserializer, self.serializer = handler.request_deserializer, handler.response_serializer
        status: grpc.aio.AioRpcError | None = unavailable("the handler was cancelled")
        try:
            if handler.request_streaming:
                await handler.stream_stream(self, self)
            else:
                request = await anext(self)
                answer = handler.unary_stream(request, self)
                if hasattr(answer, "__aiter__"):
                    async for message in answer:
                        await self.write(message)
                else:
                    await answer
            status = None
        except _Abort as error:
            status = rpc_error(*error.args)
        except Exception:
            status = rpc_error(grpc.StatusCode.UNKNOWN, "the handler raised")
            raise
        finally:
            self._link.streams.pop(self, None)
            if status is None:
                self._link.send(False, self._call.take, None)
            else:
                self._link.send(False, self._call.fail, status)


class _Abort(Exception):
    """context.abort()"""


class SimServer:
    """grpc.aio.Server, as far as it is used, and the process it is in."""

    def __init__(self, network: Network, node: Node, address: str) -> None:
        self.node = node
        self.address = address
        self._network = network
        self._handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """The same ones come as registered method handlers."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self._handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    async def start(self) -> None:
        self._network.servers[self.address] = self

    async def stop(self, grace: float | None = None) -> None:
        self.forget()
        for link in [link for link in self._network.links if link.server is self]:
            link.give_up(server_side=True)

    def forget(self) -> None:
        """Nothing listens at the address any more."""
        if self._network.servers.get(self.address) is self:
            del self._network.servers[self.address]

    def _run(self, link: Link, coroutine: Any) -> asyncio.Task[Any]:
        task = self.node.spawn(coroutine)
        link.tasks[task] = None
        task.add_done_callback(lambda done: link.tasks.pop(done, None), context=self._network.loop._outside)
        return task

    def unary(self, link: Link, method: str, data: bytes, answered: Callable[[Link, bytes | None], None]) -> None:
        handler = self._handlers[method]

        async def serve() -> None:
            reply = None
            try:
                answer = await handler.unary_unary(handler.request_deserializer(data), None)
                reply = handler.response_serializer(answer)
            finally:
                answered(link, reply)

        if self._network.trace is not None:
            self._network.trace("call", "→".join(link.ends(True)), method.rpartition("/")[2], f"{zlib.crc32(data):08x}")
        self._run(link, serve())

    def stream(self, link: Link, method: str, stream: ServerStream) -> None:
        if not stream._cancelled:
            stream.task = self._run(link, stream.run(self._handlers[method]))
