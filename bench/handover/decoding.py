"""An engine that decodes a batch for ever, in a thread as on a worker, for what has to be measured beside it."""

import asyncio
import time

from bench.engines import admit
from common.deadlines import Deadlines
from common.engine.batch import StepOutput
from common.engine.build import BuiltEngine
from common.engine.engine import EngineLoop
from common.errors import EngineFailure
from decode_svc.admission import Admission

WAIT_S = 60.0  # for any one thing
BACKGROUND_TOKENS = 256  # that each sequence writes before another takes its place
PREFIX = "running"  # of the keys of these sequences


class BackgroundDecoding:
    """The batch, and for newcomers when their first step began. Lives on one event loop."""

    def __init__(self, built: BuiltEngine, batch: int, context: int) -> None:
        self.engine = built.engine
        self.admission = Admission(built.engine)
        self.step_ms: list[float] = []
        self._vocab_size, self._batch, self._context = built.model.vocab_size, batch, context
        self._running = 0
        self._expected: dict[str, asyncio.Future[float]] = {}
        self._events = asyncio.get_running_loop()
        self._loop = EngineLoop(self.engine, [self._on_step], self._on_death, idle_s=Deadlines().heartbeat_s)

    def start(self) -> None:
        self._refill()
        self._loop.start()

    async def stop(self) -> None:
        await asyncio.to_thread(self._loop.stop, WAIT_S)

    def expect(self, key: str) -> asyncio.Future[float]:
        """Has, once it is known, when the first step with this sequence began; time.perf_counter's."""
        return self._expected.setdefault(key, self._events.create_future())

    def _on_step(self, output: StepOutput) -> None:
        self._events.call_soon_threadsafe(self._take, output, time.perf_counter() - output.step_s)

    def _on_death(self, error: BaseException) -> None:
        self._events.call_soon_threadsafe(self._fail, error)

    def _take(self, output: StepOutput, began: float) -> None:
        if output.failed:
            self._fail(output.failed[0][1])
            return
        self.step_ms.append(output.step_s * 1e3)
        for token in output.tokens:
            expected = self._expected.pop(token.sequence.key, None)
            if expected is not None:
                expected.set_result(began)
            if token.finish_reason is not None and token.sequence.key.startswith(PREFIX):
                self._running -= 1
        if self._running == 0:
            self._refill()

    def _refill(self) -> None:
        if self._batch:
            self._running = len(admit(self.engine, self._batch, self._context, BACKGROUND_TOKENS, self._vocab_size))

    def _fail(self, error: BaseException) -> None:
        for expected in self._expected.values():
            expected.set_exception(EngineFailure(f"the step loop failed: {error}"))
        self._expected.clear()
