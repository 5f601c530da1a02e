"""The processes of a cluster on one machine: started stage by stage, watched, stopped in reverse."""

import asyncio
import signal
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Self

from cluster.children import Child, ChildSpec, Console
from common.errors import StartupError, Unavailable

STEADY_S = 60.0  # after as long a life the next restart is the first again


class Cluster:
    """Children in stages: each stage starts when the one before it is ready, and stops before it."""

    def __init__(
        self,
        stages: Sequence[Sequence[ChildSpec]],
        console: Console,
        *,
        startup_s: float,
        grace_s: float,
        restart_backoff_s: tuple[float, float] | None = None,
    ) -> None:
        """`grace_s` is each stage's; `restart_backoff_s` is the first and the longest delay, None for no restarts."""
        self.children: dict[str, Child] = {}
        self.unclean: list[str] = []  # what did not end well when asked to
        self._stages = stages
        self._console = console
        self._startup_s = startup_s
        self._grace_s = grace_s
        self._backoff_s = restart_backoff_s
        self._watchers: list[asyncio.Task[None]] = []
        self._down: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def address(self, name: str) -> str:
        return self.children[name].ready.result().address

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            self._console.muted = True
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def run(self) -> None:
        """Until nobody reads the console; or until an essential process has ended: then raises Unavailable."""
        gone = asyncio.create_task(self._console.gone.wait())
        try:
            waits: list[asyncio.Future[Any]] = [gone, self._down]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
        if self._down.done():
            raise Unavailable(self._down.result())

    async def stop(self) -> None:
        """Ends all, the last stage first; what outlives its grace, or a cancellation of this, is killed."""
        for watcher in self._watchers:
            watcher.cancel()
        stopped: list[Child] = []
        try:
            if self._watchers:
                await asyncio.wait(self._watchers)
            stopped = [child for child in self._living(*self.children) if child.ready.done()]
            for stage in reversed(self._stages):
                living = self._living(*(spec.name for spec in stage))
                for child in living:
                    child.signal(signal.SIGTERM)
                await _exits(living, self._grace_s)
                self._kill(living)
        finally:
            everyone = self._living(*self.children)
            self._kill(everyone)
            await _exits(everyone, self._grace_s)
        self.unclean += [child.obituary() for child in stopped if child.alive or child.exited.result()]

    def _living(self, *names: str) -> list[Child]:
        return [child for name in names if (child := self.children.get(name)) is not None and child.alive]

    def _kill(self, children: Sequence[Child]) -> None:
        for child in children:
            if child.alive:
                child.signal(signal.SIGKILL)

    async def _start(self) -> None:
        try:
            async with asyncio.timeout(self._startup_s):
                for stage in self._stages:
                    await self._start_stage(stage)
        except TimeoutError:
            late = ", ".join(child.spec.name for child in self.children.values() if not child.ready.done())
            raise StartupError(f"not ready after {self._startup_s:g} s: {late}") from None
        self._watchers = [asyncio.create_task(self._watch(child)) for child in self.children.values()]

    async def _start_stage(self, stage: Sequence[ChildSpec]) -> None:
        self._console.note(f"starting {', '.join(spec.name for spec in stage)}")
        pending = [await self._spawn(spec) for spec in stage]
        while pending:
            everyone = self.children.values()
            waits: list[asyncio.Future[Any]] = [
                *(child.ready for child in pending),
                *(child.exited for child in everyone),
            ]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for child in everyone:
                if not child.alive:
                    raise StartupError(child.failure())
            for child in [child for child in pending if child.ready.done()]:
                pending.remove(child)
                self._announce(child)

    async def _spawn(self, spec: ChildSpec) -> Child:
        child = Child(spec, self._console)
        await child.spawn()
        self.children[spec.name] = child
        return child

    def _announce(self, child: Child) -> None:
        self._console.say(f"{child.spec.name:<10} pid {child.pid:<8} {child.ready.result().address}")

    async def _watch(self, child: Child) -> None:
        """Reports the child's end and, where restarts are wanted, starts it again."""
        loop = asyncio.get_running_loop()
        deaths, born = 0, loop.time()
        while True:
            await asyncio.wait([child.exited])
            if self._backoff_s is None:
                if child.spec.essential and not self._down.done():
                    self._down.set_result(child.obituary())
                else:
                    self._console.say(child.obituary())
                return
            deaths = 1 if loop.time() - born > STEADY_S else deaths + 1
            first, longest = self._backoff_s
            delay = min(first * 2 ** (deaths - 1), longest)
            self._console.say(f"{child.obituary()}; starts again in {delay:g} s")
            await asyncio.sleep(delay)
            born = loop.time()
            try:
                child = await self._spawn(child.spec)
            except StartupError as error:
                self._console.say(error.message)
                continue  # as one more death
            waits: list[asyncio.Future[Any]] = [child.ready, child.exited]
            await asyncio.wait(waits, timeout=self._startup_s, return_when=asyncio.FIRST_COMPLETED)
            if child.ready.done():
                self._announce(child)
            elif child.alive:
                self._console.say(f"{child.spec.name} (pid {child.pid}) is not ready after {self._startup_s:g} s")
                child.signal(signal.SIGKILL)


async def _exits(children: Sequence[Child], timeout_s: float) -> None:
    if children:
        await asyncio.wait([child.exited for child in children], timeout=timeout_s)


def run_until_signal(main: Coroutine[Any, Any, int]) -> int:
    """Runs main in an event loop; SIGINT, SIGTERM or SIGHUP cancels it, and again what it does then.

    Returns main's exit status, or 128 + the signal when main did not survive the cancellation.
    """
    received: list[int] = []

    async def interruptible() -> int:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()

        def interrupt(number: int) -> None:
            received.append(number)
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, interrupt, number)
        return await main

    try:
        return asyncio.run(interruptible())
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[0]
