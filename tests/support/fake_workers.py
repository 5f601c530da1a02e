"""Scripted workers: real gRPC servers that say what a test tells them to, and remember what they were told.

Unless a test gives scripts, workers are honest. Of the contract they keep what follows from it for a router: an abort,
a newer attempt of the same request and the end of the stream each end a turn, and nothing more is said of it.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc

from common.block_hash import BLOCK_SIZE
from common.deadlines import Deadlines
from common.errors import KVExpired, KVRelayError
from common.rpc.channel import server_options
from common.rpc.convert import error_to_proto
from common.rpc.pb import decode_pb2_grpc, kv_pb2, kv_pb2_grpc, prefill_pb2_grpc, types_pb2
from common.tasks import end
from kvtransfer.handle import KVHandle
from kvtransfer.lease import HANDLE_ID_BYTES, ROUTER
from tests.support.fake_turns import EVENTS, Script, Stream, Turn, Words, honest
from tests.support.redis_tools import a_record


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
        stream.send(types_pb2.Welcome(epoch=self.record.epoch, fingerprint=self.record.fingerprint))
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
