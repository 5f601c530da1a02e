"""Admission is first come, first served, and whoever fails, leaves or is cancelled gives back what was reserved."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

import tests.support.builders as builders
from common.engine.engine import Engine
from common.engine.scheduler import Scheduler
from common.errors import KVExpired
from common.tasks import end
from decode_svc.admission import Admission

BLOCK = 4  # tokens
BLOCKS = 16
ALL = BLOCKS - 1  # one is left to grow into: two more blocks are not to be had
PLACES = 4


@dataclass
class Room:
    """An engine that is stepped by hand, and what its admission did."""

    scheduler: Scheduler
    engine: Engine
    admission: Admission
    log: list[str] = field(default_factory=list)

    def ask(
        self,
        key: str,
        blocks: int = 2,
        forks: int = 1,
        fill: asyncio.Event | None = None,
        voided: asyncio.Future[None] | None = None,
    ) -> asyncio.Task[None]:
        """Wants room for KV of that many blocks, and fills it until `fill` is set (None: at once)."""
        sequences = [
            builders.sequence(blocks * BLOCK + 1, key=key, forks=(fork,), root=key.encode(), max_tokens=2)
            for fork in range(forks)
        ]

        async def run() -> None:
            async with self.admission.reserved(sequences, voided) as reservation:
                self.log.append(key)
                assert len(reservation.block_ids) == blocks
                if fill is not None:
                    await fill.wait()

        return asyncio.create_task(run())

    def finish(self) -> None:
        """Steps until all that runs has ended; who waits is looked at after each step, as in the service."""
        while self.engine.load().running:
            self.engine.step()
            self.admission.poll()


@pytest.fixture
def room() -> Iterator[Room]:
    scheduler = builders.scheduler(BLOCKS, block_size=BLOCK, max_num_seqs=PLACES, max_model_len=BLOCKS * BLOCK)
    engine = builders.engine(scheduler)
    room = Room(scheduler, engine, Admission(engine))
    yield room
    room.finish()
    assert room.admission.num_waiting == 0
    builders.assert_all_free(scheduler)


async def test_a_claim_that_is_voided_in_the_queue_leaves_it_at_once(room: Room) -> None:
    """The holder is gone: nobody behind it has to wait for a turn that would be in vain."""
    fill, voided = asyncio.Event(), asyncio.get_running_loop().create_future()
    first = room.ask("a", blocks=ALL, fill=fill)
    lost = room.ask("b", blocks=ALL, voided=voided)
    await turns()
    behind = room.ask("c", blocks=0)
    await turns()
    assert room.admission.num_waiting == 2
    voided.set_result(None)
    with pytest.raises(KVExpired, match="waited for blocks"):
        await lost
    fill.set()
    await asyncio.gather(first, behind)
    assert room.log == ["a", "c"]


@pytest.mark.parametrize("order", ["granted, voided", "voided, granted"])
async def test_a_claim_voided_in_the_turn_it_is_granted_keeps_nothing_or_all(room: Room, order: str) -> None:
    voided = asyncio.get_running_loop().create_future()
    if order == "voided, granted":
        voided.set_result(None)
    await room.ask("a", blocks=2, voided=voided)  # granted already when it looks: the claim itself says the rest
    assert room.log == ["a"]


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_with_room_nobody_waits_and_the_forks_run_afterwards(room: Room) -> None:
    fill = asyncio.Event()
    task = room.ask("a", blocks=3, forks=2, fill=fill)
    await turns()
    load = room.engine.load()
    assert (room.log, load.reserved_blocks, load.running, room.admission.num_waiting) == (["a"], 3, 0, 0)
    fill.set()
    await task
    load = room.engine.load()
    assert (load.reserved_blocks, load.running) == (0, 2)


@pytest.mark.parametrize(
    ("first", "second"),
    [({"blocks": ALL}, {"blocks": 2}), ({"forks": PLACES}, {"forks": 1}), ({"forks": 2}, {"forks": PLACES - 1})],
    ids=["blocks", "places", "one place too few"],
)
async def test_without_room_the_next_one_waits_until_the_first_has_ended(
    room: Room, first: dict[str, int], second: dict[str, int]
) -> None:
    fill = asyncio.Event()
    one, two = room.ask("a", fill=fill, **first), room.ask("b", **second)
    await turns()
    assert (room.log, room.admission.num_waiting) == (["a"], 1)
    fill.set()
    await one
    assert room.log == ["a"]
    room.finish()
    await two
    assert room.log == ["a", "b"]


async def test_a_small_one_does_not_pass_a_large_one_that_came_first(room: Room) -> None:
    fill = asyncio.Event()
    tasks = [room.ask("a", ALL - 2, fill=fill), room.ask("large", 4), room.ask("small"), room.ask("tiny", 1)]
    await turns()
    assert (room.log, room.admission.num_waiting) == (["a"], 3)
    fill.set()
    await tasks[0]
    room.finish()
    await asyncio.gather(*tasks)
    assert room.log == ["a", "large", "small", "tiny"]


async def test_who_fails_while_filling_makes_room_for_the_next(room: Room) -> None:
    async def fail() -> None:
        async with room.admission.reserved([builders.sequence(ALL * BLOCK)]):
            await turns()
            raise ValueError("the copy broke")

    failing, next_one = asyncio.create_task(fail()), room.ask("next")
    with pytest.raises(ValueError, match="the copy broke"):
        await failing
    await next_one
    assert room.log == ["next"]


async def test_who_is_cancelled_while_filling_makes_room_for_the_next(room: Room) -> None:
    one, two = room.ask("a", ALL, fill=asyncio.Event()), room.ask("b")
    await turns()
    await end(one)
    await two
    assert room.log == ["a", "b"]


@pytest.mark.parametrize("cancelled", [0, 1, 2])
async def test_who_is_cancelled_while_waiting_leaves_the_order_of_the_others(room: Room, cancelled: int) -> None:
    fill = asyncio.Event()
    one = room.ask("all", ALL, fill=fill)
    waiting = [room.ask(str(number)) for number in range(3)]
    await turns()
    await end(waiting[cancelled])
    assert room.admission.num_waiting == 2
    fill.set()
    await one
    room.finish()
    await asyncio.gather(*(task for number, task in enumerate(waiting) if number != cancelled))
    assert room.log == ["all", *(str(number) for number in range(3) if number != cancelled)]


async def test_a_large_one_that_is_cancelled_lets_those_behind_it_in_at_once(room: Room) -> None:
    fill = asyncio.Event()
    one = room.ask("a", ALL - 2, fill=fill)
    large, small = room.ask("large", 4), room.ask("small")
    await turns()
    assert room.admission.num_waiting == 2
    await end(large)
    await small
    assert room.log == ["a", "small"]
    fill.set()
    await one


@pytest.mark.parametrize("both", [False, True])
async def test_who_is_cancelled_in_the_turn_of_its_grant_gives_it_back(room: Room, both: bool) -> None:
    reservation = room.engine.reserve([builders.sequence(ALL * BLOCK)])
    assert reservation is not None
    one, two = room.ask("a", ALL), room.ask("b", ALL)
    await turns()
    room.engine.cancel(reservation)
    room.admission.poll()
    assert room.admission.num_waiting == 1  # the first has its room, and its task does not know yet
    one.cancel()
    if both:
        two.cancel()
    await asyncio.wait({one, two}, timeout=5)
    assert (one.cancelled(), two.cancelled()) == (True, both)
    assert room.log == ([] if both else ["b"])


async def test_an_end_of_a_step_lets_in_as_many_as_fit(room: Room) -> None:
    fill = asyncio.Event()
    one = room.ask("all", forks=PLACES, fill=fill)
    waiting = [room.ask(str(number)) for number in range(PLACES + 1)]
    await turns()
    fill.set()
    await one
    while room.admission.num_waiting > PLACES:
        room.engine.step()
        room.admission.poll()
    assert room.admission.num_waiting == 1
    await asyncio.gather(*waiting[:PLACES])
    room.finish()
    await asyncio.gather(*waiting)
    assert room.log == ["all", *(str(number) for number in range(PLACES + 1))]
