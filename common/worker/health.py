"""Whether a worker gets its work done, and whether it should be given more."""

from collections import deque
from collections.abc import Callable

from common.engine.batch import EngineLoad
from common.rpc.pb import types_pb2

SAMPLES = 512  # steps whose times are remembered
SLOW = 10  # times the slowest percentile of steps is no step any more
MANY = 64  # tokens in a step that tell what a prompt's token costs
NEWEST = 0.1  # weight of the newest step in an average


class Health:
    """Watches the step loop from outside of it; lives on one event loop.

    Stuck is who has sequences running and has finished no step for `patience_s`, or ten times the 99th percentile of
    its steps where that is longer. Idle is healthy, and so is who waits for blocks that others hold.
    """

    def __init__(self, clock: Callable[[], float], patience_s: float, token_s: float = 0.0) -> None:
        """`token_s`: what a token took in the warm-up."""
        self.stuck = False
        self.draining = False
        self.dead = False  # the step loop has ended
        self.token_s = token_s  # of a prompt, in a step of many tokens; 0: not known
        self.step_s = 0.0  # of a step of few tokens
        self._clock = clock
        self._patience_s = patience_s
        self._times: deque[float] = deque(maxlen=SAMPLES)
        self._steps = -1
        self._since = clock()  # when a step was last finished, or none was due

    def on_step(self, step_s: float, num_tokens: int) -> None:
        """A step of so many tokens has taken so long."""
        self._times.append(step_s)
        if num_tokens >= MANY:
            self.token_s = _moved(self.token_s, step_s / num_tokens)
        elif num_tokens:
            self.step_s = _moved(self.step_s, step_s)

    @property
    def limit_s(self) -> float:
        """How long a step may take."""
        times = sorted(self._times)
        slowest = times[min(len(times) - 1, len(times) * 99 // 100)] if times else 0.0
        return max(self._patience_s, SLOW * slowest)

    def look(self, load: EngineLoad) -> bool:
        """Judges by the load as it is now, to be called every heartbeat; True when `stuck` has changed."""
        before, now = self.stuck, self._clock()
        if not load.running or load.blocked or load.steps != self._steps:
            self._steps, self._since = load.steps, now
        self.stuck = now - self._since > self.limit_s
        return self.stuck != before

    def tell(self, load: types_pb2.Load) -> None:
        """Adds what routers should know to a message."""
        load.draining, load.stuck = self.draining, self.stuck
        load.token_s, load.step_s = self.token_s, self.step_s

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


def _moved(average: float, value: float) -> float:
    return average + NEWEST * (value - average) if average else value
