"""Whose results are equal bit for bit: a name for what rounds, beside the model."""

import platform
from collections.abc import Iterable
from pathlib import Path

import torch


def numerics(ops: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Of this machine with this table of operations: workers with equal names round alike."""
    kind = torch.backends.cpu.get_cpu_capability()
    return "/".join([ops, f"torch-{torch.__version__}", kind, _cpu(cpuinfo)])


def _cpu(cpuinfo: Path) -> str:
    """Its model, as the kernel calls it; the architecture where it says nothing, as in some containers."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for keys in (("model name", "cpu family", "model"), ("CPU implementer", "CPU part", "CPU variant")):
        values = [_value(lines, key) for key in keys]
        if all(values):
            return " ".join(values)
    return platform.machine()


def _value(lines: Iterable[str], name: str) -> str:
    found = (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name)
    return next(found, "")
