"""The thread that steps the engine."""

import threading
from collections.abc import Callable

from common.engine.batch import StepOutput
from common.engine.engine import Engine

IDLE_WAIT_S = 0.5


class EngineLoop:
    """Steps the engine while it has work; hands each output over in the loop's thread.

    `on_output` must only pass it on. `on_death` gets what ended the thread against its will: the
    engine's state can't be trusted afterwards, so the process should end.
    """

    def __init__(
        self, engine: Engine, on_output: Callable[[StepOutput], object], on_death: Callable[[BaseException], object]
    ) -> None:
        self._engine = engine
        self._on_output = on_output
        self._on_death = on_death
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Ends after the current step; False if that takes longer than timeout_s."""
        self._stopping.set()
        self._engine.wake()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                output = self._engine.step(IDLE_WAIT_S)
                if output is not None:
                    self._on_output(output)
        except BaseException as error:
            self._on_death(error)
