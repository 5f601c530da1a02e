"""A clock that stands still while its event loop is stalled.

How long a peer has been silent says something about the peer only for the time in which it could have been heard.
After a stall of our own (a long computation, a frozen process, a suspended machine) everything that was sent meanwhile
is still to be read: by this clock no time has passed that anybody could have used.
"""

import asyncio
import time
from collections.abc import Callable

TICK_S = 0.1  # a stall is what is longer


class AwakeClock:
    """Seconds in which the loop that runs `run()` has been running; before that, those of the clock beneath.

    May be read from any thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, tick_s: float = TICK_S) -> None:
        self._clock = clock
        self._tick_s = tick_s
        self._lost_s = 0.0
        self._ticked_s: float | None = None  # by the clock beneath

    def __call__(self) -> float:
        now, ticked = self._clock(), self._ticked_s
        return (now if ticked is None else min(now, ticked + self._tick_s)) - self._lost_s

    async def run(self) -> None:
        """Ticks until cancelled; belongs to the loop that hears the peers."""
        try:
            while True:
                self._tick()
                await asyncio.sleep(self._tick_s / 2)
        finally:
            self._tick()
            self._ticked_s = None

    def _tick(self) -> None:
        now = self._clock()
        if self._ticked_s is not None:
            self._lost_s += max(0.0, now - self._ticked_s - self._tick_s)
        self._ticked_s = now
