"""A TCP proxy that does to its connections what networks do: cuts, refuses, holds and slows them, on command."""

import asyncio
import contextlib
import os
import socket
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

OWNER_TRIES = 10
CHUNK = 64 * 2**10
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))  # gRPC's sockets are in the second
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with RST


@dataclass(frozen=True, slots=True)
class Traffic:
    """How bytes pass: `up` is from whoever connected to the server, `down` the way back; held bytes are not lost."""

    up: bool = True
    down: bool = True
    delay_s: float = 0.0  # of each piece
    bytes_per_s: float | None = None


FREE = Traffic()
BLACKHOLE = Traffic(up=False, down=False)


@dataclass(eq=False, slots=True)
class Link:
    """One connection through the proxy."""

    owner: str  # which process connected; "" for a stranger
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    def reset(self) -> None:
        for writer in self.writers:
            with contextlib.suppress(OSError, ValueError):  # closed already
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()


class Proxy:
    """In front of 127.0.0.1:target_port. `pids` names the processes that may connect; faults can be one owner's."""

    def __init__(
        self, target_port: int, pids: Callable[[], Mapping[str, int]] = dict, *, host: str = "127.0.0.1"
    ) -> None:
        self.port = 0
        self.moved: Counter[tuple[str, str]] = Counter()  # (owner, "up" or "down") → bytes passed on
        self.held: Counter[tuple[str, str]] = Counter()  # bytes that wait
        self._host = host
        self._target_port = target_port
        self._pids = pids
        self._traffic: dict[str | None, Traffic] = {}
        self._changed = asyncio.Event()
        self._links: set[Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listens, at the port that it had before if it was open once."""
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, self._host, self.port, limit=CHUNK)
            self.port = self._server.sockets[0].getsockname()[1]

    def shape(self, traffic: Traffic, owner: str | None = None) -> None:
        """From now on, for one owner or, whatever was before, for everybody."""
        if owner is None:
            self._traffic.clear()
        self._traffic[owner] = traffic
        self._notify()

    def cut(self, owner: str | None = None) -> None:
        """Resets connections, both halves; new ones are accepted."""
        for link in list(self._links):
            if owner in (None, link.owner):
                link.reset()

    def refuse(self) -> None:
        """Resets all connections, and new ones are refused."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()

    async def heal(self) -> None:
        self._traffic.clear()
        self._notify()
        await self.open()

    async def close(self) -> None:
        self.refuse()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def links(self, owner: str) -> int:
        """Connections of this process now."""
        return sum(link.owner == owner for link in self._links)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        link = Link(await self._owner(writer.get_extra_info("peername")[1]), [writer])
        self._links.add(link)
        try:
            await self._gate(link, "up", 1)  # a connection that waits counts as a byte
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port, limit=CHUNK)
            link.writers.append(far_writer)
            await self._both(link, (reader, far_writer, "up"), (far_reader, writer, "down"))
        except OSError:
            pass  # nobody listens behind, or an end broke: the reset below tells the other
        finally:
            self._links.discard(link)
            link.reset()

    async def _owner(self, port: int) -> str:
        """Asks again where nobody is found: the kernel's table may change while it is read."""
        for _ in range(OWNER_TRIES):
            owner = owner_of(port, self.port, self._pids())
            if owner or not self._pids():
                return owner
            await asyncio.sleep(0.002)
        return ""

    async def _both(self, link: Link, *ways: tuple[asyncio.StreamReader, asyncio.StreamWriter, str]) -> None:
        pumps = [asyncio.create_task(self._pump(link, *way)) for way in ways]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        """Until one end closes or breaks; that news travels as the bytes do."""
        try:
            while data := await reader.read(self._piece(link)):
                await self._gate(link, way, len(data))
                writer.write(data)
                await writer.drain()
                self.moved[link.owner, way] += len(data)
        except OSError:
            await self._gate(link, way, 0)
            return
        await self._gate(link, way, 0)
        if writer.can_write_eof():
            writer.write_eof()
            await asyncio.sleep(0)

    def _piece(self, link: Link) -> int:
        rate = self._traffic_of(link).bytes_per_s
        return CHUNK if rate is None else max(1, min(CHUNK, int(rate / 50)))

    def _traffic_of(self, link: Link) -> Traffic:
        return self._traffic.get(link.owner, self._traffic.get(None, FREE))

    async def _gate(self, link: Link, way: str, size: int) -> None:
        """Waits until so many bytes may pass."""
        self.held[link.owner, way] += size
        try:
            while not getattr(traffic := self._traffic_of(link), way):
                await self._changed.wait()
            await asyncio.sleep(traffic.delay_s + (size / traffic.bytes_per_s if traffic.bytes_per_s else 0.0))
        finally:
            self.held[link.owner, way] -= size


def owner_of(port: int, far_port: int, pids: Mapping[str, int]) -> str:
    """Which of these processes has the socket from this local port to that far one, by Linux's tables; "" for none.

    A local port alone may be several sockets': one for each far end.
    """
    if not pids:
        return ""
    near, far = f":{port:04X}", f":{far_port:04X}"
    rows = [line.split() for table in TABLES for line in table.read_text().splitlines()[1:]]
    inode = next((row[9] for row in rows if row[1].endswith(near) and row[2].endswith(far)), None)
    for name, pid in pids.items():
        with contextlib.suppress(OSError):  # it may end meanwhile
            for entry in os.scandir(f"/proc/{pid}/fd"):
                if inode is not None and os.readlink(entry.path) == f"socket:[{inode}]":
                    return name
    return ""
