"""Scripted workers: real gRPC servers that say what a test tells them to, and remember what they were told.

A script is an async function of a Turn, one submission's. Unless a test gives one, workers are honest: they answer
what `Words` has for each fork. Of the contract they keep what follows from it for a router: an abort, a newer attempt
of the same request and the end of the stream each end a turn, and nothing more is said of it.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
from redis_tools import a_record

from common.block_hash import BLOCK_SIZE
from common.convert import error_to_proto
from common.deadlines import Deadlines
from common.errors import KVExpired, KVRelayError
from common.grpc_server import server_options
from common.rpc import decode_pb2, decode_pb2_grpc, kv_pb2, kv_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2
from common.tasks import end
from kvtransfer.handle import KVHandle
from kvtransfer.lease import HANDLE_ID_BYTES, ROUTER

EOS = 2
EVENTS = {"prefill": prefill_pb2.PrefillEvent, "decode": decode_pb2.DecodeEvent}
Script = Callable[["Turn"], Awaitable[None]]


def a_token(fork: int, index: int, token_id: int, finish_reason: str = "", **more: Any) -> types_pb2.Token:
    return types_pb2.Token(fork=fork, index=index, token_id=token_id, finish_reason=finish_reason, **more)


@dataclass
class Words:
    """What all honest workers say, and the handles that nobody has released yet."""

    answers: list[list[int]] = field(default_factory=list)  # token ids of each fork, as many as a test needs
    held: set[bytes] = field(default_factory=set)

    def token(self, submission: types_pb2.Submission, fork: int, index: int) -> types_pb2.Token:
        token_id, params = self.answers[fork][index], submission.params
        if token_id in params.stop_token_ids:
            return a_token(fork, index, token_id, "stop", stop_token_id=token_id)
        ended = "stop" if token_id == EOS and not params.ignore_eos else ""
        return a_token(fork, index, token_id, ended or ("length" if index + 1 == params.max_tokens else ""))


class Stream:
    """One router's stream."""

    def __init__(self, event_type: Any) -> None:
        self.router_id = ""
        self.outgoing: asyncio.Queue[Any] = asyncio.Queue()
        self.turns: set[asyncio.Task[None]] = set()
        self._event_type = event_type

    def send(self, **event: Any) -> None:
        self.outgoing.put_nowait(self._event_type(**event))


class Turn:
    """One submission at one worker, and what the worker can say to it."""

    def __init__(self, worker: "FakeWorker", command: Any, stream: Stream) -> None:
        self.worker = worker
        self.stream = stream
        decode = worker.role == "decode"
        self.submission: types_pb2.Submission = command.submission if decode else command
        self.handle = command.handle if decode and command.HasField("handle") else None
        self.said = {fork.index: list(fork.output_ids) for fork in self.submission.forks}
        self.live = set(self.said)

    def accepted(self) -> None:
        self.stream.send(accepted=types_pb2.Accepted(key=self.submission.key))

    def progress(self) -> None:
        self.stream.send(progress=prefill_pb2.Progress(key=self.submission.key, computed_tokens=1, total_tokens=2))

    def next_tokens(self) -> list[types_pb2.Token]:
        """The next one of each live fork."""
        words = self.worker.words
        tokens = [words.token(self.submission, fork, len(self.said[fork])) for fork in sorted(self.live)]
        for token in tokens:
            self.said[token.fork].append(token.token_id)
            if token.finish_reason:
                self.live.discard(token.fork)
        return tokens

    def first_tokens(self, tokens: list[types_pb2.Token] | None = None, **more: Any) -> None:
        """Holds the KV unless all forks are finished."""
        tokens = self.next_tokens() if tokens is None else tokens
        handle = self.hold().to_proto() if any(not token.finish_reason for token in tokens) else None
        message = {"handle": handle, "queue_s": 0.25, "prefill_s": 0.5, "cached_tokens": 3} | more
        first = prefill_pb2.FirstTokens(key=self.submission.key, tokens=tokens, **message)
        self.stream.send(first_tokens=first)

    def hold(self) -> KVHandle:
        submission = self.submission
        num_tokens = len(submission.prompt_ids) + len(submission.forks[0].output_ids)
        return self.worker.hold(num_tokens, submission.key)

    def admitted(self) -> None:
        """The KV is copied and the holder has let go of it."""
        if self.handle is not None:
            self.worker.words.held.discard(self.handle.id)
        admitted = decode_pb2.Admitted(
            key=self.submission.key, cached_tokens=1, bytes=7, handover_s=0.125, queue_s=0.5, transport="fake"
        )
        self.stream.send(admitted=admitted)

    def tokens(self, *tokens: types_pb2.Token, key: types_pb2.AttemptKey | None = None, **more: Any) -> None:
        sequence = decode_pb2.SequenceTokens(key=key or self.submission.key, tokens=tokens, **more)
        self.stream.send(step=decode_pb2.StepTokens(sequences=[sequence]))

    def say(self, count: int = 1) -> None:
        """The next `count` tokens of each live fork."""
        for _ in range(count):
            self.tokens(*self.next_tokens())

    def failed(self, error: KVRelayError) -> None:
        self.stream.send(failed=types_pb2.Failed(key=self.submission.key, error=error_to_proto(error)))

    def hang_up(self) -> None:
        """Ends the stream after what was said so far."""
        self.stream.outgoing.put_nowait(None)


async def honest(turn: Turn) -> None:
    turn.accepted()
    if turn.worker.role == "prefill":
        turn.progress()
        turn.first_tokens()
        return
    if turn.handle is not None:
        turn.admitted()
    while turn.live:
        turn.say()
        await asyncio.sleep(0)


async def silent(turn: Turn) -> None:
    """Says nothing until it is aborted."""
    await asyncio.Event().wait()


async def accepting(turn: Turn) -> None:
    turn.accepted()
    await asyncio.Event().wait()


class FakeWorker(kv_pb2_grpc.KVServicer):
    """A prefill or decode worker; a prefill worker is a holder, too."""

    def __init__(self, role: str, name: str, words: Words, deadlines: Deadlines, *, epoch: int = 7) -> None:
        self.role = role
        self.words = words
        self.load = types_pb2.Load(total_blocks=1000, free_blocks=1000)
        self.scripts: list[Script] = []  # of the next submissions; those after them get honest answers
        self.always: Script = honest
        self.cluster: Any = None  # that it is part of
        self.turns: list[Turn] = []
        self.commands: list[Any] = []
        self.renewals: list[bytes] = []
        self.releases: list[bytes] = []
        self.releasing = asyncio.Event()  # cleared: releases get no answer
        self.releasing.set()
        self.flowing = asyncio.Event()  # cleared: the worker is frozen, its connection isn't
        self.flowing.set()
        self.num_streams = 0
        self.running: dict[tuple[str, str], tuple[Turn, asyncio.Task[None]]] = {}  # by router and request
        self.record = a_record(role=role, worker_id=name, epoch=epoch)
        self._deadlines = deadlines
        self._server: grpc.aio.Server | None = None

    @property
    def submissions(self) -> list[types_pb2.Submission]:
        return [turn.submission for turn in self.turns]

    @property
    def aborts(self) -> list[types_pb2.Abort]:
        return [command.abort for command in self.commands if command.WhichOneof("command") == "abort"]

    async def start(self, address: str = "127.0.0.1:0") -> None:
        self._server = grpc.aio.server(options=server_options(self._deadlines))
        if self.role == "prefill":
            prefill_pb2_grpc.add_PrefillServicer_to_server(self, self._server)
        else:
            decode_pb2_grpc.add_DecodeServicer_to_server(self, self._server)
        kv_pb2_grpc.add_KVServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(address)
        self.record = replace(self.record, address=f"127.0.0.1:{port}")
        await self._server.start()

    async def stop(self) -> None:
        """As a death looks from outside."""
        self.flowing.set()
        self.releasing.set()
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def hold(self, num_tokens: int = 1, key: types_pb2.AttemptKey | None = None) -> KVHandle:
        """A handle that is held until a reader has what it names, or the router releases it."""
        handle = KVHandle(
            id=secrets.token_bytes(HANDLE_ID_BYTES),
            address=self.record.address,
            epoch=self.record.epoch,
            fingerprint=self.record.fingerprint,
            layout_id=self.record.layout_id,
            block_ids=tuple(range(-(-num_tokens // BLOCK_SIZE))),
            num_tokens=num_tokens,
            lease_s=30.0,
            request_id=key.request_id if key else "request",
            attempt=key.attempt if key else 1,
        )
        self.words.held.add(handle.id)
        return handle

    async def Relay(self, commands: AsyncIterator[Any], context: Any) -> None:
        self.num_streams += 1
        stream = Stream(EVENTS[self.role])
        stream.send(welcome=types_pb2.Welcome(epoch=self.record.epoch, fingerprint=self.record.fingerprint))
        reader = asyncio.create_task(self._read(commands, stream))
        try:
            while (event := await self._next(stream)) is not None:
                await self.flowing.wait()
                event.load.CopyFrom(self.load)
                await context.write(event)
        finally:
            await end(reader, *stream.turns)

    async def _next(self, stream: Stream) -> Any:
        try:
            async with asyncio.timeout(self._deadlines.heartbeat_s):
                return await stream.outgoing.get()
        except TimeoutError:
            return EVENTS[self.role]()

    async def _read(self, commands: AsyncIterator[Any], stream: Stream) -> None:
        async for command in commands:
            self.commands.append(command)
            kind = command.WhichOneof("command")
            if kind == "hello":
                stream.router_id = command.hello.router_id
            elif kind == "submit":
                self._begin(Turn(self, command.submit, stream))
            elif (running := self.running.get((stream.router_id, command.abort.key.request_id))) is not None:
                turn, task = running
                turn.live.difference_update(command.abort.forks)
                if turn.submission.key == command.abort.key and not (command.abort.forks and turn.live):
                    task.cancel()

    def _begin(self, turn: Turn) -> None:
        """A newer attempt ends the older one of its request; nothing is said of that."""
        owner = (turn.stream.router_id, turn.submission.key.request_id)
        if owner in self.running:
            self.running[owner][1].cancel()
        self.turns.append(turn)
        task = asyncio.create_task(self._perform(turn, self.scripts.pop(0) if self.scripts else self.always))
        self.running[owner] = (turn, task)
        turn.stream.turns.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            turn.stream.turns.discard(task)
            if self.running.get(owner, (turn, None))[1] is task:
                del self.running[owner]

        task.add_done_callback(ended)

    async def _perform(self, turn: Turn, script: Script) -> None:
        try:
            await script(turn)
        except KVRelayError as error:
            turn.failed(error)

    async def Renew(self, request: kv_pb2.RenewRequest, context: object) -> kv_pb2.RenewReply:
        assert request.reader_id == ROUTER
        self.renewals.append(request.handle_id)
        if request.handle_id not in self.words.held:
            return kv_pb2.RenewReply(error=error_to_proto(KVExpired("not held")))
        return kv_pb2.RenewReply(lease_s=30.0)

    async def Release(self, request: kv_pb2.ReleaseRequest, context: object) -> kv_pb2.ReleaseReply:
        assert request.reader_id == ROUTER
        await self.releasing.wait()
        self.releases.append(request.handle_id)
        held = request.handle_id in self.words.held
        self.words.held.discard(request.handle_id)
        return kv_pb2.ReleaseReply(held_until_now=held)
