"""How blocks get from a holder's pool into a reader's: the contract of a transport, and all of them by name."""

import importlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import grpc

from common.errors import ConfigError, TransportUnavailable
from common.rpc.pb import kv_pb2

AUTO = "auto"
# Best first; a module is imported when its transport is wanted.
MODULES = {"shm": "kvtransfer.transports.shm", "grpc": "kvtransfer.transports.grpc"}


class BlockMemory(Protocol):
    """A pool's blocks. Whoever pulls into some owns them meanwhile."""

    @property
    def memory(self) -> memoryview:
        """Writable bytes of all blocks; block i starts at i * block_bytes."""

    @property
    def block_bytes(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...


class HolderPool(BlockMemory, Protocol):
    """A pool to offer, perhaps in a memfd that others may map: a header that starts with the nonce, then the blocks."""

    @property
    def fd(self) -> int | None:
        """None: the pool is this process's own."""

    @property
    def nonce(self) -> bytes:
        """Random bytes that only a process with access to the memory can know."""

    @property
    def blocks_offset(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Offer:
    """A way to the holder's pool, as text."""

    name: str
    params: Mapping[str, str]

    def integers(self, *names: str) -> dict[str, int]:
        """These parameters as whole numbers, none negative. Raises TransportUnavailable."""
        values = {}
        for name in names:
            text = self.params.get(name, "")
            if not (text.isascii() and text.isdigit() and len(text) < 20):
                raise TransportUnavailable(f"the offer's {name} is not a number: {text[:40]!r}", field=f"offer.{name}")
            values[name] = int(text)
        return values


WriteFrame = Callable[[kv_pb2.Frame], Awaitable[None]]


class HolderTransport(Protocol):
    """The holder's half: says how to reach the pool, checks that a reader did, and sends to those who can't copy."""

    @property
    def name(self) -> str: ...

    def offer(self) -> Offer: ...

    def verify(self, proof: bytes) -> bool: ...

    async def send(self, block_ids: Sequence[int], check: Callable[[], None], write: WriteFrame) -> None:
        """Answers a reader's Pull; `check` raises once the blocks are not held for it any more.

        Not by transports whose readers copy by themselves: raises TransportUnavailable.
        """
        raise TransportUnavailable(f"readers of {self.name} copy the blocks, none are sent", field="transport")


class Ticket(NamedTuple):
    """A reader's right to read one handle's blocks, once its claim stands."""

    handle_id: bytes
    epoch: int  # the holder's
    reader_id: int

    def __repr__(self) -> str:  # whoever has the id may read the blocks
        return f"Ticket(epoch={self.epoch}, reader_id={self.reader_id})"


OnMoved = Callable[[int], None]  # bytes copied so far, first 0; may be called from another thread


class ReaderTransport(Protocol):
    """The reader's half, one for each connection."""

    async def open(self, offer: Offer) -> bytes:
        """Reaches the holder's pool and returns the proof. Raises TransportUnavailable."""

    async def pull(
        self, ticket: Ticket, pairs: Sequence[tuple[int, int]], pool: BlockMemory, progress: OnMoved
    ) -> None:
        """Copies the holder's block (first of a pair) into the pool's (second).

        Returns or raises, also when cancelled, only after the last byte is written: then, and only
        then, the destination blocks may be used or freed. Raises HandoverError.
        """

    def close(self) -> None:
        """Lets go of the holder's pool; no pull is running."""


@dataclass(frozen=True, slots=True)
class Transport:
    """One entry of the registry. `holder` raises TransportUnavailable for a pool it can't offer."""

    name: str
    holder: Callable[[HolderPool], HolderTransport]
    reader: Callable[[Executor, grpc.aio.Channel], ReaderTransport]  # copies run in the executor


def choose(setting: str = AUTO) -> tuple[Transport, ...]:
    """The transports to try, best first: all of them, or those of a comma-separated list. Raises ConfigError."""
    names = list(MODULES) if setting == AUTO else [name.strip() for name in setting.split(",")]
    unknown = [name for name in names if name not in MODULES]
    if unknown:
        raise ConfigError(f"no transport {unknown[0]!r}; there are: {AUTO}, {', '.join(MODULES)}", field="transport")
    return tuple(cast(Transport, importlib.import_module(MODULES[name]).TRANSPORT) for name in dict.fromkeys(names))


def holders(transports: Sequence[Transport], pool: HolderPool) -> list[HolderTransport]:
    """The holder's halves that work with this pool. Raises TransportUnavailable if none does."""
    usable: list[HolderTransport] = []
    problems: list[str] = []
    for transport in transports:
        try:
            usable.append(transport.holder(pool))
        except TransportUnavailable as error:
            problems.append(f"{transport.name}: {error}")
    if not usable:
        raise TransportUnavailable(f"no transport can offer this pool ({'; '.join(problems)})", field="transport")
    return usable
