"""The router's half of a relay: one channel and one ordered stream to a worker, shared by all requests."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from common.deadlines import Deadlines
from common.discovery.registry import WorkerRecord
from common.errors import KVRelayError, Timeout, WorkerLost
from common.log import get_logger, log_event
from common.rpc.channel import OpenChannel, open_channel
from common.rpc.convert import content_of, error_from_proto
from common.rpc.pb import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2
from common.tasks import end
from kvtransfer.holder_client import HolderClient
from kvtransfer.lease import ROUTER

log = get_logger("clients")
ROLES: dict[str, tuple[Any, Any]] = {
    "prefill": (prefill_pb2_grpc.PrefillStub, prefill_pb2.PrefillCommand),
    "decode": (decode_pb2_grpc.DecodeStub, decode_pb2.DecodeCommand),
}
AttemptEvent = (
    types_pb2.Accepted
    | types_pb2.PromptLogprobs
    | prefill_pb2.Progress
    | prefill_pb2.FirstTokens
    | decode_pb2.Admitted
    | decode_pb2.SequenceTokens
)
# events after which the worker's load has the attempt in it
COUNTED: dict[str, tuple[type, ...]] = {
    "prefill": (types_pb2.Accepted,),
    "decode": (decode_pb2.Admitted, decode_pb2.SequenceTokens),
}


class AttemptStream:
    """The events of one attempt, in order."""

    def __init__(self, client: "WorkerClient", charged_tokens: int, num_forks: int) -> None:
        self.client = client
        self.num_forks = num_forks  # that are not finished
        self.events: asyncio.Queue[AttemptEvent | KVRelayError] = asyncio.Queue()
        self.charged_tokens = charged_tokens  # until the worker's own load counts them
        self.ended = False  # the worker has nothing more of it: no abort is needed

    async def next(self, patience_s: float) -> AttemptEvent:
        """The next event, to be matched by its type; raises what the worker or the stream failed with.

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
    """One life (epoch) of one worker. `on_change` is called when it may have become usable or useless.

    `clock` should stand still while this process is stalled (common/awake_clock.py): who can't be heard is not silent.
    """

    def __init__(
        self,
        record: WorkerRecord,
        router_id: str,
        deadlines: Deadlines,
        clock: Callable[[], float],
        on_change: Callable[[], None],
        channel: OpenChannel = open_channel,
    ) -> None:
        self.record = record
        self.load = types_pb2.Load()
        self.draining = False
        self.obsolete = False  # another worker answers at its address: this life is over
        self.connected = False
        self._told = False  # how it was or why it was not connected at first
        self._closed = False
        self._router_id = router_id
        self._deadlines = deadlines
        self._clock = clock
        self._on_change = on_change
        self._attempts: dict[tuple[str, int], AttemptStream] = {}
        self._outgoing: asyncio.Queue[Any] = asyncio.Queue()
        self._heard_s = self._progress_s = clock()
        self._channel = channel(record.address, deadlines)
        self.holder = HolderClient(self._channel, record.address, deadlines)
        self._releases: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._run())

    @property
    def in_flight(self) -> int:
        """Attempts on this worker now."""
        return len(self._attempts)

    @property
    def num_forks(self) -> int:
        """Forks of these attempts that are not finished."""
        return sum(stream.num_forks for stream in self._attempts.values())

    @property
    def charged_tokens(self) -> int:
        """Tokens of attempts that its load does not count yet."""
        return sum(stream.charged_tokens for stream in self._attempts.values())

    @property
    def healthy(self) -> bool:
        heard = self._clock() - self._heard_s < self._deadlines.suspect_s
        return self.connected and heard and not self.load.stuck

    @property
    def heard_s(self) -> float:
        """When it was heard last, or first heard of, on the clock."""
        return self._heard_s

    def idle_s(self) -> float:
        """Seconds since it got anything done, for whichever attempt: an event, a step, a byte copied."""
        return self._clock() - self._progress_s

    @contextmanager
    def attempt(
        self, key: types_pb2.AttemptKey, command: Any, charged_tokens: int, num_forks: int = 1
    ) -> Iterator[AttemptStream]:
        """Submits, and aborts at the end unless the worker has ended it. Raises WorkerLost when not connected."""
        if not self.connected:
            raise WorkerLost(f"worker {self.record.worker_id} is not connected")
        stream = AttemptStream(self, charged_tokens, num_forks)
        name = (key.request_id, key.attempt)
        self._attempts[name] = stream
        self._outgoing.put_nowait(command)
        try:
            yield stream
        finally:
            del self._attempts[name]
            while not stream.events.empty():
                self._drop(stream.events.get_nowait())
            if not stream.ended:
                self.abort(key)

    def abort(self, key: types_pb2.AttemptKey, forks: tuple[int, ...] = ()) -> None:
        """Ends an attempt, or some of its forks; ordered after its submit."""
        if self.connected:
            self._outgoing.put_nowait(ROLES[self.record.role][1](abort=types_pb2.Abort(key=key, forks=forks)))

    def release_unread(self, handle_id: bytes, epoch: int) -> None:
        """The router's word, in the background, that nobody will read what a handle names."""
        task = asyncio.create_task(self._release_unread(handle_id, epoch))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release_unread(self, handle_id: bytes, epoch: int) -> None:
        try:
            await self.holder.release(handle_id, epoch, ROUTER)
        except KVRelayError as error:  # the lease runs out by itself
            log_event(log, logging.INFO, "handle not released", worker=self.record.worker_id, code=error.code)

    async def close(self) -> None:
        """Ends the stream; attempts on it fail with WorkerLost. Waits for releases, each of which has its deadline."""
        self._closed = True
        await end(self._task)
        await asyncio.gather(*self._releases)
        await self._channel.close()

    async def _run(self) -> None:
        """Opens the stream, again and again, until another life of the worker answers.

        It asks whether it is closed: gRPC drops a cancellation that comes while a connection fails.
        """
        pause_s = self._deadlines.retry_s
        while not (self.obsolete or self._closed):
            reason = "closed by the router"
            try:
                reason = await self._stream()
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
                self._tell_why_not(reason)
            except TimeoutError:
                reason = "silent"
            finally:
                first_s, longest_s = self._deadlines.retry_s, self._deadlines.heartbeat_s
                pause_s = first_s if self.connected else min(2 * pause_s, longest_s)
                self._lose_all(reason)
            await asyncio.sleep(pause_s)

    def _tell_why_not(self, reason: str) -> None:
        """One line, for who has given the two different keys or certificates."""
        if not self._told:
            log_event(log, logging.WARNING, "worker can't be used", worker=self.record.worker_id, reason=reason)
            self._told = True

    def _lose_all(self, reason: str) -> None:
        if self.connected:
            level = logging.INFO if self._closed else logging.WARNING
            log_event(log, level, "worker lost", worker=self.record.worker_id, reason=reason)
        self.connected = False
        self._outgoing = asyncio.Queue()
        for stream in self._attempts.values():
            stream.events.put_nowait(WorkerLost(f"worker {self.record.worker_id} was lost ({reason})"))
        self._on_change()

    async def _stream(self) -> str:
        """Reads one stream until it ends; why it did."""
        stub, command = ROLES[self.record.role]
        self._outgoing.put_nowait(command(hello=types_pb2.Hello(router_id=self._router_id)))
        call = stub(self._channel).Relay()
        writer = asyncio.create_task(self._write(call, self._outgoing))
        try:
            while True:
                event = await self._read(call)
                if event is grpc.aio.EOF:
                    return "closed by the worker"
                if event is None:  # grpc's word for it
                    return "it sent what can't be read"
                self._heard_s = self._clock()
                if event.load.progress != self.load.progress:
                    self._progress_s = self._heard_s
                self.load.CopyFrom(event.load)
                self.draining = self.draining or event.load.draining
                self._take(event)
                if self.obsolete:
                    return "another worker answers at its address"
        finally:
            call.cancel()
            await end(writer)  # what broke it breaks the reading too

    async def _read(self, call: Any) -> Any:
        """The stream's next message. Raises TimeoutError when none comes for dead_s in which it could be heard."""
        began, reading = self._clock(), asyncio.ensure_future(call.read())
        try:
            while not reading.done():
                left = began + self._deadlines.dead_s - self._clock()
                if left <= 0:
                    raise TimeoutError
                await asyncio.wait({reading}, timeout=left)
            return reading.result()
        finally:
            reading.cancel()

    async def _write(self, call: Any, outgoing: asyncio.Queue[Any]) -> None:
        while True:
            await call.write(await outgoing.get())

    def _take(self, event: Any) -> None:
        message = content_of(event)
        if message is None:
            return  # a heartbeat
        self._progress_s = self._heard_s
        match message:
            case types_pb2.Welcome():
                self._meet(message)
            case decode_pb2.StepTokens():
                for tokens in message.sequences:
                    self._deliver(tokens.key, tokens)
            case types_pb2.Failed():
                self._deliver(message.key, error_from_proto(message.error))
            case _:
                self._deliver(message.key, message)

    def _meet(self, welcome: types_pb2.Welcome) -> None:
        if (welcome.epoch, welcome.fingerprint) != (self.record.epoch, self.record.fingerprint):
            self.obsolete = True
            return
        self.connected = self._told = True
        log_event(log, logging.INFO, "worker connected", worker=self.record.worker_id, address=self.record.address)
        self._on_change()

    def _deliver(self, key: types_pb2.AttemptKey, event: AttemptEvent | KVRelayError) -> None:
        stream = self._attempts.get((key.request_id, key.attempt))
        if stream is None:
            self._drop(event)
            return
        if isinstance(event, COUNTED[self.record.role]):
            stream.charged_tokens = 0
        stream.events.put_nowait(event)

    def _drop(self, event: AttemptEvent | KVRelayError) -> None:
        """A late event is a no-op, but blocks that came with it are not to be held for nobody."""
        if isinstance(event, prefill_pb2.FirstTokens) and event.HasField("handle"):
            self.release_unread(event.handle.id, event.handle.epoch)
