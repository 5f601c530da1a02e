"""CPU time of processes and of the machine, from /proc; seconds, in steps of a clock tick (mostly 10 ms)."""

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessTime:
    """Of one process. Its engine: the threads beside the first that go by the process's own name.

    In ours the first thread runs the event loop, and gRPC gives its own threads other names.
    """

    total_s: float
    engine_s: float

    @property
    def wire_s(self) -> float:
        """All but the engine."""
        return self.total_s - self.engine_s

    def __sub__(self, earlier: "ProcessTime") -> "ProcessTime":
        return ProcessTime(self.total_s - earlier.total_s, self.engine_s - earlier.engine_s)


def process_time(pid: int, proc: Path = PROC) -> ProcessTime:
    """User and system time; children are not counted. Raises FileNotFoundError for a process that is gone."""
    process = proc / str(pid)
    name, engine_s = (process / "comm").read_text(encoding="utf-8"), 0.0
    for thread in (process / "task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            if thread.name != str(pid) and (thread / "comm").read_text(encoding="utf-8") == name:
                engine_s += _stat_s(thread / "stat")
    return ProcessTime(_stat_s(process / "stat"), engine_s)


def _stat_s(path: Path) -> float:
    """utime + stime of a stat file; the name in it may have spaces (proc(5))."""
    fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def busy_s(cpus: Collection[int], proc: Path = PROC) -> float:
    """Time that these CPUs were not idle, for whomever; what the hypervisor took included."""
    total = 0.0
    for line in (proc / "stat").read_text(encoding="utf-8").splitlines():
        name, *times = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cpus:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, times[:8])
            total += (user + nice + system + irq + softirq + steal) * TICK_S
    return total


class Disturbance:
    """How many cores others took, on average, of those that this process is bound to."""

    def __init__(self, clock_s: float) -> None:
        self._cpus = os.sched_getaffinity(0)
        self._began = (clock_s, busy_s(self._cpus), process_time(os.getpid()).total_s)

    def cores(self, clock_s: float) -> float:
        """Since it was made; this process's children count as others."""
        began, busy, own = self._began
        others = busy_s(self._cpus) - busy - (process_time(os.getpid()).total_s - own)
        return round(max(0.0, others / max(clock_s - began, TICK_S)), 3)
