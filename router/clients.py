"""The router's half of a relay: one channel and one ordered stream to a worker, shared by all requests."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from common.convert import error_from_proto
from common.deadlines import Deadlines
from common.errors import KVRelayError, Timeout, WorkerLost
from common.grpc_server import open_channel
from common.log import get_logger, log_event
from common.registry import WorkerRecord
from common.rpc import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2
from common.tasks import end
from kvtransfer.client import HolderClient

log = get_logger("clients")
RETRY_S = 0.1  # first pause before a broken stream is opened again; doubles up to heartbeat_s
ROLES: dict[str, tuple[Any, Any]] = {
    "prefill": (prefill_pb2_grpc.PrefillStub, prefill_pb2.PrefillCommand),
    "decode": (decode_pb2_grpc.DecodeStub, decode_pb2.DecodeCommand),
}
# events after which the worker's load has the attempt in it
COUNTED = {"prefill": ("accepted",), "decode": ("admitted", "tokens")}


class AttemptStream:
    """The events of one attempt, in order."""

    def __init__(self, client: "WorkerClient", charged_tokens: int) -> None:
        self.client = client
        self.events: asyncio.Queue[tuple[str, Any] | KVRelayError] = asyncio.Queue()
        self.charged_tokens = charged_tokens  # until the worker's own load counts them
        self.ended = False  # the worker has nothing more of it: no abort is needed

    async def next(self, patience_s: float) -> tuple[str, Any]:
        """The next event as (kind, message); raises what the worker or the stream failed with.

        Timeout is raised when patience_s pass without one while the worker shows no progress at all.
        """
        while True:
            try:
                async with asyncio.timeout(patience_s):
                    event = await self.events.get()
                break
            except TimeoutError as error:
                if self.client.idle_s() > patience_s:
                    raise Timeout(f"worker {self.client.record.worker_id} made no progress") from error
        if isinstance(event, KVRelayError):
            self.ended = True
            raise event
        return event


class WorkerClient:
    """One life (epoch) of one worker. `on_change` is called when it may have become usable or useless."""

    def __init__(
        self,
        record: WorkerRecord,
        router_id: str,
        deadlines: Deadlines,
        clock: Callable[[], float],
        on_change: Callable[[], None],
    ) -> None:
        self.record = record
        self.load = types_pb2.Load()
        self.draining = False
        self.obsolete = False  # another epoch answers at its address
        self.connected = False
        self._router_id = router_id
        self._deadlines = deadlines
        self._clock = clock
        self._on_change = on_change
        self._attempts: dict[tuple[str, int], AttemptStream] = {}
        self._outgoing: asyncio.Queue[Any] = asyncio.Queue()
        self._heard_s = self._progress_s = clock()
        self._channel = open_channel(record.address, deadlines)
        self.holder = HolderClient(self._channel, record.address, deadlines)
        self._task = asyncio.create_task(self._run())

    @property
    def in_flight(self) -> int:
        """Attempts on this worker now."""
        return len(self._attempts)

    @property
    def charged_tokens(self) -> int:
        """Tokens of attempts that its load does not count yet."""
        return sum(stream.charged_tokens for stream in self._attempts.values())

    @property
    def healthy(self) -> bool:
        return self.connected and self._clock() - self._heard_s < self._deadlines.suspect_s

    def silent_s(self) -> float:
        """Seconds since anything came from it."""
        return self._clock() - self._heard_s

    def idle_s(self) -> float:
        """Seconds since it got anything done, for whichever attempt."""
        return self._clock() - self._progress_s

    @contextmanager
    def attempt(self, key: types_pb2.AttemptKey, command: Any, charged_tokens: int) -> Iterator[AttemptStream]:
        """Submits, and aborts at the end unless the worker has ended it. Raises WorkerLost when not connected."""
        if not self.connected:
            raise WorkerLost(f"worker {self.record.worker_id} is not connected")
        stream = AttemptStream(self, charged_tokens)
        name = (key.request_id, key.attempt)
        self._attempts[name] = stream
        self._outgoing.put_nowait(command)
        try:
            yield stream
        finally:
            del self._attempts[name]
            if not stream.ended:
                self.abort(key)
            self._on_change()

    def abort(self, key: types_pb2.AttemptKey, forks: tuple[int, ...] = ()) -> None:
        """Ends an attempt, or some of its forks; ordered after its submit."""
        if self.connected:
            self._outgoing.put_nowait(ROLES[self.record.role][1](abort=types_pb2.Abort(key=key, forks=forks)))

    async def close(self) -> None:
        """Ends the stream; attempts on it fail with WorkerLost."""
        await end(self._task)
        await self._channel.close()

    async def _run(self) -> None:
        pause = RETRY_S
        while not self.obsolete:
            reason = "closed by the worker"
            try:
                pause = RETRY_S if await self._stream() else min(2 * pause, self._deadlines.heartbeat_s)
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
                pause = min(2 * pause, self._deadlines.heartbeat_s)
            except TimeoutError:
                reason = "silent"
            finally:
                self._lose_all(reason)
            await asyncio.sleep(pause)

    def _lose_all(self, reason: str) -> None:
        if self.connected:
            log_event(log, logging.WARNING, "worker lost", worker=self.record.worker_id, reason=reason)
        self.connected = False
        self._outgoing = asyncio.Queue()
        for stream in self._attempts.values():
            stream.events.put_nowait(WorkerLost(f"worker {self.record.worker_id} was lost ({reason})"))
        self._on_change()

    async def _stream(self) -> bool:
        """Reads one stream until it ends; whether anything came."""
        stub, command = ROLES[self.record.role]
        self._outgoing.put_nowait(command(hello=types_pb2.Hello(router_id=self._router_id)))
        call = stub(self._channel).Relay()
        writer = asyncio.create_task(self._write(call, self._outgoing))
        try:
            while True:
                async with asyncio.timeout(self._deadlines.dead_s):
                    event = await call.read()
                if event is grpc.aio.EOF:
                    return self.connected
                self._heard_s = self._clock()
                self.load.CopyFrom(event.load)
                self._take(event)
        finally:
            call.cancel()
            await end(writer)  # what broke it breaks the reading too

    async def _write(self, call: Any, outgoing: asyncio.Queue[Any]) -> None:
        while True:
            await call.write(await outgoing.get())

    def _take(self, event: Any) -> None:
        kind = event.WhichOneof("event")
        if kind is None:
            return  # a heartbeat
        message = getattr(event, kind)
        self._progress_s = self._heard_s
        if kind == "welcome":
            self._meet(message)
        elif kind == "step":
            for tokens in message.sequences:
                self._deliver(tokens.key, ("tokens", tokens))
        elif kind == "failed":
            self._deliver(message.key, error_from_proto(message.error))
        else:
            self._deliver(message.key, (kind, message))

    def _meet(self, welcome: types_pb2.Welcome) -> None:
        if (welcome.epoch, welcome.fingerprint) != (self.record.epoch, self.record.fingerprint):
            self.obsolete = True
            raise TimeoutError
        self.connected = True
        log_event(log, logging.INFO, "worker connected", worker=self.record.worker_id, address=self.record.address)
        self._on_change()

    def _deliver(self, key: types_pb2.AttemptKey, event: tuple[str, Any] | KVRelayError) -> None:
        stream = self._attempts.get((key.request_id, key.attempt))
        if stream is None:
            return  # late
        if not isinstance(event, KVRelayError) and event[0] in COUNTED[self.record.role]:
            stream.charged_tokens = 0
        stream.events.put_nowait(event)
