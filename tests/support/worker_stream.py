"""A router's end of one worker's stream, without a router: raw commands out, every event kept as it came."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc

from common.deadlines import Deadlines
from common.engine.engine import Engine
from common.rpc.channel import open_channel
from common.rpc.convert import params_to_proto
from common.rpc.pb import decode_pb2, decode_pb2_grpc, kv_pb2, prefill_pb2, prefill_pb2_grpc, types_pb2
from common.sampling import SamplingParams
from common.tasks import end
from kvtransfer.holder_client import HolderClient
from tests.support.in_process_cluster import LocalWorker

STUBS: dict[str, tuple[Any, Any]] = {
    "prefill": (prefill_pb2_grpc.PrefillStub, prefill_pb2.PrefillCommand),
    "decode": (decode_pb2_grpc.DecodeStub, decode_pb2.DecodeCommand),
}
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
QUICK_HEARTBEAT = Deadlines(heartbeat_s=0.05)
PATIENCE_S = 20.0


def submission(
    prompt_ids: Sequence[int] = (3, 4, 5),
    *,
    request: str = "r",
    attempt: int = 1,
    epoch: int = 7,
    fingerprint: str = "model",
    forks: Sequence[tuple[int, Sequence[int]]] = ((0, ()),),
    params: SamplingParams = GREEDY,
    cache_salt: str = "",
) -> types_pb2.Submission:
    """`forks` are (index, output so far)."""
    return types_pb2.Submission(
        key=types_pb2.AttemptKey(request_id=request, attempt=attempt),
        epoch=epoch,
        fingerprint=fingerprint,
        prompt_ids=prompt_ids,
        forks=[types_pb2.Fork(index=index, output_ids=output) for index, output in forks],
        params=params_to_proto(params),
        cache_salt=cache_salt,
    )


class WorkerStream:
    """One stream to one worker; it fails at once, and says why, when what a test waits for can't come any more."""

    def __init__(self, channel: grpc.aio.Channel, call: Any, command: Any, **defaults: Any) -> None:
        self.channel = channel
        self.call = call
        self.events: list[tuple[str, Any]] = []  # (kind, message) in order; a heartbeat's kind is ""
        self.loads: list[types_pb2.Load] = []
        self.ended = False
        self.reading = asyncio.create_task(self._read())
        self._command = command
        self._defaults = defaults
        self._news = asyncio.Event()
        self._writing = asyncio.Lock()

    async def submit(self, *prompt: Sequence[int], handle: kv_pb2.KVHandle | None = None, **fields: Any) -> None:
        message = submission(*prompt, **(self._defaults | fields))
        if self._command is decode_pb2.DecodeCommand:
            await self.send(submit=decode_pb2.DecodeSubmission(submission=message, handle=handle))
        else:
            await self.send(submit=message)

    async def abort(self, request: str = "r", attempt: int = 1, forks: Sequence[int] = ()) -> None:
        key = types_pb2.AttemptKey(request_id=request, attempt=attempt)
        await self.send(abort=types_pb2.Abort(key=key, forks=forks))

    async def send(self, **command: Any) -> None:
        async with self._writing:
            await self.call.write(self._command(**command))

    def of(self, request: str = "r", attempt: int = 1) -> list[tuple[str, Any]]:
        """The events of one attempt so far; a step's message counts with what it has of it."""
        found = []
        for kind, message in self.events:
            parts = [("tokens", one) for one in message.sequences] if kind == "step" else [(kind, message)]
            for name, part in parts:
                if name not in ("", "welcome") and (part.key.request_id, part.key.attempt) == (request, attempt):
                    found.append((name, part))
        return found

    def tokens_of(self, request: str = "r", attempt: int = 1) -> list[types_pb2.Token]:
        """Tokens that came for one attempt so far, in order."""
        return [t for kind, m in self.of(request, attempt) if kind in ("tokens", "first_tokens") for t in m.tokens]

    async def event(self, kind: str, request: str = "r", attempt: int = 1) -> Any:
        """The first event of this kind of an attempt, now or when it comes."""

        def found() -> Any:
            mine = self.of(request, attempt)
            wanted = next((message for name, message in mine if name == kind), None)
            if wanted is None and mine and mine[-1][0] == "failed":
                raise AssertionError(f"no {kind}, but {mine[-1][1].error}")
            return wanted

        return await self.until(found)

    async def failure(self, request: str = "r", attempt: int = 1) -> tuple[str, str]:
        """(code, field) of the attempt's failure."""
        error = (await self.event("failed", request, attempt)).error
        return error.code, error.field

    async def answer(
        self, request: str = "r", attempt: int = 1, forks: Sequence[int] = (0,)
    ) -> dict[int, list[types_pb2.Token]]:
        """All tokens of these forks, when each has its last one."""

        def whole() -> Any:
            tokens = {fork: [t for t in self.tokens_of(request, attempt) if t.fork == fork] for fork in forks}
            failed = [message.error for kind, message in self.of(request, attempt) if kind == "failed"]
            assert not failed, failed
            return tokens if all(one and one[-1].finish_reason for one in tokens.values()) else None

        return await self.until(whole)

    async def until(self, condition: Any) -> Any:
        """The condition's first true value; looked at again after each event."""
        async with asyncio.timeout(PATIENCE_S):
            while not (value := condition()):
                assert not self.ended, f"the stream ended; so far: {[kind for kind, _ in self.events if kind]}"
                self._news.clear()
                await self._news.wait()
            return value

    async def heartbeat(self) -> types_pb2.Load:
        """The load in the next message of any kind."""
        seen = len(self.loads)
        await self.until(lambda: len(self.loads) > seen)
        return self.loads[seen]

    async def _read(self) -> None:
        """Keeps what comes until the stream ends, however it does."""
        try:
            async for event in self.call:
                kind = event.WhichOneof("event") or ""
                self.events.append((kind, getattr(event, kind) if kind else None))
                self.loads.append(event.load)
                self._news.set()
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            pass  # ended by the other side, or by a test that cancelled the call
        finally:
            self.ended = True
            self._news.set()


@asynccontextmanager
async def open_stream(
    address: str, role: str, *, router_id: str = "raw", hello: bool = True, **defaults: Any
) -> AsyncIterator[WorkerStream]:
    """A stream of its own channel; it has been welcomed. Ends by cancelling the call."""
    stub, command = STUBS[role]
    channel = open_channel(address, Deadlines())
    stream = WorkerStream(channel, stub(channel).Relay(), command, **defaults)
    try:
        if hello:
            await stream.send(hello=types_pb2.Hello(router_id=router_id))
        await stream.until(lambda: stream.events and stream.events[0][0] == "welcome")
        yield stream
    finally:
        stream.call.cancel()
        await end(stream.reading)
        await channel.close()


def stream_to(one: LocalWorker, **options: Any) -> Any:
    """A stream to a worker of a local cluster; submissions name its epoch and fingerprint unless told otherwise."""
    info = one.worker.info
    defaults = {"epoch": info.epoch, "fingerprint": info.fingerprint}
    return open_stream(info.address, info.role, **(defaults | options))


@asynccontextmanager
async def holder_client(one: LocalWorker) -> AsyncIterator[HolderClient]:
    """Calls to a prefill worker's KV service."""
    channel = open_channel(one.worker.info.address, Deadlines())
    try:
        yield HolderClient(channel, one.worker.info.address, Deadlines())
    finally:
        await channel.close()


class HeldStep:
    """A runner whose passes wait until they are let go; the first one to come then fails, if told to."""

    def __init__(self, runner: Any) -> None:
        self.computing = threading.Event()  # the step loop is in a forward pass
        self.go = threading.Event()  # all passes
        self.turns = threading.Semaphore(0)  # one pass each
        self.failure: Exception | None = None
        self.batches: list[Any] = []
        self._runner = runner

    def forward(self, batch: Any) -> Any:
        self.batches.append(batch)
        self.computing.set()
        give_up_at = time.monotonic() + PATIENCE_S
        while not self.go.is_set() and not self.turns.acquire(timeout=0.01):
            if time.monotonic() > give_up_at:
                raise AssertionError("nobody let the step go")
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        return self._runner.forward(batch)


@contextmanager
def held_step(engine: Engine) -> Iterator[HeldStep]:
    """The engine's next forward pass waits for `go`; the end of the block lets it go, too."""
    held = HeldStep(engine._runner)
    engine._runner = held
    try:
        yield held
    finally:
        engine._runner = held._runner
        held.go.set()
