"""A reader's connections: one for each life of a holder, with a channel and a transport that is proven."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

import grpc

from common.deadlines import Deadlines
from common.errors import Draining, HandoverError, TransportUnavailable, WorkerLost
from common.log import get_logger, log_event, request_id
from common.rpc.channel import OpenChannel
from kvtransfer.holder_client import HolderClient
from kvtransfer.transport import Offer, ReaderTransport, Transport

log = get_logger("kv")
Permit = Callable[[str, int], Awaitable[None]]  # raises HandoverError for an address and epoch not to be called


async def permit_all(address: str, epoch: int) -> None:
    """Where who answers has to prove itself, or handles come from nobody else."""


@dataclass(eq=False, slots=True)
class Connection:
    """Open until it is retired and its last user has left."""

    address: str
    epoch: int
    channel: grpc.aio.Channel
    client: HolderClient
    transport_name: str
    transport: ReaderTransport
    watch: asyncio.Task[None] | None = None
    users: int = 0
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # set when it is retired

    @property
    def retired(self) -> bool:
        return self.gone.is_set()


class Connections:
    """Connects at first use, shares what is connected, and drops it when the holder goes.

    Dropping matters: the map of a dead holder's pool would keep its memory from the system.
    """

    def __init__(
        self,
        *,
        fingerprint: str,
        layout_id: str,
        deadlines: Deadlines,
        transports: Sequence[Transport],
        executor: Executor,
        channel: OpenChannel,
        permit: Permit = permit_all,
    ) -> None:
        self._fingerprint = fingerprint
        self._layout_id = layout_id
        self._deadlines = deadlines
        self._transports = transports
        self._executor = executor
        self._channel = channel
        self._permit = permit
        self._current: dict[tuple[str, int], asyncio.Task[Connection]] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._closed = False

    @property
    def num_open(self) -> int:
        """Connections that new users would share, made or in the making."""
        return len(self._current)

    @asynccontextmanager
    async def use(self, address: str, epoch: int) -> AsyncIterator[Connection]:
        """A connection for as long as the block lasts. Raises HandoverError, also for a holder that is gone."""
        connection = await self._get(address, epoch)
        connection.users += 1
        try:
            yield connection
        finally:
            self._leave(connection)

    def finish(self, connection: Connection, work: Coroutine[Any, Any, None]) -> None:
        """Runs the last, bounded piece of a user's work in the background, on a connection in use."""
        connection.users += 1
        self._spawn(work).add_done_callback(lambda _: self._leave(connection))

    async def close(self) -> None:
        """Drops all and waits until background work is done; what is in use closes with its last user."""
        self._closed = True
        await asyncio.gather(*self._current.values(), return_exceptions=True)
        for task in list(self._current.values()):
            self._retire(task.result())
        while self._background:
            await asyncio.gather(*self._background, return_exceptions=True)

    async def _get(self, address: str, epoch: int) -> Connection:
        if self._closed:
            raise Draining("this reader is closed")
        key = (address, epoch)
        task = self._current.get(key)
        if task is None:
            shared = copy_context()
            shared.run(
                request_id.set, ""
            )  # it outlives the request that needs it first: its log lines are not that one's
            task = asyncio.create_task(self._connect(address, epoch), context=shared)
            self._current[key] = task
            task.add_done_callback(lambda done: self._connected(key, done), context=shared)
        connection = await asyncio.shield(task)  # it is shared: who waits may be cancelled, it goes on
        if connection.retired:
            raise HandoverError(f"holder {address} went away right after the handshake")
        return connection

    def _connected(self, key: tuple[str, int], task: asyncio.Task[Connection]) -> None:
        if _failed(task):
            del self._current[key]
            return
        for (address, epoch), other in list(self._current.items()):  # earlier lives at this address
            if address == key[0] and epoch != key[1] and other.done() and not _failed(other):
                self._retire(other.result())
        connection = task.result()
        connection.watch = asyncio.create_task(self._watch(connection))

    async def _connect(self, address: str, epoch: int) -> Connection:
        await self._permit(address, epoch)
        channel = self._channel(address, self._deadlines)
        client = HolderClient(channel, address, self._deadlines)
        try:
            async with asyncio.timeout(self._deadlines.connect_s):
                offers = await client.connect(epoch, self._fingerprint, self._layout_id)
                name, transport = await self._prove(client, channel, epoch, offers)
        except BaseException as error:
            await channel.close()
            if isinstance(error, TimeoutError):
                raise HandoverError(f"holder {address}: no handshake in {self._deadlines.connect_s:g} s") from error
            if isinstance(error, WorkerLost):
                raise HandoverError(error.message) from error
            raise
        log_event(log, logging.INFO, "holder connected", holder=address, epoch=epoch, transport=name)
        return Connection(address, epoch, channel, client, name, transport)

    async def _prove(
        self, client: HolderClient, channel: grpc.aio.Channel, epoch: int, offers: Sequence[Offer]
    ) -> tuple[str, ReaderTransport]:
        """The first transport, in this reader's order, that the holder offers and that can be proven."""
        problems = []
        for kind in self._transports:
            for offer in offers:
                if offer.name != kind.name:
                    continue
                transport = kind.reader(self._executor, channel)
                try:
                    await client.prove(epoch, kind.name, await transport.open(offer))
                except TransportUnavailable as error:
                    transport.close()
                    problems.append(f"{kind.name}: {error}")
                except BaseException:
                    transport.close()
                    raise
                else:
                    return kind.name, transport
        wanted, offered = ", ".join(kind.name for kind in self._transports), ", ".join(offer.name for offer in offers)
        raise TransportUnavailable("; ".join(problems) or f"wanted {wanted}, the holder offers {offered or 'none'}")

    async def _watch(self, connection: Connection) -> None:
        """Retires the connection when its channel breaks: the holder is gone, hangs, or begins a new life."""
        ready = grpc.ChannelConnectivity.READY
        try:
            while connection.channel.get_state() is ready:
                await connection.channel.wait_for_state_change(ready)
        finally:
            self._retire(connection)

    def _retire(self, connection: Connection) -> None:
        if not connection.retired:
            connection.gone.set()
            log_event(log, logging.INFO, "holder dropped", holder=connection.address, epoch=connection.epoch)
            self._current.pop((connection.address, connection.epoch), None)
            self._close_unused(connection)

    def _leave(self, connection: Connection) -> None:
        connection.users -= 1
        self._close_unused(connection)

    def _close_unused(self, connection: Connection) -> None:
        if connection.retired and connection.users == 0:
            self._spawn(_close(connection))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


def _failed(task: asyncio.Task[Connection]) -> bool:
    return task.cancelled() or task.exception() is not None


async def _close(connection: Connection) -> None:
    if connection.watch is not None:
        connection.watch.cancel()
    connection.transport.close()
    await connection.channel.close()
