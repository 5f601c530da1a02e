"""Tools that end things at an exact point: a stream at a token, a forward pass, a coroutine at one of its awaits."""

import asyncio
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from common.engine.batch import StepOutput


@contextmanager
def cut_before(service: Any, *indexes: int) -> Iterator[list[int]]:
    """The router's stream to a worker breaks right before a token with such a number goes out, once for each.

    Yields those that are still to come.
    """
    pending, broken = sorted(indexes), set()
    engine, loop = service.engine, asyncio.get_running_loop()
    real = engine.step

    def cut(output: StepOutput) -> None:
        for token in output.tokens:
            attempt = service._attempts.get(token.sequence.key)
            if pending and token.index >= pending[0] and attempt is not None and attempt.session not in broken:
                del pending[0]
                broken.add(attempt.session)
                attempt.session.outgoing.put_nowait(None)
                for task in attempt.session.tasks:
                    task.cancel()

    def step(wait_s: float) -> StepOutput | None:
        output = real(wait_s)
        if output is not None:
            loop.call_soon_threadsafe(cut, output)  # ahead of its delivery
        return output

    engine.step = step
    try:
        yield pending
    finally:
        del engine.step


@contextmanager
def fails_at(service: Any, step: int) -> Iterator[Callable[[], int]]:
    """Forward pass number `step` fails; what it yields tells how many there were."""
    runner, count = service.engine._runner, 0
    forward = runner.forward

    def failing(batch: Any) -> Any:
        nonlocal count
        count += 1
        if count == step:
            raise RuntimeError("a kernel failed")
        return forward(batch)

    runner.forward = failing
    try:
        yield lambda: count
    finally:
        runner.forward = forward


class Awaits:
    """Counts the suspensions of coroutines; at number `at` it calls `cancel`.

    `when` says how: "suspended"; "ready", in the turn in which what it waits for comes; or "twice", at `at` and
    at the suspension after it.
    """

    def __init__(self, at: int, when: str, cancel: Callable[[], object]) -> None:
        self.count = 0
        self._at = (at, at + 1) if when == "twice" else (at,)
        self._ready = when == "ready"
        self._cancel = cancel

    @property
    def reached(self) -> bool:
        return self.count >= self._at[0]

    async def watch(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Runs it; several may be watched, one after the other or side by side."""
        return await _Watched(coroutine, self._suspended)

    def _suspended(self, future: asyncio.Future[Any] | None) -> None:
        self.count += 1
        if self.count not in self._at:
            return
        if self._ready and future is not None:
            future.add_done_callback(lambda _: self._cancel())  # before the task's own callback
        else:
            asyncio.get_running_loop().call_soon(self._cancel)


class _Watched:
    def __init__(
        self, coroutine: Coroutine[Any, Any, Any], suspended: Callable[[asyncio.Future[Any] | None], None]
    ) -> None:
        self._coroutine = coroutine
        self._suspended = suspended

    def __await__(self) -> Generator[Any, None, Any]:
        error: BaseException | None = None
        while True:
            try:
                future = self._coroutine.send(None) if error is None else self._coroutine.throw(error)
            except StopIteration as stop:
                return stop.value
            self._suspended(future)
            error = None
            try:
                yield future
            except BaseException as thrown:
                error = thrown
