"""Who may begin: a request enters when the decode pool will have room for it.

Until then it waits here, where nothing has been spent on it yet, in order of priority and arrival. What would wait for
longer than a client should is refused at once, with the time after which asking again makes sense. Costs are
estimates: a prompt's blocks, and those of an answer as long as answers have been.
"""

import asyncio
from bisect import insort
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import ceil

from common.block_hash import BLOCK_SIZE
from common.deadlines import Deadlines
from common.errors import NoWorker, Overloaded
from router.config import MAX_QUEUED
from router.fleet.room import Room
from router.pipeline.generation import GenerationRequest

AHEAD = 1.0  # times the decode pool's room is given out; more would wait for a place after its first token
FIRST_GUESS = 128.0  # tokens of an answer, before any has ended
LEARNING = 0.05  # weight of the newest answer's length, and of its time
WINDOW = 32  # ends that the rate is taken from
STATUS = 0.9  # of keepalive_s: by then a streamed request is refused if its refusal is to be a status


@dataclass(eq=False, slots=True)
class QueuedRequest:
    place: tuple[int, int]  # priority and arrival: the lowest goes first
    cost: Room
    granted: asyncio.Future[None]


class Gate:
    """Lives on one event loop.

    `capacity` says what the decode pool has for this router now. No seats: it is gone and may come back, which is
    waited for as for room. None: it is not to be waited for.
    """

    def __init__(
        self,
        capacity: Callable[[], Room | None],
        deadlines: Deadlines,
        clock: Callable[[], float],
        max_queued: int = MAX_QUEUED,
    ) -> None:
        self.in_use = Room()
        self._capacity = capacity
        self._deadlines = deadlines
        self._clock = clock
        self._max_queued = max_queued
        self._queue: list[QueuedRequest] = []  # in order
        self._arrivals = 0
        self._ends: deque[float] = deque(maxlen=WINDOW)  # of requests, while others waited
        self._answer_tokens = FIRST_GUESS
        self._inside = 0  # requests
        self._service_s = 0.0  # that one is inside, on average

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def learn(self, tokens: int) -> None:
        """An answer came to its end with so many tokens."""
        self._answer_tokens += LEARNING * (tokens - self._answer_tokens)

    def cost(self, request: GenerationRequest) -> Room:
        """What this request is expected to take."""
        params = request.params
        tokens = params.max_tokens if params.ignore_eos else min(params.max_tokens, ceil(self._answer_tokens))
        answer = max(tokens, params.min_tokens)
        blocks = ceil(len(request.prompt_ids) / BLOCK_SIZE) + request.n * ceil(answer / BLOCK_SIZE)
        return Room(request.n, blocks)

    @asynccontextmanager
    async def entered(self, request: GenerationRequest) -> AsyncIterator[None]:
        """Waits for room and has it until the block ends.

        Raises Overloaded, at once or when router_queue_s have passed; NoWorker at once where there is no pool to wait
        for, else when it has not come back in that time, or before a streamed request's headers have to go out.
        """
        cost = self.cost(request)
        if self._queue or not self._fits(cost):
            await self._wait(cost, request)  # whoever grants it counts the cost
        else:
            self.in_use += cost
        began = self._clock()
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            service_s = self._clock() - began
            self._service_s += LEARNING * (service_s - self._service_s) if self._service_s else service_s
            self._leave(cost)

    def poll(self) -> None:
        """Grants what there is room for; to be called whenever there may be more."""
        while self._queue and self._fits(self._queue[0].cost):
            waiter = self._queue.pop(0)
            self.in_use += waiter.cost
            waiter.granted.set_result(None)

    def _fits(self, cost: Room) -> bool:
        capacity = self._capacity() or Room()
        if not self.in_use.seats:  # alone, even what is larger than its estimate allows
            return capacity.seats > 0
        return (self.in_use + cost).within(capacity, AHEAD)

    def _leave(self, cost: Room) -> None:
        self.in_use -= cost
        if self._queue:
            self._ends.append(self._clock())
        else:
            self._ends.clear()
        self.poll()

    async def _wait(self, cost: Room, request: GenerationRequest) -> None:
        waiter = QueuedRequest((request.priority, self._arrivals), cost, asyncio.get_running_loop().create_future())
        self._arrivals += 1
        if not self._queue:  # what ended before anybody waited says nothing of how fast this queue moves
            self._ends.clear()
        self._check_queue(sum(other.place < waiter.place for other in self._queue))
        insort(self._queue, waiter, key=lambda one: one.place)
        self.poll()  # it may go before those who have to wait
        began = self._clock()
        try:
            while not waiter.granted.done():
                waited = self._clock() - began
                left = self._patience_s(request.streamed, waited) - waited
                ahead = self._queue.index(waiter)
                if left <= 0 or self._is_hopeless(ahead, waited):
                    raise self._refusal(ahead)
                # room comes from elsewhere, too: workers join, other routers' requests end
                await asyncio.wait({waiter.granted}, timeout=min(left, self._deadlines.heartbeat_s))
                self.poll()
        except BaseException:
            if waiter.granted.done():
                self._leave(cost)
            else:
                self._queue.remove(waiter)
                self.poll()  # those behind it may take less
            raise

    def _patience_s(self, streamed: bool, waited_s: float) -> float:
        """How long a request waits in all, by what the pool is now."""
        capacity, queue_s = self._capacity(), self._deadlines.router_queue_s
        if capacity is None:
            return 0.0
        if streamed and not capacity.seats and waited_s < self._deadlines.keepalive_s:
            return min(queue_s, STATUS * self._deadlines.keepalive_s)
        return queue_s

    def _is_hopeless(self, ahead: int, waited_s: float) -> bool:
        """Whether it would wait for too long at a rate that shows only now, while a refusal still is a status."""
        seats = (self._capacity() or Room()).seats
        left = self._deadlines.router_queue_s - waited_s
        return seats > 0 and waited_s < self._deadlines.keepalive_s and self._wait_s(ahead) > left

    def _check_queue(self, ahead: int) -> None:
        """Raises Overloaded for whom there are too many ahead, or too many at all."""
        if len(self._queue) >= self._max_queued or self._wait_s(ahead) > self._deadlines.router_queue_s:
            raise self._refusal(ahead)

    def _wait_s(self, ahead: int) -> float:
        """How long a request waits behind so many, as far as is known: 0 where nothing has ended yet."""
        if len(self._ends) < 2:
            return 0.0
        return (ahead + 1) * max(self._clock() - self._ends[0], 1e-3) / (len(self._ends) - 1)

    def _refusal(self, ahead: int) -> Overloaded | NoWorker:
        if not (self._capacity() or Room()).seats:
            return NoWorker("no decode worker can take the request")
        one_s = self._wait_s(0) or self._service_s / max(1, self._inside)  # until one ends, else as it usually does
        retry_after_s = max(1.0, self._wait_s(ahead) - self._deadlines.router_queue_s, one_s)
        return Overloaded(f"{len(self._queue)} requests are waiting for room", retry_after_s=retry_after_s)
