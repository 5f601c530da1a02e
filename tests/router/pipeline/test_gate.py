"""Requests enter in order as room comes up; who would wait too long is refused at once, and nothing stays counted."""

import asyncio
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.block_hash import BLOCK_SIZE
from common.deadlines import Deadlines
from common.errors import NoWorker, Overloaded
from common.sampling import SamplingParams
from common.tasks import end
from router.fleet.room import Room
from router.pipeline.gate import FIRST_GUESS, Gate
from router.pipeline.generation import GenerationRequest

QUICK = Deadlines(heartbeat_s=0.01, router_queue_s=60.0)


def request(name: str = "r", prompt: int = 16, tokens: int = 16, **fields: int) -> GenerationRequest:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return GenerationRequest(name, (1,) * prompt, params, **fields)


@dataclass
class Place:
    """A gate to a pool of a few seats, a clock that a test moves, and who came in."""

    capacity: Room | None = Room(4, 1000)
    max_queued: int = 100
    deadlines: Deadlines = QUICK
    now: float = 0.0
    log: list[str] = field(default_factory=list)
    inside: dict[str, asyncio.Event] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gate = Gate(lambda: self.capacity, self.deadlines, lambda: self.now, self.max_queued)

    async def come(self, name: str, **fields: int) -> asyncio.Task[None]:
        self.inside[name] = asyncio.Event()

        async def run() -> None:
            async with self.gate.entered(request(name, **fields)):
                self.log.append(name)
                await self.inside[name].wait()

        self.tasks[name] = asyncio.create_task(run())
        await turns()
        return self.tasks[name]

    async def reached(self, name: str) -> None:
        """Waits until it is inside."""
        async with asyncio.timeout(5):
            while name not in self.log:
                await asyncio.sleep(0.001)

    async def go(self, name: str) -> None:
        self.inside[name].set()
        await turns()

    async def close(self) -> None:
        await end(*self.tasks.values())
        assert (self.gate.in_use, self.gate.num_waiting) == (Room(), 0)


@pytest.fixture
async def place():
    place = Place()
    yield place
    await place.close()


async def turns(count: int = 6) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_requests_enter_until_the_pool_is_given_out(place: Place) -> None:
    for index in range(6):
        await place.come(str(index))
    assert place.log == ["0", "1", "2", "3"]
    await place.go("2")
    assert place.log[4:] == ["4"]
    assert place.gate.num_waiting == 1


async def test_the_order_is_that_of_priority_and_then_of_arrival(place: Place) -> None:
    for index in range(4):
        await place.come(str(index))
    for name, priority in (("late", 1), ("first", -1), ("a", 0), ("b", 0)):
        await place.come(name, priority=priority)
    for index in range(4):
        await place.go(str(index))
    assert place.log[4:] == ["first", "a", "b", "late"]


async def test_blocks_are_what_prompt_and_expected_answers_take(place: Place) -> None:
    gate = place.gate
    assert gate.cost(request(prompt=17, tokens=33, n=3)) == Room(3, 2 + 3 * 3)
    open_ended = GenerationRequest("r", (1,) * 16, SamplingParams(max_tokens=4096))
    assert gate.cost(open_ended) == Room(1, 1 + FIRST_GUESS / BLOCK_SIZE)
    for _ in range(200):
        gate.learn(32)
    assert gate.cost(open_ended) == Room(1, 1 + 3)  # a little over 32 still
    assert gate.cost(GenerationRequest("r", (1,), SamplingParams(max_tokens=5))) == Room(1, 2)
    assert gate.cost(GenerationRequest("r", (1,), SamplingParams(max_tokens=999, min_tokens=160))) == Room(1, 11)


async def test_memory_bounds_as_seats_do_and_one_that_is_too_large_enters_alone(place: Place) -> None:
    place.capacity = Room(100, 10)
    await place.come("large", prompt=1600)
    assert place.log == ["large"]
    await place.come("small")
    assert place.log == ["large"]
    await place.go("large")
    assert place.log == ["large", "small"]


async def test_a_large_request_is_not_passed_by_small_ones_for_ever(place: Place) -> None:
    place.capacity = Room(100, 10)
    await place.come("one", tokens=64)
    await place.come("large", prompt=160)
    await place.come("small")
    assert place.log == ["one"]
    await place.go("one")
    assert place.log == ["one", "large"]
    await place.go("large")
    assert place.log == ["one", "large", "small"]


async def test_room_that_comes_from_elsewhere_is_found(place: Place) -> None:
    place.capacity = Room(1, 1000)
    await place.come("a")
    await place.come("b")
    assert place.log == ["a"]
    place.capacity = Room(2, 1000)
    async with asyncio.timeout(5):
        while place.log != ["a", "b"]:
            await asyncio.sleep(0.005)


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_again(place: Place) -> None:
    place.capacity, place.gate._max_queued = Room(1, 1000), 2
    for name in ("in", "a", "b"):
        await place.come(name)
    with pytest.raises(Overloaded, match="2 requests are waiting") as refusal:
        await (await place.come("c"))
    assert refusal.value.retry_after_s == 1.0  # nothing has ended: nothing is known
    assert refusal.value.http_status == 429


async def test_who_would_wait_for_longer_than_the_deadline_is_refused_at_once(place: Place) -> None:
    """One ends every ten seconds; who comes as the seventh would wait for 70."""
    place.capacity = Room(1, 1000)
    await place.come("0")
    for index in range(1, 8):
        await place.come(str(index))
    for index in range(3):
        place.now += 10.0
        await place.go(str(index))
    # known now: a rate of 0.1/s; five wait
    assert place.gate.num_waiting == 4
    assert not (await place.come("8")).done()
    assert not (await place.come("9")).done()  # behind five: 60 s
    with pytest.raises(Overloaded) as refusal:
        await (await place.come("10"))
    assert refusal.value.retry_after_s == pytest.approx(10.0)


async def test_who_turns_out_to_wait_for_too_long_is_refused_while_that_is_still_a_status(place: Place) -> None:
    """Twenty come at once, when nothing is known; one ends every four seconds: the last would wait a minute."""
    place.capacity = Room(1, 1000)
    waiting = [await place.come(str(index)) for index in range(20)]
    for index in range(2):
        place.now += 4.0
        await place.go(str(index))
    async with asyncio.timeout(5):
        while place.gate.num_waiting > 13:
            await asyncio.sleep(0.005)
    await turns()
    refused = [index for index, task in enumerate(waiting) if task.done() and task.exception()]
    assert refused == list(range(16, 20))  # behind 13 and more, with 52 s left
    place.now += 4.0  # past the keep-alive: who waits now waits on, however slow it gets
    await asyncio.sleep(0.1)
    assert place.gate.num_waiting == 13


async def test_an_outage_does_not_refuse_who_comes_after_it(place: Place) -> None:
    for name in "abcde":
        await place.come(name)
    waiting = await place.come("waits")
    place.capacity = Room()
    for name in "abcde":  # failed by the outage, long after one another
        place.now += 100.0
        await place.go(name)
    with pytest.raises(NoWorker):
        await waiting
    late = await place.come("late")
    assert not late.done()
    place.capacity = Room(4, 1000)
    place.gate.poll()
    await turns()
    assert place.log[-1] == "late"
    await place.go("late")


async def test_the_wait_ends_with_the_deadline(place: Place) -> None:
    place.capacity = Room(1, 1000)
    await place.come("in")
    waiting = await place.come("a")
    place.now += 60.0
    with pytest.raises(Overloaded):
        await asyncio.wait_for(waiting, 5)


@pytest.mark.parametrize(("streamed", "patience_s"), [(False, 60.0), (True, 9.0)])
async def test_a_pool_that_is_gone_is_waited_for_until_the_queue_deadline_or_until_headers_have_to_go_out(
    place: Place, streamed: bool, patience_s: float
) -> None:
    """A refusal is a status, and comes before a keep-alive could hide it."""
    place.capacity = Room()
    await place.come("first", streamed=streamed)
    waiting = await place.come("waiting", streamed=streamed)
    place.now += patience_s - 0.1
    await asyncio.sleep(2 * QUICK.heartbeat_s)
    assert place.gate.num_waiting == 2
    place.capacity = Room(1, 1000)
    await place.reached("first")
    place.capacity = Room()
    place.now += 0.2
    with pytest.raises(NoWorker):
        await asyncio.wait_for(waiting, 5)
    assert patience_s == QUICK.router_queue_s or patience_s < QUICK.keepalive_s


async def test_a_streamed_request_whose_headers_are_out_waits_on_for_a_pool_that_goes(place: Place) -> None:
    place.capacity = Room(1, 1000)
    await place.come("in")
    waiting = await place.come("waiting", streamed=True)
    place.now += QUICK.keepalive_s
    place.capacity = Room()
    await place.go("in")
    await asyncio.sleep(2 * QUICK.heartbeat_s)
    assert not waiting.done()
    place.capacity = Room(1, 1000)
    await place.reached("waiting")


async def test_without_a_pool_to_wait_for_a_request_is_refused_at_once(place: Place) -> None:
    place.capacity = Room()
    early = await place.come("early")
    place.capacity = None
    with pytest.raises(NoWorker):
        await (await place.come("late"))
    with pytest.raises(NoWorker):  # who waits is refused with the next look
        await asyncio.wait_for(early, 5)


async def test_how_fast_requests_failed_without_a_pool_tells_nothing_of_the_wait(place: Place) -> None:
    """One a second, and eighty wait."""
    place.capacity = Room(3, 1000)
    for index in range(80):
        await place.come(str(index))
    place.capacity = Room()
    for index in range(3):
        place.now += 1.0
        await place.go(str(index))
    await asyncio.sleep(2 * QUICK.heartbeat_s)
    assert place.gate.num_waiting == 77


async def test_before_anything_has_ended_in_this_queue_the_usual_time_inside_tells_the_wait(place: Place) -> None:
    for name in "abcd":
        await place.come(name)
    place.now += 8.0
    for name in "abcd":
        await place.go(name)
    place.gate._max_queued = 3
    for name in "efghijk":
        await place.come(name)
    assert place.log[-4:] == list("efgh")
    with pytest.raises(Overloaded) as refusal:
        await (await place.come("l"))
    assert refusal.value.retry_after_s == pytest.approx(2.0)  # four end in 8 s


@pytest.mark.parametrize("when", ["queued", "inside", "in the turn it is granted"])
async def test_who_leaves_gives_back_what_it_has(place: Place, when: str) -> None:
    place.capacity = Room(1, 1000)
    await place.come("in")
    victim = await place.come("victim")
    await place.come("behind")
    if when == "inside":
        await place.go("in")
        assert place.log == ["in", "victim"]
    elif when != "queued":
        place.inside["in"].set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    victim.cancel()
    await turns()
    await place.go("in")
    assert place.log[-1] == "behind"


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), seats=st.integers(1, 6), blocks=st.integers(4, 60))
def test_any_history_keeps_the_bounds_and_ends_with_nothing_counted(seed: int, seats: int, blocks: int) -> None:
    """Comings, endings, cancellations and a pool that changes, in any order."""

    async def history() -> None:
        chance, place = random.Random(seed), Place(Room(seats, blocks), max_queued=8)
        names: list[str] = []
        for index in range(60):
            action = chance.random()
            if action < 0.5:
                names.append(str(index))
                sizes = {"prompt": chance.randint(1, 200), "tokens": chance.randint(1, 100), "n": chance.randint(1, 3)}
                await place.come(names[-1], **sizes, priority=chance.randint(-1, 1))
            elif action < 0.8 and names:
                await place.go(chance.choice(names))
            elif action < 0.9 and names:
                place.tasks[chance.choice(names)].cancel()
                await turns()
            else:
                place.capacity = Room(chance.randint(0, 6), chance.randint(4, 60))
                place.gate.poll()
                await turns()
            place.now += chance.random()
            assert place.gate.num_waiting <= 8
            if place.gate._queue and place.capacity.seats:
                assert not place.gate._fits(place.gate._queue[0].cost)  # nobody waits in vain
        for task in place.tasks.values():
            if task.done() and not task.cancelled():
                assert isinstance(task.exception(), Overloaded | NoWorker | None)
        await place.close()

    asyncio.run(history())
