"""Worker's half of a relay: one ordered stream per router, and in it an attempt per submission.

Submits and aborts arrive in the order they were sent. When the stream breaks, all its attempts end.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from common.convert import error_to_proto
from common.errors import EpochMismatch, FingerprintMismatch, KVRelayError, StaleAttempt
from common.log import get_logger, log_event
from common.rpc import types_pb2
from common.tasks import end

log = get_logger("relay")


class Session:
    """One router's stream, as an attempt sees it."""

    def __init__(self, event_type: Callable[..., Any]) -> None:
        self.router_id = ""
        self.event_type = event_type
        self.outgoing: asyncio.Queue[Any] = asyncio.Queue()

    def send(self, **event: Any) -> None:
        """Queues one event, named by its field: send(accepted=...). Never blocks."""
        self.outgoing.put_nowait(self.event_type(**event))


@dataclass(slots=True)
class Attempt:
    number: int
    key: str
    task: asyncio.Task[None]


class RelayServer:
    """Runs `serve(command, session)` for each submission; it ends when the attempt has.

    `serve` leaves nothing behind, however it ends: the server cancels it on an abort, on a newer
    attempt (which begins only after that), and when the stream breaks.
    """

    def __init__(
        self,
        *,
        epoch: int,
        fingerprint: str,
        event_type: Callable[..., Any],
        serve: Callable[[Any, Session], Awaitable[None]],
        abort_forks: Callable[[str, list[int]], None],
        load: Callable[[], types_pb2.Load],
        heartbeat_s: float,
    ) -> None:
        self.epoch = epoch
        self.fingerprint = fingerprint
        self._event_type = event_type
        self._serve = serve
        self._abort_forks = abort_forks
        self._load = load
        self._heartbeat_s = heartbeat_s
        self._attempts: dict[tuple[str, str], Attempt] = {}

    @property
    def num_attempts(self) -> int:
        return len(self._attempts)

    async def Relay(self, commands: AsyncIterator[Any], context: object) -> AsyncIterator[Any]:
        """The RPC: commands in, events out, each with the load; a heartbeat when there is nothing else."""
        session = Session(self._event_type)
        session.send(welcome=types_pb2.Welcome(epoch=self.epoch, fingerprint=self.fingerprint))
        tasks: set[asyncio.Task[None]] = set()
        reader = asyncio.create_task(self._read(commands, session, tasks))
        reader.add_done_callback(lambda _: session.outgoing.put_nowait(None))
        try:
            while True:
                try:
                    async with asyncio.timeout(self._heartbeat_s):
                        event = await session.outgoing.get()
                except TimeoutError:
                    event = self._event_type()
                if event is None:
                    return
                event.load.CopyFrom(self._load())
                yield event
        finally:
            await end(reader)
            await end(*tasks)

    async def _read(self, commands: AsyncIterator[Any], session: Session, tasks: set[asyncio.Task[None]]) -> None:
        async for command in commands:
            kind = command.WhichOneof("command")
            if kind == "hello":
                session.router_id = command.hello.router_id
            elif kind == "submit":
                task = self._submit(command.submit, session)
                if task is not None:
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
            elif kind == "abort":
                self._abort(command.abort, session)

    def _submit(self, command: Any, session: Session) -> asyncio.Task[None] | None:
        submission = submission_of(command)
        owner = (session.router_id, submission.key.request_id)
        number = submission.key.attempt
        current = self._attempts.get(owner)
        if current is not None and number <= current.number:
            if number < current.number:
                error = StaleAttempt(f"attempt {number} came after attempt {current.number}")
                session.send(failed=types_pb2.Failed(key=submission.key, error=error_to_proto(error)))
            return None
        previous = current.task if current else None
        task = asyncio.create_task(self._run(command, session, previous))
        task.add_done_callback(lambda task: self._end(owner, task))
        self._attempts[owner] = Attempt(number, attempt_key(command, session), task)
        return task

    def _end(self, owner: tuple[str, str], task: asyncio.Task[None]) -> None:
        attempt = self._attempts.get(owner)
        if attempt is not None and attempt.task is task:
            del self._attempts[owner]

    def _abort(self, abort: types_pb2.Abort, session: Session) -> None:
        attempt = self._attempts.get((session.router_id, abort.key.request_id))
        if attempt is None or attempt.number != abort.key.attempt:
            return  # late
        if abort.forks:
            self._abort_forks(attempt.key, list(abort.forks))
        else:
            attempt.task.cancel()

    async def _run(self, command: Any, session: Session, previous: asyncio.Task[None] | None) -> None:
        key = submission_of(command).key
        try:
            if previous is not None:
                previous.cancel()
                await asyncio.wait({previous})
            self._check(submission_of(command))
            await self._serve(command, session)
        except KVRelayError as error:
            session.send(failed=types_pb2.Failed(key=key, error=error_to_proto(error)))
        except Exception as error:
            log_event(log, logging.ERROR, "attempt failed", exc_info=error)
            internal = KVRelayError(f"internal error: {type(error).__name__}")
            session.send(failed=types_pb2.Failed(key=key, error=error_to_proto(internal)))

    def _check(self, submission: types_pb2.Submission) -> None:
        if submission.epoch != self.epoch:
            raise EpochMismatch("the submission is meant for an earlier start of this worker")
        if submission.fingerprint != self.fingerprint:
            raise FingerprintMismatch("the router takes this worker for one of another model")


def submission_of(command: Any) -> types_pb2.Submission:
    """The submission in a prefill or decode submit."""
    return command if isinstance(command, types_pb2.Submission) else command.submission


def attempt_key(command: Any, session: Session) -> str:
    """Names an attempt's sequences in the engine."""
    key = submission_of(command).key
    return f"{session.router_id}/{key.request_id}/{key.attempt}"
