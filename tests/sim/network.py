"""A network with the surface of grpc.aio that the code uses, so that generated stubs and servicers work unchanged.

A channel has one connection. Streams on it are ordered, as on TCP; unary calls overtake each other. Messages cross
as bytes. What keepalive does is here a rule: a side that hears nothing for dead_s breaks the connection.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from sim.loop import NODE, Node, SimLoop

from common.deadlines import Deadlines

State = grpc.ChannelConnectivity
CONNECT_RETRY_S = 0.25
BROKEN = "connection broken"


@dataclass
class MessageFaults:
    """Probabilities, of each message."""

    lose: float = 0.0  # of a unary call's request or reply
    twice: float = 0.0
    slow: float = 0.0  # by as long as slow_s
    slow_s: float = 0.5
    cut: float = 0.0  # of a stream's message: the connection breaks before it


def rpc_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


def unavailable(details: str) -> grpc.aio.AioRpcError:
    return rpc_error(grpc.StatusCode.UNAVAILABLE, details)


class Network:
    """All links. The world changes them; nodes only see what comes of it."""

    def __init__(
        self, loop: SimLoop, rng: random.Random, deadlines: Deadlines, trace: Callable[..., None] | None = None
    ) -> None:
        self.loop = loop
        self.rng = rng
        self.dead_s = deadlines.dead_s
        self.faults = MessageFaults()
        self.trace = trace
        self.servers: dict[str, SimServer] = {}
        self.links: dict[Link, None] = {}
        self.channels: dict[SimChannel, None] = {}
        self.forge: Callable[[Link, bytes], bytes | None] | None = None  # a false copy of a worker's message
        self.forged_seen: Callable[[Link, bytes], None] = lambda link, data: None
        self.closed = False
        self._blocked: dict[tuple[str, str], int] = {}
        self._blocks = 0

    # What nodes use.

    def channel(self, address: str, deadlines: Deadlines) -> "SimChannel":
        """An OpenChannel, for the node that calls."""
        node = NODE.get()
        assert node is not None
        return SimChannel(self, node, address)

    def server(self, node: Node, address: str) -> "SimServer":
        return SimServer(self, node, address)

    def delay(self) -> float:
        draw = self.rng.random()
        if self.faults.slow and draw < self.faults.slow:
            return self.rng.random() * self.faults.slow_s
        return 0.0005 + 0.004 * draw * draw

    # What the world does.

    def blocked(self, source: str, target: str) -> bool:
        return (source, target) in self._blocked

    def block(self, source: str, target: str) -> None:
        """Nothing gets through in this direction, until unblock()."""
        self._blocks += 1
        number = self._blocked[source, target] = self._blocks
        for link in list(self.links):
            for to_server in (True, False):
                if link.ends(to_server) == (source, target):
                    self.loop.after(self._patience(), self._unheard, link, to_server, number)

    def unblock(self, source: str, target: str) -> None:
        if self._blocked.pop((source, target), None):
            for link in list(self.links):
                for to_server in (True, False):
                    if link.ends(to_server) == (source, target):
                        link.flush(to_server)

    def _patience(self) -> float:
        return self.dead_s * (1 + 0.2 * self.rng.random())

    def _unheard(self, link: "Link", to_server: bool, number: int) -> None:
        """The side that listens has heard nothing for dead_s."""
        if self._blocked.get(link.ends(to_server)) == number:
            link.give_up(server_side=to_server)

    def frozen(self, node: Node) -> None:
        """To be called when it is stopped: peers whose pings stay unanswered give up."""
        number = node.freezes
        for link in list(self.links):
            if node in (link.client, link.server.node):
                self.loop.after(self._patience(), self._still_frozen, link, node, number)

    def _still_frozen(self, link: "Link", node: Node, number: int) -> None:
        if node.freezes == number:
            link.give_up(server_side=node is link.client)

    def killed(self, node: Node, *, silent: bool) -> None:
        """Its peers hear a reset; silent: nothing, as when the whole host is gone."""
        for server in [server for server in self.servers.values() if server.node is node]:
            if not silent:
                server.forget()
        for link in list(self.links):
            if node in (link.client, link.server.node):
                server_side = node is link.client
                if silent:
                    self.loop.after(self._patience(), link.give_up, server_side)
                else:
                    link.reset(server_side)

    def close(self) -> None:
        """The end of the world: every call fails at once."""
        self.closed = True
        for link in list(self.links):
            link.fail(server_side=False)
            link.fail(server_side=True)
        for channel in list(self.channels):
            channel.fail_waiting(unavailable("the world has ended"))


class Link:
    """One connection between a channel and a server; each side knows by itself whether it is broken."""

    def __init__(self, network: Network, channel: "SimChannel", server: "SimServer") -> None:
        self.network = network
        self.channel = channel
        self.client = channel.node
        self.server = server
        self.calls: dict[_Call, None] = {}
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.streams: dict[_ServerStream, None] = {}
        self.broken = {False: False, True: False}  # by: is it the server's side
        self._last = {False: 0.0, True: 0.0}
        self._held: dict[bool, deque[tuple[Callable[..., object], tuple[Any, ...]]]] = {False: deque(), True: deque()}
        network.links[self] = None

    def ends(self, to_server: bool) -> tuple[str, str]:
        names = (self.client.name, self.server.node.name)
        return names if to_server else (names[1], names[0])

    def send(self, to_server: bool, deliver: Callable[..., object], *args: Any, ordered: bool = True) -> None:
        """Calls deliver(*args) when the message arrives, if it does."""
        if self.broken[True] or self.broken[False]:
            return
        network = self.network
        if network._blocked and network.blocked(*self.ends(to_server)):
            self._held[to_server].append((deliver, args))
            return
        when = network.loop.time() + network.delay()
        if ordered:
            when = self._last[to_server] = max(when, self._last[to_server])
        network.loop.call_at(when, self._arrive, to_server, deliver, args, context=network.loop._outside)

    def _arrive(self, to_server: bool, deliver: Callable[..., object], args: tuple[Any, ...]) -> None:
        if self.broken[to_server]:
            return
        if self.network._blocked and self.network.blocked(*self.ends(to_server)):
            self._held[to_server].append((deliver, args))
        else:
            deliver(*args)

    def flush(self, to_server: bool) -> None:
        held, self._held[to_server] = self._held[to_server], deque()
        when = self._last[to_server]
        for deliver, args in held:
            when = max(when, self.network.loop.time() + self.network.delay())
            self.network.loop.call_at(when, self._arrive, to_server, deliver, args, context=self.network.loop._outside)
        self._last[to_server] = when

    def give_up(self, server_side: bool) -> None:
        """This side breaks the connection, and the other hears of it if anything gets through."""
        if not self.broken[server_side]:
            self.fail(server_side)
            self.reset(not server_side)

    def reset(self, server_side: bool) -> None:
        """This side hears that the connection is gone; or, as long as nothing gets through, hears nothing."""
        network = self.network
        if network.blocked(*self.ends(server_side)):
            self._held[server_side].append((self.fail, (server_side,)))
            network.loop.after(network._patience(), self.fail, server_side)
        else:
            network.loop.after(network.delay(), self.fail, server_side)

    def fail(self, server_side: bool) -> None:
        if self.broken[server_side]:
            return
        self.broken[server_side] = True
        if self.broken[True] and self.broken[False]:
            self.network.links.pop(self, None)
        if server_side:
            for task in list(self.tasks):
                task.cancel()
            for stream in list(self.streams):
                stream.end()
            return
        for call in list(self.calls):
            call.fail(unavailable(BROKEN))
        self.channel.lost(self)


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

    def unary_stream(self, method, request_serializer, response_deserializer, _registered_method=False):  # type: ignore[no-untyped-def]
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
        self._far: _ServerStream | None = None
        self._timer = None
        channel.begin(self)
        if timeout is not None:
            late = rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            self._timer = channel.network.loop.call_later(timeout, self._expire, late)

    def start(self, link: Link) -> None:
        self._far = _ServerStream(link, self)
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
            _send(link, True, data, far.take)

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


def _send(link: Link, to_server: bool, data: bytes | None, take: Callable[[bytes | None], None]) -> None:
    """One message of a stream."""
    network = link.network
    faults = network.faults
    if network.trace is not None:
        network.trace("send", link.ends(to_server), len(data or b""))
    if faults.cut and network.rng.random() < faults.cut:
        link.give_up(server_side=not to_server)
        return
    link.send(to_server, take, data)
    if data is not None and faults.twice and network.rng.random() < faults.twice:
        link.send(to_server, take, data)
    if not to_server and network.forge is not None and data is not None:
        forged = network.forge(link, data)
        if forged is not None:
            link.send(to_server, take, Forged(forged))


class Forged(bytes):
    """A message that its sender never sent."""


class _ServerStream:
    """The server's half of a stream: requests in, context.write() out."""

    def __init__(self, link: Link, call: StreamCall) -> None:
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

    def __aiter__(self) -> "_ServerStream":
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
        _send(self._link, False, self.serializer(message), self._call.take)

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
        except Exception:
            status = rpc_error(grpc.StatusCode.UNKNOWN, "the handler raised")
            raise
        finally:
            self._link.streams.pop(self, None)
            if status is None:
                self._link.send(False, self._call.take, None)
            else:
                self._link.send(False, self._call.fail, status)


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
            self._network.trace("call", link.ends(True), method)
        self._run(link, serve())

    def stream(self, link: Link, method: str, stream: _ServerStream) -> None:
        if not stream._cancelled:
            stream.task = self._run(link, stream.run(self._handlers[method]))
