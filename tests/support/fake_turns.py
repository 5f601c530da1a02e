"""What a scripted worker says to a submission: a script is an async function of a Turn.

Honest scripts answer what `Words` has for each fork.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from common.errors import KVRelayError
from common.rpc.convert import envelopes, error_to_proto
from common.rpc.pb import decode_pb2, prefill_pb2, types_pb2
from kvtransfer.handle import KVHandle
from tests.support.redis_tools import eventually

EOS = 2
FINISH_REASONS = {"": 0, "stop": types_pb2.FINISH_REASON_STOP, "length": types_pb2.FINISH_REASON_LENGTH}
UNKNOWN = 99  # what any other reason becomes
EVENTS = {"prefill": prefill_pb2.PrefillEvent, "decode": decode_pb2.DecodeEvent}
Script = Callable[["Turn"], Awaitable[None]]


def a_token(fork: int, index: int, token_id: int, finish_reason: str = "", **more: Any) -> types_pb2.Token:
    reason = FINISH_REASONS.get(finish_reason, UNKNOWN)
    return types_pb2.Token(fork=fork, index=index, token_id=token_id, finish_reason=reason, **more)


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
        self._as_event = envelopes(event_type)

    def send(self, message: Any) -> None:
        self.outgoing.put_nowait(self._as_event(message))


class Turn:
    """One submission at one worker, and what the worker can say to it."""

    def __init__(self, worker: Any, command: Any, stream: Stream) -> None:
        """worker: a FakeWorker; command: what it was told to do."""
        self.worker = worker
        self.stream = stream
        decode = worker.role == "decode"
        self.submission: types_pb2.Submission = command.submission if decode else command
        self.handle = command.handle if decode and command.HasField("handle") else None
        self.said = {fork.index: list(fork.output_ids) for fork in self.submission.forks}
        self.live = set(self.said)

    def accepted(self) -> None:
        self.stream.send(types_pb2.Accepted(key=self.submission.key))

    def progress(self) -> None:
        self.stream.send(prefill_pb2.Progress(key=self.submission.key, computed_tokens=1, total_tokens=2))

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
        self.stream.send(first)

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
        self.stream.send(admitted)

    def tokens(self, *tokens: types_pb2.Token, key: types_pb2.AttemptKey | None = None, **more: Any) -> None:
        sequence = decode_pb2.SequenceTokens(key=key or self.submission.key, tokens=tokens, **more)
        self.stream.send(decode_pb2.StepTokens(sequences=[sequence]))

    def say(self, count: int = 1) -> None:
        """The next `count` tokens of each live fork."""
        for _ in range(count):
            self.tokens(*self.next_tokens())

    def failed(self, error: KVRelayError) -> None:
        self.stream.send(types_pb2.Failed(key=self.submission.key, error=error_to_proto(error)))

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


async def endless(turn: Turn) -> None:
    """Goes on until it is aborted."""
    turn.accepted()
    turn.admitted()
    while True:
        turn.say()
        await asyncio.sleep(0.001)


async def first_then_no_decode(turn: Turn) -> None:
    """All decode workers are lost by the time that the prompt is computed."""
    cluster = turn.worker.cluster
    await cluster.decode.stop()
    await eventually(lambda: not cluster.client(cluster.decode).connected)
    turn.accepted()
    turn.first_tokens()
