"""The client's half of grpc.aio, as far as it is used, so that generated stubs work unchanged."""

import asyncio
from collections import deque
from typing import Any

import grpc

from sim.grpc_server import ServerStream
from sim.network import Forged, Link, Network, rpc_error, send_message, unavailable
from sim.virtual_time import Node

State = grpc.ChannelConnectivity
CONNECT_RETRY_S = 0.25


class _Call:
    """The client's half of a call."""

    link: Link | None = None

    def start(self, link: Link) -> None:
        raise NotImplementedError

    def fail(self, error: grpc.aio.AioRpcError) -> None:
        raise NotImplementedError

    def leave(self, channel: "SimChannel") -> None:
        channel.waiting.pop(self, None)
        if self.link is not None:
            self.link.calls.pop(self, None)


class SimChannel:
    """grpc.aio.Channel, as far as it is used."""

    def __init__(self, network: Network, node: Node, address: str) -> None:
        self.network = network
        self.node = node
        self.address = address
        self.waiting: dict[_Call, None] = {}  # for a connection
        self.closed = False
        self._link: Link | None = None
        self._state = State.IDLE
        self._watchers: list[asyncio.Future[None]] = []
        network.channels[self] = None

    def unary_unary(self, method, request_serializer, response_deserializer, _registered_method=False):  # type: ignore[no-untyped-def]
        async def call(request: Any, *, timeout: float | None = None) -> Any:
            unary = _UnaryCall(self, method, request_serializer(request))
            return response_deserializer(await unary.reply(timeout))

        return call

    def unary_stream(self, method, request_serializer, response_deserializer=bytes, _registered_method=False):  # type: ignore[no-untyped-def]
        def call(request: Any, *, timeout: float | None = None) -> "StreamCall":
            stream = StreamCall(self, method, request_serializer, response_deserializer, timeout)
            stream.put(request_serializer(request))
            stream.put(None)
            return stream

        return call

    def stream_stream(self, method, request_serializer, response_deserializer, _registered_method=False):  # type: ignore[no-untyped-def]
        def call(*, timeout: float | None = None) -> "StreamCall":
            return StreamCall(self, method, request_serializer, response_deserializer, timeout)

        return call

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._state

    async def wait_for_state_change(self, last: grpc.ChannelConnectivity) -> None:
        while self._state is last:
            watcher = self.network.loop.create_future()
            self._watchers.append(watcher)
            await watcher

    async def close(self, grace: float | None = None) -> None:
        if self.closed:
            return
        self.closed = True
        self.network.channels.pop(self, None)
        self.fail_waiting(rpc_error(grpc.StatusCode.CANCELLED, "channel closed"))
        link, self._link = self._link, None
        self._become(State.SHUTDOWN)
        if link is not None and not link.broken[False]:
            link.give_up(server_side=False)

    def begin(self, call: _Call) -> None:
        if self.closed:
            raise grpc.aio.UsageError("Channel is closed.")
        if self._link is not None:
            self._start(call, self._link)
        elif self.network.closed:
            call.fail(unavailable("the world has ended"))
        else:
            self.waiting[call] = None
            if self._state is not State.CONNECTING:
                self._become(State.CONNECTING)
                self.network.loop.after(2 * self.network.delay(), self._connect)

    def _start(self, call: _Call, link: Link) -> None:
        call.link = link
        link.calls[call] = None
        call.start(link)

    def _connect(self) -> None:
        network, server = self.network, self.network.servers.get(self.address)
        if self.closed or network.closed or self.node.dead:
            return
        if server is None:
            self._become(State.TRANSIENT_FAILURE)
            self.fail_waiting(unavailable("connection refused"))
            return
        name = server.node.name
        away = network.blocked(self.node.name, name) or network.blocked(name, self.node.name)
        if away or server.node.stopped or self.node.stopped:
            if self.waiting:
                network.loop.after(CONNECT_RETRY_S, self._connect)
            else:
                self._become(State.IDLE)
            return
        self._link = Link(network, self, server)
        self._become(State.READY)
        waiting, self.waiting = self.waiting, {}
        for call in waiting:
            self._start(call, self._link)

    def lost(self, link: Link) -> None:
        if self._link is link:
            self._link = None
            self._become(State.IDLE)

    def fail_waiting(self, error: grpc.aio.AioRpcError) -> None:
        waiting, self.waiting = self.waiting, {}
        for call in waiting:
            call.fail(error)

    def _become(self, state: grpc.ChannelConnectivity) -> None:
        self._state = state
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)


class _UnaryCall(_Call):
    def __init__(self, channel: SimChannel, method: str, data: bytes) -> None:
        self._channel = channel
        self._method = method
        self._data = data
        self._future: asyncio.Future[bytes] = channel.network.loop.create_future()

    async def reply(self, timeout: float | None) -> bytes:
        timer = None
        self._channel.begin(self)
        if timeout is not None:
            late = rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            timer = self._channel.network.loop.call_later(timeout, self.fail, late)
        try:
            return await self._future
        finally:
            self.leave(self._channel)
            if timer is not None:
                timer.cancel()

    def start(self, link: Link) -> None:
        network = link.network
        faults, rng = network.faults, network.rng
        times = 1
        if faults.lose or faults.twice:
            draw = rng.random()
            if draw < faults.lose:
                self._lost(link)
                return
            times += draw > 1 - faults.twice
        for _ in range(times):
            link.send(True, link.server.unary, link, self._method, self._data, self._answered, ordered=False)

    def _lost(self, link: Link) -> None:
        if link.network.rng.random() < 0.5:  # else it runs into its deadline
            link.network.loop.after(link.network.delay(), self.fail, unavailable("stream reset"))

    def _answered(self, link: Link, data: bytes | None) -> None:
        """On the server's side."""
        if link.network.faults.lose and link.network.rng.random() < link.network.faults.lose:
            self._lost(link)
        else:
            link.send(False, self._arrived, data, ordered=False)

    def _arrived(self, data: bytes | None) -> None:
        if data is None:
            self.fail(rpc_error(grpc.StatusCode.UNKNOWN, "the handler raised"))
        elif not self._future.done():
            self._future.set_result(data)

    def fail(self, error: grpc.aio.AioRpcError) -> None:
        if not self._future.done():
            self._future.set_exception(error)


class StreamCall(_Call):
    """The client's half of a call with a stream in one or both directions."""

    def __init__(self, channel, method, serializer, deserializer, timeout):  # type: ignore[no-untyped-def]
        self._channel: SimChannel = channel
        self._method = method
        self._serializer = serializer
        self._deserializer = deserializer
        self._outgoing: list[bytes | None] = []  # before there is a connection
        self._incoming: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._ended: BaseException | None = None
        self._eof = False
        self._far: ServerStream | None = None
        self._timer = None
        channel.begin(self)
        if timeout is not None:
            late = rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            self._timer = channel.network.loop.call_later(timeout, self._expire, late)

    def start(self, link: Link) -> None:
        self._far = ServerStream(link, self)
        link.send(True, link.server.stream, link, self._method, self._far)
        outgoing, self._outgoing = self._outgoing, []
        for data in outgoing:
            self.put(data)

    def put(self, data: bytes | None) -> None:
        """One message; None: no more."""
        link, far = self.link, self._far
        if link is None or far is None:
            self._outgoing.append(data)
        else:
            send_message(link, True, data, far.take)

    async def write(self, message: Any) -> None:
        if self._ended is not None or self._eof:
            raise asyncio.InvalidStateError("RPC already finished.")
        self.put(self._serializer(message))

    async def done_writing(self) -> None:
        self.put(None)

    async def read(self) -> Any:
        while not self._incoming:
            if self._ended is not None:
                raise self._ended
            if self._eof:
                return grpc.aio.EOF
            self._waiter = self._channel.network.loop.create_future()
            await self._waiter
        data = self._incoming.popleft()
        if isinstance(data, Forged) and self.link is not None:
            self._channel.network.forged_seen(self.link, data)
        return self._deserializer(data)

    def __aiter__(self) -> "StreamCall":
        return self

    async def __anext__(self) -> Any:
        message = await self.read()
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return message

    def cancel(self) -> bool:
        if self._ended is not None or self._eof:
            return False
        self._end(asyncio.CancelledError())
        self._tell_far()
        return True

    def take(self, data: bytes | None) -> None:
        """A message of the server; None: it has finished."""
        if self._ended is not None:
            return
        if data is None:
            self._eof = True
            self._finish()
        else:
            self._incoming.append(data)
        self._wake()

    def fail(self, error: grpc.aio.AioRpcError) -> None:
        self._end(error)

    def _expire(self, error: grpc.aio.AioRpcError) -> None:
        self._end(error)
        self._tell_far()

    def _tell_far(self) -> None:
        if self.link is not None and self._far is not None:
            self.link.send(True, self._far.cancel)

    def _end(self, error: BaseException) -> None:
        if self._ended is None and not self._eof:
            self._ended = error
            if isinstance(error, asyncio.CancelledError):
                self._incoming.clear()
            self._finish()
            self._wake()

    def _finish(self) -> None:
        self.leave(self._channel)
        if self._timer is not None:
            self._timer.cancel()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
