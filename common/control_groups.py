"""What control groups leave of a machine, in versions 1 and 2: containers have their limits there."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOUNT = "sys/fs/cgroup"


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """Those of this process. In a container its own path may be the host's: the mounted root is asked, too."""

    root: Path = Path("/")  # of the file system

    def memory_limit(self) -> int | None:
        """Bytes of the tightest group; None: no limit is known."""
        return min((limit for limit, _, _ in self._memory()), default=None)

    def memory_left(self) -> int | None:
        """Bytes that this process can still take; file pages that are not in use can be had back."""
        return min((max(0, limit - used + unused) for limit, used, unused in self._memory()), default=None)

    def cores(self) -> float | None:
        """Cores' worth of time in each period; None: all there is."""
        quotas = []
        for group in self._groups(""):
            quota, _, period = _read(group / "cpu.max").partition(" ")
            quotas.append((quota, period))
        for group in self._groups("cpu"):
            quotas.append((_read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")))
        return min((int(q) / int(p) for q, p in quotas if q.isdecimal() and p.isdecimal() and int(p)), default=None)

    def _memory(self) -> Iterator[tuple[int, int, int]]:
        """Limit, bytes in use, and how many of these are file pages that are not in use; of each limited group."""
        names = {
            "": ("memory.max", "memory.current", "inactive_file"),
            "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        }
        for controller, (limit, used, unused) in names.items():
            for group in self._groups(controller):
                most, now = _read(group / limit), _read(group / used)
                if most.isdecimal():
                    stat = dict(line.split(" ", 1) for line in _read(group / "memory.stat").splitlines())
                    yield int(most), int(now or 0), int(stat.get(unused, 0))

    def _groups(self, controller: str) -> Iterator[Path]:
        """From this process's own up to the mounted root; controller "" is version 2."""
        for line in _read(self.root / "proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if controller not in controllers.split(","):
                continue
            for mount in (self.root / MOUNT / (controller or "unified"), self.root / MOUNT / controllers):
                group = mount / path.lstrip("/")
                for directory in (group, *group.parents):
                    if directory.is_relative_to(mount):
                        yield directory


def usable_cores(groups: ControlGroups | None = None) -> int:
    """Cores that this process may run on, no more than its quota pays for: one thread too many stops all of them."""
    quota = (groups or ControlGroups()).cores()
    cores = len(os.sched_getaffinity(0))
    return cores if quota is None else max(1, min(cores, int(quota)))


def _read(path: Path) -> str:
    """A small file's text; empty where it can't be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
