"""Links between nodes, and all that can happen to them.

A channel has one connection. Streams on it are ordered, as on TCP; unary calls overtake each other. Messages cross
as bytes. What keepalive does is here a rule: a side that hears nothing for dead_s breaks the connection.
"""

import asyncio
import random
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from common.deadlines import Deadlines
from sim.virtual_time import Node, SimLoop

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


class Call(Protocol):
    """The client's half of a call."""

    def fail(self, error: grpc.aio.AioRpcError) -> None: ...


class Stream(Protocol):
    """The server's half of a stream."""

    def end(self) -> None: ...


class Channel(Protocol):
    node: Node

    def lost(self, link: "Link") -> None: ...


class Server(Protocol):
    node: Node


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
        self.servers: dict[str, Any] = {}  # by address: SimServer
        self.links: dict[Link, None] = {}
        self.channels: dict[Any, None] = {}  # SimChannel
        self.forge: Callable[[Link, bytes], bytes | None] | None = None  # a false copy of a worker's message
        self.forged_seen: Callable[[Link, bytes], None] = lambda link, data: None
        self.closed = False
        self._blocked: dict[tuple[str, str], int] = {}
        self._blocks = 0

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

    def __init__(self, network: Network, channel: "Channel", server: "Server") -> None:
        self.network = network
        self.channel = channel
        self.client = channel.node
        self.server = server
        self.calls: dict[Call, None] = {}
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.streams: dict[Stream, None] = {}
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
        when = network.loop.time() + network.delay()
        if ordered:
            when = self._last[to_server] = max(when, self._last[to_server])
        network.loop.call_at(when, self._arrive, to_server, deliver, args, context=network.loop._outside)

    def _arrive(self, to_server: bool, deliver: Callable[..., object], args: tuple[Any, ...]) -> None:
        if self.broken[to_server]:
            return
        if self._held[to_server] or self._blocked(to_server):  # nothing overtakes what is held
            self._held[to_server].append((deliver, args))
        else:
            deliver(*args)

    def flush(self, to_server: bool) -> None:
        """What is held arrives, in its order."""
        if self._held[to_server]:
            self.network.loop.after(self.network.delay(), self._release, to_server)

    def _release(self, to_server: bool) -> None:
        while self._held[to_server] and not self.broken[to_server] and not self._blocked(to_server):
            deliver, args = self._held[to_server].popleft()
            deliver(*args)

    def _blocked(self, to_server: bool) -> bool:
        return bool(self.network._blocked) and self.network.blocked(*self.ends(to_server))

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


def send_message(link: Link, to_server: bool, data: bytes | None, take: Callable[[bytes | None], None]) -> None:
    """One message of a stream."""
    network = link.network
    faults = network.faults
    if network.trace is not None:
        network.trace("send", "→".join(link.ends(to_server)), f"{len(data or b'')} bytes {zlib.crc32(data or b''):08x}")
    if faults.cut and network.rng.random() < faults.cut:
        link.give_up(server_side=not to_server)
        return
    link.send(to_server, take, data)
    if data is not None and faults.twice and network.rng.random() < faults.twice:
        late_s = network.rng.choice([0.0, 0.3]) * network.rng.random()
        network.loop.after(late_s, link.send, to_server, take, data)
    if not to_server and network.forge is not None and data is not None:
        forged = network.forge(link, data)
        if forged is not None:
            link.send(to_server, take, Forged(forged))


class Forged(bytes):
    """A message that its sender never sent."""
