"""A worker's streams: order, one attempt a request at a time, nobody sees another's, a broken stream leaves none."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from common.deadlines import Deadlines
from common.errors import EngineFailure, InvalidRequest
from common.rpc.channel import GrpcServer
from common.rpc.convert import error_from_proto
from common.rpc.pb import prefill_pb2, prefill_pb2_grpc, types_pb2
from common.tasks import end
from common.worker.health import Health
from common.worker.relay import RelayServer, Session
from tests.support.redis_tools import eventually
from tests.support.worker_stream import WorkerStream, open_stream, submission

EPOCH, FINGERPRINT = 7, "model"  # what submission() names
HEARTBEAT_S = 0.05


@dataclass
class Service:
    """Attempts last until `finish` is set or they are cancelled, and go only when `leave` is set."""

    log: list[str] = field(default_factory=list)  # "begin router/request/attempt", then "end ..."
    leaving: set[str] = field(default_factory=set)
    forks: dict[str, set[int]] = field(default_factory=dict)  # of each attempt, those left
    finish: asyncio.Event = field(default_factory=asyncio.Event)
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None
    sessions: list[Session] = field(default_factory=list)
    health: Health = field(default_factory=lambda: Health(time.monotonic, 10.0))

    async def serve(self, command: types_pb2.Submission, session: Session, key: str) -> None:
        name = f"{session.router_id}/{command.key.request_id}/{command.key.attempt}"
        self.log.append(f"begin {name}")
        self.forks[key] = {fork.index for fork in command.forks}
        self.sessions.append(session)
        try:
            session.send(types_pb2.Accepted(key=command.key))
            if self.error is not None:
                raise self.error
            await self.finish.wait()
        finally:
            self.leaving.add(name)
            while not self.leave.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await self.leave.wait()
            self.log.append(f"end {name}")

    def abort_forks(self, key: str, forks: list[int]) -> bool:
        self.forks[key].difference_update(forks)
        return bool(self.forks[key])

    def running(self) -> list[str]:
        began = [line.removeprefix("begin ") for line in self.log if line.startswith("begin")]
        return [name for name in began if f"end {name}" not in self.log]


@dataclass
class Running:
    service: Service
    relay: RelayServer
    address: str

    def stream(self, router_id: str = "A", **options: Any) -> Any:
        return open_stream(self.address, "prefill", router_id=router_id, **options)


def relay_of(service: Service) -> RelayServer:
    return RelayServer(
        epoch=EPOCH,
        fingerprint=FINGERPRINT,
        event_type=prefill_pb2.PrefillEvent,
        serve=service.serve,
        abort_forks=service.abort_forks,
        load=lambda: types_pb2.Load(running=len(service.running()), total_blocks=9),
        health=service.health,
        heartbeat_s=HEARTBEAT_S,
    )


@pytest.fixture
async def worker() -> AsyncIterator[Running]:
    """A relay behind real gRPC. It ends by proving that no attempt is left, though streams were still open."""
    service = Service()
    service.leave.set()
    relay = relay_of(service)
    server = GrpcServer("127.0.0.1", 0, Deadlines())
    prefill_pb2_grpc.add_PrefillServicer_to_server(relay, server.server)
    await server.start()
    yield Running(service, relay, server.address)
    service.leave.set()
    await server.stop()
    await eventually(lambda: (relay.num_attempts, service.running()) == (0, []))


@pytest.fixture
async def stream(worker: Running) -> AsyncIterator[WorkerStream]:
    async with worker.stream() as stream:
        yield stream


async def test_a_stream_begins_with_who_the_worker_is(stream: WorkerStream) -> None:
    kind, welcome = stream.events[0]
    assert (kind, welcome.epoch, welcome.fingerprint) == ("welcome", EPOCH, FINGERPRINT)
    assert stream.loads[0].total_blocks == 9


async def test_heartbeats_carry_the_load_when_nothing_else_is_sent(worker: Running, stream: WorkerStream) -> None:
    assert (await stream.heartbeat()).running == 0
    await stream.submit()
    await stream.event("accepted")
    await stream.until(lambda: stream.events[-1][0] == "")
    assert stream.loads[-1].running == 1
    worker.service.finish.set()
    await stream.until(lambda: stream.loads[-1].running == 0)


async def test_who_drains_says_so_goes_on_with_what_runs_and_takes_nothing_new(
    worker: Running, stream: WorkerStream
) -> None:
    await stream.submit(request="running")
    await stream.event("accepted", "running")
    worker.service.health.draining = True
    await stream.until(lambda: stream.loads[-1].draining)
    await stream.submit(request="new")
    assert (await stream.failure("new"))[0] == "draining"
    assert worker.relay.num_attempts == 1
    worker.service.finish.set()
    await eventually(lambda: worker.relay.num_attempts == 0)


async def test_idle_means_that_all_is_said(worker: Running, stream: WorkerStream) -> None:
    """An attempt that has ended may have its last event still on its way."""
    assert worker.relay.idle
    await stream.submit()
    await stream.event("accepted")
    assert not worker.relay.idle
    [session] = worker.service.sessions
    worker.service.finish.set()
    worker.service.leave.set()
    await eventually(lambda: worker.relay.idle)
    session.send(types_pb2.Accepted())
    assert not worker.relay.idle
    await eventually(lambda: worker.relay.idle)


async def test_who_is_stuck_says_so(worker: Running, stream: WorkerStream) -> None:
    assert not stream.loads[-1].stuck
    worker.service.health.stuck = True
    await stream.until(lambda: stream.loads[-1].stuck)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"epoch": EPOCH + 1}, "epoch_mismatch"),
        ({"epoch": 0}, "epoch_mismatch"),
        ({"fingerprint": "another"}, "fingerprint_mismatch"),
        ({"fingerprint": ""}, "fingerprint_mismatch"),
        ({"epoch": 1, "fingerprint": "another"}, "epoch_mismatch"),
    ],
)
async def test_a_submission_for_another_life_or_model_is_refused_before_it_runs(
    worker: Running, stream: WorkerStream, fields: dict[str, Any], code: str
) -> None:
    await stream.submit(**fields)
    assert (await stream.failure())[0] == code
    assert worker.service.log == []


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"request": ""}, "request_id"), ({"request": "x" * 513}, "request_id")],
)
async def test_a_request_without_a_usable_name_is_refused_before_it_runs(
    worker: Running, stream: WorkerStream, fields: dict[str, Any], field: str
) -> None:
    await stream.submit(**fields)
    assert await stream.failure(fields["request"]) == ("invalid_request", field)
    assert worker.service.log == []


async def test_the_longest_request_id_is_taken(worker: Running, stream: WorkerStream) -> None:
    await stream.submit(request="x" * 512)
    await stream.event("accepted", "x" * 512)


async def test_a_submission_before_hello_is_refused(worker: Running) -> None:
    async with worker.stream(hello=False) as stream:
        await stream.submit()
        assert await stream.failure() == ("invalid_request", "hello")
    assert worker.service.log == []


async def test_a_second_hello_changes_nothing(worker: Running, stream: WorkerStream) -> None:
    await stream.submit()
    await stream.event("accepted")
    await stream.send(hello=types_pb2.Hello(router_id="B"))
    await stream.abort()
    await eventually(lambda: worker.relay.num_attempts == 0)
    assert worker.service.log == ["begin A/r/1", "end A/r/1"]


async def test_a_command_of_a_newer_router_is_passed_over(worker: Running, stream: WorkerStream) -> None:
    await stream.send()
    await stream.submit()
    await stream.event("accepted")


async def test_an_older_attempt_after_a_newer_one_is_stale(worker: Running, stream: WorkerStream) -> None:
    await stream.submit(attempt=2)
    await stream.event("accepted", attempt=2)
    await stream.submit(attempt=1)
    assert (await stream.failure(attempt=1))[0] == "stale_attempt"
    assert worker.service.log == ["begin A/r/2"]


async def test_the_same_attempt_twice_is_a_no_op(worker: Running, stream: WorkerStream) -> None:
    await stream.submit()
    await stream.submit()
    await stream.submit(request="other")
    await stream.event("accepted", "other")  # order: what came before it has been read
    assert worker.service.log == ["begin A/r/1", "begin A/other/1"]
    assert [kind for kind, _ in stream.of()] == ["accepted"]


async def test_a_late_abort_of_an_old_attempt_is_a_no_op(worker: Running, stream: WorkerStream) -> None:
    await stream.submit(attempt=2)
    await stream.abort(attempt=1)
    await stream.abort(attempt=1, forks=[0])
    await stream.abort(request="never")
    await stream.submit(request="other")
    await stream.event("accepted", "other")
    assert worker.service.running() == ["A/r/2", "A/other/1"]
    assert list(worker.service.forks.values()) == [{0}, {0}]


async def test_a_newer_attempt_starts_when_the_older_one_is_gone(worker: Running, stream: WorkerStream) -> None:
    worker.service.leave.clear()
    await stream.submit(attempt=1)
    await stream.event("accepted")
    await stream.submit(attempt=2)
    await stream.submit(request="other")
    await stream.event("accepted", "other")
    assert worker.service.running() == ["A/r/1", "A/other/1"]  # the second still waits for the first
    worker.service.leave.set()
    await stream.event("accepted", attempt=2)
    assert worker.service.log == ["begin A/r/1", "begin A/other/1", "end A/r/1", "begin A/r/2"]
    assert [kind for kind, _ in stream.of()] == ["accepted"]  # nothing more of what was cancelled


async def test_an_attempt_aborted_before_its_turn_does_not_let_the_next_one_start_early(
    worker: Running, stream: WorkerStream
) -> None:
    worker.service.leave.clear()
    await stream.submit(attempt=1)
    await stream.event("accepted")
    await stream.submit(attempt=2)
    await stream.abort(attempt=2)
    await stream.submit(attempt=3)
    await stream.submit(request="other")
    await stream.event("accepted", "other")
    assert worker.service.running() == ["A/r/1", "A/other/1"]
    worker.service.leave.set()
    await stream.event("accepted", attempt=3)
    assert worker.service.log[-2:] == ["end A/r/1", "begin A/r/3"]
    assert "begin A/r/2" not in worker.service.log


async def test_an_abort_ends_its_attempt_without_another_word(worker: Running, stream: WorkerStream) -> None:
    await stream.submit()
    await stream.event("accepted")
    await stream.abort()
    await eventually(lambda: worker.service.log == ["begin A/r/1", "end A/r/1"])
    await stream.submit(request="other")
    await stream.event("accepted", "other")
    assert [kind for kind, _ in stream.of()] == ["accepted"]


async def test_an_attempt_is_over_when_its_last_fork_is_aborted(worker: Running, stream: WorkerStream) -> None:
    await stream.submit(forks=[(index, ()) for index in range(3)])
    await stream.abort(forks=[1, 7])
    await eventually(lambda: list(worker.service.forks.values()) == [{0, 2}])
    assert worker.service.running() == ["A/r/1"]
    await stream.abort(forks=[0, 2])
    await eventually(lambda: worker.relay.num_attempts == 0)


@pytest.mark.parametrize(
    "error", [InvalidRequest("no", field="prompt_ids"), EngineFailure("the kernel broke"), InvalidRequest("odd")]
)
async def test_an_error_reaches_the_router_as_what_it_is(
    worker: Running, stream: WorkerStream, error: InvalidRequest | EngineFailure
) -> None:
    worker.service.error = error
    await stream.submit()
    received = error_from_proto((await stream.event("failed")).error)
    assert (type(received), received.message, received.field) == (type(error), error.message, error.field)


async def test_a_defect_fails_its_attempt_only_and_tells_no_secret(
    worker: Running, stream: WorkerStream, caplog: pytest.LogCaptureFixture
) -> None:
    await stream.submit(request="good")
    await stream.event("accepted", "good")
    worker.service.error = ValueError("tokens 17 18 19")
    await stream.submit(request="bad")
    failed = await stream.event("failed", "bad")
    assert (failed.error.code, "17" in failed.error.message) == ("internal", False)
    assert worker.service.running() == ["A/good/1"]
    assert "attempt failed" in caplog.text


async def test_two_routers_with_equal_request_ids_do_not_see_each_other(worker: Running) -> None:
    async with worker.stream("A") as one, worker.stream("B") as two:
        await one.submit(attempt=1)
        await two.submit(attempt=2)
        await one.event("accepted")
        await two.event("accepted", attempt=2)
        await two.abort(attempt=1)
        await one.abort(attempt=2)
        await one.heartbeat()
        assert sorted(worker.service.running()) == ["A/r/1", "B/r/2"]
        two.call.cancel()
        await eventually(lambda: worker.service.running() == ["A/r/1"])
        worker.service.finish.set()
        await eventually(lambda: not worker.service.running())
        assert (one.of("r", 2), two.of("r", 1)) == ([], [])


async def test_a_router_that_connects_again_ends_what_its_lost_stream_left(worker: Running) -> None:
    async with worker.stream("A") as lost, worker.stream("A") as stream:
        await lost.submit(attempt=1)
        await lost.event("accepted")
        await stream.submit(attempt=2)
        await stream.event("accepted", attempt=2)
        assert worker.service.log == ["begin A/r/1", "end A/r/1", "begin A/r/2"]


@pytest.mark.parametrize("how", ["cancel", "close the channel", "half-close"])
async def test_a_broken_stream_ends_all_its_attempts(
    worker: Running, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with worker.stream() as stream:
        for request in ("a", "b", "c"):
            await stream.submit(request=request)
        await stream.event("accepted", "c")
        if how == "cancel":
            stream.call.cancel()
        elif how == "half-close":
            await stream.call.done_writing()
        else:
            await stream.channel.close()
        await eventually(lambda: (worker.relay.num_attempts, worker.service.running()) == (0, []))
    assert caplog.text == ""  # it is nothing unusual


async def test_a_stream_that_breaks_ends_attempts_that_still_wait_for_their_turn(worker: Running) -> None:
    worker.service.leave.clear()
    async with worker.stream() as stream:
        await stream.submit(attempt=1)
        await stream.event("accepted")
        await stream.submit(attempt=2)
        await stream.submit(request="other")
        await stream.event("accepted", "other")
        stream.call.cancel()
        await eventually(lambda: "A/other/1" in worker.service.leaving)
        worker.service.leave.set()
        await eventually(lambda: worker.relay.num_attempts == 0)
    assert "begin A/r/2" not in worker.service.log


@pytest.mark.parametrize("how", ["cancel", "close the channel"])
async def test_a_stream_that_breaks_in_the_middle_of_a_write_leaves_nothing(worker: Running, how: str) -> None:
    """The router has stopped reading, and the connection has no room for more."""
    async with worker.stream() as stream:
        await stream.submit()
        await stream.event("accepted")
        stream.reading.cancel()
        [session] = worker.service.sessions
        big = types_pb2.Failed(error=types_pb2.Error(message="x" * 2**20))
        for _ in range(64):
            session.send(big)
        left = -1
        while left != session.outgoing.qsize():
            left = session.outgoing.qsize()
            await asyncio.sleep(4 * HEARTBEAT_S)
        assert left > 0
        if how == "cancel":
            stream.call.cancel()
        else:
            await stream.channel.close()
        await eventually(lambda: worker.relay.num_attempts == 0)


class Written:
    """What a relay needs of a gRPC context."""

    def __init__(self) -> None:
        self.events: list[prefill_pb2.PrefillEvent] = []

    async def write(self, event: prefill_pb2.PrefillEvent) -> None:
        self.events.append(event)


def submit(attempt: int) -> dict[str, Any]:
    return {"submit": submission(attempt=attempt)}


def abort(attempt: int) -> dict[str, Any]:
    return {"abort": types_pb2.Abort(key=types_pb2.AttemptKey(request_id="r", attempt=attempt))}


@pytest.mark.parametrize("first_runs", [False, True])
@pytest.mark.parametrize(
    ("commands", "running"),
    [
        ([submit(1)], ["A/r/1"]),
        ([submit(1), abort(1)], []),
        ([submit(1), submit(2)], ["A/r/2"]),
        ([submit(1), submit(2), abort(1)], ["A/r/2"]),
        ([submit(1), submit(2), abort(2)], []),
        ([submit(1), abort(1), submit(2)], ["A/r/2"]),
        ([submit(2), submit(1), abort(1)], ["A/r/2"]),
        ([submit(1), submit(2), abort(2), submit(3)], ["A/r/3"]),
        ([submit(1), submit(2), submit(3), abort(3)], []),
    ],
)
async def test_commands_of_one_turn_of_the_loop_count_in_their_order(
    commands: list[dict[str, Any]], running: list[str], first_runs: bool
) -> None:
    """After a stall many commands are there at once: an attempt is aborted before its task has begun."""
    service, read = Service(), asyncio.Event()
    service.leave.set()
    relay = relay_of(service)

    async def at_once() -> AsyncIterator[prefill_pb2.PrefillCommand]:
        yield prefill_pb2.PrefillCommand(hello=types_pb2.Hello(router_id="A"))
        for index, command in enumerate(commands):
            yield prefill_pb2.PrefillCommand(**command)
            if index == 0 and first_runs:
                await eventually(service.running)
        read.set()
        await asyncio.Event().wait()

    serving = asyncio.create_task(relay.Relay(at_once(), Written()))
    await read.wait()
    await eventually(lambda: service.running() == running and relay.num_attempts == len(running))
    await end(serving)
    assert (service.running(), relay.num_attempts) == ([], 0)


async def test_a_stream_whose_commands_can_not_be_read_ends_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    async def broken() -> AsyncIterator[prefill_pb2.PrefillCommand]:
        yield prefill_pb2.PrefillCommand(hello=types_pb2.Hello(router_id="A"))
        raise ValueError("odd")

    await asyncio.wait_for(relay_of(Service()).Relay(broken(), Written()), 5)
    assert "ValueError" in caplog.text


@pytest.mark.parametrize("error", [EngineFailure("torch said no"), RuntimeError("a defect")])
async def test_a_failed_attempt_is_logged_with_the_request_it_belongs_to(
    worker: Running, stream: WorkerStream, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvrelay")
    worker.service.error = error
    await stream.submit(request="client-7:abc")
    await stream.event("failed", "client-7:abc")
    [line] = [record for record in caplog.records if record.getMessage() == "attempt failed"]
    assert line.values["request_id"] == "client-7:abc"
