"""How much memory there is, how much this process has, and how much of it a KV pool should take."""

from dataclasses import dataclass
from pathlib import Path

from common.block_hash import BLOCK_SIZE
from common.control_groups import ControlGroups
from common.errors import ConfigError

PROCESS_BYTES = 500 * 2**20  # interpreter, torch and the rest of a worker, apart from weights and pool


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What decides a pool's size when nobody names one; bytes."""

    limit: int  # of this host, or of the control group
    available: int  # of it, now
    utilization: float  # share of the limit that all workers here may use together
    workers: int  # on this host, this one included
    weights: int  # shared by the workers where they are mapped
    shared_weights: bool
    working: int  # what the largest step takes beside them

    @classmethod
    def here(
        cls, utilization: float, workers: int, *, weights: int, shared_weights: bool, working: int
    ) -> "MemoryPlan":
        """For this host, or this process's control group, as it is now."""
        return cls(memory_limit(), available_memory(), utilization, workers, weights, shared_weights, working)

    def pool_bytes(self) -> int:
        """An equal part of what weights and working memory leave; may be negative."""
        weights = self.weights if self.shared_weights else self.weights * self.workers
        budget = min(int(self.limit * self.utilization), self.available) - weights
        return budget // self.workers - self.working - PROCESS_BYTES


def choose_num_blocks(size: int, *, block_bytes: int, longest: int, field: str) -> int:
    """Blocks that `size` bytes hold; `longest` are what one sequence of max_model_len takes.

    Raises ConfigError with the length that would fit.
    """
    blocks = max(0, size) // block_bytes
    if blocks < longest:
        raise ConfigError(
            f"the KV pool would have {max(0, size) / 2**20:.0f} MiB, but one sequence of max_model_len takes "
            f"{longest * block_bytes / 2**20:.0f} MiB; --max-model-len {blocks * BLOCK_SIZE} would fit",
            field=field,
        )
    return blocks


def memory_limit(groups: ControlGroups | None = None) -> int:
    """Bytes of this machine, or of the tightest control group that this process is in."""
    machine = _status("/proc/meminfo", "MemTotal")
    return min(machine, (groups or ControlGroups()).memory_limit() or machine)


def available_memory(groups: ControlGroups | None = None) -> int:
    """Bytes that this process can still take: the machine's, or its control group's where that is less."""
    machine, left = _status("/proc/meminfo", "MemAvailable"), (groups or ControlGroups()).memory_left()
    return machine if left is None else min(machine, left)


def proportional_bytes() -> int:
    """This process's memory, pages that it shares divided by those who share them (PSS)."""
    return _status("/proc/self/smaps_rollup", "Pss")


def resident_bytes() -> int:
    return _status("/proc/self/status", "VmRSS")


def peak_resident_bytes() -> int:
    """The most that was resident since reset_peak(), or since the start where that does nothing."""
    return _status("/proc/self/status", "VmHWM")


def reset_peak() -> None:
    """Starts the measuring of peak_resident_bytes() anew, where the kernel allows it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # the peak then is the whole process's, and the estimate generous


def _status(path: str, name: str) -> int:
    """A value in kB of one of the kernel's status files, as bytes; 0 where it has none."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)
