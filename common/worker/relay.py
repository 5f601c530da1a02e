"""Worker's half of a relay: one ordered stream per router, and in it an attempt per submission.

Submits and aborts arrive in the order they were sent. When the stream breaks, all its attempts end.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf.message import Message

from common.errors import Draining, EpochMismatch, FingerprintMismatch, InvalidRequest, KVRelayError, StaleAttempt
from common.log import get_logger, log_event, request_id
from common.rpc.convert import content_of, envelopes, error_to_proto
from common.rpc.pb import decode_pb2, types_pb2
from common.tasks import end
from common.worker.health import Health

log = get_logger("relay")
MAX_REQUEST_ID = 512  # characters; a KV handle takes no more
Submit = types_pb2.Submission | decode_pb2.DecodeSubmission


class RelayContext(Protocol):
    """What a relay needs of its RPC."""

    async def write(self, event: Any) -> None: ...


class Session:
    """One router's stream, as an attempt sees it."""

    def __init__(self, as_event: Callable[[Message], Any]) -> None:
        self.router_id = ""
        self._as_event = as_event
        self.outgoing: asyncio.Queue[Any] = asyncio.Queue()  # None: no more commands come
        self.writing = False  # an event is on its way out
        self.tasks: set[asyncio.Task[None]] = set()  # of its attempts

    def send(self, message: Message) -> None:
        """Queues one event. Never blocks."""
        self.outgoing.put_nowait(self._as_event(message))


@dataclass(frozen=True, slots=True)
class Attempt:
    number: int
    key: str  # names its sequences in the engine
    task: asyncio.Task[None]


class RelayServer:
    """Runs `serve(submit, session, key)` for each submission; it ends when the attempt has.

    `serve` leaves nothing behind, however it ends: the server cancels it on an abort, on a newer
    attempt (which begins only after that), and when the stream breaks. `abort_forks(key, forks)`
    tells whether any fork of the attempt is left; without any it is over.
    """

    def __init__(
        self,
        *,
        epoch: int,
        fingerprint: str,
        event_type: type[Message],
        serve: Callable[[Any, Session, str], Awaitable[None]],
        abort_forks: Callable[[str, list[int]], bool],
        load: Callable[[], types_pb2.Load],
        health: Health,
        heartbeat_s: float,
    ) -> None:
        self.epoch = epoch
        self.fingerprint = fingerprint
        self._event_type = event_type
        self._as_event = envelopes(event_type)
        self._serve = serve
        self._abort_forks = abort_forks
        self._load = load
        self._health = health
        self._heartbeat_s = heartbeat_s
        # Attempts of a router's request, the newest last; all before it are on their way out.
        self._attempts: dict[tuple[str, str], list[Attempt]] = {}
        self._sessions: set[Session] = set()

    @property
    def num_attempts(self) -> int:
        """Attempts that have not ended yet."""
        return sum(map(len, self._attempts.values()))

    @property
    def idle(self) -> bool:
        """No attempt is left, and all that was said of them is out."""
        silent = all(session.outgoing.empty() and not session.writing for session in self._sessions)
        return silent and not self._attempts

    async def Relay(self, commands: AsyncIterator[Any], context: RelayContext) -> None:
        """The RPC: commands in, events out, each with the load; a heartbeat when there is nothing else."""
        session = Session(self._as_event)
        session.send(types_pb2.Welcome(epoch=self.epoch, fingerprint=self.fingerprint))
        reader = asyncio.create_task(self._read(commands, session))
        self._sessions.add(session)
        try:
            while (event := await self._next(session)) is not None:
                session.writing = True
                event.load.CopyFrom(self._load())
                self._health.tell(event.load)
                await context.write(event)
                session.writing = False
        finally:
            self._sessions.discard(session)
            await end(reader, *session.tasks)

    async def _next(self, session: Session) -> Any:
        try:
            async with asyncio.timeout(self._heartbeat_s):
                return await session.outgoing.get()
        except TimeoutError:
            return self._event_type()

    async def _read(self, commands: AsyncIterator[Any], session: Session) -> None:
        try:
            async for command in commands:
                match content_of(command):
                    case types_pb2.Hello() as hello:
                        session.router_id = session.router_id or hello.router_id
                    case types_pb2.Abort() as abort:
                        self._abort(abort, session)
                    case types_pb2.Submission() | decode_pb2.DecodeSubmission() as submit:
                        self._submit(submit, session)
        except Exception as error:
            log_event(log, logging.ERROR, "stream can't be read", exc_info=error)
        finally:
            session.outgoing.put_nowait(None)

    def _submit(self, submit: Submit, session: Session) -> None:
        key = submission_of(submit).key
        owner = (session.router_id, key.request_id)
        older = self._attempts.get(owner, [])
        if older and key.attempt <= older[-1].number:
            if key.attempt < older[-1].number:
                self._fail(key, session, StaleAttempt(f"attempt {key.attempt} came after attempt {older[-1].number}"))
            return
        leaving = [attempt.task for attempt in older]
        for task in leaving:
            task.cancel()
        name = f"{session.router_id}/{key.request_id}/{key.attempt}"
        task = asyncio.create_task(self._run(submit, session, name, leaving))
        self._attempts[owner] = [*older, Attempt(key.attempt, name, task)]
        session.tasks.add(task)
        task.add_done_callback(session.tasks.discard)
        task.add_done_callback(lambda task: self._end(owner, task))

    def _end(self, owner: tuple[str, str], task: asyncio.Task[None]) -> None:
        left = [attempt for attempt in self._attempts.pop(owner) if attempt.task is not task]
        if left:
            self._attempts[owner] = left

    def _abort(self, abort: types_pb2.Abort, session: Session) -> None:
        attempts = self._attempts.get((session.router_id, abort.key.request_id))
        if not attempts or attempts[-1].number != abort.key.attempt:
            return  # late
        newest = attempts[-1]
        if not abort.forks or not self._abort_forks(newest.key, list(abort.forks)):
            newest.task.cancel()

    async def _run(self, submit: Submit, session: Session, name: str, leaving: Sequence[asyncio.Task[None]]) -> None:
        submission = submission_of(submit)
        request_id.set(submission.key.request_id[:MAX_REQUEST_ID])
        try:
            if leaving:
                await asyncio.wait(leaving)
            self._check(submission, session)
            await self._serve(submit, session, name)
        except KVRelayError as error:
            log_event(log, logging.INFO, "attempt failed", number=submission.key.attempt, code=error.code, reason=error)
            self._fail(submission.key, session, error)
        except Exception as error:
            log_event(log, logging.ERROR, "attempt failed", exc_info=error)
            self._fail(submission.key, session, KVRelayError(f"internal error: {type(error).__name__}"))

    def _fail(self, key: types_pb2.AttemptKey, session: Session, error: KVRelayError) -> None:
        session.send(types_pb2.Failed(key=key, error=error_to_proto(error)))

    def _check(self, submission: types_pb2.Submission, session: Session) -> None:
        if self._health.draining:
            raise Draining("this worker is stopping and takes no new work")
        if not session.router_id:
            raise InvalidRequest("a stream begins with hello and the router's id", field="hello")
        if submission.epoch != self.epoch:
            raise EpochMismatch("the submission is meant for an earlier start of this worker", field="epoch")
        if submission.fingerprint != self.fingerprint:
            raise FingerprintMismatch("the router takes this worker for one of another model", field="fingerprint")
        if not 0 < len(submission.key.request_id) <= MAX_REQUEST_ID:
            raise InvalidRequest(f"request_id must have 1 to {MAX_REQUEST_ID} characters", field="request_id")


def submission_of(submit: Submit) -> types_pb2.Submission:
    """What both pools' submits have."""
    return submit if isinstance(submit, types_pb2.Submission) else submit.submission
