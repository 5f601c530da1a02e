"""Whether a worker gets its work done, and whether it should be given more."""

from collections import deque
from collections.abc import Callable

from common.engine.batch import EngineLoad

SAMPLES = 512  # steps whose times are remembered
SLOW = 10  # times the slowest percentile of steps is no step any more


class Health:
    """Watches the step loop from outside of it; lives on one event loop.

    Stuck is who has sequences running and has finished no step for `patience_s`, or ten times the 99th percentile of
    its steps where that is longer. Idle is healthy, and so is who waits for blocks that others hold.
    """

    def __init__(self, clock: Callable[[], float], patience_s: float) -> None:
        self.stuck = False
        self.draining = False
        self.dead = False  # the step loop has ended
        self._clock = clock
        self._patience_s = patience_s
        self._times: deque[float] = deque(maxlen=SAMPLES)
        self._steps = -1
        self._since = clock()  # when a step was last finished, or none was due

    def on_step(self, step_s: float) -> None:
        """A step has taken so long."""
        self._times.append(step_s)

    @property
    def limit_s(self) -> float:
        """How long a step may take."""
        times = sorted(self._times)
        slowest = times[min(len(times) - 1, len(times) * 99 // 100)] if times else 0.0
        return max(self._patience_s, SLOW * slowest)

    def look(self, load: EngineLoad) -> bool:
        """Judges by the load as it is now, to be called every heartbeat; True when `stuck` has changed."""
        before, now = self.stuck, self._clock()
        if not load.running or load.steps != self._steps:
            self._steps, self._since = load.steps, now
        self.stuck = now - self._since > self.limit_s
        return self.stuck != before

    def live(self) -> tuple[bool, str]:
        """Whether the process is worth keeping, and if not, why."""
        if self.dead:
            return False, "the step loop has ended"
        return not self.stuck, "no step gets done" if self.stuck else "ok"

    def ready(self) -> tuple[bool, str]:
        """Whether it should be given work, and if not, why."""
        if self.draining:
            return False, "draining"
        return self.live()
