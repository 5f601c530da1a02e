"""An event loop with virtual time, whose nodes can be stopped and killed.

A node stands for a process. Its tasks, their wake-ups and their timers carry it in their context, so the loop knows
of every callback whose it is: those of a stopped node are parked and run in order when it goes on.
"""

import asyncio
import contextvars
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

NODE: contextvars.ContextVar["Node | None"] = contextvars.ContextVar("node", default=None)
TICK_S = 1e-6  # that a timer takes at least: else who waits for a rest below the clock's precision waits for ever
MAX_CALLBACKS = 40_000  # of one world; more is a livelock


class Stuck(Exception):
    """Nothing will ever happen again, or things happen for ever."""


class Node:
    """One life of one process."""

    def __init__(self, loop: "SimLoop", name: str) -> None:
        self.name = name
        self.stopped = False
        self.dead = False
        self.freezes = 0
        self.parked: deque[asyncio.Handle] = deque()
        self.context = contextvars.copy_context()
        self.context.run(NODE.set, self)
        self._loop = loop
        loop.nodes.append(self)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self._loop.create_task(coroutine, context=self.context.copy())

    def freeze(self) -> None:
        """SIGSTOP."""
        self.stopped = True
        self.freezes += 1

    def kill(self) -> None:
        """SIGKILL. What was to run is kept for the end of the world, where everything is cancelled."""
        self.stopped = self.dead = True
        self.freezes += 1

    def thaw(self, *, timers_last: bool = False) -> None:
        """SIGCONT. timers_last: a loop that finds both looks at its sockets before its timers."""
        self.stopped = False
        self.freezes += 1
        if timers_last:
            handles = sorted(self.parked, key=lambda handle: isinstance(handle, asyncio.TimerHandle))
        else:
            handles = list(self.parked)
        self.parked.clear()
        self._loop._ready.extendleft(reversed(handles))


class SimLoop(asyncio.BaseEventLoop):
    """Jumps to the next timer when nothing is ready."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.callbacks = 0
        self._now = 0.0
        self._numbers = itertools.count()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._outside = contextvars.Context()

    def time(self) -> float:
        return self._now

    def call_at(self, when, callback, *args, context=None):  # type: ignore[no-untyped-def]
        when = max(when, self._now + TICK_S)
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def call_later(self, delay, callback, *args, context=None):  # type: ignore[no-untyped-def]
        return self.call_at(self._now + delay, callback, *args, context=context)

    def after(self, delay: float, callback: Callable[..., object], *args: Any) -> None:
        """Calls outside of all nodes: the network's, and fate's."""
        self.call_at(self._now + delay, callback, *args, context=self._outside)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task outside of all nodes."""
        return self.create_task(coroutine, context=self._outside.copy())

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is skipped when its time comes."""

    def call_soon_threadsafe(self, callback, *args, context=None):  # type: ignore[no-untyped-def]
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor, func, *args):  # type: ignore[no-untyped-def]
        """In the caller's node, at once but not within the call."""
        future = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_soon(run)
        return future

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers
        if not ready and not self._stopping:
            while timers and timers[0][2]._cancelled:
                heapq.heappop(timers)
            if not timers:
                raise Stuck("nothing is ready and no timer is set")
            self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            handle = heapq.heappop(timers)[2]
            if not handle._cancelled:
                ready.append(handle)
        count = len(ready)
        self.callbacks += count
        if self.callbacks > MAX_CALLBACKS:
            raise Stuck(f"{self.callbacks} callbacks and no end")
        for _ in range(count):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            node = handle._context.get(NODE)
            if node is not None and node.stopped:
                node.parked.append(handle)
            else:
                handle._run()

    def end(self) -> None:
        """Cancels all tasks, dead nodes' too, runs until all have ended, and closes the loop."""
        self.callbacks = 0
        self._stopping = False
        for node in self.nodes:
            node.thaw()
        try:
            with suppress(RuntimeError):  # the last callback of who was waited for stops this once
                self.run_until_complete(asyncio.sleep(0))
            while tasks := sorted(asyncio.all_tasks(self), key=lambda task: int(task.get_name().partition("-")[2])):
                for task in tasks:
                    task.cancel()
                self.run_until_complete(asyncio.wait(tasks, timeout=1.0))
            self.run_until_complete(self.shutdown_asyncgens())
        finally:
            self.close()
