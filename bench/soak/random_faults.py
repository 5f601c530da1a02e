"""Random faults of a local cluster's processes: killed, frozen or asked to stop, every few seconds."""

import asyncio
import random
import signal
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from enum import StrEnum

from bench.report import note
from cluster.local_cluster import Cluster
from common.deadlines import Deadlines

LOOK_S = 0.05


class Fault(StrEnum):
    KILL = "kill"
    DRAIN = "drain"
    BLINK = "freeze, less than suspect"
    FREEZE = "freeze, more than dead"
    REDIS_KILL = "redis kill"
    REDIS_FREEZE = "redis freeze"


WEIGHTS = {Fault.KILL: 5, Fault.DRAIN: 4, Fault.BLINK: 3, Fault.FREEZE: 3, Fault.REDIS_KILL: 1, Fault.REDIS_FREEZE: 1}
ON_REDIS = (Fault.REDIS_KILL, Fault.REDIS_FREEZE)
SIGNALS = {Fault.KILL: signal.SIGKILL, Fault.REDIS_KILL: signal.SIGKILL, Fault.DRAIN: signal.SIGTERM}  # others: freeze


class RandomFaults:
    """Strikes processes that a cluster starts again. Where a role has several workers, one of them is always well."""

    def __init__(
        self,
        cluster: Cluster,
        is_well: Callable[[str], Awaitable[bool]],
        deadlines: Deadlines,
        numbers: random.Random,
        every_s: float,
    ) -> None:
        """`is_well` says whether a process serves; pauses are random, `every_s` on average."""
        self.counts: Counter[str] = Counter()
        self.recovery_s: dict[str, list[float]] = defaultdict(list)  # from the blow to being well again
        self.bad_drains: list[str] = []  # how those ended that were asked to and did not do it well
        self._cluster = cluster
        self._is_well = is_well
        self._numbers = numbers
        self._every_s = every_s
        self._frozen_s = {
            Fault.BLINK: 0.5 * deadlines.suspect_s,
            Fault.FREEZE: 1.5 * deadlines.dead_s,
            Fault.REDIS_FREEZE: 1.5 * deadlines.dead_s,
        }
        self._struck: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Until cancelled; what was struck by then still recovers, see `settled`."""
        while True:
            await asyncio.sleep(self._every_s * self._numbers.uniform(0.5, 1.5))
            fault = self._numbers.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            victims = self.victims(fault)
            if victims:
                victim = self._numbers.choice(victims)
                self.counts[fault] += 1
                self._struck[victim] = asyncio.create_task(self._strike(fault, victim))

    @property
    def ended(self) -> int:
        """Processes that have ended, or will, because of this."""
        return sum(self.counts[fault] for fault in SIGNALS)

    def victims(self, fault: Fault) -> list[str]:
        """Who may be struck now."""
        struck = {name for name, task in self._struck.items() if not task.done()}
        if fault in ON_REDIS:
            return [name for name in ("redis",) if name in self._cluster.children and name not in struck]
        found = []
        for role in ("prefill", "decode"):
            workers = [name for name in self._cluster.children if name.startswith(role)]
            well = [name for name in workers if name not in struck]
            if len(well) > 1 or len(workers) == 1:
                found += well
        return found

    async def settled(self, timeout_s: float) -> list[str]:
        """Waits until all that was struck is well; the names of those that are not after so long."""
        late = {name for name, task in self._struck.items() if not task.done()}
        if late:
            await asyncio.wait([self._struck[name] for name in late], timeout=timeout_s)
        for task in self._struck.values():
            if task.done():
                task.result()
        return [name for name in late if not self._struck[name].done()]

    async def _strike(self, fault: Fault, victim: str) -> None:
        clock = asyncio.get_running_loop().time
        child, began = self._cluster.children[victim], clock()
        note(f"{fault}: {victim}")
        if (number := SIGNALS.get(fault)) is not None:
            child.signal(number)
            while self._cluster.children[victim] is child:
                await asyncio.sleep(LOOK_S)
            if fault is Fault.DRAIN and child.exited.result():
                self.bad_drains.append(child.obituary())
        else:
            child.signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(self._frozen_s[fault])
            finally:
                child.signal(signal.SIGCONT)
        while not await self._is_well(victim):
            await asyncio.sleep(LOOK_S)
        self.recovery_s[fault].append(clock() - began)
