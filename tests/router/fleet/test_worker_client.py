"""Proves that a worker's client keeps order, notices every way a worker can be lost, and charges nothing forever."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from common.cluster_key import ClusterKey
from common.deadlines import Deadlines
from common.discovery.registry import WorkerRecord
from common.errors import EngineFailure, InvalidRequest, KVRelayError, Timeout, WorkerLost
from common.rpc.channel import GrpcServer, server_options
from common.rpc.pb import decode_pb2, prefill_pb2, types_pb2
from common.rpc.security import Security
from router.fleet.worker_client import AttemptStream, WorkerClient
from tests.support.fake_cluster import QUICK, Clock, cancelled_at_turn, no_task_left
from tests.support.fake_turns import Turn, Words, a_token, accepting, honest, silent
from tests.support.fake_workers import FakeWorker
from tests.support.redis_tools import a_record, eventually

PATIENCE_S = 5.0


class Pair:
    """A fake worker and a client of it."""

    def __init__(self, fake: FakeWorker, deadlines: Deadlines, record: WorkerRecord | None = None) -> None:
        self.fake = fake
        self.clock = Clock()
        self.changes = 0
        self.client = WorkerClient(record or fake.record, "router-0", deadlines, self.clock, self._note)

    def _note(self) -> None:
        self.changes += 1

    def key(self, number: int = 1, request: str = "r") -> types_pb2.AttemptKey:
        return types_pb2.AttemptKey(request_id=request, attempt=number)

    def attempt(self, number: int = 1, request: str = "r", charged: int = 4, forks: int = 1) -> Any:
        """A submission, as the pipeline makes one."""
        submission = types_pb2.Submission(
            key=self.key(number, request),
            epoch=self.fake.record.epoch,
            fingerprint=self.fake.record.fingerprint,
            prompt_ids=[1, 2, 3, 4],
            forks=[types_pb2.Fork(index=index) for index in range(forks)],
            params=types_pb2.SamplingParams(max_tokens=3),
        )
        if self.fake.role == "prefill":
            command: Any = prefill_pb2.PrefillCommand(submit=submission)
        else:
            command = decode_pb2.DecodeCommand(submit=decode_pb2.DecodeSubmission(submission=submission))
        return self.client.attempt(submission.key, command, charged, forks)


@asynccontextmanager
async def a_pair(role: str = "prefill", *, connected: bool = True, **deadlines: float) -> AsyncIterator[Pair]:
    """At the end: no attempt, no charge, no handle, no task, no exception that nobody saw."""
    async with no_task_left():
        chosen = replace(QUICK, **deadlines)
        fake = FakeWorker(role, "worker", Words([[40, 41, 42]]), chosen)
        await fake.start()
        pair = Pair(fake, chosen)
        try:
            if connected:
                await eventually(lambda: pair.client.connected)
            yield pair
            await eventually(lambda: not fake.running and not fake.words.held)
            assert (pair.client.in_flight, pair.client.charged_tokens) == (0, 0)
        finally:
            await pair.client.close()
            await fake.stop()


async def kinds(stream: AttemptStream, count: int) -> list[type]:
    """The next events; the KV that one names is taken."""
    events = [await stream.next(PATIENCE_S) for _ in range(count)]
    for event in events:
        if isinstance(event, prefill_pb2.FirstTokens):
            stream.client.release_unread(event.handle.id, event.handle.epoch)
    return [type(event) for event in events]


def told(fake: FakeWorker) -> list[str]:
    """What the worker was told, in order."""
    return [command.WhichOneof("command") for command in fake.commands]


async def test_events_come_in_order() -> None:
    async with a_pair() as pair:
        with pair.attempt() as stream:
            assert await kinds(stream, 3) == [types_pb2.Accepted, prefill_pb2.Progress, prefill_pb2.FirstTokens]
    async with a_pair("decode") as pair:
        with pair.attempt() as stream:
            assert await kinds(stream, 4) == [types_pb2.Accepted, *[decode_pb2.SequenceTokens] * 3]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_abort_comes_after_its_submit_and_only_where_needed(role: str) -> None:
    async with a_pair(role) as pair:
        pair.fake.always = silent
        for number in range(50):
            with pair.attempt(request=f"r{number}"):
                pass  # left in the same turn
        with pair.attempt(request="ended") as stream:
            stream.ended = True
        pair.fake.always = honest
        await eventually(lambda: len(pair.fake.commands) == 102)
        assert told(pair.fake) == ["hello", *["submit", "abort"] * 50, "submit"]
        assert [abort.key.request_id for abort in pair.fake.aborts] == [f"r{number}" for number in range(50)]


async def test_no_abort_follows_a_failure() -> None:
    async def fails(turn: Turn) -> None:
        raise EngineFailure("broken", field="x")

    async with a_pair() as pair:
        pair.fake.scripts = [fails]
        with pytest.raises(EngineFailure, match="broken") as caught, pair.attempt() as stream:
            await stream.next(PATIENCE_S)
        assert caught.value.field == "x"
        with pair.attempt(2) as stream:
            await kinds(stream, 3)
            stream.ended = True
        assert told(pair.fake) == ["hello", "submit", "submit"]


@pytest.mark.parametrize(
    ("role", "kind", "charged"),
    [("prefill", "accepted", 0), ("decode", "accepted", 7), ("decode", "admitted", 0), ("decode", "tokens", 0)],
)
async def test_tokens_are_charged_until_the_worker_counts_them(role: str, kind: str, charged: int) -> None:
    async def says(turn: Turn) -> None:
        turn.worker.load = types_pb2.Load(waiting_tokens=99, total_blocks=10, free_blocks=3)
        {"accepted": turn.accepted, "admitted": turn.admitted, "tokens": turn.say}[kind]()
        await silent(turn)

    async with a_pair(role) as pair:
        pair.fake.scripts = [says, accepting]
        with pair.attempt(charged=7) as stream, pair.attempt(request="other", charged=100):
            assert (pair.client.in_flight, pair.client.charged_tokens) == (2, 107)
            await stream.next(PATIENCE_S)
            assert pair.client.load.waiting_tokens == 99
            wanted = 100 if role == "decode" else 0
            await eventually(lambda: pair.client.charged_tokens == charged + wanted)
        assert (pair.client.in_flight, pair.client.charged_tokens) == (0, 0)


async def test_forks_are_counted_until_they_are_finished() -> None:
    async with a_pair("decode") as pair:
        pair.fake.scripts = [accepting, accepting]
        with pair.attempt(forks=3) as stream, pair.attempt(request="other"):
            assert (pair.client.in_flight, pair.client.num_forks) == (2, 4)
            stream.num_forks = 1
            assert pair.client.num_forks == 2
        assert pair.client.num_forks == 0


async def test_the_end_of_an_attempt_wakes_nobody_who_waits_for_a_worker() -> None:
    """Else two requests that are refused for want of room would wake each other for ever."""
    async with a_pair() as pair:
        pair.fake.scripts = [accepting]
        changes = pair.changes
        with pair.attempt():
            pass
        assert pair.changes == changes


async def test_a_broken_stream_fails_its_attempts_and_is_opened_again() -> None:
    async with a_pair() as pair:
        pair.fake.scripts = [accepting, accepting]
        with pair.attempt(request="a") as a, pair.attempt(request="b") as b:
            await kinds(a, 1)
            await kinds(b, 1)
            pair.fake.turns[0].hang_up()
            for stream in (a, b):
                with pytest.raises(WorkerLost, match="closed by the worker"):
                    await stream.next(PATIENCE_S)
            assert not pair.client.connected
            assert not pair.client.healthy
            with pytest.raises(WorkerLost, match="not connected"), pair.attempt(request="c"):
                pass
        await eventually(lambda: pair.client.healthy)
        assert pair.fake.num_streams == 2
        with pair.attempt(2, "a") as stream:
            await kinds(stream, 3)
        commands = ["hello", "submit", "submit", "hello", "submit", "abort"]
        await eventually(lambda: told(pair.fake) == commands)


async def test_a_dead_worker_is_lost_and_found_again_at_its_address() -> None:
    async with a_pair() as pair:
        pair.fake.scripts = [accepting]
        with pair.attempt() as stream:
            await kinds(stream, 1)
            changes = pair.changes
            await pair.fake.stop()
            with pytest.raises(WorkerLost):
                await stream.next(PATIENCE_S)
        assert pair.changes > changes
        await pair.fake.start(pair.fake.record.address)
        await eventually(lambda: pair.client.healthy)


async def test_nothing_of_an_old_stream_is_sent_on_the_new_one() -> None:
    """What was said after the break, before it was noticed."""
    async with a_pair() as pair:
        pair.fake.always = silent
        stopping = asyncio.create_task(pair.fake.stop())
        while pair.client.connected:
            with pair.attempt():
                await asyncio.sleep(0)
        await stopping
        pair.fake.commands.clear()
        await pair.fake.start(pair.fake.record.address)
        await eventually(lambda: pair.client.healthy)
        pair.fake.scripts = [accepting]
        with pair.attempt(9) as stream:
            await kinds(stream, 1)
        assert told(pair.fake)[:2] == ["hello", "submit"]
        assert [turn.submission.key.attempt for turn in pair.fake.turns][-1] == 9


async def test_a_frozen_worker_is_unhealthy_and_then_lost() -> None:
    async with a_pair(suspect_s=0.2, dead_s=0.4) as pair:
        pair.fake.scripts = [accepting]
        with pair.attempt() as stream:
            await kinds(stream, 1)
            pair.fake.flowing.clear()
            await eventually(lambda: not pair.client.healthy)
            with pytest.raises(WorkerLost, match="silent"):
                await stream.next(PATIENCE_S)
        assert not pair.client.connected
        pair.fake.flowing.set()
        await eventually(lambda: pair.client.healthy)


async def test_health_follows_the_heartbeats() -> None:
    async with a_pair() as pair:
        assert pair.client.healthy
        pair.fake.flowing.clear()
        pair.clock.skipped_s += QUICK.suspect_s
        await eventually(lambda: not pair.client.healthy)  # a heartbeat may be on its way
        assert pair.client.connected
        pair.fake.flowing.set()
        await eventually(lambda: pair.client.healthy)
        assert pair.fake.num_streams == 1


async def test_a_worker_that_is_stuck_gets_nothing_until_it_is_not() -> None:
    async with a_pair() as pair:
        pair.fake.load = types_pb2.Load(stuck=True)
        await eventually(lambda: not pair.client.healthy)
        assert pair.client.connected
        pair.fake.load = types_pb2.Load()
        await eventually(lambda: pair.client.healthy)


async def test_a_worker_that_drains_is_draining_from_then_on() -> None:
    async with a_pair() as pair:
        pair.fake.load = types_pb2.Load(draining=True)
        await eventually(lambda: pair.client.draining)
        pair.fake.load = types_pb2.Load()
        await asyncio.sleep(0.1)
        assert pair.client.draining


async def test_patience_ends_only_with_a_worker_that_gets_nothing_done(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_pair() as pair:
        pair.fake.scripts = [silent]
        idle_s = 0.0
        monkeypatch.setattr(pair.client, "idle_s", lambda: idle_s)
        with pair.attempt() as starved:
            waiting = asyncio.create_task(starved.next(0.01))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            idle_s = 0.02
            with pytest.raises(Timeout, match="no progress"):
                await waiting
        await eventually(lambda: len(pair.fake.aborts) == 1)  # it may still be running there


async def test_progress_is_whatever_it_does_for_anyone_and_no_heartbeat() -> None:
    async with a_pair() as pair:
        pair.fake.scripts = [accepting]
        pair.clock.skipped_s += 1000.0
        pair.fake.load = types_pb2.Load(running=5)
        await eventually(lambda: pair.client.load.running == 5)  # a heartbeat
        assert pair.client.healthy
        assert pair.client.idle_s() >= 1000.0
        pair.fake.load = types_pb2.Load(running=5, progress=1)  # a heartbeat that tells of a step
        await eventually(lambda: pair.client.idle_s() < 1000.0)
        pair.clock.skipped_s += 1000.0
        with pair.attempt() as stream:
            await kinds(stream, 1)
            assert pair.client.idle_s() < 1000.0


async def test_late_and_unknown_messages_are_no_ones() -> None:
    async with a_pair("decode") as pair:
        pair.fake.always = accepting
        with pair.attempt(1) as old:
            await kinds(old, 1)
        with pair.attempt(2) as new:
            await kinds(new, 1)
            turn = pair.fake.turns[1]
            for key in (pair.key(1), pair.key(3), pair.key(2, "other"), types_pb2.AttemptKey()):
                turn.tokens(a_token(0, 0, 99), key=key)
                failed = types_pb2.Failed(key=key, error=types_pb2.Error(code="engine_failure"))
                turn.stream.send(failed)
            turn.stream.outgoing.put_nowait(decode_pb2.DecodeEvent())
            turn.say()
            event = await new.next(PATIENCE_S)
            assert isinstance(event, decode_pb2.SequenceTokens)
            assert event.tokens[0].token_id == 40
            assert new.events.empty()


@pytest.mark.parametrize("when", ["unread", "late"])
async def test_kv_that_comes_for_nobody_is_released(when: str) -> None:
    """The prefill worker had ended the attempt before it read the abort."""
    ready = asyncio.Event()

    async def answers(turn: Turn) -> None:
        turn.accepted()
        with contextlib.suppress(asyncio.CancelledError):
            await ready.wait()
        turn.first_tokens()

    async with a_pair() as pair:
        pair.fake.scripts = [answers]
        with pair.attempt() as stream:
            await kinds(stream, 1)
            if when == "unread":
                ready.set()
                await eventually(lambda: not stream.events.empty())
        await eventually(lambda: len(pair.fake.releases) == 1)
        assert not pair.fake.words.held


async def test_closing_waits_for_releases() -> None:
    async with a_pair() as pair:
        handle = pair.fake.hold()
        pair.fake.releasing.clear()
        pair.client.release_unread(handle.id, handle.epoch)
        await asyncio.sleep(0.02)
        closing = asyncio.create_task(pair.client.close())
        await asyncio.sleep(0.02)
        assert not closing.done()
        pair.fake.releasing.set()
        await closing
        assert pair.fake.releases == [handle.id]


async def test_a_release_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async with a_pair() as pair:
        handle = pair.fake.hold()
        await pair.fake.stop()
        with caplog.at_level(logging.INFO, "kvrelay"):
            pair.client.release_unread(handle.id, handle.epoch)
            await pair.client.close()
            assert "handle not released" in [record.getMessage() for record in caplog.records]
            pair.client.release_unread(handle.id, handle.epoch)  # after the end of all
            await asyncio.sleep(0)
        pair.fake.words.held.clear()


@pytest.mark.parametrize("wrong", [{"epoch": 8}, {"fingerprint": "other"}])
async def test_a_worker_that_is_not_the_recorded_one_is_obsolete(wrong: dict[str, Any]) -> None:
    async with a_pair(connected=False) as pair:
        other = Pair(pair.fake, QUICK, replace(pair.fake.record, **wrong))
        await eventually(lambda: other.client.obsolete)
        await other.client._task  # it doesn't try again
        assert not other.client.connected
        assert not other.client.healthy
        assert other.changes > 0
        with pytest.raises(WorkerLost), other.attempt():
            pass
        await other.client.close()


async def test_a_worker_of_another_life_takes_over_the_address() -> None:
    async with a_pair() as pair:
        address = pair.fake.record.address
        await pair.fake.stop()
        successor = FakeWorker("prefill", "worker", pair.fake.words, QUICK, epoch=8)
        await successor.start(address)
        await eventually(lambda: pair.client.obsolete)
        assert not pair.client.connected
        await successor.stop()


async def test_closing_fails_what_is_in_flight() -> None:
    async with a_pair() as pair:
        pair.fake.scripts = [accepting]
        with pair.attempt() as stream:
            await kinds(stream, 1)
            await pair.client.close()
            with pytest.raises(WorkerLost):
                await stream.next(PATIENCE_S)
            assert not pair.client.connected


@contextlib.contextmanager
def a_mute_address() -> Iterator[str]:
    """Takes connections and never says a word."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13, 21, 34])
async def test_closing_while_it_connects_leaves_nothing(turns: int) -> None:
    with a_mute_address() as mute:
        async with a_pair(connected=False) as pair:
            for address in (mute, "127.0.0.1:1", pair.fake.record.address):
                other = Pair(pair.fake, QUICK, replace(pair.fake.record, address=address))
                for _ in range(turns):
                    await asyncio.sleep(0)
                await other.client.close()
                await other.client.close()
                assert not other.client.connected


async def test_closing_ends_even_if_grpc_drops_the_cancellation() -> None:
    """As it does when the connection fails in the same moment."""
    async with a_pair(connected=False) as pair:
        other = Pair(pair.fake, QUICK)
        waiting = asyncio.Event()

        async def stubborn() -> str:
            waiting.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            return "the connection failed"

        other.client._stream = stubborn  # before its task has begun
        await waiting.wait()
        async with asyncio.timeout(PATIENCE_S):
            await other.client.close()


async def test_an_address_that_never_answers_is_given_up_and_tried_again() -> None:
    deadlines = replace(QUICK, dead_s=0.1)
    with a_mute_address() as mute:
        async with a_pair(connected=False) as pair:
            other = Pair(pair.fake, deadlines, replace(pair.fake.record, address=mute))
            await eventually(lambda: other.changes >= 2)
            assert not other.client.connected
            await other.client.close()


async def test_what_cant_be_read_loses_the_stream_and_not_the_worker() -> None:
    """As from a newer version with another wire format."""

    class Babbler(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            async def relay(commands: Any, context: Any) -> AsyncIterator[bytes]:
                nonlocal calls
                calls += 1
                yield prefill_pb2.PrefillEvent(
                    welcome=types_pb2.Welcome(epoch=7, fingerprint="fingerprint")
                ).SerializeToString()
                yield b"\xff\xff\xff"
                await asyncio.Event().wait()

            return grpc.stream_stream_rpc_method_handler(relay)

    calls = 0
    server = grpc.aio.server(options=server_options(QUICK))
    server.add_generic_rpc_handlers((Babbler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with a_pair(connected=False) as pair:
        other = Pair(pair.fake, QUICK, replace(pair.fake.record, address=f"127.0.0.1:{port}"))
        await eventually(lambda: calls >= 2)
        await other.client.close()
        assert not other.client.connected
        await server.stop(0)


@pytest.mark.parametrize("error", [InvalidRequest("no", field="prompt_ids"), KVRelayError("?")])
async def test_errors_keep_their_class_and_field(error: KVRelayError) -> None:
    async def fails(turn: Turn) -> None:
        turn.failed(error)

    async with a_pair() as pair:
        pair.fake.scripts = [fails]
        with pytest.raises(type(error)) as caught, pair.attempt() as stream:
            await stream.next(PATIENCE_S)
        assert (caught.value.code, caught.value.message, caught.value.field) == (error.code, error.message, error.field)


async def test_cancelled_at_any_turn_an_attempt_is_gone() -> None:
    async def attempt(pair: Pair) -> None:
        with pair.attempt() as stream:
            await kinds(stream, 3)
            stream.ended = True

    async with a_pair() as pair:
        done = False
        turn = 0
        while not done:
            done = await cancelled_at_turn(attempt(pair), turn)
            turn += 1
            await eventually(lambda: not pair.fake.running and not pair.fake.words.held)
            assert (pair.client.in_flight, pair.client.charged_tokens) == (0, 0)
        assert turn > 3


async def test_a_worker_that_refuses_this_router_is_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    """The router has no key, and the worker wants one."""
    tries: list[None] = []
    async with no_task_left():
        server = GrpcServer("127.0.0.1", 0, QUICK, Security(ClusterKey("the key of this cluster")))
        await server.start()
        record = a_record(address=server.address)
        client = WorkerClient(record, "router-0", QUICK, Clock(), lambda: tries.append(None))
        try:
            await eventually(lambda: len(tries) >= 3)
            assert not client.connected
        finally:
            await client.close()
            await server.stop()
    lines = [record for record in caplog.records if record.getMessage() == "worker can't be used"]
    assert [record.values["reason"] for record in lines] == [  # type: ignore[attr-defined]
        "UNAUTHENTICATED: this worker asks for the cluster key"
    ]
