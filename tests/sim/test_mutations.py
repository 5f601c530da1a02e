"""The simulator finds old mistakes when they are put back, each within a bounded number of schedules."""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

import kvtransfer.claim
from common.engine.block_table import BlockTables
from common.rpc.pb import types_pb2
from common.worker.relay import RelayServer, Session
from decode_svc.admission import Admission
from decode_svc.service import DecodeService
from kvtransfer.lease import LeaseTable
from router.fleet.worker_client import COUNTED, WorkerClient
from router.fleet.workers import Workers
from router.pipeline.answer import Answer
from sim.world import run_seed

Patch = pytest.MonkeyPatch


def ended_leases_count_as_held(patch: Patch) -> None:
    """Free while read: the holder confirms copies of blocks that it has given to others."""
    release = LeaseTable.release

    def careless(self: LeaseTable, handle_id: bytes, epoch: int, reader_id: int) -> bool:
        self._expire_due()
        return release(self, handle_id, epoch, reader_id) if handle_id in self._held else True

    patch.setattr(LeaseTable, "release", careless)


def attempts_are_not_told_apart(patch: Patch) -> None:
    """A late event of an old attempt counts for the new one."""

    def deliver(self: WorkerClient, key: Any, event: Any) -> None:
        stream = next((s for (name, _), s in self._attempts.items() if name == key.request_id), None)
        if stream is None:
            self._drop(event)
            return
        if isinstance(event, COUNTED[self.record.role]):
            stream.charged_tokens = 0
        stream.events.put_nowait(event)

    def abort(self: RelayServer, abort: Any, session: Any) -> None:
        attempts = self._attempts.get((session.router_id, abort.key.request_id))
        if attempts and (not abort.forks or not self._abort_forks(attempts[-1].key, list(abort.forks))):
            attempts[-1].task.cancel()

    patch.setattr(WorkerClient, "_deliver", deliver)
    patch.setattr(RelayServer, "_abort", abort)


def duplicates_are_not_compared(patch: Patch) -> None:
    """A token that comes twice with different ids is dropped in silence."""
    accept = Answer.accept

    def trusting(self: Answer, token: Any) -> Any:
        return None if token.index < len(self.output_ids) else accept(self, token)

    patch.setattr(Answer, "accept", trusting)


def a_cancelled_copy_is_not_waited_for(patch: Patch) -> None:
    """A destination block is free before the copy has ended."""

    async def end(task: asyncio.Task[None]) -> None:
        task.cancel()

    patch.setattr(kvtransfer.claim, "_end", end)


def an_empty_redis_removes_workers(patch: Patch) -> None:
    see = Workers._see

    def trusting(self: Workers, records: Any) -> None:
        listed = {record.worker_id for record in records}
        for client in list(self._clients.values()):
            if client.record.worker_id not in listed:
                self._drop(client)
        see(self, records)

    patch.setattr(Workers, "_see", trusting)


def aborting_a_fork_aborts_the_others(patch: Patch) -> None:
    abort_forks = DecodeService.abort_forks

    def careless(self: DecodeService, key: str, forks: list[int]) -> bool:
        return abort_forks(self, key, [0, 1, 2])

    patch.setattr(DecodeService, "abort_forks", careless)


def cancelled_waiters_stay_in_the_queue(patch: Patch) -> None:
    class Forgetful(deque[Any]):
        def remove(self, value: Any) -> None:
            pass

    begin = Admission.__init__

    def careless(self: Admission, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        self._waiters = Forgetful()

    patch.setattr(Admission, "__init__", careless)


def forks_write_to_shared_blocks(patch: Patch) -> None:
    """No copy on write."""
    make_room = BlockTables.make_room

    def careless(self: BlockTables, sequence: Any, count: int, copies: Any) -> bool:
        references = self.pool.references
        self.pool.references = lambda block: 1  # type: ignore[method-assign]
        try:
            return make_room(self, sequence, count, copies)
        finally:
            self.pool.references = references  # type: ignore[method-assign]

    patch.setattr(BlockTables, "make_room", careless)


def a_broken_stream_leaves_its_attempts(patch: Patch) -> None:
    async def relay(self: RelayServer, commands: Any, context: Any) -> None:
        session = Session(self._event_type)
        session.send(welcome=types_pb2.Welcome(epoch=self.epoch, fingerprint=self.fingerprint))
        reader = asyncio.create_task(self._read(commands, session))
        try:
            while (event := await self._next(session)) is not None:
                event.load.CopyFrom(self._load())
                await context.write(event)
        finally:
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader

    patch.setattr(RelayServer, "Relay", relay)


def handles_are_left_to_expire(patch: Patch) -> None:
    patch.setattr(WorkerClient, "release_unread", lambda self, handle_id, epoch: None)


def a_finish_is_believed_twice(patch: Patch) -> None:
    """What comes after the end of an answer is part of it."""
    accept = Answer.accept

    def endless(self: Answer, token: Any) -> Any:
        self.finished = False
        return accept(self, token)

    patch.setattr(Answer, "accept", endless)


# Each with a schedule in which it shows today; where the simulator has changed since, it shows in another.
MISTAKES: list[tuple[Callable[[Patch], None], int]] = [
    (ended_leases_count_as_held, 9),
    (attempts_are_not_told_apart, 472),
    (duplicates_are_not_compared, 3),
    (a_cancelled_copy_is_not_waited_for, 9),
    (an_empty_redis_removes_workers, 46),
    (aborting_a_fork_aborts_the_others, 26),
    (cancelled_waiters_stay_in_the_queue, 15),
    (forks_write_to_shared_blocks, 5),
    (a_broken_stream_leaves_its_attempts, 72),
    (handles_are_left_to_expire, 102),
    (a_finish_is_believed_twice, 237),
]
SCHEDULES = 3000  # in so many a mistake has to show


@pytest.mark.parametrize(("mistake", "hint"), MISTAKES, ids=lambda value: getattr(value, "__name__", ""))
def test_an_old_mistake_is_found(mistake, hint, monkeypatch):
    mistake(monkeypatch)
    seeds = (hint, *range(SCHEDULES))
    assert any(run_seed(seed).violation for seed in seeds), f"not in {SCHEDULES} schedules"


@pytest.mark.parametrize("hint", [hint for _, hint in MISTAKES])
def test_without_a_mistake_the_same_schedule_breaks_nothing(hint):
    assert run_seed(hint).violation is None
